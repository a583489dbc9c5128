"""Priority: the order in which jobs of all users are looked at.

Owns `priority = W_FAIR * F + W_AGE * age - nice`, the cap by the user's job before it, and the
merge of the users' lists. Does not sort: a pass must not cost O(queue). Knows no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from gpusched_client.terms import JobId
from gpuschedd.core.horizon import HorizonView, promised_job, start_horizon
from gpuschedd.core.model import (
    HOUR_S,
    NEVER_S,
    Order,
    Policy,
    PriorityParts,
    Snapshot,
    UserQueue,
    Waiting,
)
from gpuschedd.core.queues import age_s


class Entry(NamedTuple):
    """One job in the merge. A total order: (-priority, nice, eligible since, id)."""

    minus_priority: float
    nice: int
    eligible_since_s: float
    job_id: JobId
    job: Waiting
    stream: _Stream
    counts: bool
    capped_by: JobId | None
    chained: bool = False  # those behind it in its user's list come after it in any case

    @property
    def parts(self) -> PriorityParts:
        """The parts of the priority, for display."""
        return self.stream.merge.parts(self)


class _Stream:
    """A cursor in one user's list, with the cap of the last job that counts."""

    __slots__ = ("at", "cap", "capped_by", "dropped", "fair", "merge", "queue")

    def __init__(self, merge: Merge, queue: UserQueue, fair: float) -> None:
        self.merge = merge
        self.queue = queue
        self.fair = fair
        self.at = 0
        self.cap = NEVER_S
        self.capped_by: JobId | None = None
        self.dropped = False


