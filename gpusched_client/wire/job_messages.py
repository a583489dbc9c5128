"""The messages about jobs: lists of them, one in full, changes, waits and events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpusched_client.errors import Conflict, NotFound, StorageError
from gpusched_client.terms import JobState
from gpusched_client.wire.fields import (
    boolean,
    integer,
    list_of,
    number,
    octets,
    plain_map,
    refuse,
    text,
    word,
)
from gpusched_client.wire.job_options import JobOptions
from gpusched_client.wire.limits import (
    ARGV_ITEMS_MAX,
    GPUS_MAX,
    IDS_MAX,
    NICE_MAX,
    NICE_MIN,
    PATH_BYTES_MAX,
    REASON_BYTES_MAX,
    RESPONSE_JOBS_MAX,
    SIGNAL_MAX,
    STRING_BYTES_MAX,
    TIME_LIMIT_S_MAX,
    USERS_MAX,
    VRAM_BYTES_MAX,
)
from gpusched_client.wire.message import Response, message, nested, part, wire
from gpusched_client.wire.methods import Request, Right, Unread, method
from gpusched_client.wire.values import (
    AMOUNT,
    ANY_TEXT,
    COUNT,
    JOB_ID,
    JOB_IDS,
    JOB_NAME,
    NUMBER,
    PERCENT,
    SHORT_TEXT,
    SIZE,
    TEXTS,
    TIME,
    TIME_LIMIT,
    USER,
)

_WORD = octets(STRING_BYTES_MAX)


@message
class Reason(Response):
    """Why a job waits, or what its state means: a PendingReason's value, a text, the numbers."""

    code: str = wire(SHORT_TEXT)
    text: str = wire(ANY_TEXT, default="")
    numbers: Mapping[str, Any] | None = wire(plain_map, default=None)


@message
class JobEvent(Response):
    """One line of a job's history: an EventKind's value, its facts, and the same as one text."""

    at_s: float = wire(TIME)
    kind: str = wire(SHORT_TEXT)
    text: str = wire(ANY_TEXT, default="")
    data: Mapping[str, Any] | None = wire(plain_map, default=None)


@message
class GpuUseView(Response):
    """What a job used of one GPU; the peak lies between `peak_bytes` and `peak_upper_bytes`.

    `peak_source` is driver (exact, per process), sampled, device (by difference), at-least (memory
    that no process owns was beside it) or none.
    """

    gpu_uuid: str = wire(SHORT_TEXT)
    gpu_index: int | None = wire(integer(), default=None)
    peak_bytes: int | None = wire(SIZE, default=None)
    peak_upper_bytes: int | None = wire(SIZE, default=None)
    peak_source: str = wire(SHORT_TEXT, default="none")
    utilization: float | None = wire(PERCENT, default=None)
    energy_j: float | None = wire(AMOUNT, default=None)


@part
class JobIdentity(Response):
    """Which job, whose, and where it stands."""

    __slots__ = ()

    job_id: int = wire(JOB_ID)
    state: JobState = wire(word(JobState))
    reason: Reason | None = wire(nested(Reason), default=None)
    user: str | None = wire(USER, default=None)
    uid: int | None = wire(COUNT, default=None)


