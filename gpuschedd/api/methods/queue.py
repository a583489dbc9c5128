"""The queue in scheduling order, and everybody's usage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from gpusched_client.errors import NotFound
from gpusched_client.terms import JobState
from gpusched_client.wire.admin_messages import UsageRequest, UsageResult, UsageView
from gpusched_client.wire.job_messages import QueueRequest, QueueResult
from gpusched_client.wire.message import Response
from gpuschedd.api.methods.reading import job_views
from gpuschedd.api.registry import Call, handles
from gpuschedd.core.fairshare import share_of
from gpuschedd.core.job import Job
from gpuschedd.core.priority import queue_order


@handles(QueueRequest)
async def queue(call: Call, request: QueueRequest) -> Response:
    state = call.state
    await call.services.budget.acquire(call.caller.uid, request.limit)
    rows = _in_order(call)
    begin = 0
    if request.after is not None:
        for job, _ in rows:
            begin += 1
            if job.job_id == request.after:
                break
        else:
            raise NotFound(
                f"job {request.after} is not in the queue, or no longer; read it from the start",
                {"job_id": request.after},
            )
    page = list(islice(rows, request.limit))
    shown = await job_views(call, [job for job, _ in page])
    return QueueResult(
        jobs=tuple(
            replace(view, queue_position=begin + place + 1, priority=priority)
            for place, (view, (_, priority)) in enumerate(zip(shown, page, strict=True))
        ),
        total=len(state.jobs) - len(state.holding),
    )


def _in_order(call: Call) -> Iterator[tuple[Job, float | None]]:
    """Pending jobs in scheduling order, then those that are held, delayed or dependent."""
    state = call.state
    for waiting, parts in queue_order(call.controller.snapshots.take(), state.policy):
        job = state.jobs.get(waiting.job_id)
        if job is not None:
            yield job, parts.priority
    for job_id, job in state.jobs.items():
        if job.state is JobState.PENDING and job_id not in state.queues:
            yield job, None


@handles(UsageRequest)
async def usage(call: Call, _request: UsageRequest) -> Response:
    controller = call.controller
    state, snapshot = controller.state, controller.snapshots.take()
    names = dict(state.user_of) | controller.charging.users()
    users = []
    for uid, user in names.items():
        standing = snapshot.standings.get(uid)
        own = [state.jobs[job_id] for job_id in state.holding if state.jobs[job_id].uid == uid]
        users.append(
            UsageView(
                user=user,
                uid=uid,
                usage_gpu_s=state.accounts.usage(uid, snapshot.now_s),
                shares=standing.share if standing else share_of(user, (), state.policy),
                factor=standing.factor if standing else None,
                running_jobs=len(own),
                running_gpus=controller.charging.rate_of_user(uid),
                pending_jobs=state.live_of[uid] - len(own),
            )
        )
    users.sort(key=lambda view: (-(view.factor or 0.0), view.user))
    return UsageResult(users=tuple(users[:10_000]))
