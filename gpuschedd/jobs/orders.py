"""What clients order: submit, cancel, update. Each function judges one order inside a batch.

Raises GpuschedError to refuse; a refused order leaves no trace. The owner check stands in the same
batch as the act. No I/O: everything needed is in the batch or in the arguments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgpack

from gpusched_client.errors import (
    Conflict,
    Denied,
    GpuschedError,
    Infeasible,
    Invalid,
    LimitReached,
    NotFound,
)
from gpusched_client.terms import Cause, JobId, JobState
from gpusched_client.units import bytes_text, format_duration
from gpusched_client.wire.job_messages import CancelRequest, Outcome, UpdateRequest
from gpusched_client.wire.limits import NICE_MAX, NICE_MIN, limit_from_wire, limit_to_wire
from gpusched_client.wire.submit_messages import JobRequest, SubmitRequest, SubmitResult
from gpuschedd.core import admission, forecast
from gpuschedd.core.job import CancelOrder, Dropped, Job
from gpuschedd.core.model import (
    AdmittedRequest,
    PromiseException,
    Request,
    RunningJob,
    Snapshot,
    Topology,
)
from gpuschedd.jobs.holds import HOLD_CONFIG
from gpuschedd.jobs.state import Batch
from gpuschedd.store.records import AuditRow, Payload, Submission

SIGNALS_MAX = 100  # pending signal orders of one job


@dataclass(frozen=True, slots=True)
class Caller:
    """Who orders, as the kernel says."""

    uid: int
    user: str
    pid: int
    is_admin: bool
    groups: tuple[str, ...] = ()
    barred: str | None = None  # why this caller may submit nothing

    def may_change(self, job: Job) -> bool:
        """Owner or admin. A uid that was given to another name owns nothing of the first."""
        return self.is_admin or self.owns(job)

    def owns(self, job: Job) -> bool:
        """Name and uid, both."""
        return self.uid == job.uid and self.user == job.user


# --- submit ----------------------------------------------------------------------------------


def digest_of(request: SubmitRequest) -> bytes:
    """What a submission id stands for: the same jobs in the same order.

    A map has no order: a client that writes its request again may write the names in another.
    """
    content = request.to_wire()
    content.pop("submission_id", None)
    for part in (content, content.get("common", {}), *content["jobs"]):
        for name in ("environment", "rlimits"):
            if part.get(name):
                part[name] = dict(sorted(part[name].items()))
    return hashlib.sha256(msgpack.packb(content, use_bin_type=True)).digest()


def submit(
    batch: Batch, caller: Caller, request: SubmitRequest, earlier: Submission | None
) -> SubmitResult:
    """Admit all jobs or none. `earlier` is what the books say of the same submission id."""
    digest = digest_of(request) if request.submission_id else b""
    if request.submission_id:
        known = batch.submission(caller.uid, request.submission_id) or earlier
        if known is not None:
            return _again(batch, known, digest, request)
    if caller.barred is not None:
        raise Denied(caller.barred)
    _check_room(batch, caller, len(request.jobs))
    admitted = [_admit(batch, caller, job, index) for index, job in enumerate(request.jobs)]
    jobs = [
        _new_job(batch, caller, wanted, verdict)
        for wanted, verdict in zip(request.jobs, admitted, strict=True)
    ]
    ids = tuple(job.job_id for job in jobs)
    if request.submission_id:
        batch.remember(Submission(caller.uid, request.submission_id, digest, ids, batch.now_s))
    return SubmitResult(
        job_ids=ids,
        time_limits_s=tuple(limit_to_wire(job.request.time_limit_s) for job in jobs),
        warnings=_notes(admitted),
    )


def _again(batch: Batch, known: Submission, digest: bytes, request: SubmitRequest) -> SubmitResult:
    """The first answer once more; the limits are what the host's default makes of them now."""
    if known.digest != digest:
        raise Conflict(
            f"submission_id {request.submission_id!r} was used for jobs {list(known.job_ids)} with "
            "other content; use a new id",
            {"job_ids": list(known.job_ids)},
        )
    default_s = batch.state.config.scheduling.usual_time_limit_s
    limits = [
        limit_to_wire(default_s) if j.time_limit_s is None else j.time_limit_s for j in request.jobs
    ]
    return SubmitResult(job_ids=known.job_ids, time_limits_s=tuple(limits))


