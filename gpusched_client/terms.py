"""The words both sides speak: ids, job states, why a job waits and how it ended.

Beside them what both sides do with text of users: show it so that it cannot drive a terminal, and
fill in the names of output files. Pure.
"""

from __future__ import annotations

import os
import re
from enum import StrEnum
from typing import NewType

from gpusched_client.errors import Invalid

JobId = NewType("JobId", int)
GpuUuid = NewType("GpuUuid", str)
UNKNOWN_MODEL = "unknown"  # of a GPU that could not be asked


class JobState(StrEnum):
    """Slurm's states, with DEPENDENCY_FAILED. The value is what the wire carries."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    NODE_FAIL = "NODE_FAIL"
    DEPENDENCY_FAILED = "DEPENDENCY_FAILED"

    @property
    def short(self) -> str:
        """Slurm's abbreviation, as `gq` shows it."""
        return _SHORT[self]

    @property
    def is_final(self) -> bool:
        """True when nothing will change the job again."""
        return self in FINAL_STATES

    @property
    def is_live(self) -> bool:
        """True for PENDING and for everything that may still have processes."""
        return self not in FINAL_STATES


_SHORT = {
    JobState.PENDING: "PD",
    JobState.CONFIGURING: "CF",
    JobState.RUNNING: "R",
    JobState.COMPLETING: "CG",
    JobState.COMPLETED: "CD",
    JobState.FAILED: "F",
    JobState.CANCELLED: "CA",
    JobState.TIMEOUT: "TO",
    JobState.OUT_OF_MEMORY: "OOM",
    JobState.NODE_FAIL: "NF",
    JobState.DEPENDENCY_FAILED: "DF",
}

FINAL_STATES = frozenset(
    {
        JobState.COMPLETED,
        JobState.FAILED,
        JobState.CANCELLED,
        JobState.TIMEOUT,
        JobState.OUT_OF_MEMORY,
        JobState.NODE_FAIL,
        JobState.DEPENDENCY_FAILED,
    }
)


def parse_states(text: str) -> tuple[JobState, ...]:
    """States in a list such as "PD,RUNNING": long or short, any case; "live", "final", "all" too.

    Raises Invalid.
    """
    states: dict[JobState, None] = {}
    for word in text.split(","):
        states.update(dict.fromkeys(_states_of(word.strip())))
    return tuple(states)


def _states_of(word: str) -> list[JobState]:
    upper = word.upper()
    if upper in ("LIVE", "FINAL", "ALL"):
        return [state for state in JobState if upper == "ALL" or state.is_live == (upper == "LIVE")]
    for state in JobState:
        if upper in (state.value, state.short):
            return [state]
    known = ", ".join(f"{state.value} ({state.short})" for state in JobState)
    raise Invalid(f"{word!r} is not a job state; use live, final, all or {known}")


class PendingReason(StrEnum):
    """Why a job waits. The value is the code of a `reason`; its text and numbers come with it."""

    NONE = "None"  # not examined yet: a pass is about to come
    RESOURCES = "Resources"  # not enough GPUs or VRAM are free
    PRIORITY = "Priority"  # others come first
    RESERVED = "Reserved"  # would fit, but would delay the job that holds the reservation
    GPU_UNAVAILABLE = "GpuUnavailable"  # waits for a GPU that is drained, lost, sick or unread
    FOREIGN_USE = "ForeignUse"  # waits for memory that processes outside this scheduler hold
    UNLIMITED_JOB = "UnlimitedJob"  # waits for a job without a time limit
    NO_GPUS = "NoGpus"  # no GPU has been seen yet
    HELD = "Held"  # held by its owner or an admin
    LAUNCH_FAILED = "LaunchFailed"  # held after repeated failed launches
    LAUNCH_BACKOFF = "LaunchBackoff"  # waits before the next launch attempt
    BEGIN_TIME = "BeginTime"
    DEPENDENCY = "Dependency"
    USER_LIMIT = "UserLimit"  # over its user's running-jobs or GPU limit
    THROTTLED = "Throttled"
    CPU_SLOTS = "CpuSlots"  # CPU-only jobs: all slots are taken
    STORAGE = "Storage"  # the state directory cannot be written
    ENVIRONMENT = "Environment"  # a directory, command or account that it needs is away
    HOST_CLOSED = "HostClosed"  # the host lets no users in for now (/run/nologin, no PAM stack)


class Cause(StrEnum):
    """Cause of a job's end; `exit_code` and `exit_signal` are beside it."""

    EXIT = "exit"  # the main process exited by itself
    SIGNAL = "signal"  # a signal from elsewhere ended it
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    CUDA_OOM = "cuda_oom"
    HOST_OOM = "host_oom"
    XID = "xid"
    SETUP = "setup"  # the job could not be set up: cwd, output, account, command
    SHUTDOWN = "shutdown"  # the host went down
    STOPPED = "stopped"  # an operator stopped the job's unit
    NODE_FAIL = "node_fail"  # the end is unknown
    DEPENDENCY = "dependency"


