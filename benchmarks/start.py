"""How long a start takes: from submit to the job's first instruction, and of what it is made.

Usage: python benchmarks/start.py [--runs N] [--base REVISION] [--write]. By the Python API and by
`gsub` (through PID 1: start_pid1.py); beside it what fork and exec take, what an fsync of the same
directory takes, peers that are installed, and the same by an older revision of this clone. All in
turns in one run (needs gcc). The parts are the times of the files that a start writes; the kernel
gives those by its last tick, so each may look up to 4 ms earlier than it was.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import peers
from benchmarks.measure import (
    fork_exec_ms,
    fsync_ms,
    interleaved,
    percentile,
    scratch,
    timed_ms,
)
from benchmarks.private import Private, private
from benchmarks.report import ROOT, Report, options
from benchmarks.trees import BASE, NoTree, tree_of
from gpusched_client import Client
from tests.support.daemon import until

RUNS = 30
DEADLINE_S = 60.0
WARM_UP_RUNS = 2
RECORDS = ("spec", "claim", "started")
PARTS = {
    "reply": "the reply, when it is durable",
    "spec": "the job directory is made",
    "claim": "the supervisor's claim is written",
    "started": "its child's record is written, before the child may exec",
}
API, GSUB = "by the API", "by gsub"
AIMS_MS = {API: 10.0, GSUB: 45.0}
#: What the job does: it says when its first instruction was executed, by the clock that files
#: have, and when those were written that its start has left in the directory that it is told.
JOB = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
static long long ns(struct timespec at) { return at.tv_sec * 1000000000LL + at.tv_nsec; }
int main(int count, char **words) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    char text[4096], path[4096], *made = words[1];
    int length = sprintf(text, "%lld", ns(now));
    for (int word = 3; word < count; word++) {
        struct stat found;
        snprintf(path, sizeof path, "%s/%s.1/%s", words[2], getenv("GPUSCHED_JOB_ID"), words[word]);
        length += sprintf(text + length, " %lld", stat(path, &found) ? 0 : ns(found.st_mtim));
    }
    snprintf(path, sizeof path, "%s.new", made);
    FILE *file = fopen(path, "w");
    fputs(text, file);
    return fclose(file) || rename(path, made);
}
"""


def job_program(place: Path) -> Path:
    """JOB as a program."""
    program = place / "job"
    compiler = ["gcc", "-O2", "-static", "-x", "c", "-", "-o", str(program)]
    subprocess.run(compiler, input=JOB, text=True, check=True)
    return program


@dataclass
class Starts:
    """Jobs that say when they ran."""

    place: Path
    program: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def ms(self, submit: Callable[[list[str]], object], jobs: Path | None = None) -> list[float]:
        """From before the submission to the first instruction, and to each record below `jobs`."""
        said = self.place / f"said{next(self._numbers)}"
        words = [str(self.program), str(said), *([str(jobs), *RECORDS] if jobs else [])]
        before_ns = time.time_ns()
        submit(words)
        until(said.exists, "the job has run", DEADLINE_S)
        return [(int(at_ns) - before_ns) / 1e6 for at_ns in said.read_text().split()]


@dataclass
class Ours:
    """Starts on a private daemon, each on its own: the job before has ended."""

    daemon: Private
    client: Client
    starts: Starts
    parts: dict[str, list[float]] = field(default_factory=dict)

    def api_ms(self) -> float:
        """By `Client.submit`, over one connection; the parts are kept."""
        taken: list[float] = []

        def submit(words: list[str]) -> None:
            taken.append(timed_ms(lambda: self._last.append(self._submit(words))))

        self._last: list[int] = []
        first_ms, *records_ms = self.starts.ms(submit, self.daemon.state_dir / "jobs")
        self.client.wait(self._last, timeout_s=DEADLINE_S)
        for name, value in zip(("reply", *RECORDS), (*taken, *records_ms), strict=True):
            self.parts.setdefault(name, []).append(value)
        return first_ms

    def gsub_ms(self) -> float:
        """By `gsub`, the whole process."""
        printed: list[bytes] = []

        def submit(words: list[str]) -> None:
            gsub = [*self.daemon.command("gsub"), "--parsable", "-t", "1", "-o", "/dev/null"]
            printed.append(
                subprocess.check_output(
                    [*gsub, *words], env=self._environment, stderr=subprocess.DEVNULL
                )
            )

        first_ms = self.starts.ms(submit)[0]
        self.client.wait(int(printed[0]), timeout_s=DEADLINE_S)
        return first_ms

    @property
    def _environment(self) -> dict[str, str]:
        return os.environ | self.daemon.environment

    def _submit(self, words: list[str]) -> int:
        place = str(self.starts.place)
        return self.client.submit(words, cwd=place, output="/dev/null", time_limit="1:00").id


@contextmanager
def ours(place: Path, program: Path, tree: Path) -> Iterator[Ours]:
    """A daemon of that tree with a connection to it."""
    with private(place, "--simulate", "2x24G", tree=tree) as daemon, daemon.client() as client:
        client.hello()
        yield Ours(daemon, client, Starts(place, program))


def measure(report: Report, stack: ExitStack, place: Path, base: str, runs: int) -> None:
    """Everything in turns, then every figure."""
    program = job_program(place)
    now = stack.enter_context(ours(place / "now", program, ROOT))
    measures: dict[str, Callable[[], float]] = {
        "fork and exec of true": fork_exec_ms,
        "fsync of a new file": lambda: fsync_ms(place),
        API: now.api_ms,
        GSUB: now.gsub_ms,
    }
    try:
        tree = stack.enter_context(tree_of(base))
        before = stack.enter_context(ours(place / "base", program, tree))
        measures |= {f"{API}, {base}": before.api_ms, f"{GSUB}, {base}": before.gsub_ms}
    except NoTree as error:
        report.note(f"no comparison: {error}")
    starts = Starts(place, program)
    for start_peer in peers.ALL:
        peer = stack.enter_context(start_peer(place))
        if isinstance(peer, peers.Absent):
            report.note(peer.text)
        else:
            measures[peer.name] = partial(_peer_ms, starts, peer)
    taken = interleaved(measures, runs, WARM_UP_RUNS)
    for name, values in taken.items():
        report.figure(name, "ms", values, at_most=AIMS_MS.get(name))
    report.figure(f"{API}, 95th percentile", "ms", [percentile(taken[API], 95)], at_most=25)
    for name, values in now.parts.items():
        report.figure(f"by the API, until {PARTS[name]}", "ms", values[WARM_UP_RUNS:])


def _peer_ms(starts: Starts, peer: peers.Peer) -> float:
    return starts.ms(peer.submit)[0]


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--base", default=BASE, help="revision or directory to compare with")
    asked = parser.parse_args()
    report = Report("start", "From before the submission to the job's first instruction.")
    with scratch("start") as place, ExitStack() as stack:
        measure(report, stack, place, asked.base, asked.runs)
    report.finish(write=asked.write)


if __name__ == "__main__":
    main()
