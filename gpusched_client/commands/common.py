"""What the commands share of click: their errors, their help, and numbers with bounds.

Must not know any single command. How they answer is in answering.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from gpusched_client import __version__
from gpusched_client.commands.answering import EXIT_INTERRUPTED, answer, reader_left


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
        name, clicks_main = prog_name or self.name, super().main

        def work() -> object:
            try:
                return clicks_main(args, name, complete_var, standalone_mode=False, **extra)
            except click.ClickException as error:
                error.show()
                return error.exit_code
            except click.Abort:
                return EXIT_INTERRUPTED

        status = answer(name, work)
        if standalone_mode:
            sys.exit(status)
        return status

    def invoke(self, ctx: click.Context) -> Any:
        """Run the callback; a reader that left (`| head`) is not an error worth a word."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            return reader_left(str(ctx.command.name))


class Command(_Answering):
    """A command without subcommands."""


class Group(_Answering, click.Group):
    """A command of subcommands; theirs are click's plain ones."""


class IntRange(click.IntRange):
    """A whole number between two bounds; a refusal names them, as the help does."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            text = f"{value!r} is not a whole number from {self._describe_range()}"
            self.fail(text, param, ctx)

    def _describe_range(self) -> str:
        return f"{self.min} to {self.max}"


VERSION = click.version_option(__version__, message="%(prog)s %(version)s")
CONTEXT_SETTINGS = {"help_option_names": ["--help", "-h"], "max_content_width": 100}
