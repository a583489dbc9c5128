"""A part of the driver that hangs or crashes it costs that part, and no GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from gpuschedd.gpu.source import GpuSourceDown, Sample
from tests.gpu.nvidia.test_facts_library import wait_for_backoff
from tests.gpu.test_monitor import another
from tests.support.fake_nvml.driver import XID, FakeDriver, uuid_of
from tests.support.gpus import Judge, Source

Open = Callable[..., Source]
DEADLINE_S = 30.0


def settled(source: Source, **wanted: Any) -> Sample:
    """The first sweep that comes through."""
    end_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            return source.sample(**wanted)
        except GpuSourceDown:
            assert time.monotonic() < end_s, "the driver never answers"
            wait_for_backoff(source)


def quick(gpus: Open, **settings: Any) -> Source:
    """A source that waits no longer than a second for a GPU."""
    return gpus(sweep_deadline_s=1.0, open_deadline_s=6.0, **settings)


def three(driver: FakeDriver) -> None:
    """GPUs that are joined pair by pair."""
    for index in (1, 2):
        another(driver, index)
    for index in range(3):
        peers = [peer for peer in range(3) if peer != index]
        driver.gpu(index, links=2, link=[f"{n} {peer}" for n, peer in enumerate(peers)])
    driver.add("p2p 0 1 0", "p2p 0 2 0", "p2p 1 2 0")


@pytest.mark.parametrize("trouble", ["hang", "crash"])
@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetP2PStatus", "nvmlDeviceGetTopologyCommonAncestor"],
)
def test_a_pair_whose_link_cannot_be_asked_is_opened_without_its_topology(
    driver: FakeDriver, gpus: Open, judge: Judge, trouble: str, function: str
) -> None:
    """Both of it: nobody can say which; all are placeable, and it is said."""
    three(driver)
    driver.add(f"{trouble} {function} 2")
    source = quick(gpus)
    sample = settled(source)
    assert {gpu.state for gpu in judge.facts(sample).gpus} == {"ok"}
    assert [gpu.links for gpu in sample.inventory] == [(), (), ()]  # no other pair is left
    assert [text.partition(" (")[0] for text in sample.warnings] == [
        f"GPU {index} hangs the driver" for index in (0, 2)
    ]
    assert settled(source, health=True).readings[0].fault is None


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetMemoryAffinity",
        "nvmlDeviceGetCpuAffinity",
    ],
)
def test_a_gpu_whose_topology_hangs_is_used_without_it(
    driver: FakeDriver, gpus: Open, judge: Judge, function: str
) -> None:
    """It counts as badly connected; the links of the others are known."""
    three(driver)
    driver.add(f"hang {function} 0")
    sample = settled(quick(gpus))
    assert {gpu.state for gpu in judge.facts(sample).gpus} == {"ok"}
    assert [gpu.island for gpu in sample.inventory] == [None, 0, 0]


def test_a_call_of_both_health_and_topology_that_hangs_costs_its_gpu_alone(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """First seen in a health check, then at each start of the driver."""
    three(driver)
    source = quick(gpus)
    source.sample(health=True)
    driver.add("hang nvmlDeviceGetFieldValues 1")
    with pytest.raises(GpuSourceDown, match="nvmlDeviceGetFieldValues on GPU 1"):
        source.sample(health=True)
    sample = settled(source, health=True)
    states = {gpu.index: gpu.state for gpu in judge.facts(sample).gpus}
    assert states == {0: "ok", 1: "unread", 2: "ok"}


@pytest.mark.parametrize("function", ["nvmlEventSetWait_v2", "nvmlEventSetCreate"])
def test_events_that_hang_are_done_without(driver: FakeDriver, gpus: Open, function: str) -> None:
    """And that is said, for no Xid is seen any more."""
    driver.add(f"hang {function} *")
    sample = settled(quick(gpus))
    assert [reading.fault for reading in sample.readings] == [None]
    assert any("no Xid is seen" in text for text in sample.warnings)


def test_events_come_back_when_they_no_longer_hang(driver: FakeDriver, gpus: Open) -> None:
    """After a while they are tried again."""
    driver.add("hang nvmlEventSetWait_v2 *")
    source = quick(gpus)
    settled(source)
    driver.remove("hang")
    source.source._parts._parts["events"]._breakers[-1].open_until_s = 0.0
    assert settled(source).warnings == ()
    driver.event(0, XID, 79)
    assert [event.number for event in settled(source).events] == [79]


def test_a_gpu_whose_events_cannot_be_registered_leaves_the_others_theirs(
    driver: FakeDriver, gpus: Open
) -> None:
    """Its Xids are not seen, the others' are."""
    another(driver)
    driver.add("hang nvmlDeviceRegisterEvents 0")
    source = quick(gpus)
    sample = settled(source)
    assert any("GPU 0 hangs the driver" in text for text in sample.warnings)
    driver.event(1, XID, 31)
    assert [(event.uuid, event.number) for event in source.sample().events] == [(uuid_of(1), 31)]


def test_a_gpu_that_could_not_be_opened_and_now_hangs_costs_nothing(
    driver: FakeDriver, gpus: Open
) -> None:
    """It is looked after now and then, until that hangs twice."""
    another(driver)
    driver.add("error nvmlDeviceGetHandleByIndex_v2 1 999")
    source = quick(gpus, recount_every_s=0.0)
    source.sample()
    driver.add("hang nvmlDeviceGetUUID 1")
    driver.remove("error")
    for _ in range(6):
        sample = settled(source)
    assert [reading.uuid for reading in sample.readings if reading.fault is None] == [uuid_of(0)]
    assert [source.sample().readings[0].fault for _ in range(3)] == [None] * 3


def test_accounts_that_hang_are_given_up_for_their_gpu(
    driver: FakeDriver, gpus: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not each end of a job costs a new start of the driver."""
    monkeypatch.setattr("gpuschedd.gpu.nvidia.source.ACCOUNTS_DEADLINE_S", 0.5)
    driver.gpu(0, accounting=1)
    driver.add("hang nvmlDeviceGetAccountingStats 0")
    source = quick(gpus)
    for _ in range(2):
        settled(source)
        assert source.accounts({uuid_of(0): [4242]}) == {}
    settled(source)
    child = source.source._child
    assert source.accounts({uuid_of(0): [4242]}) == {}
    assert source.source._child is child
