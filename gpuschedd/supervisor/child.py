"""The child between fork and exec: becomes the user, opens the user's files, waits, execs."""

from __future__ import annotations

import errno
import json
import mmap
import os
import resource
import stat

from gpuschedd.supervisor.errors import (
    SHORT_ERRNOS,
    EnvironmentLost,
    ExecFailed,
    HostClosed,
    SetupFailed,
    lost_or_wrong,
    reason_of,
)
from gpuschedd.supervisor.identity import become_user
from gpuschedd.supervisor.program import execute, require_program
from gpuschedd.supervisor.records import REASON_CHARS_MAX, display
from gpuschedd.supervisor.script import script_command
from gpuschedd.supervisor.syscalls import PR_SET_PDEATHSIG, close_all_except, prctl, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from gpuschedd.supervisor.pam import Pam
    from gpuschedd.supervisor.spec import Spec

STAGE_BYTES = 2048
# A job must not speak to PID 1 in the name of its unit.
UNIT_VARIABLES = (b"NOTIFY_SOCKET", b"WATCHDOG_PID", b"WATCHDOG_USEC", b"LISTEN_PID", b"LISTEN_FDS")


# The kernel counts it in nanoseconds: one that overflows there is over at the first tick.
CPU_LIMIT_S_MAX = 2**33


def open_log(what: str, path: bytes, truncate: bool) -> int:
    """A log for appending, as the user. Never waits: a FIFO without reader is an error.

    A symbolic link is followed: with the user's own rights it is the user's own business.
    """
    shown = f"{what} {display(path)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags | (os.O_TRUNC if truncate else 0), 0o666)
    except OSError as error:
        raise _no_log(shown, path, error) from error
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFIFO, stat.S_IFCHR):
        raise SetupFailed(f"{shown}: neither a regular file nor a FIFO nor a terminal-like device")
    if kind == stat.S_IFCHR:
        try:
            os.write(fd, b"")  # /dev/full opens like any other
        except OSError as error:
            raise SetupFailed(f"{shown}: {reason_of(error)}") from error
    os.set_blocking(fd, True)
    return fd


def _no_log(shown: str, path: bytes, error: OSError) -> SetupFailed:
    if error.errno == errno.ENXIO:
        return SetupFailed(f"{shown}: a FIFO that nobody reads, or a socket")
    if error.errno == errno.ENOENT:
        directory = display(os.path.dirname(path) or b".")
        return EnvironmentLost(shown, f"directory {directory} does not exist (ENOENT)")
    if error.errno in (errno.EACCES, errno.EPERM) and os.path.lexists(path):
        return SetupFailed(f"{shown}: {reason_of(error)}")  # its own rights, not a server's
    return lost_or_wrong(shown, error)


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
        if number == resource.RLIMIT_CPU:
            soft, hard = (-1 if each > CPU_LIMIT_S_MAX else each for each in (soft, hard))
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


def _of_host(error: OSError) -> dict[str, str]:
    """The report of an error that no step has named: the host may be short of something."""
    failed = f"set-up failed: {error!r}"[:REASON_CHARS_MAX]
    if error.errno in SHORT_ERRNOS:
        return {"failed": f"the host: {reason_of(error)}", "place": "the host"}
    return {"failed": failed}


class Stage:
    """What the child is about to do, in memory that both have: to note it wakes nobody."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, STAGE_BYTES)

    def enter(self, text: str) -> None:
        """The child's part."""
        noted = text[:REASON_CHARS_MAX].encode("utf-8", "backslashreplace")
        self._memory[:] = noted[:STAGE_BYTES].ljust(STAGE_BYTES, b"\0")

    def __str__(self) -> str:
        return self._memory[:].rstrip(b"\0").decode("utf-8", "replace") or "start"


class Child:
    """The forked child: becomes the user, sets up, waits at the gate, execs.

    It reports to the supervisor in JSON lines: ready, or failed with the reason; and notes a stage
    before each step that may hang. The exec closes the pipe.
    """

    def __init__(self, spec: Spec, pam: Pam | None, script_path: bytes | None) -> None:
        self._spec = spec
        self._pam = pam
        self._script_path = script_path
        self._parent = os.getpid()
        self._report_fd = -1
        self.stage = Stage()

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
        except EnvironmentLost as lost:
            place = lost.place[:REASON_CHARS_MAX]
            self._report(failed=str(lost)[:REASON_CHARS_MAX], place=place)
        except SetupFailed as failure:
            self._report(failed=str(failure)[:REASON_CHARS_MAX])
        except OSError as error:
            self._report(**_of_host(error))
        except BaseException as error:
            self._report(failed=f"set-up failed: {error!r}"[:REASON_CHARS_MAX])
        finally:
            os._exit(code)

    def _report(self, **record: Any) -> None:
        try:
            os.write(self._report_fd, json.dumps(record).encode("ascii") + b"\n")
        except OSError:
            pass  # the supervisor is gone; so are we, soon

    def _set_up(self, gate_fd: int) -> None:
        self._reset(gate_fd)
        self.stage.enter("account and session")
        become_user(self._spec, self._pam)
        # A PAM module may leave a descriptor behind.
        close_all_except({self._report_fd, gate_fd})
        os.umask(self._spec.umask)
        self._change_directory()
        logs = self._open_logs()
        lower_limits(self._spec.rlimits)
        os.setpriority(
            os.PRIO_PROCESS, 0, max(self._spec.niceness, os.getpriority(os.PRIO_PROCESS, 0))
        )
        if self._spec.cpu_set:
            try:
                os.sched_setaffinity(0, self._spec.cpu_set)
            except OSError:
                pass  # none of them is this host's, or this cgroup's
        if self._spec.launch == "direct":
            # After the last change of uid, which clears it. A parent that died before this line
            # sends nothing, hence the second look.
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._parent:
                os._exit(1)
        argv, environment = self._command(), job_environment(self._spec)
        self.stage.enter(f"command {display(argv[0])}")
        require_program(argv, environment, checked=self._spec.checked)
        self._report(ready=True, logs=logs)

    def _reset(self, gate_fd: int) -> None:
        os.setsid()
        for signum in range(1, signal.NSIG):
            try:
                signal.signal(signum, signal.SIG_DFL)
            except (OSError, ValueError):
                pass  # KILL, STOP, the C library's own
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        close_all_except({self._report_fd, gate_fd})

    def _change_directory(self) -> None:
        self.stage.enter(f"directory {display(self._spec.cwd)}")
        try:
            os.chdir(self._spec.cwd)
        except (OSError, ValueError) as error:
            place = f"directory {display(self._spec.cwd)}"
            if isinstance(error, OSError) and error.errno == errno.ELOOP:
                # Of a link that is being replaced, or an automount: no path is one by itself.
                raise EnvironmentLost(place, reason_of(error)) from error
            raise lost_or_wrong(place, error) from error

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
        self.stage.enter(f"{what} {display(path)}")
        try:
            fd = open_log(what, path, truncate)
        except ValueError as error:
            raise SetupFailed(f"{what}: {error}") from error
        os.dup2(fd, target, inheritable=True)
        os.close(fd)
        return log_identity(target)

    def _command(self) -> list[bytes]:
        if self._script_path is not None and self._spec.script is not None:
            return script_command(self._spec.script, self._script_path, self._spec.argv)
        return list(self._spec.argv)

    def _exec(self) -> NoReturn:
        execute(self._command(), job_environment(self._spec))


RECORD_VERSION = 1
