"""What owners do to their jobs: cancel, update, put first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpusched_client.errors import Conflict
from gpusched_client.terms import JobId
from gpusched_client.wire.job_messages import (
    CancelRequest,
    CancelResult,
    Outcome,
    TopRequest,
    TopResult,
    UpdateRequest,
    UpdateResult,
)
from gpusched_client.wire.message import Response
from gpuschedd.api.methods.reading import with_finals
from gpuschedd.api.registry import Call, handles
from gpuschedd.core.job import Job
from gpuschedd.jobs import cancel, update
from gpuschedd.jobs.batch import Batch

TOP_ROWS = 100  # as which it counts; it may change as many as update.GIVING_WAY_MAX


@handles(CancelRequest)
async def cancel_jobs(call: Call, request: CancelRequest) -> Response:
    outcomes = await call.change_each(
        request.job_ids,
        lambda batch, job_ids: cancel.cancel(
            batch, call.caller, replace(request, job_ids=tuple(job_ids))
        ),
    )
    await _deliver(call, outcomes)
    outcomes = await with_finals(call, outcomes, _cancel_of_final)
    call.services.auth.record_outcomes(call.caller, "cancel", outcomes)
    return CancelResult(outcomes=outcomes)


async def _deliver(call: Call, outcomes: Sequence[Outcome]) -> None:
    """Of an attempt that is under way an order must have left before its answer does."""
    done = [JobId(outcome.job_id) for outcome in outcomes if outcome.code is None]
    await call.services.orders.deliver(done)


def _cancel_of_final(job: Job) -> Outcome:
    """Idempotent: a job that is over already is not an error."""
    return Outcome(job_id=job.job_id, text=f"was {job.state} already", state=job.state)


@handles(UpdateRequest)
async def update_jobs(call: Call, request: UpdateRequest) -> Response:
    controller = call.controller
    extensions = update.Extensions()

    def change(batch: Batch, job_ids: Sequence[int]) -> Sequence[Outcome]:
        some = replace(request, job_ids=tuple(job_ids))
        snapshot = controller.snapshots.take() if request.time_limit_s is not None else None
        return update.update(batch, call.caller, some, snapshot, extensions)

    outcomes = await call.change_each(request.job_ids, change)
    await _deliver(call, outcomes)
    outcomes = await with_finals(call, outcomes, update_of_final)
    call.services.auth.record_outcomes(call.caller, "update", outcomes)
    return UpdateResult(outcomes=outcomes)


@handles(TopRequest)
async def put_first(call: Call, request: TopRequest) -> Response:
    job_id = JobId(request.job_id)
    outcome = await call.change(lambda batch: update.top(batch, call.caller, job_id), TOP_ROWS)
    (outcome,) = await with_finals(call, (outcome,), update_of_final)
    call.services.auth.record_outcomes(call.caller, "top", (outcome,))
    return TopResult(outcome=outcome)


def update_of_final(job: Job) -> Outcome:
    """A job that is over takes no change."""
    return Outcome(
        job_id=job.job_id,
        code=Conflict.code,
        text=f"job {job.job_id} is {job.state}; it can no longer be changed",
        state=job.state,
    )
