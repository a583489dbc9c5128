"""Which jobs are meant: `7`, `1-3,7`, `@` (my last one), `@~1` (the one before), or a filter.

Asks the daemon for what only it knows: my recent jobs, and all live ones of a filter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from gpusched_client.commands.answering import own_uid
from gpusched_client.errors import Invalid, NotFound
from gpusched_client.terms import JobState
from gpusched_client.wire.limits import IDS_MAX, RESPONSE_JOBS_MAX

if TYPE_CHECKING:
    from gpusched_client.client import Client

NAMED_IDS_MAX = 100_000
_RANGE = r"(\d{1,18})(?:-(\d{1,18}))?"
_RECENT = r"@(?:~(\d{1,4}))?"
_LIVE = tuple([state for state in JobState if state.is_live])

Recent = Callable[[int], list[int]]
"""Gives my newest n job ids, newest last."""


def named_ids(client: Client, words: Iterable[str]) -> tuple[int, ...]:
    """The ids that the words name, each once, in the order of naming. Raises Invalid, NotFound."""
    return parse_ids(words, lambda count: _recent_ids(client, count))


def live_ids(
    client: Client,
    *,
    user: str | None,
    states: Sequence[JobState] | None,
    name: str | None,
) -> list[int]:
    """All jobs that pass the filters and are not final, oldest first; page by page."""
    ids: list[int] = []
    before_id: int | None = None
    while True:
        page = client.jobs(
            users=None if user is None else [user],
            states=_LIVE if states is None else states,
            name=name,
            before_id=before_id,
        ).jobs
        ids.extend([job.job_id for job in page])
        if len(page) < RESPONSE_JOBS_MAX:
            return sorted(ids)
        before_id = min(job.job_id for job in page)


def _recent_ids(client: Client, count: int) -> list[int]:
    result = client.jobs(users=[str(own_uid())], limit=count)
    return [job.job_id for job in result.jobs]


def parse_ids(words: Iterable[str], recent: Recent) -> tuple[int, ...]:
    """The same; my recent jobs are asked of a function."""
    ids: dict[int, None] = {}
    for word in words:
        for part in word.split(","):
            ids.update(dict.fromkeys(_ids_of(part.strip(), recent)))
            if len(ids) > NAMED_IDS_MAX:
                raise Invalid(f"more than {NAMED_IDS_MAX} jobs; name fewer at once")
    return tuple(ids)


def _ids_of(part: str, recent: Recent) -> Iterable[int]:
    back = re.fullmatch(_RECENT, part, re.ASCII)
    if back is not None:
        return [_recent_id(int(back[1] or 0), recent)]
    match = re.fullmatch(_RANGE, part, re.ASCII)
    if match is None:
        raise Invalid(f"{part!r} is not a job; write 7, 1-3,7, @ (my last job) or @~1 (before it)")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last:
        raise Invalid(
            f"{part!r} is not a range of jobs; ids begin at 1 and the smaller comes first"
        )
    if last - first >= NAMED_IDS_MAX:
        raise Invalid(f"{part!r} names more than {NAMED_IDS_MAX} jobs; name fewer at once")
    return range(first, last + 1)


def _recent_id(back: int, recent: Recent) -> int:
    if back >= IDS_MAX:
        raise Invalid(f"@~{back} is too far back; the limit is @~{IDS_MAX - 1}")
    mine = recent(back + 1)
    if len(mine) <= back:
        raise NotFound(f"@~{back}: you have {len(mine)} jobs on record")
    return mine[-1 - back]
