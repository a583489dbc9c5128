"""Devices, identity and order: facts 16 to 25. The number of the fact ends each name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpusched_client.terms import GpuUuid
from gpuschedd.core.model import GpuState
from gpuschedd.gpu.nvidia import environment
from gpuschedd.gpu.source import GpuInfo, GpuSourceDown, select_gpus, unknown_names
from tests.support.fake_nvml.driver import (
    GPU_IS_LOST,
    NO_PERMISSION,
    UNKNOWN,
    FakeDriver,
    uuid_of,
)
from tests.support.gpus import Judge, Source

Open = Callable[..., Source]


def two(driver: FakeDriver) -> None:
    """A second GPU like the first."""
    driver.gpu(1, **{**driver.gpus[0], "uuid": uuid_of(1), "pci": "00000000:11:00.0", "minor": 1})


def test_a_gpu_is_the_same_under_another_index_16(driver: FakeDriver, gpus: Open) -> None:
    """The order changes between boots; the UUID says who is who."""
    two(driver)
    before = {gpu.uuid: gpu.pci for gpu in gpus().sample().inventory}
    driver.gpus = {0: driver.gpus[1], 1: driver.gpus[0]}
    driver.write()
    after = gpus().sample().inventory
    assert {gpu.uuid: gpu.pci for gpu in after} == before
    assert [gpu.uuid for gpu in after] == [uuid_of(1), uuid_of(0)]


def test_the_minor_is_not_the_index_17(driver: FakeDriver, gpus: Open) -> None:
    """/dev/nvidiaN, and with it every device filter, goes by the minor."""
    driver.gpu(0, minor=3)
    info = gpus().info()
    assert (info.index, info.minor, info.device_nodes) == (0, 3, ("/dev/nvidia3",))


def test_without_a_minor_there_is_nothing_to_filter_by_18(driver: FakeDriver, gpus: Open) -> None:
    """WSL2 has none; None, not 0."""
    driver.gpu(0, minor=-1)
    info = gpus().info()
    assert (info.minor, info.device_nodes) == (None, ())


def test_a_minor_that_the_library_does_not_tell_is_the_kernel_module_s_18(
    driver: FakeDriver, gpus: Open, tmp_path: Path
) -> None:
    driver.gpu(0, minor=-1)
    about = tmp_path / "driver/nvidia/gpus/0000:10:00.0/information"
    about.parent.mkdir(parents=True)
    about.write_text("Model: \t\t NVIDIA Fake\nDevice Minor: \t 3\nGPU Excluded:\t No\n")
    assert gpus(proc=tmp_path).info().minor == 3


def test_uuids_may_be_shortened_by_people_and_are_written_out_by_us_19() -> None:
    """A unique prefix of eight or more; a slice goes with its GPU."""
    card = GpuInfo(uuid=uuid_of(0), index=0, minor=0, model="m", total_bytes=1)
    part = GpuInfo(
        uuid=GpuUuid("MIG-1234"),
        index=100,
        minor=0,
        model="m",
        total_bytes=1,
        parent_uuid=card.uuid,
    )
    other = GpuInfo(uuid=GpuUuid("GPU-0ther000"), index=1, minor=1, model="m", total_bytes=1)
    assert select_gpus([card, part, other], ("GPU-fa1e0000",)) == (card, part)
    assert select_gpus([card, part, other], ("MIG-1234",)) == (part,)
    assert select_gpus([card, part, other], ("GPU",)) == ()


@pytest.mark.parametrize("name", [0, "0", uuid_of(0), "GPU-fa1e0000"])
def test_a_slice_is_named_by_its_gpu_too(driver: FakeDriver, gpus: Open, name: int | str) -> None:
    """`gpus = [0]` goes on meaning GPU 0 once it is in MIG mode, and all of its slices."""
    two(driver)
    driver.gpu(1, uuid="GPU-0ther000-1111-4222-8333-000000000001")
    driver.gpu(0, mig=1)
    for slot in range(4):
        driver.add(f"mig 0 {slot} MIG-{slot} {slot + 1} 0 {10 * 2**30} NVIDIA Fake MIG 1g.10gb")
    inventory = gpus().sample().inventory
    assert [gpu.index for gpu in select_gpus(inventory, (name,))] == [100, 101, 102, 103]
    assert [gpu.index for gpu in select_gpus(inventory, (101,))] == [101]
    assert unknown_names(inventory, (name, 1)) == ()
    assert len(select_gpus(inventory, (name, 1))) == 5


def test_visible_devices_are_ours_canonical_and_complete_20() -> None:
    """CUDA stops at the first entry that it does not know; a CPU-only job sees none."""
    both: list[tuple[str, int | None]] = [("GPU-a", 4), ("GPU-b", 6)]
    plain = {"has_slices": False, "is_filtered": False}
    assert environment.visible_devices("auto", both, **plain) == ["4", "6"]
    assert environment.visible_devices("auto", both, has_slices=False, is_filtered=True) == [
        "0",
        "1",
    ]
    assert environment.visible_devices("index", both, has_slices=False, is_filtered=True) == [
        "4",
        "6",
    ]
    assert environment.visible_devices("uuid", both, **plain) == ["GPU-a", "GPU-b"]
    slices: list[tuple[str, int | None]] = [("MIG-a", None)]
    assert environment.visible_devices("index", slices, has_slices=True, is_filtered=True) == [
        "MIG-a"
    ]
    assert b"CUDA_VISIBLE_DEVICES" in environment.DROPPED
    assert environment.variables("auto", [], is_filtered=False) == {
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_VISIBLE_DEVICES": "void",
    }


@pytest.mark.parametrize(
    ("code", "state"), [(GPU_IS_LOST, GpuState.LOST), (UNKNOWN, GpuState.UNREAD)]
)
def test_a_gpu_off_the_bus_leaves_the_others_in_service_21(
    driver: FakeDriver, gpus: Open, judge: Judge, code: int, state: GpuState
) -> None:
    """Every call about it fails; those about the others do not."""
    two(driver)
    source = gpus()
    source.sample()
    driver.add(f"error * 0 {code}")
    sample = source.sample()
    assert judge.gpu(sample, 0).state is state
    assert judge.gpu(sample, 1).state is GpuState.OK


def test_a_gpu_off_the_bus_at_the_start_is_left_out_and_reported_21(
    driver: FakeDriver, gpus: Open
) -> None:
    """Even its handle cannot be had."""
    two(driver)
    driver.add(f"error * 0 {GPU_IS_LOST}")
    sample = gpus().sample()
    assert [gpu.index for gpu in sample.inventory] == [1]
    assert any("GPU 0 is left out" in text for text in sample.warnings)


def test_a_gpu_that_a_new_child_cannot_open_is_lost_with_the_reason_and_comes_back_21(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """Its handle fails at the re-init; who it is is known from before. It is tried again."""
    two(driver)
    source = gpus(recount_every_s=0.0)
    source.sample()
    driver.add(f"error * 1 {GPU_IS_LOST}")
    source.run(source.source.release())
    gpu = judge.gpu(source.sample(), 1)
    assert (gpu.state, gpu.state_text) == (
        GpuState.LOST,
        "it cannot be opened; the driver says: GPU is lost",
    )
    driver.remove("error")
    source.sample()
    assert judge.gpu(source.sample(), 1).state is GpuState.OK


def test_a_plugged_gpu_is_found_by_a_new_child_22(
    driver: FakeDriver, gpus: Open, tmp_path: Path
) -> None:
    """Our process would see the old number for ever; /proc tells."""
    listed = tmp_path / "proc" / "driver/nvidia/gpus"
    (listed / "0000:10:00.0").mkdir(parents=True)
    source = gpus(proc=tmp_path / "proc", recount_every_s=0.0)
    assert len(source.sample().inventory) == 1
    two(driver)
    assert len(source.sample().inventory) == 1
    (listed / "0000:11:00.0").mkdir()
    source.sample()
    assert len(source.sample().inventory) == 2


def test_a_gpu_that_the_driver_drains_takes_no_job_22(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """`nvidia-smi drain`."""
    source = gpus()
    driver.gpu(0, drained=1)
    gpu = judge.gpu(source.sample(health=True))
    assert (gpu.state, gpu.state_text) == (
        GpuState.UNREAD,
        "the driver drains it (nvidia-smi drain)",
    )


def test_a_gpu_that_we_may_not_open_is_skipped_and_reported_23(
    driver: FakeDriver, gpus: Open
) -> None:
    """The count includes it."""
    two(driver)
    driver.add(f"error nvmlDeviceGetHandleByIndex_v2 1 {NO_PERMISSION}")
    sample = gpus().sample()
    assert [gpu.index for gpu in sample.inventory] == [0]
    assert any("GPU 1 is left out, it may not be opened" in text for text in sample.warnings)


def test_device_nodes_taken_away_start_a_new_child_24(driver: FakeDriver, gpus: Open) -> None:
    """`daemon-reload` in a container: all calls turn Unknown; a new process may open them again."""
    source = gpus()
    source.sample()
    child = source.source._child.process.pid
    driver.add(f"error nvmlDeviceGetMemoryInfo_v2 * {UNKNOWN}")
    sample = source.sample()
    assert sample.readings[0].fault == "unread"
    driver.remove("error")
    assert source.sample().readings[0].fault is None
    assert source.source._child.process.pid != child


def test_handles_do_not_outlive_the_driver_they_came_from_25(
    driver: FakeDriver, gpus: Open
) -> None:
    """A changed slice's handle may be another's: all is opened anew, matched by UUID."""
    driver.gpu(0, mig=1)
    driver.add("mig 0 0 MIG-old 1 0 10737418240 Fake MIG 1g.10gb")
    source = gpus()
    assert [gpu.uuid for gpu in source.sample().inventory] == ["MIG-old"]
    driver.remove("mig 0")
    driver.add("mig 0 0 MIG-new 2 0 21474836480 Fake MIG 2g.20gb")
    driver.event(0, 0x100)
    source.sample()
    assert [gpu.uuid for gpu in source.sample().inventory] == ["MIG-new"]


def test_an_empty_host_is_no_error(driver: FakeDriver, gpus: Open) -> None:
    """A driver without a GPU."""
    driver.drop_gpu(0)
    try:
        sample = gpus().sample()
    except GpuSourceDown as down:  # pragma: no cover
        raise AssertionError(str(down)) from down
    assert sample.inventory == ()