class Merge:
    """The users' lists merged by priority, lazily. `first` (the promise's holder) is left out."""

    def __init__(
        self,
        snapshot: Snapshot,
        policy: Policy,
        horizon: HorizonView,
        *,
        cpu: bool = False,
        first: JobId | None = None,
    ) -> None:
        self._now_s = snapshot.now_s
        self._policy = policy
        self._fcfs = policy.order is Order.FCFS
        self._horizon = None if cpu else horizon
        self._cpu = cpu
        self._first = first
        self._heap: list[Entry] = []
        self._push = partial(heappush, self._heap)
        self._skip: Callable[[Waiting], bool] | None = None
        self._skip_list: Callable[[UserQueue], bool] | None = None
        self._standings = snapshot.standings
        queues = self._queues = snapshot.queues.cpu if cpu else snapshot.queues.gpu
        self.whole_gpus_min = _least(queue.whole_gpus_min for queue in queues)
        self.shared_bytes_min = _least(queue.shared_bytes_min for queue in queues)
        self._opened = False

    def _open(self) -> None:
        """Put every user's first job in."""
        self._opened = True
        append = self._heap.append
        for queue in self._queues:
            if self._skip_list is not None and self._skip_list(queue):
                continue
            standing = self._standings.get(queue.uid)
            fair = 0.0 if standing is None else self._policy.w_fair * standing.factor
            self._push_next(_Stream(self, queue, fair), append)
        heapify(self._heap)

    def pop(self) -> Entry | None:
        """The next job, or None. Its user's next one enters the merge."""
        if not self._opened:
            self._open()
        if not self._heap:
            return None
        entry = heappop(self._heap)
        stream = entry.stream
        if (entry.counts or entry.chained) and not stream.dropped:
            self._push_next(stream, self._push)
        return entry

    def pass_over(
        self, job: Callable[[Waiting], bool], whole_list: Callable[[UserQueue], bool]
    ) -> None:
        """From now on leave out the jobs and the lists of which these are true.

        A job of which it is true must stay so while the merge lasts.
        """
        self._skip, self._skip_list = job, whole_list
        waiting, self._heap[:] = self._heap[:], []
        for entry in waiting:
            stream = entry.stream
            if whole_list(stream.queue):
                stream.dropped = True
            elif not job(entry.job):
                self._heap.append(entry)
            elif (entry.counts or entry.chained) and not stream.dropped:
                self._push_next(stream, self._heap.append)
        heapify(self._heap)

    def holder(self, snapshot: Snapshot) -> Entry | None:
        """The promise's holder as an entry with its own priority, or None if it is not there."""
        job = promised_job(snapshot)
        if job is None:
            return None
        standing = self._standings.get(job.uid)
        fair = 0.0 if standing is None else self._policy.w_fair * standing.factor
        stream = _Stream(self, UserQueue(job.uid, job.user, ()), fair)
        own = self.own_priority(job, fair)
        return Entry(-own, job.nice, job.eligible_since_s, job.job_id, job, stream, True, None)

    def close(self) -> None:
        """Let go of all entries: they refer to the merge, and would outlive it until collected."""
        self._heap.clear()
        self._skip = self._skip_list = None

    def drop(self, entry: Entry) -> None:
        """Look no further at that user's list."""
        entry.stream.dropped = True

    def own_priority(self, job: Waiting, fair: float) -> float:
        """The priority before the cap."""
        if self._fcfs:
            return 0.0
        return fair + self._age_term(job) - job.nice

    def _age_term(self, job: Waiting) -> float:
        if self._cpu:
            gained_s = job.age_gained_s + max(0.0, self._now_s - job.eligible_since_s)
        else:
            gained_s = age_s(job, self._now_s)
        return self._policy.w_age_per_h * gained_s / HOUR_S

    def parts(self, entry: Entry) -> PriorityParts:
        """The parts of the priority, for display."""
        own = self.own_priority(entry.job, entry.stream.fair)
        shown = -entry.minus_priority
        return PriorityParts(
            priority=shown,
            fair=0.0 if self._fcfs else entry.stream.fair,
            age=0.0 if self._fcfs else self._age_term(entry.job),
            nice=entry.job.nice,
            capped_by=entry.capped_by if shown < own else None,
        )

    def _push_next(self, stream: _Stream, push: Callable[[Entry], None]) -> None:
        """Move on to the user's next job that counts; those that do not go in beside it.

        Where no job has any age left, each waits for the one before it, whether it counts or not.
        """
        jobs = stream.queue.jobs
        aged_to = stream.queue.aged_to
        if aged_to is None or self._cpu:
            aged_to = len(jobs)
        while stream.at < len(jobs):
            job = jobs[stream.at]
            chained = stream.at >= aged_to
            stream.at += 1
            own = 0.0 if self._fcfs else self.own_priority(job, stream.fair)
            counts = self._horizon is None or self._horizon.counts(job)
            skip = job.job_id == self._first or (self._skip is not None and self._skip(job))
            if not skip:
                push(self._entry(stream, job, own, counts, chained))
            if counts and own < stream.cap:
                stream.cap, stream.capped_by = own, job.job_id
            if (counts or chained) and not skip:
                return

    def _entry(
        self, stream: _Stream, job: Waiting, own: float, counts: bool, chained: bool
    ) -> Entry:
        return Entry(
            -min(own, stream.cap),
            0 if self._fcfs else job.nice,
            job.eligible_since_s,
            job.job_id,
            job,
            stream,
            counts,
            stream.capped_by,
            chained,
        )


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def queue_order(snapshot: Snapshot, policy: Policy) -> Iterator[tuple[Waiting, PriorityParts]]:
    """All GPU jobs in scheduling order, the holder of a live promise first; then CPU-only ones."""
    horizon = HorizonView(start_horizon(snapshot, policy), policy)
    first = None if snapshot.promise is None else snapshot.promise.job_id
    merge = Merge(snapshot, policy, horizon, first=first)
    if (holder := merge.holder(snapshot)) is not None:
        yield holder.job, merge.parts(holder)
    for stage in (merge, Merge(snapshot, policy, horizon, cpu=True)):
        while (entry := stage.pop()) is not None:
            yield entry.job, stage.parts(entry)
