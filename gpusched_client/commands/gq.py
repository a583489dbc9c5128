"""gq: which jobs run, which wait and why; one job in full; the GPUs; the fair-share."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from gpusched_client.commands.common import (
    CONTEXT_SETTINGS,
    VERSION,
    Command,
    IntRange,
    own_uid,
    print_err,
    print_out,
    tell_who_answered,
    terminal_width,
)
from gpusched_client.errors import GpuschedError, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpusched_client.client import Client
    from gpusched_client.output.job import View
    from gpusched_client.wire.job_messages import JobView

RECENT_S = 600  # ended jobs stay visible for so long
SHOWN_MAX = 50


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
            _status(client, options)
            return 0
        if options["why"] is not None:
            _why(client, options)
            return 0
        try:
            _show_asked(client, words, options)
        except NotFound:  # it may be another daemon's
            with suppress(GpuschedError):  # that error is the one to tell
                tell_who_answered("gq", client)
            raise
        with suppress(GpuschedError):  # what was asked is shown
            tell_who_answered("gq", client)
    return 0


def _show_asked(client: Client, words: Sequence[str], options: dict[str, Any]) -> None:
    if options["gpus"]:
        _gpus(client, options)
    elif options["usage"]:
        _usage(client, options)
    elif words:
        _named(client, words, options)
    else:
        _listing(client, options)


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


def _view() -> View:
    import os
    import time

    from gpusched_client.output.job import View

    host = os.uname().nodename
    return View(now_s=time.time(), uid=own_uid(), width=terminal_width(), host=host)


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


def _status(client: Client, options: dict[str, Any]) -> None:
    from gpusched_client.output.text import status_word

    word = status_word(client.job(_one_id(client, options, "status")))
    if options["as_json"]:
        from gpusched_client.output.json import json_text

        print_out(json_text({"status": word}))
    else:
        print_out(f"{word}\n")


def _why(client: Client, options: dict[str, Any]) -> None:
    from functools import partial

    from gpusched_client.output.json import json_text
    from gpusched_client.output.text import time_text
    from gpusched_client.output.why import why_text

    why = client.why(_one_id(client, options, "why"))
    clock = partial(time_text, now_s=_view().now_s, exact=True)
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
        print_out(json_text({"jobs": [job], "total": 1}) if as_json else job_detail(job, _view()))
        return
    from gpusched_client.output.outcomes import ranges_text
    from gpusched_client.wire.limits import IDS_MAX

    jobs: list[JobView] = []
    for start in range(0, len(ids), IDS_MAX):
        jobs += client.jobs(ids[start : start + IDS_MAX]).jobs
    _show(sorted(jobs, key=lambda job: job.job_id), len(jobs), options)
    missing = set(ids) - {job.job_id for job in jobs}
    if missing:
        raise NotFound(f"no such job: {ranges_text(sorted(missing))}")


def _listing(client: Client, options: dict[str, Any]) -> None:
    from gpusched_client.wire.limits import RESPONSE_JOBS_MAX

    limit = options["limit"] or (1000 if options["as_json"] else SHOWN_MAX)
    filters = _filters(options)
    # Jobs whose states are asked for by name are shown however old they are.
    recent_s = RECENT_S if filters["states"] is None else None
    has_head = all(state.is_live for state in filters["states"] or ())
    # Of those that ended, the newest ends are shown: they are found among the newest jobs.
    asked = limit if has_head else RESPONSE_JOBS_MAX
    result = client.jobs(ended_within_s=recent_s, **filters, limit=asked)
    jobs = sorted(result.jobs, key=_listing_order)
    if result.total > len(jobs) and has_head:
        jobs = _head_of_long_list(client, filters, limit)
    _show(_first_of(jobs, limit), result.total, options)
    if not jobs:
        _warn_of_unknown(filters["users"] or ())


def _warn_of_unknown(users: Iterable[str]) -> None:
    """An empty list may come from a typo; a user without an account may still have jobs here."""
    import pwd

    for user in users:
        if not user.isdecimal():
            try:
                pwd.getpwnam(user)
            except KeyError:
                print_err(f"gq: no user is named {user!r} here")


def _first_of(jobs: Sequence[JobView], limit: int) -> Sequence[JobView]:
    """The first live jobs and, where there is room for more, the newest of those that ended."""
    live = [job for job in jobs if job.state.is_live]
    ended = jobs[len(live) :]
    room = max(0, limit - len(live))
    return [*live[:limit], *ended[max(0, len(ended) - room) :]]


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


def _head_of_long_list(client: Client, filters: dict[str, Any], limit: int) -> list[JobView]:
    """Running jobs, the head of the queue, ended jobs: the newest of all would say little."""
    from gpusched_client.terms import FINAL_STATES, JobState

    states, of = filters["states"], {"users": filters["users"], "name": filters["name"]}
    active = (JobState.RUNNING, JobState.COMPLETING, JobState.CONFIGURING)
    wanted = [state for state in active if states is None or state in states]
    jobs = list(client.jobs(**of, states=wanted).jobs) if wanted else []
    if len(jobs) < limit and (states is None or JobState.PENDING in states):
        jobs += client.queue(**of, limit=limit - len(jobs)).jobs
    if len(jobs) < limit and states is None:
        ended = [state for state in JobState if state in FINAL_STATES]
        jobs += client.jobs(
            **of, states=ended, ended_within_s=RECENT_S, limit=limit - len(jobs)
        ).jobs
    return sorted(jobs, key=_listing_order)


_RANK = {"RUNNING": 0, "COMPLETING": 0, "CONFIGURING": 0, "PENDING": 1}


def _listing_order(job: JobView) -> tuple[int, float, int]:
    """Running first, then the queue in its order, then what has ended, newest end last."""
    rank = _RANK.get(job.state.value, 2)
    place = float("inf") if job.queue_position is None else job.queue_position
    if rank == 0:
        place = 0
    if rank == 2:
        place = job.ended_at_s or 0
    return rank, place, job.job_id


def _show(jobs: Sequence[JobView], total: int, options: dict[str, Any]) -> None:
    if options["as_json"]:
        from gpusched_client.output.json import json_text

        print_out(json_text({"jobs": jobs, "total": total}))
        return
    from gpusched_client.output.job import jobs_table

    print_out(jobs_table(jobs, _view(), _columns(options["columns"])))
    if len(jobs) < total:
        print_err(f"showing {len(jobs)} of {total}")


# squeue's format letters, which many people know by heart
_LETTERS = {
    "i": "JOBID", "A": "JOBID", "j": "NAME", "u": "USER", "t": "ST", "T": "STATE", "M": "ELAPSED",
    "l": "LIMIT", "S": "START", "R": "GPU/REASON", "r": "REASON", "b": "GPUS", "Q": "PRIORITY",
    "V": "SUBMITTED", "e": "ENDED", "o": "COMMAND", "Z": "DIRECTORY", "U": "UID", "y": "NICE",
}  # fmt: skip


def _columns(text: str | None) -> Sequence[str]:
    """Columns by name, separated by commas or spaces, or by squeue's letters ("%i %j %t")."""
    from gpusched_client.output.job import COLUMNS, DEFAULT_COLUMNS

    if text is None:
        return DEFAULT_COLUMNS
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
