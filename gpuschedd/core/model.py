"""The core's nouns: GPUs, requests, waiting and running jobs, snapshot and plan, policy.

Owns shapes and their meaning; decides nothing. All frozen. Names ending in `_s` are scheduler times
or durations in float seconds, bytes are int, ids are those of gpusched_client.terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from gpusched_client.terms import GpuUuid, JobId, PendingReason

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
GIB = 2**30
MIB = 2**20
NEVER_S = float("inf")


class GpuState(StrEnum):
    """Only an OK GPU takes jobs; the others never come back by themselves."""

    OK = "ok"
    DRAINED = "drained"
    LOST = "lost"
    SICK = "sick"
    UNREAD = "unread"


class Topology(StrEnum):
    """What a multi-GPU job demands of the links between its GPUs."""

    ANY = "any"
    NVLINK = "nvlink"


class Backfill(StrEnum):
    """Who may start while the first job that does not fit waits."""

    EASY = "easy"
    BEFORE_RESERVATION = "before-reservation"
    OFF = "off"


class Order(StrEnum):
    """FCFS: eligible since, then id; no fair-share and no age. For `replay` and comparisons."""

    PRIORITY = "priority"
    FCFS = "fcfs"


class PromiseException(StrEnum):
    """Why a promised start may come later than promised; there is no other cause."""

    LIMIT_EXTENDED = "limit_extended"  # an admin raised a running job's limit
    GPU_DRAINED = "gpu_drained"
    GPU_LOST = "gpu_lost"
    GPU_SICK = "gpu_sick"
    GPU_UNREAD = "gpu_unread"  # its memory cannot be read, or no fresh sample is in
    FOREIGN_MEMORY = "foreign_memory"  # foreign or ownerless memory grew
    ABOVE_DECLARATION = "above_declaration"  # a job uses more than it declared
    STUCK_JOB = "stuck_job"
    LATE_LAUNCH = "late_launch"  # a job started later than its launch allowance
    LATE_END = "late_end"  # a job outlived its planned end
    ADMIN_CHANGE = "admin_change"  # a hold or nice by an admin, or what nothing else explains
    CONFIG = "config"  # the configuration that was read again


class PromiseOutcome(StrEnum):
    """How a promise ended. WITHDRAWN: the holder left the queue or was changed by its owner."""

    KEPT = "kept"
    BROKEN = "broken"
    LOST = "lost"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as last seen. `foreign_bytes` holds buffered peaks and ownerless memory already.

    `foreign_since_s` None with foreign memory or use: of unknown age, so it counts as old.
    `leaves_by_s`: all of it is an ended job's, which the driver should have taken back by then.
    `whole_idle` False: foreign use is above the threshold below which a whole-GPU job may have it.
    `shareable` False (compute mode): one process only, so at most one job.
    `links`: (peer, score) for each peer, larger is better; `island`: GPUs linked all to all.
    `is_slice`: part of a partitioned GPU (MIG); one process can use one slice, so jobs get one.
    """

    uuid: GpuUuid
    index: int
    model: str
    total_bytes: int
    reserved_bytes: int = 0
    minor: int | None = None
    state: GpuState = GpuState.OK
    state_text: str = ""
    foreign_bytes: int = 0
    foreign_since_s: float | None = None
    foreign_text: str = ""
    foreign_hint: str = ""  # the setting that would let whole jobs beside it
    foreign_detail: str = ""  # both for admins, where the text must name nobody
    leaves_by_s: float | None = None
    whole_idle: bool = True
    shareable: bool = True
    fresh: bool = True
    island: int | None = None
    links: tuple[tuple[GpuUuid, int], ...] = ()
    joined: tuple[GpuUuid, ...] = ()  # peers at the other end of an NVLink, island or not
    is_slice: bool = False
    parent_uuid: GpuUuid | None = None  # of a slice, as far as it is known
    index_is_past: bool = False  # it is missing, and another GPU has its index now

    @property
    def label(self) -> str:
        """Its index in a sentence: "3", or "3 (was)"."""
        return f"{self.index} (was)" if self.index_is_past else str(self.index)

    @property
    def capacity_bytes(self) -> int:
        """What jobs can be granted: the driver keeps a reserve that no job can use."""
        return self.total_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True)
