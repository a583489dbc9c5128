"""The options of gsub and gctl that stand in the table of job options, made from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpusched_client.commands.common import IntRange
from gpusched_client.errors import GpuschedError
from gpusched_client.wire.fields import ChoiceReader, IntegerReader
from gpusched_client.wire.job_options import OPTIONS, JobOption, OtherForm, Section

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    _NumberType = click.ParamType[float | str]
else:
    _NumberType = click.ParamType  # not generic in older clicks


class Amount(_NumberType):
    """A value that a row of the table reads from text."""

    def __init__(self, name: str, parse: Callable[[str], float | str]) -> None:
        self.name, self._parse = name, parse

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | str:
        """The amount; a refusal has the words of the row."""
        if isinstance(value, (int, float)):
            return value
        try:
            return self._parse(value)
        except GpuschedError as error:
            self.fail(error.message, param, ctx)


def submit_options(section: Section) -> Callable[[F], F]:
    """All options of one section of gsub's help, in the order of the table."""
    rows = [row for row in OPTIONS.values() if row.section is section]

    def decorate(command: F) -> F:
        for row in reversed(rows):  # decorators are applied from the last to the first
            if row.other_form is not None:
                command = _other_form(row.other_form)(command)
            command = _option(row, row.help, row.default, shows_default=row.shows_default)(command)
        return command

    return decorate


def asked_by(options: dict[str, Any]) -> dict[str, Any]:
    """The keywords of job_request, of the values that click read. Raises UsageError."""
    asked = {keyword: options[keyword] for keyword in OPTIONS}
    for row in OPTIONS.values():
        form = row.other_form
        if form is None or options[form.keyword] is None:
            continue
        if asked[row.keyword] is not None:
            raise click.UsageError(
                f"{row.longest_flag} and {form.flag} say the same; give one of them"
            )
        asked[row.keyword] = options[form.keyword]
    return asked


def _other_form(form: OtherForm) -> Callable[[F], F]:
    kind = Amount(form.metavar.lower(), form.parse)
    return click.option(form.flag, form.keyword, type=kind, metavar=form.metavar, help=form.help)


def change_option(keyword: str, help_text: str) -> Callable[[F], F]:
    """The same option where a job is changed: what is not given stays as it is."""
    return _option(OPTIONS[keyword], help_text, None)


def _option(
    row: JobOption, help_text: str, default: Any, *, shows_default: bool = False
) -> Callable[[F], F]:
    names = (*row.flags, row.keyword)
    if row.is_flag:
        return click.option(*names, is_flag=True, help=help_text)
    return click.option(
        *names,
        type=_type_of(row),
        metavar=row.metavar,
        default=default,
        show_default=shows_default,
        help=help_text,
    )


def _type_of(row: JobOption) -> click.ParamType[Any] | None:
    """How click reads it: as the row says, else by the type and limits of its reader."""
    if row.parse is not None:
        return Amount(str(row.metavar).lower(), row.parse)
    if isinstance(row.reader, IntegerReader):
        return IntRange(row.reader.low, row.reader.high)
    if isinstance(row.reader, ChoiceReader):
        return click.Choice(row.reader.words)
    return None
