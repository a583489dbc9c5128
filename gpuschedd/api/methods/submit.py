"""`hello` and `submit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpusched_client import __version__
from gpusched_client.terms import JobId
from gpusched_client.wire.hello_messages import Hello, HelloResult
from gpusched_client.wire.limits import PROTOCOL_VERSION
from gpusched_client.wire.message import Response
from gpusched_client.wire.submit_messages import SubmitRequest, SubmitResult
from gpuschedd.api.limits import ROWS_AT_ONCE
from gpuschedd.api.methods.reading import read
from gpuschedd.api.registry import Call, handles
from gpuschedd.core.advice import beyond_limit, hints_for
from gpuschedd.core.advice import warnings_for as advice_for
from gpuschedd.core.job import Job
from gpuschedd.core.plan import plan as make_plan
from gpuschedd.core.plan import reason_of
from gpuschedd.jobs import gates, submit


@handles(Hello)
async def hello(call: Call, _request: Hello) -> Response:
    return HelloResult(
        protocol=PROTOCOL_VERSION,
        version=__version__,
        mode=call.services.mode.value,
        uid=call.caller.uid,
        user=call.caller.user,
        admin=call.caller.is_admin,
        simulated=bool(call.state.config.simulate),
    )


@handles(SubmitRequest)
async def submit_jobs(call: Call, request: SubmitRequest) -> Response:
    if request.dry_run:
        return await _dry_run(call, request)
    state, key = call.state, (call.caller.uid, request.submission_id or "")
    # Taken along: it may be forgotten before the request's turn comes.
    earlier = state.submissions.get(key)
    if request.submission_id and state.submissions_forgotten and earlier is None:
        earlier = await read(call, lambda history: history.submission(*key))
    result = await call.change(
        lambda batch: submit.submit(batch, call.caller, request, earlier), len(request.jobs)
    )
    return _advised(call, result)


def _advised(call: Call, result: SubmitResult) -> SubmitResult:
    """With a warning where foreign use, drains or a limit of the user's are in the way."""
    state = call.state
    ids = map(JobId, result.job_ids)
    jobs = [state.jobs[job_id] for job_id in ids if job_id in state.jobs]
    most = call.controller.snapshots.limit_of(call.caller.user).max_gpus
    unlike = list({job.request: job for job in jobs}.values())  # of thousands a few
    advice = (*beyond_limit(unlike, most), *advice_for(unlike, state.gpus, state.policy))
    hints = _hints(call, jobs)
    return replace(result, warnings=(*result.warnings, *advice), hints=hints)


def _hints(call: Call, jobs: Sequence[Job]) -> tuple[str, ...]:
    """What a time limit would bring, of jobs that have none."""
    state = call.state
    return hints_for(
        jobs,
        state.histories.view(),
        state.policy,
        longest_s=state.config.scheduling.max_time_limit_s,
        all_limited=all(
            state.jobs[job_id].request.time_limit_s is not None
            for job_id in state.holding
            if state.jobs[job_id].grants
        ),
    )


async def _dry_run(call: Call, request: SubmitRequest) -> SubmitResult:
    """What would happen to the jobs if they were submitted now. Stores nothing."""
    async with call.services.lists.of(call.caller.account, ROWS_AT_ONCE):
        return await _tried(call, request)


async def _tried(call: Call, request: SubmitRequest) -> SubmitResult:
    state, policy = call.state, call.state.policy
    batch = call.controller.new_batch()
    child = batch.child()
    result = submit.submit(child, call.caller, replace(request, submission_id=None), None)
    trial = [child.job(JobId(job_id)) for job_id in result.job_ids]
    jobs = [job for job in trial if job is not None and gates.is_eligible(job, batch.now_s)]
    snapshot = call.controller.snapshots.take_with(jobs)
    made = await call.services.planner.ask(
        call.caller.account, lambda: make_plan(snapshot, policy, len(jobs) + 1_000)
    )
    indices = state.gpu_index_of()
    starting = {start.job_id: start for start in made.starts}
    would_start, reasons = [], []
    for job in trial:
        assert job is not None
        start = starting.get(job.job_id)
        gate = gates.blocked_by(job, batch.now_s)
        if gate is not None:
            would_start.append("")
            reasons.append(gate.text)
        elif start is None:
            would_start.append("")
            reasons.append(reason_of(made, job.job_id).text)
        else:
            numbers = sorted(indices.get(grant.uuid, -1) for grant in start.grants)
            named = "GPU " if len(numbers) == 1 else "GPUs "
            would_start.append(named + ", ".join(map(str, numbers)) if numbers else "no GPU")
            reasons.append("")
    return replace(
        result,
        job_ids=(),
        would_start=tuple(would_start),
        reasons=tuple(reasons),
        hints=_hints(call, [job for job in trial if job is not None]),
    )
