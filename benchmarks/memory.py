"""Memory: of a supervisor, and of a daemon with a long queue; and how long that one takes to start.

Usage: python benchmarks/memory.py [--queued N] [--runs N] [--write]. Supervisors by PSS, which
divides a shared page by those who share it; the floor is an interpreter that sleeps. The queue is
of ten users' worth of jobs, no two alike; a start counts from exec to the first answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from benchmarks.bulk import LIMITS, submit_all, wide
from benchmarks.measure import fsync_ms, pss_mb, rss_mb, scratch, timed_ms
from benchmarks.private import private
from benchmarks.report import Report, options
from gpusched_client.submission.request import job_request
from tests.support.daemon import until

QUEUED, RUNS, SUPERVISORS = 100_000, 5, 8
HOST = ("--simulate", "4x80G+4x24G", "--no-exec")


def measure_supervisors(report: Report, stack: ExitStack, place: Path) -> None:
    """Eight at once, each with a job that sleeps."""
    daemon = stack.enter_context(private(place, "--simulate", f"{SUPERVISORS}x24G"))
    sleeper = stack.enter_context(subprocess.Popen([sys.executable, "-ISc", "input()"], stdin=-1))
    stack.callback(sleeper.kill)
    with daemon.client() as client:
        sleep = job_request(["sleep", "86400"], cwd="/", output="/dev/null")
        ids = [job.id for job in client.submit_many([sleep] * SUPERVISORS)]

        def all_run() -> bool:
            return all(job.started_at_s is not None for job in client.jobs(ids=ids).jobs)

        until(all_run, "all jobs run")
    claims = [daemon.state_dir / f"jobs/{job_id}.1/claim" for job_id in ids]
    pids = [json.loads(claim.read_text())["pid"] for claim in claims]
    report.figure("an interpreter that sleeps, PSS", "MB", [pss_mb(sleeper.pid)])
    report.figure("a supervisor, PSS", "MB", [pss_mb(pid) for pid in pids], at_most=3)
    report.figure(f"the daemon with {SUPERVISORS} jobs, RSS", "MB", [rss_mb(daemon.pid)])


def measure_queue(report: Report, place: Path, queued: int, runs: int) -> None:
    """The daemon that took the queue, and those that found it."""
    with private(place, *HOST, config=LIMITS) as daemon, daemon.client() as client:
        submit_all(client, [wide(number) for number in range(queued)])
        report.figure(f"{queued:,} queued, RSS", "MB", [rss_mb(daemon.pid)], at_most=150)
    memory, took_ms, synced = [], [], []
    for _ in range(runs):
        synced.append(fsync_ms(place))
        with ExitStack() as stack:
            up = stack.enter_context
            started = []
            took_ms.append(
                timed_ms(lambda: started.append(up(private(place, *HOST, config=LIMITS))))  # noqa: B023
            )
            memory.append(rss_mb(started[0].pid))
    report.figure("fsync of a new file", "ms", synced)
    report.figure(f"a start with {queued:,} queued", "ms", took_ms, at_most=3_000)
    report.figure(f"{queued:,} queued after a start, RSS", "MB", memory, at_most=150)


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--queued", type=int, default=QUEUED)
    parser.add_argument("--runs", type=int, default=RUNS)
    asked = parser.parse_args()
    report = Report("memory", "Memory of supervisors and daemon, and a start with a long queue.")
    with scratch("memory") as place:
        with ExitStack() as stack:
            measure_supervisors(report, stack, place / "jobs")
        measure_queue(report, place / "queue", asked.queued, asked.runs)
    report.finish(write=asked.write)


if __name__ == "__main__":
    main()
