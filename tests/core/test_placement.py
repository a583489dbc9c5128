"""Placement: best-fit for shared jobs, connected sets for whole ones, distinct GPUs always."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from gpusched_client.terms import GpuUuid
from gpuschedd.core.model import GIB, Gpu, RunningJob
from gpuschedd.core.placement import LINKED_GPUS_MAX, choose, pair_score
from gpuschedd.core.timeline import Host
from tests.support.core_builders import EXACT, gpu, gpus, running, snapshot_of, uuid, waiting


def placed(
    cards: tuple[Gpu, ...], count: int, vram: int | None = None, busy: tuple[RunningJob, ...] = ()
) -> list[int]:
    """Indices that a job gets on that host."""
    host = Host(snapshot_of(cards, busy), EXACT)
    need = host.need(waiting(1, count, vram=vram).request, 1)
    return sorted(slot.gpu.index for slot in choose(host.fitting(need), need))


def linked(scores: dict[tuple[int, int], int], count: int) -> tuple[Gpu, ...]:
    """Cards with these pair scores."""
    both_ways = scores | {(b, a): score for (a, b), score in scores.items()}

    def links(n: int) -> tuple[tuple[GpuUuid, int], ...]:
        return tuple((uuid(b), score) for (a, b), score in both_ways.items() if a == n)

    return tuple(gpu(n, links=links(n)) for n in range(count))


def test_shared_job_goes_where_the_least_room_is_left() -> None:
    busy = (running(1, [0], vram=10 * GIB), running(2, [2], vram=40 * GIB))
    assert placed(gpus(3), 1, vram=20 * GIB, busy=busy) == [2]


def test_shared_job_of_two_gpus_gets_two_different_ones() -> None:
    assert len(placed(gpus(2), 2, vram=GIB)) == 2


def test_whole_job_takes_the_smallest_card_that_suits() -> None:
    assert placed((gpu(0), gpu(1, total_bytes=24 * GIB)), 1) == [1]


def test_whole_job_takes_an_empty_card_before_one_with_a_small_stranger_on_it() -> None:
    beside = gpu(0, foreign_bytes=GIB // 8)
    assert placed((beside, gpu(1)), 1) == [1]
    assert placed((beside, gpu(1), gpu(2)), 2) == [1, 2]
    assert placed((beside, gpu(1)), 2) == [0, 1]
    isle = (gpu(0, island=0, foreign_bytes=GIB // 8), *(gpu(n, island=0) for n in (1, 2)))
    assert placed(isle, 1) == [1]


def test_whole_job_takes_a_whole_card_before_a_slice_of_one() -> None:
    """Unless it asks for slices, or nothing else is free."""
    part = gpu(0, total_bytes=10 * GIB, is_slice=True, model="A100 MIG 1g.10gb")
    assert placed((part, gpu(1)), 1) == [1]
    linked_card = gpu(1, links=((uuid(2), 100),))
    assert placed((part, linked_card, gpu(2, links=((uuid(1), 100),))), 1) in ([1], [2])
    assert placed((part, gpu(1)), 1, busy=(running(1, [1]),)) == [0]


def test_one_gpu_job_leaves_the_large_connected_set_whole() -> None:
    cards = tuple(gpu(n, island=0 if n < 4 else 1) for n in range(6))
    assert placed(cards, 1) == [4]


def test_best_linked_pair_wins() -> None:
    cards = linked({(0, 1): 10, (0, 2): 10, (0, 3): 50, (1, 2): 40}, 4)
    assert placed(cards, 2) == [0, 3]


def test_set_larger_than_any_island_takes_the_fewest_links_apart() -> None:
    cards = tuple(gpu(n, island=n // 3) for n in range(6))
    assert placed(cards, 4)[:3] == [0, 1, 2]


def test_greedy_set_is_as_good_as_the_best_on_two_islands() -> None:
    """Too many sets to try all: it grows one instead."""
    cards = tuple(gpu(n, island=n % 2) for n in range(24))
    host = Host(snapshot_of(cards), EXACT)
    need = host.need(waiting(1, 8).request, 1)
    chosen = choose(host.fitting(need), need)
    assert sum(pair_score(a, b) for a, b in combinations(chosen, 2)) == 28


def test_very_large_host_takes_the_smallest_island_that_is_enough() -> None:
    count = LINKED_GPUS_MAX + 16
    cards = tuple(gpu(n, island=0 if n < 60 else 1) for n in range(count))
    assert placed(cards, 8) == list(range(60, 68))


def test_whole_job_of_a_given_size_takes_only_cards_of_that_size() -> None:
    cards = (gpu(0, total_bytes=24 * GIB), gpu(1))
    host = Host(snapshot_of(cards), EXACT)
    request = replace(waiting(1, 1).request, card_bytes=40 * GIB)
    assert [slot.gpu.index for slot in host.fitting(host.need(request, 1))] == [1]
