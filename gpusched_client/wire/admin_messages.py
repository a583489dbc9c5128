"""The messages about the daemon: its health, its accounts, its configuration, a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpusched_client.errors import Conflict, Denied, NotFound, StorageError
from gpusched_client.wire.fields import list_of, number, octets, plain_map, text
from gpusched_client.wire.limits import BACKUP_PIECE_BYTES
from gpusched_client.wire.message import Response, message, nested, wire
from gpusched_client.wire.methods import Request, Right, Unread, method
from gpusched_client.wire.values import AMOUNT, ANY_TEXT, COUNT, SHORT_TEXT, SIZE, TEXTS, TIME, USER


@message
class LoggedProblem(Response):
    """A warning or an error of the daemon's log."""

    at_s: float = wire(TIME)
    text: str = wire(ANY_TEXT)


@message
class StatusResult(Response):
    """The daemon's health. `problems` is empty when all is well.

    `last_errors` is for admins. What is None is not known, or does not apply.
    """

    version: str = wire(SHORT_TEXT)
    mode: str = wire(SHORT_TEXT)
    launch: str = wire(SHORT_TEXT)
    pid: int = wire(COUNT)
    started_at_s: float = wire(TIME)
    gpu_source: str = wire(SHORT_TEXT)
    gpus: int = wire(COUNT)
    gpus_ok: int = wire(COUNT)
    database: str = wire(ANY_TEXT)
    running_jobs: int = wire(COUNT)
    pending_jobs: int = wire(COUNT)
    connections: int = wire(COUNT)
    sample_age_s: float | None = wire(AMOUNT, default=None)
    database_bytes: int | None = wire(SIZE, default=None)
    disk_free_bytes: int | None = wire(SIZE, default=None)
    pass_s: float | None = wire(AMOUNT, default=None)
    problems: tuple[str, ...] = wire(TEXTS, default=())
    last_errors: tuple[LoggedProblem, ...] = wire(list_of(nested(LoggedProblem), 100), default=())


@method("status", Right.ALL, Unread.NOTHING)
class StatusRequest(Request[StatusResult]):
    """The daemon's health."""


@message
class UsageView(Response):
    """One user's account: decayed GPU-seconds, shares, and F in 0..1.

    Since the daemon began: the median of |took - expected| / the longer of both over the last
    100 runs that count; starts that a guess of lengths allowed; starts of jobs that had been head,
    and how many of these came later than expected when they became it.
    """

    user: str = wire(USER)
    usage_gpu_s: float = wire(number(0, 2**63))
    uid: int | None = wire(COUNT, default=None)
    shares: float | None = wire(AMOUNT, default=None)
    factor: float | None = wire(number(0, 1), default=None)
    running_jobs: int | None = wire(COUNT, default=None)
    running_gpus: float | None = wire(AMOUNT, default=None)
    pending_jobs: int | None = wire(COUNT, default=None)
    expected_run_median_error: float | None = wire(number(0, 1), default=None)
    starts_by_guess: int | None = wire(COUNT, default=None)
    heads_started: int | None = wire(COUNT, default=None)
    heads_later_than_expected: int | None = wire(COUNT, default=None)


@message
class UsageResult(Response):
    """The users, highest factor first."""

    users: tuple[UsageView, ...] = wire(list_of(nested(UsageView), 10_000))


@method("usage", Right.ALL, Unread.NOTHING)
class UsageRequest(Request[UsageResult]):
    """Decayed usage, share and fair-share factor of each user."""


@message
class StatsResult(Response):
    """Counters and gauges by name."""

    counters: Mapping[str, Any] = wire(plain_map)


@method("stats", Right.ALL, Unread.NOTHING)
class StatsRequest(Request[StatsResult]):
    """Counters for metrics."""


@message
class ReloadResult(Response):
    """The keys whose values changed, and what that broke: a promised start, lost or later."""

    changed: tuple[str, ...] = wire(TEXTS, default=())
    broken: tuple[str, ...] = wire(TEXTS, default=())


@method("reload", Right.ADMIN, Unread.FINISHED, (Denied,))
class ReloadRequest(Request[ReloadResult]):
    """Read the configuration again."""


@message
class BackupResult(Response):
    """A piece of the copy at `offset`; it is complete when offset + len(data) is `size_bytes`."""

    backup_id: str = wire(SHORT_TEXT)
    size_bytes: int = wire(SIZE)
    offset: int = wire(COUNT)
    data: bytes = wire(octets(BACKUP_PIECE_BYTES, nul=True))


@method("backup", Right.ROOT, Unread.OPEN, (Conflict, Denied, NotFound, StorageError))
class BackupRequest(Request[BackupResult]):
    """A piece of a copy of the database. Without `backup_id` a new copy is made first.

    The daemon keeps the copy until it was read to its end, or the connection is closed.
    """

    backup_id: str | None = wire(text(64), default=None)
    offset: int = wire(COUNT, default=0)
