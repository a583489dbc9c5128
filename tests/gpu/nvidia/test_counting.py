"""Jobs are told numbers only where CUDA counts as the driver does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpusched_client.terms import JobState
from gpuschedd.gpu.nvidia import environment
from gpuschedd.gpu.source import GrantedGpu, Sample
from tests.gpu.test_monitor import another, gpus_by_index
from tests.support.daemon import DaemonProcess, until
from tests.support.fake_nvml.driver import GPU_IS_LOST, UNKNOWN, FakeDriver, uuid_of
from tests.support.gpus import Source

Open = Callable[..., Source]
Start = Callable[..., DaemonProcess]


def told(sample: Sample, index: int = 1, policy: str = "auto") -> str:
    """CUDA_VISIBLE_DEVICES of a job on that GPU."""
    info = next(gpu for gpu in sample.inventory if gpu.index == index)
    granted = [GrantedGpu(info.uuid, info.index, info)]
    return environment.variables(policy, granted, is_filtered=False)["CUDA_VISIBLE_DEVICES"]


def three(driver: FakeDriver) -> None:
    for index in (1, 2):
        another(driver, index)


def test_where_all_gpus_are_there_in_the_order_of_the_bus_a_job_gets_its_number(
    driver: FakeDriver, gpus: Open
) -> None:
    three(driver)
    sample = gpus().sample(health=True)
    assert [told(sample, index) for index in range(3)] == ["0", "1", "2"]
    assert not any("CUDA may count" in text for text in sample.warnings)


@pytest.mark.parametrize("policy", ["auto", "index"])
@pytest.mark.parametrize("code", [GPU_IS_LOST, UNKNOWN])
def test_after_a_gpu_was_lost_a_number_would_be_another_gpu(
    driver: FakeDriver, gpus: Open, code: int, policy: str
) -> None:
    """CUDA skips it; so it does with one that cannot be opened at all."""
    three(driver)
    source = gpus()
    source.sample()
    driver.add(f"error * 0 {code}")
    sample = source.sample()
    assert told(sample, 1, policy) == uuid_of(1)
    assert any("GPU 0 does not answer" in text for text in sample.warnings)
    anew = gpus().sample()
    assert told(anew, 1, policy) == uuid_of(1)


def test_a_gpu_that_the_driver_drains_or_the_kernel_alone_knows_is_not_counted(
    driver: FakeDriver, gpus: Open, tmp_path: Path
) -> None:
    three(driver)
    driver.gpu(0, drained=1)
    source = gpus()
    assert told(source.sample(health=True)) == uuid_of(1)
    assert told(source.sample()) == uuid_of(1)
    driver.gpu(0, drained=0)
    assert told(source.sample(health=True)) == "1"
    for number in range(4):
        (tmp_path / f"driver/nvidia/gpus/{number}").mkdir(parents=True)
    assert told(gpus(proc=tmp_path).sample()) == uuid_of(1)


def test_an_order_that_is_not_the_bus_s_gives_no_numbers(driver: FakeDriver, gpus: Open) -> None:
    """nvidia-smi's index 1 is not CUDA's."""
    three(driver)
    driver.gpu(1, pci="00000000:30:00.0")
    driver.gpu(2, pci="00000000:20:00.0")
    sample = gpus().sample()
    assert [told(sample, index) for index in range(3)] == [uuid_of(0), uuid_of(1), uuid_of(2)]
    assert [text for text in sample.warnings if "order is not that of the bus" in text]


def test_beside_a_gpu_in_mig_mode_a_whole_one_has_no_number(driver: FakeDriver, gpus: Open) -> None:
    """CUDA counts slices and whole GPUs by rules of its own."""
    three(driver)
    driver.gpu(0, mig=1)
    driver.add(f"mig 0 0 MIG-a 1 0 {10 * 2**30} NVIDIA Fake MIG 1g.10gb")
    assert told(gpus().sample()) == uuid_of(1)


def test_a_job_beside_a_lost_gpu_is_told_its_own_by_uuid_and_that_is_said_once(
    driver: FakeDriver, daemon_over: Start
) -> None:
    three(driver)
    daemon = daemon_over(driver)
    with daemon.client() as client:
        driver.add(f"error * 0 {GPU_IS_LOST}")
        until(lambda: gpus_by_index(client)[0] == "lost", "it is gone")
        job = client.submit(
            shell="echo $CUDA_VISIBLE_DEVICES", output="told.out", cwd=daemon.work_dir
        )
        assert client.wait(job.id, timeout_s=30).state is JobState.COMPLETED
    assert (daemon.work_dir / "told.out").read_text() == f"{uuid_of(1)}\n"
    assert daemon.log.read_text().count("CUDA may count") == 1


def test_a_sick_gpu_may_be_lost_at_any_time(driver: FakeDriver, daemon_over: Start) -> None:
    """Xid 79 says that it fell off the bus, though it still answers."""
    three(driver)
    daemon = daemon_over(driver)
    with daemon.client() as client:
        driver.event(0, 0x8, 79)
        until(lambda: gpus_by_index(client)[0] == "sick", "it is noticed")
        job = client.submit(
            shell="echo $CUDA_VISIBLE_DEVICES", output="told.out", cwd=daemon.work_dir
        )
        client.wait(job.id, timeout_s=30)
    assert (daemon.work_dir / "told.out").read_text() == f"{uuid_of(1)}\n"
