"""Jobs that wait because of whose they are: the account is gone, or the configuration bars it.

Such jobs are held with the reason and never ended; what is put right releases them. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from gpusched_client.terms import EventKind, HoldKind, JobId, JobState
from gpuschedd.core.job import Job
from gpuschedd.core.model import PromiseException
from gpuschedd.jobs.batch import Batch


def is_allowed(user: str, groups: Iterable[str], allowed: Collection[str]) -> bool:
    """Whether jobs.users names this user; an empty list names everybody."""
    return not allowed or user in allowed or any(f"@{group}" in allowed for group in groups)


def follow_config(batch: Batch, allows: Callable[[str], bool]) -> None:
    """Hold the waiting jobs of users who are barred now, release those who no longer are."""
    for job in tuple(batch.live_jobs()):
        if job.state is not JobState.PENDING:
            continue
        if job.hold is None and not allows(job.user):
            detail = f"the configuration (jobs.users) no longer names {job.user}"
            batch.put(replace(job, hold=HoldKind.CONFIG, hold_detail=detail))
            batch.voided[job.job_id] = PromiseException.CONFIG
            batch.emit(EventKind.JOB_HELD, job, reason=detail)
        elif job.hold == HoldKind.CONFIG and allows(job.user):
            release(batch, job)


def release_accounts(batch: Batch, job_ids: Iterable[JobId]) -> None:
    """Release jobs whose account is there again."""
    for job_id in job_ids:
        job = batch.job(job_id)
        if job is not None and job.hold == HoldKind.ACCOUNT:
            release(batch, job)


def release(batch: Batch, job: Job) -> None:
    """The job may run again; its age begins again."""
    batch.rested.add(job.job_id)
    batch.put(replace(job, hold=None, hold_detail=None))
    batch.emit(EventKind.JOB_RELEASED, job)
