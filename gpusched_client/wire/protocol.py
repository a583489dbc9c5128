"""The messages: one frozen dataclass per request and per response, and the table of methods.

Owns names, types and limits of what travels; together they are the wire. Must not know sockets,
MessagePack or what the daemon does with a request.

Requests are strict: an unknown field, a missing one or a wrong type is Invalid with the field's
path. Responses tolerate unknown fields, since the daemon may be newer than its client. Where a
response's field is optional, None means "not known" or "does not apply", never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gpusched_client.errors import Invalid
from gpusched_client.terms import JobState
from gpusched_client.wire.fields import (
    INT64_MAX,
    TEXT_BYTES_MAX,
    Message,
    boolean,
    integer,
    list_of,
    map_of,
    message,
    nested,
    no_items,
    number,
    octets,
    one_of,
    plain_map,
    read_fields,
    refuse,
    refuse_large,
    require_fields,
    shown,
    text,
    wire,
    word,
)

PROTOCOL_VERSION = 1

REQUEST_BYTES_MAX = 2**20
PAYLOAD_BYTES_MAX = 768 * 1024  # argv, environment and script of one job
SUBMIT_PAYLOAD_BYTES_MAX = 64 * 2**20  # the same over all jobs, `common` counted for each of them
NESTING_MAX = 64
CONTAINERS_MAX = 20_000
RESPONSE_JOBS_MAX = 1_000
BACKUP_PIECE_BYTES = 512 * 1024
SUBMIT_JOBS_MAX = 1_000
IDS_MAX = 1_000
USERS_MAX = 100

STRING_BYTES_MAX = 128 * 1024 - 1  # one argument or KEY=VALUE; the kernel's MAX_ARG_STRLEN less NUL
ARGV_ITEMS_MAX = 65_536
ENVIRONMENT_ITEMS_MAX = 8_192
PATH_BYTES_MAX = 4_096
REASON_BYTES_MAX = 256
GPUS_MAX = 1_024
VRAM_BYTES_MAX = 2**50
MEMORY_BYTES_MIN, MEMORY_BYTES_MAX = 2**20, 2**50
CPUS_MAX = 65_536
TIME_LIMIT_S_MAX = 10 * 366 * 86_400
UNLIMITED_S = -1  # a time limit that is no limit; inside, None says it
NICE_MIN, NICE_MAX = -1_000, 1_000
RETRIES_MAX = 100
UMASK_MAX = 0o777
SIGNAL_MAX = 64
JOB_NAME_BYTES_MAX = 256
RLIMIT_INFINITY = -1
RLIMIT_NAMES = frozenset(
    {"as", "core", "cpu", "data", "fsize", "memlock", "msgqueue", "nice", "nofile", "nproc"}
    | {"rss", "rtprio", "rttime", "sigpending", "stack"}
)

_JOB_ID = integer(1, INT64_MAX)
_COUNT = integer(0, INT64_MAX)
_SIZE = integer(0, INT64_MAX)
_ANY_TEXT = text(64 * 1024)
_SHORT_TEXT = text(TEXT_BYTES_MAX)
_USER = text(256)
_JOB_IDS = list_of(_JOB_ID, IDS_MAX, 1)
_WORDS = list_of(octets(STRING_BYTES_MAX), ARGV_ITEMS_MAX)


def limit_to_wire(limit_s: float | None) -> int:
    """A time limit in seconds as it travels; None is no limit."""
    return UNLIMITED_S if limit_s is None else round(limit_s)


def limit_from_wire(limit_s: int) -> int | None:
    """A time limit that has travelled, in seconds; None is no limit."""
    return None if limit_s == UNLIMITED_S else limit_s


def _time_limit(value: object, path: str) -> int:
    """Seconds, at least 1, or UNLIMITED_S."""
    if type(value) is int and value == UNLIMITED_S:
        return value
    limit_s = integer(UNLIMITED_S, TIME_LIMIT_S_MAX)(value, path)
    if limit_s == 0:
        refuse(path, "0 seconds", f"use 1 to {TIME_LIMIT_S_MAX}, or {UNLIMITED_S} for unlimited")
    assert isinstance(limit_s, int)
    return limit_s


def _job_name(value: object, path: str) -> str:
    """A job's name: anything that a line of a table can show, as in "lr=0.1 bs=32"."""
    name: str = text(JOB_NAME_BYTES_MAX)(value, path)
    if not name.isprintable() or not name or name != name.strip():
        cure = "use printable text that does not begin or end with a blank"
        refuse(path, f"{shown(name)} is not allowed", cure)
    return name


