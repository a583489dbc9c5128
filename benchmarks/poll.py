"""What looking at the GPUs costs: driver calls a minute and CPU share, idle and with 32 jobs.

Usage: python benchmarks/poll.py [--seconds N] [--json]. A real daemon and its driver process look
at 8 GPUs of the stand-in driver (needs gcc); its calls cost microseconds: the CPU share is ours.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpusched_client.terms import JobState
from tests.support.daemon import DaemonProcess, clean_up, until
from tests.support.fake_nvml.driver import GIB, FakeDriver, build

GPUS, JOBS = 8, 32
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU time that a process has used."""
    content = Path(f"/proc/{pid}/stat").read_text()
    fields = content.rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND


def driver_process(daemon: int) -> int:
    """The daemon's child that holds the driver."""
    children = Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split()
    names = {child: Path(f"/proc/{child}/comm").read_text().strip() for child in children}
    return int(next(child for child, name in names.items() if name == "gpuschedd-nvml"))


def measure(daemon: DaemonProcess, driver: FakeDriver, seconds: float) -> dict[str, float]:
    """Calls a minute and percent of one CPU."""
    assert daemon.process is not None
    pids = daemon.process.pid, driver_process(daemon.process.pid)
    before, calls, began_s = [cpu_s(pid) for pid in pids], driver.calls(), time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - began_s
    after = [cpu_s(pid) for pid in pids]
    daemon_s, child_s = (new - old for new, old in zip(after, before, strict=True))
    return {
        "calls_per_minute": round((driver.calls() - calls) * 60 / took_s),
        "daemon_cpu_percent": round(100 * daemon_s / took_s, 2),
        "child_cpu_percent": round(100 * child_s / took_s, 2),
    }


def start_jobs(daemon: DaemonProcess, driver: FakeDriver) -> None:
    """32 running jobs, four on each GPU, each with memory on it."""
    with daemon.client() as client:
        ids = [
            client.submit(["sleep", "600"], vram="8G", output="/dev/null").id for _ in range(JOBS)
        ]
        jobs = client.jobs

        def all_run() -> bool:
            return all(job.state is JobState.RUNNING for job in jobs(ids=ids).jobs)

        until(all_run, "all jobs run", 120.0)
        rows = []
        for job in jobs(ids=ids).jobs:
            started = json.loads((daemon.state_dir / f"jobs/{job.id}.1/started").read_text())
            (gpu,) = job.gpu_indices or (0,)
            rows.append(f"proc {gpu} C {started['pid']} {7 * GIB}")
        driver.add(*rows)


def main() -> None:
    """Measure both, print a table or JSON."""
    seconds = float(sys.argv[sys.argv.index("--seconds") + 1]) if "--seconds" in sys.argv else 30.0
    with tempfile.TemporaryDirectory(prefix="gpusched-poll-") as name:
        place = Path(name)
        driver = FakeDriver(place / "driver", build(place / "lib"), gpus=GPUS, total=80 * GIB)
        daemon = DaemonProcess(place / "daemon", environment=driver.environment)
        daemon.options = []
        daemon.start()
        try:
            time.sleep(2.0)
            figures = {"0 jobs": measure(daemon, driver, seconds)}
            start_jobs(daemon, driver)
            time.sleep(5.0)
            figures[f"{JOBS} jobs"] = measure(daemon, driver, seconds)
        finally:
            clean_up(daemon)
    if "--json" in sys.argv:
        print(json.dumps(figures))
        return
    print(f"{GPUS} GPUs, {seconds:g} s each; percent of one CPU")
    for what, row in figures.items():
        print(f"{what:>8}: " + ", ".join(f"{key} {value:g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
