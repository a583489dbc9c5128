"""gq: which jobs run, which wait and why; one job in full; the GPUs; the fair-share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpusched_client.commands.answering import own_uid, print_err, print_out, terminal_width
from gpusched_client.commands.common import CONTEXT_SETTINGS, VERSION, Command, IntRange
from gpusched_client.commands.listing import (
    show_and_tell,
    show_jobs,
    show_list,
    show_status,
    view,
)
from gpusched_client.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpusched_client.client import Client
    from gpusched_client.wire.job_messages import JobView


@click.command(
    cls=Command,
    name="gq",
    context_settings=CONTEXT_SETTINGS,
    epilog="Jobs are written 7, 1-3,7, @ (your last job), @~1 (the one before). "
    "A * marks your own.",
)
@click.option("--me", is_flag=True, help="Only your jobs.")
@click.option("-u", "--user", metavar="USERS", help="Only jobs of these users.")
@click.option("-t", "--state", metavar="STATES", help="Only these states, such as PD,R or final.")
@click.option("--name", metavar="NAME", help="Only jobs of this name.")
@click.option(
    "-n",
    "--limit",
    type=IntRange(1, 1000),
    metavar="N",
    help="Show so many (50; with --json 1000).",
)
@click.option("-o", "--format", "columns", metavar="COLUMNS", help="Such as JOBID,NAME,ST,EXIT.")
@click.option("--status", metavar="ID", help="One word: running, success or failed.")
@click.option("--gpus", is_flag=True, help="The GPUs instead of the jobs.")
@click.option("--usage", is_flag=True, help="Fair-share of each user, and how good guesses were.")
@click.option("--why", metavar="ID", help="Why that job was placed before others.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
@VERSION
@click.argument("words", nargs=-1, metavar="[IDS]...")
def cli(words: tuple[str, ...], **options: Any) -> int:
    """Show everybody's live jobs and those that ended in the last 10 minutes.

    With one id, explain that job: why it waits, when it starts, how it ended.
    """
    _check(words, options)
    from gpusched_client.client import Client

    with Client() as client:
        if options["status"] is not None:
            show_status(client, _one_id(client, options, "status"), as_json=options["as_json"])
            return 0
        if options["why"] is not None:
            _why(client, options)
            return 0
        show_and_tell(client, lambda: _show_asked(client, words, options))
    return 0


def _show_asked(client: Client, words: Sequence[str], options: dict[str, Any]) -> None:
    if options["gpus"]:
        _gpus(client, options)
    elif options["usage"]:
        _usage(client, options)
    elif words:
        _named(client, words, options)
    else:
        show_list(
            client,
            _filters(options),
            options["limit"],
            columns=_columns(options),
            as_json=options["as_json"],
        )


def _check(words: Sequence[str], options: dict[str, Any]) -> None:
    """Refuse options that exclude each other, before the daemon is asked."""
    kinds = [name for name in ("gpus", "usage", "status", "why") if options[name]]
    filters = [name for name in ("me", "user", "state", "name", "limit") if options[name]]
    if len(kinds) + bool(words) > 1:
        raise click.UsageError("ids, --gpus, --usage, --status and --why exclude each other.")
    if (kinds or words) and filters:
        raise click.UsageError(f"--{filters[0]} narrows the list of jobs and fits nothing else.")
    if options["user"] is not None and not all(map(str.strip, options["user"].split(","))):
        raise click.UsageError(f"-u {options['user']!r} names no user; leave it out for all.")
    if options["me"] and options["user"]:
        raise click.UsageError("--me and -u exclude each other.")


def _gpus(client: Client, options: dict[str, Any]) -> None:
    from gpusched_client.output.json import json_text
    from gpusched_client.output.status import gpus_table
    from gpusched_client.terms import printable

    result = client.gpus_result()
    gpus = result.gpus
    print_out(
        json_text({"gpus": gpus}) if options["as_json"] else gpus_table(gpus, terminal_width())
    )
    if result.problem is not None:
        print_err(f"gq: {printable(result.problem)}")


def _usage(client: Client, options: dict[str, Any]) -> None:
    from gpusched_client.output.json import json_text
    from gpusched_client.output.status import usage_table

    users = client.usage()
    as_json = options["as_json"]
    print_out(json_text({"users": users}) if as_json else usage_table(users, terminal_width()))


def _ids(client: Client, words: Iterable[str]) -> tuple[int, ...]:
    from gpusched_client.commands.selectors import named_ids

    return named_ids(client, words)


def _why(client: Client, options: dict[str, Any]) -> None:
    from functools import partial

    from gpusched_client.output.json import json_text
    from gpusched_client.output.text import time_text
    from gpusched_client.output.why import why_text

    why = client.why(_one_id(client, options, "why"))
    clock = partial(time_text, now_s=view().now_s, exact=True)
    print_out(json_text(why) if options["as_json"] else why_text(why, clock))


def _one_id(client: Client, options: dict[str, Any], option: str) -> int:
    ids = _ids(client, [options[option]])
    if len(ids) != 1:
        named = f"{options[option]!r} names {len(ids)} jobs; name one"
        raise click.BadParameter(named, param_hint=f"--{option}")
    return ids[0]


def _named(client: Client, words: Sequence[str], options: dict[str, Any]) -> None:
    """One job in full, or a table of several."""
    ids = _ids(client, words)
    if len(ids) == 1 and options["columns"] is None:
        from gpusched_client.output.job import job_detail
        from gpusched_client.output.json import json_text

        job = client.job(ids[0])
        # With all about it, and in the one shape of every list of jobs.
        as_json = options["as_json"]
        print_out(json_text({"jobs": [job], "total": 1}) if as_json else job_detail(job, view()))
        return
    from gpusched_client.output.outcomes import ranges_text
    from gpusched_client.wire.limits import IDS_MAX

    jobs: list[JobView] = []
    for start in range(0, len(ids), IDS_MAX):
        jobs += client.jobs(ids[start : start + IDS_MAX]).jobs
    show_jobs(
        sorted(jobs, key=lambda job: job.job_id),
        len(jobs),
        columns=_columns(options),
        as_json=options["as_json"],
    )
    missing = set(ids) - {job.job_id for job in jobs}
    if missing:
        raise NotFound(f"no such job: {ranges_text(sorted(missing))}")


def _filters(options: dict[str, Any]) -> dict[str, Any]:
    """The filters that the daemon applies."""
    from gpusched_client.terms import parse_states

    users = [str(own_uid())] if options["me"] else None
    if options["user"]:
        users = [
            str(own_uid()) if user == "me" else user.strip() for user in options["user"].split(",")
        ]
    states = None if options["state"] is None else parse_states(options["state"])
    return {"users": users, "states": states, "name": options["name"]}


# squeue's format letters, which many people know by heart
_LETTERS = {
    "i": "JOBID", "A": "JOBID", "j": "NAME", "u": "USER", "t": "ST", "T": "STATE", "M": "ELAPSED",
    "l": "LIMIT", "S": "START", "R": "GPU/REASON", "r": "REASON", "b": "GPUS", "Q": "PRIORITY",
    "V": "SUBMITTED", "e": "ENDED", "o": "COMMAND", "Z": "DIRECTORY", "U": "UID", "y": "NICE",
}  # fmt: skip


def _columns(options: dict[str, Any]) -> Sequence[str] | None:
    """Columns by name, separated by commas or spaces, or by squeue's letters ("%i %j %t")."""
    text = options["columns"]
    if text is None or options["as_json"]:
        return None
    from gpusched_client.output.job import COLUMNS

    columns = []
    for word in text.replace(",", " ").split():
        name = _LETTERS.get(word.lstrip("%.0123456789")) if word.startswith("%") else word.upper()
        if name not in COLUMNS:
            raise click.BadParameter(
                f"{word!r} is not a column; use {', '.join(COLUMNS)}", param_hint="--format"
            )
        columns.append(name)
    if not columns:
        raise click.BadParameter("no column", param_hint="--format")
    return columns


if __name__ == "__main__":
    cli()