def _gpu_name(value: object, path: str) -> str:
    """A UUID, or an index as text or integer."""
    name: str = text(128)(str(value) if type(value) is int else value, path)
    return name


def _cwd(value: object, path: str) -> bytes:
    directory: bytes = octets(PATH_BYTES_MAX, empty=False)(value, path)
    if not directory.startswith(b"/"):
        refuse(path, f"{shown(directory)} is a relative path", "send an absolute one")
    return directory


def _environment(value: object, path: str) -> dict[bytes, bytes]:
    environment: dict[bytes, bytes] = map_of(
        _environment_name, octets(STRING_BYTES_MAX), ENVIRONMENT_ITEMS_MAX
    )(value, path)
    for name, content in environment.items():
        if len(name) + 1 + len(content) > STRING_BYTES_MAX:
            here = f"{path}.{name.decode('utf-8', 'backslashreplace')}"
            refuse_large(here, len(name) + 1 + len(content), STRING_BYTES_MAX, "bytes as KEY=VALUE")
    return environment


def _environment_name(value: object, path: str) -> bytes:
    name: bytes = octets(STRING_BYTES_MAX, empty=False)(value, path)
    if b"=" in name:
        refuse(path, f"the name {shown(name)} has a '='", "remove it")
    return name


def _rlimit_name(value: object, path: str) -> str:
    if value not in RLIMIT_NAMES:
        refuse(path, f"{shown(value)} is no limit", f"use {' '.join(sorted(RLIMIT_NAMES))}")
    return str(value)


_RLIMITS = map_of(
    _rlimit_name, list_of(integer(RLIMIT_INFINITY, INT64_MAX), 2, 2), len(RLIMIT_NAMES)
)


class Request(Message):
    """What a client sends: strict in what it takes."""

    __slots__ = ()
    tolerates_unknown: ClassVar[bool] = False


class Response(Message):
    """What the daemon sends: unknown fields are skipped, all known ones are always sent."""

    __slots__ = ()
    tolerates_unknown: ClassVar[bool] = True


# ---------------------------------------------------------------------------------- requests