@message
class JobView(JobOptions, JobIdentity):
    """One job as a response shows it: who it is, what it asked for, and what became of it.

    `command` is one printable line, cut to a few hundred characters. `output`, `error`, an `argv`
    of more than 64 words or 1 KiB, `priority_parts`, `explanations` ("would start now with 1 GPU"),
    `events` and what was used of the GPUs (`vram_verdict`: within, under-declared, over-declared or
    unattributed) come with the method `job` only, for the owner and admins; so does the start that
    a waiting job was promised and that is promised no more, with its cause. Names, commands and
    directories of others are None where the host is `private`. `time_limit_s` is UNLIMITED_S
    without a limit. `expected_run_s` is how long it will probably run, or was expected to as it
    started; `expected_by` says, to whom may change it and as long as it waits, what that rests on
    where that is not its limit: "last two runs of train.py". `head_at_s` is when it first became
    head, `head_expected_start_s` the start that was expected then; from `patience_ends_at_s` on
    nothing behind it starts on the GPUs that it is to get, as long as no limit tells its start.
    """

    command: str | None = wire(ANY_TEXT, default=None)
    attempt: int | None = wire(COUNT, default=None)
    queue_position: int | None = wire(COUNT, default=None)
    priority: float | None = wire(NUMBER, default=None)
    submitted_at_s: float | None = wire(TIME, default=None)
    started_at_s: float | None = wire(TIME, default=None)
    ended_at_s: float | None = wire(TIME, default=None)
    expected_start_s: float | None = wire(TIME, default=None)
    promised_start_s: float | None = wire(TIME, default=None)
    lost_start_s: float | None = wire(TIME, default=None)
    lost_promise_cause: str | None = wire(ANY_TEXT, default=None)
    gpu_indices: tuple[int, ...] | None = wire(list_of(integer(), GPUS_MAX), default=None)
    gpu_uuids: tuple[str, ...] | None = wire(list_of(SHORT_TEXT, GPUS_MAX), default=None)
    exit_code: int | None = wire(integer(), default=None)
    exit_signal: int | None = wire(integer(), default=None)
    cause: str | None = wire(SHORT_TEXT, default=None)
    cause_detail: str | None = wire(ANY_TEXT, default=None)
    cpu_user_s: float | None = wire(AMOUNT, default=None)
    cpu_system_s: float | None = wire(AMOUNT, default=None)
    max_rss_bytes: int | None = wire(SIZE, default=None)
    cwd: bytes | None = wire(octets(PATH_BYTES_MAX), default=None)
    argv: tuple[bytes, ...] | None = wire(list_of(_WORD, ARGV_ITEMS_MAX), default=None)
    script_bytes: int | None = wire(SIZE, default=None)
    vram_peak_bytes: int | None = wire(SIZE, default=None)
    vram_peak_source: str | None = wire(SHORT_TEXT, default=None)
    vram_verdict: str | None = wire(SHORT_TEXT, default=None)
    vram_next_bytes: int | None = wire(SIZE, default=None)
    gpu_utilization: float | None = wire(PERCENT, default=None)
    gpu_seconds: float | None = wire(AMOUNT, default=None)
    gpu_observed_s: float | None = wire(AMOUNT, default=None)
    energy_j: float | None = wire(AMOUNT, default=None)
    gpu_uses: tuple[GpuUseView, ...] | None = wire(
        list_of(nested(GpuUseView), GPUS_MAX), default=None
    )
    priority_parts: Mapping[str, Any] | None = wire(plain_map, default=None)
    explanations: tuple[str, ...] | None = wire(TEXTS, default=None)
    expected_run_s: float | None = wire(AMOUNT, default=None)
    expected_by: str | None = wire(ANY_TEXT, default=None)
    head_at_s: float | None = wire(TIME, default=None)
    head_expected_start_s: float | None = wire(TIME, default=None)
    patience_ends_at_s: float | None = wire(TIME, default=None)
    events: tuple[JobEvent, ...] | None = wire(list_of(nested(JobEvent), 1_000), default=None)

    @property
    def id(self) -> int:
        """The job's id, by the short name that reads well in a program."""
        return self.job_id


_JOB_VIEWS = list_of(nested(JobView), RESPONSE_JOBS_MAX)


def _uncut(page: dict[str, Any]) -> dict[str, Any]:
    if page["cut"] is None:
        del page["cut"]
    return page


@message
class JobsResult(Response):
    """A page of jobs; `total` counts all that passed the filters.

    `cut` says why there are fewer than asked for, where more were there.
    """

    jobs: tuple[JobView, ...] = wire(_JOB_VIEWS)
    total: int = wire(COUNT)
    cut: str | None = wire(ANY_TEXT, default=None)

    def to_wire(self) -> dict[str, Any]:
        """The map to send; a whole page has no `cut`."""
        return _uncut(Response.to_wire(self))