class Request:
    """What a job asks, as admitted. `vram_bytes` None: whole GPUs. `time_limit_s` None: unlimited.

    `card_bytes`: a whole-GPU job that asked for memory needs cards of at least this total.
    `estimate_s`: how long it will probably run, by its owner's word, which stops nothing.
    """

    gpus: int = 1
    vram_bytes: int | None = None
    gpu_model: str | None = None
    exclusive: bool = False
    topology: Topology = Topology.ANY
    time_limit_s: float | None = None
    card_bytes: int = 0
    estimate_s: float | None = None

    @property
    def whole(self) -> bool:
        """True when the job takes idle GPUs alone."""
        return self.vram_bytes is None

    @property
    def wishes(self) -> bool:
        """True when not any GPUs with enough memory will do."""
        return bool(
            self.gpu_model is not None or self.card_bytes or self.topology is not Topology.ANY
        )


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that could be met; `note` says what was changed to make it so."""

    request: Request
    note: str | None = None


@dataclass(frozen=True, slots=True)
class CardKind:
    """Equal GPUs of the largest inventory ever seen; `largest_island`: their best NVLink set."""

    model: str
    total_bytes: int
    capacity_bytes: int
    count: int
    largest_island: int = 0
    is_slice: bool = False


@dataclass(frozen=True, slots=True)
class Inventory:
    """The largest inventory ever seen, and of these the models that are here now.

    Empty: no GPU was seen yet.
    """

    kinds: tuple[CardKind, ...] = ()
    models_here: tuple[str, ...] = ()


class FirstHead(NamedTuple):
    """When a job first became head, and when it was expected to start then."""

    since_s: float
    expected_at_s: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that waits for GPUs (or a CPU slot) alone, with its age bookkeeping.

    Age = age_gained_s + (now - window_since_s while it is inside its user's age window).
    `length_key`: what its owner's runs are told apart by (`lengths`).
    """

    job_id: JobId
    uid: int
    user: str
    request: Request
    eligible_since_s: float
    submitted_at_s: float = 0.0
    nice: int = 0
    age_gained_s: float = 0.0
    window_since_s: float | None = None
    length_key: str = ""
    first_head: FirstHead | None = None

    @property
    def own_order(self) -> tuple[int, float, int]:
        """The order within its user's list."""
        return (self.nice, self.eligible_since_s, self.job_id)


@dataclass(frozen=True, slots=True)
class Grant:
    """One GPU of an allocation. `held_bytes` includes the margin and grows with a buffered peak."""

    uuid: GpuUuid
    held_bytes: int
    declared_bytes: int  # held at the decision


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that holds GPUs (CONFIGURING, RUNNING, COMPLETING), or a CPU slot (no `grants`).

    `decided_limit_s` is the limit at the decision; `time_limit_s` the present one.
    `decided_grace_s`: the grace for the kill that its supervisor was given; None: the policy's.
    `expected_s`: how long it was expected to run at the decision; None: nobody asked.
    `stuck` is sticky: set by the controller when timeline.is_stuck says so.
    """

    job_id: JobId
    uid: int
    user: str
    request: Request
    grants: tuple[Grant, ...]
    whole: bool
    exclusive: bool
    decided_at_s: float
    started_at_s: float | None
    time_limit_s: float | None
    decided_limit_s: float | None
    stuck: bool = False
    decided_grace_s: float | None = None
    expected_s: float | None = None


class Shape(NamedTuple):
    """What a pass looks at in a job, its owner and its place apart."""

    request: Request
    length_key: str


@dataclass(frozen=True)
class UserQueue:
    """One user's eligible jobs in own order: one tuple, shared between snapshots.

    `shapes`, `requests`: the distinct (request, length key) among them, and the distinct requests
    whatever is estimated;
    None: too many, or not known. A list of which each fails is dropped.
    `least`: for each combination of wishes a request that asks no more of anything than any job
    with these; None as above. Where these fail, all do, however many differ.

    `whole_gpus_min`, `shared_bytes_min`: the least that any whole-GPU job asks in GPUs, any shared
    job in bytes per GPU; None without such a job. They let a pass drop the user at once.
    `gpus_max`, `bytes_max`: the largest that any asks, in GPUs and in bytes per GPU, where none has
    a further wish; None where one has, or where it is not known.
    `aged_to`: no job at this position or behind has any age, so that their priorities never rise
    along the list and a pass takes them one by one; None: not known.
    """

    uid: int
    user: str
    jobs: tuple[Waiting, ...]
    whole_gpus_min: int | None = None
    shared_bytes_min: int | None = None
    gpus_max: int | None = None
    bytes_max: int | None = None
    aged_to: int | None = None
    shapes: frozenset[Shape] | None = None
    requests: frozenset[Request] | None = None
    least: frozenset[Request] | None = None


@dataclass(frozen=True)
class QueueView:
    """All users' lists by uid, GPU jobs and CPU-only jobs apart.

    `horizon`: the one that was settled last, for its answers.
    """

    gpu: tuple[UserQueue, ...] = ()
    cpu: tuple[UserQueue, ...] = ()
    horizon: Horizon | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class UserLimit:
    """What one user's jobs may hold together; None: no limit."""

    max_gpus: int | None = None
    max_jobs: int | None = None


