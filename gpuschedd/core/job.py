"""The life of one job: its record, and the one table of what may follow what. Pure.

The controller alone calls `advance`; an unlisted move is a bug of ours and raises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from gpusched_client.terms import Cause, HoldKind, JobId, JobState
from gpuschedd.core.model import Grant, Request

P, CF, R, CG = JobState.PENDING, JobState.CONFIGURING, JobState.RUNNING, JobState.COMPLETING


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """A wish to end the job, committed before anything is done about it."""

    by_uid: int
    by: str
    at_s: float  # Unix time
    reason: str | None = None


class Awaited(NamedTuple):
    """Whose jobs wait, and for what."""

    uid: int
    place: str


@dataclass(frozen=True, slots=True)
class EnvironmentWait:
    """What a job needs and did not find, and since when (scheduler time).

    `place` is what was looked for ("directory /data/alice"), `fault` the whole answer. One probe is
    made for all jobs of a user that wait for the same place.
    """

    place: str
    fault: str
    since_s: float
    next_try_s: float
    tries: int = 0  # probes that found it missing


@dataclass(frozen=True, slots=True)
class Job:
    """One job as the controller keeps it; `replace` changes it, `advance` changes its state.

    `*_at_s` is Unix time for records; `*_sched_s` is scheduler time for decisions.
    """

    job_id: JobId
    uid: int
    user: str
    name: str
    request: Request
    submitted_at_s: float
    submitted_sched_s: float
    state: JobState = P
    attempt: int = 1
    nice: int = 0
    default_limit: bool = False  # the limit is the host's default, not the user's word
    memory_bytes: int | None = None  # of host memory, held by the job's unit; None: unbounded
    cpus: int | None = None  # CPUs' worth of time, held by the job's unit; None: unbounded
    whole_note: str | None = None  # what admission changed about the request
    length_key: str | None = None  # what its owner's runs are told apart by
    hold: HoldKind | None = None
    hold_detail: str | None = None
    cancel: CancelOrder | None = None
    signals: tuple[tuple[int, int], ...] = ()  # (number, signal): orders are numbered
    grants: tuple[Grant, ...] = ()
    whole: bool = False
    decided_sched_s: float | None = None
    decided_limit_s: float | None = None  # the limit at the decision; the request's may be raised
    decided_grace_s: float | None = None  # for the kill: what the supervisor is given
    decided_expected_s: float | None = None  # how long it was expected to run
    stuck: bool = False  # far past its planned end; sticky
    warned_limit_s: float | None = None  # the limit of which 90 % had passed, when it was said
    started_at_s: float | None = None
    started_sched_s: float | None = None
    main_ended_sched_s: float | None = None
    ended_at_s: float | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    cause: Cause | None = None
    cause_detail: str | None = None
    cpu_user_s: float | None = None
    cpu_system_s: float | None = None
    max_rss_bytes: int | None = None
    launch_failures: int = 0
    not_before_sched_s: float | None = None  # back-off after a failed launch
    begin_at_sched_s: float | None = None
    environment: EnvironmentWait | None = None
    retries: int = 0
    retries_used: int = 0

    @property
    def is_final(self) -> bool:
        """True when nothing will change the job again."""
        return self.state.is_final

    @property
    def holds_gpus(self) -> bool:
        """True from the decision until the last process is gone."""
        return self.state in (CF, R, CG)

    @property
    def key(self) -> str:
        """ID.ATTEMPT, the name of the job directory."""
        return f"{self.job_id}.{self.attempt}"


# --- what happens to a job -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    """A pass chose GPUs; they are charged from now on."""

    grants: tuple[Grant, ...]
    whole: bool
    at_sched_s: float
    grace_s: float
    expected_s: float


@dataclass(frozen=True, slots=True)
class Started:
    """The supervisor opened the gate of its child."""

    at_s: float
    at_sched_s: float


@dataclass(frozen=True, slots=True)
class MainEnded:
    """The main process was reaped; others of the job may live on."""

    at_s: float
    at_sched_s: float


@dataclass(frozen=True, slots=True)
class Gone:
    """The last process is gone: the end, with everything that is known of it."""

    state: JobState
    ended_at_s: float
    code: int | None = None
    signal: int | None = None
    cause: Cause | None = None
    detail: str | None = None
    cpu_user_s: float | None = None
    cpu_system_s: float | None = None
    max_rss_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class NeverRan:
    """Nothing of this attempt ran; the job waits again with the next attempt."""

    failed_launch: bool = False
    same_attempt: bool = False  # the host's fault, and no trace of the attempt is left
    not_before_sched_s: float | None = None
    hold: HoldKind | None = None
    detail: str | None = None
    environment: EnvironmentWait | None = None


@dataclass(frozen=True, slots=True)
class Retried:
    """An attempt failed in a way that earns another one."""

    request: Request


@dataclass(frozen=True, slots=True)
class Dropped:
    """A job that never ran ends without running.

    Cancelled; its dependency failed; or what it needs of its environment was away for too long.
    """

    state: JobState
    at_s: float
    cause: Cause
    detail: str | None = None


JobEvent = Placed | Started | MainEnded | Gone | NeverRan | Retried | Dropped

_LIVE_FINALS = frozenset(
    {
        JobState.COMPLETED,
        JobState.FAILED,
        JobState.CANCELLED,
        JobState.TIMEOUT,
        JobState.OUT_OF_MEMORY,
        JobState.NODE_FAIL,
    }
)

#: The one table: what may happen in which state, and which states it may lead to.
TRANSITIONS: dict[tuple[JobState, type[JobEvent]], frozenset[JobState]] = {
    (P, Placed): frozenset({CF}),
    (P, Dropped): frozenset({JobState.CANCELLED, JobState.DEPENDENCY_FAILED, JobState.FAILED}),
    (CF, Started): frozenset({R}),
    (CF, MainEnded): frozenset({CG}),
    (CF, Gone): _LIVE_FINALS,
    (CF, NeverRan): frozenset({P}),
    (CF, Dropped): frozenset({JobState.CANCELLED}),
    (CF, Retried): frozenset({P}),
    (R, MainEnded): frozenset({CG}),
    (R, Gone): _LIVE_FINALS,
    (R, NeverRan): frozenset({P}),
    (R, Dropped): frozenset({JobState.CANCELLED}),
    (R, Retried): frozenset({P}),
    (CG, Gone): _LIVE_FINALS,
    (CG, Retried): frozenset({P}),
}


class ImpossibleTransition(AssertionError):
    """A move that the table does not list: a bug of ours."""


def advance(job: Job, event: JobEvent) -> Job:
    """The job after the event. Raises ImpossibleTransition for a move that the table lacks."""
    allowed = TRANSITIONS.get((job.state, type(event)))
    after = _apply(job, event) if allowed is not None else None
    if allowed is None or after is None or after.state not in allowed:
        to = f" to {after.state}" if after is not None else ""
        raise ImpossibleTransition(
            f"job {job.job_id} is {job.state}: {type(event).__name__}{to} may not happen"
        )
    return after


def _apply(job: Job, event: JobEvent) -> Job:
    """The changed fields per event."""
    match event:
        case Placed(grants, whole, at_sched_s, grace_s, expected_s):
            return replace(
                job,
                state=CF,
                grants=grants,
                whole=whole,
                decided_sched_s=at_sched_s,
                decided_limit_s=job.request.time_limit_s,
                decided_grace_s=grace_s,
                decided_expected_s=expected_s,
            )
        case Started(at_s, at_sched_s):
            # What kept it from being launched before is over.
            return replace(
                job, state=R, started_at_s=at_s, started_sched_s=at_sched_s, hold_detail=None
            )
        case MainEnded(at_s, at_sched_s):
            return replace(job, state=CG, ended_at_s=at_s, main_ended_sched_s=at_sched_s)
        case Gone():
            return _gone(job, event)
        case NeverRan():
            return _never_ran(job, event)
        case Retried(request):
            return _waiting_again(replace(job, request=request, retries_used=job.retries_used + 1))
        case Dropped(state, at_s, cause, detail):
            return replace(
                _freed(job), state=state, ended_at_s=at_s, cause=cause, cause_detail=detail
            )


def _freed(job: Job) -> Job:
    """Without an allocation; the decision's time goes with it."""
    return replace(
        job,
        grants=(),
        whole=False,
        decided_sched_s=None,
        decided_limit_s=None,
        decided_grace_s=None,
        decided_expected_s=None,
        stuck=False,
    )


