"""What every GpuSource promises: the same tests over simulated GPUs and over the driver."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpusched_client.terms import GpuUuid
from gpuschedd.gpu.simulated.source import UUID_PREFIX, SimulatedGpus
from gpuschedd.gpu.source import GpuProcess, Sample
from tests.support.daemon import DEADLINE_S
from tests.support.fake_nvml.driver import FakeDriver, uuid_of
from tests.support.gpus import Source

GIB = 2**30
MIB = 2**20
CLAIM = str(Path(__file__).parents[1] / "support/fake_nvml/claim.py")


class Rig:
    """A source over two GPUs of 48 GiB, and a way to put memory on one of them."""

    def __init__(self, source: Source, words: Callable[[str], list[str]]) -> None:
        self.source = source
        self._words = words

    @contextmanager
    def holder(self, uuid: GpuUuid) -> Iterator[int]:
        """A process that holds 3 GiB; its pid."""
        with subprocess.Popen(self._words(uuid), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                yield process.pid
            finally:
                process.kill()

    def until(self, uuid: GpuUuid, used: int) -> Sample:
        """A sample in which so much is in use."""
        end_s = time.monotonic() + DEADLINE_S
        while True:
            sample = self.source.sample(fresh_uuids=frozenset({uuid}))
            found = next(reading for reading in sample.readings if reading.uuid == uuid)
            if found.used_bytes == used:
                return sample
            assert time.monotonic() < end_s, f"{found.used_bytes} in use, not {used}"


@pytest.fixture(params=["simulated", "nvml"])
def rig(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    driver: FakeDriver,
    gpus: Callable[..., Source],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Rig]:
    """Each kind of source."""
    if request.param == "nvml":
        driver.gpu(1, **{**driver.gpus[0], "uuid": uuid_of(1), "pci": "00000000:11:00.0"})

        def claim(uuid: str) -> list[str]:
            return [sys.executable, CLAIM, "--vram", "3072", "--hold", "60", "--uuids", uuid]

        yield Rig(gpus(), claim)
        return
    claims = tmp_path / "claims"
    monkeypatch.setenv("GPUSCHED_SIM_DIR", str(claims))

    def simulate(uuid: str) -> list[str]:
        program = [
            sys.executable,
            "-m",
            "gpusched_client.commands.simjob",
            "--vram",
            "3G",
            "--hold",
            "60",
        ]
        return ["env", f"GPUSCHED_GPU_UUIDS={uuid}", *program]

    with Source(SimulatedGpus("2x48G", claims, shared=False)) as source:
        yield Rig(source, simulate)


def test_the_inventory_is_stable_and_complete(rig: Rig) -> None:
    """Every GPU has a reading, and is the same in the next sweep."""
    first, second = rig.source.sample(), rig.source.sample()
    assert [gpu.index for gpu in first.inventory] == [0, 1]
    assert first.inventory == second.inventory
    uuids = {gpu.uuid for gpu in first.inventory}
    assert {reading.uuid for reading in first.readings} == uuids
    assert all(gpu.total_bytes == 48 * GIB for gpu in first.inventory)
    assert all(gpu.blocked is None for gpu in first.inventory)


def test_samples_are_taken_in_order_of_boot_time(rig: Rig) -> None:
    """What ended before a sample was taken is known by it."""
    before_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    first, second = rig.source.sample(), rig.source.sample()
    assert before_s <= first.taken_boottime_s <= second.taken_boottime_s
    assert second.taken_boottime_s <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_an_idle_gpu_uses_nothing_and_lists_nobody(rig: Rig) -> None:
    """An empty list is an answer; None would be none."""
    for reading in rig.source.sample().readings:
        assert (reading.used_bytes, reading.free_bytes) == (0, 48 * GIB)
        assert reading.processes == ()
        assert reading.fault is None


def test_memory_of_a_process_shows_with_its_identity_and_goes_with_it(rig: Rig) -> None:
    """By pid and start."""
    uuid = rig.source.sample().inventory[1].uuid
    with rig.holder(uuid) as pid:
        sample = rig.until(uuid, 3 * GIB)
        readings = {reading.uuid: reading for reading in sample.readings}
        (process,) = readings[uuid].processes or ()
        content = Path(f"/proc/{pid}/stat").read_bytes()
        ticks = int(content[content.rindex(b")") + 2 :].split()[19])
        assert process == GpuProcess(pid, ticks, 3 * GIB)
        assert readings[uuid].listed_used_bytes == 3 * GIB
        other = sample.inventory[0].uuid
        assert readings[other].used_bytes == 0
    rig.until(uuid, 0)


def test_accounts_of_strangers_are_empty(rig: Rig) -> None:
    """Nothing is known, and nothing is made up."""
    uuid = rig.source.sample().inventory[0].uuid
    found = rig.source.accounts({uuid: [os.getpid()]})
    assert not any(found.values())


def test_a_released_source_answers_again(rig: Rig) -> None:
    """Release closes, the next sample opens."""
    rig.source.sample()
    rig.source.run(rig.source.source.release())
    assert len(rig.source.sample().readings) == 2


def test_simulated_uuids_cannot_be_taken_for_real_ones(rig: Rig) -> None:
    """The books keep both apart."""
    simulated = rig.source.source.is_simulated
    for gpu in rig.source.sample().inventory:
        assert gpu.uuid.startswith(UUID_PREFIX) is simulated