NO_LIMIT = UserLimit()


class Standing(NamedTuple):  # made for every user in every pass: a dataclass costs twice as much
    """One active user: share, decayed usage now, F, and the limit on what it may hold."""

    uid: int
    user: str
    share: float
    usage_gpu_s: float
    factor: float
    limit: UserLimit = NO_LIMIT


class Run(NamedTuple):
    """One run that counts; `ended_s` is scheduler time."""

    ended_s: float
    length_s: float


class Kind(NamedTuple):
    """What one owner's runs are told apart by: the command key and the GPUs."""

    key: str
    gpus: int


@dataclass(frozen=True, slots=True)
class LengthRow:
    """The last runs of one kind, oldest first; without any the kind is forgotten."""

    uid: int
    kind: Kind
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class OwnLengths:
    """One owner's last runs: of each kind, of each key, and of any. There is one at least."""

    rows: Mapping[Kind, tuple[Run, ...]]
    by_key: Mapping[str, tuple[Run, ...]]
    last: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Lengths:
    """What runs have taken, by uid, as of one moment; asked by `lengths.expected`."""

    by_uid: Mapping[int, OwnLengths] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reservation:
    """EASY's hold for the head job: until `start_s` its GPUs are its own; `gpus` is for display.

    `guessed`: by expected ends, since no planned end is known. `patient_until_s`: from then on
    GPUs are closed for it; None: it has a planned end.
    """

    job_id: JobId
    start_s: float
    since_s: float
    promised: bool
    gpus: tuple[GpuUuid, ...]
    spare: int
    guessed: bool = False
    patient_until_s: float | None = None


@dataclass(frozen=True, slots=True)
class Promise:
    """A reservation that sticks. `start_by_s` is the earliest start ever promised.

    `delayed_by` is set while the start is expected later than that.
    """

    job_id: JobId
    promised_at_s: float
    start_by_s: float
    delayed_by: PromiseException | None = None


@dataclass(frozen=True, slots=True)
class PromiseEnd:
    """A promise that ended in this pass. KEPT: decided by start_by_s."""

    promise: Promise
    outcome: PromiseOutcome
    exception: PromiseException | None
    at_s: float


@dataclass(frozen=True)
class Snapshot:
    """Everything one pass looks at. Made by snapshot.build_snapshot, which alone sorts."""

    now_s: float
    gpus: tuple[Gpu, ...]
    running: tuple[RunningJob, ...]
    queues: QueueView
    standings: Mapping[int, Standing]
    promise: Promise | None = None
    reservation: Reservation | None = None  # of the pass before: for its `since_s`
    lengths: Lengths = Lengths()


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job waits. In `numbers`, keys ending in `_at_s` are scheduler times."""

    code: PendingReason
    text: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    blocking_jobs: tuple[JobId, ...] = ()
    blocking_gpus: tuple[GpuUuid, ...] = ()


@dataclass(frozen=True, slots=True)
class PriorityParts:
    """priority = min(fair + age - nice, that of the user's job before it, `capped_by`)."""

    priority: float
    fair: float
    age: float
    nice: int
    capped_by: JobId | None = None


class Rule(StrEnum):
    """Why a job may start while others wait."""

    PROMISED = "promised"  # it held the promise
    FIRST = "first"  # nobody before it waits for GPUs that some end will bring
    GAP = "gap"  # it ends before the head starts
    SPARE = "spare"  # the head still has enough GPUs beside it
    SLOT = "slot"  # it needs no GPU


@dataclass(frozen=True, slots=True)
class Start:
    """A job to start now. `grants` is empty for a CPU-only job.

    `expected_s`: how long it will probably run, which goes with the attempt. `rank`: so many were
    looked at, itself included: behind the head a long queue is passed over where it fails in any
    case. Of these `over_limits` were over their users' limits, `without_end` wait for what no end
    brings. `head`: behind whom it starts, and from when that one has its GPUs; `guessed`: by
    expected ends. `first_head`: when it was head itself.
    """

    job_id: JobId
    uid: int
    grants: tuple[Grant, ...]
    whole: bool
    exclusive: bool
    planned_end_s: float
    expected_s: float
    rule: Rule
    rank: int = field(compare=False)
    over_limits: int = field(default=0, compare=False)
    without_end: int = field(default=0, compare=False)
    head: tuple[JobId, float] | None = None
    guessed: bool = False
    first_head: FirstHead | None = None


@dataclass(frozen=True, slots=True)
class Residue:
    """One GPU when all that ends has ended: what no planned end ever frees.

    `alone`: a whole or exclusive job stays on it. Only for GPUs on which something stays.
    """

    uuid: GpuUuid
    headroom_bytes: int
    jobs: int
    uids: frozenset[int]
    alone: bool
    whole_idle: bool


@dataclass(frozen=True)
class Horizon:
    """Which jobs have a known shadow time and are within their user's limit (horizon.counts).

    Only these take a place in the age window and cap those behind them. `rooms` holds, for users
    with a limit, what they may still take: uid -> (GPUs, jobs). Comparable: an unchanged one costs
    nothing.
    """

    gpus: tuple[Gpu, ...]
    residues: tuple[Residue, ...]
    rooms: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    answers: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)  # a memo


