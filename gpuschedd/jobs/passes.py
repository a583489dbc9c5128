"""What a pass writes: starts, jobs past their end, warnings of limits, promises. No I/O.

The planner only says what to do; here its plan becomes changes of a batch, and after the commit
part of the state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpusched_client.terms import EventKind, JobState
from gpuschedd.core.horizon import rooms_of
from gpuschedd.core.job import Job, Placed
from gpuschedd.core.model import (
    GpuState,
    Plan,
    Promise,
    PromiseEnd,
    PromiseException,
    PromiseOutcome,
    Snapshot,
    Start,
)
from gpuschedd.core.promises import sticks
from gpuschedd.core.reasons import out_of_service
from gpuschedd.core.timeline import is_stuck
from gpuschedd.jobs import gates
from gpuschedd.jobs.batch import Batch
from gpuschedd.jobs.state import State
from gpuschedd.store.records import FIRST_IN_ORDER, PromiseRow
from gpuschedd.system.clock import SchedulerClock

WARNED_PART = 0.9  # of a time limit: then watchers and the log hear of it
_STATE_OF = {
    PromiseException.GPU_DRAINED: GpuState.DRAINED,
    PromiseException.GPU_LOST: GpuState.LOST,
    PromiseException.GPU_SICK: GpuState.SICK,
    PromiseException.GPU_UNREAD: GpuState.UNREAD,
}
PROMISE_NEWS_S = 1.0  # a promise that moves forward by less is no event
CLOSED_RETRY_S = 5.0  # between two looks whether the host lets users in again


def place(batch: Batch, clock: SchedulerClock, start: Start, made: Plan) -> None:
    """Charge the GPUs that the planner chose; what follows the commit starts the job.

    On record with it: why this job and not another.
    """
    job = batch.job(start.job_id)
    assert job is not None
    index_of = batch.state.gpu_index_of()
    grants = tuple(
        sorted(start.grants, key=lambda grant: (index_of.get(grant.uuid, -1), grant.uuid))
    )
    grace_s = batch.state.policy.kill_grace_s
    placed = batch.advance(job, Placed(grants, start.whole, batch.now_s, grace_s, start.expected_s))
    batch.emit(
        EventKind.JOB_PLACED,
        placed,
        gpus=[index_of.get(grant.uuid, -1) for grant in grants],
        rule=str(start.rule),
        rank=start.rank,
        head=None if start.head is None else start.head[0],
        head_start_s=None if start.head is None else clock.to_wall_s(start.head[1]),
        guessed=start.guessed or None,
        over_limits=start.over_limits or None,
        without_end=start.without_end or None,
        nice=job.nice or None,
        **{FIRST_IN_ORDER: [[each, round(priority, 1)] for each, priority in made.first if grants]},
    )


def mark_stuck(batch: Batch, snapshot: Snapshot) -> None:
    """Jobs far past their planned end leave the timeline, on record."""
    for running in snapshot.running:
        if running.stuck or not is_stuck(running, snapshot.now_s, batch.state.policy):
            continue
        job = batch.job(running.job_id)
        if job is not None and job.holds_gpus:
            batch.put(replace(job, stuck=True))
            batch.emit(EventKind.JOB_STUCK, job)


def warn_of_limits(batch: Batch) -> None:
    """Say once, for each limit, that most of it has passed."""
    for job_id in batch.state.holding:
        job = batch.job(job_id)
        at_s = None if job is None else warning_at_s(job)
        if job is not None and at_s is not None and batch.now_s >= at_s:
            limit_s = job.request.time_limit_s
            batch.put(replace(job, warned_limit_s=limit_s))
            batch.emit(EventKind.JOB_NEAR_LIMIT, job, limit=f"{limit_s:.0f} s", used=WARNED_PART)


def promise_rows(batch: Batch, clock: SchedulerClock, made: Plan) -> list[PromiseRow]:
    """The promise that this pass makes, moves or ends, as rows and events."""
    rows: list[PromiseRow] = []
    if made.ended is not None:
        rows.append(_ended_row(batch, clock, made.ended))
    promise = made.promise
    if promise is not None and promise != batch.state.promise:
        rows.append(_open_row(clock, promise))
        job = batch.job(promise.job_id)
        if job is not None and _is_news(promise, batch.state.promise):
            batch.emit(EventKind.START_PROMISED, job, start_by_s=rows[-1].start_by_s)
    return rows


def _open_row(clock: SchedulerClock, promise: Promise) -> PromiseRow:
    return PromiseRow(
        job_id=promise.job_id,
        promised_at_s=clock.to_wall_s(promise.promised_at_s),
        promised_sched_s=promise.promised_at_s,
        start_by_s=clock.to_wall_s(promise.start_by_s),
        start_by_sched_s=promise.start_by_s,
        detail=promise.delayed_by and str(promise.delayed_by),
    )


def _ended_row(batch: Batch, clock: SchedulerClock, ended: PromiseEnd) -> PromiseRow:
    promise = ended.promise
    wall_s = clock.to_wall_s(ended.at_s)
    job = batch.job(promise.job_id)
    batch.emit(
        EventKind.PROMISE_ENDED,
        job,
        outcome=str(ended.outcome),
        exception=ended.exception and str(ended.exception),
        why=_what_was_in_the_way(batch, ended.exception),
    )
    kept = batch.state.promise_row
    return PromiseRow(
        job_id=promise.job_id,
        promised_at_s=kept.promised_at_s if kept else clock.to_wall_s(promise.promised_at_s),
        promised_sched_s=promise.promised_at_s,
        start_by_s=kept.start_by_s if kept else clock.to_wall_s(promise.start_by_s),
        start_by_sched_s=promise.start_by_s,
        outcome=str(ended.outcome),
        outcome_at_s=wall_s,
        started_at_s=wall_s if job is not None and job.holds_gpus else None,
        detail=ended.exception and str(ended.exception),
    )


def _what_was_in_the_way(batch: Batch, exception: PromiseException | None) -> str | None:
    """The GPUs that the exception speaks of, or the change."""
    if exception is PromiseException.CONFIG:
        if not sticks(batch.state.policy):
            return "by the configuration that was read again no start is promised"
        return "the configuration that was read again leaves it no room"
    state = _STATE_OF.get(exception) if exception is not None else None
    found = [gpu for gpu in batch.state.gpus if gpu.state is state]
    return ", ".join(out_of_service(found)) or None


@dataclass(frozen=True, slots=True)
class PromiseChange:
    """What a batch does to the live promise, made real once the row is durable."""

    promise: Promise | None
    row: PromiseRow

    def adopt(self, state: State) -> None:
        """The next pass is bound by it."""
        state.promise = self.promise
        state.promise_row = None if self.promise is None else self.row


def promise_change(batch: Batch, clock: SchedulerClock) -> PromiseChange | None:
    """The promise's end, where its holder was changed by more than name or a shorter limit.

    Or the cause of a delay, where a change makes it late. None: it goes on as it is.
    """
    promise = batch.state.promise
    if promise is None:
        return None
    if promise.job_id in batch.voided:
        exception = batch.voided[promise.job_id]
        outcome = PromiseOutcome.WITHDRAWN if exception is None else PromiseOutcome.LOST
        end = PromiseEnd(promise, outcome, exception, batch.now_s)
        return PromiseChange(None, _ended_row(batch, clock, end))
    if promise.delayed_by is None and promise.job_id in batch.delayed:
        late = replace(promise, delayed_by=batch.delayed[promise.job_id])
        return PromiseChange(late, _open_row(clock, late))
    return None


def is_above_limit(job: Job, snapshot: Snapshot) -> bool:
    """True where its user's limit leaves a promised job, were it not promised, no room."""
    room = rooms_of(replace(snapshot, promise=None)).get(job.uid)
    return room is not None and (job.request.gpus > room[0] or room[1] < 1)


