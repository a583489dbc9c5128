"""How fast workloads are replayed, and whether each job starts when an independent scheduler says.

Usage: python benchmarks/replay.py [--runs N] [--base REVISION] [--write]. The workloads of
tests/data by `gpuschedd replay --order fcfs`, whole processes, with EASY and without backfill, in
turns with an older revision of this clone. The floor is reading the workload and nothing more.
"""

from __future__ import annotations

import csv
import gzip
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.measure import command_ms, interleaved, scratch, timed_ms
from benchmarks.report import ROOT, Report, options
from benchmarks.trees import BASE, NoTree, command, tree_of

DATA = ROOT / "tests" / "data"
RUNS = 5
FASTER_AT_LEAST = 3.0
READ = "import csv, gzip, sys; list(csv.DictReader(gzip.open(sys.argv[1], 'rt')))"


@dataclass(frozen=True)
class Case:
    """A workload on its host."""

    workload: str
    gpus: int
    jobs: int
    backfill: str

    @property
    def name(self) -> str:
        """For the report."""
        return f"{self.workload}, {self.backfill}"

    @property
    def path(self) -> Path:
        """The jobs."""
        return DATA / f"{self.workload}.csv.gz"

    def run(self, tree: Path, starts: Path) -> None:
        """One replay by that tree."""
        words = [*command(tree, "gpuschedd"), "replay", str(self.path), "--gpus", str(self.gpus)]
        words += ["--order", "fcfs", "--backfill", self.backfill, "--starts", str(starts)]
        given = os.environ | {"PYTHONPATH": str(tree)}
        subprocess.run(words, env=given, capture_output=True, check=True)

    def per_s(self, tree: Path, starts: Path) -> float:
        """Jobs a second of the whole process."""
        return 1e3 * self.jobs / timed_ms(lambda: self.run(tree, starts))

    def differences(self, starts: Path) -> int:
        """Jobs that did not start when the independent scheduler started them."""
        kind = {"off": "fcfs", "easy": "easy"}[self.backfill]
        with gzip.open(DATA / f"{self.workload}.{kind}.csv.gz", "rt") as expected:
            wanted = starts_in(csv.DictReader(expected))
        with starts.open() as found:
            got = starts_in(csv.DictReader(found))
        return sum(got.get(job) != at_s for job, at_s in wanted.items())


CASES = (
    Case("philly8", 8, 2_000, "easy"),
    Case("philly8", 8, 2_000, "off"),
    Case("rough64", 64, 4_000, "easy"),
    Case("rough64", 64, 4_000, "off"),
)


def starts_in(rows: csv.DictReader[str]) -> dict[str, float]:
    """When each job started."""
    return {row["job_id"]: float(row["start_s"]) for row in rows}


def measure(report: Report, stack: ExitStack, place: Path, base: str, runs: int) -> None:
    """Every case by every tree, in turns."""
    trees = {"": ROOT}
    try:
        trees[f", {base}"] = stack.enter_context(tree_of(base))
    except NoTree as error:
        report.note(f"no comparison: {error}")
    for case in CASES:
        measures: dict[str, Callable[[], float]] = {
            f"{case.name}: read only": partial(read_per_s, case)
        }
        for name, tree in trees.items():
            starts = place / ("before" if name else "starts")
            measures[f"{case.name}{name}"] = partial(case.per_s, tree, starts)
        taken = interleaved(measures, runs, warm_up_runs=0)
        for name, values in taken.items():
            report.figure(name, "jobs/s", values)
        if len(trees) > 1:
            now, before = (taken[f"{case.name}{name}"] for name in trees)
            faster = [new / old for new, old in zip(now, before, strict=True)]
            report.figure(f"{case.name}: times as fast", "times", faster, at_least=FASTER_AT_LEAST)
        differences = case.differences(place / "starts")
        report.figure(f"{case.name}: other starts", "jobs", [differences], at_most=0)


def read_per_s(case: Case) -> float:
    """Jobs a second of a process that only reads them."""
    return 1e3 * case.jobs / command_ms([sys.executable, "-c", READ, str(case.path)])


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--base", default=BASE, help="revision or directory to compare with")
    asked = parser.parse_args()
    report = Report("replay", "`gpuschedd replay --order fcfs`; rates of whole processes.")
    with scratch("replay") as place, ExitStack() as stack:
        measure(report, stack, place, asked.base, asked.runs)
    report.finish(write=asked.write)


if __name__ == "__main__":
    main()
