"""Memory: facts 26 to 33. The number of the fact ends each name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusched_client.errors import Infeasible
from gpuschedd.core import admission
from gpuschedd.core.model import GpuState, Inventory, Policy, Request
from gpuschedd.gpu.attribution import ForeignProcess
from gpuschedd.gpu.nvidia.library import ARGUMENT_VERSION_MISMATCH, INVALID_ARGUMENT
from tests.support.fake_nvml.driver import GIB, MIB, NOT_SUPPORTED, FakeDriver, uuid_of
from tests.support.gpus import Judge, Source, headroom, held, key

Open = Callable[..., Source]
UUID = uuid_of(0)


def test_the_drivers_reserve_is_never_handed_out_26(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """Version 2 tells it apart: an idle GPU is idle, and its capacity is less than its total."""
    driver.gpu(0, reserved=600 * MIB)
    source = gpus()
    gpu = judge.gpu(source.sample())
    assert (gpu.total_bytes, gpu.capacity_bytes) == (48 * GIB, 48 * GIB - 600 * MIB)
    assert (gpu.foreign_bytes, gpu.whole_idle) == (0, True)


def test_an_old_drivers_reserve_is_found_on_an_idle_gpu_26(
    driver: FakeDriver,
    old_library: Path,
    gpus: Open,
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Version 1 counts it as used: with no process there, what is used is the reserve."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(old_library.parent))
    driver.gpu(0, reserved=600 * MIB)
    source = gpus()
    gpu = judge.gpu(source.sample())
    assert gpu.capacity_bytes == 48 * GIB - 600 * MIB
    assert gpu.whole_idle
    driver.process(0, 1, 4 * GIB)
    assert source.reading().used_bytes == 4 * GIB


@pytest.mark.parametrize("code", [INVALID_ARGUMENT, ARGUMENT_VERSION_MISMATCH])
def test_a_driver_that_knows_version_2_by_name_only_is_asked_for_version_1_26(
    driver: FakeDriver, gpus: Open, judge: Judge, code: int
) -> None:
    """The function is there and refuses the struct."""
    driver.gpu(0, reserved=600 * MIB)
    driver.add(f"error nvmlDeviceGetMemoryInfo_v2 * {code}")
    gpu = judge.gpu(gpus().sample())
    assert (gpu.state, gpu.capacity_bytes) == (GpuState.OK, 48 * GIB - 600 * MIB)


def test_a_process_without_a_figure_is_never_zero_27(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """All ones: by difference where the job is alone, else it stands for what it holds."""
    driver.process(0, os.getpid(), -1)
    driver.gpu(0, ownerless=9 * GIB)
    source = gpus()
    reading = source.reading()
    assert reading.processes is not None
    assert reading.processes[0].used_bytes is None
    alien = judge.gpu(source.sample())
    assert alien.foreign_bytes >= 9 * GIB
    assert not alien.whole_idle
    judge.owners[os.getpid()] = key(7)
    own = judge.gpu(source.sample(), holdings={UUID: [held(7, 10 * GIB)]})
    assert headroom(own, 10 * GIB) <= 38 * GIB
    assert headroom(own, 10 * GIB) >= 29 * GIB


def test_managed_memory_is_its_only_jobs_else_in_use_28(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """It is on the device and on no process."""
    source = gpus()
    judge.facts(source.sample())  # idle before
    driver.process(0, os.getpid(), 5 * GIB)
    driver.gpu(0, ownerless=20 * GIB)
    judge.owners[os.getpid()] = key(7)
    source.reading()
    facts = judge.facts(source.sample(), holdings={UUID: [held(7, 30 * GIB)]})
    seen = facts.seen[key(7), UUID]
    assert (seen.used_bytes, seen.charged) == (25 * GIB, True)
    assert facts.gpus[0].foreign_bytes == 0
    shared = judge.gpu(source.sample(), holdings={UUID: [held(7, 6 * GIB), held(8, 6 * GIB)]})
    assert headroom(shared, 6 * GIB, 6 * GIB) <= 48 * GIB - 25 * GIB


def test_a_gpu_in_the_hosts_memory_has_the_hosts_figures_29(
    driver: FakeDriver, gpus: Open, tmp_path: Path
) -> None:
    """Only known integrated parts; one pool with the host's memory."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "meminfo").write_text("MemTotal: 125829120 kB\nMemAvailable: 104857600 kB\n")
    driver.gpu(0, name="NVIDIA GB10")
    driver.add(f"error nvmlDeviceGetMemoryInfo_v2 0 {NOT_SUPPORTED}")
    driver.add(f"error nvmlDeviceGetMemoryInfo 0 {NOT_SUPPORTED}")
    source = gpus(proc=proc)
    info = source.info()
    assert (info.integrated, info.total_bytes) == (True, 120 * GIB)
    reading = source.reading()
    assert (reading.used_bytes, reading.free_bytes) == (20 * GIB, 100 * GIB)