@dataclass(frozen=True)
class Plan:
    """What one pass decided. Commit `promise` and `ended` before they are shown.

    `first_heads`: those that became head for the first time; goes to Queues.note_heads.
    `reasons` and `priorities` hold the jobs the pass examined, made when they are read (`told`);
    plan.reason_of covers the rest.
    `horizon` goes to Queues.settle after the starts were applied.
    """

    now_s: float
    starts: tuple[Start, ...]
    reservation: Reservation | None
    promise: Promise | None
    ended: PromiseEnd | None
    reasons: Mapping[JobId, Reason]
    fallback: Reason
    priorities: Mapping[JobId, PriorityParts]
    unknown: frozenset[JobId]
    horizon: Horizon
    next_change_at_s: float | None
    first_heads: Mapping[JobId, FirstHead] = field(default_factory=dict)
    first: tuple[tuple[JobId, float], ...] = ()  # in the order, with their priorities

    @property
    def start_ids(self) -> tuple[JobId, ...]:
        """The ids that start, in the order they were decided."""
        return tuple(start.job_id for start in self.starts)


@dataclass(frozen=True, slots=True)
class ExpectedStart:
    """Where the separate walk sees a job start, if all planned ends hold and nobody submits."""

    job_id: JobId
    start_s: float | None  # None: unknown
    gpus: tuple[GpuUuid, ...]


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """A smaller request with which the job would start now, e.g. text "with 1 GPU"."""

    text: str
    request: Request


@dataclass(frozen=True)
class Policy:
    """Every knob of the policy. `shares` and `billing`: first match wins; see fairshare."""

    w_fair: float = 1000.0
    w_age_per_h: float = 10.0
    half_life_s: float = 7 * DAY_S
    age_jobs_per_user: int = 1  # 0: all
    order: Order = Order.PRIORITY
    backfill: Backfill = Backfill.EASY
    promise_within_s: float = DAY_S  # 0: plain EASY; inf: always
    promise_slack_s: float = DAY_S  # nearer than that early ends make a promise no earlier
    learn_lengths: bool = True
    guess_length_s: float = DAY_S  # of a job that nothing is known about
    head_patience_s: float = 2 * DAY_S  # beyond the start first expected
    margin_bytes: int = 512 * MIB
    max_jobs_per_gpu: int = 4
    across_users: bool = True
    min_share: float = 0.25
    kill_grace_s: float = 10.0  # of jobs that are decided from now on
    launch_allowance_s: float = 5.0
    stuck_after_s: float = 60.0
    foreign_age_s: float = 600.0
    fresh_allowance_s: float = 5.0  # how long a GPU may wait for its sample after a job's end
    rerank_s: float = 60.0  # an unpromised head may be outranked as time passes
    max_cpu_jobs: int = 1
    shares: tuple[tuple[str, float], ...] = ()
    billing: tuple[tuple[str, float], ...] = ()
