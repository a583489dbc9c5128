"""NVLink: the sets of GPUs in which each pair is joined. Pure.

A job that wants joined GPUs sits inside one such set. They overlap on boards without switches: on a
DGX-1 two sets of four, and each GPU is joined to its counterpart besides.

Source: Bron and Kerbosch, algorithm 457 (CACM 1973), with a pivot, for the maximal cliques.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from gpuschedd.core.model import Gpu

SETS_MAX = 256  # on one host; what is beyond that is not looked for

_Graph = tuple[tuple[str, int | None, frozenset[str]], ...]


def linked_sets(gpus: Iterable[Gpu]) -> tuple[tuple[int, ...], ...]:
    """Maximal sets of at least two, as places in `gpus`; in the order of their first GPUs."""
    return _maximal(tuple((gpu.uuid, gpu.island, frozenset(gpu.joined)) for gpu in gpus))


def largest_set(gpus: Iterable[Gpu]) -> int:
    """How many GPUs the largest of them has; 0: none are joined."""
    return max(map(len, linked_sets(gpus)), default=0)


@lru_cache(64)
def _maximal(graph: _Graph) -> tuple[tuple[int, ...], ...]:
    named = frozenset[str]().union(*(joined for _uuid, _island, joined in graph))
    # Who is joined to nobody is in no set: on a large host that is most often each of them.
    places = [
        place
        for place, (uuid, island, joined) in enumerate(graph)
        if island is not None or joined or uuid in named
    ]
    peers = {
        one: frozenset(other for other in places if other != one and _joined(graph, one, other))
        for one in places
    }
    found: list[tuple[int, ...]] = []

    def extend(chosen: frozenset[int], left: frozenset[int], done: frozenset[int]) -> None:
        if len(found) >= SETS_MAX:
            return
        if not left and not done:
            if len(chosen) > 1:
                found.append(tuple(sorted(chosen)))
            return
        pivot = max(sorted(left | done), key=lambda place: len(peers[place] & left))
        for place in sorted(left - peers[pivot]):
            extend(chosen | {place}, left & peers[place], done & peers[place])
            left, done = left - {place}, done | {place}

    extend(frozenset(), frozenset(places), frozenset())
    return tuple(sorted(found))


def _joined(graph: _Graph, one: int, other: int) -> bool:
    uuid, island, joined = graph[one]
    other_uuid, other_island, other_joined = graph[other]
    same_island = island is not None and island == other_island
    return same_island or other_uuid in joined or uuid in other_joined
