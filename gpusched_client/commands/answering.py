"""What all commands share and none needs click for: how they answer and how they fail.

stdout holds only the answer, stderr everything else; every error ends with its exit status and one
line. Must not know any single command, nor how words become options.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from gpusched_client.errors import GpuschedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpusched_client.client import Client

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_OUTPUT = 74


def answer(name: str | None, work: Callable[[], object]) -> int:
    """Do a command's work and give its exit status; what goes wrong is one line on stderr.

    The status is what `work` returns, 0 where that is no number.
    """
    _prepare_streams()
    _done.clear()
    try:
        result = work()
        sys.stdout.flush()
    except GpuschedError as error:
        print_err(f"{name}: {error.message}")
        return error.exit_status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return reader_left(name)
    except OSError as error:
        _reader_gone()
        where = f" to {error.filename}" if error.filename else ""
        why = f"cannot be written{where}: {error.strerror}"
        done = f"{_done[-1]}, but " if _done else ""
        print_err(f"{name}: {done}the answer {why}")
        return EXIT_OUTPUT
    return result if isinstance(result, int) else 0


def _prepare_streams() -> None:
    """Let any text be shown in any locale, and take the places of streams that are closed.

    Else the next file that is opened would be one of them. A closed stderr goes nowhere; an answer
    to a closed stdout is lost, and is an error as on a full disk.
    """
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(number, "w", errors="backslashreplace"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


_done: list[str] = []  # what has happened and is not undone where its answer is lost


def note_done(text: str) -> None:
    """Remember what has happened, for the case that the answer cannot be written."""
    _done.append(text)


def reader_left(name: str | None) -> int:
    """A reader that left is not worth a word, unless it was to read of what has happened."""
    status = _reader_gone()
    if _done:
        print_err(f"{name}: {_done[-1]}, but nobody reads the answer")
    return status


def _reader_gone() -> int:
    """Let the interpreter's last flush go nowhere instead of failing with a traceback."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):
        pass
    return EXIT_BROKEN_PIPE


def print_out(text: str) -> None:
    """Write the answer."""
    sys.stdout.write(text)


def print_err(text: str) -> None:
    """Write to stderr what is not the answer."""
    from gpusched_client.terms import printable

    with contextlib.suppress(OSError, ValueError):  # the last write of the answer will report it
        sys.stdout.flush()  # where both go to one place, they stay in order
    try:
        sys.stderr.write("\n".join(map(printable, text.splitlines())) + "\n")
        sys.stderr.flush()
    except OSError:
        pass  # nobody reads it


def tell_who_answered(command: str, client: Client) -> None:
    """Say once where it was not the system's daemon, or one whose GPUs are not real."""
    from gpusched_client import paths
    from gpusched_client.terms import Mode

    hello = client.hello()
    is_own = hello.mode == Mode.USER
    whose = "your own daemon" if is_own else "the system's daemon"
    if hello.simulated:
        print_err(f"{command}: {whose} answered; its GPUs are simulated")
    elif is_own and os.path.lexists(paths.SYSTEM_SOCKET):
        print_err(f"{command}: {whose} answered, not the system's")


def own_uid() -> int:
    """The uid the kernel tells the daemon."""
    return os.geteuid()


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is, or None."""
    if not sys.stdout.isatty():
        return None
    import shutil

    return shutil.get_terminal_size().columns
