"""Reasons: why a job waits, as a code, a sentence and numbers.

Owns the wording. Decides nothing: it is told what the pass found. No sentence holds a time of day;
`expected_at_s` and its like are scheduler times in the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gpusched_client.terms import JobId, PendingReason
from gpusched_client.units import bytes_apart, bytes_text, duration_about
from gpuschedd.core.links import largest_set
from gpuschedd.core.model import FirstHead, Gpu, GpuState, Reason, UserLimit
from gpuschedd.core.timeline import Host, Need, Slot

NAMED_MAX = 8


def plural(count: int, noun: str) -> str:
    """ "1 GPU", "2 GPUs"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def named(job_ids: Iterable[JobId]) -> str:
    """ "job 3", "jobs 3, 4 and 5"."""
    ids = list(job_ids)
    if len(ids) == 1:
        return f"job {ids[0]}"
    shown = [str(job_id) for job_id in ids[:NAMED_MAX]]
    if len(ids) > NAMED_MAX:
        return f"jobs {', '.join(shown)} and {len(ids) - NAMED_MAX} more"
    return f"jobs {', '.join(shown[:-1])} and {shown[-1]}"


def asks(need: Need, beside_bytes: int = 0) -> str:
    """What a request needs, e.g. "2 GPUs with 18.5 GiB each".

    `beside_bytes` is an amount that stands beside it and must not look the same.
    """
    what = plural(need.gpus, "whole GPU" if need.whole else "GPU")
    if not need.whole:
        size = bytes_apart(need.bytes, beside_bytes)
        what += f" with {size}{' each' if need.gpus > 1 else ''} (margin included)"
    if need.model is not None:
        what += f" of model {need.model}"
    return what + (" joined by NVLink" if need.nvlink and need.gpus > 1 else "")


def resources(
    host: Host, need: Need, free: int, at_s: float | None, waits_for: Sequence[Slot]
) -> Reason:
    """Too few GPUs are free. `waits_for`: the GPUs it is expected to get, the head's at at_s.

    Of these it may share some already: only who is on the others is in its way.
    """
    ready = {slot.position for slot in host.fitting(need)}
    missing = [slot for slot in waits_for if slot.position not in ready]
    jobs = sorted({load.job_id for slot in missing for load in slot.loads})
    free_bytes = [s.headroom_bytes for s in host.eligible(need) if host.is_open_to(s, need)]
    most = max(0, 0, *free_bytes)
    text = f"needs {asks(need, most)}; {free} of {len(host.slots)} can take it now"
    if need.nvlink and free >= need.gpus > 1:
        joined = largest_set(slot.gpu for slot in host.fitting(need))
        text += f", at most {max(1, joined)} of them joined by NVLink"
    numbers: dict[str, int | float] = {"gpus": need.gpus, "free_gpus": free}
    if not need.whole:
        numbers["needed_bytes"] = need.bytes
        if free_bytes:
            text += f", the most free on one is {bytes_apart(most, need.bytes)}"
            numbers["most_free_bytes"] = most
        else:
            text += ", none takes it beside the jobs that are there"
    if jobs:
        text += f"; waits for {named(jobs)}"
    aliens = [slot for slot in host.eligible(need) if _is_in_the_way(slot, need)]
    if aliens:
        text += f"; others hold memory on {_alien_text(aliens)}"
    if at_s is not None:
        numbers["expected_at_s"] = at_s
    gpus = tuple(slot.gpu.uuid for slot in missing if slot.loads or slot.foreign_held)
    return Reason(PendingReason.RESOURCES, text, numbers, tuple(jobs), gpus)


def reserved(
    need: Need,
    free: int,
    length_s: float | None,
    head: JobId,
    head_at_s: float,
    spare: int,
    *,
    guesses: bool,
) -> Reason:
    """It would fit now, but would delay the head job.

    `length_s`: its limit; where the hold `guesses`, how long it is expected to run.
    """
    may = "is expected to" if guesses else "may"
    runs = "has no time limit" if length_s is None else f"{may} run {duration_about(length_s)}"
    text = (
        f"{plural(free, 'GPU')} could take it now, but it {runs}, past the expected start of "
        f"job {head}, which would then be delayed (spare GPUs: {spare})"
    )
    numbers = {"gpus": need.gpus, "free_gpus": free, "spare_gpus": spare, "head_at_s": head_at_s}
    return Reason(PendingReason.RESERVED, text, numbers, (head,))