@message
class JobRequest(Request):
    """One job as its submitter asks for it: exactly one of argv, script (with args) and shell.

    `time_limit_s` None is the daemon's default and UNLIMITED_S is unlimited. `vram_bytes` is per
    GPU; None takes each GPU whole. `rlimits` maps a name of RLIMIT_NAMES to (soft, hard), where
    RLIMIT_INFINITY is no limit. `shell` is one line for /bin/sh -c, byte for byte.
    `memory_bytes` (of the host) and `cpus` bound the whole job; None is the daemon's default.
    `output` and `error` are paths with % patterns, relative ones below `cwd`.
    """

    cwd: bytes = wire(_cwd)
    environment: Mapping[bytes, bytes] = wire(_environment, default_factory=no_items)
    argv: tuple[bytes, ...] | None = wire(
        list_of(octets(STRING_BYTES_MAX), ARGV_ITEMS_MAX, 1), default=None
    )
    script: bytes | None = wire(octets(PAYLOAD_BYTES_MAX, nul=True, empty=False), default=None)
    args: tuple[bytes, ...] = wire(_WORDS, default=())
    shell: bytes | None = wire(octets(STRING_BYTES_MAX, empty=False), default=None)
    umask: int = wire(integer(0, UMASK_MAX), default=0o022)
    rlimits: Mapping[str, tuple[int, int]] | None = wire(_RLIMITS, default=None)
    gpus: int = wire(integer(0, GPUS_MAX), default=1)
    vram_bytes: int | None = wire(integer(1, VRAM_BYTES_MAX), default=None)
    gpu_model: str | None = wire(text(256), default=None)
    exclusive: bool = wire(boolean, default=False)
    topology: str | None = wire(one_of("nvlink"), default=None)
    memory_bytes: int | None = wire(integer(MEMORY_BYTES_MIN, MEMORY_BYTES_MAX), default=None)
    cpus: int | None = wire(integer(1, CPUS_MAX), default=None)
    time_limit_s: int | None = wire(_time_limit, default=None)
    name: str | None = wire(_job_name, default=None)
    nice: int = wire(integer(NICE_MIN, NICE_MAX), default=0)
    output: bytes | None = wire(octets(PATH_BYTES_MAX, empty=False), default=None)
    error: bytes | None = wire(octets(PATH_BYTES_MAX, empty=False), default=None)
    hold: bool = wire(boolean, default=False)
    retries: int = wire(integer(0, RETRIES_MAX), default=0)

    def check(self, path: str) -> None:
        """Raise where fields contradict each other or are too large together."""
        forms = [name for name in ("argv", "script", "shell") if getattr(self, name) is not None]
        if len(forms) != 1:
            given = " and ".join(forms) or "none of them"
            refuse(path, f"it has {given}", "give exactly one of argv, script and shell")
        if self.args and self.script is None:
            refuse(f"{path}.args", "arguments without a script", "give script, or argv alone")
        if self.argv is not None and not self.argv[0]:
            refuse(f"{path}.argv[0]", "the command is empty", "name a command")
        self._check_gpus(path)
        if self.payload_bytes > PAYLOAD_BYTES_MAX:
            refuse_large(
                path, self.payload_bytes, PAYLOAD_BYTES_MAX, "bytes of argv, environment and script"
            )

    def _check_gpus(self, path: str) -> None:
        if self.gpus:
            return
        for name in ("vram_bytes", "gpu_model", "topology"):
            if getattr(self, name) is not None:
                refuse(f"{path}.{name}", "the job asks for 0 GPUs", "ask for one, or leave it out")

    @property
    def payload_bytes(self) -> int:
        """Bytes of argv, args, shell, script and environment, with one for each string's end."""
        words = (*(self.argv or ()), *self.args)
        size = sum(map(len, words)) + len(words)
        size += len(self.script or b"") + len(self.shell or b"")
        size += sum(map(len, self.environment)) + sum(map(len, self.environment.values()))
        return size + 2 * len(self.environment)


@message
class Hello(Request):
    """Who is there? Costs nothing and changes nothing."""


def _read_jobs(_value: object, _path: str) -> tuple[Any, ...]:
    raise AssertionError("SubmitRequest.from_wire reads jobs, since `common` belongs beneath them")


_SUBMISSION_ID = text(128, r"[\x21-\x7e]{1,128}", "1 to 128 printable ASCII characters")


@message
class SubmitRequest(Request):
    """All or none of `jobs`. On the wire, `common` may hold fields that the jobs share.

    `dry_run` asks what would happen and stores nothing.
    """

    jobs: tuple[JobRequest, ...] = wire(_read_jobs)
    submission_id: str | None = wire(_SUBMISSION_ID, default=None)
    dry_run: bool = wire(boolean, default=False)

    @classmethod
    def from_wire(cls, value: object, path: str = "") -> SubmitRequest:
        """Read the jobs, each over `common`: a field of the job replaces the whole common field."""
        outer = dict(value) if type(value) is dict else value
        raw_jobs: object = None
        common: dict[str, Any] = {}
        if isinstance(outer, dict):
            if "jobs" not in outer:
                refuse("jobs", "this field is missing", "send an array of jobs")
            raw_jobs = outer.pop("jobs")
            raw_common = outer.pop("common", None)
            if raw_common is not None:
                common = read_fields(JobRequest, raw_common, "common")
        kept = read_fields(cls, outer, path)

        def read_job(item: object, here: str) -> JobRequest:
            return _job_over_common(common, item, here)

        jobs = list_of(read_job, SUBMIT_JOBS_MAX, 1)(raw_jobs, "jobs")
        payload_bytes = sum(job.payload_bytes for job in jobs)
        if payload_bytes > SUBMIT_PAYLOAD_BYTES_MAX:
            refuse_large("jobs", payload_bytes, SUBMIT_PAYLOAD_BYTES_MAX, "bytes in all jobs")
        return cls(jobs=jobs, **kept)

    def to_wire(self) -> dict[str, Any]:
        """The map to send, with `common` where all jobs agree on a bulky field."""
        jobs = [job.to_wire() for job in self.jobs]
        wire_map: dict[str, Any] = {"jobs": jobs}
        if len(jobs) > 1:
            wire_map["common"] = {
                name: jobs[0][name]
                for name in ("environment", "cwd", "umask", "rlimits")
                if name in jobs[0] and all(job.get(name) == jobs[0][name] for job in jobs)
            }
            for job in jobs:
                for name in wire_map["common"]:
                    del job[name]
        if self.submission_id is not None:
            wire_map["submission_id"] = self.submission_id
        if self.dry_run:
            wire_map["dry_run"] = True
        return wire_map


