"""Forecast: answers on demand that a pass does not give, each by asking the same `plan` again.

Owns expected starts, counterfactuals and how far an owner may raise a running job's limit. Decides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice

from gpusched_client.errors import NotFound
from gpusched_client.terms import JobId
from gpusched_client.units import GIB, MIB, bytes_short, duration_short
from gpuschedd.core.aftermath import all_running
from gpuschedd.core.horizon import promised_job
from gpuschedd.core.model import (
    NEVER_S,
    NO_LIMIT,
    Counterfactual,
    ExpectedStart,
    FirstHead,
    Gpu,
    GpuState,
    Order,
    Plan,
    Policy,
    QueueView,
    Request,
    RunningJob,
    Snapshot,
    UserQueue,
    Waiting,
)
from gpuschedd.core.plan import plan
from gpuschedd.core.priority import queue_order
from gpuschedd.core.reasons import plural
from gpuschedd.core.reservation import shadow
from gpuschedd.core.timeline import Host, expected_end_s, foreign_end_s, grace_s_of

WALK_PASSES_MIN = 10
WALK_WORK_MAX = 200_000
# What is advised is rounded down, so that it is short to type and still true.
VRAM_STEP_BYTES, SMALL_VRAM_STEP_BYTES = 512 * MIB, MIB  # below 1 GiB in small steps
TIME_STEP_S = 60  # from two minutes on


def expected_starts(
    snapshot: Snapshot, policy: Policy, first: int = 200
) -> tuple[ExpectedStart, ...]:
    """Starts of the first jobs in scheduling order, if all end as expected and nobody submits.

    The order is that of now. A job without a known start, or beyond the end of the walk on a very
    large host, has start_s None.
    """
    ranked = [job for job, _parts in islice(queue_order(snapshot, policy), first)]
    ranked = [job for job in ranked if job.request.gpus]
    walk = replace(policy, order=Order.FCFS, promise_within_s=NEVER_S)
    limited = {uid: s for uid, s in snapshot.standings.items() if s.limit != NO_LIMIT}
    state = replace(snapshot, queues=_in_order(ranked), standings=limited)
    found: dict[JobId, ExpectedStart] = {}
    for _pass in range(_passes_max(snapshot, len(ranked))):
        made = plan(state, walk, explain=-1)
        for start in made.starts:
            gpus = tuple(grant.uuid for grant in start.grants)
            found[start.job_id] = ExpectedStart(start.job_id, state.now_s, gpus)
        if len(found) == len(ranked):
            break
        next_state = _advanced(state, made, policy)
        if next_state is None:
            break
        state = next_state
    return tuple(found.get(job.job_id, ExpectedStart(job.job_id, None, ())) for job in ranked)


def _passes_max(snapshot: Snapshot, jobs: int) -> int:
    """A bound on the work: a pass costs about one unit per GPU and job that it looks at."""
    size = len(snapshot.gpus) + len(snapshot.running) + jobs
    return max(WALK_PASSES_MIN, WALK_WORK_MAX // max(1, size))


def _in_order(jobs: list[Waiting]) -> QueueView:
    """One list of all, with positions for times: first-come-first-served keeps this very order."""
    if not jobs:
        return QueueView()
    placed = [replace(job, eligible_since_s=float(position)) for position, job in enumerate(jobs)]
    return QueueView(gpu=(_queue(-1, placed),))


def _queue(uid: int, jobs: list[Waiting]) -> UserQueue:
    whole = [job.request.gpus for job in jobs if job.request.vram_bytes is None]
    shared = [v for job in jobs if (v := job.request.vram_bytes) is not None]
    return UserQueue(
        uid, jobs[0].user, tuple(jobs), min(whole, default=None), min(shared, default=None)
    )


def _advanced(state: Snapshot, made: Plan, policy: Policy) -> Snapshot | None:
    """The state at the next expected end, its starts running; None when nothing ends later."""
    running = all_running(state, made)
    ends_s = {job.job_id: expected_end_s(job, state.now_s, policy) for job in running}
    next_s = min((*ends_s.values(), *_settling_s(state, policy)), default=NEVER_S)
    if next_s == NEVER_S:
        return None
    started = set(made.start_ids)
    gone = {job_id for job_id, end_s in ends_s.items() if end_s <= next_s}
    queues = _without(state.queues, started, made.first_heads)
    if not queues.gpu:
        return None
    return replace(
        state,
        now_s=next_s,
        gpus=tuple(_settled(gpu, state.now_s, next_s, policy) for gpu in state.gpus),
        running=tuple(job for job in running if job.job_id not in gone),
        queues=queues,
        promise=made.promise,
        reservation=None,
    )


def _settling_s(state: Snapshot, policy: Policy) -> Iterator[float]:
    """When the GPUs themselves change: foreign use gets old, a sample comes in."""
    for gpu in state.gpus:
        end_s = foreign_end_s(gpu, state.now_s, policy)
        if (gpu.foreign_bytes or not gpu.whole_idle) and end_s != NEVER_S:
            yield end_s
        if gpu.state is GpuState.OK and not gpu.fresh:
            yield state.now_s + policy.fresh_allowance_s


def _settled(gpu: Gpu, before_s: float, now_s: float, policy: Policy) -> Gpu:
    """The GPU later on, foreign use counted as ended where the timeline counts it so."""
    if foreign_end_s(gpu, before_s, policy) == now_s:
        gpu = replace(gpu, foreign_bytes=0, whole_idle=True, foreign_since_s=None, leaves_by_s=None)
    return gpu if gpu.fresh else replace(gpu, fresh=True)


def _without(
    queues: QueueView, started: set[JobId], first_heads: Mapping[JobId, FirstHead]
) -> QueueView:
    left = [
        replace(job, first_head=first_heads.get(job.job_id, job.first_head))
        for job in queues.gpu[0].jobs
        if job.job_id not in started
    ]
    return QueueView(gpu=(_queue(-1, left),)) if left else QueueView()


def counterfactuals(
    snapshot: Snapshot, policy: Policy, job_id: JobId
) -> tuple[Counterfactual, ...]:
    """Smaller requests with which the waiting job would start in a pass made now, largest first."""
    job = _waiting(snapshot, job_id)
    request = job.request
    if request.gpus == 0 or _starts(snapshot, policy, job, request):
        return ()
    found = (
        _fewer_gpus(snapshot, policy, job),
        _less_vram(snapshot, policy, job),
        _less_time(snapshot, policy, job),
    )
    return tuple(answer for answer in found if answer is not None)


def _waiting(snapshot: Snapshot, job_id: JobId) -> Waiting:
    for queue in (*snapshot.queues.gpu, *snapshot.queues.cpu):
        for job in queue.jobs:
            if job.job_id == job_id:
                return job
    raise NotFound(f"job {job_id} does not wait for GPUs alone")


def _starts(snapshot: Snapshot, policy: Policy, job: Waiting, request: Request) -> bool:
    """Would it start with that request, all else as it is? It keeps its place."""
    queues = tuple(
        _asking(queue, job, request) if queue.uid == job.uid else queue
        for queue in snapshot.queues.gpu
    )
    changed = replace(snapshot, queues=replace(snapshot.queues, gpu=queues))
    return job.job_id in plan(changed, policy, explain=-1).start_ids


def _asking(queue: UserQueue, job: Waiting, request: Request) -> UserQueue:
    """The list with another request of that job, and what is known of the list as far as it holds.

    It asks less than before, so that the most of any still bounds it.
    """
    whole, shared = queue.whole_gpus_min, queue.shared_bytes_min
    if request.vram_bytes is None:
        whole = request.gpus if whole is None else min(whole, request.gpus)
    else:
        shared = request.vram_bytes if shared is None else min(shared, request.vram_bytes)
    return replace(
        queue,
        jobs=tuple([replace(own, request=request) if own is job else own for own in queue.jobs]),
        whole_gpus_min=whole,
        shared_bytes_min=shared,
        shapes=None,
        requests=None if queue.requests is None else queue.requests.union([request]),
        least=None if queue.least is None else queue.least.union([request]),
    )


def _largest(candidates: list[Request], starts: Callable[[Request], bool]) -> Request | None:
    """The first that starts; candidates from the largest down."""
    return next((request for request in candidates if starts(request)), None)


def _fewer_gpus(snapshot: Snapshot, policy: Policy, job: Waiting) -> Counterfactual | None:
    smaller = [replace(job.request, gpus=n) for n in range(job.request.gpus - 1, 0, -1)]
    found = _largest(smaller, lambda request: _starts(snapshot, policy, job, request))
    if found is None:
        return None
    return Counterfactual(f"with {plural(found.gpus, 'GPU')}", found)


def _less_vram(snapshot: Snapshot, policy: Policy, job: Waiting) -> Counterfactual | None:
    """Only what is free on some GPU now can be the answer, so few amounts are tried."""
    asked = job.request.vram_bytes
    free = {
        _advised_vram(slot.headroom_bytes - policy.margin_bytes)
        for slot in Host(snapshot, policy).slots
    }
    amounts = sorted((a for a in free if a > 0 and (asked is None or a < asked)), reverse=True)
    smaller = [replace(job.request, vram_bytes=amount, card_bytes=0) for amount in amounts]
    found = _largest(smaller, lambda request: _starts(snapshot, policy, job, request))
    if found is None or found.vram_bytes is None:
        return None
    return Counterfactual(f"with --vram {bytes_short(found.vram_bytes)} or less", found)


def _advised_vram(free_bytes: int) -> int:
    step = VRAM_STEP_BYTES if free_bytes >= GIB else SMALL_VRAM_STEP_BYTES
    return free_bytes // step * step


def _less_time(snapshot: Snapshot, policy: Policy, job: Waiting) -> Counterfactual | None:
    """The limit that ends by the head's shadow time."""
    held = plan(snapshot, policy, explain=-1).reservation
    if held is None or held.job_id == job.job_id:
        return None
    left_s = held.start_s - snapshot.now_s - policy.launch_allowance_s - policy.kill_grace_s
    limit_s = int(left_s) if left_s < 2 * TIME_STEP_S else int(left_s) // TIME_STEP_S * TIME_STEP_S
    if limit_s < 1:
        return None
    request = replace(job.request, time_limit_s=float(limit_s))
    if not _starts(snapshot, policy, job, request):
        return None
    return Counterfactual(f"with --time {duration_short(limit_s)} or less", request)