def _check_room(batch: Batch, caller: Caller, count: int) -> None:
    limits = batch.state.config.limits
    most = limits.of(caller.user, caller.groups).queued_jobs or limits.queued_jobs
    mine, total = batch.live_count(caller.uid), batch.live_total()
    if mine + count > most and not caller.is_admin:
        raise LimitReached(
            f"{caller.user} has {mine} unfinished jobs and submits {count}; the limit is "
            f"{most}. Wait for some to end, or cancel some.",
            {"value": mine + count, "limit": most},
        )
    if total + count > limits.queued_jobs_all:
        raise LimitReached(
            f"the host has {total} unfinished jobs; the limit is {limits.queued_jobs_all}. "
            "Try again later.",
            {"value": total + count, "limit": limits.queued_jobs_all},
        )


def _admit(batch: Batch, caller: Caller, wanted: JobRequest, index: int) -> AdmittedRequest:
    """The request as it will be placed; refusals say which of several jobs is meant."""
    try:
        _check_nice(caller, wanted.nice)
        return admission.admit(
            request_of(batch, caller, wanted),
            batch.state.inventory,
            batch.state.policy,
            admin=caller.is_admin,
        )
    except GpuschedError as error:
        error.data.setdefault("path", f"jobs[{index}]")
        raise


def _check_nice(caller: Caller, nice: int) -> None:
    if nice < 0 and not caller.is_admin:
        raise Denied(f"nice {nice} is negative; only an admin may raise a priority. Use 0 to 1000.")


def request_of(batch: Batch, caller: Caller, wanted: JobRequest) -> Request:
    """What the policy needs of a job request, with the host's defaults and limits."""
    return Request(
        gpus=wanted.gpus,
        vram_bytes=wanted.vram_bytes,
        gpu_model=wanted.gpu_model,
        exclusive=wanted.exclusive,
        topology=Topology(wanted.topology) if wanted.topology else Topology.ANY,
        time_limit_s=_time_limit(batch, caller, wanted.time_limit_s),
    )


def _time_limit(batch: Batch, caller: Caller, wanted_s: int | None) -> float | None:
    scheduling = batch.state.config.scheduling
    if wanted_s is None:
        return scheduling.usual_time_limit_s
    limit_s = limit_from_wire(wanted_s)
    most_s = scheduling.max_time_limit_s
    if most_s is not None and not caller.is_admin and (limit_s is None or limit_s > most_s):
        asked = "unlimited" if limit_s is None else format_duration(limit_s)
        raise Invalid(
            f"time limit {asked} is above this host's {format_duration(most_s)}; lower --time",
            {"value": wanted_s, "limit": most_s},
        )
    return limit_s


def _bounded(what: str, wanted: int | None, default: int | None, most: int | None) -> int | None:
    """An amount of host memory or CPUs by the request, the default and the maximum."""
    amount = default if wanted is None else wanted
    if most is None or (amount is not None and amount <= most):
        return amount
    if wanted is None:
        return most
    raise Infeasible(
        f"{what} {wanted} is above this host's {most}; lower it", {"value": wanted, "limit": most}
    )


def _new_job(batch: Batch, caller: Caller, wanted: JobRequest, admitted: AdmittedRequest) -> Job:
    host = batch.state.config.jobs
    job = Job(
        job_id=batch.take_job_id(),
        uid=caller.uid,
        user=caller.user,
        name=wanted.name or "job",
        request=admitted.request,
        submitted_at_s=batch.wall_s,
        submitted_sched_s=batch.now_s,
        nice=wanted.nice,
        default_limit=wanted.time_limit_s is None,
        memory_bytes=_bounded(
            "host memory (bytes)",
            wanted.memory_bytes,
            host.default_memory_bytes,
            host.max_memory_bytes,
        ),
        cpus=_bounded("number of CPUs", wanted.cpus, host.default_cpus, host.max_cpus),
        whole_note=admitted.note,
        hold="user" if wanted.hold else None,
        retries=wanted.retries,
    )
    batch.add(job, payload_of(wanted))
    batch.note("job_submitted", job, gpus=job.request.gpus, vram_bytes=job.request.vram_bytes)
    return job


