"""An idle daemon sleeps: nothing wakes it but the look at the GPUs."""

from __future__ import annotations

import os
import re
import select
import time
from pathlib import Path

import pytest

from tests.support.daemon import DaemonProcess, until

LOOK_S = 5.0
SAMPLE_S = 1.0


def _switches(pid: int) -> int:
    """Voluntary context switches of all threads: how often something woke it."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_daemon_wakes_only_for_the_gpu_sample(daemon: DaemonProcess) -> None:
    """Some switches a sample (the loop and the sampling thread), and no CPU worth a figure."""
    with daemon.client() as client:
        job = client.submit(["true"], output="/dev/null")
        client.wait(job.id, timeout_s=30)
    assert daemon.process is not None
    pid = daemon.process.pid

    def sleeps() -> bool:
        switches, cpu_s, began_s = _switches(pid), _cpu_s(pid), time.monotonic()
        select.select([], [], [], LOOK_S)
        took_s = time.monotonic() - began_s
        woken, busy_s = _switches(pid) - switches, _cpu_s(pid) - cpu_s
        print(f"{woken} switches and {busy_s:.3f} s of CPU in {took_s:.1f} s")
        return woken <= 12 * (took_s / SAMPLE_S + 1) and busy_s <= 0.05 * took_s

    until(sleeps, "what the job's end has set off is over, and it sleeps")


@pytest.mark.parametrize("descriptors", [6, 8, 10, 12])
def test_a_start_without_descriptors_is_tried_again_and_blames_nothing_else(
    tmp_path: Path, descriptors: int
) -> None:
    """Wherever it runs out of them: no damaged database, no bad configuration, no exit 78."""
    wrapper = ("sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh")
    daemon = DaemonProcess(tmp_path, wrapper=wrapper)
    assert daemon.spawn().wait(30) in (71, 74)
    assert re.search("Too many open files|may open no more files", daemon.log_text())
    daemon.wrapper = []
    daemon.start()
    assert daemon.stop() == 0