def raise_limit_allowed(
    snapshot: Snapshot, policy: Policy, job_id: JobId, new_limit_s: float
) -> float:
    """The largest limit up to new_limit_s with which no promise moves later. Raises NotFound.

    Never less than the present limit. For a job without a limit: new_limit_s.
    """
    job = next((own for own in snapshot.running if own.job_id == job_id), None)
    if job is None:
        raise NotFound(f"job {job_id} does not run")
    holder = promised_job(snapshot)
    present_s = job.time_limit_s
    if holder is None or snapshot.promise is None or present_s is None:
        return new_limit_s
    before_s = _shadow_s(snapshot, policy, holder)
    by_s = max(before_s, snapshot.promise.start_by_s) if before_s < NEVER_S else NEVER_S
    if _shadow_s(_with_limit(snapshot, job, new_limit_s), policy, holder) <= by_s:
        return new_limit_s
    terms_by_s = by_s - grace_s_of(job, policy)
    ends_by_s = min(
        terms_by_s - job.decided_at_s - policy.launch_allowance_s,
        NEVER_S if job.started_at_s is None else terms_by_s - job.started_at_s,
    )
    return max(present_s, min(new_limit_s, float(int(ends_by_s))))


def _shadow_s(snapshot: Snapshot, policy: Policy, job: Waiting) -> float:
    host = Host(snapshot, policy)
    found = shadow(host, host.need(job.request, job.uid))
    return NEVER_S if found is None else found.at_s


def _with_limit(snapshot: Snapshot, job: RunningJob, limit_s: float) -> Snapshot:
    running = (
        replace(own, time_limit_s=limit_s) if own is job else own for own in snapshot.running
    )
    return replace(snapshot, running=tuple(running))
