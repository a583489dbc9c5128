"""Jobs that no end brings GPUs, not even an expected one: what they wait for.

Such a job holds no reservation, respects the others' and starts when it fits.
"""

from __future__ import annotations

from gpuschedd.core import reasons
from gpuschedd.core.model import NEVER_S, Gpu, Reason
from gpuschedd.core.timeline import Host, Need


def why_unknown(expected: Host, need: Need, gpus: tuple[Gpu, ...]) -> Reason:
    """`expected`: the host with expected ends."""
    slots = expected.eligible(need)
    timed = [(expected.free_at_s(slot, need), slot) for slot in slots]
    alien = [s for at_s, s in timed if at_s == NEVER_S and s.foreign_end_s == NEVER_S]
    ever = [slot for at_s, slot in timed if at_s < NEVER_S]
    if len(ever) >= need.gpus and not alien:
        return reasons.unjoined(need, ever, gpus)
    if len(ever) + len(alien) >= need.gpus:
        return reasons.foreign(need, alien)
    stuck = sorted({load.job_id for slot in slots for load in slot.loads if load.stuck})
    return reasons.unavailable(need, len(ever), gpus, stuck)