def _job_over_common(common: Mapping[str, Any], item: object, path: str) -> JobRequest:
    own = read_fields(JobRequest, item, path)
    merged = {**common, **own}
    require_fields(JobRequest, merged, path)
    job = JobRequest(**merged)
    job.check(path)
    return job


@message
class JobsRequest(Request):
    """Jobs that pass all given filters, newest last, at most `limit` of the newest.

    `users` are names or decimal uids. `ended_within_s` takes live jobs and those that ended at
    most so long ago. `before_id` pages backwards.
    """

    ids: tuple[int, ...] | None = wire(list_of(_JOB_ID, IDS_MAX), default=None)
    users: tuple[str, ...] | None = wire(list_of(_USER, USERS_MAX), default=None)
    states: tuple[JobState, ...] | None = wire(list_of(word(JobState), len(JobState)), default=None)
    name: str | None = wire(_job_name, default=None)
    ended_within_s: int | None = wire(integer(0, TIME_LIMIT_S_MAX), default=None)
    limit: int = wire(integer(1, RESPONSE_JOBS_MAX), default=RESPONSE_JOBS_MAX)
    before_id: int | None = wire(_JOB_ID, default=None)


@message
class QueueRequest(Request):
    """Pending jobs in scheduling order; `after` is the last job id of the page before."""

    limit: int = wire(integer(1, RESPONSE_JOBS_MAX), default=RESPONSE_JOBS_MAX)
    after: int | None = wire(_JOB_ID, default=None)


@message
class JobQuery(Request):
    """Everything about one job."""

    job_id: int = wire(_JOB_ID)


@message
class CancelRequest(Request):
    """End jobs, queued or running; with `signal` (a number) only send it to running ones."""

    job_ids: tuple[int, ...] = wire(_JOB_IDS)
    signal: int | None = wire(integer(1, SIGNAL_MAX), default=None)
    reason: str | None = wire(text(REASON_BYTES_MAX), default=None)


@message
class UpdateRequest(Request):
    """Change jobs; what is None stays as it is."""

    job_ids: tuple[int, ...] = wire(_JOB_IDS)
    time_limit_s: int | None = wire(_time_limit, default=None)
    nice: int | None = wire(integer(NICE_MIN, NICE_MAX), default=None)
    name: str | None = wire(_job_name, default=None)
    hold: bool | None = wire(boolean, default=None)
    vram_bytes: int | None = wire(integer(1, VRAM_BYTES_MAX), default=None)

    def check(self, path: str) -> None:
        """Refuse an update that changes nothing: it is a mistyped field more often than a wish."""
        changes = (self.time_limit_s, self.nice, self.name, self.hold, self.vram_bytes)
        if all(change is None for change in changes):
            refuse(path, "nothing to change", "give time_limit_s, nice, name, hold or vram_bytes")


@message
class WaitRequest(Request):
    """Reply when all jobs are final, or after timeout_s."""

    job_ids: tuple[int, ...] = wire(_JOB_IDS)
    timeout_s: float | None = wire(number(0, TIME_LIMIT_S_MAX), default=None)


@message
class WatchRequest(Request):
    """Send events as notifications from now on; `since` is the last event id already seen."""

    since: int | None = wire(_COUNT, default=None)


@message
class GpusRequest(Request):
    """The state of each GPU."""


@message
class UsageRequest(Request):
    """Decayed usage, share and fair-share factor of each user."""


