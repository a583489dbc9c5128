"""What the wire shows of jobs and GPUs: response messages out of the controller's state. No I/O."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpusched_client.terms import EventKind, GpuUuid, JobId, JobState, PendingReason, printable
from gpusched_client.units import bytes_text
from gpusched_client.wire import job_messages as messages
from gpusched_client.wire.gpu_messages import GpuView
from gpusched_client.wire.job_messages import GpuUseView, JobEvent, JobView
from gpusched_client.wire.limits import limit_to_wire
from gpusched_client.wire.message import changed
from gpuschedd.core import lengths
from gpuschedd.core.job import Job
from gpuschedd.core.lengths import Basis
from gpuschedd.core.model import (
    ExpectedStart,
    Gpu,
    GpuState,
    Policy,
    PromiseOutcome,
    Reason,
    Request,
)
from gpuschedd.gpu.metering import AT_LEAST, next_vram_bytes, verdict
from gpuschedd.gpu.source import UsedGpu
from gpuschedd.jobs import gates
from gpuschedd.jobs.state import State
from gpuschedd.jobs.waiting import host_blocked_by, waiting_reason
from gpuschedd.run.spec import DEFAULT_OUTPUT
from gpuschedd.store.records import Brief, Event, GpuUse, Payload, PromiseRow, peak_of
from gpuschedd.system.clock import SchedulerClock

COMMAND_LINE_CHARS_MAX = 300
_OWN_WORDS = (PendingReason.ENVIRONMENT, PendingReason.LAUNCH_FAILED, PendingReason.LAUNCH_BACKOFF)
_TIMES = ("start_by_s", "head_start_s")
_WHY = ("reason", "error", "detail", "place")  # of an event's data
_PROMISES_LOST = (PromiseOutcome.LOST, PromiseOutcome.WITHDRAWN)


def job_view(
    state: State,
    clock: SchedulerClock,
    job: Job,
    expected: Mapping[JobId, ExpectedStart],
    *,
    own: bool,
    hides_name: bool,
) -> JobView:
    """One job without its request. `own`: the caller may change it.

    The words about an end are for the own ones alone: they name directories, logs and programs.
    """
    indices = state.gpu_index_of()
    uuids = tuple(grant.uuid for grant in job.grants)
    view = JobView(
        job_id=job.job_id,
        state=job.state,
        reason=_reason(state, clock, job, own=own),
        user=job.user,
        uid=job.uid,
        name=None if hides_name else job.name,
        gpus=job.request.gpus,
        vram_bytes=job.request.vram_bytes,
        gpu_model=job.request.gpu_model,
        exclusive=job.request.exclusive,
        topology=None if job.request.topology == "any" else str(job.request.topology),
        memory_bytes=job.memory_bytes,
        cpus=job.cpus,
        time_limit_s=limit_to_wire(job.request.time_limit_s),
        nice=job.nice,
        retries=job.retries,
        estimate_s=None if job.request.estimate_s is None else int(job.request.estimate_s),
        attempt=job.attempt,
        submitted_at_s=job.submitted_at_s,
        started_at_s=job.started_at_s,
        ended_at_s=job.ended_at_s,
        gpu_indices=tuple(sorted(indices.get(uuid, -1) for uuid in uuids)) if uuids else None,
        gpu_uuids=uuids or None,
        exit_code=job.exit_code,
        exit_signal=job.exit_signal,
        cause=str(job.cause) if job.cause else None,
        cause_detail=job.cause_detail if own else None,
        cpu_user_s=job.cpu_user_s,
        cpu_system_s=job.cpu_system_s,
        max_rss_bytes=job.max_rss_bytes,
        **gates.shown_of(job, clock.to_wall_s),
    )
    if job.state is not JobState.PENDING:
        return changed(view, expected_run_s=job.decided_expected_s)
    return _with_plan(state, clock, job, expected, _with_length(state, job, view, own=own))


def _with_length(state: State, job: Job, view: JobView, *, own: bool) -> JobView:
    """How long it will probably run, and by what."""
    key = job.length_key or ""
    found = lengths.expected(state.histories.view(), job.uid, key, job.request, state.policy)
    by = _basis_text(found, key, state.policy) if own and found.basis is not Basis.LIMIT else None
    if by is not None and _is_capped(found, job.request):
        by = f"its limit, shorter than {by}"
    return changed(view, expected_run_s=found.length_s, expected_by=by)


def _is_capped(found: lengths.Expectation, request: Request) -> bool:
    """Whether the limit is below what the basis says."""
    limit_s, said_s = request.time_limit_s, request.estimate_s
    if found.basis is not Basis.ESTIMATE and found.runs:
        said_s = sum(run.length_s for run in found.runs) / len(found.runs)
    return limit_s is not None and said_s is not None and said_s > limit_s


def _basis_text(found: lengths.Expectation, key: str, policy: Policy) -> str:
    is_learnt = policy.learn_lengths
    runs = "last run" if len(found.runs) == 1 else "last two runs"
    what = key or "jobs like it"
    return {
        Basis.ESTIMATE: "its estimate",
        Basis.KIND: f"{runs} of {what}",
        Basis.KEY: f"{runs} of {what} on other numbers of GPUs",
        Basis.OWNER: f"its owner's {runs}, of other commands",
        Basis.GUESS: f"a guess: {'nothing like it has run yet' if is_learnt else 'none is learnt'}",
    }[found.basis]


def _with_plan(
    state: State,
    clock: SchedulerClock,
    job: Job,
    expected: Mapping[JobId, ExpectedStart],
    view: JobView,
) -> JobView:
    """The parts that the last pass knows of a waiting job."""
    promise, walked = state.promise, expected.get(job.job_id)
    start_s = walked.start_s if walked is not None else None
    is_open = host_blocked_by(state) is None
    promised = promise.start_by_s if promise and promise.job_id == job.job_id else None
    if state.reservation is not None and state.reservation.job_id == job.job_id:
        start_s = state.reservation.start_s
    start_s = start_s if is_open else None  # nobody knows until when
    parts = state.plan.priorities.get(job.job_id) if state.plan is not None else None
    return changed(
        _with_head(state, clock, job, view),
        expected_start_s=None if start_s is None else clock.to_wall_s(start_s),
        promised_start_s=None if promised is None else clock.to_wall_s(promised),
        priority=None if parts is None else parts.priority,
    )


def _with_head(state: State, clock: SchedulerClock, job: Job, view: JobView) -> JobView:
    """Since when it is first in line, if it ever was, and how long that is to last."""
    waiting, reservation = state.queues.get(job.job_id), state.reservation
    if waiting is None or waiting.first_head is None:
        return view
    until_s = None
    if reservation is not None and reservation.job_id == job.job_id:
        until_s = reservation.patient_until_s
    return changed(
        view,
        head_at_s=clock.to_wall_s(waiting.first_head.since_s),
        head_expected_start_s=clock.to_wall_s(waiting.first_head.expected_at_s),
        patience_ends_at_s=None if until_s is None else clock.to_wall_s(until_s),
    )


def with_brief(view: JobView, brief: Brief) -> JobView:
    """What lists show of a request: a long command is cut, and then has no argv."""
    has_script = brief.script_bytes is not None
    return changed(
        view,
        command=command_line(brief.argv, has_script=has_script, is_cut=not brief.whole),
        cwd=brief.cwd,
        argv=brief.argv if brief.whole else None,
        script_bytes=brief.script_bytes,
    )


def with_request(view: JobView, payload: Payload | None) -> JobView:
    """The request's own words, for the owner and admins."""
    if payload is None:
        return view
    return changed(
        view,
        command=command_line(payload.argv, has_script=payload.script is not None),
        cwd=payload.cwd,
        output=payload.output or DEFAULT_OUTPUT,
        error=payload.error,
        argv=payload.argv,
        script_bytes=None if payload.script is None else len(payload.script),
    )


