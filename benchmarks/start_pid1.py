"""How long a start through PID 1 takes, beside a bare `systemd-run` in the same system.

Usage: python benchmarks/start_pid1.py [--runs N] [--write] (root). Boots a systemd of its own with
the service installed; where that cannot be, it says why. From before the submission by the Python
API to the job's first instruction; the floor is the same program under `systemd-run`, which is told
to by a command where ours is told to over a connection.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import fsync_ms, interleaved, scratch
from benchmarks.report import Report, options
from benchmarks.start import DEADLINE_S, WARM_UP_RUNS, job_program
from gpusched_client import Client
from tests.support.box import booted_box, why_not
from tests.support.daemon import until
from tests.support.host import Host, request_of

RUNS = 20
USER = "alice"
PROGRAM = "/opt/gpusched-job"
OURS, FLOOR = "through PID 1, by the API", "systemd-run"
TIMES_AT_MOST = 2.0


@dataclass
class Starts:
    """Programs of the box that say when they ran."""

    host: Host
    client: Client
    count: int = 0

    def ours_ms(self) -> float:
        """A job of the service."""
        ids: list[int] = []

        def submit(said: str) -> None:
            request = request_of(USER, PROGRAM, said, output="/dev/null")
            ids.append(self.client.submit_many([request])[0].id)

        took_ms = self._ms(submit)
        self.client.wait(ids, timeout_s=DEADLINE_S)
        return took_ms

    def floor_ms(self) -> float:
        """A transient unit that PID 1 is asked for by hand."""
        words = ("systemd-run", "--quiet", "--collect", "--uid", USER, "--", PROGRAM)
        return self._ms(
            lambda said: subprocess.run(
                self.host.box.command(*words, said), check=True, capture_output=True
            )
        )

    def _ms(self, start: Callable[[str], object]) -> float:
        self.count += 1
        said = f"/home/{USER}/said{self.count}"
        before_ns = time.time_ns()
        start(said)
        found = self.host.box.disk(said)
        until(found.exists, "it has run", DEADLINE_S)
        return (int(found.read_text().split()[0]) - before_ns) / 1e6


def measure(report: Report, place: Path, runs: int) -> None:
    """Both in turns."""
    with booted_box() as box:
        host = Host(box).set_up(place)
        shutil.copy(job_program(place), box.disk(PROGRAM))
        with host.client(USER) as client:
            client.hello()  # who it is was told at the connection: from here on as root again
            os.seteuid(0)
            starts = Starts(host, client)
            measures = {
                "fsync of a new file": lambda: fsync_ms(box.disk("/var/lib")),
                FLOOR: starts.floor_ms,
                OURS: starts.ours_ms,
            }
            taken = interleaved(measures, runs, WARM_UP_RUNS)
    for name, values in taken.items():
        report.figure(name, "ms", values)
    report.note("the disk of that system lies in memory: what syncs cost is in start.py alone")
    ratios = [ours / floor for ours, floor in zip(taken[OURS], taken[FLOOR], strict=True)]
    report.figure(f"{OURS}: against {FLOOR}", "times", ratios, at_most=TIMES_AT_MOST)


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    asked = parser.parse_args()
    report = Report("start_pid1", "From before the submission to the job's first instruction.")
    reason = why_not()
    if reason is None:
        with scratch("pid1") as place:
            measure(report, place, asked.runs)
    else:
        report.note(f"not measured: {reason}")
    report.finish(write=asked.write)


if __name__ == "__main__":
    main()