@message
class StatsRequest(Request):
    """Counters for metrics."""


@message
class DrainRequest(Request):
    """Take a GPU, named by index or UUID, out of service once its jobs are gone."""

    gpu: str = wire(_gpu_name)
    reason: str = wire(text(REASON_BYTES_MAX))


@message
class ResumeRequest(Request):
    """Put a drained GPU back into service."""

    gpu: str = wire(_gpu_name)


@message
class GpusReleaseRequest(Request):
    """Let go of the driver, so that MIG modes can be changed or a GPU be reset; jobs run on."""

    reason: str = wire(text(REASON_BYTES_MAX))


@message
class GpusResumeRequest(Request):
    """Open the driver again and look which GPUs and slices there are now."""


@message
class ReloadRequest(Request):
    """Read the configuration again."""


@message
class TopRequest(Request):
    """Put a waiting job first: an owner's before the owner's others, an admin's before all."""

    job_id: int = wire(_JOB_ID)


@message
class StatusRequest(Request):
    """How is the daemon?"""


@message
class BackupRequest(Request):
    """A piece of a copy of the database. Without `backup_id` a new copy is made first.

    The daemon keeps the copy until it was read to its end, or the connection is closed.
    """

    backup_id: str | None = wire(text(64), default=None)
    offset: int = wire(_COUNT, default=0)


# --------------------------------------------------------------------------------- responses


@message
class HelloResult(Response):
    """Who the daemon is, and who the kernel says you are."""

    protocol: int = wire(_COUNT)
    version: str = wire(_SHORT_TEXT)
    mode: str = wire(_SHORT_TEXT)
    uid: int = wire(_COUNT)
    user: str = wire(_USER)
    admin: bool = wire(boolean)


@message
class SubmitResult(Response):
    """The ids in the order of the jobs; `time_limits_s` beside them says what a default became.

    `warnings` is for people: "becomes a whole-GPU job". After a dry run job_ids is empty, and
    `would_start` (on which GPUs) or `reasons` (what it would wait for) has a text for the job; the
    other is empty or has "" in its place.
    """

    job_ids: tuple[int, ...] = wire(list_of(_JOB_ID, SUBMIT_JOBS_MAX))
    time_limits_s: tuple[int, ...] = wire(list_of(_time_limit, SUBMIT_JOBS_MAX), default=())
    warnings: tuple[str, ...] = wire(list_of(_ANY_TEXT, SUBMIT_JOBS_MAX), default=())
    would_start: tuple[str, ...] = wire(list_of(_ANY_TEXT, SUBMIT_JOBS_MAX), default=())
    reasons: tuple[str, ...] = wire(list_of(_ANY_TEXT, SUBMIT_JOBS_MAX), default=())


@message
class Reason(Response):
    """Why a job waits, or what its state means: a PendingReason's value, a text, the numbers."""

    code: str = wire(_SHORT_TEXT)
    text: str = wire(_ANY_TEXT, default="")
    numbers: Mapping[str, Any] | None = wire(plain_map, default=None)


@message
class JobEvent(Response):
    """One line of a job's history."""

    at_s: float = wire(number(-(2**53), 2**53))
    kind: str = wire(_SHORT_TEXT)
    text: str = wire(_ANY_TEXT, default="")


@message
class GpuUseView(Response):
    """What a job used of one GPU; the peak lies between `peak_bytes` and `peak_upper_bytes`.

    `peak_source` is driver (exact, per process), sampled, device (by difference) or none.
    """

    gpu_uuid: str = wire(_SHORT_TEXT)
    gpu_index: int | None = wire(integer(), default=None)
    peak_bytes: int | None = wire(_SIZE, default=None)
    peak_upper_bytes: int | None = wire(_SIZE, default=None)
    peak_source: str = wire(_SHORT_TEXT, default="none")
    utilization: float | None = wire(number(0, 100), default=None)
    energy_j: float | None = wire(number(0, 2**53), default=None)


_TIME = number(-(2**53), 2**53)
_PATH = octets(PATH_BYTES_MAX)
_TEXTS = list_of(_ANY_TEXT, 1_000)


