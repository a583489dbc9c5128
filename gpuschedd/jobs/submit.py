"""Submissions: admitted all or none, judged inside a batch. Raises GpuschedError to refuse.

A refused submission leaves no trace. No I/O: everything needed is in the batch or the arguments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgpack

from gpusched_client.errors import (
    Conflict,
    Denied,
    GpuschedError,
    Infeasible,
    Invalid,
    LimitReached,
)
from gpusched_client.terms import EventKind
from gpusched_client.units import bytes_text, format_duration
from gpusched_client.wire.limits import limit_from_wire, limit_to_wire
from gpusched_client.wire.submit_messages import (
    JobRequest,
    SubmitRequest,
    SubmitResult,
    common_and_own,
)
from gpuschedd.core import admission
from gpuschedd.core.job import Job
from gpuschedd.core.length_key import length_key
from gpuschedd.core.model import (
    AdmittedRequest,
    Request,
    Topology,
)
from gpuschedd.jobs import gates
from gpuschedd.jobs.batch import Batch
from gpuschedd.jobs.principal import Principal
from gpuschedd.store.records import Payload, Submission

LIVE_REQUEST_BYTES_MAX = 2**30  # of one user's jobs that are not final, environments included


#: What jobs share in what is digested, in its order. It stays: digests are kept for a week.
_SHARED_IN_DIGESTS = ("environment", "cwd", "umask", "rlimits")


def digest_of(request: SubmitRequest) -> bytes:
    """What a submission id stands for: the same jobs in the same order.

    A map has no order: a client that writes its request again may write the names in another.
    """
    common, jobs = common_and_own(request.jobs, _SHARED_IN_DIGESTS)
    for part in (common, *jobs):
        for name in ("environment", "rlimits"):
            if part.get(name):
                part[name] = dict(sorted(part[name].items()))
    content: dict[str, object] = {"jobs": jobs}
    if len(jobs) > 1:
        content["common"] = {name: common[name] for name in _SHARED_IN_DIGESTS if name in common}
    return hashlib.sha256(msgpack.packb(content, use_bin_type=True)).digest()


def submit(
    batch: Batch, caller: Principal, request: SubmitRequest, earlier: Submission | None
) -> SubmitResult:
    """Admit all jobs or none. `earlier` is what the database has under the same submission id."""
    digest = digest_of(request) if request.submission_id else b""
    if request.submission_id:
        known = batch.submission(caller.uid, request.submission_id) or earlier
        if known is not None:
            return _again(batch, known, digest, request)
    if caller.barred is not None:
        raise Denied(caller.barred)
    _check_room(batch, caller, len(request.jobs))
    sizes = [job.payload_bytes for job in request.jobs]
    _check_bytes(batch, caller, sum(sizes))
    judged: dict[Request, AdmittedRequest] = {}
    admitted = [_admit(batch, caller, job, index, judged) for index, job in enumerate(request.jobs)]
    payloads = _Payloads()
    jobs = [
        _new_job(batch, caller, wanted, verdict, payloads.of(wanted), size)
        for wanted, verdict, size in zip(request.jobs, admitted, sizes, strict=True)
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


def _check_room(batch: Batch, caller: Principal, count: int) -> None:
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


def _check_bytes(batch: Batch, caller: Principal, size: int) -> None:
    held = batch.live_bytes(caller.uid)
    if held + size > LIVE_REQUEST_BYTES_MAX:
        raise LimitReached(
            f"the scripts, arguments and environments of {caller.user}'s unfinished jobs take "
            f"{bytes_text(held)}, and these {bytes_text(size)} more; the limit is "
            f"{bytes_text(LIVE_REQUEST_BYTES_MAX)}. Wait for some to end, or submit what is large "
            "as a file that the jobs read.",
            {"value": held + size, "limit": LIVE_REQUEST_BYTES_MAX},
        )


def _admit(
    batch: Batch,
    caller: Principal,
    wanted: JobRequest,
    index: int,
    judged: dict[Request, AdmittedRequest],
) -> AdmittedRequest:
    """The request as it will be placed; refusals say which of several jobs is meant.

    `judged`: of the jobs before it. The same request is judged once.
    """
    try:
        _check_nice(caller, wanted.nice)
        request = request_of(batch, caller, wanted)
        if request not in judged:
            judged[request] = admission.admit(request, batch.state.inventory, batch.state.policy)
        return judged[request]
    except GpuschedError as error:
        error.data.setdefault("path", f"jobs[{index}]")
        raise


def _check_nice(caller: Principal, nice: int) -> None:
    if nice < 0 and not caller.is_admin:
        raise Denied(f"nice {nice} is negative; only an admin may raise a priority. Use 0 to 1000.")


def request_of(batch: Batch, caller: Principal, wanted: JobRequest) -> Request:
    """What the policy needs of a job request, with the host's defaults and limits."""
    return Request(
        gpus=wanted.gpus,
        vram_bytes=wanted.vram_bytes,
        gpu_model=wanted.gpu_model,
        exclusive=wanted.exclusive,
        topology=Topology(wanted.topology) if wanted.topology else Topology.ANY,
        time_limit_s=allowed_limit_s(batch, caller, wanted.time_limit_s),
        estimate_s=None if wanted.estimate_s is None else float(wanted.estimate_s),
    )


