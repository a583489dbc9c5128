"""Patience: the GPUs that are closed for a head that has waited longer than it was expected to.

Owns when patience ends, and which GPUs close. Only a head without a planned end needs it: on closed
GPUs nothing starts behind it, so what runs there began before, and no wrong guess starves it.
"""

from __future__ import annotations

from gpuschedd.core.model import NEVER_S, FirstHead, Policy
from gpuschedd.core.reservation import groups_of
from gpuschedd.core.timeline import Host, Need, Slot


def ends_at_s(first: FirstHead, policy: Policy) -> float:
    """When the patience of a head ends, by the start it was first expected to have."""
    expected_at_s = min(first.expected_at_s, first.since_s + policy.guess_length_s)
    return expected_at_s + policy.head_patience_s


def closed_for(expected: Host, need: Need) -> frozenset[int]:
    """Positions of as many GPUs as it asks, in one NVLink set, of those that it could ever use.

    First those on which it could sit now, then those whose youngest job is oldest.
    """
    ready = {slot.position for slot in expected.fitting(need)}
    sets = []
    for group in groups_of(expected.eligible(need), need):
        usable = [slot for slot in group if expected.free_at_s(slot, need) < NEVER_S]
        if len(usable) >= need.gpus:
            sets.append(sorted(_rank(slot, ready) for slot in usable)[: need.gpus])
    # The set whose last GPU comes first: what is missing most decides.
    closed = min(sets, key=lambda ranks: ranks[::-1], default=[])
    return frozenset(position for _busy, _since_s, position in closed)


def _rank(slot: Slot, ready: set[int]) -> tuple[bool, float, int]:
    youngest_s = max((load.since_s for load in slot.loads), default=0.0)
    return (slot.position not in ready, youngest_s, slot.position)
