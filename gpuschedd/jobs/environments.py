"""Jobs that wait for a place of their environment: a directory, a command, an account.

What was there at submit and is away at the start is the host's trouble and not the job's: it waits
without an attempt being counted, its age kept. One probe looks again for all jobs of a user that
wait for the same place. Judged inside a batch like any order; no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

from gpusched_client.terms import Cause, EventKind, JobId, JobState
from gpuschedd.core.job import Awaited, Dropped, EnvironmentWait, Gone, Job, NeverRan
from gpuschedd.jobs.batch import Batch

PROBE_AFTER_S = (5.0, 15.0, 60.0, 300.0)  # after the 1st, 2nd, 3rd, each later look


JOBS_PER_BATCH = 200  # jobs that one batch changes: others' commands have their turns between


def next_try_s(waiting: Mapping[JobId, float]) -> float:
    """Of the jobs that wait for one place. The newest look is kept on one of them alone."""
    return max(waiting.values())


def lost_at_start(batch: Batch, job: Job, place: str, fault: str) -> None:
    """An attempt ended before anything ran, since a place was away: the job waits for it.

    With no patience at all it fails at once.
    """
    patience_s = batch.state.config.jobs.environment_patience_s
    if patience_s <= 0:
        ended = batch.advance(
            job, Gone(JobState.FAILED, batch.wall_s, None, None, Cause.SETUP, fault)
        )
        batch.emit(EventKind.JOB_ENDED, ended, state=str(ended.state), detail=fault)
        return
    wait = EnvironmentWait(place, fault, batch.now_s, batch.now_s + PROBE_AFTER_S[0])
    others = batch.state.awaiting.get(Awaited(job.uid, place), {})
    if others:  # that wait for the same already: it is looked for as often
        known = batch.state.jobs[max(others, key=lambda job_id: others[job_id])].environment
        assert known is not None, "it is one of those that wait"
        wait = replace(wait, tries=known.tries, next_try_s=known.next_try_s)
    after = batch.advance(job, NeverRan(same_attempt=True, environment=wait))
    batch.emit(EventKind.JOB_REQUEUED, after, error=fault)


def found_again(batch: Batch, awaited: Awaited) -> None:
    """A probe found the place: its jobs go on, so many at a time."""
    for job in islice(_waiting(batch, awaited), JOBS_PER_BATCH):
        batch.put(replace(job, environment=None))
        batch.emit(EventKind.JOB_RELEASED, job, place=awaited.place)


def still_lost(batch: Batch, awaited: Awaited, fault: str | None) -> None:
    """A probe did not find it, or (None) could not be made. Whoever waited too long fails.

    So many at a time; once nobody is left who did, the next look is written down.
    """
    if fault is not None:
        expired = [job for job in _waiting(batch, awaited) if _is_over(batch, job)]
        for job in expired[:JOBS_PER_BATCH]:
            _give_up(batch, job, fault)
        if expired:
            return
    last = max(_waiting(batch, awaited), key=_last_looked, default=None)
    if last is None or last.environment is None:
        return
    tries = last.environment.tries + (fault is not None)
    after_s = PROBE_AFTER_S[min(tries, len(PROBE_AFTER_S) - 1)]
    wait = replace(
        last.environment,
        fault=fault or last.environment.fault,
        tries=tries,
        next_try_s=batch.now_s + after_s,
    )
    batch.put(replace(last, environment=wait))


def _waiting(batch: Batch, awaited: Awaited) -> Iterator[Job]:
    for job_id in batch.state.awaiting.get(awaited, {}):
        job = batch.job(job_id)
        wait = job.environment if job is not None else None
        if job is None or wait is None or Awaited(job.uid, wait.place) != awaited:
            continue  # changed by an earlier command of this batch
        if job.state is JobState.PENDING and job.hold is None:
            yield job


def _last_looked(job: Job) -> float:
    return 0.0 if job.environment is None else job.environment.next_try_s


def _is_over(batch: Batch, job: Job) -> bool:
    patience_s = batch.state.config.jobs.environment_patience_s
    return job.environment is not None and batch.now_s - job.environment.since_s >= patience_s


def _give_up(batch: Batch, job: Job, fault: str) -> None:
    ended = batch.advance(job, Dropped(JobState.FAILED, batch.wall_s, Cause.SETUP, fault))
    batch.emit(EventKind.JOB_ENDED, ended, state=str(ended.state), detail=fault)