def allowed_limit_s(batch: Batch, caller: Principal, wanted_s: int | None) -> float | None:
    """The limit that a job gets; None: none. Raises Invalid above what this principal may ask."""
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


def _new_job(
    batch: Batch,
    caller: Principal,
    wanted: JobRequest,
    admitted: AdmittedRequest,
    payload: Payload,
    size: int,
) -> Job:
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
        length_key=length_key(wanted.name, _command_of(wanted)),
        retries=wanted.retries,
        **gates.asked_of(wanted, gates.Now(batch.now_s, batch.wall_s)),
    )
    batch.add(job, payload, size)
    batch.emit(
        EventKind.JOB_SUBMITTED, job, gpus=job.request.gpus, vram_bytes=job.request.vram_bytes
    )
    return job


def _command_of(wanted: JobRequest) -> tuple[bytes, ...]:
    """What runs, in words; of a script where it lay, of one that came by a pipe nothing."""
    if wanted.script is None:
        return _argv_of(wanted)
    return () if wanted.script_path is None else (wanted.script_path,)


def _argv_of(wanted: JobRequest) -> tuple[bytes, ...]:
    """The words that are executed; of a script its arguments."""
    if wanted.shell is not None:
        return (b"/bin/sh", b"-c", wanted.shell)
    return wanted.args if wanted.script is not None else wanted.argv or ()


class _Payloads:
    """What only the launch needs of the jobs of a submission.

    Thousands of jobs whose environment and limits are one and the same share what is made of them.
    """

    def __init__(self) -> None:
        self._environment: Mapping[bytes, bytes] | None = None
        self._pairs: tuple[tuple[bytes, bytes], ...] = ()
        self._rlimits: Mapping[str, tuple[int, int]] | None = None
        self._limits: tuple[tuple[str, int, int], ...] = ()

    def of(self, wanted: JobRequest) -> Payload:
        if wanted.environment is not self._environment:
            self._environment = wanted.environment
            self._pairs = tuple(wanted.environment.items())
        return Payload(
            argv=_argv_of(wanted),
            script=wanted.script,
            cwd=wanted.cwd,
            umask=wanted.umask,
            rlimits=tuple(
                [
                    (name, soft, hard)
                    for name, (soft, hard) in sorted((wanted.rlimits or {}).items())
                ]
            ),
            output=wanted.output,
            error=wanted.error,
            environment=self._pairs,
            niceness=wanted.niceness,
            affinity=wanted.affinity or (),
            script_path=wanted.script_path,
            checked=wanted.checked,
        )

    def _limits_of(
        self, rlimits: Mapping[str, tuple[int, int]] | None
    ) -> tuple[tuple[str, int, int], ...]:
        if rlimits is not self._rlimits:
            self._rlimits = rlimits
            entries = sorted((rlimits or {}).items())
            self._limits = tuple([(name, soft, hard) for name, (soft, hard) in entries])
        return self._limits


def _notes(admitted: Sequence[AdmittedRequest]) -> tuple[str, ...]:
    """What admission changed, each text once."""
    return tuple(dict.fromkeys(verdict.note for verdict in admitted if verdict.note))
