"""Topology: facts 59 to 64, and what placement makes of it. The fact's number ends each name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpuschedd.core.model import Policy
from gpuschedd.core.plan import plan
from gpuschedd.gpu.source import GpuInfo
from tests.gpu.test_monitor import dgx_1
from tests.support.core_builders import snapshot_of, waiting
from tests.support.fake_nvml.driver import FakeDriver, uuid_of
from tests.support.gpus import Judge, Source

Open = Callable[..., Source]
OK = 0


def host(driver: FakeDriver, count: int) -> None:
    """So many equal GPUs."""
    first = driver.gpus[0]
    for index in range(1, count):
        driver.gpus[index] = {
            **first,
            "uuid": uuid_of(index),
            "pci": f"00000000:{0x10 + index:02X}:00.0",
            "minor": index,
        }
    driver.write()


def score(info: GpuInfo, peer: int) -> int:
    """How well two GPUs are linked."""
    return dict(info.links).get(uuid_of(peer), 0)


def by_index(source: Source) -> dict[int, GpuInfo]:
    """The inventory."""
    return {gpu.index: gpu for gpu in source.sample().inventory}


def test_a_link_counts_for_the_pair_at_its_ends_59(driver: FakeDriver, gpus: Open) -> None:
    """Up is not enough: peer access must be, too."""
    host(driver, 3)
    driver.gpu(0, links=2, link=["0 1", "1 2"])
    driver.gpu(1, links=1, link=["0 0"])
    driver.gpu(2, links=1, link=["0 0"])
    driver.add("p2p 0 1 0")  # 0 and 2 are linked, but the driver gives no access
    found = by_index(gpus())
    assert score(found[0], 1) >= 100
    assert score(found[0], 2) < 100
    assert (found[0].island, found[1].island, found[2].island) == (0, 0, None)


def test_gpus_of_two_quads_are_joined_with_their_own_and_their_like(
    driver: FakeDriver, gpus: Open
) -> None:
    """As on a DGX-1: sets overlap, so whom a GPU is joined with is told GPU by GPU."""
    dgx_1(driver)
    found = by_index(gpus())
    assert {index: list(gpu.joined) for index, gpu in found.items()} == {
        0: [uuid_of(peer) for peer in (1, 2, 3, 4)],
        1: [uuid_of(peer) for peer in (0, 2, 3, 5)],
        2: [uuid_of(peer) for peer in (0, 1, 3, 6)],
        3: [uuid_of(peer) for peer in (0, 1, 2, 7)],
        4: [uuid_of(peer) for peer in (0, 5, 6, 7)],
        5: [uuid_of(peer) for peer in (1, 4, 6, 7)],
        6: [uuid_of(peer) for peer in (2, 4, 5, 7)],
        7: [uuid_of(peer) for peer in (3, 4, 5, 6)],
    }


def test_behind_switches_all_are_linked_by_their_active_links_60(
    driver: FakeDriver, gpus: Open
) -> None:
    """Every link's remote end is the switch."""
    host(driver, 3)
    for index in range(3):
        driver.gpu(index, links=4, link=[f"{link} switch" for link in range(4)], fabric=3)
    driver.add("p2p 0 1 0", "p2p 0 2 0", "p2p 1 2 0")
    found = by_index(gpus())
    assert {gpu.island for gpu in found.values()} == {0}
    assert score(found[0], 1) == score(found[1], 2) >= 400


@pytest.mark.parametrize("count", [2, -1])
def test_links_that_no_card_has_are_not_asked_61(
    driver: FakeDriver, gpus: Open, count: int
) -> None:
    """Field 91 says how many; InvalidArgument and NotSupported end the row."""
    host(driver, 2)
    driver.gpu(0, links=count)
    before = driver.calls()
    gpus().sample()
    assert driver.calls() - before < 80


def test_a_fabric_that_is_not_registered_is_no_nvlink_62(driver: FakeDriver, gpus: Open) -> None:
    """Links active, peers dead, no error: jobs would run ten times slower."""
    host(driver, 2)
    for index in range(2):
        driver.gpu(index, links=2, link=["0 switch", "1 switch"], fabric=2)
    driver.add("p2p 0 1 0")
    found = by_index(gpus())
    assert score(found[0], 1) < 100
    assert found[0].island is None


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetP2PStatus",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetCpuAffinity",
    ],
)
def test_errors_of_topology_calls_mean_worst_and_nothing_else_63(
    driver: FakeDriver, gpus: Open, judge: Judge, function: str
) -> None:
    """Placement goes on."""
    host(driver, 2)
    driver.gpu(0, links=1, link=["0 1"])
    driver.gpu(1, links=1, link=["0 0"])
    driver.add("p2p 0 1 0", f"error {function} * 999")
    sample = gpus().sample()
    assert all(gpu.state == "ok" for gpu in judge.facts(sample).gpus)


def test_nearness_on_pcie_and_numa_orders_pairs_without_nvlink_63(
    driver: FakeDriver, gpus: Open
) -> None:
    """NVLink before PCIe before NUMA."""
    host(driver, 3)
    driver.gpu(0, numa=0)
    driver.gpu(1, numa=0)
    driver.gpu(2, numa=1)
    driver.add("level 0 1 10", "level 0 2 40")
    found = by_index(gpus())
    assert score(found[0], 1) > score(found[0], 2) > 0


def test_the_numa_node_and_cpus_of_a_gpu_are_those_near_it_64(
    driver: FakeDriver, gpus: Open
) -> None:
    """GetNumaNodeId works on coherent memory only; CPUs are cut to those we may use."""
    driver.gpu(0, numa=1, cpus="2")
    info = gpus().info()
    assert (info.numa, info.coherent) == (1, False)
    assert set(info.cpus) <= {1}


def test_two_gpus_come_from_the_island_that_is_broken_into(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """Two NVLink islands of four: a job of one, then a job of two; the other island stays whole."""
    host(driver, 8)
    for index in range(8):
        island = [peer for peer in range(8) if peer // 4 == index // 4 and peer != index]
        driver.gpus[index] |= {"links": 3, "link": [f"{n} {p}" for n, p in enumerate(island)]}
    driver.add(*(f"p2p {a} {b} 0" for a in range(8) for b in range(a + 1, 8) if a // 4 == b // 4))
    facts = judge.facts(gpus().sample())
    assert [gpu.island for gpu in facts.gpus] == [0] * 4 + [1] * 4
    both = plan(snapshot_of(facts.gpus, pending=[waiting(1, 1), waiting(2, 2)]), Policy())
    index_of = {gpu.uuid: gpu.index for gpu in facts.gpus}
    islands = {index_of[grant.uuid] // 4 for start in both.starts for grant in start.grants}
    assert [len(start.grants) for start in both.starts] == [1, 2]
    assert len(islands) == 1
    four = plan(snapshot_of(facts.gpus, pending=[waiting(1, 1), waiting(2, 4)]), Policy())
    assert {index_of[grant.uuid] // 4 for grant in four.starts[1].grants} == {1}
