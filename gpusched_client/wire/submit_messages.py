"""The messages of `submit`: one job as its submitter asks for it, and what became of many."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from gpusched_client.errors import Conflict, Denied, Infeasible, LimitReached, StorageError
from gpusched_client.wire.fields import (
    Reader,
    boolean,
    integer,
    list_of,
    map_of,
    octets,
    refuse,
    refuse_large,
    shown,
    text,
)
from gpusched_client.wire.job_options import JobOptions
from gpusched_client.wire.limits import (
    ARGV_ITEMS_MAX,
    CPU_NUMBERS_MAX,
    CPUS_MAX,
    ENVIRONMENT_ITEMS_MAX,
    NICENESS_MAX,
    PATH_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    RLIMIT_INFINITY,
    RLIMIT_NAMES,
    STRING_BYTES_MAX,
    SUBMIT_JOBS_MAX,
    SUBMIT_PAYLOAD_BYTES_MAX,
    UMASK_MAX,
)
from gpusched_client.wire.message import (
    NO_ITEMS,
    FieldSpec,
    Message,
    Response,
    message,
    nested,
    part,
    read_fields,
    require_fields,
    specs_of,
    wire,
    written_fields,
)
from gpusched_client.wire.methods import Request, Right, Unread, method
from gpusched_client.wire.values import ANY_TEXT, JOB_ID, TIME_LIMIT

_WORD = octets(STRING_BYTES_MAX)


_PATH = octets(PATH_BYTES_MAX, empty=False)


def _read_cwd(value: object, path: str) -> bytes:
    directory: bytes = _PATH.read(value, path)
    if not directory.startswith(b"/"):
        refuse(path, f"{shown(directory)} is a relative path", "send an absolute one")
    return directory


_CWD = Reader(_read_cwd, "bytes", f"an absolute path of at most {PATH_BYTES_MAX} bytes")


def _read_environment_name(value: object, path: str) -> bytes:
    name: bytes = _NAME.read(value, path)
    if b"=" in name:
        refuse(path, f"the name {shown(name)} has a '='", "remove it")
    return name


_NAME = octets(STRING_BYTES_MAX, empty=False)
_VARIABLES = map_of(
    Reader(_read_environment_name, "bytes", "not empty, no ="),
    octets(STRING_BYTES_MAX),
    ENVIRONMENT_ITEMS_MAX,
)


class Environment(dict[bytes, bytes]):
    """An environment that has been read. Thousands of jobs share one, so its size is kept."""

    __slots__ = ("size",)

    def __init__(self, entries: Mapping[bytes, bytes]) -> None:
        super().__init__(entries)
        self.size = _environment_bytes(entries)


def _environment_bytes(environment: Mapping[bytes, bytes]) -> int:
    """Its names and values, with one byte for the end of each."""
    size = sum(map(len, environment)) + sum(map(len, environment.values()))
    return size + 2 * len(environment)


def _read_environment(value: object, path: str) -> Environment:
    environment: dict[bytes, bytes] = _VARIABLES.read(value, path)
    for name, content in environment.items():
        if len(name) + 1 + len(content) > STRING_BYTES_MAX:
            here = f"{path}.{name.decode('utf-8', 'backslashreplace')}"
            refuse_large(here, len(name) + 1 + len(content), STRING_BYTES_MAX, "bytes as KEY=VALUE")
    return Environment(environment)


_ENVIRONMENT = Reader(
    _read_environment,
    "map of bytes to bytes",
    f"at most {ENVIRONMENT_ITEMS_MAX} entries; each at most {STRING_BYTES_MAX} bytes as KEY=VALUE",
)


def _read_rlimit_name(value: object, path: str) -> str:
    if value not in RLIMIT_NAMES:
        refuse(path, f"{shown(value)} is not a limit", f"use {' '.join(sorted(RLIMIT_NAMES))}")
    return str(value)


_RLIMITS = map_of(
    Reader(_read_rlimit_name, "text", ", ".join(sorted(RLIMIT_NAMES))),
    list_of(integer(RLIMIT_INFINITY), 2, 2),
    len(RLIMIT_NAMES),
)


@part
class JobProcess(Message):
    """What runs, where and around what: exactly one of argv, script (with args) and shell.

    `shell` is one line for /bin/sh -c, byte for byte. `rlimits` maps a name of RLIMIT_NAMES to
    (soft, hard), where RLIMIT_INFINITY is no limit; limits, `niceness` (the kernel's) and
    `affinity` (CPU numbers; None: any) hold as far as the host lets the job have them.
    `script_path` is where the script was. `checked`: the submitter has seen that the command is
    there, so that its absence at the start is waited out.
    """

    __slots__ = ()

    cwd: bytes = wire(_CWD)
    environment: Mapping[bytes, bytes] = wire(_ENVIRONMENT, default=NO_ITEMS)
    argv: tuple[bytes, ...] | None = wire(list_of(_WORD, ARGV_ITEMS_MAX, 1), default=None)
    script: bytes | None = wire(octets(PAYLOAD_BYTES_MAX, nul=True, empty=False), default=None)
    args: tuple[bytes, ...] = wire(list_of(_WORD, ARGV_ITEMS_MAX), default=())
    shell: bytes | None = wire(octets(STRING_BYTES_MAX, empty=False), default=None)
    umask: int = wire(integer(0, UMASK_MAX), default=0o022)
    rlimits: Mapping[str, tuple[int, int]] | None = wire(_RLIMITS, default=None)
    niceness: int = wire(integer(0, NICENESS_MAX), default=0)
    affinity: tuple[int, ...] | None = wire(
        list_of(integer(0, CPUS_MAX - 1), CPU_NUMBERS_MAX, 1), default=None
    )
    script_path: bytes | None = wire(_PATH, default=None)
    checked: bool = wire(boolean, default=False)


@message
class JobRequest(JobOptions, JobProcess):
    """One job as its submitter asks for it: what runs, and the options of job_options.

    `time_limit_s` None is the daemon's default and UNLIMITED_S is unlimited. `vram_bytes` is per
    GPU; None takes each GPU whole. `memory_bytes` (of the host) and `cpus` bound the whole job;
    None is the daemon's default. `output` and `error` are paths with % patterns, relative ones
    below `cwd`.
    """

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
        size = self.payload_bytes
        if size > PAYLOAD_BYTES_MAX:
            refuse_large(path, size, PAYLOAD_BYTES_MAX, "bytes of argv, environment and script")

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
        environment = self.environment
        if isinstance(environment, Environment):
            return size + environment.size
        return size + _environment_bytes(environment)


_SUBMISSION_ID = text(128, r"[\x21-\x7e]{1,128}", "1 to 128 printable ASCII characters")


@message
class SubmitResult(Response):
    """The ids in the order of the jobs; `time_limits_s` beside them says what a default became.

    `warnings` is for people: "becomes a whole-GPU job". After a dry run job_ids is empty, and
    `would_start` (on which GPUs) or `reasons` (what it would wait for) has a text for the job; the
    other is empty or has "" in its place. `hints` say to people what a time limit would bring.
    """

    job_ids: tuple[int, ...] = wire(list_of(JOB_ID, SUBMIT_JOBS_MAX))
    time_limits_s: tuple[int, ...] = wire(list_of(TIME_LIMIT, SUBMIT_JOBS_MAX), default=())
    warnings: tuple[str, ...] = wire(list_of(ANY_TEXT, SUBMIT_JOBS_MAX), default=())
    would_start: tuple[str, ...] = wire(list_of(ANY_TEXT, SUBMIT_JOBS_MAX), default=())
    reasons: tuple[str, ...] = wire(list_of(ANY_TEXT, SUBMIT_JOBS_MAX), default=())
    hints: tuple[str, ...] = wire(list_of(ANY_TEXT, SUBMIT_JOBS_MAX), default=())


@method(
    "submit", Right.ALL, Unread.OPEN, (Conflict, Denied, Infeasible, LimitReached, StorageError)
)
class SubmitRequest(Request[SubmitResult]):
    """All or none of `jobs`. On the wire, a map `common` may hold fields that the jobs share.

    The same `submission_id` again returns the ids of the first time, for 7 days. `dry_run` asks
    what would happen and stores nothing.
    """

    jobs: tuple[JobRequest, ...] = wire(list_of(nested(JobRequest), SUBMIT_JOBS_MAX, 1))
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
            return job_over_common(common, item, here)

        jobs = list_of(Reader(read_job, "job"), SUBMIT_JOBS_MAX, 1).read(raw_jobs, "jobs")
        payload_bytes = sum(job.payload_bytes for job in jobs)
        if payload_bytes > SUBMIT_PAYLOAD_BYTES_MAX:
            refuse_large("jobs", payload_bytes, SUBMIT_PAYLOAD_BYTES_MAX, "bytes in all jobs")
        return cls(jobs=jobs, **kept)

    def to_wire(self) -> dict[str, Any]:
        """The map to send, with all fields in `common` that the jobs agree on."""
        common, jobs = common_and_own(self.jobs)
        wire_map: dict[str, Any] = {"jobs": jobs}
        if len(jobs) > 1:
            wire_map["common"] = common
        if self.submission_id is not None:
            wire_map["submission_id"] = self.submission_id
        if self.dry_run:
            wire_map["dry_run"] = True
        return wire_map


def common_and_own(
    jobs: Sequence[JobRequest], shareable: Container[str] = specs_of(JobRequest)
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The fields that all jobs agree on as they travel, and what each has beside them.

    Only `shareable` ones are shared. A single job shares nothing.
    """
    first, shared, own = jobs[0], list[FieldSpec](), list[FieldSpec]()
    for name, spec in specs_of(JobRequest).items():
        is_shared = len(jobs) > 1 and name in shareable and _agree(jobs, name)
        (shared if is_shared else own).append(spec)
    return written_fields(first, shared), [written_fields(job, own) for job in jobs]


def _agree(jobs: Sequence[JobRequest], name: str) -> bool:
    value = getattr(jobs[0], name)
    return all((other := getattr(job, name)) is value or other == value for job in jobs)


def job_over_common(common: Mapping[str, Any], item: object, path: str) -> JobRequest:
    """One job of a submission: its own fields, read here, over common ones, read already."""
    own = read_fields(JobRequest, item, path)
    merged = {**common, **own}
    require_fields(JobRequest, merged, path)
    job = JobRequest(**merged)
    job.check(path)
    return job
