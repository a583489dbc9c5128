"""The job's program: looked up as execvp(3) does it, before the gate opens, and executed after."""

from __future__ import annotations

import errno
import os
import stat
import time

from gpuschedd.supervisor.errors import SHORT_ERRNOS, EnvironmentLost, ExecFailed, reason_of
from gpuschedd.supervisor.records import display

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

CODE_NOT_EXECUTABLE, CODE_NOT_FOUND = 126, 127
DEFAULT_PATH = b"/usr/local/bin:/usr/bin:/bin"
_AWAY_ERRNOS = frozenset(
    {
        *(errno.ESTALE, errno.ETIMEDOUT, errno.EIO, errno.ENODEV, errno.ENOTCONN),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EREMOTEIO),
    }
)
_FIRST_LINE_BYTES = 256
_EXEC_TRIES, _EXEC_PAUSE_S = 20, 0.25  # while the host is short of processes or memory


def require_program(argv: list[bytes], environment: dict[bytes, bytes], *, checked: bool) -> None:
    """EnvironmentLost where the command is not there for now.

    What tells of a place that is away counts, such as a server that does not answer. With `checked`
    the command was there at submit, so that its absence does as well.
    """
    path = _require("command", argv[0], environment, checked=checked)
    if path is not None:
        _require_interpreter(path, argv, environment, checked=checked)


def _require(
    what: str, name: bytes, environment: dict[bytes, bytes], *, checked: bool
) -> bytes | None:
    """Where it is; what comes behind that in PATH is nobody's business."""
    for path in _candidates(name, environment):
        if _is_there(what, path):
            return path
    if checked:
        raise EnvironmentLost(f"{what} {display(name)}", "not found (ENOENT)")
    return None


def _is_there(what: str, path: bytes) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        _require_answer(what, path, error)
        return False
    return True


def _require_answer(what: str, path: bytes, error: OSError) -> None:
    if error.errno in _AWAY_ERRNOS:
        raise EnvironmentLost(f"{what} {display(path)}", reason_of(error)) from error


def _require_interpreter(
    path: bytes, argv: list[bytes], environment: dict[bytes, bytes], *, checked: bool
) -> None:
    """Of a script, also of one that was captured: its interpreter is the command then."""
    words = interpreter_of(_first_line(path)) or argv
    if words is not argv:
        _require("interpreter", words[0], environment, checked=checked)
    if os.path.basename(words[0]) == b"env" and len(words) > 1 and _is_name(words[1]):
        _require("interpreter", words[1], environment, checked=checked)


def _is_name(word: bytes) -> bool:
    """Whether `env` takes the word for a command: no option of its own, and no variable."""
    return not word.startswith(b"-") and b"=" not in word


def _first_line(path: bytes) -> bytes:
    try:
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            return file.read(_FIRST_LINE_BYTES).split(b"\n", 1)[0] if is_file else b""
    except OSError as error:
        _require_answer("command", path, error)
        return b""


def _open_at_once(path: str | bytes, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO has no writer yet


def interpreter_of(line: bytes) -> list[bytes]:
    """The program that a first line names, and its one argument; [] where it names none."""
    return line[2:].strip(b" \t\r").split(None, 1) if line.startswith(b"#!") else []


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
            _execve_patiently(path, argv, environment)
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
    text = f"cannot execute {display(argv[0])}: {os.strerror(found.errno or 0)}"
    raise ExecFailed(CODE_NOT_EXECUTABLE, text)


def _execve_patiently(path: bytes, argv: list[bytes], environment: dict[bytes, bytes]) -> None:
    """Again while the host is short, or the file is being written: `started` stands already."""
    for tries_left in reversed(range(_EXEC_TRIES)):
        try:
            _execve(path, argv, environment)
        except OSError as error:
            if not tries_left or error.errno not in {*SHORT_ERRNOS, errno.ETXTBSY}:
                raise
        time.sleep(_EXEC_PAUSE_S)


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


RECORD_VERSION = 1
