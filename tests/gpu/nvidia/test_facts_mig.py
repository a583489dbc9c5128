"""MIG: facts 46 to 51. The number of the fact ends each name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusched_client.errors import Infeasible
from gpusched_client.terms import GpuUuid
from gpuschedd.core import admission
from gpuschedd.core.model import GpuState, Inventory, Policy, Request
from tests.support.fake_nvml.driver import GIB, NO_PERMISSION, FakeDriver, uuid_of
from tests.support.gpus import Judge, Source, held, key

Open = Callable[..., Source]
SMALL, LARGE = GpuUuid("MIG-5ma11000-0000"), GpuUuid("MIG-1a59e000-0000")


@pytest.fixture
def sliced(driver: FakeDriver) -> FakeDriver:
    """One GPU with two slices, in slots 0 and 3; a whole one beside it."""
    driver.gpu(0, mig=1, minor=2)
    driver.gpu(1, **{**driver.gpus[0], "uuid": uuid_of(1), "pci": "00000000:11:00.0", "mig": 0})
    driver.add(
        f"mig 0 0 {SMALL} 7 0 {10 * GIB} NVIDIA Fake MIG 1g.10gb",
        f"mig 0 3 {LARGE} 5 0 {20 * GIB} NVIDIA Fake MIG 2g.20gb",
    )
    return driver


@pytest.mark.usefixtures("sliced")
def test_what_slices_do_not_have_is_none_and_not_zero_46(gpus: Open) -> None:
    """No utilisation, no accounts, no power of their own."""
    source = gpus()
    uuids = frozenset(gpu.uuid for gpu in source.sample().inventory)
    sample = source.sample(busy_uuids=uuids)
    small = next(reading for reading in sample.readings if reading.uuid == SMALL)
    assert (small.utilization, small.power_w, small.process_utilization) == (None, None, {})
    assert small.used_bytes == 0
    assert source.accounts({SMALL: [os.getpid()]}) == {}


@pytest.mark.parametrize("may_ask_parent", [True, False])
def test_a_slices_processes_are_told_apart_by_instance_47(
    sliced: FakeDriver, gpus: Open, may_ask_parent: bool
) -> None:
    """The parent's list has the ids; where it may not be asked the slice's own serves."""
    sliced.process(0, os.getpid(), 3 * GIB, "C", 5, 0)
    sliced.process(0, 1, 1 * GIB, "C", 7, 0)
    if not may_ask_parent:
        sliced.add(f"error nvmlDeviceGetComputeRunningProcesses_v3 0 {NO_PERMISSION} 2")
    reading = gpus().reading(103)
    assert [p.pid for p in reading.processes or ()] == [os.getpid()]
    assert reading.used_bytes == 3 * GIB


@pytest.mark.usefixtures("sliced")
def test_slices_are_gpus_of_their_own_and_their_parent_is_none_48(gpus: Open, judge: Judge) -> None:
    """Holes in the numbering are normal."""
    sample = gpus().sample()
    assert [(gpu.index, gpu.uuid) for gpu in sample.inventory] == [
        (100, SMALL),
        (103, LARGE),
        (1, uuid_of(1)),
    ]
    facts = judge.facts(sample)
    assert [gpu.capacity_bytes for gpu in facts.gpus] == [10 * GIB, 20 * GIB, 48 * GIB]
    assert [gpu.is_slice for gpu in facts.gpus] == [True, True, False]
    assert all(gpu.state is GpuState.OK for gpu in facts.gpus)


def test_a_parent_without_slices_takes_nothing_48(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """It is shown, with what would help."""
    driver.gpu(0, mig=1)
    gpu = judge.gpu(gpus().sample())
    assert gpu.state is GpuState.UNREAD
    assert "has no slices" in gpu.state_text


@pytest.mark.usefixtures("sliced")
def test_one_job_gets_one_slice_and_is_told_why_at_submit_49(gpus: Open, judge: Judge) -> None:
    """A process can use one slice only."""
    facts = judge.facts(gpus().sample())
    inventory = admission.seen(Inventory(), facts.gpus)
    with pytest.raises(Infeasible, match="one process can use one slice only"):
        admission.admit(Request(gpus=2), inventory, Policy())
    with pytest.raises(Infeasible, match="one process can use one slice only"):
        admission.admit(Request(gpus=2, vram_bytes=4 * GIB), inventory, Policy())
    assert admission.admit(Request(vram_bytes=8 * GIB), inventory, Policy()).note is None


@pytest.mark.usefixtures("sliced")
def test_a_slices_device_nodes_are_those_of_its_instances_50(gpus: Open, tmp_path: Path) -> None:
    """Its parent's node and two capabilities, by the numbers that the driver lists."""
    caps = tmp_path / "proc" / "driver/nvidia-caps"
    caps.mkdir(parents=True)
    (caps / "mig-minors").write_text(
        "config 1\nmonitor 2\ngpu2/gi5/access 48\ngpu2/gi5/ci0/access 49\n"
        "gpu2/gi7/access 66\ngpu2/gi7/ci0/access 67\ngpu1/gi5/access 200\n"
    )
    info = gpus(proc=tmp_path / "proc").info(103)
    assert info.device_nodes == (
        "/dev/nvidia2",
        "/dev/nvidia-caps/nvidia-cap48",
        "/dev/nvidia-caps/nvidia-cap49",
    )


def test_released_we_are_no_client_of_the_driver_and_resume_sees_new_slices_51(
    sliced: FakeDriver, gpus: Open
) -> None:
    """An open client keeps the mode from being changed."""
    source = gpus()
    source.sample()
    child = source.source._child.process
    source.run(source.source.release())
    assert child.poll() is not None
    sliced.remove("mig 0 3")
    assert [gpu.uuid for gpu in source.sample().inventory] == [SMALL, uuid_of(1)]


def test_a_change_of_slices_is_seen_without_being_asked_51(sliced: FakeDriver, gpus: Open) -> None:
    """The driver sends an event."""
    source = gpus()
    source.sample()
    sliced.remove("mig 0 3")
    sliced.event(0, 0x100)
    source.sample()
    assert [gpu.uuid for gpu in source.sample().inventory] == [SMALL, uuid_of(1)]


def test_a_jobs_memory_on_a_slice_is_its_own(sliced: FakeDriver, gpus: Open, judge: Judge) -> None:
    """Another slice's processes are not beside it."""
    sliced.process(0, os.getpid(), 3 * GIB, "C", 5, 0)
    judge.owners[os.getpid()] = key(7)
    source = gpus()
    source.reading(103)
    facts = judge.facts(source.sample(), holdings={LARGE: [held(7, 4 * GIB)]})
    assert facts.seen[key(7), LARGE].used_bytes == 3 * GIB
    assert [gpu.foreign_bytes for gpu in facts.gpus] == [0, 0, 0]