def strict(head: JobId) -> Reason:
    """`backfill = off`: nobody overtakes."""
    text = f"waits behind job {head}: backfill is off, so nothing overtakes it"
    return Reason(PendingReason.PRIORITY, text, {}, (head,))


def user_limit(
    need_gpus: int, room: tuple[float, float], limit: UserLimit, kept_for: JobId | None = None
) -> Reason:
    """Over its user's limit; `room` is what that leaves, a promised job counted as running.

    `kept_for`: the user's own job for which GPUs are kept, counted as well.
    """
    gpus, jobs = max(0.0, room[0]), max(0.0, room[1])
    counted = "" if kept_for is None else f", job {kept_for} counted, for which GPUs are kept"
    named = () if kept_for is None else (kept_for,)
    if jobs < 1 and limit.max_jobs is not None:
        text = f"its user's limit of {plural(limit.max_jobs, 'running job')} is reached{counted}"
        numbers = {"jobs_left": jobs, "max_jobs": limit.max_jobs}
        return Reason(PendingReason.USER_LIMIT, text, numbers, named)
    assert limit.max_gpus is not None
    needs = f"needs {plural(need_gpus, 'GPU')}"
    text = f"{needs}; its user's limit of {limit.max_gpus} leaves {gpus:.0f}{counted}"
    if need_gpus > limit.max_gpus:
        text = f"{needs}; its user's limit is {limit.max_gpus}: it waits until an admin raises that"
    numbers = {"gpus": need_gpus, "gpus_left": gpus, "max_gpus": limit.max_gpus}
    return Reason(PendingReason.USER_LIMIT, text, numbers, named)


def unplanned(lack: Reason, jobs: Sequence[JobId]) -> Reason:
    """Too few GPUs are free, as `lack` says, and on those it will get are jobs without limit."""
    text = f"{lack.text}; no planned end: {named(jobs)} {'has' if len(jobs) == 1 else 'have'}"
    return replace(lack, code=PendingReason.UNLIMITED_JOB, text=f"{text} no limit")


def closed(need: Need, free: int, head: JobId, first: FirstHead, ended_at_s: float) -> Reason:
    """It would fit now, on GPUs that are closed for a head whose patience ended at that time.

    In times, not durations: the text stands until a pass makes another.
    """
    text = (
        f"{plural(free, 'GPU')} could take it now, but the patience of job {head}, which is first, "
        "has ended: nothing behind it starts on the GPUs that it is to get"
    )
    numbers = {
        "gpus": need.gpus,
        "free_gpus": free,
        "head_since_at_s": first.since_s,
        "head_expected_at_s": first.expected_at_s,
        "patience_ended_at_s": ended_at_s,
    }
    return Reason(PendingReason.RESERVED, text, numbers, (head,))


def _is_in_the_way(slot: Slot, need: Need) -> bool:
    """Foreign memory, and no job of ours, keeps the request from this GPU."""
    if slot.loads or not slot.foreign_held:
        return False
    if need.whole:
        return not slot.whole_idle
    return slot.headroom_bytes < need.bytes


def _alien_text(slots: Sequence[Slot]) -> str:
    """ "GPU 0: 21 GiB (pid 4242 of bob (python) with 21504 MiB)", the first few."""
    held = [
        f"GPU {slot.gpu.label}: {bytes_text(slot.gpu.foreign_bytes)}"
        + (f" ({slot.gpu.foreign_text})" if slot.gpu.foreign_text else "")
        for slot in slots[:NAMED_MAX]
    ]
    more = len(slots) - len(held)
    text = ", ".join(held) + (f" and {more} more" if more else "")
    return "; ".join([text, *hints(slot.gpu for slot in slots)])


def hints(gpus: Iterable[Gpu]) -> tuple[str, ...]:
    """The settings that would let whole jobs beside foreign use, each once."""
    return tuple(dict.fromkeys(gpu.foreign_hint for gpu in gpus if gpu.foreign_hint))


