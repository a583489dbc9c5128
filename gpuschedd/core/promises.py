"""Promises: when a reservation sticks, whether one goes on, and what is to blame when it is late.

A pass (`plan`) ends a promise by these answers, and `jobs.passes` writes down how. The blame is
found by undoing one kind of disturbance at a time and asking for the shadow time again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from gpuschedd.core.horizon import promised_job
from gpuschedd.core.model import (
    HOUR_S,
    NEVER_S,
    Backfill,
    GpuState,
    Order,
    Policy,
    Promise,
    PromiseException,
    Request,
    RunningJob,
    Snapshot,
    Waiting,
)
from gpuschedd.core.queues import age_s
from gpuschedd.core.reservation import shadow
from gpuschedd.core.timeline import Host, decided_end_s, is_stuck


def sticks(policy: Policy) -> bool:
    """True where reservations can become promises at all."""
    return policy.backfill is not Backfill.OFF and policy.promise_within_s > 0


def slack_s(policy: Policy) -> float:
    """How near a promise follows early ends; by order of arrival all the way, as in plain EASY."""
    return 0.0 if policy.order is Order.FCFS else policy.promise_slack_s


def becomes_promise(job: Waiting, at_s: float, now_s: float, policy: Policy) -> bool:
    """T is within reach, or the holder's age outweighs every F and its nice.

    Not while T is but the floor of now (a job is overdue, or a sample is awaited): nobody planned
    that time.
    """
    if not sticks(policy) or at_s <= now_s:
        return False
    if at_s - now_s <= policy.promise_within_s:
        return True
    return policy.order is Order.PRIORITY and _age_outweighs(job, now_s, policy)


def becomes_promise_at_s(job: Waiting, at_s: float, now_s: float, policy: Policy) -> float | None:
    """When a reservation that keeps its T becomes a promise."""
    if not sticks(policy) or at_s <= now_s:
        return None
    due_s = at_s - policy.promise_within_s
    if policy.order is Order.PRIORITY and job.window_since_s is not None:
        missing_s = (policy.w_fair + job.nice) / policy.w_age_per_h * HOUR_S - age_s(job, now_s)
        due_s = min(due_s, now_s + missing_s)
    return max(now_s, due_s)


def _age_outweighs(job: Waiting, now_s: float, policy: Policy) -> bool:
    return policy.w_age_per_h * age_s(job, now_s) / HOUR_S > policy.w_fair + job.nice


def carried_on(
    promise: Promise,
    at_s: float,
    earliest_s: float,
    blame: Callable[[], PromiseException],
    *,
    planned: bool,
) -> Promise:
    """The live promise after a pass in which its holder's shadow time is at_s.

    Not `planned`: at_s is only a floor, so it makes the promise no earlier. Nothing makes it
    earlier than `earliest_s`: what early ends free before that is for others.
    """
    start_by_s = promise.start_by_s
    if planned:
        start_by_s = min(start_by_s, max(at_s, earliest_s))
    late = at_s > start_by_s
    delayed_by = (promise.delayed_by or blame()) if late else None
    if start_by_s == promise.start_by_s and delayed_by is promise.delayed_by:
        return promise
    return replace(promise, start_by_s=start_by_s, delayed_by=delayed_by)


def blame(
    snapshot: Snapshot, policy: Policy, request: Request, uid: int, promise: Promise
) -> PromiseException:
    """The first kind of disturbance without which the holder could still start in time.

    If no single one suffices: the first that makes a difference; if none does, an admin's change.
    """
    by_s = max(promise.start_by_s, snapshot.now_s)
    kinds = ((kind, _undone_since(kind, undo, promise)) for kind, undo in _UNDO)
    # What was there when it was promised was counted then, and is thought of last.
    undos = (*kinds, (PromiseException.FOREIGN_MEMORY, _no_foreign))
    first: PromiseException | None = None
    undone, before_s = snapshot, _at_s(snapshot, policy, request, uid)
    if before_s <= by_s:
        return PromiseException.LATE_END  # its GPUs are planned to be free; a job is overdue
    for exception, undo in undos:
        if _at_s(undo(snapshot, policy), policy, request, uid) <= by_s:
            return exception
    for exception, undo in undos:
        undone = undo(undone, policy)
        if first is None and _at_s(undone, policy, request, uid) < before_s:
            first = exception
    return first or PromiseException.ADMIN_CHANGE


def _at_s(snapshot: Snapshot, policy: Policy, request: Request, uid: int) -> float:
    host = Host(snapshot, policy)
    found = shadow(host, host.need(request, uid))
    return NEVER_S if found is None else found.at_s


def holder_start_s(snapshot: Snapshot, policy: Policy) -> float:
    """When the live promise's holder could start, as planned; inf where that is unknown."""
    holder = promised_job(snapshot)
    return NEVER_S if holder is None else _at_s(snapshot, policy, holder.request, holder.uid)


