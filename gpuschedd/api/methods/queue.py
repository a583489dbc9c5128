"""The queue in scheduling order, and everybody's usage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from itertools import islice

from gpusched_client.errors import NotFound
from gpusched_client.terms import JobId, JobState
from gpusched_client.wire.admin_messages import UsageRequest, UsageResult, UsageView
from gpusched_client.wire.job_messages import QueueRequest, QueueResult
from gpusched_client.wire.message import Response, changed
from gpuschedd.api.methods.reading import job_views, names_and_uids, only_own
from gpuschedd.api.registry import Call, handles
from gpuschedd.core.fairshare import share_of
from gpuschedd.core.model import Policy, Snapshot
from gpuschedd.core.priority import queue_order
from gpuschedd.jobs.state import State

_Ranked = tuple[int, JobId, float | None]
"""A job with its place in the queue, from 1 on, and the priority that it has there."""


@handles(QueueRequest)
async def queue(call: Call, request: QueueRequest) -> Response:
    account = call.caller.account
    await call.services.budget.acquire(account, request.limit)
    async with call.services.lists.of(account, request.limit):
        state, policy = call.state, call.state.policy
        picked = _picked(call, request)
        snapshot = call.controller.snapshots.take()
        begun, ranked = await call.services.planner.ask(
            account, lambda: _ranked(snapshot, policy, request, picked)
        )
        if not begun:
            ranked = _beside(state, request, picked)
        elif len(ranked) < request.limit:
            ranked += islice(_not_ranked(state, picked), request.limit - len(ranked))
        page = [(*rank, state.jobs[rank[1]]) for rank in ranked if rank[1] in state.jobs]
        shown = await job_views(call, [job for *_, job in page])
    return QueueResult(
        jobs=tuple(
            changed(view, queue_position=place, priority=priority)
            for view, (place, _, priority, _) in zip(shown, page, strict=True)
        ),
        total=len(state.jobs) - len(state.holding) if picked is None else len(picked),
    )


def _picked(call: Call, request: QueueRequest) -> set[JobId] | None:
    """Those of the waiting jobs that pass the filters; None for all."""
    if request.users is None and request.name is None:
        return None
    names, uids = names_and_uids(request.users)
    if request.name is not None and call.services.auth.hides_names(call.caller):
        uids = only_own(call, uids)
    return {
        job_id
        for job_id, job in call.state.jobs.items()
        if job.state is JobState.PENDING
        and (names is None or job.user in names)
        and (uids is None or job.uid in uids)
        and (request.name is None or job.name == request.name)
    }


def _ranked(
    snapshot: Snapshot, policy: Policy, request: QueueRequest, picked: Container[JobId] | None
) -> tuple[bool, list[_Ranked]]:
    """The page in scheduling order; False: it begins later."""
    rows = enumerate(queue_order(snapshot, policy), start=1)
    if request.after is not None and not any(row.job_id == request.after for _, (row, _) in rows):
        return False, []
    passing = (
        (place, row.job_id, parts.priority)
        for place, (row, parts) in rows
        if picked is None or row.job_id in picked
    )
    return True, list(islice(passing, request.limit))


def _beside(state: State, request: QueueRequest, picked: Container[JobId] | None) -> list[_Ranked]:
    """A page of those that are held, delayed or dependent: they come behind all others."""
    rows = _not_ranked(state, None)
    if all(job_id != request.after for _, job_id, _ in rows):
        raise NotFound(
            f"job {request.after} is not in the queue, or no longer; read it from the start",
            {"job_id": request.after},
        )
    passing = (rank for rank in rows if picked is None or rank[1] in picked)
    return list(islice(passing, request.limit))


def _not_ranked(state: State, picked: Container[JobId] | None) -> Iterator[_Ranked]:
    place = len(state.queues)
    for job_id, job in state.jobs.items():
        if job.state is JobState.PENDING and job_id not in state.queues:
            place += 1
            if picked is None or job_id in picked:
                yield place, job_id, None


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