@method("jobs", Right.ALL, Unread.NOTHING)
class JobsRequest(Request[JobsResult]):
    """Jobs that pass all given filters, newest last, at most `limit` of the newest.

    `users` are names or decimal uids. `ended_within_s` takes live jobs and those that ended at
    most so long ago. `before_id` pages backwards.
    """

    ids: tuple[int, ...] | None = wire(list_of(JOB_ID, IDS_MAX), default=None)
    users: tuple[str, ...] | None = wire(list_of(USER, USERS_MAX), default=None)
    states: tuple[JobState, ...] | None = wire(list_of(word(JobState), len(JobState)), default=None)
    name: str | None = wire(JOB_NAME, default=None)
    ended_within_s: int | None = wire(integer(0, TIME_LIMIT_S_MAX), default=None)
    limit: int = wire(integer(1, RESPONSE_JOBS_MAX), default=RESPONSE_JOBS_MAX)
    before_id: int | None = wire(JOB_ID, default=None)


@message
class QueueResult(Response):
    """A page of pending jobs in scheduling order; `total` counts all that passed the filters.

    `cut` says why there are fewer than asked for, where more were there.
    """

    jobs: tuple[JobView, ...] = wire(_JOB_VIEWS)
    total: int = wire(COUNT)
    cut: str | None = wire(ANY_TEXT, default=None)

    def to_wire(self) -> dict[str, Any]:
        """The map to send; a whole page has no `cut`."""
        return _uncut(Response.to_wire(self))


@method("queue", Right.ALL, Unread.NOTHING, (NotFound,))
class QueueRequest(Request[QueueResult]):
    """Pending jobs in scheduling order; `after` is the last job id of the page before.

    `users` (names or decimal uids) and `name` take some of them, each with its place among all.
    """

    limit: int = wire(integer(1, RESPONSE_JOBS_MAX), default=RESPONSE_JOBS_MAX)
    after: int | None = wire(JOB_ID, default=None)
    users: tuple[str, ...] | None = wire(list_of(USER, USERS_MAX), default=None)
    name: str | None = wire(JOB_NAME, default=None)


@method("job", Right.ALL, Unread.NOTHING, (NotFound,))
class JobQuery(Request[JobView]):
    """Everything about one job."""

    job_id: int = wire(JOB_ID)


@message
class Ranked(Response):
    """A job in the order of a pass, and the priority that it had there."""

    job_id: int = wire(JOB_ID)
    priority: float = wire(NUMBER)


@message
class WhyResult(Response):
    """Why a job was placed before others, as its last start put it on record.

    `rule`: "promised", "first" (none before it waits for GPUs that some end will bring), "gap" (it
    ends before the head starts), "spare" (the head still has enough GPUs beside it), "slot" (it
    needs no GPU). `rank`: so many were looked at, itself included, `over_limits` of them over their
    users' limits, `without_end` in need of what no end brings; `first` are the first of them, at
    most 10. `head` is the job behind which it started, expected to start at `head_start_s`,
    `guessed` by how long jobs probably run. `put_first_by` is the admin who put it first, None
    where the host is `private`.
    """

    job_id: int = wire(JOB_ID)
    placed_at_s: float = wire(TIME)
    gpu_indices: tuple[int, ...] = wire(list_of(integer(-1), GPUS_MAX), default=())
    rule: str = wire(SHORT_TEXT, default="")
    rank: int | None = wire(COUNT, default=None)
    over_limits: int | None = wire(COUNT, default=None)
    without_end: int | None = wire(COUNT, default=None)
    nice: int | None = wire(integer(NICE_MIN, NICE_MAX), default=None)
    head: int | None = wire(JOB_ID, default=None)
    head_start_s: float | None = wire(TIME, default=None)
    guessed: bool = wire(boolean, default=False)
    put_first_by: str | None = wire(USER, default=None)
    first: tuple[Ranked, ...] = wire(list_of(nested(Ranked), 100), default=())


@method("why", Right.ALL, Unread.NOTHING, (NotFound,))
class WhyRequest(Request[WhyResult]):
    """Why a job was placed and not another: for its owner, and for those it passed."""

    job_id: int = wire(JOB_ID)


