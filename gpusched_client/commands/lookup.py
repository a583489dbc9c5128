"""Questions about jobs that several commands ask: my recent ones, all live ones of a filter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpusched_client.commands.common import own_uid
from gpusched_client.terms import JobState
from gpusched_client.wire.limits import RESPONSE_JOBS_MAX

if TYPE_CHECKING:
    from gpusched_client.client import Client

_LIVE = tuple([state for state in JobState if state.is_live])


def recent_ids(client: Client, count: int) -> list[int]:
    """My newest `count` jobs, newest last."""
    result = client.jobs(users=[str(own_uid())], limit=count)
    return [job.job_id for job in result.jobs]


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
