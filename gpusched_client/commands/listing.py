"""The lists of gq and its one word of a job: what is asked of the daemon, and what is shown of it.

Needs no click, and knows no option: that is gq's, and front.py's for what is typed most.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gpusched_client.commands.answering import (
    own_uid,
    print_err,
    print_out,
    tell_who_answered,
    terminal_width,
)
from gpusched_client.errors import GpuschedError, NotFound
from gpusched_client.wire.limits import RESPONSE_JOBS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpusched_client.client import Client
    from gpusched_client.output.job import View
    from gpusched_client.wire.job_messages import JobView

RECENT_S = 600  # ended jobs stay visible for so long
SHOWN_MAX, SHOWN_AS_JSON_MAX = 50, 1_000

# Filters are `users`, `states` and `name`, as Client.jobs takes them; None: all.
EVERYBODY: Mapping[str, Any] = {"users": None, "states": None, "name": None}


def show_status(client: Client, job_id: int, *, as_json: bool = False) -> None:
    """One word of one job."""
    from gpusched_client.output.text import status_word

    word = status_word(client.job(job_id))
    if as_json:
        from gpusched_client.output.json import json_text

        print_out(json_text({"status": word}))
    else:
        print_out(f"{word}\n")


def show_list(
    client: Client,
    filters: Mapping[str, Any] = EVERYBODY,
    limit: int | None = None,
    *,
    columns: Sequence[str] | None = None,
    as_json: bool = False,
) -> None:
    """The jobs that pass the filters, those that ended long ago left out."""
    limit = limit or (SHOWN_AS_JSON_MAX if as_json else SHOWN_MAX)
    # Jobs whose states are asked for by name are shown however old they are.
    recent_s = RECENT_S if filters["states"] is None else None
    has_head = all(state.is_live for state in filters["states"] or ())
    # Of those that ended, the newest ends are shown: they are found among the newest jobs.
    asked = limit if has_head else RESPONSE_JOBS_MAX
    result = client.jobs(ended_within_s=recent_s, **filters, limit=asked)
    jobs = sorted(result.jobs, key=_listing_order)
    if result.total > len(jobs) and has_head:
        jobs = _head_of_long_list(client, filters, limit)
    show_jobs(_first_of(jobs, limit), result.total, columns=columns, as_json=as_json)
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


def _head_of_long_list(client: Client, filters: Mapping[str, Any], limit: int) -> list[JobView]:
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


def show_jobs(
    jobs: Sequence[JobView], total: int, *, columns: Sequence[str] | None, as_json: bool
) -> None:
    """A table of these jobs, or one JSON value; `total` counts those that are left out, too."""
    if as_json:
        from gpusched_client.output.json import json_text

        print_out(json_text({"jobs": jobs, "total": total}))
        return
    from gpusched_client.output.job import DEFAULT_COLUMNS, jobs_table

    print_out(jobs_table(jobs, view(), columns or DEFAULT_COLUMNS))
    if len(jobs) < total:
        print_err(f"showing {len(jobs)} of {total}")


def view() -> View:
    """How this process's user sees a job, now and on this terminal."""
    from gpusched_client.output.job import View

    host = os.uname().nodename
    return View(now_s=time.time(), uid=own_uid(), width=terminal_width(), host=host)


def show_and_tell(client: Client, show: Callable[[], None]) -> None:
    """Show what was asked, and say who answered; also where it is not known: others may have it."""
    try:
        show()
    except NotFound:
        _tell_in_passing(client)
        raise
    _tell_in_passing(client)


def _tell_in_passing(client: Client) -> None:
    """What is shown, or the error that is told, comes before an error of this."""
    with suppress(GpuschedError):
        tell_who_answered("gq", client)
