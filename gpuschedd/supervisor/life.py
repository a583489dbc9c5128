"""The supervisor: one process per attempt that starts a job, waits for it and records its end.

Run as `python -I -S life.py [--detach] JOBDIR`. It owns everything between the claim and the
exit record, and it outlives the daemon. It must not import anything but the standard library, nor
anything at all once it holds the claim (an upgrade may replace the files under it); it must not
trust anything but a spec that its own user wrote; it must not touch a path of the job's user except
as that user, in a forked child.

The job directory is the whole conversation with the daemon:

    spec     daemon      what to run; without it nothing runs
    claim    whoever     taken by link(2): exactly one of supervisor and daemon holds the attempt
    started  supervisor  durable before the gated child may exec
    orders   daemon      time limit, cancel, numbered signals; read before the fork, at each SIGUSR1
                         and once more before the main process is reaped
    ended    supervisor  at the reap of the main process: code, signal, cause, time
    exit     supervisor  when the last process is gone: the same, and what the job used

One life: check the spec; take the blocks of all later records while there is room; claim; fork a
child that becomes the user and sets up; publish `started`; open the gate; wait for signals, for
the child's report and for one boot-time clock; at the first cause end the job: TERM, grace, KILL
until no descendant is left. As a subreaper it inherits every orphan, so "no children" means
"nothing left".

All records are JSON objects with a `version`; byte strings are text with one code point a byte,
under keys that end in `_b`. With `--detach` the process that was started waits for the claim and
answers by its exit status (the constants EXIT_*), the reason on stderr; the rest lives on in a
session of its own.
"""

from __future__ import annotations

import _socket
import contextlib
import ctypes
import errno
import itertools
import json
import os
import pwd
import re
import resource
import select
import signal
import stat
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any, NoReturn

# --- The format ---------------------------------------------------------------------------------

RECORD_VERSION = 1
SPEC, CLAIM, STARTED, ORDERS, ENDED, EXIT = "spec", "claim", "started", "orders", "ended", "exit"
LOG = "supervisor.log"

SPEC_BYTES_MAX = 16 * 2**20  # 768 KiB of argv, environment and script, escaped, and room
RECORD_BYTES_MAX = 64 * 2**10
RESERVED_BYTES = 4096  # taken in advance for each record of ours, so that a full disk loses none
REASON_CHARS_MAX = 300  # six bytes each in JSON at worst: a record stays within its reserve

# Causes: why the main process ended. The first one counts.
CAUSE_EXIT, CAUSE_SIGNAL, CAUSE_SETUP = "exit", "signal", "setup"
CAUSE_TIME_LIMIT, CAUSE_CANCELLED = "time_limit", "cancelled"
CAUSE_SHUTDOWN, CAUSE_STOPPED = "shutdown", "stopped"

OOM_CUDA, OOM_HOST, OOM_UNKNOWN = "cuda", "host", "unknown"

# Exit statuses of the supervisor, for whoever started it.
EXIT_OK = 0
EXIT_SPEC_REFUSED = 65
EXIT_NO_SPEC = 66
EXIT_BUG = 70
EXIT_STORAGE = 74  # the host's fault: no claim, or a claim and nothing started
EXIT_CLAIM_LOST = 75

STORAGE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})

CODE_NOT_EXECUTABLE, CODE_NOT_FOUND = 126, 127

# --- Limits -------------------------------------------------------------------------------------

SETUP_DEADLINE_S = 30.0
OOM_SCAN_DEADLINE_S = 5.0
OOM_SCAN_BYTES = 16 * 2**10
SYSTEMCTL_DEADLINE_S = 2.0
KILL_ROUND_MIN_S, KILL_ROUND_MAX_S = 0.002, 1.0
RETRY_MIN_S, RETRY_MAX_S = 0.25, 30.0
ALARM_S_MAX = 2.0**32  # of uptime: what timers take; nothing waits for later

UID_NOBODY, UID_INVALID = 65534, 2**32 - 1
UID_MIN_DEFAULT = 1000
PAM_SERVICE = "gpusched"
PAM_DIRECTORIES = ("/etc/pam.d", "/usr/lib/pam.d", "/usr/share/pam.d")
NOLOGIN_FILES = ("/run/nologin", "/etc/nologin")
DEFAULT_PATH = b"/usr/local/bin:/usr/bin:/bin"
# A job must not speak to PID 1 in the name of its unit.
UNIT_VARIABLES = (b"NOTIFY_SOCKET", b"WATCHDOG_PID", b"WATCHDOG_USEC", b"LISTEN_PID", b"LISTEN_FDS")

# What frameworks print when a GPU allocation failed, in lower case. gRPC also says
# RESOURCE_EXHAUSTED, for quotas: only XLA's wording counts.
CUDA_OOM = re.compile(
    rb"cuda out of memory"
    rb"|torch\.outofmemoryerror|torch\.cuda\.outofmemoryerror"
    rb"|cuda(?: runtime| driver)? error[^\n]{0,40}: out of memory"
    rb"|cuda failure(?: \d+)? 'out of memory'|out_of_memory: cuda error"
    rb"|cuda_error_out_of_memory|cudaerrormemoryallocation"
    rb"|(?:cudamalloc|cumemalloc|hipmalloc)[^\n]{0,20} failed: out of memory"
    rb"|cublas_status_alloc_failed|cudnn_status_alloc_failed"
    rb"|resource_exhausted: (?:out of memory|attempting to allocate|failed to allocate request)"
    rb"|resource_exhausted: allocator \(gpu[^\n]*ran out of memory|out of memory error on gpu"
    rb"|oom when allocating tensor[^\n]*gpu"
    rb"|cupy[a-z_.]*\.outofmemoryerror|rocm error: out of memory"
    rb"|hip out of memory|hiperroroutofmemory|hip error[^\n]{0,40}: out of memory"
)


class Refused(Exception):
    """The supervisor will not run this directory; nothing was started."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class SetupFailed(Exception):
    """The child could not become the user or open the user's files; the text goes on the job."""


class HostClosed(SetupFailed):
    """PAM lets nobody in for now: no fault of the job's, which must wait."""


class ExecFailed(Exception):
    """The command cannot be executed; code as a shell would give it."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


# --- Records on disk ----------------------------------------------------------------------------


def text_of(raw: bytes) -> str:
    """One code point a byte: the form of byte strings in records."""
    return raw.decode("latin-1")


def bytes_of(text: str) -> bytes:
    """The inverse of text_of; ValueError where the text holds anything above U+00FF."""
    return text.encode("latin-1")


def display(path: bytes) -> str:
    """A path for people, always printable text."""
    return path.decode("utf-8", "backslashreplace")


def encode(record: dict[str, Any]) -> bytes:
    return json.dumps({"version": RECORD_VERSION, **record}).encode("ascii") + b"\n"


def decode(data: bytes) -> dict[str, Any]:
    """One record; ValueError when it is none, or one of a newer version."""
    record = json.loads(data)
    if not isinstance(record, dict):
        raise ValueError("a record is a JSON object")
    version = record.pop("version", None)
    if type(version) is not int or not 1 <= version <= RECORD_VERSION:
        raise ValueError(f"record version {version!r}; this program knows 1 to {RECORD_VERSION}")
    return record


def read_file(dir_fd: int, name: str, bytes_max: int = RECORD_BYTES_MAX) -> bytes | None:
    """A file of the job directory, None where it is absent; ValueError where it is too large."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    with open(fd, "rb", buffering=0) as file:
        data = _read_all(file.fileno(), bytes_max + 1)
    if len(data) > bytes_max:
        raise ValueError(f"{name} has more than {bytes_max} bytes")
    return data


