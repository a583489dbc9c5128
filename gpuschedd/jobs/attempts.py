"""What a report of an attempt means for its job: started, ended, gone, lost, to be run again.

Judged inside a batch like any order; the table itself is core.recovery's. No I/O.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from gpusched_client.terms import Cause, EventKind, HoldKind, JobState
from gpuschedd.core.attempt import AttemptReport, EndedRecord, ExitRecord, Observation
from gpuschedd.core.job import Dropped, Gone, Job, MainEnded, NeverRan, Retried, Started
from gpuschedd.core.lengths import counts
from gpuschedd.core.model import Kind, Request, Run
from gpuschedd.core.recovery import Facts, Recovery, facts_reported, recover
from gpuschedd.core.retry import next_request
from gpuschedd.jobs.batch import Batch, Ended
from gpuschedd.jobs.cancel import cancel_text
from gpuschedd.jobs.environments import lost_at_start
from gpuschedd.store.records import AttemptEnd, GpuUse, peak_of
from gpuschedd.system.clock import SchedulerClock

BACKOFF_S = (1.0, 5.0, 25.0)  # before the next launch; then the job is held
ABOUT_S = 600.0  # two times so near are told as one
DEFERRED_S = 5.0  # before the next try where the host was at fault


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the GPUs tell of an attempt that is over."""

    uses: tuple[GpuUse, ...] = ()
    fault: str | None = None  # what one of its GPUs reported shortly before its end
    stranger: str | None = None  # who else, that is no job of ours, was on its GPUs


NO_EVIDENCE = Evidence()


def apply_report(
    batch: Batch, clock: SchedulerClock, report: AttemptReport, evidence: Evidence = NO_EVIDENCE
) -> None:
    """Move the job as far as the report shows. An old attempt's report changes nothing."""
    job = batch.job(report.job_id)
    if job is None or job.attempt != report.attempt or not job.holds_gpus:
        return
    seen = report.seen
    if seen is not None:
        job = _advance_alive(batch, clock, job, seen)
    facts = facts_reported(
        report,
        ran=job.state is not JobState.CONFIGURING,
        cancel_requested=job.cancel is not None,
    )
    match recover(facts):
        case Recovery.FINAL_FROM_EXIT:
            assert seen is not None
            assert seen.exit is not None
            _finish(batch, job, seen.exit, evidence)
        case Recovery.FINAL_FROM_ENDED:
            assert seen is not None
            assert seen.ended is not None
            _finish(batch, job, seen.ended, evidence)
        case Recovery.NODE_FAIL:
            _node_fail(batch, job, _why_unknown(job, facts, report, clock))
        case Recovery.CANCELLED:
            _drop_cancelled(batch, job)
        case Recovery.REQUEUE:
            _requeue(batch, job, report)
        case (
            Recovery.REQUEUE_AFTER_FENCE
            | Recovery.CANCEL_AFTER_FENCE
            | Recovery.ADOPT
            | Recovery.WAIT_FOR_PROCESSES
        ):
            pass  # the runner's part: it fences, watches, or ends what is left


def _why_unknown(job: Job, facts: Facts, report: AttemptReport, clock: SchedulerClock) -> str:
    """Why nobody can say how the attempt ended.

    A cancel that was ordered, and that no record says was obeyed, does not make it CANCELLED: the
    main process may have ended before, with a code that is lost.
    """
    claim = report.seen.claim if report.seen is not None else None
    down = None if claim is None else clock.went_down_s(claim.boot_id)
    if down is not None:
        return f"the host went down {_time_between(*down)}"
    if facts.unreadable:
        return report.detail or "its job directory cannot be read"
    if facts.lost:
        return "its job directory is gone"
    text = "its supervisor ended without an exit record"
    return text if job.cancel is None else f"{text}, when it was to be {cancel_text(job.cancel)}"


def _time_between(first_s: float, last_s: float) -> str:
    """Local times of the host."""
    first, last = (time.strftime("%Y-%m-%d %H:%M", time.localtime(s)) for s in (first_s, last_s))
    return f"at about {first}" if last_s - first_s < ABOUT_S else f"between {first} and {last}"


def _advance_alive(batch: Batch, clock: SchedulerClock, job: Job, seen: Observation) -> Job:
    """Started and main-ended, where the records say so and the job does not yet."""
    if seen.started is not None and job.state is JobState.CONFIGURING:
        at = seen.started
        sched_s = clock.from_boottime_s(at.boottime_s, at.boot_id, at.at_s)
        job = batch.advance(job, Started(at.at_s, sched_s))
        batch.emit(EventKind.JOB_STARTED, job)
    end = seen.ended
    if end is None or end.is_of_environment:
        return job  # nothing has run
    if job.state in (JobState.CONFIGURING, JobState.RUNNING):
        sched_s = clock.from_boottime_s(end.boottime_s, end.boot_id, end.at_s)
        job = batch.advance(job, MainEnded(end.at_s, sched_s))
        batch.emit(EventKind.JOB_COMPLETING, job)
    return job


