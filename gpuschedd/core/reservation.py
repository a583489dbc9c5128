"""EASY: the shadow time of a request, and what others may take without delaying the head job.

Owns T, useful GPUs and spare. `shadow` and `Hold.select` are the only two questions.

Theory. A GPU is *useful* to the head at T if the head fits on it beside what is planned to run
past T there. The *shadow time* T is the earliest planned end at which `gpus` many are useful (in
one set joined by NVLink, if it wants that). Then `spare = useful - gpus` of them may be lost:

  * a job that ends by T costs nothing: by then it has left;
  * one that runs past T costs as many useful GPUs as it makes useless. Sharing a card costs nothing
    where the memory holds both.

No set of GPUs is fixed for the head; only the count is protected. A fixed set would refuse jobs
that the head does not mind (of eight GPUs it wants four: two idle ones are free for anybody).
After each start past T the count is taken again, per set, and a set that has too few left
is no longer the head's.

Source: Lifka, "The ANL/IBM SP Scheduling System" (JSSPP 1995), for EASY on nodes. That a GPU can be
shared by memory, so that "useful" is a question of room and not of emptiness, is added here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpuschedd.core.links import linked_sets
from gpuschedd.core.model import NEVER_S, Waiting
from gpuschedd.core.placement import choose
from gpuschedd.core.timeline import Host, Need, Slot


class Shadow(NamedTuple):
    """The shadow time and, per group that then has enough, the GPUs useful to the job."""

    at_s: float
    groups: list[list[Slot]]


def groups_of(slots: Sequence[Slot], need: Need) -> list[list[Slot]]:
    """The sets inside which the request must find all its GPUs: all, or those joined by NVLink."""
    if not need.nvlink or need.gpus == 1:
        return [list(slots)]
    return [[slots[at] for at in places] for places in linked_sets(slot.gpu for slot in slots)]


def shadow(host: Host, need: Need, not_before_s: float = 0.0) -> Shadow | None:
    """The earliest end from `not_before_s` on at which enough GPUs are useful; None: there is none.

    By the ends of the host: planned ones give T, expected ones X.
    """
    groups = groups_of(host.eligible(need), need)
    times = [host.free_times_s(group, need) for group in groups]
    enough = [sorted(free_s)[need.gpus - 1] for free_s in times if len(free_s) >= need.gpus]
    at_s = max(min(enough, default=NEVER_S), not_before_s)
    if at_s == NEVER_S:
        return None
    useful = [
        [slot for slot, free_s in zip(group, own_times, strict=True) if free_s <= at_s]
        for group, own_times in zip(groups, times, strict=True)
    ]
    return Shadow(at_s, [group for group in useful if len(group) >= need.gpus])


def is_sure(host: Host, need: Need, at_s: float) -> bool:
    """True if a shadow time does not rest on foreign use that is only thought to leave by then."""
    if not host.foreign_held:
        return True
    with host.foreign_staying():
        found = shadow(host, need)
    return found is not None and found.at_s <= at_s


def could_select(need: Need, fitting: Sequence[Slot]) -> bool:
    """Whether they are enough, without any choice among them."""
    if len(fitting) < need.gpus:
        return False
    if not need.nvlink or need.gpus == 1:
        return True
    return any(len(group) >= need.gpus for group in groups_of(fitting, need))


def select_freely(need: Need, fitting: Sequence[Slot]) -> list[Slot] | None:
    """GPUs for a request that need not look at any reservation; None if they are not enough."""
    if len(fitting) < need.gpus:
        return None
    if not need.nvlink or need.gpus == 1:
        return choose(fitting, need)
    groups = groups_of(fitting, need)
    chosen = [choose(group, need) for group in groups if len(group) >= need.gpus]
    return min(chosen, key=lambda slots: _broken(groups, slots), default=None)


def _broken(groups: list[list[Slot]], chosen: list[Slot]) -> int:
    """How many GPUs are in sets that these take a part of: large sets stay whole."""
    taken = {slot.position for slot in chosen}
    return sum(len(group) for group in groups if any(slot.position in taken for slot in group))


class Hold:
    """The head job's reservation during a pass. `select` takes from `spare` what it must."""

    def __init__(
        self, host: Host, head: Waiting, need: Need, found: Shadow, *, is_closed: bool = False
    ) -> None:
        """`host`: with the ends that `found` is by. `is_closed`: nobody may run past the hold,
        whatever is useful.
        """
        self.head = head
        self.need = need
        self.at_s = found.at_s
        self._shown = found.groups[0]
        self._host = host
        groups = [] if is_closed else found.groups
        self._useful = [{slot.position for slot in group} for group in groups]
        self._slots = {slot.position: slot for group in groups for slot in group}

    def shown(self) -> list[Slot]:
        """The GPUs to show as its future ones: a choice among the useful, binding nobody."""
        return choose(self._shown, self.need)

    @property
    def spare(self) -> int:
        """How many useful GPUs may still stop being so."""
        return max((len(useful) - self.need.gpus for useful in self._useful), default=0)

    def select(self, need: Need, fitting: Sequence[Slot]) -> list[Slot] | None:
        """GPUs for a job that runs past T: of them at most `spare` stop being useful."""
        best = self._cheapest(need, fitting)
        return None if best is None else choose(best[1], need, best[0])

    def could_select(self, need: Need, fitting: Sequence[Slot]) -> bool:
        """Whether there are any, without a choice among them."""
        return self._cheapest(need, fitting) is not None

    def room_beside(self, idle: Sequence[Slot]) -> int:
        """How many of these a whole-GPU job that runs past T and takes any may have.

        What `select` would find for each number: such a job blocks each useful GPU that it takes.
        """
        room = 0
        for useful in self._useful:
            harmless = sum(slot.position not in useful for slot in idle)
            room = max(room, min(len(idle), harmless + len(useful) - self.need.gpus))
        return room

    def _cheapest(
        self, need: Need, fitting: Sequence[Slot]
    ) -> tuple[set[int], Sequence[Slot]] | None:
        """The group in which the head loses least, and which of it the head would lose."""
        if len(fitting) < need.gpus:
            return None
        best: tuple[int, int, set[int], Sequence[Slot]] | None = None
        for group in groups_of(fitting, need):
            if len(group) < need.gpus:
                continue
            for useful in self._useful:
                blocked = {
                    s.position
                    for s in group
                    if s.position in useful and self._blocks_head(s.position, need)
                }
                cost = max(0, need.gpus - len(group) + len(blocked))
                if cost > len(useful) - self.need.gpus:
                    continue
                if best is None or (cost, len(group)) < best[:2]:
                    best = (cost, len(group), blocked, group)
        return None if best is None else best[2:]

    def commit(self, need: Need, slots: Sequence[Slot]) -> None:
        """Count that a job running past T is about to sit on these (call before it does)."""
        blocked = {
            slot.position
            for slot in slots
            if slot.position in self._slots and self._blocks_head(slot.position, need)
        }
        if blocked:
            self._useful = [
                left for u in self._useful if len(left := u - blocked) >= self.need.gpus
            ]

    def _blocks_head(self, position: int, need: Need) -> bool:
        """Would the head no longer fit there at T beside such a job?"""
        head = self.need
        if head.whole or head.exclusive or need.whole or need.exclusive:
            return True
        return not self._host.fits_at(self._slots[position], head, self.at_s, extra=need)