def with_promise(view: JobView, promise: PromiseRow, events: Sequence[Event]) -> JobView:
    """The start that it was promised; one that is promised no more, with what ended that."""
    if promise.outcome not in _PROMISES_LOST:
        at_s = view.promised_start_s
        return changed(view, promised_start_s=promise.start_by_s if at_s is None else at_s)
    if view.state is not JobState.PENDING or view.promised_start_s is not None:
        return view
    ends = [event.data for event in events if event.kind == EventKind.PROMISE_ENDED]
    cause = promise.detail or "its owner changed it"
    if ends and ends[-1].get("why"):
        cause = str(ends[-1]["why"])
    return changed(view, lost_start_s=promise.start_by_s, lost_promise_cause=cause)


def with_use(view: JobView, state: State, job: Job, uses: Sequence[GpuUse]) -> JobView:
    """Declared against actual, so far or in the end."""
    if not uses:
        return view
    indices = state.gpu_index_of()
    peak = peak_of(uses)
    largest = max(uses, key=lambda use: use.peak_bytes or -1)
    busy = [use.utilization for use in uses if use.utilization is not None]
    joules = [use.energy_j for use in uses if use.energy_j is not None]
    judged = verdict(
        job.request.vram_bytes,
        peak,
        job.state,
        state.config.sharing.tolerance,
        is_at_least=any(use.peak_source == AT_LEAST for use in uses),
    )
    return changed(
        view,
        vram_peak_bytes=peak,
        vram_peak_source=largest.peak_source,
        vram_verdict=judged,
        vram_next_bytes=next_vram_bytes(uses),
        gpu_utilization=sum(busy) / len(busy) if busy else None,
        gpu_seconds=_gpu_seconds(job),
        gpu_observed_s=min(use.observed_s for use in uses),
        energy_j=sum(joules) if joules else None,
        gpu_uses=tuple(
            GpuUseView(
                gpu_uuid=use.gpu_uuid,
                gpu_index=indices.get(use.gpu_uuid),
                peak_bytes=use.peak_bytes,
                peak_upper_bytes=use.peak_upper_bytes,
                peak_source=use.peak_source,
                utilization=use.utilization,
                energy_j=use.energy_j,
            )
            for use in sorted(uses, key=lambda use: indices.get(use.gpu_uuid, -1))
        ),
    )


