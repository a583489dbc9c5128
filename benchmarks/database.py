"""How the database grows with jobs that have ended, and how long a start on it takes.

Usage: python benchmarks/database.py [--jobs N] [--script-bytes N] [--runs N] [--write] [PLACE].
Fills a database in a directory below PLACE (default: the temporary one) through the daemon's own
writer, with final jobs of two hundred users, each with a script, two events and one GPU; starts the
daemon on it (after an orderly end, and after kill -9), and forgets all requests and events as
retention does. A million jobs take twenty minutes and 5 GB.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import fsync_ms, scratch, timed_ms
from benchmarks.report import Report, options
from gpusched_client import Client
from gpusched_client.errors import Unavailable
from gpusched_client.terms import Cause, GpuUuid, JobId, JobState
from gpuschedd.core.job import Gone, Job, Placed, Started, advance
from gpuschedd.core.model import Grant, Request
from gpuschedd.store.database import DATABASE_NAME
from gpuschedd.store.records import Changes, Event, GpuUse, Payload, Submission
from gpuschedd.store.retention import Old
from gpuschedd.store.writer import Store
from gpuschedd.system.clock import ClockMark, SystemClock

JOBS_PER_BATCH = 1_000
USERS = 200
GPU = GpuUuid("GPU-00000000-0000-4000-8000-000000000000")
ENVIRONMENT = tuple((b"VARIABLE_%d" % n, b"x" * 60) for n in range(40))


def job_of(number: int, now_s: float) -> Job:
    """One that has run and ended as most do."""
    user = number % USERS
    job = Job(
        job_id=JobId(number),
        uid=20_000 + user,
        user=f"user{user}",
        name=f"train-{number}",
        request=Request(gpus=1, vram_bytes=18 * 2**30, time_limit_s=3_600.0),
        submitted_at_s=now_s,
        submitted_sched_s=1.0,
    )
    placed = advance(job, Placed((Grant(GPU, 19 * 2**30, 18 * 2**30),), False, 2.0, 10.0, 60.0))
    running = advance(placed, Started(now_s + 1.0, 3.0))
    ended = advance(running, Gone(JobState.COMPLETED, now_s + 9.0, code=0, cause=Cause.EXIT))
    return replace(ended, cpu_user_s=12.5, cpu_system_s=0.5, max_rss_bytes=2**30)


def batch_of(first: int, count: int, script: bytes, mark: ClockMark) -> Changes:
    """A thousand jobs at once, with all that is written of them."""
    changes = Changes(mark=mark, gpu_index_of={GPU: 0})
    for number in range(first, first + count):
        job = job_of(number, mark.wall_s)
        words = (b"a-train.sh", b"--seed", b"%d" % number)
        changes.jobs[job.job_id] = job
        changes.payloads[job.job_id] = Payload(
            words, script, b"/home/user", 0o022, (), None, None, ENVIRONMENT
        )
        changes.gpu_uses.append(GpuUse(job.job_id, job.attempt, GPU, 17 * 2**30, None, "driver"))
        for kind in ("job_submitted", "job_ended"):
            event = Event(kind, mark.wall_s, job.job_id, job.uid, {"state": "COMPLETED"})
            changes.events.append((2 * number + (kind == "job_ended"), event))
        key = f"{number:032x}"
        changes.submissions.append(Submission(job.uid, key, b"d" * 32, (job.job_id,), 1.0))
    return changes


def fill(place: Path, jobs: int, script_bytes: int, ended_ago_s: float = 0.0) -> None:
    """A database of so many final jobs."""
    store = Store.open(place)
    clock = SystemClock()
    wall_s = clock.wall_s() - ended_ago_s
    mark = ClockMark(clock.boot_id(), 0.0, clock.boottime_s(), wall_s)
    for first in range(1, jobs + 1, JOBS_PER_BATCH):
        count = min(JOBS_PER_BATCH, jobs + 1 - first)
        script = b"#!/bin/sh\n" + os.urandom(script_bytes)
        store.commit(batch_of(first, count, script, mark))
    store.close()


def used_bytes(place: Path) -> int:
    """Of the database, without the pages that are free for what comes."""
    with closing(sqlite3.connect(place / DATABASE_NAME)) as db:
        pages, free, size = (
            db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
    used: int = (pages - free) * size
    return used


def start_s(place: Path, end: int) -> float:
    """From exec to the first answer; then the daemon is ended with that signal."""
    socket = place / "s.sock"
    words = [sys.executable, "-m", "gpuschedd.main", "--simulate", "1x24G"]
    words += ["--socket", str(socket), "--state-dir", str(place)]
    began_s = time.monotonic()
    with (place / "log").open("ab") as log:
        daemon = subprocess.Popen([*words, "--config", os.devnull], stderr=log, stdout=log)
    try:
        while True:
            if daemon.poll() is not None:
                raise SystemExit((place / "log").read_text()[-2_000:])
            try:
                with Client(socket, reconnect_s=0.0) as client:
                    client.hello()
                return time.monotonic() - began_s
            except Unavailable:
                time.sleep(0.01)
    finally:
        daemon.send_signal(end)
        daemon.wait()


def forget(place: Path) -> None:
    """As retention does, when the time of everything has come."""
    store = Store.open(place)
    for table in ("kept", "submission", "event"):
        while store.drop(Old(table, float("inf"))):
            pass
    store.close()


def measure(report: Report, place: Path, jobs: int, script_bytes: int, runs: int) -> None:
    """All figures."""
    report.figure("fsync of a new file", "ms", [fsync_ms(place) for _ in range(runs)])
    filled_ms = timed_ms(lambda: fill(place, jobs, script_bytes))
    report.figure(f"{jobs:,} jobs are written", "s", [filled_ms / 1e3])
    size = (place / DATABASE_NAME).stat().st_size
    report.figure("size of a job with its request", "bytes", [size / jobs])
    start_s(place, signal.SIGTERM)  # which checks the whole file
    orderly, killed = [], []
    for _ in range(runs):
        orderly.append(start_s(place, signal.SIGKILL))
        killed.append(start_s(place, signal.SIGTERM))
    report.figure("a start after an orderly end", "s", orderly)
    report.figure("a start after kill -9", "s", killed)
    report.figure("requests and events are forgotten", "s", [timed_ms(lambda: forget(place)) / 1e3])
    report.figure("size of a job after that", "bytes", [used_bytes(place) / jobs])


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("place", nargs="?", type=Path)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--script-bytes", type=int, default=3_000)
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args()
    option = "" if asked.jobs == parser.get_default("jobs") else f"--jobs {asked.jobs}"
    report = Report("database", "A database of jobs that have ended.", option=option)
    with scratch("database", asked.place) as place:
        measure(report, place, asked.jobs, asked.script_bytes, asked.runs)
    report.finish(write=asked.write)


if __name__ == "__main__":
    main()
