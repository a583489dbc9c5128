"""Jobs that wait for a place of their environment: a directory, a command, an account.

What was there at submit and is away at the start is the host's trouble and not the job's: it waits
without an attempt being counted, its age kept. One probe looks again for all jobs of a user that
wait for the same place. Judged inside a batch like any order; no I/O.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpusched_client.terms import Cause, EventKind, JobState
from gpuschedd.core.job import Dropped, EnvironmentWait, Gone, Job, NeverRan
from gpuschedd.jobs.batch import Batch

PROBE_AFTER_S = (5.0, 15.0, 60.0, 300.0)  # after the 1st, 2nd, 3rd, each later look


class Awaited(NamedTuple):
    """Whose jobs wait, and for what."""

    uid: int
    place: str


@dataclass(frozen=True, slots=True)
class Group:
    """The jobs of a user that wait for one place, oldest first, and when it is looked for again."""

    awaited: Awaited
    jobs: tuple[Job, ...]
    next_try_s: float


def groups_of(jobs: Iterable[Job]) -> dict[Awaited, Group]:
    """Of the jobs that wait for their environment; held ones wait for somebody first."""
    found: dict[Awaited, list[Job]] = defaultdict(list)
    for job in jobs:
        if job.environment is not None and job.state is JobState.PENDING and job.hold is None:
            found[Awaited(job.uid, job.environment.place)].append(job)
    return {awaited: _group(awaited, waiting) for awaited, waiting in found.items()}


def _group(awaited: Awaited, jobs: list[Job]) -> Group:
    jobs.sort(key=lambda job: job.job_id)
    waits = (job.environment for job in jobs if job.environment is not None)
    return Group(awaited, tuple(jobs), min(wait.next_try_s for wait in waits))


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
    after = batch.advance(job, NeverRan(same_attempt=True, environment=wait))
    batch.emit(EventKind.JOB_REQUEUED, after, error=fault)


def found_again(batch: Batch, awaited: Awaited) -> None:
    """A probe found the place: its jobs go on."""
    for job in _waiting(batch, awaited):
        batch.put(replace(job, environment=None))
        batch.emit(EventKind.JOB_RELEASED, job, place=awaited.place)


def still_lost(batch: Batch, awaited: Awaited, fault: str | None) -> None:
    """A probe did not find it, or (None) could not be made. Whoever waited too long fails."""
    patience_s = batch.state.config.jobs.environment_patience_s
    for job in _waiting(batch, awaited):
        wait = job.environment
        assert wait is not None, "it is one of those that wait"
        if fault is not None and batch.now_s - wait.since_s >= patience_s:
            _give_up(batch, job, fault)
            continue
        tries = wait.tries + (fault is not None)
        after_s = PROBE_AFTER_S[min(tries, len(PROBE_AFTER_S) - 1)]
        after = replace(
            wait, fault=fault or wait.fault, tries=tries, next_try_s=batch.now_s + after_s
        )
        batch.put(replace(job, environment=after))


def _waiting(batch: Batch, awaited: Awaited) -> tuple[Job, ...]:
    found = (batch.job(job_id) for job_id in batch.state.awaiting)
    group = groups_of(job for job in found if job is not None).get(awaited)
    return () if group is None else group.jobs


def _give_up(batch: Batch, job: Job, fault: str) -> None:
    ended = batch.advance(job, Dropped(JobState.FAILED, batch.wall_s, Cause.SETUP, fault))
    batch.emit(EventKind.JOB_ENDED, ended, state=str(ended.state), detail=fault)