def payload_of(wanted: JobRequest) -> Payload:
    """The part of a request that only the launch needs."""
    if wanted.shell is not None:
        argv: tuple[bytes, ...] = (b"/bin/sh", b"-c", wanted.shell)
    elif wanted.script is not None:
        argv = wanted.args
    else:
        argv = wanted.argv or ()
    return Payload(
        argv=argv,
        script=wanted.script,
        cwd=wanted.cwd,
        umask=wanted.umask,
        rlimits=tuple(
            (name, soft, hard) for name, (soft, hard) in sorted((wanted.rlimits or {}).items())
        ),
        output=wanted.output,
        error=wanted.error,
        environment=tuple(wanted.environment.items()),
    )


def _notes(admitted: Sequence[AdmittedRequest]) -> tuple[str, ...]:
    """What admission changed, each text once."""
    return tuple(dict.fromkeys(verdict.note for verdict in admitted if verdict.note))


# --- cancel ----------------------------------------------------------------------------------


Act = Callable[[Job], tuple[str, JobState]]


def cancel(batch: Batch, caller: Caller, request: CancelRequest) -> tuple[Outcome, ...]:
    """One outcome per id; a job that is not live is not_found here, and may be in the books."""

    def act(job: Job) -> tuple[str, JobState]:
        return _cancel_one(batch, caller, request, job)

    return tuple(
        _outcome(batch, caller, JobId(job_id), act, "cancel") for job_id in request.job_ids
    )


def _outcome(batch: Batch, caller: Caller, job_id: JobId, act: Act, method: str) -> Outcome:
    """An act's text and state, or its refusal, as an outcome."""
    try:
        text, state = act(_changeable(batch, caller, job_id, method))
    except GpuschedError as error:
        return Outcome(job_id=job_id, code=error.code, text=error.message)
    return Outcome(job_id=job_id, text=text, state=state)


def _changeable(batch: Batch, caller: Caller, job_id: JobId, method: str) -> Job:
    """The job, if it is live and the caller may change it; an admin's reach is on record."""
    job = batch.job(job_id)
    if job is None:
        raise NotFound(f"there is no job {job_id}")
    if not caller.may_change(job):
        raise not_yours(job)
    if not caller.owns(job):
        row = AuditRow(batch.wall_s, caller.uid, caller.pid, method, "done", f"job {job_id}")
        batch.audits.append(row)
    return job


def not_yours(job: Job) -> Denied:
    """The refusal of a stranger's order."""
    return Denied(f"job {job.job_id} belongs to {job.user}; only its owner or an admin may do this")


def _cancel_one(
    batch: Batch, caller: Caller, request: CancelRequest, job: Job
) -> tuple[str, JobState]:
    if job.is_final:
        return f"was {job.state} already", job.state
    if request.signal is not None:
        return _signal(batch, job, request.signal)
    if job.cancel is not None:
        return "is being cancelled already", job.state
    order = CancelOrder(caller.uid, caller.user, batch.wall_s, request.reason)
    ordered = replace(job, cancel=order)
    batch.put(ordered)
    if job.state is JobState.PENDING:
        after = batch.advance(
            ordered,
            Dropped(JobState.CANCELLED, batch.wall_s, Cause.CANCELLED, cancel_text(order)),
        )
        batch.note("job_ended", after, state=str(after.state), by=caller.user)
        return "cancelled", after.state
    batch.note("cancel_requested", job, by=caller.user, reason=request.reason)
    return "cancel requested", job.state


def cancel_text(order: CancelOrder) -> str:
    """Who cancelled, and why."""
    return f"cancelled by {order.by}" + (f": {order.reason}" if order.reason else "")


