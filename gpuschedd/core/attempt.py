"""One attempt as its directory shows it: claim, records, orders, and the report made of them.

Shapes alone, shared by those who read the directory (`run`), those who judge (`recovery`) and those
who book what came of it (`jobs`). The format on disk is the supervisor's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gpusched_client.terms import JobId


@dataclass(frozen=True, slots=True)
class Cancel:
    """Who ended the job, and when (Unix time)."""

    by: str
    at_s: float
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Orders:
    """All that is ordered so far; each write replaces the whole.

    `time_limit_s`: None leaves the limit of the spec (or of the last order) alone, math.inf lifts
    it. `signals`: (number, signal) with rising numbers from 1; each number is sent once.
    """

    time_limit_s: float | None = None
    cancel: Cancel | None = None
    signals: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """Who holds the attempt: the process, by what a later one with its pid cannot share."""

    by: Literal["supervisor", "daemon"]
    boot_id: str
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class StartedRecord:
    """The main process before its exec. `at_s` is Unix time; the limit runs from `boottime_s`."""

    pid: int
    start_ticks: int
    session: int
    at_s: float
    boottime_s: float
    boot_id: str


@dataclass(frozen=True, slots=True)
class EndedRecord:
    """The end of the main process. `code` and `signal` are both None where nothing ran.

    `place`: what was not there, where the cause is "environment". `left`: of its processes, how
    many still ran.
    """

    code: int | None
    signal: int | None
    cause: str
    reason: str | None
    cancel_by: str | None
    cancel_at_s: float | None
    cancel_reason: str | None
    at_s: float
    boottime_s: float
    boot_id: str
    place: str | None = field(default=None, kw_only=True)
    left: int = field(default=0, kw_only=True)

    @property
    def is_of_environment(self) -> bool:
        """Nothing ran, and the same may succeed later."""
        return self.cause == "environment"


@dataclass(frozen=True, slots=True)
class ExitRecord(EndedRecord):
    """The end of the last process: what `ended` says, and what the job used.

    `max_rss_bytes` is of the largest process; it is never below that of the set-up (about 12 MiB).
    """

    finished_at_s: float
    cpu_user_s: float
    cpu_system_s: float
    max_rss_bytes: int
    oom: Literal["cuda", "shown", "host", "unknown"] | None


class Observation(NamedTuple):
    """One look at a directory; what recovery decides on."""

    claim: Claim | None
    supervisor_alive: bool
    started: StartedRecord | None
    ended: EndedRecord | None
    exit: ExitRecord | None


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """What was found of one attempt."""

    job_id: JobId
    attempt: int
    seen: Observation | None  # None: the directory cannot be read
    processes_left: bool = False  # asked only when the supervisor is dead
    launch_error: str | None = None
    deferred: bool = False  # launch_error is the host's fault
    account_gone: bool = False  # launch_error is that the job's account is gone
    storage_error: str | None = None
    place: str | None = None  # launch_error is that this is not there for now
    detail: str | None = None
