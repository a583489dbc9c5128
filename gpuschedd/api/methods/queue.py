"""The queue in scheduling order, and everybody's usage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from gpusched_client.errors import NotFound
from gpusched_client.terms import JobId, JobState
from gpusched_client.wire.admin_messages import UsageRequest, UsageResult, UsageView
from gpusched_client.wire.job_messages import QueueRequest, QueueResult
from gpusched_client.wire.message import Response
from gpuschedd.api.methods.reading import job_views
from gpuschedd.api.registry import Call, handles
from gpuschedd.core.fairshare import share_of
from gpuschedd.core.job import Job
from gpuschedd.core.model import Policy, Snapshot
from gpuschedd.core.priority import queue_order
from gpuschedd.jobs.state import State


@handles(QueueRequest)
async def queue(call: Call, request: QueueRequest) -> Response:
    account = call.caller.account
    await call.services.budget.acquire(account, request.limit)
    async with call.services.lists.of(account, request.limit):
        state, policy = call.state, call.state.policy
        snapshot = call.controller.snapshots.take()
        begin, ranked = await call.services.planner.ask(
            account, lambda: _ranked(snapshot, policy, request)
        )
        if begin is None:
            begin, ranked = _beside(state, request)
        elif len(ranked) < request.limit:
            missing = request.limit - len(ranked)
            ranked += [(job.job_id, None) for job in islice(_not_ranked(state), missing)]
        page = [(state.jobs[job_id], rank) for job_id, rank in ranked if job_id in state.jobs]
        shown = await job_views(call, [job for job, _ in page])
    return QueueResult(
        jobs=tuple(
            replace(view, queue_position=begin + place + 1, priority=priority)
            for place, (view, (_, priority)) in enumerate(zip(shown, page, strict=True))
        ),
        total=len(state.jobs) - len(state.holding),
    )


def _ranked(
    snapshot: Snapshot, policy: Policy, request: QueueRequest
) -> tuple[int | None, list[tuple[JobId, float | None]]]:
    """How many come before the page, and the page in scheduling order; None: it begins later."""
    rows = queue_order(snapshot, policy)
    begin = 0
    if request.after is not None:
        for waiting, _ in rows:
            begin += 1
            if waiting.job_id == request.after:
                break
        else:
            return None, []
    return begin, [(job.job_id, parts.priority) for job, parts in islice(rows, request.limit)]


def _beside(state: State, request: QueueRequest) -> tuple[int, list[tuple[JobId, float | None]]]:
    """A page of those that are held, delayed or dependent: they come behind all others."""
    rows = _not_ranked(state)
    begin = len(state.queues)
    for job in rows:
        begin += 1
        if job.job_id == request.after:
            return begin, [(job.job_id, None) for job in islice(rows, request.limit)]
    raise NotFound(
        f"job {request.after} is not in the queue, or no longer; read it from the start",
        {"job_id": request.after},
    )


def _not_ranked(state: State) -> Iterator[Job]:
    for job_id, job in state.jobs.items():
        if job.state is JobState.PENDING and job_id not in state.queues:
            yield job


@handles(UsageRequest)
async def usage(call: Call, _request: UsageRequest) -> Response:
    controller = call.controller
    state, snapshot = controller.state, controller.snapshots.take()
    names = dict(state.user_of) | controller.charging.users()
    holding = Counter(state.jobs[job_id].uid for job_id in state.holding)
    users = []
    for uid, user in names.items():
        standing, tally = snapshot.standings.get(uid), state.expectations.of(uid)
        users.append(
            UsageView(
                user=user,
                uid=uid,
                usage_gpu_s=state.accounts.usage(uid, snapshot.now_s),
                shares=standing.share if standing else share_of(user, (), state.policy),
                factor=standing.factor if standing else None,
                running_jobs=holding[uid],
                running_gpus=controller.charging.rate_of_user(uid),
                pending_jobs=state.live_of[uid] - holding[uid],
                expected_run_median_error=tally.median_error,
                starts_by_guess=tally.by_guess,
                heads_started=tally.heads,
                heads_later_than_expected=tally.late_heads,
            )
        )
    users.sort(key=lambda view: (-(view.factor or 0.0), view.user))
    return UsageResult(users=tuple(users[:10_000]))
