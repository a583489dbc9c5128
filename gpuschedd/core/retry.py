"""Once more with more memory: what an attempt that ran out of VRAM asks for the next time. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from gpuschedd.core.job import Job
from gpuschedd.core.model import Inventory, Policy, Request
from gpuschedd.core.timeline import model_matches

GROWTH = 1.25


def next_request(
    job: Job,
    peak_bytes: int | None,
    inventory: Inventory,
    policy: Policy,
    had_bytes: int = 0,
) -> Request | None:
    """The next attempt's request; None: no retry is left.

    1.25 x the larger of peak and declaration; above what fits beside the margin on the largest card
    it becomes a whole-GPU job. A whole-GPU job moves to larger cards where there are any: there is
    nothing more to be had of the largest. `had_bytes`: the smallest card that it had.
    """
    if job.retries_used >= job.retries:
        return None
    request = job.request
    cards = [
        kind
        for kind in inventory.kinds
        if request.gpu_model is None or model_matches(request.gpu_model, kind.model)
    ]
    most_total = max((kind.total_bytes for kind in cards), default=0)
    most_shared = max((kind.capacity_bytes for kind in cards), default=0) - policy.margin_bytes
    known = max(peak_bytes or 0, request.vram_bytes or 0)
    wanted = math.ceil(GROWTH * known)
    if request.vram_bytes is None:
        if had_bytes >= most_total > 0:
            return None
        larger = max(wanted, had_bytes + 1) if had_bytes else wanted
        return replace(request, card_bytes=max(request.card_bytes, min(larger, most_total)))
    if wanted <= most_shared:
        return replace(request, vram_bytes=wanted)
    return replace(request, vram_bytes=None, card_bytes=min(wanted, most_total))
