"""What several methods read: jobs, live or from the database, as a caller may see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from gpusched_client.errors import NotFound
from gpusched_client.terms import JobId, JobState
from gpusched_client.wire.gpu_messages import GpuView
from gpusched_client.wire.job_messages import JobView, Outcome
from gpuschedd.api import views
from gpuschedd.api.limits import VIEWS_AT_ONCE
from gpuschedd.api.registry import Call
from gpuschedd.core.job import Job
from gpuschedd.core.model import ExpectedStart
from gpuschedd.jobs.outcomes import not_yours
from gpuschedd.store.history import History
from gpuschedd.store.records import Brief

T = TypeVar("T")

_UID_DIGITS_MAX = 10  # more is not a uid


async def read(call: Call, work: Callable[[History], T]) -> T:
    """The answer of the database, when the caller's turn has come. Raises LimitReached."""
    return await call.services.reader.ask(call.caller.account, work)


async def find(call: Call, job_id: JobId) -> Job:
    """The job, live or not. Raises NotFound."""
    job = call.state.jobs.get(job_id) or call.services.recent.jobs.get(job_id)
    if job is None:
        job = await read(call, lambda history: history.job(job_id))
    if job is None:
        raise NotFound(f"there is no job {job_id}", {"job_id": job_id})
    await in_memory(call, [job])
    return call.state.jobs.get(job_id, job)


async def in_memory(call: Call, jobs: Iterable[Job]) -> None:
    """Wait until State has what the database shows of these: a reader sees a commit before it.

    Else who hears of a job's end, or of a new job, asks again and hears of none.
    """
    live = call.state.jobs
    for job in jobs:
        known = live.get(job.job_id)
        if known is not job and (known is not None or not job.is_final):
            await call.controller.is_applied.wait()
            return


async def job_views(
    call: Call, jobs: Iterable[Job], briefs: Mapping[JobId, Brief] | None = None
) -> tuple[JobView, ...]:
    """As the caller may see them, each as it is given: jobs of different instants would
    contradict each other. Others have their turns in between. `briefs` where they are read already.
    """
    state, clock = call.state, call.controller.clock
    jobs = tuple(jobs)
    waits = any(job.state is JobState.PENDING for job in jobs)
    # Both at once, each in a thread of its own: on a busy host each is waited for.
    reading = asyncio.ensure_future(_briefs(call, [job.job_id for job in jobs], briefs))
    expected: Mapping[JobId, ExpectedStart] = {}
    try:
        if waits:
            expected = await call.services.expected.find()
        known = await reading
    finally:
        reading.cancel()
    shown = []
    for number, job in enumerate(jobs, start=1):
        own = call.caller.may_change(job)
        hides = call.services.auth.hides_names(call.caller) and not own
        view = views.job_view(state, clock, job, expected, own=own, hides_name=hides)
        brief = None if hides else known.get(job.job_id)
        shown.append(view if brief is None else views.with_brief(view, brief))
        if number % VIEWS_AT_ONCE == 0:
            await call.services.budget.pause(call.caller.account)
    return tuple(shown)


async def _briefs(
    call: Call, job_ids: Sequence[JobId], known: Mapping[JobId, Brief] | None
) -> Mapping[JobId, Brief]:
    if known is not None:
        return known
    briefs = call.services.briefs
    kept = briefs.known(job_ids)
    if len(kept) == len(job_ids):
        return kept
    found = await read(call, lambda history: briefs.read(history, job_ids))
    briefs.keep(found)
    return found


async def with_finals(
    call: Call,
    outcomes: tuple[Outcome, ...],
    of_final: Callable[[Job], Outcome],
) -> tuple[Outcome, ...]:
    """Jobs that are not live may be in the database: they are over, not unknown."""
    missed = [JobId(entry.job_id) for entry in outcomes if entry.code == NotFound.code]
    if not missed:
        return outcomes
    jobs, _ = await read(call, lambda history: history.jobs(ids=missed))
    found = {job.job_id: job for job in jobs}

    def outcome_of(entry: Outcome) -> Outcome:
        job = found.get(JobId(entry.job_id))
        if entry.code != NotFound.code or job is None or not job.is_final:
            return entry
        if not call.caller.may_change(job):
            denied = not_yours(job)
            return replace(entry, code=denied.code, text=denied.message)
        return of_final(job)

    return tuple(outcome_of(entry) for entry in outcomes)


def gpu_views(call: Call) -> list[GpuView]:
    """All GPUs, as of the last sample."""
    return views.gpu_views(
        call.state,
        call.services.gpu_readings.used(),
        stale=call.services.gpu_readings.is_stale,
        for_admin=call.caller.is_admin,
    )


def names_and_uids(
    users: tuple[str, ...] | None,
) -> tuple[list[str] | None, list[int] | None]:
    """Names, or decimal uids where all are numbers."""
    if users is None:
        return None, None
    if all(user.isascii() and user.isdecimal() for user in users):
        return None, [int(user) for user in users if len(user) <= _UID_DIGITS_MAX]
    return list(users), None


def only_own(call: Call, uids: list[int] | None) -> list[int]:
    """Of the users asked for only the caller: who may not see a name may not try it either."""
    return [call.caller.uid] if uids is None or call.caller.uid in uids else []
