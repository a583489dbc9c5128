"""Snapshot: the frozen view that one pass looks at.

Owns sorting and the standings of the active users; everything after it takes the order as given.
Its result does not depend on the order of its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

from gpuschedd.core.fairshare import Accounts, factors
from gpuschedd.core.model import (
    NO_LIMIT,
    Gpu,
    Lengths,
    Promise,
    QueueView,
    Reservation,
    RunningJob,
    Snapshot,
    Standing,
    UserLimit,
)


def build_snapshot(
    *,
    now_s: float,
    gpus: Iterable[Gpu],
    running: Iterable[RunningJob],
    queues: QueueView,
    accounts: Accounts | None,
    shares: Mapping[int, float] | None = None,
    limits: Mapping[int, UserLimit] | None = None,
    promise: Promise | None = None,
    reservation: Reservation | None = None,
    lengths: Lengths | None = None,
) -> Snapshot:
    """`running`: all that hold GPUs or CPU slots. `shares`: uid -> share, 1 where it is missing.

    `accounts` None: nobody asks for standings, as in the order of arrival without limits.
    `limits`: uid -> limit, none where it is missing. `reservation`: that of the plan before.
    """
    jobs = tuple(sorted(running, key=attrgetter("job_id")))
    return Snapshot(
        now_s=now_s,
        gpus=tuple(sorted(gpus, key=attrgetter("index", "uuid"))),
        running=jobs,
        queues=queues,
        standings={}
        if accounts is None
        else _standings(now_s, jobs, queues, accounts, shares or {}, limits or {}),
        promise=promise,
        reservation=reservation,
        lengths=lengths or Lengths(),
    )


def _standings(
    now_s: float,
    running: tuple[RunningJob, ...],
    queues: QueueView,
    accounts: Accounts,
    shares: Mapping[int, float],
    limits: Mapping[int, UserLimit],
) -> dict[int, Standing]:
    """Active users: those with a running or an eligible job."""
    names = {job.uid: job.user for job in running}
    for queue in (*queues.gpu, *queues.cpu):
        names[queue.uid] = queue.user
    usages = {uid: accounts.usage(uid, now_s) for uid in sorted(names)}
    own = {uid: shares.get(uid, 1.0) for uid in usages}
    by_uid = factors(usages, own)
    return {
        uid: Standing(uid, names[uid], own[uid], used, by_uid[uid], limits.get(uid, NO_LIMIT))
        for uid, used in usages.items()
    }
