"""The commands as they are installed: what is typed most, and by scripts, is done without click.

Importing click takes as long as all the rest of a command's start. So the plain forms are
recognised here; whatever is not plain (help, a mistake, a rare option, a value in doubt) goes to
the click command as it was typed, before anything was asked or said. What both do is written once,
in listing.py, submitting.py and cancelling.py.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from gpusched_client.commands.answering import answer, own_uid
from gpusched_client.errors import GpuschedError
from gpusched_client.wire.fields import ChoiceReader, IntegerReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpusched_client.submission.script import Script
    from gpusched_client.wire.job_options import JobOption

    Work = Callable[[], int]

_DIGITS_MAX = 18
_GSUB_FLAGS = {
    "--wait": "wait",
    "--parsable": "parsable",
    "--json": "as_json",
    "--dry-run": "dry_run",
    "--no-check": "no_check",
}
_GSUB_CHDIR = ("-D", "--chdir")
_NOT_PLAIN = {"line": None, "script_file": None}  # gsub's other ways to name what runs


def gq() -> NoReturn:
    """`gq`, `gq --me` and `gq --status ID`; else the click command."""
    work = _plain("gq", plain_gq)
    if work is not None:
        sys.exit(answer("gq", work))
    from gpusched_client.commands.gq import cli

    sys.exit(cli())


def gsub() -> NoReturn:
    """A command or script, and options of the table before it; else the click command."""
    work = _plain("gsub", plain_gsub)
    if work is not None:
        sys.exit(answer("gsub", work))
    from gpusched_client.commands.gsub import cli

    sys.exit(cli())


def gcancel() -> NoReturn:
    """`gcancel ID...`; else the click command."""
    work = _plain("gcancel", plain_gcancel)
    if work is not None:
        sys.exit(answer("gcancel", work))
    from gpusched_client.commands.gcancel import cli

    sys.exit(cli())


def _plain(name: str, recognise: Callable[[Sequence[str]], Work | None]) -> Work | None:
    """The work that was typed, None where that is click's, as what a shell completes is."""
    return None if f"_{name.upper()}_COMPLETE" in os.environ else recognise(sys.argv[1:])


def _is_id(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) <= _DIGITS_MAX and int(word) > 0


# ------------------------------------------------------------------------------- gq, gcancel


def plain_gq(words: Sequence[str]) -> Work | None:
    """What `gq` with these words does, where they are plain."""
    if not words or list(words) == ["--me"]:
        return lambda: _list([str(own_uid())] if words else None)
    if len(words) == 2 and words[0] == "--status" and _is_id(words[1]):
        return lambda: _status(int(words[1]))
    return None


def _list(users: Sequence[str] | None) -> int:
    from gpusched_client.client import Client
    from gpusched_client.commands.listing import EVERYBODY, show_and_tell, show_list

    with Client() as client:
        show_and_tell(client, lambda: show_list(client, {**EVERYBODY, "users": users}))
    return 0


def _status(job_id: int) -> int:
    from gpusched_client.client import Client
    from gpusched_client.commands.listing import show_status

    with Client() as client:
        show_status(client, job_id)
    return 0


def plain_gcancel(words: Sequence[str]) -> Work | None:
    """What `gcancel` with these words does, where they are plain."""
    if not words or not all(map(_is_id, words)):
        return None
    ids = tuple(dict.fromkeys(map(int, words)))

    def work() -> int:
        from gpusched_client.commands.cancelling import cancel

        return cancel(lambda _client: ids)

    return work


# -------------------------------------------------------------------------------------- gsub


class _InDoubt(Exception):
    """The words are not plain."""


def plain_gsub(words: Sequence[str]) -> Work | None:
    """What `gsub` with these words does, where they are plain."""
    try:
        options = _plain_options(words)
        script = _plain_script(options["words"])
    except (GpuschedError, _InDoubt):
        return None

    def work() -> int:
        from gpusched_client.commands.submitting import dry_run, request_of, submit
        from gpusched_client.wire.job_options import OPTIONS

        request = request_of(script, options, {keyword: options[keyword] for keyword in OPTIONS})
        return dry_run(request, options) if options["dry_run"] else submit(request, options)

    return work


def _plain_options(words: Sequence[str]) -> dict[str, Any]:
    """The values of gsub's options by name, `words` being the command and its arguments."""
    from gpusched_client.wire.job_options import OPTIONS

    rows = {flag: row for row in OPTIONS.values() for flag in row.flags}
    options = {row.keyword: row.default for row in OPTIONS.values()} | _NOT_PLAIN
    options |= dict.fromkeys(_GSUB_FLAGS.values(), False) | {"chdir": None}
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "--":
        name, value = _parted(left.pop(0))
        row = rows.get(name)
        if name in _GSUB_FLAGS or (row is not None and row.is_flag):
            if value is not None:
                raise _InDoubt
            options[_GSUB_FLAGS[name] if row is None else row.keyword] = True
        elif row is not None or name in _GSUB_CHDIR:
            if value is None:
                value = left.pop(0) if left else ""
            options["chdir" if row is None else row.keyword] = _plain_value(row, value)
        else:
            raise _InDoubt
    if options["parsable"] and options["as_json"]:
        raise _InDoubt
    options["words"] = tuple(left[1:] if left[:1] == ["--"] else left)
    return options


def _parted(word: str) -> tuple[str, str | None]:
    """An option's name, and the value in the same word, where there is one."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        return name, value if equals else None
    return word[:2], word[2:] or None


def _plain_value(row: JobOption | None, value: str) -> float | str:
    """The value of an option as click would read it; `row` None: of one that is any text."""
    if not value or value.startswith("-"):
        raise _InDoubt
    if row is None:
        return value
    if row.parse is not None:
        return row.parse(value)
    if isinstance(row.reader, IntegerReader):
        if not (value.isascii() and value.isdecimal() and len(value) <= _DIGITS_MAX):
            raise _InDoubt
        if not row.reader.low <= int(value) <= row.reader.high:
            raise _InDoubt
        return int(value)
    if isinstance(row.reader, ChoiceReader) and value not in row.reader.words:
        raise _InDoubt
    return value


def _plain_script(words: Sequence[str]) -> Script | None:
    """The script that the first word names, if it does.

    One with options in it, or behind it, or with lines that look like some, is not plain.
    """
    from gpusched_client.submission.script import script_named

    if not words or words[0] in ("", "-"):
        raise _InDoubt
    script = script_named(words[0])
    if script is not None:
        has_options = any(word.startswith("-") for word in words[1:])
        if has_options or script.lines or script.slurm or script.warnings:
            raise _InDoubt
    return script