def adopt_plan(state: State, made: Plan, rows: Iterable[PromiseRow]) -> None:
    """The plan is durable: readers see it, and its promise binds the next pass."""
    state.plan = made
    state.promise = made.promise
    state.reservation = made.reservation
    open_rows = [row for row in rows if row.outcome is None]
    if made.promise is None:
        state.promise_row = None
    elif open_rows:
        state.promise_row = open_rows[-1]


def next_pass_at_s(state: State, made: Plan, now_s: float) -> float | None:
    """The next time at which something changes by itself, in scheduler time; None: never."""
    times = [made.next_change_at_s] if made.next_change_at_s is not None else []
    if state.host_closed is not None:
        times.append(now_s + CLOSED_RETRY_S)
    for job_id in state.delayed:
        times += gates.opening_times_s(state.jobs[job_id])
    warnings = (warning_at_s(state.jobs[job_id]) for job_id in state.holding)
    times += [at_s for at_s in warnings if at_s is not None]
    return min(times, default=None)


def _is_news(promise: Promise, before: Promise | None) -> bool:
    """Another job's promise, or one that has moved forward."""
    if before is None or before.job_id != promise.job_id:
        return True
    return before.start_by_s - promise.start_by_s >= PROMISE_NEWS_S


def warning_at_s(job: Job) -> float | None:
    """When WARNED_PART of a running job's limit has passed; None: it has none, or was warned."""
    limit_s = job.request.time_limit_s
    if job.started_sched_s is None or limit_s is None or limit_s == job.warned_limit_s:
        return None
    if job.state is not JobState.RUNNING:
        return None
    return job.started_sched_s + WARNED_PART * limit_s