def _signal(batch: Batch, job: Job, signum: int) -> tuple[str, JobState]:
    if job.state is JobState.PENDING:
        raise Conflict(f"job {job.job_id} is not running; a queued job takes no signal")
    if len(job.signals) >= SIGNALS_MAX:
        raise LimitReached(
            f"job {job.job_id} was sent {len(job.signals)} signals; that is the limit"
        )
    number = job.signals[-1][0] + 1 if job.signals else 1
    batch.put(replace(job, signals=(*job.signals, (number, signum))))
    batch.note("signal_requested", job, signal=signum)
    return "signalled", job.state


# --- top -------------------------------------------------------------------------------------


def top(batch: Batch, caller: Caller, job_id: JobId) -> Outcome:
    """Put a waiting job first; one outcome, as of update.

    An owner's other jobs give way by a nice value that is one larger, since an owner may not lower
    any. An admin's word gives the job the smallest nice value there is, on record.
    """
    return _outcome(batch, caller, job_id, lambda job: _top_one(batch, caller, job), "top")


def _top_one(batch: Batch, caller: Caller, job: Job) -> tuple[str, JobState]:
    if job.state is not JobState.PENDING:
        raise Conflict(f"job {job.job_id} is {job.state}; only a queued job can be put first")
    if caller.is_admin:
        batch.put(replace(job, nice=NICE_MIN))
        text = f"first of all, by nice {NICE_MIN}"
    else:
        ahead = [other for other in _own_waiting(batch, job) if other.nice <= job.nice]
        if ahead and job.nice >= NICE_MAX:
            raise Conflict(f"job {job.job_id} has nice {job.nice}; no job can give way to it")
        for other in ahead:
            after = replace(other, nice=job.nice + 1)
            _void_promise(batch, caller, other, after)
            batch.put(after)
        text = "first of yours"
        if ahead:
            others = "1 other has" if len(ahead) == 1 else f"{len(ahead)} others have"
            text += f"; {others} nice {job.nice + 1} now"
    batch.note("job_updated", job, changed=[f"top: {text}"], by=caller.user)
    return text, job.state


def _own_waiting(batch: Batch, job: Job) -> list[Job]:
    """The other queued jobs of the job's owner."""
    return [
        other
        for other in batch.live_jobs()
        if other.uid == job.uid and other.state is JobState.PENDING and other.job_id != job.job_id
    ]


# --- update ----------------------------------------------------------------------------------


def update(
    batch: Batch, caller: Caller, request: UpdateRequest, snapshot: Snapshot | None
) -> tuple[Outcome, ...]:
    """One outcome per id. `snapshot` judges an owner's wish for a longer limit."""

    def act(job: Job) -> tuple[str, JobState]:
        return _update_one(batch, caller, request, job, snapshot)

    return tuple(
        _outcome(batch, caller, JobId(job_id), act, "update") for job_id in request.job_ids
    )


def _update_one(
    batch: Batch,
    caller: Caller,
    request: UpdateRequest,
    job: Job,
    snapshot: Snapshot | None,
) -> tuple[str, JobState]:
    if job.is_final:
        raise Conflict(f"job {job.job_id} is {job.state}; it cannot be changed any more")
    changed: list[str] = []
    before = job
    if request.name is not None:
        job = replace(job, name=request.name)
        changed.append(f"name {request.name}")
    if request.nice is not None:
        job = _new_nice(caller, job, request.nice)
        changed.append(f"nice {request.nice}")
    if request.time_limit_s is not None:
        job = _new_limit(batch, caller, job, request.time_limit_s, snapshot)
        changed.append(f"limit {format_duration(limit_from_wire(request.time_limit_s))}")
    if request.vram_bytes is not None:
        job = _new_vram(batch, caller, job, request.vram_bytes)
        changed.append(f"VRAM {bytes_text(request.vram_bytes)}")
    if request.hold is not None:
        job = _new_hold(batch, caller, job, request.hold)
        changed.append("held" if request.hold else "released")
    is_new_hold = job.hold is not None and before.hold is None
    if is_new_hold or job.request != before.request or job.nice != before.nice:
        _void_promise(batch, caller, before, job)
    batch.put(job)
    batch.note("job_updated", job, changed=changed, by=caller.user)
    return ", ".join(changed), job.state


