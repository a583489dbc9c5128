"""What all commands share: how they answer, how they fail, and how option values are read.

stdout holds only the answer, stderr the rest; every error ends with its exit status and one line.
Must not know any single command.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from gpusched_client import units
from gpusched_client.errors import GpuschedError, Invalid
from gpusched_client.terms import printable
from gpusched_client.wire.limits import UNLIMITED_S

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_OUTPUT = 74


class _Answering(click.Command):
    """A click command whose errors are ours: one line on stderr and the exit status of its kind."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command; with standalone_mode, end the process with its status."""
        _prepare_streams()
        status = self._status(args, prog_name or self.name, complete_var, **extra)
        if standalone_mode:
            sys.exit(status)
        return status

    def _status(
        self,
        args: Sequence[str] | None,
        name: str | None,
        complete_var: str | None,
        **extra: Any,
    ) -> int:
        try:
            result = super().main(args, name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except GpuschedError as error:
            note(f"{name}: {error.message}")
            return error.exit_status
        except (click.Abort, KeyboardInterrupt):
            return EXIT_INTERRUPTED
        except BrokenPipeError:
            return _reader_gone()
        except OSError as error:
            _reader_gone()
            where = f" to {error.filename}" if error.filename else ""
            note(f"{name}: cannot write the answer{where}: {error.strerror}")
            return EXIT_OUTPUT
        return result if isinstance(result, int) else 0

    def invoke(self, ctx: click.Context) -> Any:
        """Run the callback; a reader that left (`| head`) is no error worth a word."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            return _reader_gone()


class Command(_Answering):
    """A command without subcommands."""


class Group(_Answering, click.Group):
    """A command of subcommands; theirs are click's plain ones."""


def _prepare_streams() -> None:
    """Let any text be shown in any locale, and let a closed stream be one that goes nowhere."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # open to the end
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _reader_gone() -> int:
    """Let the interpreter's last flush go nowhere instead of failing with a traceback."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):
        pass
    return EXIT_BROKEN_PIPE


def answer(text: str) -> None:
    """Write the answer."""
    sys.stdout.write(text)


def note(text: str) -> None:
    """Tell the person something that is not the answer."""
    with contextlib.suppress(OSError, ValueError):  # whoever writes the answer last tells of it
        sys.stdout.flush()  # where both go to one place, what was said first comes first
    try:
        sys.stderr.write("\n".join(map(printable, text.splitlines())) + "\n")
        sys.stderr.flush()
    except OSError:
        pass  # nobody reads it


if TYPE_CHECKING:
    _IntegerType = click.ParamType[int]
else:
    _IntegerType = click.ParamType  # not generic in older clicks


class Whole(click.IntRange):
    """A whole number between two bounds; a refusal names them, as the help does."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            text = f"{value!r} is not a whole number from {self._describe_range()}"
            self.fail(text, param, ctx)

    def _describe_range(self) -> str:
        return f"{self.min} to {self.max}"


class _Amount(_IntegerType):
    """A value that units reads."""

    def __init__(self, name: str, parse: Callable[[str], int]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return self._parse(value)
        except GpuschedError as error:
            self.fail(error.message, param, ctx)


def _time_limit(text: str) -> int:
    seconds = units.parse_duration(text)
    if seconds == 0:
        raise Invalid(f"{text!r} is no time at all; use unlimited for no limit")
    return UNLIMITED_S if seconds is None else seconds


def _vram(text: str) -> int:
    size = units.parse_bytes(text)
    if size == 0:
        raise Invalid(f"{text!r} is no memory at all; leave it out to take whole GPUs")
    return size


def _host_memory(text: str) -> int:
    size = units.parse_bytes(text)
    if size < units.MIB:
        raise Invalid(f"{text!r} is too little to start a process; leave it out for the default")
    return size


MEMORY = _Amount("size", _vram)
HOST_MEMORY = _Amount("size", _host_memory)
TIME_LIMIT = _Amount("time", _time_limit)


VERSION = click.version_option(None, package_name="gpuschedd", message="%(prog)s %(version)s")
CONTEXT_SETTINGS = {"help_option_names": ["--help", "-h"], "max_content_width": 100}


def own_uid() -> int:
    """The uid the kernel tells the daemon."""
    return os.geteuid()


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is, or None."""
    if not sys.stdout.isatty():
        return None
    import shutil

    return shutil.get_terminal_size().columns
