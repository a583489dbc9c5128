"""The frozen view of everything that one pass looks at, out of the state of the last commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from gpuschedd.core.fairshare import share_of
from gpuschedd.core.job import Job
from gpuschedd.core.model import QueueView, Snapshot, Standing, UserLimit, UserQueue, Waiting
from gpuschedd.core.snapshot import build_snapshot
from gpuschedd.jobs.state import State, waiting_for
from gpuschedd.store.records import Age
from gpuschedd.system.clock import SchedulerClock

GroupsOf = Callable[[str], tuple[str, ...]]


class Snapshots:
    """Takes snapshots. `groups_of` gives the names of a user's groups, as last known."""

    def __init__(self, state: State, clock: SchedulerClock, groups_of: GroupsOf) -> None:
        self._state = state
        self._clock = clock
        self._groups_of = groups_of

    def take(self) -> Snapshot:
        """Everything one pass looks at, now."""
        state = self._state
        shares = {
            uid: share_of(user, self.groups_named(user), state.policy)
            for uid, user in state.user_of.items()
        }
        limits = {uid: self.limit_of(user) for uid, user in state.user_of.items()}
        return build_snapshot(
            now_s=self._clock.now_s(),
            gpus=state.gpus,
            running=state.running(),
            queues=state.queues.view(),
            accounts=state.accounts,
            shares=shares,
            limits=limits,
            promise=state.promise,
            reservation=state.reservation,
        )

    def groups_named(self, user: str) -> tuple[str, ...]:
        """The user's groups, where the configuration names any."""
        return self._groups_of(user) if self._state.config.names_groups else ()

    def limit_of(self, user: str) -> UserLimit:
        """What the user's running jobs may hold together."""
        own = self._state.config.limits.of(user, self.groups_named(user))
        return UserLimit(max_gpus=own.max_gpus, max_jobs=own.max_jobs)

    def take_with(self, jobs: Iterable[Job]) -> Snapshot:
        """The snapshot as it would be if these jobs of one user were queued too."""
        snapshot = self.take()
        view = snapshot.queues
        gpu, cpu = list(view.gpu), list(view.cpu)
        for job in jobs:
            row = waiting_for(job, Age(snapshot.now_s, 0.0, None))
            _queue_up(gpu if job.request.gpus else cpu, row)
        if not snapshot.standings.keys() >= {queue.uid for queue in (*gpu, *cpu)}:
            standings = dict(snapshot.standings)
            for queue in (*gpu, *cpu):
                standings.setdefault(queue.uid, _newcomer(queue.uid, queue.user))
            snapshot = replace(snapshot, standings=standings)
        return replace(snapshot, queues=QueueView(tuple(gpu), tuple(cpu)))


def _newcomer(uid: int, user: str) -> Standing:
    """A user without usage: the best factor."""
    return Standing(uid=uid, user=user, share=1.0, usage_gpu_s=0.0, factor=1.0)


def _queue_up(lists: list[UserQueue], row: Waiting) -> None:
    """Add a row to its user's list, in own order."""
    place = next((i for i, queue in enumerate(lists) if queue.uid == row.uid), None)
    queue = UserQueue(row.uid, row.user, ()) if place is None else lists[place]
    vram, gpus = row.request.vram_bytes, row.request.gpus
    whole, shared = queue.whole_gpus_min, queue.shared_bytes_min
    grown = replace(
        queue,
        jobs=tuple(sorted((*queue.jobs, row), key=lambda waiting: waiting.own_order)),
        whole_gpus_min=whole if vram is not None else min(gpus, whole or gpus),
        shared_bytes_min=shared if vram is None else min(vram, shared or vram),
        aged_to=None,
    )
    if place is None:
        lists.append(grown)
        lists.sort(key=lambda other: other.uid)
    else:
        lists[place] = grown
