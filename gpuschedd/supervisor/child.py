"""The child between fork and exec: becomes the user, opens the user's files, waits, execs."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat

from gpuschedd.supervisor.errors import ExecFailed, HostClosed, SetupFailed
from gpuschedd.supervisor.identity import become_user
from gpuschedd.supervisor.records import REASON_CHARS_MAX, display
from gpuschedd.supervisor.script import script_command
from gpuschedd.supervisor.syscalls import PR_SET_PDEATHSIG, close_all_except, prctl, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from gpuschedd.supervisor.pam import Pam
    from gpuschedd.supervisor.spec import Spec

CODE_NOT_EXECUTABLE, CODE_NOT_FOUND = 126, 127
DEFAULT_PATH = b"/usr/local/bin:/usr/bin:/bin"
# A job must not speak to PID 1 in the name of its unit.
UNIT_VARIABLES = (b"NOTIFY_SOCKET", b"WATCHDOG_PID", b"WATCHDOG_USEC", b"LISTEN_PID", b"LISTEN_FDS")


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
        try:
            os.write(self._report_fd, json.dumps(record).encode("ascii") + b"\n")
        except OSError:
            pass  # the supervisor is gone; so are we, soon

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


RECORD_VERSION = 1
