"""How long the commands take that people and workflows type, whatever lies behind.

Usage: python benchmarks/lists.py [--queued N,N,..] [--finished N] [--runs N] [--write]. `gq` with
short and long queues and with many finished jobs in the database, `gq --me`, and what a workflow
calls for each job: `gq --status ID`, `gsub --parsable`. Whole processes, in turns with the floor:
the same interpreter that imports click and msgpack, and nothing more. What counts is the ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.bulk import LIMITS, submit_all
from benchmarks.database import fill
from benchmarks.measure import IMPORTS, command_ms, interleaved, scratch
from benchmarks.private import Private, filled, private
from benchmarks.report import Report, options
from gpusched_client.submission.request import job_request

QUEUED, FINISHED, RUNS = (10, 1_000, 9_000), 20_000, 11
SCRIPT_BYTES = 200
ENDED_AGO_S = 86_400.0  # longer than `gq` shows
HOST = ("--simulate", "8x24G", "--no-exec")
FLOOR = "import click, msgpack"
LIST_AT_MOST, SHORT_AT_MOST = 1.5, 1.0  # times the floor


def queue_of(stack: ExitStack, place: Path, queued: int) -> Private:
    """A full host with so many jobs of ours waiting."""
    daemon = stack.enter_context(private(place, *HOST, config=LIMITS))
    filled(daemon, "20G", gpus=8)
    made = [job_request(["true", str(n)], cwd="/", output="/dev/null") for n in range(queued)]
    with daemon.client() as client:
        submit_all(client, made)
    return daemon


def behind(place: Path, finished: int) -> Path:
    """A place whose database has so many jobs that have ended."""
    state_dir = place / "state"
    state_dir.mkdir(parents=True, mode=0o700)
    fill(state_dir, finished, SCRIPT_BYTES, ENDED_AGO_S)
    return place


def measure(
    report: Report, stack: ExitStack, place: Path, queued: tuple[int, ...], finished: int, runs: int
) -> None:
    """All commands in turns."""
    daemons = {f"{n:,} queued": queue_of(stack, place / str(n), n) for n in queued}
    short, long = (daemons[f"{pick(queued):,} queued"] for pick in (min, max))
    old = queue_of(stack, behind(place / "old", finished), min(queued))
    calls: dict[str, Callable[[], float]] = {FLOOR: lambda: command_ms(IMPORTS)}
    for name, daemon in daemons.items():
        calls[f"gq, {name}"] = partial(typed_ms, daemon, "gq")
    calls[f"gq, {min(queued):,} queued, {finished:,} finished"] = partial(typed_ms, old, "gq")
    calls[f"gq --me, {max(queued):,} queued"] = partial(typed_ms, long, "gq", "--me")
    calls["gq --status ID"] = partial(typed_ms, short, "gq", "--status", "1")
    submitted = ("gsub", "--parsable", "-o", "/dev/null", "true")
    calls["gsub --parsable"] = partial(typed_ms, short, *submitted)
    taken = interleaved(calls, runs)
    for name, values in taken.items():
        report.figure(name, "ms", values)
    for name, values in list(taken.items())[1:]:
        ratios = [value / floor for value, floor in zip(values, taken[FLOOR], strict=True)]
        most = SHORT_AT_MOST if name in ("gq --status ID", "gsub --parsable") else LIST_AT_MOST
        report.figure(f"{name}: against the import", "times", ratios, at_most=most)


def typed_ms(daemon: Private, name: str, *words: str) -> float:
    """One command, as a whole."""
    return command_ms([*daemon.command(name), *words], daemon.environment)


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--queued", default=",".join(map(str, QUEUED)), help="lengths, by commas")
    parser.add_argument("--finished", type=int, default=FINISHED)
    parser.add_argument("--runs", type=int, default=RUNS)
    asked = parser.parse_args()
    queued = tuple(map(int, asked.queued.split(",")))
    report = Report("lists", "Commands as whole processes, their output dropped.")
    with scratch("lists") as place, ExitStack() as stack:
        measure(report, stack, place, queued, asked.finished, asked.runs)
    report.finish(write=asked.write)


if __name__ == "__main__":
    main()
