"""The host of a pass: kept from pass to pass, it is what one made anew would be."""

from __future__ import annotations

from gpuschedd.core.model import GIB
from gpuschedd.core.timeline import Host
from tests.support.core_builders import EXACT, gpus, running, snapshot_of


def state_of(host: Host) -> list[tuple[object, ...]]:
    """All that differs by what runs."""
    slots = [
        (slot.headroom_bytes, slot.busy_until_s, slot.alone, sorted(slot.loads))
        for slot in host.slots
    ]
    return [*slots, (host.now_s, host.next_change_s, [slot.position for slot in host.idle()])]


def test_a_host_that_a_job_has_left_is_as_if_it_had_never_been_there() -> None:
    wide, shared = running(1, [0, 1], limit_s=50.0), running(2, [2, 3], vram=10 * GIB, limit_s=50.0)
    beside, last = running(3, [3], vram=20 * GIB, limit_s=90.0), running(4, [4], limit_s=70.0)
    kept = Host(snapshot_of(gpus(6), [wide, shared, beside, last]), EXACT)
    assert kept.next_change_s == 50.0
    for at_s, gone, left in (
        (10.0, wide, [shared, beside, last]),
        (20.0, shared, [beside, last]),
        (70.0, last, [beside]),
    ):
        kept.leave(gone)
        kept.go_to(at_s)
        anew = Host(snapshot_of(gpus(6), left, now_s=at_s), EXACT)
        assert state_of(kept) == state_of(anew)