def _void_promise(batch: Batch, caller: Caller, before: Job, after: Job) -> None:
    """A changed job loses its promise, unless only its limit became shorter."""
    old_s, new_s = before.request.time_limit_s, after.request.time_limit_s
    is_shorter = new_s is not None and (old_s is None or new_s <= old_s)
    same_otherwise = replace(after.request, time_limit_s=old_s) == before.request
    if is_shorter and same_otherwise and after.nice == before.nice and after.hold is None:
        return
    by_owner = caller.uid == before.uid
    batch.voided[before.job_id] = None if by_owner else PromiseException.ADMIN_CHANGE


def _new_vram(batch: Batch, caller: Caller, job: Job, vram_bytes: int) -> Job:
    """A queued job asks for another amount; its owner's word goes before a retry's."""
    if job.state is not JobState.PENDING:
        raise Conflict(f"job {job.job_id} is {job.state}; only a queued job's VRAM can be changed")
    asked = replace(job.request, vram_bytes=vram_bytes, card_bytes=0)
    admitted = admission.admit(
        asked, batch.state.inventory, batch.state.policy, admin=caller.is_admin
    )
    batch.rested.add(job.job_id)
    return replace(job, request=admitted.request, whole_note=admitted.note)


def _new_nice(caller: Caller, job: Job, nice: int) -> Job:
    if not caller.is_admin and nice < max(0, job.nice):
        raise Denied(
            f"job {job.job_id} has nice {job.nice}; its owner may only raise it, "
            "an admin may lower it"
        )
    return replace(job, nice=nice)


def _new_limit(
    batch: Batch, caller: Caller, job: Job, wanted_s: int, snapshot: Snapshot | None
) -> Job:
    limit_s = _time_limit(batch, caller, wanted_s)
    now_limit_s = job.request.time_limit_s
    is_longer = now_limit_s is not None and (limit_s is None or limit_s > now_limit_s)
    if job.holds_gpus and is_longer and not caller.is_admin:
        _check_extension(batch, job, limit_s, snapshot)
    if job.state is JobState.PENDING and is_longer:
        batch.rested.add(job.job_id)
    return replace(job, request=replace(job.request, time_limit_s=limit_s), default_limit=False)


def _check_extension(
    batch: Batch, job: Job, limit_s: float | None, snapshot: Snapshot | None
) -> None:
    """An owner's longer limit must not move a promised start."""
    if snapshot is None or limit_s is None:
        raise Conflict(f"job {job.job_id} runs; only an admin may make it unlimited")
    snapshot = replace(snapshot, running=tuple(_as_changed(batch, run) for run in snapshot.running))
    most_s = forecast.raise_limit_allowed(snapshot, batch.state.policy, job.job_id, limit_s)
    if most_s < limit_s:
        raise Conflict(
            f"a limit of {format_duration(limit_s)} for job {job.job_id} would delay a promised "
            f"start; at most {format_duration(most_s)} is possible",
            {"limit": most_s},
        )


def _as_changed(batch: Batch, running: RunningJob) -> RunningJob:
    """With the limit that the batch gave it: one extension may leave no room for the next."""
    job = batch.job(running.job_id)
    return running if job is None else replace(running, time_limit_s=job.request.time_limit_s)


def _new_hold(batch: Batch, caller: Caller, job: Job, hold: bool) -> Job:
    if job.state is not JobState.PENDING:
        raise Conflict(
            f"job {job.job_id} is {job.state}; only a queued job can be held or released"
        )
    if hold:
        kind = "user" if caller.uid == job.uid else "admin"
        return job if job.hold is not None and kind == "user" else replace(job, hold=kind)
    if job.hold in ("admin", HOLD_CONFIG) and not caller.is_admin:
        raise Denied(f"job {job.job_id} is held by an admin; only an admin may release it")
    if job.hold is not None:
        batch.rested.add(job.job_id)
    return replace(job, hold=None, hold_detail=None, launch_failures=0)