_Undo = Callable[[Snapshot, Policy], Snapshot]


def _in_service(state: GpuState) -> _Undo:
    def undo(snapshot: Snapshot, _policy: Policy) -> Snapshot:
        gpus = tuple(
            replace(gpu, state=GpuState.OK) if gpu.state is state else gpu for gpu in snapshot.gpus
        )
        if state is GpuState.UNREAD:
            gpus = tuple(replace(gpu, fresh=True) for gpu in gpus)
        return replace(snapshot, gpus=gpus)

    return undo


def _no_foreign(snapshot: Snapshot, _policy: Policy, since_s: float | None = None) -> Snapshot:
    """`since_s`: none that began later."""
    gpus = tuple(
        replace(gpu, foreign_bytes=0, whole_idle=True)
        if since_s is None or (gpu.foreign_since_s or 0.0) > since_s
        else gpu
        for gpu in snapshot.gpus
    )
    return replace(snapshot, gpus=gpus)


def _undone_since(kind: PromiseException, undo: _Undo, promise: Promise) -> _Undo:
    if kind is not PromiseException.FOREIGN_MEMORY:
        return undo
    return partial(_no_foreign, since_s=promise.promised_at_s)


def _jobs(change: Callable[[RunningJob, float, Policy], RunningJob | None]) -> _Undo:
    def undo(snapshot: Snapshot, policy: Policy) -> Snapshot:
        changed = (change(job, snapshot.now_s, policy) for job in snapshot.running)
        return replace(snapshot, running=tuple(job for job in changed if job is not None))

    return undo


def _as_declared(job: RunningJob, _now_s: float, _policy: Policy) -> RunningJob:
    grants = tuple(replace(grant, held_bytes=grant.declared_bytes) for grant in job.grants)
    return replace(job, grants=grants)


def _not_stuck(job: RunningJob, now_s: float, policy: Policy) -> RunningJob | None:
    return None if is_stuck(job, now_s, policy) else job


def _as_decided(job: RunningJob, _now_s: float, _policy: Policy) -> RunningJob:
    return replace(job, time_limit_s=job.decided_limit_s)


def _launched_in_time(job: RunningJob, _now_s: float, _policy: Policy) -> RunningJob:
    return job if job.started_at_s is None else replace(job, started_at_s=job.decided_at_s)


def _ended_in_time(job: RunningJob, now_s: float, policy: Policy) -> RunningJob | None:
    return None if decided_end_s(job, policy) < now_s else job


_UNDO: tuple[tuple[PromiseException, _Undo], ...] = (
    (PromiseException.GPU_DRAINED, _in_service(GpuState.DRAINED)),
    (PromiseException.GPU_LOST, _in_service(GpuState.LOST)),
    (PromiseException.GPU_SICK, _in_service(GpuState.SICK)),
    (PromiseException.GPU_UNREAD, _in_service(GpuState.UNREAD)),
    (PromiseException.FOREIGN_MEMORY, _no_foreign),
    (PromiseException.ABOVE_DECLARATION, _jobs(_as_declared)),
    (PromiseException.LIMIT_EXTENDED, _jobs(_as_decided)),
    (PromiseException.STUCK_JOB, _jobs(_not_stuck)),
    (PromiseException.LATE_LAUNCH, _jobs(_launched_in_time)),
    (PromiseException.LATE_END, _jobs(_ended_in_time)),
)
