"""What a long run leaves behind in the daemon and its forker: memory and descriptors.

Usage: python benchmarks/many_jobs.py [--jobs N] [--write]. `true` on 8 simulated GPUs, submitted in
parts so that some always wait. What is measured once a tenth has ended is compared with the end:
by then all caches, threads and connections exist.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import descendants, rss_mb, scratch
from benchmarks.private import Private, private
from benchmarks.report import Report, options
from gpusched_client import Client
from gpusched_client.submission.request import job_request
from gpusched_client.wire.submit_messages import JobRequest

JOBS, SLOTS, PART = 20_000, 8, 250
FORKER = b"--forker"
MARKS = (0.1, 0.5, 1.0)  # parts of the jobs after which it is measured
LEAK_MB = 1.0  # in 10,000 jobs
PART_DEADLINE_S = 300.0


@dataclass(frozen=True)
class Mark:
    """The two processes after so many jobs."""

    jobs: int
    daemon_mb: float
    forker_mb: float
    descriptors: int

    @classmethod
    def of(cls, jobs: int, daemon: int, forker: int) -> Mark:
        """As they are now."""
        count = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in (daemon, forker))
        return cls(jobs, rss_mb(daemon), rss_mb(forker), count)

    def growth_mb(self, before: Mark) -> float:
        """Of both, in 10,000 jobs."""
        grown_mb = self.daemon_mb + self.forker_mb - before.daemon_mb - before.forker_mb
        return 10_000 * grown_mb / (self.jobs - before.jobs)


def forker_of(daemon: Private) -> int:
    """The child that makes the supervisors."""
    for pid in descendants(daemon.pid):
        if FORKER in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return pid
    raise AssertionError("no forker")


def run_part(client: Client, request: JobRequest, waiting: list[int]) -> list[int]:
    """Submit a part, then wait for the one before; those that now wait."""
    submitted = [job.id for job in client.submit_many([request] * PART)]
    if waiting:
        ended = client.wait(waiting, timeout_s=PART_DEADLINE_S)
        assert all(job.exit_code == 0 for job in ended)
    return submitted


def measure(report: Report, daemon: Private, jobs: int) -> None:
    """All jobs, and the marks on the way."""
    marks: list[Mark] = []
    request = job_request(["true"], cwd="/", output="/dev/null", time_limit="1:00")
    began_s = time.monotonic()
    with daemon.client() as client:
        waiting = run_part(client, request, [])
        forker = forker_of(daemon)
        due = [int(jobs * mark) for mark in MARKS]
        for ended in range(PART, jobs + 1, PART):
            waiting = run_part(client, request, waiting)
            if due and ended >= due[0]:
                due.pop(0)
                marks.append(mark := Mark.of(ended, daemon.pid, forker))
                report.figure(f"the daemon after {ended:,} jobs, RSS", "MB", [mark.daemon_mb])
                report.figure(f"its forker after {ended:,} jobs, RSS", "MB", [mark.forker_mb])
                report.figure(f"descriptors after {ended:,} jobs", "of both", [mark.descriptors])
    first, last = marks[0], marks[-1]
    report.figure("jobs", "a second", [jobs / (time.monotonic() - began_s)])
    growth_mb = last.growth_mb(first)
    report.figure("memory grows in 10,000 jobs by", "MB", [growth_mb], at_most=LEAK_MB)
    grown = last.descriptors - first.descriptors
    report.figure("descriptors grow by", "of both", [grown], at_most=0)


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS)
    asked = parser.parse_args()
    words = f"{asked.jobs:,} times `true`, one daemon; descriptors and memory are to stay."
    report = Report("many_jobs", words)
    with scratch("many-jobs") as place, private(place, "--simulate", f"{SLOTS}x24G") as daemon:
        measure(report, daemon, asked.jobs)
    report.finish(write=asked.write)


if __name__ == "__main__":
    main()