def _waiting_again(job: Job, attempts: int = 1) -> Job:
    """PENDING with the next attempt, nothing of the last one left but its number."""
    return replace(
        _freed(job),
        state=P,
        attempt=job.attempt + attempts,
        started_at_s=None,
        started_sched_s=None,
        main_ended_sched_s=None,
        warned_limit_s=None,
        ended_at_s=None,
        signals=(),
    )


def _never_ran(job: Job, event: NeverRan) -> Job:
    """PENDING again; a failed launch is counted and may end in a hold."""
    return replace(
        _waiting_again(job, 0 if event.same_attempt else 1),
        launch_failures=job.launch_failures + 1 if event.failed_launch else job.launch_failures,
        not_before_sched_s=event.not_before_sched_s,
        hold=event.hold or job.hold,
        hold_detail=event.detail or job.hold_detail,
        environment=event.environment,
    )


def _gone(job: Job, event: Gone) -> Job:
    """Final: the grants stay in the record of what it held, the allocation is the store's."""
    return replace(
        job,
        state=event.state,
        ended_at_s=event.ended_at_s,
        exit_code=event.code,
        exit_signal=event.signal,
        cause=event.cause,
        cause_detail=event.detail,
        cpu_user_s=event.cpu_user_s,
        cpu_system_s=event.cpu_system_s,
        max_rss_bytes=event.max_rss_bytes,
    )