def _finish(batch: Batch, job: Job, end: EndedRecord | ExitRecord, evidence: Evidence) -> None:
    """The final state that the supervisor's own record gives; or once more with more memory."""
    if end.is_of_environment:
        _environment_lost(batch, job, end.place or "", end.reason or "its environment is away")
        return
    state, cause = final_state(end)
    _learn(batch, job, state)
    detail = end.reason or _what_was_seen(end)
    batch.gpu_uses.extend(evidence.uses)
    if cause is Cause.CUDA_OOM:
        stranger = _stranger_to_blame(job, evidence)
        if _retry(batch, job, end, evidence, stranger):
            return
        detail = stranger or detail
    if state is JobState.FAILED and cause in (Cause.EXIT, Cause.SIGNAL) and evidence.fault:
        cause, detail = Cause.XID, evidence.fault
    if state is JobState.CANCELLED and cause is Cause.CANCELLED and job.cancel is not None:
        detail = cancel_text(job.cancel)
    finished = batch.advance(
        job,
        Gone(
            state=state,
            ended_at_s=end.at_s,
            code=end.code,
            signal=end.signal,
            cause=cause,
            detail=detail,
            cpu_user_s=end.cpu_user_s if isinstance(end, ExitRecord) else None,
            cpu_system_s=end.cpu_system_s if isinstance(end, ExitRecord) else None,
            max_rss_bytes=end.max_rss_bytes if isinstance(end, ExitRecord) else None,
        ),
    )
    batch.emit(EventKind.JOB_ENDED, finished, state=str(state), code=end.code, signal=end.signal)


def _learn(batch: Batch, job: Job, state: JobState) -> None:
    """What the run shows of how long such jobs of the owner's run, if anything.

    One of which no record tells when it ended shows nothing.
    """
    if job.started_sched_s is None or job.main_ended_sched_s is None:
        return
    limit_s, expected_s = job.request.time_limit_s, job.decided_expected_s
    ran_s = max(0.0, job.main_ended_sched_s - job.started_sched_s)
    if state is JobState.TIMEOUT and limit_s is not None:
        ran_s = limit_s
    if expected_s is None:
        expected_s = batch.state.policy.guess_length_s if limit_s is None else limit_s
    by_itself = state not in (JobState.CANCELLED, JobState.NODE_FAIL)
    failed = state in (JobState.FAILED, JobState.OUT_OF_MEMORY)
    if counts(ran_s, expected_s, by_itself=by_itself, failed=failed):
        kind = Kind(job.length_key or "", job.request.gpus)
        batch.runs.append(Ended(job.uid, kind, Run(job.main_ended_sched_s, ran_s), expected_s))


def _what_was_seen(end: EndedRecord | ExitRecord) -> str | None:
    """What its owner may not know of an end that the job reached by itself."""
    if end.cause not in ("exit", "signal"):
        return None
    if isinstance(end, ExitRecord) and end.oom in ("cuda", "shown"):
        return "its output shows a CUDA OOM" + (", and another error later" * (end.oom == "shown"))
    if end.left:
        what = "1 process" if end.left == 1 else f"{end.left} processes"
        were = "was" if end.left == 1 else "were"
        return f"{what} still ran when the main process ended, and {were} ended; use wait"
    return None


def _environment_lost(batch: Batch, job: Job, place: str, fault: str) -> None:
    if job.cancel is not None:
        _drop_cancelled(batch, job)
    else:
        lost_at_start(batch, job, place, fault)


def _stranger_to_blame(job: Job, evidence: Evidence) -> str | None:
    """Whose memory it was: with the GPU to itself, or within its declaration, not the job's own."""
    peak, declared = peak_of(evidence.uses), job.request.vram_bytes
    is_within = job.whole or declared is None or peak is None or peak <= declared
    return evidence.stranger if is_within else None


