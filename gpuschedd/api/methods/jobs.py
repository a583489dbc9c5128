"""Lists of jobs, and one job in full."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace
from itertools import islice

from gpusched_client.terms import JobId, JobState
from gpusched_client.wire.job_messages import JobQuery, JobsRequest, JobsResult, JobView
from gpusched_client.wire.message import Response
from gpuschedd.api import views
from gpuschedd.api.limits import POSITIONS_MAX
from gpuschedd.api.methods.reading import find, in_memory, job_views, names_and_uids, only_own, read
from gpuschedd.api.registry import Call, handles
from gpuschedd.core import forecast
from gpuschedd.core.job import Job
from gpuschedd.core.model import Policy, Snapshot
from gpuschedd.core.priority import queue_order
from gpuschedd.store.history import History
from gpuschedd.store.records import Brief, Event, GpuUse, Payload, PromiseRow

CHANGES_MAX = 3  # of a job while it is read: then it is shown as it is

_Record = tuple[Payload | None, list[Event], PromiseRow | None, list[GpuUse]]


@handles(JobsRequest)
async def jobs(call: Call, request: JobsRequest) -> Response:
    since_s = None
    if request.ended_within_s is not None:
        since_s = call.controller.clock.wall_s() - request.ended_within_s
    names, uids = names_and_uids(request.users)
    if request.name is not None and call.services.auth.hides_names(call.caller):
        uids = only_own(call, uids)
    asked = request.limit if request.ids is None else min(request.limit, len(request.ids))
    await call.services.budget.acquire(call.caller.account, asked)
    async with call.services.lists.of(call.caller.account, asked):
        return await _page(call, request, names, uids, since_s)


async def _page(
    call: Call,
    request: JobsRequest,
    names: list[str] | None,
    uids: list[int] | None,
    since_s: float | None,
) -> JobsResult:
    briefs = call.services.briefs
    known = ChainMap(call.state.jobs, call.services.recent.jobs)

    def ask(history: History) -> tuple[list[Job], int, dict[JobId, Brief]]:
        jobs, total = history.jobs(
            ids=None if request.ids is None else [JobId(job_id) for job_id in request.ids],
            uids=uids,
            users=names,
            states=None if request.states is None else [str(s) for s in request.states],
            name=request.name,
            ended_since_s=since_s,
            before_id=None if request.before_id is None else JobId(request.before_id),
            limit=request.limit,
            known=known,
        )
        return jobs, total, briefs.read(history, [job.job_id for job in jobs])

    jobs, total, found = await read(call, ask)
    await in_memory(call, jobs)
    briefs.keep(found)
    return JobsResult(jobs=await job_views(call, jobs, found), total=total)


@handles(JobQuery)
async def job(call: Call, request: JobQuery) -> Response:
    job_id = JobId(request.job_id)
    job = await find(call, job_id)
    if not call.caller.may_change(job):
        return (await job_views(call, [job]))[0]
    job, record = await _with_record(call, job)
    payload, events, promise, uses = record
    (view,) = await job_views(call, [job])
    view = views.with_request(view, payload)
    state = call.state
    view = views.with_use(view, state, job, call.services.gpu_readings.uses_now(job) or uses)
    if job.state is JobState.PENDING and job_id in state.queues:
        view = await _explained(call, view, job)
    if promise is not None:
        view = views.with_promise(view, promise, events)
    return replace(view, events=tuple(views.job_event(event) for event in events))


async def _with_record(call: Call, job: Job) -> tuple[Job, _Record]:
    """What is on record of it, and the job as of then: the database may be a commit ahead."""
    job_id = job.job_id
    for _ in range(CHANGES_MAX):
        record = await read(
            call,
            lambda history: (
                history.payload(job_id),
                history.events(job_id),
                history.promise_of(job_id),
                history.gpu_uses(job_id),
            ),
        )
        await call.controller.is_applied.wait()  # events may be ahead of the job
        if job.is_final or call.state.jobs.get(job_id) is job:
            break
        job = await find(call, job_id)
    return job, record


async def _explained(call: Call, view: JobView, job: Job) -> JobView:
    """Where it stands, its priority in parts, and with what it would start now."""
    snapshot, policy = call.controller.snapshots.take(), call.state.policy
    return await call.services.planner.ask(
        call.caller.account, lambda: _explain(snapshot, policy, view, job)
    )


def _explain(snapshot: Snapshot, policy: Policy, view: JobView, job: Job) -> JobView:
    found = forecast.counterfactuals(snapshot, policy, job.job_id)
    view = replace(view, explanations=tuple(f"would start now {entry.text}" for entry in found))
    front = islice(queue_order(snapshot, policy), POSITIONS_MAX)
    for place, (waiting, parts) in enumerate(front, start=1):
        if waiting.job_id == job.job_id:
            return replace(
                view,
                queue_position=place,
                priority=parts.priority,
                priority_parts={"fair": parts.fair, "age": parts.age, "nice": parts.nice},
            )
    return view
