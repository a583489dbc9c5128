"""Cancels and signals of clients. Each function judges one request inside a batch. No I/O.

A cancel is committed before anything is done about it; a running job ends by its supervisor.
"""

from __future__ import annotations

from dataclasses import replace

from gpusched_client.errors import Conflict, LimitReached
from gpusched_client.terms import Cause, EventKind, JobState
from gpusched_client.wire.job_messages import CancelRequest, Outcome
from gpuschedd.core.job import CancelOrder, Dropped, Job
from gpuschedd.jobs.batch import Batch
from gpuschedd.jobs.outcomes import outcomes_of
from gpuschedd.jobs.principal import Principal

SIGNALS_MAX = 100  # pending signal orders of one job


def cancel(batch: Batch, caller: Principal, request: CancelRequest) -> tuple[Outcome, ...]:
    """One outcome per id; a job that is not live is not_found here, and may be in the database."""

    def act(job: Job) -> tuple[str, JobState]:
        return _cancel_one(batch, caller, request, job)

    return outcomes_of(batch, caller, request.job_ids, act, "cancel")


def _cancel_one(
    batch: Batch, caller: Principal, request: CancelRequest, job: Job
) -> tuple[str, JobState]:
    if job.is_final:
        return f"was {job.state} already", job.state
    if request.signal is not None:
        return _signal(batch, job, request.signal)
    if job.cancel is not None:
        return "is being cancelled already", job.state
    order = CancelOrder(caller.uid, caller.user, batch.wall_s, request.reason)
    ordered = replace(job, cancel=order)
    batch.put(ordered)
    if job.state is JobState.PENDING:
        after = batch.advance(
            ordered,
            Dropped(JobState.CANCELLED, batch.wall_s, Cause.CANCELLED, cancel_text(order)),
        )
        batch.emit(EventKind.JOB_ENDED, after, state=str(after.state), by=caller.user)
        return "cancelled", after.state
    batch.emit(EventKind.CANCEL_REQUESTED, job, by=caller.user, reason=request.reason)
    return "cancel requested", job.state


def cancel_text(order: CancelOrder) -> str:
    """Who cancelled, and why."""
    return f"cancelled by {order.by}" + (f": {order.reason}" if order.reason else "")


def _signal(batch: Batch, job: Job, signum: int) -> tuple[str, JobState]:
    if job.state is JobState.PENDING:
        raise Conflict(f"job {job.job_id} is not running; a queued job takes no signal")
    if len(job.signals) >= SIGNALS_MAX:
        raise LimitReached(
            f"job {job.job_id} was sent {len(job.signals)} signals; that is the limit"
        )
    number = job.signals[-1][0] + 1 if job.signals else 1
    batch.put(replace(job, signals=(*job.signals, (number, signum))))
    batch.emit(EventKind.SIGNAL_REQUESTED, job, signal=signum)
    return "signalled", job.state
