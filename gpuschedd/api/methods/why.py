"""`why`: what the last start of a job put on record, for its owner and for those it passed.

Ids and numbers only: it says no more than the queue shows everybody, but for the name of an admin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpusched_client.errors import NotFound
from gpusched_client.terms import EventKind, JobId
from gpusched_client.wire.job_messages import Ranked, WhyRequest, WhyResult
from gpusched_client.wire.limits import NICE_MIN
from gpusched_client.wire.message import Response
from gpuschedd.api.methods.reading import find, read
from gpuschedd.api.registry import Call, handles
from gpuschedd.core.job import Job
from gpuschedd.store.history import History
from gpuschedd.store.records import FIRST_IN_ORDER, FIRST_OF_ALL, Event


@handles(WhyRequest)
async def why(call: Call, request: WhyRequest) -> Response:
    job = await find(call, JobId(request.job_id))
    placed, moved = await read(call, lambda history: _on_record(history, job.job_id))
    if placed is None or "rule" not in placed.data:
        raise _no_record(job)
    if call.services.auth.hides_names(call.caller):
        moved = None
    return _why(job.job_id, placed, moved)


def _on_record(history: History, job_id: JobId) -> tuple[Event | None, Event | None]:
    """Its last start, and the last time that an admin put it before everybody's jobs."""
    placed = history.last_event(job_id, EventKind.JOB_PLACED)
    return placed, history.last_event(job_id, EventKind.JOB_UPDATED, FIRST_OF_ALL)


def _no_record(job: Job) -> NotFound:
    if job.is_final or job.holds_gpus:
        text = f"job {job.job_id}: why it was placed is not on record, or no longer"
    else:
        text = f"job {job.job_id} has not been placed yet; `gq {job.job_id}` says what it waits for"
    return NotFound(text, {"job_id": job.job_id})


def _why(job_id: JobId, placed: Event, moved: Event | None) -> WhyResult:
    data: Mapping[str, Any] = placed.data
    is_first = moved is not None and data.get("nice") == NICE_MIN
    return WhyResult(
        job_id=job_id,
        placed_at_s=placed.at_s,
        gpu_indices=tuple(data.get("gpus") or ()),
        rule=data["rule"],
        rank=data.get("rank"),
        over_limits=data.get("over_limits"),
        without_end=data.get("without_end"),
        nice=data.get("nice"),
        head=data.get("head"),
        head_start_s=data.get("head_start_s"),
        guessed=bool(data.get("guessed")),
        put_first_by=str(moved.data["by"]) if moved is not None and is_first else None,
        first=tuple(
            Ranked(job_id, priority) for job_id, priority in data.get(FIRST_IN_ORDER) or ()
        ),
    )