@message
class JobView(Response):
    """One job as a response shows it.

    `command` is one printable line, cut to a few hundred characters. `output`, `error`, an `argv`
    of more than 64 words or 1 KiB,
    `priority_parts`, `explanations` ("would start now with 1 GPU"), `events` and what was used of
    the GPUs (`vram_verdict`: within, under-declared, over-declared or unattributed)
    come with the method `job` only, for the owner and admins. Names, commands and directories of
    others are None where the host is `private`.
    `time_limit_s` is UNLIMITED_S without a limit. *_at_s and *_start_s are Unix times.
    """

    job_id: int = wire(_JOB_ID)
    state: JobState = wire(word(JobState))
    reason: Reason | None = wire(nested(Reason), default=None)
    user: str | None = wire(_USER, default=None)
    uid: int | None = wire(_COUNT, default=None)
    name: str | None = wire(_SHORT_TEXT, default=None)
    command: str | None = wire(_ANY_TEXT, default=None)
    gpus: int = wire(integer(0, GPUS_MAX), default=0)
    vram_bytes: int | None = wire(_SIZE, default=None)
    gpu_model: str | None = wire(_SHORT_TEXT, default=None)
    exclusive: bool = wire(boolean, default=False)
    topology: str | None = wire(_SHORT_TEXT, default=None)
    memory_bytes: int | None = wire(_SIZE, default=None)
    cpus: int | None = wire(_COUNT, default=None)
    time_limit_s: int | None = wire(_time_limit, default=None)
    nice: int | None = wire(integer(), default=None)
    hold: bool = wire(boolean, default=False)
    retries: int | None = wire(_COUNT, default=None)
    attempt: int | None = wire(_COUNT, default=None)
    queue_position: int | None = wire(_COUNT, default=None)
    priority: float | None = wire(number(-(2**53), 2**53), default=None)
    submitted_at_s: float | None = wire(_TIME, default=None)
    started_at_s: float | None = wire(_TIME, default=None)
    ended_at_s: float | None = wire(_TIME, default=None)
    expected_start_s: float | None = wire(_TIME, default=None)
    promised_start_s: float | None = wire(_TIME, default=None)
    gpu_indices: tuple[int, ...] | None = wire(list_of(integer(), GPUS_MAX), default=None)
    gpu_uuids: tuple[str, ...] | None = wire(list_of(_SHORT_TEXT, GPUS_MAX), default=None)
    exit_code: int | None = wire(integer(), default=None)
    exit_signal: int | None = wire(integer(), default=None)
    cause: str | None = wire(_SHORT_TEXT, default=None)
    cause_detail: str | None = wire(_ANY_TEXT, default=None)
    cpu_user_s: float | None = wire(number(0, 2**53), default=None)
    cpu_system_s: float | None = wire(number(0, 2**53), default=None)
    max_rss_bytes: int | None = wire(_SIZE, default=None)
    cwd: bytes | None = wire(_PATH, default=None)
    output: bytes | None = wire(_PATH, default=None)
    error: bytes | None = wire(_PATH, default=None)
    argv: tuple[bytes, ...] | None = wire(_WORDS, default=None)
    script_bytes: int | None = wire(_SIZE, default=None)
    vram_peak_bytes: int | None = wire(_SIZE, default=None)
    vram_peak_source: str | None = wire(_SHORT_TEXT, default=None)
    vram_verdict: str | None = wire(_SHORT_TEXT, default=None)
    vram_next_bytes: int | None = wire(_SIZE, default=None)
    gpu_utilization: float | None = wire(number(0, 100), default=None)
    gpu_seconds: float | None = wire(number(0, 2**53), default=None)
    energy_j: float | None = wire(number(0, 2**53), default=None)
    gpu_uses: tuple[GpuUseView, ...] | None = wire(
        list_of(nested(GpuUseView), GPUS_MAX), default=None
    )
    priority_parts: Mapping[str, Any] | None = wire(plain_map, default=None)
    explanations: tuple[str, ...] | None = wire(_TEXTS, default=None)
    events: tuple[JobEvent, ...] | None = wire(list_of(nested(JobEvent), 1_000), default=None)

    @property
    def id(self) -> int:
        """The job's id, by the short name that reads well in a program."""
        return self.job_id


_JOB_VIEWS = list_of(nested(JobView), RESPONSE_JOBS_MAX)