@message
class Outcome(Response):
    """What became of one id of a cancel, an update or a top.

    `code` is None where it was done, else an error code; `state` is the job's state after it.
    `text` is for people: "cancelled", "signalled", "was COMPLETED already", or the error.
    """

    job_id: int = wire(JOB_ID)
    code: str | None = wire(SHORT_TEXT, default=None)
    text: str = wire(ANY_TEXT, default="")
    state: JobState | None = wire(word(JobState), default=None)


_OUTCOMES = list_of(nested(Outcome), IDS_MAX)


@message
class CancelResult(Response):
    """One outcome per id, in the order of the request."""

    outcomes: tuple[Outcome, ...] = wire(_OUTCOMES)


@method("cancel", Right.OWNER, Unread.FINISHED, (StorageError,))
class CancelRequest(Request[CancelResult]):
    """End jobs, queued or running; with `signal` (a number) only send it to running ones."""

    job_ids: tuple[int, ...] = wire(JOB_IDS)
    signal: int | None = wire(integer(1, SIGNAL_MAX), default=None)
    reason: str | None = wire(text(REASON_BYTES_MAX), default=None)


@message
class UpdateResult(Response):
    """One outcome per id, in the order of the request."""

    outcomes: tuple[Outcome, ...] = wire(_OUTCOMES)


@method("update", Right.OWNER, Unread.FINISHED, (StorageError,))
class UpdateRequest(Request[UpdateResult]):
    """Change jobs; what is None stays as it is."""

    job_ids: tuple[int, ...] = wire(JOB_IDS)
    time_limit_s: int | None = wire(TIME_LIMIT, default=None)
    nice: int | None = wire(integer(NICE_MIN, NICE_MAX), default=None)
    name: str | None = wire(JOB_NAME, default=None)
    hold: bool | None = wire(boolean, default=None)
    vram_bytes: int | None = wire(integer(1, VRAM_BYTES_MAX), default=None)

    def check(self, path: str) -> None:
        """Refuse an update that changes nothing: it is a mistyped field more often than a wish."""
        changes = (self.time_limit_s, self.nice, self.name, self.hold, self.vram_bytes)
        if all(change is None for change in changes):
            refuse(path, "nothing to change", "give time_limit_s, nice, name, hold or vram_bytes")


@message
class TopResult(Response):
    """The job after it, and what was changed for it."""

    outcome: Outcome = wire(nested(Outcome))


@method("top", Right.OWNER, Unread.FINISHED, (StorageError,))
class TopRequest(Request[TopResult]):
    """Put a waiting job first: an owner's before the owner's others, an admin's before all."""

    job_id: int = wire(JOB_ID)


@message
class WaitResult(Response):
    """The jobs as they are now; `timed_out` when not all are final."""

    jobs: tuple[JobView, ...] = wire(_JOB_VIEWS)
    timed_out: bool = wire(boolean, default=False)


@method("wait", Right.ALL, Unread.NOTHING, (NotFound,))
class WaitRequest(Request[WaitResult]):
    """Reply when all jobs are final, or after timeout_s."""

    job_ids: tuple[int, ...] = wire(JOB_IDS)
    timeout_s: float | None = wire(number(0, TIME_LIMIT_S_MAX), default=None)


@message
class WatchResult(Response):
    """Events after `last_event_id` follow as notifications."""

    last_event_id: int = wire(COUNT)


@method("watch", Right.ALL, Unread.NOTHING, (Conflict,))
class WatchRequest(Request[WatchResult]):
    """Send events as notifications from now on; `since` is the last event id already seen."""

    since: int | None = wire(COUNT, default=None)


EVENT_METHOD = "event"  # of the notifications after `watch`


@message
class Event(Response):
    """One notification after `watch`. kind "dropped" marks a gap; data.count says how many."""

    event_id: int = wire(COUNT)
    at_s: float = wire(TIME)
    kind: str = wire(SHORT_TEXT)
    job_id: int | None = wire(JOB_ID, default=None)
    gpu_uuid: str | None = wire(SHORT_TEXT, default=None)
    uid: int | None = wire(COUNT, default=None)
    text: str = wire(ANY_TEXT, default="")
    data: Mapping[str, Any] | None = wire(plain_map, default=None)
