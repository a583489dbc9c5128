"""What the accounting database takes and gives: rows, and the changes of one batch.

Owns shapes alone: no SQL, no file, no decision. Times ending in `_sched_s` are scheduler time,
those ending in `_at_s` Unix time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpusched_client.terms import GpuUuid, JobId
from gpuschedd.core.job import Job
from gpuschedd.core.model import FirstHead, LengthRow
from gpuschedd.system.clock import ClockMark

BRIEF_WORDS_MAX, BRIEF_BYTES_MAX = 64, 1_024
RECENT_SUBMISSIONS_MAX = 100_000  # kept in memory; older ones are in the database only
RECENT_SUBMISSIONS_LOADED = 10_000  # of these at a start, which must not take long for them


@dataclass(frozen=True, slots=True)
class Payload:
    """What only the launch needs of a request; kept out of memory."""

    argv: tuple[bytes, ...]
    script: bytes | None
    cwd: bytes
    umask: int
    rlimits: tuple[tuple[str, int, int], ...]
    output: bytes | None
    error: bytes | None
    environment: tuple[tuple[bytes, bytes], ...] = ()
    niceness: int = 0
    affinity: tuple[int, ...] = ()
    script_path: bytes | None = None
    checked: bool = False


@dataclass(frozen=True, slots=True)
class Brief:
    """What a list shows of a request. `argv` is cut where it is not `whole`."""

    argv: tuple[bytes, ...]
    whole: bool
    cwd: bytes
    script_bytes: int | None


def brief_of(payload: Payload) -> Brief:
    """At most BRIEF_WORDS_MAX words and BRIEF_BYTES_MAX bytes of its argv."""
    words, left = [], BRIEF_BYTES_MAX
    for word in payload.argv[:BRIEF_WORDS_MAX]:
        words.append(word[:left])
        left = max(0, left - len(word))
    return Brief(
        argv=tuple(words),
        whole=tuple(words) == payload.argv,
        cwd=payload.cwd,
        script_bytes=None if payload.script is None else len(payload.script),
    )


@dataclass(frozen=True, slots=True)
class Age:
    """A waiting job's age, as the queue keeps it."""

    eligible_since_s: float
    age_gained_s: float
    window_since_s: float | None
    first_head: FirstHead | None = None


FIRST_IN_ORDER = "first"  # in the data of a start: who was first in the order
FIRST_OF_ALL = "first_of_all"  # in the data of a change: an admin put it before everybody's


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, for `watch`, the log and the database."""

    kind: str
    at_s: float
    job_id: JobId | None = None
    uid: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown_facts(self) -> Iterator[tuple[str, Any]]:
        """What a line of text has room for, in words: the rest is for `gq --why`."""
        for key, value in self.data.items():
            if key not in (FIRST_IN_ORDER, FIRST_OF_ALL) and value not in (None, [], ()):
                yield key, value


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One user's usage at an instant (scheduler time; `at_s` is Unix time); it grows by `rate`."""

    uid: int
    user: str
    usage_gpu_s: float
    rate: float
    at_sched_s: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Submission:
    """An idempotency key: the same content gives the same ids."""

    uid: int
    submission_id: str
    digest: bytes
    job_ids: tuple[JobId, ...]
    at_sched_s: float


@dataclass(frozen=True, slots=True)
class PromiseRow:
    """A promise and what became of it."""

    job_id: JobId
    promised_at_s: float
    promised_sched_s: float
    start_by_s: float
    start_by_sched_s: float
    outcome: str | None = None
    outcome_at_s: float | None = None
    started_at_s: float | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class GpuRow:
    """A GPU that was seen once; `drained` is an admin's reason, `sick` its health's."""

    uuid: GpuUuid
    gpu_index: int
    minor: int | None
    model: str
    total_bytes: int | None
    reserved_bytes: int
    seen_at_s: float
    drained: str | None = None
    sick: str | None = None  # the reason, kept within one boot
    sick_until_reboot: bool = False


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt ended that was not the job's last."""

    job_id: JobId
    attempt: int
    started_at_s: float | None
    ended_at_s: float
    outcome: str
    exit_code: int | None
    exit_signal: int | None
    detail: str | None


