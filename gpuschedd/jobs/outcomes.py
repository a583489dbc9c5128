"""One outcome per job that a request names: done, or why not, without touching the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpusched_client.errors import Denied, GpuschedError, NotFound
from gpusched_client.terms import JobId, JobState
from gpusched_client.wire.job_messages import Outcome
from gpuschedd.core.job import Job
from gpuschedd.jobs.batch import Batch
from gpuschedd.jobs.principal import Principal
from gpuschedd.store.records import AuditRow

Act = Callable[[Job], tuple[str, JobState]]


def outcomes_of(
    batch: Batch, caller: Principal, job_ids: Sequence[int], act: Act, method: str
) -> tuple[Outcome, ...]:
    """One outcome per id, in their order; an id that is named again is not judged again."""
    known = {
        job_id: outcome_of(batch, caller, JobId(job_id), act, method)
        for job_id in dict.fromkeys(job_ids)
    }
    return tuple(known[job_id] for job_id in job_ids)


def outcome_of(batch: Batch, caller: Principal, job_id: JobId, act: Act, method: str) -> Outcome:
    """An act's text and state, or its refusal, as an outcome."""
    try:
        text, state = act(_changeable(batch, caller, job_id, method))
    except GpuschedError as error:
        return Outcome(job_id=job_id, code=error.code, text=error.message)
    return Outcome(job_id=job_id, text=text, state=state)


def _changeable(batch: Batch, caller: Principal, job_id: JobId, method: str) -> Job:
    """The job, if it is live and the caller may change it; an admin's reach is on record."""
    job = batch.job(job_id)
    if job is None:
        raise NotFound(f"there is no job {job_id}")
    if not caller.may_change(job):
        raise not_yours(job)
    if not caller.owns(job):
        row = AuditRow(batch.wall_s, caller.uid, caller.pid, method, "done", f"job {job_id}")
        batch.audits.append(row)
    return job


def not_yours(job: Job) -> Denied:
    """The refusal of somebody else's request."""
    return Denied(f"job {job.job_id} belongs to {job.user}; only its owner or an admin may do this")
