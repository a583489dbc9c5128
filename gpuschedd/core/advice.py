"""What a submitter should know at once: that a job waits for more than our jobs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gpusched_client.units import (
    DAY_S,
    HOUR_S,
    MINUTE_S,
    bytes_text,
    duration_about,
    duration_short,
)
from gpuschedd.core import lengths, promises
from gpuschedd.core.job import Job
from gpuschedd.core.lengths import Basis
from gpuschedd.core.model import Backfill, Gpu, GpuState, Lengths, Policy, Request, Run
from gpuschedd.core.reasons import hints, plural
from gpuschedd.core.timeline import model_matches

OBSTACLES_NAMED_MAX = 4
HINTS_MAX = 5


def warnings_for(jobs: Iterable[Job], gpus: Iterable[Gpu], policy: Policy) -> tuple[str, ...]:
    """One sentence for each kind of obstacle, each once."""
    known = tuple(gpus)
    texts = [
        text
        for job in jobs
        for text in (_slice_note(job.request, known), _obstacle(job.request, known, policy))
        if text is not None
    ]
    return tuple(dict.fromkeys(texts))


def _slice_note(request: Request, gpus: tuple[Gpu, ...]) -> str | None:
    """A whole GPU is a slice of one where there is nothing else; who names a model knows it."""
    is_plain = request.gpus == 1 and request.vram_bytes is None and request.gpu_model is None
    suited = [gpu for gpu in gpus if gpu.total_bytes >= request.card_bytes]
    if not is_plain or not suited or not all(gpu.is_slice for gpu in suited):
        return None
    least = min(gpu.total_bytes for gpu in suited)
    return f"the GPUs here are MIG slices: it gets one, of {bytes_text(least)} or more; see --mig"


def beyond_limit(jobs: Iterable[Job], max_gpus: int | None) -> tuple[str, ...]:
    """One sentence where a job asks more GPUs than its user's running jobs may ever hold."""
    asked = max((job.request.gpus for job in jobs), default=0)
    if max_gpus is None or asked <= max_gpus:
        return ()
    return (
        f"asks {plural(asked, 'GPU')}; your limit is {max_gpus}: it waits until an admin raises "
        "that. Lower --gpus to have it run.",
    )


def hints_for(
    jobs: Iterable[Job],
    known: Lengths,
    policy: Policy,
    *,
    longest_s: float | None,
    all_limited: bool,
) -> tuple[str, ...]:
    """One sentence for each kind of GPU job without limit and estimate: what a limit would bring.

    `longest_s`: the longest that users may ask. `all_limited`: all jobs that hold GPUs have limits.
    """
    if policy.backfill is Backfill.OFF:
        return ()
    kinds = {
        (job.uid, job.length_key or "", job.request): None
        for job in jobs
        if job.request.gpus and (job.request.time_limit_s, job.request.estimate_s) == (None, None)
    }
    is_promised = all_limited and promises.sticks(policy)
    gets = "gets a promised start" if is_promised else "lets it start in gaps before others"
    texts = {
        _limit_hint(lengths.expected(known, *kind, policy), kind[1], longest_s, gets): None
        for kind in kinds
    }
    shown, more = [*texts][:HINTS_MAX], len(texts) - HINTS_MAX
    return (*shown, f"{more} more kinds of jobs have no limit") if more > 0 else tuple(shown)


def _limit_hint(found: lengths.Expectation, key: str, longest_s: float | None, gets: str) -> str:
    limit_s = _roomy_limit_s(found.runs)
    if longest_s is not None:
        limit_s = min(limit_s, int(longest_s))
    is_known = found.basis in (Basis.KIND, Basis.KEY)
    longest = max((run.length_s for run in found.runs), default=0.0)
    if not is_known or limit_s <= longest:
        return "no limit: others' waits cannot be planned around it; --time sets one"
    took = " and ".join(duration_about(run.length_s, longest) for run in reversed(found.runs))
    return f"{key or 'jobs like it'} took {took}; --time {duration_short(limit_s)} {gets}"


def _roomy_limit_s(runs: Iterable[Run]) -> int:
    """About twice what the runs took, in the steps in which people write limits."""
    taken_s = [run.length_s for run in runs] or [0.0]
    wanted_s = 2 * sum(taken_s) / len(taken_s)
    step_s = 5 * MINUTE_S if wanted_s <= HOUR_S else HOUR_S if wanted_s <= DAY_S else 6 * HOUR_S
    return max(1, math.ceil(wanted_s / step_s)) * step_s


def _obstacle(request: Request, gpus: tuple[Gpu, ...], policy: Policy) -> str | None:
    """Why the request could not start now even if no job of ours ran; None: it could."""
    if request.gpus == 0 or not gpus:
        return None
    suited = [gpu for gpu in gpus if _suits(gpu, request, policy)]
    free = [gpu for gpu in suited if _is_free(gpu, request, policy)]
    if len(free) >= request.gpus:
        return None
    blocked = [gpu for gpu in suited if gpu not in free]
    if not blocked:
        return None
    in_the_way = [_why(gpu) for gpu in blocked]
    more = len(in_the_way) - OBSTACLES_NAMED_MAX
    text = "; ".join(in_the_way[:OBSTACLES_NAMED_MAX]) + (f"; and {more} more" if more > 0 else "")
    text = "; ".join([text, *hints(blocked)])
    return (
        f"it can start only when others leave: {len(free)} of the {plural(request.gpus, 'GPU')} it "
        f"needs would be free now ({text})"
    )


def _suits(gpu: Gpu, request: Request, policy: Policy) -> bool:
    """Large enough and of the right model, were it empty and in service."""
    if request.gpu_model is not None and not model_matches(request.gpu_model, gpu.model):
        return False
    needed = 0 if request.vram_bytes is None else request.vram_bytes + policy.margin_bytes
    return gpu.capacity_bytes >= needed and gpu.total_bytes >= request.card_bytes


def _is_free(gpu: Gpu, request: Request, policy: Policy) -> bool:
    if gpu.state is not GpuState.OK:
        return False
    if request.vram_bytes is None:
        return gpu.whole_idle
    return gpu.capacity_bytes - gpu.foreign_bytes >= request.vram_bytes + policy.margin_bytes


def _why(gpu: Gpu) -> str:
    if gpu.state is not GpuState.OK:
        return f"GPU {gpu.label} is {gpu.state}: {gpu.state_text}"
    held = gpu.foreign_text or "others"
    return f"GPU {gpu.label}: {bytes_text(gpu.foreign_bytes)} held by {held}"
