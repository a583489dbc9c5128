"""The frozen view of everything that one pass looks at, out of the state of the last commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from gpuschedd.core.fairshare import share_of
from gpuschedd.core.job import Job
from gpuschedd.core.model import QueueView, Snapshot, Standing, UserLimit, UserQueue, Waiting
from gpuschedd.core.snapshot import build_snapshot
from gpuschedd.jobs.batch import Batch
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

    def take(self, beneath: Batch | None = None) -> Snapshot:
        """Everything one pass looks at, now.

        `beneath`: a batch of new jobs that is not yet written; the queues have them already.
        """
        state = self._state
        users = dict(state.user_of)
        if beneath is not None:
            users.update((job.uid, job.user) for job in beneath.changed_jobs().values())
        shares = {
            uid: share_of(user, self.groups_named(user), state.policy)
            for uid, user in users.items()
        }
        limits = {uid: self.limit_of(user) for uid, user in users.items()}
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
            lengths=state.histories.view(),
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
        rows = [waiting_for(job, Age(snapshot.now_s, 0.0, None)) for job in jobs]
        _queue_up(gpu, [row for row in rows if row.request.gpus])
        _queue_up(cpu, [row for row in rows if not row.request.gpus])
        if not snapshot.standings.keys() >= {queue.uid for queue in (*gpu, *cpu)}:
            standings = dict(snapshot.standings)
            for queue in (*gpu, *cpu):
                standings.setdefault(queue.uid, _newcomer(queue.uid, queue.user))
            snapshot = replace(snapshot, standings=standings)
        return replace(snapshot, queues=QueueView(tuple(gpu), tuple(cpu)))


def _newcomer(uid: int, user: str) -> Standing:
    """A user without usage: the best factor."""
    return Standing(uid=uid, user=user, share=1.0, usage_gpu_s=0.0, factor=1.0)


def _queue_up(lists: list[UserQueue], rows: list[Waiting]) -> None:
    """Add rows of one user to the user's list, in own order."""
    if not rows:
        return
    uid = rows[0].uid
    place = next((i for i, queue in enumerate(lists) if queue.uid == uid), None)
    queue = UserQueue(uid, rows[0].user, ()) if place is None else lists[place]
    asked = [row.request for row in rows]
    whole = [request.gpus for request in asked if request.vram_bytes is None]
    shared = [request.vram_bytes for request in asked if request.vram_bytes is not None]
    grown = replace(
        queue,
        jobs=tuple(sorted((*queue.jobs, *rows), key=lambda waiting: waiting.own_order)),
        whole_gpus_min=_least(queue.whole_gpus_min, whole),
        shared_bytes_min=_least(queue.shared_bytes_min, shared),
        gpus_max=None,
        bytes_max=None,
        aged_to=None,
        shapes=None,
        requests=None,
        least=None if queue.least is None else queue.least.union(asked),
    )
    if place is None:
        lists.append(grown)
        lists.sort(key=lambda other: other.uid)
    else:
        lists[place] = grown


def _least(known: int | None, others: list[int]) -> int | None:
    return min((value for value in (known, *others) if value is not None), default=None)