def foreign(need: Need, slots: Sequence[Slot]) -> Reason:
    """Memory of processes outside this scheduler is in the way."""
    text = f"needs {asks(need)}; waits for memory that others hold on {_alien_text(slots)}"
    numbers = {"gpus": need.gpus, "foreign_bytes": sum(s.gpu.foreign_bytes for s in slots)}
    return Reason(
        PendingReason.FOREIGN_USE, text, numbers, (), tuple(slot.gpu.uuid for slot in slots)
    )


def unjoined(need: Need, slots: Sequence[Slot], gpus: Sequence[Gpu]) -> Reason:
    """Enough GPUs, but not joined by NVLink: those that would join them are out of service."""
    joined = max(1, largest_set(slot.gpu for slot in slots))
    out = out_of_service(gpus)
    text = (
        f"needs {asks(need)}; of the {len(slots)} that can ever take it at most {joined} are "
        f"joined pair by pair" + (f": {', '.join(out)}" if out else "")
    )
    numbers = {"gpus": need.gpus, "usable_gpus": len(slots), "joined_gpus": joined}
    uuids = tuple(gpu.uuid for gpu in gpus if gpu.state is not GpuState.OK)
    return Reason(PendingReason.GPU_UNAVAILABLE, text, numbers, (), uuids)


def unavailable(need: Need, in_service: int, gpus: Sequence[Gpu], stuck: Sequence[JobId]) -> Reason:
    """GPUs are out of service (or held by stuck jobs), and it cannot start without one of them."""
    out = out_of_service(gpus)
    if stuck:
        out.append(f"stuck {named(stuck)}")
    elif in_service + sum(gpu.state is not GpuState.OK for gpu in gpus) < need.gpus:
        # Those that could are gone from the host, or by the configuration somebody else's.
        models = ", ".join(sorted({gpu.model for gpu in gpus})) or "none"
        out.append(f"the scheduler has {plural(len(gpus), 'GPU')} now ({models})")
    can = f"only {in_service} of the GPUs" if in_service else "no GPU"
    text = f"needs {asks(need)}; {can} can take it" + (f": {', '.join(out)}" if out else "")
    numbers = {"gpus": need.gpus, "usable_gpus": in_service}
    uuids = tuple(gpu.uuid for gpu in gpus if gpu.state is not GpuState.OK)
    return Reason(PendingReason.GPU_UNAVAILABLE, text, numbers, tuple(stuck), uuids)


def out_of_service(gpus: Iterable[Gpu]) -> list[str]:
    """ "GPUs 0 and 1 unread (the driver hangs)": those with the same to say together."""
    alike: dict[tuple[GpuState, str], list[str]] = {}
    for gpu in gpus:
        if gpu.state is not GpuState.OK:
            alike.setdefault((gpu.state, gpu.state_text), []).append(gpu.label)
    return [
        f"{_gpus(indices)} {state.value}" + (f" ({text})" if text else "")
        for (state, text), indices in alike.items()
    ]


def _gpus(indices: Sequence[str]) -> str:
    """ "GPU 0", "GPUs 0, 1 and 3"."""
    if len(indices) == 1:
        return f"GPU {indices[0]}"
    return f"GPUs {', '.join(indices[:-1])} and {indices[-1]}"


def no_gpus() -> Reason:
    """No inventory yet."""
    return Reason(PendingReason.NO_GPUS, "no GPU has been seen yet")


def cpu_slots(taken: int, slots: int) -> Reason:
    """CPU-only jobs wait for slots alone."""
    text = f"{taken} of {slots} slots for jobs without GPUs are taken"
    return Reason(PendingReason.CPU_SLOTS, text, {"slots": slots, "taken_slots": taken})


def behind(head: JobId | None) -> Reason:
    """For jobs that a pass need not look at: nothing that is free now is enough for them."""
    if head is None:
        return Reason(PendingReason.RESOURCES, "no GPU is free for it now")
    text = f"no GPU is free for it now; job {head} is first"
    return Reason(PendingReason.PRIORITY, text, {}, (head,))