def _gpu_seconds(job: Job) -> float | None:
    if job.started_at_s is None or job.ended_at_s is None:
        return None
    return max(0.0, job.ended_at_s - job.started_at_s) * len(job.grants)


def command_line(argv: Sequence[bytes], *, has_script: bool, is_cut: bool = False) -> str:
    """One printable line, cut to COMMAND_LINE_CHARS_MAX."""
    words = [word.decode("utf-8", "backslashreplace") for word in argv]
    line = " ".join((["<script>"] if has_script else []) + words)
    line = printable(line)
    if len(line) <= COMMAND_LINE_CHARS_MAX and not is_cut:
        return line
    return line[: COMMAND_LINE_CHARS_MAX - 3] + "..."


def job_event(event: Event) -> JobEvent:
    """One line of a job's history."""
    return JobEvent(at_s=event.at_s, kind=event.kind, text=event_text(event), data=dict(event.data))


def event_of_another(event: Event, *, hides_name: bool) -> Event:
    """What others hear of somebody's event: not why, which is in the words of who ordered it."""
    if hides_name:
        return replace(event, data={})
    return replace(event, data={key: event.data[key] for key in event.data if key not in _WHY})


def event_text(event: Event) -> str:
    """The event's data in words: lists by commas, sizes in GiB, times in UTC."""
    return ", ".join(
        f"{key.removesuffix('_bytes').removesuffix('_s')} {_shown(key, value)}"
        for key, value in event.shown_facts
    )


def _shown(key: str, value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if key.endswith("_bytes") and isinstance(value, int):
        return bytes_text(value)
    if key in _TIMES and isinstance(value, int | float):
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(value))
    return str(value)


def _reason(state: State, clock: SchedulerClock, job: Job, *, own: bool) -> messages.Reason | None:
    if job.state is not JobState.PENDING:
        return None
    reason = waiting_reason(state, job, clock.now_s())
    # What failed names directories and programs: for the own ones alone, like an end's words.
    shown = own or reason.code not in _OWN_WORDS
    text = reason.text if shown else reason.text.partition(":")[0]
    return messages.Reason(code=str(reason.code), text=text, numbers=_wall_numbers(reason, clock))


def _wall_numbers(reason: Reason, clock: SchedulerClock) -> dict[str, object]:
    """Numbers for the wire: times as Unix times, and who is in the way."""
    numbers: dict[str, object] = {
        key: clock.to_wall_s(value) if key.endswith("_at_s") and value is not None else value
        for key, value in reason.numbers.items()
    }
    if reason.blocking_jobs:
        numbers["jobs"] = [int(job_id) for job_id in reason.blocking_jobs]
    if reason.blocking_gpus:
        numbers["gpu_uuids"] = [str(uuid) for uuid in reason.blocking_gpus]
    return numbers


def gpu_views(
    state: State, used: Mapping[GpuUuid, UsedGpu], *, stale: bool, for_admin: bool
) -> list[GpuView]:
    """All GPUs by index, with what is promised, seen and foreign."""
    jobs_on: dict[GpuUuid, list[Job]] = {}
    for job_id in sorted(state.holding):
        job = state.jobs[job_id]
        for grant in job.grants:
            jobs_on.setdefault(grant.uuid, []).append(job)
    return [
        _gpu_view(
            gpu, jobs_on.get(gpu.uuid, []), used.get(gpu.uuid), stale=stale, for_admin=for_admin
        )
        for gpu in state.gpus
    ]


def _gpu_view(
    gpu: Gpu, jobs: list[Job], used: UsedGpu | None, *, stale: bool, for_admin: bool
) -> GpuView:
    promised = sum(
        gpu.capacity_bytes if job.whole else grant.held_bytes
        for job in jobs
        for grant in job.grants
        if grant.uuid == gpu.uuid
    )
    told = "; ".join(filter(None, (gpu.foreign_text, gpu.foreign_hint)))
    foreign = (for_admin and gpu.foreign_detail) or told
    own = "" if gpu.state_text in foreign else gpu.state_text
    if gpu.state is GpuState.OK:  # a warning hides nobody who is in the way
        reason = "; ".join(filter(None, (own, foreign))) or None
    else:
        reason = gpu.state_text or foreign or None
    return GpuView(
        index=None if gpu.index_is_past else gpu.index,
        uuid=gpu.uuid,
        minor=gpu.minor,
        model=gpu.model,
        total_bytes=gpu.total_bytes or None,
        used_bytes=used.used_bytes if used else None,
        promised_bytes=promised,
        foreign_bytes=gpu.foreign_bytes,
        state=str(gpu.state),
        reason=reason,
        jobs=tuple(int(job.job_id) for job in jobs),
        utilization=used.utilization if used else None,
        stale=stale,
    )