@dataclass(frozen=True, slots=True)
class AuditRow:
    """A denial or an act of an admin."""

    at_s: float
    uid: int
    pid: int
    method: str
    outcome: str
    detail: str


@dataclass(slots=True)
class Changes:
    """One batch: written together or not at all."""

    mark: ClockMark | None = None
    jobs: dict[JobId, Job] = field(default_factory=dict)
    payloads: dict[JobId, Payload] = field(default_factory=dict)
    ages: dict[JobId, Age | None] = field(default_factory=dict)
    gpu_index_of: dict[GpuUuid, int] = field(default_factory=dict)
    submissions: list[Submission] = field(default_factory=list)
    accounts: dict[int, UsageRow] = field(default_factory=dict)
    promises: dict[tuple[JobId, float], PromiseRow] = field(default_factory=dict)
    gpus: dict[GpuUuid, GpuRow] = field(default_factory=dict)
    gpu_uses: list[GpuUse] = field(default_factory=list)
    health: Mapping[GpuUuid, Remembered] | None = None  # all of it; None: as it was
    attempts: list[AttemptEnd] = field(default_factory=list)
    lengths: list[LengthRow] = field(default_factory=list)
    events: list[tuple[int, Event]] = field(default_factory=list)  # with their ids
    audits: list[AuditRow] = field(default_factory=list)
    keeps_time: bool = False  # the clock alone is worth a commit

    @property
    def is_empty(self) -> bool:
        """True when a commit would write nothing but the clock."""
        return not (
            self.keeps_time
            or self.jobs
            or self.ages
            or self.submissions
            or self.accounts
            or self.promises
            or self.gpus
            or self.gpu_uses
            or self.health is not None
            or self.attempts
            or self.lengths
            or self.events
            or self.audits
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything the controller keeps in memory, as of the last commit."""

    instance: str
    mark: ClockMark | None
    next_job_id: int
    jobs: tuple[Job, ...]  # those that are not final
    ages: Mapping[JobId, Age]
    accounts: tuple[UsageRow, ...]
    promises: tuple[PromiseRow, ...]  # without outcome
    gpus: tuple[GpuRow, ...]
    gpu_uses: tuple[GpuUse, ...]  # of jobs that are not final
    health: Mapping[GpuUuid, Remembered]
    last_event_id: int
    submissions: tuple[Submission, ...]  # the newest RECENT_SUBMISSIONS_LOADED, oldest first
    request_bytes: Mapping[JobId, int]  # of the jobs, environments included
    lengths: tuple[LengthRow, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What one attempt used of one GPU. `peak_upper_bytes`: the peak lies between both.

    `peak_source`: "driver" (its accounts), "sampled", "device" (difference), "none"; "at-least"
    where memory of nobody was beside it.
    """

    job_id: int
    attempt: int
    gpu_uuid: GpuUuid
    peak_bytes: int | None = None
    peak_upper_bytes: int | None = None
    peak_source: str = "none"
    utilization: float | None = None  # percent, average while observed
    energy_j: float | None = None  # shared with the other jobs of the GPU in equal parts
    observed_s: float = 0.0


def peak_of(uses: Iterable[GpuUse]) -> int | None:
    """The largest peak over the GPUs: VRAM is declared per GPU."""
    return max((use.peak_bytes for use in uses if use.peak_bytes is not None), default=None)


@dataclass(frozen=True, slots=True)
class Remembered:
    """What must outlive the daemon, lest a restart undo an admin's word or count errors twice.

    `pardoned`: conditions that an admin has overruled, sorted; `errors_seen`: uncorrectable ones.
    """

    pardoned: tuple[str, ...] = ()
    errors_seen: int = 0