def _read_all(fd: int, bytes_max: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while size < bytes_max and (part := os.read(fd, min(2**20, bytes_max - size))):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def read_record(dir_fd: int, name: str) -> dict[str, Any] | None:
    data = read_file(dir_fd, name, SPEC_BYTES_MAX if name == SPEC else RECORD_BYTES_MAX)
    return None if data is None else decode(data)


_serial = itertools.count()  # threads of one process draft at the same time


class Draft:
    """A record under a temporary name, whole and durable before it gets its own.

    With `reserve` its inode and blocks are taken at once, for a disk that may be full later.
    """

    def __init__(self, dir_fd: int, name: str, reserve: bool = False) -> None:
        self.name = name
        self._dir_fd = dir_fd
        self._temp = f".{name}.{os.getpid()}.{next(_serial)}"
        self._renamed = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._temp, flags, 0o600, dir_fd=dir_fd)
        try:
            os.fchmod(self._fd, 0o600)  # whatever the umask made of it
            if reserve:
                self._write(bytes(RESERVED_BYTES))
        except OSError:
            self.discard()
            raise

    def _write(self, data: bytes) -> None:
        offset = 0
        while offset < len(data):
            offset += os.pwrite(self._fd, data[offset:], offset)

    def fill(self, data: bytes) -> None:
        self._write(data)
        os.ftruncate(self._fd, len(data))
        os.fsync(self._fd)

    def publish(self, data: bytes) -> None:
        """Fill and rename; may be called again after an OSError."""
        if not self._renamed:
            self.fill(data)
            os.rename(self._temp, self.name, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
            self._renamed = True
        os.fsync(self._dir_fd)
        self.close()

    def link(self, data: bytes) -> bool:
        """Fill and link: False where the name is taken. Whole or absent, and only one side wins."""
        try:
            self.fill(data)
            os.link(self._temp, self.name, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
        except FileExistsError:
            return False
        finally:
            self.discard()
        os.fsync(self._dir_fd)
        return True

    def discard(self) -> None:
        if not self._renamed:
            with contextlib.suppress(OSError):  # what stays goes with the directory
                os.unlink(self._temp, dir_fd=self._dir_fd)
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def publish(dir_fd: int, name: str, record: dict[str, Any]) -> None:
    """One record, replacing an earlier one of the name, whole and durable at the return."""
    draft = Draft(dir_fd, name)
    try:
        draft.publish(encode(record))
    except BaseException:
        draft.discard()
        raise


def open_directory(path: str | bytes) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


# --- Processes as the kernel shows them ---------------------------------------------------------


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read().decode("ascii").strip()


class ProcessStat:
    """The fields of /proc/PID/stat that tell a process from a later one with its pid."""

    __slots__ = ("group", "parent", "session", "start_ticks", "state", "threads")

    def __init__(self, line: bytes) -> None:
        # The name may hold anything, so the fields are counted from its last parenthesis.
        fields = line[line.rindex(b")") + 2 :].split()
        self.state = fields[0].decode("ascii")
        self.parent, self.group, self.session = (int(field) for field in fields[1:4])
        self.threads = int(fields[17])
        self.start_ticks = int(fields[19])

    @property
    def alive(self) -> bool:
        """Also where only the first thread has ended: the state is that one's alone."""
        return self.state not in "ZX" or self.threads > 1


def process_stat(pid: int) -> ProcessStat | None:
    """None where no such process exists."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return ProcessStat(file.read())
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_running(pid: int, start_ticks: int) -> bool:
    """Whether this very process runs: a zombie does not, a stranger with its pid is not it."""
    found = process_stat(pid)
    return found is not None and found.alive and found.start_ticks == start_ticks


def pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def children_of(pid: int) -> list[int]:
    """Children of all threads of pid; may miss some while they are being made."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found.extend(int(child) for child in file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        return found
    return found


def _children_by_parent() -> dict[int, list[int]]:
    """For kernels without CONFIG_PROC_CHILDREN."""
    tree: dict[int, list[int]] = {}
    for pid in pids():
        if (found := process_stat(pid)) is not None:
            tree.setdefault(found.parent, []).append(pid)
    return tree


def descendants(root: int) -> list[int]:
    """All processes below root, parents before children."""
    lookup: Callable[[int], list[int]] = children_of
    if not os.path.exists(f"/proc/{root}/task/{root}/children"):
        tree = _children_by_parent()
        lookup = lambda pid: tree.get(pid, [])  # noqa: E731
    found = lookup(root)
    for pid in found:  # grows while it is walked
        found.extend(lookup(pid))
    return found


def send_signal(pid: int, signum: int, start_ticks: int) -> bool:
    """Signal this very process: the pidfd pins it, the second look proves whom it pins."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not is_running(pid, start_ticks):
            return False
        signal.pidfd_send_signal(pidfd, signum)
        return True
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(pidfd)


# --- System calls that Python 3.11 lacks --------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
CLOCK_BOOTTIME = time.CLOCK_BOOTTIME
TFD_TIMER_ABSTIME = 1
SYS_CLOSE_RANGE = 436
SYS_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "ppc64le": 271, "s390x": 280}
KEYCTL_JOIN_SESSION_KEYRING = 1
FD_MAX = 2**32 - 1


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def prctl(option: int, value: int) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), 0, 0))


def close_all_except(keep: Iterable[int]) -> None:
    """Close every descriptor above 2 but these."""
    first = 3
    for fd in [*sorted(keep), FD_MAX]:
        if first < fd:
            _close_range(first, fd - 1)
        first = fd + 1


def _close_range(first: int, last: int) -> None:
    if _libc.syscall(SYS_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(last), 0) == 0:
        return
    for name in os.listdir("/proc/self/fd"):  # before Linux 5.9
        if first <= int(name) <= last:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(int(name))


class SignalQueue:
    """Signals as a descriptor: blocked, so none is lost and none interrupts."""

    ACCEPTED = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})
    IGNORED = frozenset({signal.SIGHUP, signal.SIGUSR2, signal.SIGPIPE, signal.SIGQUIT})
    _INFO_BYTES = 128

    def __init__(self) -> None:
        for signum in self.IGNORED:
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, self.ACCEPTED)
        word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
        mask = (ctypes.c_ulong * (1024 // word_bits))()
        for signum in self.ACCEPTED:
            mask[(signum - 1) // word_bits] |= 1 << ((signum - 1) % word_bits)
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self.fd = _checked(_libc.signalfd(-1, ctypes.byref(mask), flags))

    def drain(self) -> set[int]:
        found: set[int] = set()
        while True:
            try:
                data = os.read(self.fd, 16 * self._INFO_BYTES)
            except BlockingIOError:
                return found
            for offset in range(0, len(data), self._INFO_BYTES):
                found.add(int.from_bytes(data[offset : offset + 4], sys.byteorder))


def boottime_s() -> float:
    """Seconds since the boot, suspended time included."""
    return time.clock_gettime(CLOCK_BOOTTIME)


class Alarms:
    """Named deadlines in boot time on one descriptor: no periodic wake-up, no drift in suspend."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self.fd = _checked(_libc.timerfd_create(CLOCK_BOOTTIME, os.O_NONBLOCK | os.O_CLOEXEC))

    def set(self, name: str, at_s: float) -> None:
        self._due[name] = at_s
        self._arm()

    def clear(self, *names: str) -> None:
        for name in names:
            self._due.pop(name, None)
        self._arm()

    def is_due(self, name: str) -> bool:
        return name in self._due and self._due[name] <= boottime_s()

    def take_due(self) -> list[str]:
        """The names whose time has come, earliest first; they are cleared."""
        now_s = boottime_s()
        due = sorted((at_s, name) for name, at_s in self._due.items() if at_s <= now_s)
        self.clear(*(name for _, name in due))
        return [name for _, name in due]

    def _arm(self) -> None:
        # Zero would disarm; a deadline in the past fires at once.
        first_s = min(min(self._due.values(), default=0.0), ALARM_S_MAX)
        first_ns = max(1, int(1e9 * first_s)) if self._due else 0
        spec = (ctypes.c_long * 4)(0, 0, first_ns // 10**9, first_ns % 10**9)
        _checked(_libc.timerfd_settime(self.fd, TFD_TIMER_ABSTIME, ctypes.byref(spec), None))


# --- The spec -----------------------------------------------------------------------------------


class Fields:
    """Strict reading of a JSON object: every field present, of its type, in its range."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._left = dict(record)

    def take(self, name: str) -> Any:
        if name not in self._left:
            raise ValueError(f"{name} is missing")
        return self._left.pop(name)

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.take(name)
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{name} must be an integer from {low} to {high}, not {value!r}")
        return value

    def number(self, name: str) -> float:
        value = self.take(name)
        if type(value) not in (int, float) or not value >= 0:
            raise ValueError(f"{name} must be a number >= 0, not {value!r}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        if self._left.get(name, 0) is None:
            self.take(name)
            return None
        return self.number(name)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if type(value) is not bool:
            raise ValueError(f"{name} must be true or false, not {value!r}")
        return value

    def text(self, name: str) -> str:
        value = self.take(name)
        if type(value) is not str:
            raise ValueError(f"{name} must be text")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = self.text(name)
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        return value

    def raw(self, name: str) -> bytes:
        return bytes_of(self.text(name + "_b"))

    def optional_raw(self, name: str) -> bytes | None:
        if self._left.get(name + "_b", "") is None:
            self.take(name + "_b")
            return None
        return self.raw(name)

    def rows(self, name: str) -> list[Any]:
        value = self.take(name)
        if type(value) is not list:
            raise ValueError(f"{name} must be a list")
        return value

    def end(self) -> None:
        if self._left:
            raise ValueError(f"unknown field {sorted(self._left)[0]}")


def _limit_row(row: Any) -> tuple[str, int, int]:
    name, soft, hard = row
    if type(name) is not str or type(soft) is not int or type(hard) is not int:
        raise ValueError("rlimits must be rows of name, soft and hard limit")
    return name, soft, hard


def _cpu(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 2**16:
        raise ValueError(f"cpu_set must hold CPU numbers, not {number!r}")
    return number


class Spec:
    """What to run, as the daemon wrote it. No field has a default: what is unclear is refused."""

    def __init__(self, record: dict[str, Any]) -> None:
        fields = Fields(record)
        self.job_id = fields.integer("job_id", 1, 2**63 - 1)
        self.attempt = fields.integer("attempt", 1, 2**31 - 1)
        self.instance = fields.text("instance")
        self.mode = fields.choice("mode", ("user", "system"))
        self.launch = fields.choice("launch", ("direct", "pid1"))
        self.user = fields.text("user")
        self.uid = fields.integer("uid", 0, UID_INVALID - 1)
        self.name = fields.text("name")
        self.argv = tuple(bytes_of(word) for word in fields.rows("argv_b"))
        self.script = fields.optional_raw("script")
        self.cwd = fields.raw("cwd")
        self.environment = tuple(
            (bytes_of(key), bytes_of(value)) for key, value in fields.rows("environment_b")
        )
        self.umask = fields.integer("umask", 0, 0o777)
        self.rlimits = tuple(_limit_row(row) for row in fields.rows("rlimits"))
        self.output = fields.raw("output")
        self.error = fields.optional_raw("error")
        self.time_limit_s = fields.optional_number("time_limit_s")
        self.kill_grace_s = fields.number("kill_grace_s")
        self.hint_socket = fields.text("hint_socket")
        self.scripts_dir = fields.text("scripts_dir")
        self.allow_system_uid = fields.flag("allow_system_uid")
        self.no_exec = fields.flag("no_exec")
        self.cpu_set = tuple(_cpu(number) for number in fields.rows("cpu_set"))
        fields.end()
        if not (self.argv or self.script is not None or self.no_exec):
            raise ValueError("argv_b is empty and there is no script")

    @property
    def system(self) -> bool:
        return self.mode == "system"

    @property
    def label(self) -> str:
        return f"{self.job_id}.{self.attempt}"


def _require_private(what: str, found: os.stat_result, kind: int, mode: int) -> None:
    if stat.S_IFMT(found.st_mode) != kind:
        raise Refused(EXIT_SPEC_REFUSED, f"{what} is not of the right kind")
    if found.st_uid != os.geteuid():
        reason = f"{what} belongs to uid {found.st_uid}, not to {os.geteuid()}"
        raise Refused(EXIT_SPEC_REFUSED, reason)
    if stat.S_IMODE(found.st_mode) != mode:
        reason = f"{what} has mode {stat.S_IMODE(found.st_mode):o}, not {mode:o}"
        raise Refused(EXIT_SPEC_REFUSED, reason)


def load_spec(dir_fd: int) -> Spec:
    """The spec, if it is whole and nobody but this uid can have written it; else Refused."""
    _require_private("the job directory", os.fstat(dir_fd), stat.S_IFDIR, 0o700)
    try:
        found = os.stat(SPEC, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        raise Refused(EXIT_NO_SPEC, "there is no spec") from None
    _require_private("the spec", found, stat.S_IFREG, 0o600)
    try:
        record = read_record(dir_fd, SPEC)
        spec = Spec(record if record is not None else {})
    except (ValueError, TypeError) as error:
        raise Refused(EXIT_SPEC_REFUSED, f"the spec is refused: {error}") from error
    if not spec.system and spec.uid != os.geteuid():
        reason = f"the spec is for uid {spec.uid} and this process is {os.geteuid()}"
        raise Refused(EXIT_SPEC_REFUSED, reason)
    if spec.system and os.geteuid() != 0:
        raise Refused(EXIT_SPEC_REFUSED, "a spec of system mode needs root")
    return spec


# --- Becoming the user (in the child) -----------------------------------------------------------


def uid_min(path: str = "/etc/login.defs") -> int:
    try:
        with open(path, "rb") as file:
            found = re.search(rb"^\s*UID_MIN\s+(\d+)", file.read(2**20), re.MULTILINE)
    except OSError:
        return UID_MIN_DEFAULT
    return int(found[1]) if found else UID_MIN_DEFAULT


def check_uid(uid: int, allow_system_uid: bool) -> None:
    """SetupFailed unless this uid may run jobs at all."""
    if uid in (UID_NOBODY, UID_INVALID) or not 0 <= uid < UID_INVALID:
        raise SetupFailed(f"uid {uid} is nobody's and runs no jobs")
    if uid < uid_min() and not allow_system_uid:
        raise SetupFailed(f"uid {uid} is a system account (below UID_MIN {uid_min()})")


def account_of(user: str, uid: int) -> pwd.struct_passwd:
    """The account as it was at submit: name and uid must still belong together."""
    try:
        by_name = pwd.getpwnam(user)
        by_uid = pwd.getpwuid(uid)
    except KeyError:
        raise SetupFailed(f"there is no account {user} with uid {uid} any more") from None
    if by_name.pw_uid != uid or by_uid.pw_name != user:
        reason = f"account {user} had uid {uid} at submit; now {user} is uid {by_name.pw_uid}"
        raise SetupFailed(f"{reason} and uid {uid} is {by_uid.pw_name}")
    return by_name


def pam_stack() -> str | None:
    """The file with the private stack."""
    places = (f"{place}/{PAM_SERVICE}" for place in PAM_DIRECTORIES)
    return next((place for place in places if os.path.exists(place)), None)


def closed_by() -> str | None:
    """What closes the host to users: no private stack, or a file that says so (pam_nologin(8)).

    None where users are let in. Such a file closes nothing where the stack does not ask for it.
    """
    stack = pam_stack()
    if stack is None:
        missing = f"{PAM_DIRECTORIES[0]}/{PAM_SERVICE} is missing"
        return f"{missing}; `gpuschedd install` puts it in place"
    found = next((path for path in NOLOGIN_FILES if os.path.exists(path)), None)
    if found is None:
        return None
    try:
        with open(stack, "rb") as file:
            heeded = re.search(rb"^[^#\n]*\bpam_nologin\b", file.read(2**16), re.MULTILINE)
    except OSError:
        return None
    return f"{found} exists" if heeded else None


class _PamMessage(ctypes.Structure):
    _fields_ = (("style", ctypes.c_int), ("text", ctypes.c_char_p))


_PAM_CONVERSE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.POINTER(ctypes.POINTER(_PamMessage)),
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)


class _PamConversation(ctypes.Structure):
    _fields_ = (("converse", _PAM_CONVERSE), ("data", ctypes.c_void_p))


class Pam:
    """Account and session of the private stack, for the calling process (pam_limits acts on it).

    The session is never closed: the process that opened it becomes the job. The stack must hold
    nothing that needs closing, and not pam_systemd, which would move the job out of its unit.
    """

    _ERROR_MSG, _TEXT_INFO = 3, 4
    _SUCCESS, _CONV_ERR = 0, 19
    _DATA_SILENT = 0x40000000

    def __init__(self) -> None:
        """Loads the library, so before the claim; OSError where there is none."""
        self._lib = ctypes.CDLL("libpam.so.0")
        self._lib.pam_strerror.restype = ctypes.c_char_p
        _libc.calloc.restype = ctypes.c_void_p
        self._said: list[str] = []

    def open_session(self, user: str) -> None:
        if pam_stack() is None:
            raise HostClosed(closed_by())
        handle = ctypes.c_void_p()
        converse = _PAM_CONVERSE(self._converse)
        conversation = _PamConversation(converse, None)
        name = user.encode()
        service = PAM_SERVICE.encode()
        start = self._lib.pam_start
        status = start(service, name, ctypes.byref(conversation), ctypes.byref(handle))
        self._check("start", handle, status)
        self._check("account", handle, self._lib.pam_acct_mgmt(handle, 0))
        self._check("session", handle, self._lib.pam_open_session(handle, 0))
        self._lib.pam_end(handle, self._DATA_SILENT)

    def _check(self, step: str, handle: ctypes.c_void_p, status: int) -> None:
        if status != self._SUCCESS:
            text = self._lib.pam_strerror(handle, status) or b"unknown"
            said = "".join(f" ({line})" for line in self._said)
            reason = text.decode("utf-8", "replace")
            kind = SetupFailed if closed_by() is None else HostClosed
            raise kind(f"PAM {step} refused: {reason}{said}")

    def _converse(self, count: int, messages: Any, answers: Any, _data: Any) -> int:
        """Nobody is there to answer: remarks are kept for the reason, questions refused."""
        styles = {messages[index].contents.style for index in range(count)}
        if not styles <= {self._ERROR_MSG, self._TEXT_INFO}:
            return self._CONV_ERR
        for index in range(count):
            text = messages[index].contents.text or b""
            if text.strip():
                self._said.append(text.decode("utf-8", "replace").strip())
        # The caller frees it: an array of {char *text; int code}, all empty.
        answers[0] = _libc.calloc(count, ctypes.sizeof(_PamMessage))
        return self._SUCCESS


def drop_to(user: str, uid: int, gid: int) -> None:
    """All groups, gid and uid of the user, for ever; each step is verified."""
    os.initgroups(user, gid)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if set(os.getgroups()) != set(os.getgrouplist(user, gid)):
        raise SetupFailed("the supplementary groups could not be set")
    if os.getresgid() != (gid, gid, gid) or os.getresuid() != (uid, uid, uid):
        raise SetupFailed("the identity could not be set")
    if uid != 0:
        _require_no_way_back()


def _require_no_way_back() -> None:
    with open("/proc/self/status", "rb") as file:
        held = re.findall(rb"^Cap(?:Prm|Eff|Amb):\s*([0-9a-f]+)", file.read(), re.MULTILINE)
    if any(int(mask, 16) for mask in held):
        raise SetupFailed("capabilities are left after the change of identity")
    try:
        os.setuid(0)
    except PermissionError:
        return
    raise SetupFailed("the change of identity can be undone")


def join_new_keyring() -> None:
    """A session keyring of its own; where the kernel or machine has none there is none to leak."""
    number = SYS_KEYCTL.get(os.uname().machine)
    if number is not None:
        _libc.syscall(number, KEYCTL_JOIN_SESSION_KEYRING, None, 0, 0, 0)


def set_oom_score(value: int, only_if_below: int | None = None) -> None:
    """How eagerly the host's OOM killer takes this process; best effort."""
    try:
        with open("/proc/self/oom_score_adj", "rb+", buffering=0) as file:
            if only_if_below is None or int(file.read()) < only_if_below:
                file.write(b"%d" % value)
    except OSError:
        pass


def become_user(spec: Spec, pam: Pam | None) -> None:
    """In system mode the user, with the session where `pam` is given; in user mode we are it."""
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    if not spec.system:
        return
    check_uid(spec.uid, spec.allow_system_uid)
    account = account_of(spec.user, spec.uid)
    if pam is not None:
        pam.open_session(spec.user)
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    set_oom_score(0)
    drop_to(spec.user, spec.uid, account.pw_gid)
    join_new_keyring()


# --- The child between fork and exec ------------------------------------------------------------


def _reason_of(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def open_log(what: str, path: bytes, truncate: bool) -> int:
    """A log for appending, as the user. Never waits: a FIFO without reader is an error.

    A symbolic link is followed: with the user's own rights it is the user's own business.
    """
    shown = f"{what} {display(path)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags | (os.O_TRUNC if truncate else 0), 0o666)
    except OSError as error:
        raise SetupFailed(f"{shown}: {_why_no_log(path, error)}") from error
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFIFO, stat.S_IFCHR):
        raise SetupFailed(f"{shown}: neither a regular file nor a FIFO nor a terminal-like device")
    if kind == stat.S_IFCHR:
        try:
            os.write(fd, b"")  # /dev/full opens like any other
        except OSError as error:
            raise SetupFailed(f"{shown}: {_reason_of(error)}") from error
    os.set_blocking(fd, True)
    return fd


def _why_no_log(path: bytes, error: OSError) -> str:
    if error.errno == errno.ENXIO:
        return "a FIFO that nobody reads, or a socket"
    if error.errno == errno.ENOENT:
        return f"directory {display(os.path.dirname(path) or b'.')} does not exist"
    return _reason_of(error)


def log_identity(fd: int) -> list[int] | None:
    """Device, inode and where this attempt's output begins; None for anything but a file."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        return None
    return [found.st_dev, found.st_ino, found.st_size]


def lower_limits(rlimits: tuple[tuple[str, int, int], ...]) -> None:
    """As at submit, but never above what this process has."""
    for name, soft, hard in rlimits:
        key = name.upper() if name.upper().startswith("RLIMIT_") else f"RLIMIT_{name.upper()}"
        number = getattr(resource, key, None)
        if not isinstance(number, int):
            continue  # a limit of the submitter's kernel that this one lacks
        hard_now = resource.getrlimit(number)[1]
        hard_new = _lower(hard, hard_now)
        try:
            resource.setrlimit(number, (_lower(soft, hard_new), hard_new))
        except (OSError, ValueError) as error:
            raise SetupFailed(f"limit {key}: {error}") from error


def _lower(asked: int, ceiling: int) -> int:
    infinity = resource.RLIM_INFINITY
    if asked == infinity or asked < 0:
        return ceiling
    return asked if ceiling == infinity else min(asked, ceiling)


def script_command(script: bytes, path: bytes, arguments: tuple[bytes, ...]) -> list[bytes]:
    """The interpreter's argv, as the kernel would build it from the first line."""
    line = script[:256].split(b"\n", 1)[0]
    words = line[2:].strip(b" \t\r").split(None, 1) if line.startswith(b"#!") else []
    return [*(words or [b"/bin/sh"]), path, *arguments]


def job_environment(spec: Spec) -> dict[bytes, bytes]:
    """The spec's environment, with the marks by which the job's processes are found again."""
    environment = dict(spec.environment)
    environment[b"GPUSCHED_JOB_ID"] = b"%d" % spec.job_id
    environment[b"GPUSCHED_ATTEMPT"] = b"%d" % spec.attempt
    environment[b"GPUSCHED_INSTANCE"] = spec.instance.encode()
    if spec.system:
        for name in UNIT_VARIABLES:
            environment.pop(name, None)
    return environment


def _candidates(command: bytes, environment: dict[bytes, bytes]) -> list[bytes]:
    if b"/" in command:
        return [command]
    places = environment.get(b"PATH", DEFAULT_PATH).split(b":")
    return [(place or b".") + b"/" + command for place in places] if command else []


def execute(argv: list[bytes], environment: dict[bytes, bytes]) -> NoReturn:
    """execve along PATH; ExecFailed with 127 where nothing is found, 126 where it cannot run."""
    found: OSError | None = None
    for path in _candidates(argv[0], environment):
        try:
            _execve(path, argv, environment)
        except (FileNotFoundError, NotADirectoryError) as error:
            if os.path.exists(path):
                text = f"{display(path)}: its interpreter does not exist"
                raise ExecFailed(CODE_NOT_EXECUTABLE, text) from error
        except OSError as error:
            if b"/" not in argv[0] and not os.path.exists(path):
                continue  # a directory of PATH that this user may not look into holds nothing
            found = found or error
            if error.errno != errno.EACCES:
                break
    if found is None:
        raise ExecFailed(CODE_NOT_FOUND, f"command not found: {display(argv[0])}")
    text = f"cannot execute {display(argv[0])}: {_reason_of(found)}"
    raise ExecFailed(CODE_NOT_EXECUTABLE, text)


def _execve(path: bytes, argv: list[bytes], environment: dict[bytes, bytes]) -> None:
    try:
        os.execve(path, argv, environment)
    except OSError as error:
        if error.errno != errno.ENOEXEC or _looks_binary(path):
            raise
        # A script without a first line: what a shell and execvp(3) do.
        os.execve(b"/bin/sh", [b"/bin/sh", path, *argv[1:]], environment)
    except ValueError as error:
        raise ExecFailed(CODE_NOT_EXECUTABLE, f"cannot execute: {error}") from error


def _looks_binary(path: bytes) -> bool:
    try:
        with open(path, "rb", buffering=0) as file:
            return b"\0" in file.read(256)
    except OSError:
        return True


class Child:
    """The forked child: becomes the user, sets up, waits at the gate, execs.

    It reports to the supervisor in JSON lines: a stage before each step that may hang, then ready,
    or failed with the reason. The exec closes the pipe.
    """

    def __init__(self, spec: Spec, pam: Pam | None, script_path: bytes | None) -> None:
        self._spec = spec
        self._pam = pam
        self._script_path = script_path
        self._parent = os.getpid()
        self._report_fd = -1

    def run(self, report_fd: int, gate_fd: int) -> NoReturn:
        self._report_fd = report_fd
        code = 1
        try:
            self._set_up(gate_fd)
            if os.read(gate_fd, 1):
                self._exec()
        except ExecFailed as failure:
            code = failure.code
            self._report(failed=str(failure)[:REASON_CHARS_MAX])
        except HostClosed as closed:
            self._report(closed=str(closed)[:REASON_CHARS_MAX])
        except SetupFailed as failure:
            self._report(failed=str(failure)[:REASON_CHARS_MAX])
        except BaseException as error:
            self._report(failed=f"set-up failed: {error!r}"[:REASON_CHARS_MAX])
        finally:
            os._exit(code)

    def _report(self, **record: Any) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone; so are we, soon
            os.write(self._report_fd, json.dumps(record).encode("ascii") + b"\n")

    def _set_up(self, gate_fd: int) -> None:
        self._reset(gate_fd)
        self._report(stage="account and session")
        become_user(self._spec, self._pam)
        # A PAM module may leave a descriptor behind.
        close_all_except({self._report_fd, gate_fd})
        os.umask(self._spec.umask)
        self._change_directory()
        logs = self._open_logs()
        lower_limits(self._spec.rlimits)
        if self._spec.cpu_set:
            with contextlib.suppress(OSError):  # none of them is this host's, or this cgroup's
                os.sched_setaffinity(0, self._spec.cpu_set)
        if self._spec.launch == "direct":
            # After the last change of uid, which clears it. A parent that died before this line
            # sends nothing, hence the second look.
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._parent:
                os._exit(1)
        self._report(ready=True, logs=logs)

    def _reset(self, gate_fd: int) -> None:
        os.setsid()
        for signum in range(1, signal.NSIG):
            with contextlib.suppress(OSError, ValueError):  # KILL, STOP, the C library's own
                signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        close_all_except({self._report_fd, gate_fd})

    def _change_directory(self) -> None:
        self._report(stage=f"directory {display(self._spec.cwd)}"[:REASON_CHARS_MAX])
        try:
            os.chdir(self._spec.cwd)
        except (OSError, ValueError) as error:
            reason = _reason_of(error) if isinstance(error, OSError) else str(error)
            raise SetupFailed(f"directory {display(self._spec.cwd)}: {reason}") from error

    def _open_logs(self) -> list[list[int] | None]:
        truncate = self._spec.attempt == 1
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(null, 0, inheritable=True)
        error = self._spec.error
        logs = [self._open_log("output", self._spec.output, truncate, 1)]
        if error is None or error == self._spec.output:
            os.dup2(1, 2, inheritable=True)
        else:
            logs.append(self._open_log("error", error, truncate, 2))
        return logs

    def _open_log(self, what: str, path: bytes, truncate: bool, target: int) -> list[int] | None:
        self._report(stage=f"{what} {display(path)}"[:REASON_CHARS_MAX])
        try:
            fd = open_log(what, path, truncate)
        except ValueError as error:
            raise SetupFailed(f"{what}: {error}") from error
        os.dup2(fd, target, inheritable=True)
        os.close(fd)
        return log_identity(target)

    def _exec(self) -> NoReturn:
        argv = list(self._spec.argv)
        if self._script_path is not None and self._spec.script is not None:
            argv = script_command(self._spec.script, self._script_path, self._spec.argv)
        execute(argv, job_environment(self._spec))


# --- Out of memory ------------------------------------------------------------------------------


def shows_cuda_oom(data: bytes) -> bool:
    return CUDA_OOM.search(data.lower()) is not None


def scan_log(path: bytes, identity: list[int] | None) -> str | None:
    """Whether the end of this attempt's output shows an OOM; unknown where it cannot be read."""
    if identity is None:
        return OOM_UNKNOWN
    device, inode, begin = identity
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino) != (device, inode) or not stat.S_ISREG(found.st_mode):
        return OOM_UNKNOWN
    os.lseek(fd, max(begin, found.st_size - OOM_SCAN_BYTES), os.SEEK_SET)
    return OOM_CUDA if shows_cuda_oom(_read_all(fd, OOM_SCAN_BYTES)) else None


def scan_as_user(spec: Spec, logs: list[list[int] | None]) -> bytes:
    """In a forked child: the answer as one word, empty for none."""
    become_user(spec, None)
    os.chdir(spec.cwd)
    paths = [spec.output] if spec.error is None else [spec.output, spec.error]
    found = {scan_log(path, log) for path, log in zip(paths, logs, strict=False)}
    answer = OOM_CUDA if OOM_CUDA in found else OOM_UNKNOWN if OOM_UNKNOWN in found else ""
    return answer.encode()


def ask_child(work: Callable[[], bytes], deadline_s: float) -> bytes | None:
    """The answer of a forked child; None where it failed or took too long."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_fd, b"=" + work())
        finally:
            os._exit(0)
    os.close(write_fd)
    answer = _read_until(read_fd, boottime_s() + deadline_s)
    os.close(read_fd)
    _dismiss(pid)
    return answer[1:] if answer.startswith(b"=") else None


def _read_until(fd: int, deadline_s: float) -> bytes:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    data = b""
    while (left_s := deadline_s - boottime_s()) > 0 and poll.poll(1000 * left_s):
        part = os.read(fd, 4096)
        if not part:
            break
        data += part
    return data


def _dismiss(pid: int) -> None:
    """End a helper; one that hangs in the kernel is left behind rather than waited for."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    pidfd = os.pidfd_open(pid)
    select.select([pidfd], [], [], 1.0)
    os.close(pidfd)
    os.waitpid(pid, os.WNOHANG)


def host_oom_kills() -> int | None:
    """OOM kills so far in this process's cgroup; None where version 2 does not count them."""
    try:
        with open("/proc/self/cgroup", "rb") as file:
            place = re.search(rb"^0::(/.*)$", file.read(), re.MULTILINE)
        if place is None:
            return None
        with open(b"/sys/fs/cgroup" + place[1] + b"/memory.events", "rb") as file:
            count = re.search(rb"^oom_kill (\d+)$", file.read(), re.MULTILINE)
    except OSError:
        return None
    return int(count[1]) if count else None


# --- The host -----------------------------------------------------------------------------------


def host_is_stopping() -> bool:
    """Whether PID 1 takes the host down; False where it does not say."""
    if not os.path.isdir("/run/systemd/system"):
        return False
    read_fd, write_fd = os.pipe()
    command = ["systemctl", "is-system-running"]
    try:
        pid = os.posix_spawnp(
            command[0],
            command,
            {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            file_actions=[(os.POSIX_SPAWN_DUP2, write_fd, 1)],
            setsigmask=(),
        )
    except OSError:
        os.close(read_fd)
        return False
    finally:
        os.close(write_fd)
    answer = _read_until(read_fd, boottime_s() + SYSTEMCTL_DEADLINE_S)
    os.close(read_fd)
    _dismiss(pid)
    return answer.strip() == b"stopping"


def place_script(spec: Spec) -> bytes | None:
    """The script as a file of the user's own in our directory; None where there is none."""
    if spec.script is None:
        return None
    dir_fd = open_directory(spec.scripts_dir)
    try:
        found = os.fstat(dir_fd)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise OSError(errno.EPERM, f"{spec.scripts_dir} is not ours alone")
        remove_script(dir_fd, spec.label)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(spec.label, flags, 0o400, dir_fd=dir_fd)
        with open(fd, "wb") as file:
            file.write(spec.script)
            if spec.system:
                os.fchown(fd, spec.uid, -1)
    finally:
        os.close(dir_fd)
    return os.fsencode(f"{spec.scripts_dir}/{spec.label}")


def remove_script(dir_fd: int, label: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(label, dir_fd=dir_fd)


# --- The supervisor itself ----------------------------------------------------------------------


class Records:
    """What the supervisor publishes: room taken in advance, in order, retried until it is out."""

    def __init__(self, dir_fd: int, spec: Spec) -> None:
        self._dir_fd = dir_fd
        self._hint_socket = spec.hint_socket
        self._label = spec.label.encode()
        self._drafts: dict[str, Draft] = {}
        try:
            for name in (CLAIM, STARTED, ENDED, EXIT):
                self._drafts[name] = Draft(dir_fd, name, reserve=True)
        except OSError:
            self.discard()
            raise
        self._held: list[tuple[str, bytes]] = []
        self._retry_s = RETRY_MIN_S

    def claim(self) -> bool:
        own = process_stat(os.getpid())
        assert own is not None, "a process sees itself"
        record = {
            "by": "supervisor",
            "boot_id": boot_id(),
            "pid": os.getpid(),
            "start_ticks": own.start_ticks,
        }
        won = self._drafts.pop(CLAIM).link(encode(record))
        if won:
            self.hint()
        return won

    def publish(self, name: str, record: dict[str, Any]) -> None:
        """At once or OSError."""
        self._drafts[name].publish(encode(record))
        del self._drafts[name]
        self.hint()

    def hold(self, name: str, record: dict[str, Any]) -> None:
        """Keep it for flush(), behind what is held already."""
        self._held.append((name, encode(record)))

    def flush(self) -> float | None:
        """Seconds until the next try; None when nothing is held."""
        while self._held:
            name, data = self._held[0]
            try:
                self._drafts[name].publish(data)
            except OSError as error:
                if os.fstat(self._dir_fd).st_nlink == 0:
                    complain(f"{name} is dropped: the job directory was removed")
                    self._held.clear()
                    return None
                complain(f"{name} is held back: {error}")
                delay_s, self._retry_s = self._retry_s, min(2 * self._retry_s, RETRY_MAX_S)
                return delay_s
            del self._held[0], self._drafts[name]
            self.hint()
        return None

    def discard(self) -> None:
        for draft in self._drafts.values():
            draft.discard()
        self._drafts.clear()

    def hint(self) -> None:
        """Only a wake-up: the daemon reads the same files when nobody hints.

        The way leads over the directory: a socket's whole path may be longer than its address.
        """
        flags = _socket.SOCK_DGRAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC
        parent, name = os.path.split(self._hint_socket)
        try:
            directory = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                hint = _socket.socket(_socket.AF_UNIX, flags)
                try:
                    hint.sendto(self._label, f"/proc/self/fd/{directory}/{name}")
                finally:
                    hint.close()
            finally:
                os.close(directory)
        except OSError:
            pass


def complain(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"gpuschedd supervisor: {text}\n".encode("utf-8", "backslashreplace"))


class Supervisor:
    """From the claim to the exit record. Single-threaded; every wait is in _wait."""

    def __init__(self, dir_fd: int, spec: Spec, records: Records, signals: SignalQueue) -> None:
        self._dir_fd = dir_fd
        self._spec = spec
        self._records = records
        self._signals = signals
        self._alarms = Alarms()
        self._boot_id = boot_id()
        self._oom_kills = host_oom_kills()
        self._limit_s = spec.time_limit_s
        self._kill_round_s = KILL_ROUND_MIN_S
        self._seen: set[int] = set()
        self._signals_done = 0
        self._signals_due: list[int] = []
        # The child and how far it is: forked, at the gate (started), through the exec.
        self._main: int | None = None
        self._report_fd = -1
        self._gate_fd = -1
        self._report = b""
        self._stage = "start"
        self._logs: list[list[int] | None] = []
        self._started_s: float | None = None
        self._executed = False
        # The end.
        self._cause: str | None = None
        self._reason: str | None = None
        self._cancel: dict[str, Any] = {}
        self._terminated = False
        self._ended: dict[str, Any] | None = None
        self._abandoned = False

    # -- life

    def run(self, pam: Pam | None, script_path: bytes | None) -> int:
        self._take_signals()
        self._take_orders()
        if self._cause is None:
            self._begin(pam, script_path)
        while not self._is_over():
            self._wait()
            self._take_signals()
            self._take_report()
            self._take_alarms()
            self._reap()
        return self._finish()

    def _is_over(self) -> bool:
        if self._main is None:
            return self._cause is not None
        return self._ended is not None and not _has_children()

    def _begin(self, pam: Pam | None, script_path: bytes | None) -> None:
        if self._spec.no_exec:
            self._publish_started(os.getpid(), os.getsid(0))
            return
        report_fd, child_report_fd = os.pipe()
        child_gate_fd, gate_fd = os.pipe()
        child = Child(self._spec, pam, script_path)
        pid = os.fork()
        if pid == 0:
            child.run(child_report_fd, child_gate_fd)
        os.close(child_report_fd)
        os.close(child_gate_fd)
        os.set_blocking(report_fd, False)
        self._main, self._report_fd, self._gate_fd = pid, report_fd, gate_fd
        self._alarms.set("setup", boottime_s() + SETUP_DEADLINE_S)

    def _wait(self) -> None:
        poll = select.poll()
        for fd in (self._signals.fd, self._alarms.fd, self._report_fd):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        poll.poll()

    # -- what arrives

    def _take_signals(self) -> None:
        found = self._signals.drain()
        if found & {signal.SIGUSR1, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}:
            self._take_orders()
        if found & {signal.SIGTERM, signal.SIGINT} and self._may_end():
            self._end(CAUSE_STOPPED, "stopped from outside: its supervisor got SIGTERM")
            # Asked after the TERM was passed on: the answer may take its time.
            if host_is_stopping():
                self._cause, self._reason = CAUSE_SHUTDOWN, "the host goes down"

    def _take_orders(self) -> None:
        try:
            record = read_record(self._dir_fd, ORDERS)
            if record is not None:
                self._obey(record)
        except (OSError, ValueError, TypeError, LookupError) as error:
            complain(f"orders not understood: {error!r}")

    def _obey(self, record: dict[str, Any]) -> None:
        fields = Fields(record)
        limit_s, cancel = fields.optional_number("time_limit_s"), fields.take("cancel")
        numbered = [_numbered_signal(row) for row in fields.rows("signals")]
        by_whom: dict[str, Any] | None = None
        if cancel is not None:
            by_whom = {f"cancel_{key}": cancel[key] for key in ("by", "at_s", "reason")}
        if limit_s is not None and limit_s != self._limit_s:
            self._limit_s = limit_s
            self._set_limit()
        if by_whom is not None and self._may_end():
            self._cancel = by_whom
            self._end(CAUSE_CANCELLED, None)
        for number, signum in sorted(numbered):
            if number > self._signals_done:
                self._signals_done = number
                self._signals_due.append(signum)
        self._pass_signals()

    def _pass_signals(self) -> None:
        # Before the exec the child is still ours and would die of what the job may handle.
        if self._executed and self._ended is None:
            for signum in self._signals_due:
                self._signal_all(signum)
            self._signals_due.clear()

    def _take_report(self) -> None:
        if self._report_fd < 0:
            return
        try:
            part = os.read(self._report_fd, 2**16)
        except BlockingIOError:
            return
        self._report += part
        *lines, self._report = self._report.split(b"\n")
        for line in lines:
            self._take_report_line(json.loads(line))
        if not part:
            os.close(self._report_fd)
            self._report_fd = -1
            self._executed = True
            self._pass_signals()

    def _take_report_line(self, line: dict[str, Any]) -> None:
        if "stage" in line:
            self._stage = line["stage"]
        elif "ready" in line:
            self._logs = line["logs"]
            self._open_gate()
        elif "closed" in line:
            # Nothing has run: without a record the daemon starts the job again, once it may.
            complain(line["closed"])
            self._abandoned = True
        elif self._cause is None:
            self._reason = line["failed"]
            if self._started_s is None:
                self._cause = CAUSE_SETUP

    def _open_gate(self) -> None:
        self._alarms.clear("setup")
        assert self._main is not None, "only a child reports"
        if self._cause is not None or self._abandoned:
            return  # it was killed at the gate
        try:
            self._publish_started(self._main, self._main)
        except OSError as error:
            # Nothing has run: without `started` the daemon starts the job again.
            complain(f"started cannot be written: {error}")
            self._abandoned = True
            self._kill_main()
            return
        with contextlib.suppress(BrokenPipeError):  # somebody killed the child; it will be reaped
            os.write(self._gate_fd, b"g")
        os.close(self._gate_fd)

    def _publish_started(self, pid: int, session: int) -> None:
        found = process_stat(pid)
        now_s = boottime_s()
        record = {
            "pid": pid,
            "start_ticks": found.start_ticks if found else 0,
            "session": session,
            "at_s": time.time(),
            "boottime_s": now_s,
            "boot_id": self._boot_id,
        }
        self._records.publish(STARTED, record)
        self._started_s = now_s
        self._set_limit()

    def _set_limit(self) -> None:
        if self._started_s is None or self._cause is not None or self._ended is not None:
            return
        if self._limit_s is None or self._limit_s == float("inf"):
            self._alarms.clear("limit")
        else:
            self._alarms.set("limit", self._started_s + self._limit_s)

    def _take_alarms(self) -> None:
        for name in self._alarms.take_due():
            if name == "setup":
                reason = f"set-up took more than {SETUP_DEADLINE_S:.0f} s (at: {self._stage})"
                self._end(CAUSE_SETUP, reason[:REASON_CHARS_MAX])
            elif name == "limit":
                self._reach_limit()
            elif name == "kill":
                self._kill_round()
            elif name == "retry":
                self._flush()

    def _reach_limit(self) -> None:
        # A job that runs nothing has done all it was to do when its time is over.
        self._end(CAUSE_EXIT if self._spec.no_exec else CAUSE_TIME_LIMIT, None)

    # -- ending

    def _may_end(self) -> bool:
        return self._cause is None and self._ended is None

    def _end(self, cause: str, reason: str | None) -> None:
        """The first cause wins; it counts only while the main process is not reaped."""
        if not self._may_end():
            return
        self._cause, self._reason = cause, reason
        self._alarms.clear("limit", "setup")
        if self._main is None:
            return
        if self._started_s is None:
            self._kill_main()
        else:
            self._terminate_all()

    def _kill_main(self) -> None:
        """In the set-up, where nothing of the user's runs yet."""
        assert self._main is not None, "there is a child"
        os.kill(self._main, signal.SIGKILL)

    def _terminate_all(self) -> None:
        if self._terminated:
            return
        self._terminated = True
        self._alarms.set("kill", boottime_s() + self._spec.kill_grace_s)
        self._signal_all(signal.SIGTERM)

    def _signal_all(self, signum: int) -> None:
        own = os.getpid()
        for pid in descendants(own):
            found = process_stat(pid)
            if found is None or not found.alive:
                continue
            # A pid is ours to trust while we are the parent; below that a pidfd must prove it.
            if found.parent == own:
                _kill_quietly(os.kill, pid, signum)
            else:
                send_signal(pid, signum, found.start_ticks)
            if signum == signal.SIGTERM and found.state in "Tt":
                send_signal(pid, signal.SIGCONT, found.start_ticks)

    def _kill_round(self) -> None:
        """KILL everything below us, soon again while new processes show up."""
        own, own_group = os.getpid(), os.getpgrp()
        found = set()
        for pid in descendants(own):
            seen = process_stat(pid)
            if seen is None or not seen.alive:
                continue
            found.add(pid)
            if seen.parent == own and seen.group != own_group:
                # Our unreaped child keeps the group's number from being anybody else's, and a
                # group is signalled at once: a process forked meanwhile does not slip through.
                _kill_quietly(os.killpg, seen.group, signal.SIGKILL)
            send_signal(pid, signal.SIGKILL, seen.start_ticks)
        fresh = bool(found - self._seen) or not found
        self._seen |= found
        wait_s = KILL_ROUND_MIN_S if fresh else min(2 * self._kill_round_s, KILL_ROUND_MAX_S)
        self._kill_round_s = wait_s
        self._alarms.set("kill", boottime_s() + self._kill_round_s)

    def _reap(self) -> None:
        while (dead := _dead_child()) is not None:
            if dead == self._main:
                self._main_is_dead()
            else:
                os.waitpid(dead, 0)

    def _main_is_dead(self) -> None:
        """Reap the main process. What was ordered or due by now was taken before the reap."""
        self._take_report()
        self._take_signals()
        self._take_orders()
        if self._alarms.is_due("limit"):
            self._reach_limit()
        assert self._main is not None, "a main process died"
        _, status = os.waitpid(self._main, 0)
        at_s, now_s = time.time(), boottime_s()
        self._alarms.clear("limit", "setup")
        self._ended = self._ended_record(status, at_s, now_s)
        if self._leaves_no_record():
            self._abandoned = True
        else:
            self._records.hold(ENDED, self._ended)
            self._flush()
        if _has_children():
            self._terminate_all()

    def _leaves_no_record(self) -> bool:
        # Taken down with the host before anything ran: the daemon starts it again after the boot.
        return self._abandoned or (self._cause == CAUSE_SHUTDOWN and self._started_s is None)

    def _ended_record(self, status: int | None, at_s: float, now_s: float) -> dict[str, Any]:
        code = signum = None
        if status is not None and self._started_s is not None:
            signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        cause = self._cause
        if cause is None and self._started_s is None:
            cause, self._reason = CAUSE_SETUP, f"the set-up was killed (at: {self._stage})"
        elif cause is None:
            cause = CAUSE_EXIT if signum is None else CAUSE_SIGNAL
        return {
            "code": 0 if self._spec.no_exec and cause == CAUSE_EXIT else code,
            "signal": signum,
            "cause": cause,
            "reason": self._reason and self._reason[:REASON_CHARS_MAX],
            "cancel_by": None,
            "cancel_at_s": None,
            "cancel_reason": None,
            **self._cancel,
            "at_s": at_s,
            "boottime_s": now_s,
            "boot_id": self._boot_id,
        }

    def _flush(self) -> bool:
        """Whether all records are out; else another try is set."""
        delay_s = self._records.flush()
        if delay_s is not None:
            self._alarms.set("retry", boottime_s() + delay_s)
        return delay_s is None

    # -- the last record

    def _finish(self) -> int:
        self._alarms.clear("kill", "limit", "setup")
        if self._ended is None and not self._leaves_no_record():
            self._ended = self._ended_record(None, time.time(), boottime_s())
            self._records.hold(ENDED, self._ended)
        if self._leaves_no_record():
            self._records.discard()
            return EXIT_STORAGE if self._abandoned else EXIT_OK
        assert self._ended is not None, "a job that is over has ended"
        self._records.hold(EXIT, self._exit_record(self._ended))
        while not self._flush():
            self._wait_for_retry()
        self._records.discard()
        return EXIT_OK

    def _wait_for_retry(self) -> None:
        poll = select.poll()
        poll.register(self._alarms.fd, select.POLLIN)
        poll.poll()
        self._alarms.take_due()

    def _exit_record(self, ended: dict[str, Any]) -> dict[str, Any]:
        finished_at_s = time.time()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            **ended,
            "finished_at_s": finished_at_s,
            "cpu_user_s": used.ru_utime,
            "cpu_system_s": used.ru_stime,
            "max_rss_bytes": used.ru_maxrss * 1024,
            "oom": self._oom(ended),
        }

    def _oom(self, ended: dict[str, Any]) -> str | None:
        failed = ended["signal"] is not None or ended["code"] not in (None, 0)
        if not failed or ended["cause"] not in (CAUSE_EXIT, CAUSE_SIGNAL):
            return None
        if self._host_oom(ended["signal"]):
            return OOM_HOST
        answer = ask_child(lambda: scan_as_user(self._spec, self._logs), OOM_SCAN_DEADLINE_S)
        return OOM_UNKNOWN if answer is None else answer.decode() or None

    def _host_oom(self, signum: int | None) -> bool:
        kills = host_oom_kills()
        if kills is None or self._oom_kills is None or kills <= self._oom_kills:
            return False
        # A cgroup of its own counts this job alone; a shared one proves nothing by itself.
        return self._spec.launch == "pid1" or signum == signal.SIGKILL


def _numbered_signal(row: Any) -> tuple[int, int]:
    number, signum = row
    if type(number) is not int or type(signum) is not int or not 1 <= signum < signal.NSIG:
        raise ValueError(f"signals must be rows of number and signal, not {row!r}")
    return number, signum


def _kill_quietly(kill: Callable[[int, int], None], pid: int, signum: int) -> None:
    # Gone, or a program that the job was allowed to run as somebody else.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(pid, signum)


def _dead_child() -> int | None:
    """A child that waits to be reaped; it still is."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


# --- Start --------------------------------------------------------------------------------------


def supervise(dir_fd: int, spec: Spec, claimed: Callable[[], None]) -> int:
    """Claim and run; `claimed` is called once the attempt is ours and can start."""
    signals = SignalQueue()
    pam = Pam() if spec.system else None
    records = Records(dir_fd, spec)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    set_oom_score(-500 if spec.system else 0, None if spec.system else 0)
    if spec.system:
        # Its child holds the user's environment before it is the user's. A process that is the
        # user's anyway would only be hidden by it from its own daemon, where /proc hides any.
        prctl(PR_SET_DUMPABLE, 0)
    if not records.claim():
        records.discard()
        raise Refused(EXIT_CLAIM_LOST, "the claim is taken")
    # From here on nothing is imported.
    try:
        script_path = place_script(spec)
        claimed()
        return Supervisor(dir_fd, spec, records, signals).run(pam, script_path)
    finally:
        clear_script(spec)


def clear_script(spec: Spec) -> None:
    if spec.script is None:
        return
    try:
        dir_fd = open_directory(spec.scripts_dir)
        remove_script(dir_fd, spec.label)
        os.close(dir_fd)
    except OSError:
        pass  # the daemon removes it with the directory


def guarded(work: Callable[[], int]) -> int:
    """The exit status of work, with the reason of a failure on stderr."""
    try:
        return work()
    except Refused as refusal:
        complain(str(refusal))
        return refusal.status
    except OSError as error:
        complain(str(error))
        return EXIT_STORAGE if error.errno in STORAGE_ERRNOS else EXIT_BUG


def detached(dir_fd: int, spec: Spec) -> int:
    """Claim and run in a process of its own; the caller returns when the claim is decided."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_fd)
        if os.read(read_fd, 1):
            return EXIT_OK
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return status if status > 0 else EXIT_BUG
    os.close(read_fd)
    os.setsid()
    return guarded(lambda: _supervise_apart(dir_fd, spec, write_fd))


def _supervise_apart(dir_fd: int, spec: Spec, answer_fd: int) -> int:
    """Once claimed, stdout and stderr are a log in the job directory; a byte tells the caller."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    log_fd = os.open(LOG, flags, 0o600, dir_fd=dir_fd)

    def claimed() -> None:
        for fd in (1, 2):
            os.dup2(log_fd, fd, inheritable=False)
        os.close(log_fd)
        with contextlib.suppress(BrokenPipeError):  # the daemon died meanwhile; the job lives
            os.write(answer_fd, b"c")
        os.close(answer_fd)

    return supervise(dir_fd, spec, claimed)


def main(arguments: list[str]) -> int:
    detach = arguments[:1] == ["--detach"]
    paths = arguments[1:] if detach else arguments
    if len(paths) != 1:
        complain("usage: life.py [--detach] JOBDIR")
        return EXIT_SPEC_REFUSED
    close_all_except(())
    os.environ.clear()
    os.umask(0o077)
    path = os.path.abspath(paths[0])
    os.chdir("/")

    def work() -> int:
        try:
            dir_fd = open_directory(path)
        except FileNotFoundError:
            raise Refused(EXIT_NO_SPEC, f"there is no {path}") from None
        spec = load_spec(dir_fd)
        if os.path.basename(path) != spec.label:
            raise Refused(EXIT_SPEC_REFUSED, f"the spec is of {spec.label}, not of {path}")
        if detach:
            return detached(dir_fd, spec)
        return supervise(dir_fd, spec, lambda: None)

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