def _retry(
    batch: Batch,
    job: Job,
    end: EndedRecord | ExitRecord,
    evidence: Evidence,
    stranger: str | None,
) -> bool:
    """Queue a job that ran out of VRAM again, while it has retries; False: it has none.

    With more VRAM, but for one that a stranger left too little.
    """
    peak = peak_of(evidence.uses)
    state = batch.state
    totals = {gpu.uuid: gpu.total_bytes for gpu in state.gpus}
    had = min((totals.get(grant.uuid, 0) for grant in job.grants), default=0)
    request: Request | None = job.request if job.retries_used < job.retries else None
    if stranger is None:
        request = next_request(job, peak, state.inventory, state.policy, had)
    if request is None or job.cancel is not None:
        return False
    batch.attempts.append(
        AttemptEnd(
            job_id=job.job_id,
            attempt=job.attempt,
            started_at_s=job.started_at_s,
            ended_at_s=end.at_s,
            outcome=str(JobState.OUT_OF_MEMORY),
            exit_code=end.code,
            exit_signal=end.signal,
            detail=str(Cause.CUDA_OOM),
        )
    )
    after = batch.advance(job, Retried(request))
    batch.rested.add(job.job_id)  # else who runs out of memory in a loop outranks everybody
    batch.emit(
        EventKind.JOB_RETRIED,
        after,
        retry=after.retries_used,
        retries=after.retries,
        peak_bytes=peak,
        before_bytes=job.request.vram_bytes,
        vram_bytes=request.vram_bytes,
        whole=request.whole or None,
        beside=stranger,
    )
    return True


def final_state(end: EndedRecord | ExitRecord) -> tuple[JobState, Cause]:
    """State and cause out of the supervisor's record. The first cause wins, also over exit 0."""
    by_cause = {
        "time_limit": (JobState.TIMEOUT, Cause.TIME_LIMIT),
        "cancelled": (JobState.CANCELLED, Cause.CANCELLED),
        "stopped": (JobState.CANCELLED, Cause.STOPPED),
        "shutdown": (JobState.NODE_FAIL, Cause.SHUTDOWN),
        "setup": (JobState.FAILED, Cause.SETUP),
    }
    if end.cause in by_cause:
        return by_cause[end.cause]
    if end.code == 0:
        return JobState.COMPLETED, Cause.EXIT
    oom = end.oom if isinstance(end, ExitRecord) else None
    if oom == "cuda":
        return JobState.OUT_OF_MEMORY, Cause.CUDA_OOM
    if oom == "host":
        return JobState.OUT_OF_MEMORY, Cause.HOST_OOM
    return JobState.FAILED, Cause.SIGNAL if end.signal is not None else Cause.EXIT


def _node_fail(batch: Batch, job: Job, detail: str) -> None:
    """An exit that cannot be known is never success."""
    gone = batch.advance(
        job,
        Gone(JobState.NODE_FAIL, batch.wall_s, cause=Cause.NODE_FAIL, detail=detail),
    )
    batch.emit(EventKind.JOB_ENDED, gone, state=str(gone.state), detail=detail)


def _drop_cancelled(batch: Batch, job: Job) -> None:
    assert job.cancel is not None
    after = batch.advance(
        job,
        Dropped(JobState.CANCELLED, batch.wall_s, Cause.CANCELLED, cancel_text(job.cancel)),
    )
    batch.emit(EventKind.JOB_ENDED, after, state=str(after.state), by=job.cancel.by)


def _requeue(batch: Batch, job: Job, report: AttemptReport) -> None:
    """PENDING with the next attempt; a failed launch backs off and at last holds the job."""
    if report.place is not None:
        _environment_lost(batch, job, report.place, report.launch_error or report.place)
        return
    after = batch.advance(job, _never_ran(batch, job, report))
    if report.storage_error is None and report.launch_error is None:
        after = replace(after, launch_failures=0)
        batch.put(after)
    batch.emit(
        EventKind.JOB_REQUEUED,
        after,
        error=report.launch_error or report.storage_error or report.detail,
    )


def _never_ran(batch: Batch, job: Job, report: AttemptReport) -> NeverRan:
    error = report.launch_error
    if error is None:
        return NeverRan(same_attempt=report.storage_error is not None)
    if report.account_gone:
        return NeverRan(hold=HoldKind.ACCOUNT, detail=error)
    if report.deferred:
        return NeverRan(not_before_sched_s=batch.now_s + DEFERRED_S, detail=error)
    return _failed_launch(batch, job, error)


def _failed_launch(batch: Batch, job: Job, error: str) -> NeverRan:
    if job.launch_failures >= len(BACKOFF_S):
        return NeverRan(failed_launch=True, hold=HoldKind.LAUNCH, detail=error)
    return NeverRan(
        failed_launch=True,
        not_before_sched_s=batch.now_s + BACKOFF_S[job.launch_failures],
        detail=error,
    )
