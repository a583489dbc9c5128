"""Gates: what keeps a pending job from waiting for GPUs alone, each with its reason and its time.

A gate says whether it blocks a job, why in words and numbers, and when it opens by itself. Whatever
is asked about eligibility is answered here; nothing else looks at the fields behind it. No I/O.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gpusched_client.terms import HoldKind, JobState, PendingReason
from gpusched_client.units import duration_about
from gpuschedd.core.job import Job
from gpuschedd.core.model import Reason

if TYPE_CHECKING:
    from gpusched_client.wire.submit_messages import JobRequest


class Now(NamedTuple):
    """One moment on both clocks, so that a gate can turn a time of day into scheduler time."""

    sched_s: float
    wall_s: float


class Gate(ABC):
    """One thing that a pending job may wait for before it is eligible. Each defines what it needs.

    `rests`: the job's age begins again when the gate opens by itself.
    """

    rests = False

    def asked(self, wanted: JobRequest, now: Now) -> Mapping[str, Any]:
        """The fields of a new job that its request sets here."""
        del wanted, now
        return {}

    def shown(self, job: Job, to_wall_s: Callable[[float], float]) -> Mapping[str, Any]:
        """The fields of its view that it is shown by; `to_wall_s` is of scheduler time."""
        del job, to_wall_s
        return {}

    @abstractmethod
    def blocks(self, job: Job, now_s: float) -> Reason | None:
        """Why the job is not eligible at now_s (scheduler time); None: not for this."""

    def opens_at_s(self, job: Job) -> float | None:
        """When it opens by itself, in scheduler time; None: it is open, or somebody opens it."""
        del job
        return None

    def opened(self, job: Job) -> Job:
        """The job without its trace, once its time has passed."""
        return job


class HoldGate(Gate):
    """Held by its owner, an admin, or the daemon, until somebody releases it."""

    def asked(self, wanted: JobRequest, now: Now) -> Mapping[str, Any]:
        del now
        return {"hold": HoldKind.USER if wanted.hold else None}

    def shown(self, job: Job, to_wall_s: Callable[[float], float]) -> Mapping[str, Any]:
        del to_wall_s
        return {"hold": job.hold is not None}

    def blocks(self, job: Job, now_s: float) -> Reason | None:
        del now_s
        match job.hold:
            case None:
                return None
            case HoldKind.LAUNCH:
                return Reason(
                    PendingReason.LAUNCH_FAILED,
                    f"held after {job.launch_failures} failed launches: {job.hold_detail}",
                    {"failures": job.launch_failures},
                )
            case HoldKind.ACCOUNT | HoldKind.CONFIG:
                return Reason(PendingReason.HELD, f"held: {job.hold_detail}")
            case HoldKind.USER:
                return Reason(PendingReason.HELD, "held by its owner")
            case HoldKind.ADMIN:
                return Reason(PendingReason.HELD, "held by an admin")


_GPUS_BEGIN = ("GPU ", "the GPUs ")


def launch_fault(job: Job) -> str | None:
    """Why it could not be started at the last try, while it is tried again; None: nothing is wrong.

    GPUs that somebody else took in the last moment are nobody's fault.
    """
    is_tried_again = job.not_before_sched_s is not None or job.state is JobState.CONFIGURING
    why = job.hold_detail
    if why is None or job.hold is not None or not is_tried_again:
        return None
    return None if why.startswith(_GPUS_BEGIN) else why


class BackoffGate(Gate):
    """Waits before the next launch, after one that failed or that the host could not make."""

    def blocks(self, job: Job, now_s: float) -> Reason | None:
        if job.not_before_sched_s is None or job.not_before_sched_s <= now_s:
            return None
        wait_s = job.not_before_sched_s - now_s
        what, why = "the host could not start it", job.hold_detail
        if job.launch_failures:
            what = f"launch failed {job.launch_failures} time(s)"
        elif why is not None and why.startswith(_GPUS_BEGIN):
            what, why = why, None  # the last look's words say it all
        told = f"{what}: {why}" if why else what
        return Reason(
            PendingReason.LAUNCH_BACKOFF,
            f"{told}; next try in {wait_s:.0f} s",
            {"failures": job.launch_failures, "wait_s": wait_s},
        )

    def opens_at_s(self, job: Job) -> float | None:
        return job.not_before_sched_s

    def opened(self, job: Job) -> Job:
        return replace(job, not_before_sched_s=None)


class BeginGate(Gate):
    """Not before a time of its owner's."""

    rests = True

    def blocks(self, job: Job, now_s: float) -> Reason | None:
        if job.begin_at_sched_s is None or job.begin_at_sched_s <= now_s:
            return None
        wait_s = job.begin_at_sched_s - now_s
        return Reason(PendingReason.BEGIN_TIME, f"begins in {wait_s:.0f} s", {"wait_s": wait_s})

    def opens_at_s(self, job: Job) -> float | None:
        return job.begin_at_sched_s

    def opened(self, job: Job) -> Job:
        return replace(job, begin_at_sched_s=None)


class EnvironmentGate(Gate):
    """Waits for a place that its last start did not find: a probe looks again, and opens it."""

    def blocks(self, job: Job, now_s: float) -> Reason | None:
        if (wait := job.environment) is None:
            return None
        waited_s, next_s = now_s - wait.since_s, max(0.0, wait.next_try_s - now_s)
        return Reason(
            PendingReason.ENVIRONMENT,
            f"missing for {duration_about(waited_s)}, looked for again "
            f"{f'in {duration_about(next_s)}' if next_s else 'with other jobs'}: {wait.fault}",
            {"tries": wait.tries, "waited_s": waited_s, "wait_s": next_s},
        )


#: In the order in which their reasons are told.
GATES: tuple[Gate, ...] = (HoldGate(), EnvironmentGate(), BackoffGate(), BeginGate())


def asked_of(wanted: JobRequest, now: Now) -> dict[str, Any]:
    """The fields of a new job that its gates need of its request."""
    fields: dict[str, Any] = {}
    for gate in GATES:
        fields |= gate.asked(wanted, now)
    return fields


def shown_of(job: Job, to_wall_s: Callable[[float], float]) -> dict[str, Any]:
    """The fields of a job's view that its gates are shown by."""
    fields: dict[str, Any] = {}
    for gate in GATES:
        fields |= gate.shown(job, to_wall_s)
    return fields


def blocked_by(job: Job, now_s: float) -> Reason | None:
    """Why a pending job is not eligible; None: no gate blocks it."""
    for gate in GATES:
        reason = gate.blocks(job, now_s)
        if reason is not None:
            return reason
    return None


def is_eligible(job: Job, now_s: float) -> bool:
    """True for a job that waits for GPUs (or a CPU slot) alone."""
    return job.state is JobState.PENDING and job.cancel is None and blocked_by(job, now_s) is None


def is_timed(job: Job) -> bool:
    """True where a gate opens by time, or did: its trace stays until `opened` takes it off."""
    return not job.is_final and any(gate.opens_at_s(job) is not None for gate in GATES)


def opening_times_s(job: Job) -> tuple[float, ...]:
    """When its gates open by themselves; empty where it waits for somebody all the same."""
    if job.state is not JobState.PENDING or job.hold is not None:
        return ()
    times = (gate.opens_at_s(job) for gate in GATES)
    return tuple(at_s for at_s in times if at_s is not None)


def opened(job: Job) -> tuple[Job, bool]:
    """An eligible job without the traces of its gates, and whether its age begins again."""
    rests = any(gate.rests and gate.opens_at_s(job) is not None for gate in GATES)
    for gate in GATES:
        job = gate.opened(job)
    return job, rests
