"""Placement: which GPUs one job gets out of those on which it may sit.

Owns best-fit and connectedness. Feasibility is decided before, by count; knows no time, no queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import combinations
from math import comb

from gpuschedd.core.timeline import Need, Slot

EXHAUSTIVE_SETS_MAX = 3000
LINKED_GPUS_MAX = 64
SEEDS_MAX = 16


def choose(slots: Sequence[Slot], need: Need, dear: AbstractSet[int] = frozenset()) -> list[Slot]:
    """`need.gpus` of the slots: the cheap first, then best-fit (shared) or best-connected (whole).

    `dear`: positions for which the head's reservation pays. len(slots) >= need.gpus.
    """
    wanted = need.gpus
    if dear:
        cheap = [slot for slot in slots if slot.position not in dear]
        if len(cheap) < wanted:
            costly = [slot for slot in slots if slot.position in dear]
            return cheap + _best(costly, need, wanted - len(cheap), cheap)
        slots = cheap
    return _best(slots, need, wanted, [])


def _best(slots: Sequence[Slot], need: Need, count: int, taken: list[Slot]) -> list[Slot]:
    if len(slots) == count:
        return list(slots)
    if not need.whole:
        return sorted(slots, key=_shared_key)[:count]
    if all(slot.gpu.island is None and not slot.gpu.links for slot in slots):
        return sorted(slots, key=_whole_key)[:count]
    return _connected(slots, count, taken)


def _shared_key(slot: Slot) -> tuple[int, int]:
    """Best-fit: the least headroom that still fits."""
    return (slot.headroom_bytes, slot.position)


def _whole_key(slot: Slot) -> tuple[bool, int, int, int]:
    """The smallest card that suits; a slice of one only where nothing else is left.

    Of equal ones the one with the least of others on it, though that is little enough for a job.
    """
    return (slot.gpu.is_slice, slot.gpu.total_bytes, slot.gpu.foreign_bytes, slot.position)


def pair_score(one: Slot, other: Slot) -> int:
    """How well two GPUs are linked; 0 is worst, also where nothing is known."""
    for uuid, score in one.gpu.links:
        if uuid == other.gpu.uuid:
            return score
    return int(one.gpu.island is not None and one.gpu.island == other.gpu.island)


def _connected(slots: Sequence[Slot], count: int, taken: list[Slot]) -> list[Slot]:
    """The set with the most links inside, then the fewest to what stays free: sets stay whole."""
    if len(slots) > LINKED_GPUS_MAX:
        return _by_island(slots, count)
    links = _Links(slots, taken)
    if comb(len(slots), count) <= EXHAUSTIVE_SETS_MAX:
        return list(min(combinations(slots, count), key=links.key))
    return min((links.grow(seed, count) for seed in slots[:SEEDS_MAX]), key=links.key)


def _by_island(slots: Sequence[Slot], count: int) -> list[Slot]:
    """For large hosts: the smallest island that is enough, else the largest islands first."""
    sizes = Counter(slot.gpu.island for slot in slots)
    sizes[None] = 0
    enough = [(size, isle or 0, isle) for isle, size in sizes.items() if size >= count]
    if enough:
        _size, _number, best = min(enough)
        return [slot for slot in slots if slot.gpu.island == best][:count]

    def rank(slot: Slot) -> tuple[bool, int, int, int]:
        island = slot.gpu.island
        return (slot.gpu.is_slice, -sizes[island], island or 0, slot.position)

    return sorted(slots, key=rank)[:count]


class _Links:
    """Pair scores among some free GPUs, and of each to those already taken."""

    def __init__(self, slots: Sequence[Slot], taken: Sequence[Slot]) -> None:
        self._slots = slots
        self._pair = {
            (one.position, other.position): pair_score(one, other)
            for one in slots
            for other in slots
            if one is not other
        }
        self._all = {
            one.position: sum(self._pair[one.position, o.position] for o in slots if o is not one)
            for one in slots
        }
        self._taken = {one.position: sum(pair_score(one, o) for o in taken) for one in slots}

    def key(self, chosen: Iterable[Slot]) -> tuple[int, int, int, int, int, tuple[int, ...]]:
        """Smaller is better: slices, links inside, links to the rest, size of cards, what others
        have on them, positions.
        """
        chosen = tuple(chosen)
        slices = sum(slot.gpu.is_slice for slot in chosen)
        inside = sum(self._pair[a.position, b.position] for a, b in combinations(chosen, 2))
        outside = sum(self._all[slot.position] for slot in chosen) - 2 * inside
        inside += sum(self._taken[slot.position] for slot in chosen)
        size = sum(slot.gpu.total_bytes for slot in chosen)
        foreign = sum(slot.gpu.foreign_bytes for slot in chosen)
        positions = tuple(sorted(slot.position for slot in chosen))
        return (slices, -inside, outside, size, foreign, positions)

    def grow(self, seed: Slot, count: int) -> list[Slot]:
        """A set grown from one GPU, each time by the one best linked to it."""
        chosen = [seed]
        gain = {slot.position: self._taken[slot.position] for slot in self._slots}
        while len(chosen) < count:
            for slot in self._slots:
                gain[slot.position] += self._pair.get((slot.position, chosen[-1].position), 0)
            rest = [slot for slot in self._slots if slot not in chosen]
            chosen.append(
                min(rest, key=lambda s: (-gain[s.position], self._all[s.position], s.position))
            )
        return chosen