class Mode(StrEnum):
    """Whom a daemon serves."""

    USER = "user"  # the user who runs it
    SYSTEM = "system"  # every local user


class Launch(StrEnum):
    """How supervisors are started."""

    DIRECT = "direct"  # by the daemon itself
    PID1 = "pid1"  # as transient units of systemd


class HoldKind(StrEnum):
    """Who, or what, holds a job; the value is kept in the database."""

    USER = "user"  # its owner
    ADMIN = "admin"
    LAUNCH = "launch"  # repeated failed launches
    ACCOUNT = "account"  # its user name and uid no longer belong together
    CONFIG = "config"  # the configuration (jobs.users) does not name its user


class EventKind(StrEnum):
    """What happened; the value is what `watch`, `events_v` and the log say."""

    JOB_SUBMITTED = "job_submitted"
    JOB_HELD = "job_held"
    JOB_RELEASED = "job_released"
    JOB_UPDATED = "job_updated"
    START_PROMISED = "start_promised"
    PROMISE_ENDED = "promise_ended"
    JOB_PLACED = "job_placed"
    JOB_STARTED = "job_started"
    JOB_NEAR_LIMIT = "job_near_limit"
    JOB_OVER_DECLARATION = "job_over_declaration"
    JOB_STUCK = "job_stuck"
    CANCEL_REQUESTED = "cancel_requested"
    SIGNAL_REQUESTED = "signal_requested"
    JOB_COMPLETING = "job_completing"
    JOB_REQUEUED = "job_requeued"
    JOB_RETRIED = "job_retried"
    JOB_ENDED = "job_ended"
    GPU_SEEN = "gpu_seen"
    GPU_DRAINED = "gpu_drained"
    GPU_RESUMED = "gpu_resumed"
    GPU_SICK = "gpu_sick"
    GPU_RECOVERED = "gpu_recovered"
    GPU_XID = "gpu_xid"
    GPU_NOT_GRANTED = "gpu_not_granted"
    GPU_LEFT_BEHIND = "gpu_left_behind"
    GPUS_RELEASED = "gpus_released"
    GPUS_REOPENED = "gpus_reopened"
    EVENTS_DROPPED = "dropped"  # in `watch` alone: the reader was behind


def printable(value: str | bytes) -> str:
    """Text that cannot drive a terminal: control and format characters become escapes."""
    text = os.fsdecode(value) if isinstance(value, bytes) else value
    if text.isprintable():
        return text
    return "".join([char if char.isprintable() else _escaped(char) for char in text])


def _escaped(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8, as os.fsdecode keeps it
        return f"\\x{code - 0xDC00:02x}"
    return char.encode("unicode_escape", "backslashreplace").decode("ascii")


_PATTERN = rb"%(?:(\d*)([NntsJjAaxu])|%)"
_WIDTH_MAX = 10  # as Slurm's


DEFAULT_NAME_CHARS_MAX = 64
_NOT_IN_NAMES = r"[^-A-Za-z0-9_.+]+"


def fill_pattern(pattern: bytes, *, job_id: int, name: str, user: str, host: str) -> bytes:
    """A file name: %j %J %A job id, %a array index (0), %x job name, %u user, %N host, %n %t node
    and task (0), %s step (batch), %% a percent sign. A number may have a width: %4j is 0042.

    Other letters stay as they are; unknown_marks finds them. A "/" in the job's name becomes
    "_": it is a part of a file's name, not of a path.
    """
    numbers = {b"j": job_id, b"J": job_id, b"A": job_id, b"a": 0, b"n": 0, b"t": 0}
    texts = {b"x": name.replace("/", "_"), b"u": user, b"N": host.partition(".")[0], b"s": "batch"}

    def filled(mark: re.Match[bytes]) -> bytes:
        width, letter = mark[1], mark[2]
        if letter is None:
            return b"%"
        if letter in texts:
            return texts[letter].encode(errors="replace")
        return b"%0*d" % (min(int(width or 0), _WIDTH_MAX), numbers[letter])

    return re.sub(_PATTERN, filled, pattern)


def unknown_marks(pattern: bytes) -> list[str]:
    """What begins with % in a pattern and is none of the marks of fill_pattern."""
    rest = re.sub(_PATTERN, b"", pattern)
    return [os.fsdecode(mark) for mark in re.findall(rb"%\d*.?", rest, re.DOTALL)]


def legal_name(path: str) -> str:
    """The last component of `path` as a name that is easy to type; "job" where nothing is left."""
    base = path.rstrip("/").rpartition("/")[2]
    return re.sub(_NOT_IN_NAMES, "_", base)[:DEFAULT_NAME_CHARS_MAX].strip("_") or "job"