def test_memory_that_cannot_be_read_is_not_free_and_does_not_wait_for_ever_29(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """Not an integrated part: given whole, beside nobody; declared amounts are refused at once."""
    driver.add(f"error nvmlDeviceGetMemoryInfo_v2 0 {NOT_SUPPORTED}")
    driver.add(f"error nvmlDeviceGetMemoryInfo 0 {NOT_SUPPORTED}")
    source = gpus()
    source.reading()
    gpu = judge.gpu(source.sample())
    assert (gpu.state, gpu.whole_idle) == (GpuState.OK, True)
    assert headroom(gpu) <= 0
    inventory = admission.seen(Inventory(), [gpu])
    with pytest.raises(Infeasible, match="does not say how much"):
        admission.admit(Request(vram_bytes=GIB), inventory, Policy())
    assert admission.admit(Request(), inventory, Policy()).request.whole
    driver.process(0, os.getpid(), -1)
    source.reading()
    assert not judge.gpu(source.sample()).whole_idle


def test_a_page_cache_on_coherent_memory_is_not_in_use_30(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """Grace Hopper: the memory is a node of the host; only processes count."""
    driver.gpu(0, name="NVIDIA GH200", numa=1, ownerless=30 * GIB)
    driver.process(0, 1, 2 * GIB)
    source = gpus()
    assert source.info().coherent
    source.reading()
    gpu = judge.gpu(source.sample())
    assert 2 * GIB <= gpu.foreign_bytes < 3 * GIB


def test_memory_that_survives_its_job_is_not_free_and_is_named_31(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """The driver tears down later than the process dies; a sample of before counts for nothing."""
    import time

    driver.process(0, os.getpid(), 10 * GIB)
    judge.owners[os.getpid()] = key(7)
    source = gpus()
    source.reading()
    before = source.sample()
    judge.facts(before, holdings={UUID: [held(7, 12 * GIB)]})
    judge.ledger.job_ended(key(7), [UUID], time.clock_gettime(time.CLOCK_BOOTTIME))
    assert not judge.gpu(before).fresh
    driver.remove("proc")
    driver.gpu(0, ownerless=10 * GIB)
    source.reading()
    gpu = judge.gpu(source.sample())
    assert gpu.fresh
    assert headroom(gpu) <= 38 * GIB
    assert "10 GiB that job 7 leaves behind" in gpu.foreign_text
    driver.gpu(0, ownerless=0)
    source.reading()
    assert headroom(judge.gpu(source.sample())) == 48 * GIB


def test_a_dead_process_that_holds_memory_is_a_leak_and_named_32(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """Listed as a pid that does not exist."""
    driver.process(0, 4_000_001, 6 * GIB)
    judge.strangers[4_000_001] = ForeignProcess(4_000_001, None, "", "")
    source = gpus()
    reading = source.reading()
    assert reading.processes is not None
    assert reading.processes[0].start_ticks is None
    gpu = judge.gpu(source.sample())
    assert headroom(gpu) < 42 * GIB
    assert "pid 4000001, which is gone with 6 GiB" in gpu.foreign_text


def test_foreign_use_counts_at_its_peak_until_it_exits_33(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """It may come back to its peak at any time; 10 % on top."""
    source = gpus()
    for size in (10 * GIB, 20 * GIB, 1 * GIB):
        driver.process(0, os.getpid(), size)
        source.reading()
        judge.facts(source.sample())
    gpu = judge.gpu(source.sample())
    assert gpu.foreign_bytes == 22 * GIB
    assert f"pid {os.getpid()} of bob (python) with 20 GiB" in gpu.foreign_text
    assert gpu.foreign_hint == ""  # to start beside 20 GiB would end in "out of memory"
    driver.remove("proc")
    source.reading()
    assert judge.gpu(source.sample()).foreign_bytes == 0


def test_an_integrated_part_whose_driver_has_a_figure_is_known_by_its_name(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """The figure has in it what the host uses: no whole job waits for that."""
    driver.gpu(0, name="NVIDIA GB10", ownerless=20 * GIB)
    source = gpus()
    assert source.info().integrated
    source.reading()
    assert judge.gpu(source.sample()).whole_idle


def test_a_desktop_that_starts_later_is_seen_with_its_memory(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """Its list is dear and asked for now and then: at once where memory came of nobody."""
    source = gpus()
    source.reading()
    source.reading()
    driver.process(0, os.getpid(), 400 * MIB, "G")
    judge.strangers[os.getpid()] = ForeignProcess(os.getpid(), 0, "root", "Xorg")
    source.reading()
    assert judge.gpu(source.sample()).whole_idle
