"""Jobs of unknown shadow time: what they wait for, and the GPUs kept for the first of them.

Such a job holds no reservation. Owns the choice of the kept set, on which no job without limit is
placed.
"""

from __future__ import annotations

from gpuschedd.core import reasons
from gpuschedd.core.model import NEVER_S, Gpu, Reason
from gpuschedd.core.reservation import groups_of
from gpuschedd.core.timeline import Host, Need, Slot


def why_unknown(host: Host, need: Need, gpus: tuple[Gpu, ...]) -> tuple[Reason, list[Slot]]:
    """What a job of unknown shadow time waits for, and the GPUs kept for it (only against jobs).

    Kept: free GPUs first, then by planned end, then by the start of the job without limit on it.
    """
    slots = host.eligible(need)
    timed = [(host.free_without_unlimited_s(slot, need), slot) for slot in slots]
    if (kept := _kept(host, need, timed)) is not None:
        jobs = sorted({load.job_id for s in kept for load in s.loads if load.end_s == NEVER_S})
        return reasons.unlimited(need, jobs), kept
    alien = [s for at_s, s in timed if at_s == NEVER_S and s.foreign_end_s == NEVER_S]
    ever = [slot for at_s, slot in timed if at_s < NEVER_S]
    if len(ever) >= need.gpus and not alien:
        return reasons.unjoined(need, ever, gpus), []
    if len(ever) + len(alien) >= need.gpus:
        return reasons.foreign(need, alien), []
    stuck = sorted({load.job_id for s in slots for load in s.loads if load.stuck})
    return reasons.unavailable(need, len(ever), gpus, stuck), []


def _kept(host: Host, need: Need, timed: list[tuple[float, Slot]]) -> list[Slot] | None:
    could = {slot.position for at_s, slot in timed if at_s < NEVER_S}
    for group in groups_of([slot for _at_s, slot in timed], need):
        ready = [slot for slot in group if slot.position in could]
        if len(ready) >= need.gpus:
            return sorted(ready, key=lambda slot: _kept_key(host, slot, need))[: need.gpus]
    return None


def _kept_key(host: Host, slot: Slot, need: Need) -> tuple[float, float, int]:
    since_s = [load.since_s for load in slot.loads if load.end_s == NEVER_S]
    return (host.free_at_s(slot, need), max(since_s, default=0.0), slot.position)