@message
class JobsResult(Response):
    """A page of jobs; `total` counts all that passed the filters."""

    jobs: tuple[JobView, ...] = wire(_JOB_VIEWS)
    total: int = wire(_COUNT)


@message
class QueueResult(Response):
    """A page of pending jobs in scheduling order; `total` counts all pending ones."""

    jobs: tuple[JobView, ...] = wire(_JOB_VIEWS)
    total: int = wire(_COUNT)


@message
class Outcome(Response):
    """What became of one id of a cancel or an update.

    `code` is None where it was done, else an error code; `state` is the job's state after it.
    `text` says it to people: "cancelled", "signalled", "was COMPLETED already", or the error.
    """

    job_id: int = wire(_JOB_ID)
    code: str | None = wire(_SHORT_TEXT, default=None)
    text: str = wire(_ANY_TEXT, default="")
    state: JobState | None = wire(word(JobState), default=None)


_OUTCOMES = list_of(nested(Outcome), IDS_MAX)


@message
class CancelResult(Response):
    """One outcome per id, in the order of the request."""

    outcomes: tuple[Outcome, ...] = wire(_OUTCOMES)


@message
class UpdateResult(Response):
    """One outcome per id, in the order of the request."""

    outcomes: tuple[Outcome, ...] = wire(_OUTCOMES)


@message
class WaitResult(Response):
    """The jobs as they are now; `timed_out` when not all are final."""

    jobs: tuple[JobView, ...] = wire(_JOB_VIEWS)
    timed_out: bool = wire(boolean, default=False)


@message
class WatchResult(Response):
    """Events after `last_event_id` follow as notifications."""

    last_event_id: int = wire(_COUNT)


@message
class GpuView(Response):
    """One GPU. `used_bytes` is None when it cannot be read, which is not zero.

    `promised_bytes` is what jobs hold, `foreign_bytes` what processes outside the scheduler are
    reckoned with. `stale` says that the figures are of an older sample.
    """

    index: int = wire(integer())
    uuid: str = wire(_SHORT_TEXT)
    minor: int | None = wire(integer(), default=None)
    model: str | None = wire(_SHORT_TEXT, default=None)
    total_bytes: int | None = wire(_SIZE, default=None)
    used_bytes: int | None = wire(_SIZE, default=None)
    promised_bytes: int | None = wire(_SIZE, default=None)
    foreign_bytes: int | None = wire(_SIZE, default=None)
    state: str = wire(_SHORT_TEXT, default="unknown")
    reason: str | None = wire(_ANY_TEXT, default=None)
    jobs: tuple[int, ...] = wire(list_of(_JOB_ID, 10_000), default=())
    utilization: float | None = wire(number(0, 100), default=None)
    stale: bool = wire(boolean, default=False)


@message
class GpusResult(Response):
    """All GPUs of the inventory, by index."""

    gpus: tuple[GpuView, ...] = wire(list_of(nested(GpuView), 2 * GPUS_MAX))
    problem: str | None = wire(_ANY_TEXT, default=None)  # why they cannot be looked at


@message
class UsageView(Response):
    """One user's account: decayed GPU-seconds, shares, and F in 0..1."""

    user: str = wire(_USER)
    usage_gpu_s: float = wire(number(0, 2**63))
    uid: int | None = wire(_COUNT, default=None)
    shares: float | None = wire(number(0, 2**53), default=None)
    factor: float | None = wire(number(0, 1), default=None)
    running_jobs: int | None = wire(_COUNT, default=None)
    running_gpus: float | None = wire(number(0, 2**53), default=None)
    pending_jobs: int | None = wire(_COUNT, default=None)


@message
class UsageResult(Response):
    """The users, highest factor first."""

    users: tuple[UsageView, ...] = wire(list_of(nested(UsageView), 10_000))


@message
class StatsResult(Response):
    """Counters and gauges by name."""

    counters: Mapping[str, Any] = wire(plain_map)


@message
class DrainResult(Response):
    """The GPU after the drain."""

    gpu: GpuView = wire(nested(GpuView))


@message
class ResumeResult(Response):
    """The GPU after the resume."""

    gpu: GpuView = wire(nested(GpuView))


