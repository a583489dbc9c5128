"""What the daemon costs while nobody asks it anything: CPU, memory, wake-ups, looks at the GPUs.

Usage: python benchmarks/idle.py [--seconds N] [--runs N] [--write]. A real daemon and its driver
process over 8 GPUs of the stand-in driver (needs gcc), with no job and with 32 running ones. The
stand-in's calls cost microseconds, so the CPU is ours; a real process list costs milliseconds, and
past 5 % of the time in the driver the daemon looks half as often. The floor is an interpreter that
sleeps beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import process_cpu_s, rss_mb, scratch, switches
from benchmarks.private import Private, private
from benchmarks.report import Report, options
from gpusched_client.submission.request import job_request
from tests.support.daemon import until
from tests.support.fake_nvml.driver import GIB, FakeDriver, build

GPUS, JOBS = 8, 32
SECONDS, RUNS = 10.0, 5  # one look at rest
BUSY_PART = 0.4  # of that, with jobs: there something happens each second
SETTLE_S = 5.0  # what a start, or that of jobs, still has to do
SLEEPER = "import time; time.sleep(86400)"


@dataclass
class Watched:
    """The processes, and the driver that counts its calls."""

    daemon: Private
    driver: FakeDriver
    sleeper: int

    @property
    def pids(self) -> tuple[int, int]:
        """The daemon, and its child that holds the driver."""
        children = Path(f"/proc/{self.daemon.pid}/task/{self.daemon.pid}/children")
        for child in children.read_text().split():
            if Path(f"/proc/{child}/comm").read_text().strip() == "gpuschedd-nvml":
                return self.daemon.pid, int(child)
        raise AssertionError("no driver process")

    def once(self, seconds: float) -> dict[tuple[str, str], float]:
        """What passes in so many seconds, by name and unit."""
        pids = (*self.pids, self.sleeper)
        cpu_s, woken = [process_cpu_s(pid) for pid in pids], [switches(pid) for pid in pids]
        calls, began_s = self.driver.calls(), time.monotonic()
        time.sleep(seconds)
        took_s = time.monotonic() - began_s
        shares = [100 * (process_cpu_s(p) - s) / took_s for p, s in zip(pids, cpu_s, strict=True)]
        rates = [60 * (switches(p) - n) / took_s for p, n in zip(pids, woken, strict=True)]
        return {
            ("CPU of the daemon", "%"): shares[0],
            ("CPU of the driver process", "%"): shares[1],
            ("CPU of both", "%"): shares[0] + shares[1],
            ("context switches of the daemon", "a minute"): rates[0],
            ("context switches of the driver process", "a minute"): rates[1],
            ("context switches of a sleeping interpreter", "a minute"): rates[2],
            ("driver calls", "a minute"): 60 * (self.driver.calls() - calls) / took_s,
            ("RSS of both", "MB"): sum(rss_mb(pid) for pid in pids[:2]),
            ("RSS of a sleeping interpreter", "MB"): rss_mb(self.sleeper),
        }

    def start_jobs(self) -> None:
        """32 running jobs, four on each GPU, each with memory on it."""
        with self.daemon.client() as client:
            sleep = job_request(["sleep", "86400"], vram="8G", cwd="/", output="/dev/null")
            ids = [job.id for job in client.submit_many([sleep] * JOBS)]

            def all_run() -> bool:
                return all(job.started_at_s is not None for job in client.jobs(ids=ids).jobs)

            until(all_run, "all jobs run", 120.0)
            rows = []
            for job in client.jobs(ids=ids).jobs:
                record = self.daemon.state_dir / f"jobs/{job.id}.1/started"
                (gpu,) = job.gpu_indices or (0,)
                rows.append(f"proc {gpu} C {json.loads(record.read_text())['pid']} {7 * GIB}")
            self.driver.add(*rows)


AIMS = {"CPU of both": 0.1, "RSS of both": 45.0}


def measure(report: Report, watched: Watched, what: str, seconds: float, runs: int) -> None:
    """So many spans of time, one after the other."""
    time.sleep(SETTLE_S)
    rounds = [watched.once(seconds) for _ in range(runs)]
    for name, unit in rounds[0]:
        values = [each[name, unit] for each in rounds]
        aim = AIMS.get(name) if what == "no job" else None
        report.figure(f"{what}: {name}", unit, values, at_most=aim)


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each span of time")
    parser.add_argument("--runs", type=int, default=RUNS)
    asked = parser.parse_args()
    report = Report("idle", f"{GPUS} GPUs of the stand-in driver; CPU as percent of one core.")
    with scratch("idle") as place, ExitStack() as stack:
        driver = FakeDriver(place / "driver", build(place / "lib"), gpus=GPUS, total=80 * GIB)
        daemon = stack.enter_context(private(place / "daemon", environment=driver.environment))
        sleeper = stack.enter_context(subprocess.Popen([sys.executable, "-c", SLEEPER]))
        stack.callback(sleeper.kill)
        watched = Watched(daemon, driver, sleeper.pid)
        measure(report, watched, "no job", asked.seconds, asked.runs)
        watched.start_jobs()
        measure(report, watched, f"{JOBS} jobs", BUSY_PART * asked.seconds, asked.runs)
    report.finish(write=asked.write)


if __name__ == "__main__":
    main()