@message
class ReloadResult(Response):
    """The keys whose values changed."""

    changed: tuple[str, ...] = wire(_TEXTS, default=())


@message
class TopResult(Response):
    """The job after it, and what was changed for it."""

    outcome: Outcome = wire(nested(Outcome))


@message
class LoggedProblem(Response):
    """A warning or an error of the daemon's log."""

    at_s: float = wire(_TIME)
    text: str = wire(_ANY_TEXT)


@message
class StatusResult(Response):
    """The daemon's health. `problems` is empty where all is well.

    `last_errors` is for admins. What is None is not known, or does not apply.
    """

    version: str = wire(_SHORT_TEXT)
    mode: str = wire(_SHORT_TEXT)
    launch: str = wire(_SHORT_TEXT)
    pid: int = wire(_COUNT)
    started_at_s: float = wire(_TIME)
    gpu_source: str = wire(_SHORT_TEXT)
    gpus: int = wire(_COUNT)
    gpus_ok: int = wire(_COUNT)
    database: str = wire(_ANY_TEXT)
    running_jobs: int = wire(_COUNT)
    pending_jobs: int = wire(_COUNT)
    connections: int = wire(_COUNT)
    sample_age_s: float | None = wire(number(0, 2**53), default=None)
    database_bytes: int | None = wire(_SIZE, default=None)
    disk_free_bytes: int | None = wire(_SIZE, default=None)
    pass_s: float | None = wire(number(0, 2**53), default=None)
    problems: tuple[str, ...] = wire(_TEXTS, default=())
    last_errors: tuple[LoggedProblem, ...] = wire(list_of(nested(LoggedProblem), 100), default=())


@message
class BackupResult(Response):
    """A piece of the copy at `offset`; it is complete when offset + len(data) is `size_bytes`."""

    backup_id: str = wire(_SHORT_TEXT)
    size_bytes: int = wire(_SIZE)
    offset: int = wire(_COUNT)
    data: bytes = wire(octets(BACKUP_PIECE_BYTES, nul=True))


EVENT_METHOD = "event"
EVENTS_DROPPED = "dropped"  # kind of the marker where a slow reader lost events


@message
class Event(Response):
    """One notification after `watch`. kind "dropped" marks a gap; data.count says how many."""

    event_id: int = wire(_COUNT)
    at_s: float = wire(_TIME)
    kind: str = wire(_SHORT_TEXT)
    job_id: int | None = wire(_JOB_ID, default=None)
    gpu_uuid: str | None = wire(_SHORT_TEXT, default=None)
    uid: int | None = wire(_COUNT, default=None)
    text: str = wire(_ANY_TEXT, default="")
    data: Mapping[str, Any] | None = wire(plain_map, default=None)


METHODS: dict[str, tuple[type[Request], type[Response]]] = {
    "hello": (Hello, HelloResult),
    "submit": (SubmitRequest, SubmitResult),
    "jobs": (JobsRequest, JobsResult),
    "queue": (QueueRequest, QueueResult),
    "job": (JobQuery, JobView),
    "cancel": (CancelRequest, CancelResult),
    "update": (UpdateRequest, UpdateResult),
    "wait": (WaitRequest, WaitResult),
    "watch": (WatchRequest, WatchResult),
    "gpus": (GpusRequest, GpusResult),
    "usage": (UsageRequest, UsageResult),
    "stats": (StatsRequest, StatsResult),
    "drain": (DrainRequest, DrainResult),
    "resume": (ResumeRequest, ResumeResult),
    "reload": (ReloadRequest, ReloadResult),
    "gpus_release": (GpusReleaseRequest, GpusResult),
    "gpus_resume": (GpusResumeRequest, GpusResult),
    "top": (TopRequest, TopResult),
    "status": (StatusRequest, StatusResult),
    "backup": (BackupRequest, BackupResult),
}


def read_request(method: str, params: object) -> Request:
    """The typed request of a method; an unknown method is Invalid."""
    pair = METHODS.get(method)
    if pair is None:
        known = ", ".join(METHODS)
        raise Invalid(
            f"method {shown(method)} is not known; use one of {known}", {"path": "method"}
        )
    return pair[0].from_wire(params)
