"""Queues: every user's own list of eligible jobs, and the age window at its head.

Owns the order inside a list and the age bookkeeping. Knows no other user's list, no GPU and no F.
All changes return the rows whose bookkeeping changed, so that a caller stores just these; a restore
from these rows gives the identical state.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from gpusched_client.terms import JobId
from gpuschedd.core.horizon import HorizonView
from gpuschedd.core.model import (
    NEVER_S,
    FirstHead,
    Horizon,
    Order,
    Policy,
    QueueView,
    Request,
    Shape,
    Topology,
    UserQueue,
    Waiting,
)

T = TypeVar("T", int, float, Request, Shape)
_Key = tuple[float, float, JobId]


SHAPES_MAX = 32  # of a list with more distinct requests each job is looked at
FRONT_STEP_S = 1e-3  # so much earlier than the first stands who is put before it


def rested(waiting: Waiting, now_s: float) -> Waiting:
    """The job with its age reset: after a hold, an edit, a begin time or a dependency."""
    return replace(
        waiting, eligible_since_s=now_s, age_gained_s=0.0, window_since_s=None, first_head=None
    )


def age_s(waiting: Waiting, now_s: float) -> float:
    """The age the job has gained by now_s."""
    if waiting.window_since_s is None:
        return waiting.age_gained_s
    return waiting.age_gained_s + max(0.0, now_s - waiting.window_since_s)


def _leave(waiting: Waiting, now_s: float) -> Waiting:
    """Leaving the window freezes the age."""
    if waiting.window_since_s is None:
        return waiting
    return replace(waiting, age_gained_s=age_s(waiting, now_s), window_since_s=None)


class _Alike:
    """What those ask whose wishes are the same, each value with how many jobs ask it."""

    __slots__ = ("_gpus", "_least", "_limits_s", "_sizes", "_wishes")

    def __init__(self, request: Request) -> None:
        self._wishes = request
        self._gpus: dict[int, int] = {}
        self._sizes: dict[int, int] = {}  # bytes per GPU; 0 of whole GPUs
        self._limits_s: dict[float, int] = {}
        self._least: Request | None = None  # until one of the values comes or goes

    def __bool__(self) -> bool:
        return bool(self._gpus)

    def count(self, request: Request, by: int) -> None:
        """A job of these more, or less."""
        limit_s = request.time_limit_s
        changes = _tally(self._gpus, request.gpus, by)
        changes |= _tally(self._sizes, request.vram_bytes or 0, by)
        changes |= _tally(self._limits_s, NEVER_S if limit_s is None else limit_s, by)
        if changes:
            self._least = None

    def least(self) -> Request:
        """One that asks no more of anything than any of them."""
        if self._least is None:
            limit_s, wishes = min(self._limits_s), self._wishes
            self._least = Request(
                gpus=min(self._gpus),
                vram_bytes=None if wishes.whole else min(self._sizes),
                gpu_model=wishes.gpu_model,
                exclusive=wishes.exclusive,
                topology=wishes.topology,
                time_limit_s=None if limit_s == NEVER_S else limit_s,
                card_bytes=wishes.card_bytes,
            )
        return self._least

    def most(self) -> tuple[int, int]:
        """The GPUs and the bytes per GPU that no job asks more of."""
        return max(self._gpus), max(self._sizes)


_Wishes = tuple[bool, bool, str | None, int, bool]


def _wishes(request: Request) -> _Wishes:
    """What two requests must have in common for one to fail with the other, a lesser one."""
    return (
        request.vram_bytes is None,
        request.exclusive,
        request.gpu_model,
        request.card_bytes,
        request.topology is Topology.NVLINK,
    )


class _Own:
    """One user's list. `keys` is sorted; `window` holds the keys inside the window, in order."""

    __slots__ = (
        *("aged", "alike", "jobs", "keys", "requests", "shapes", "uid", "user", "view", "window"),
    )

    def __init__(self, uid: int, user: str) -> None:
        self.uid = uid
        self.user = user
        self.keys: list[_Key] = []
        self.jobs: dict[_Key, Waiting] = {}
        self.window: list[_Key] = []
        self.aged: set[_Key] = set()  # jobs that have gained age or are gaining it
        self.alike: dict[_Wishes, _Alike] = {}
        self.shapes: dict[Shape, int] = {}  # how many jobs have each
        self.requests: dict[Request, int] = {}  # likewise
        self.view: UserQueue | None = None

    def put(self, key: _Key, waiting: Waiting) -> None:
        if key not in self.jobs:
            insort(self.keys, key)
            self._count(waiting, 1)
        self.replace(key, waiting)

    def replace(self, key: _Key, waiting: Waiting) -> None:
        """The job at its place, with other bookkeeping."""
        self.jobs[key] = waiting
        if waiting.window_since_s is not None or waiting.age_gained_s > 0.0:
            self.aged.add(key)
        else:
            self.aged.discard(key)
        self.view = None

    def drop(self, key: _Key) -> Waiting:
        waiting = self.jobs.pop(key)
        del self.keys[bisect_left(self.keys, key)]
        self.aged.discard(key)
        self._count(waiting, -1)
        self.view = None
        return waiting

    def _count(self, waiting: Waiting, by: int) -> None:
        request = waiting.request
        wishes = _wishes(request)
        alike = self.alike.get(wishes)
        if alike is None:
            alike = self.alike[wishes] = _Alike(request)
        alike.count(request, by)
        if not alike:
            del self.alike[wishes]
        _tally(self.shapes, Shape(request, waiting.length_key), by)
        # Asked where no end is guessed: an estimate tells nothing there.
        _tally(self.requests, _without_estimate(request), by)

    def freeze(self) -> UserQueue:
        if self.view is None:
            jobs = self.jobs
            least = [alike.least() for alike in self.alike.values()]
            gpus_max, bytes_max = self._most(least)
            self.view = UserQueue(
                uid=self.uid,
                user=self.user,
                jobs=tuple([jobs[key] for key in self.keys]),
                whole_gpus_min=min([r.gpus for r in least if r.vram_bytes is None], default=None),
                shared_bytes_min=min(
                    [r.vram_bytes for r in least if r.vram_bytes is not None], default=None
                ),
                gpus_max=gpus_max,
                bytes_max=bytes_max,
                aged_to=bisect_left(self.keys, max(self.aged)) + 1 if self.aged else 0,
                shapes=_if_few(self.shapes),
                requests=_if_few(self.requests),
                least=frozenset(least) if len(least) <= SHAPES_MAX else None,
            )
        return self.view

    def _most(self, least: list[Request]) -> tuple[int | None, int | None]:
        if any(request.wishes for request in least):
            return None, None
        most = [alike.most() for alike in self.alike.values()]
        return max([gpus for gpus, _size in most]), max([size for _gpus, size in most])


def _frozen(lists: Mapping[int, _Own]) -> tuple[UserQueue, ...]:
    owns = map(lists.__getitem__, sorted(lists))
    return tuple([own.view or own.freeze() for own in owns])


def _if_few(counts: dict[T, int]) -> frozenset[T] | None:
    return frozenset(counts) if len(counts) <= SHAPES_MAX else None


def _without_estimate(request: Request) -> Request:
    return request if request.estimate_s is None else replace(request, estimate_s=None)


def _tally(counts: dict[T, int], ask: T, by: int) -> bool:
    """Count it; whether it is new, or gone."""
    before = counts.get(ask, 0)
    left = before + by
    if left:
        counts[ask] = left
    else:
        del counts[ask]
    return not (left and before)


class Queues:
    """All users' lists. A job is in it while it is eligible."""

    def __init__(self, policy: Policy, horizon: Horizon | None = None) -> None:
        self._window_jobs = policy.age_jobs_per_user
        self._fcfs = policy.order is Order.FCFS  # without age, so that nobody enters a window
        self._policy = policy
        self._horizon = HorizonView(horizon, policy)
        self._gpu: dict[int, _Own] = {}
        self._cpu: dict[int, _Own] = {}
        self._keys: dict[JobId, tuple[_Own, _Key]] = {}
        self._view: QueueView | None = None

    @classmethod
    def restore(
        cls, policy: Policy, rows: Iterable[Waiting], horizon: Horizon | None = None
    ) -> Queues:
        """The state that stored rows describe; who is inside a window is in the rows.

        Without a horizon all jobs count until the first `settle`.
        """
        queues = cls(policy, horizon)
        for waiting in rows:
            own, key = queues._place(waiting)
            if waiting.window_since_s is not None and own.uid in queues._gpu:
                insort(own.window, key)
        return queues

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, job_id: JobId) -> bool:
        return job_id in self._keys

    def get(self, job_id: JobId) -> Waiting | None:
        """The job as it stands in its list."""
        found = self._keys.get(job_id)
        return None if found is None else found[0].jobs[found[1]]

    def insert(self, waiting: Waiting, now_s: float) -> tuple[Waiting, ...]:
        """A job becomes eligible. It keeps the age it brings (`rested` resets it)."""
        assert waiting.job_id not in self._keys
        if waiting.window_since_s is not None:
            waiting = replace(waiting, window_since_s=None)
        own, key = self._place(waiting)
        changed = self._enter_new(own, key, now_s) if waiting.request.gpus else {}
        changed[key] = own.jobs[key]
        return tuple(changed.values())

    def remove(self, job_id: JobId, now_s: float) -> tuple[Waiting, ...]:
        """A job leaves (started, held, cancelled, edited); its row comes back frozen, first."""
        own, key = self._keys.pop(job_id)
        inside = own.jobs[key].window_since_s is not None
        gone = _leave(own.drop(key), now_s)
        changed: dict[_Key, Waiting] = {}
        if inside:
            del own.window[bisect_left(own.window, key)]
            self._fill(own, key, now_s, changed)
        if not own.keys:
            lists = self._gpu if gone.request.gpus else self._cpu
            del lists[own.uid]
        self._view = None
        return (gone, *changed.values())

    def update(self, waiting: Waiting, now_s: float) -> tuple[Waiting, ...]:
        """Re-insert a changed job: one call for remove and insert. Age as `waiting` brings it.

        An unchanged place keeps the window; otherwise the age gained so far is kept unless the
        caller reset it (`rested`).
        """
        old = {row.job_id: row for row in self.remove(waiting.job_id, now_s)}
        new = {row.job_id: row for row in self.insert(_leave(waiting, now_s), now_s)}
        return tuple((old | new).values())

    def before_nice(self, uid: int, nice: int) -> list[JobId]:
        """The user's jobs with a smaller nice value."""
        owns = [lists[uid] for lists in (self._gpu, self._cpu) if uid in lists]
        bound = (nice, -math.inf, 0)
        return [key[2] for own in owns for key in own.keys[: bisect_left(own.keys, bound)]]

    def to_front(self, job_id: JobId, now_s: float) -> tuple[Waiting, ...]:
        """The job goes before its user's others of the same nice value; it gains no age by it.

        Its time of entering the list becomes earlier than the first one's. Where age counts from
        then, as for CPU-only jobs, what that adds is taken off again.
        """
        found = self._keys.get(job_id)
        if found is None:
            return ()
        own, key = found
        _, first_s, first_id = own.keys[0]
        if first_id == job_id:
            return ()
        waiting = _leave(own.jobs[key], now_s)
        since_s = first_s - FRONT_STEP_S
        gained_s = waiting.age_gained_s
        if not waiting.request.gpus:
            gained_s -= waiting.eligible_since_s - since_s
        return self.update(replace(waiting, eligible_since_s=since_s, age_gained_s=gained_s), now_s)

    def settle(self, horizon: Horizon, now_s: float) -> tuple[Waiting, ...]:
        """Apply a Plan's horizon: jobs that do not count leave the windows, others move up."""
        if horizon == self._horizon.horizon:
            return ()
        self._horizon = HorizonView(horizon, self._policy)
        self._view = None
        changed: dict[_Key, Waiting] = {}
        if self._fcfs:
            return ()
        for _uid, own in sorted(self._gpu.items()):
            self._rebuild(own, now_s, changed)
        return tuple(changed.values())

    def note_heads(self, firsts: Mapping[JobId, FirstHead]) -> tuple[Waiting, ...]:
        """Keep when these became head for the first time: a Plan's `first_heads`."""
        changed: dict[_Key, Waiting] = {}
        for job_id in firsts:
            if (found := self._keys.get(job_id)) is not None:
                own, key = found
                self._store(own, key, replace(own.jobs[key], first_head=firsts[job_id]), changed)
        return tuple(changed.values())

    def view(self) -> QueueView:
        """All lists, frozen; an unchanged user's tuple is the same object as before."""
        if self._view is None:
            self._view = QueueView(
                gpu=_frozen(self._gpu),
                cpu=_frozen(self._cpu),
                horizon=self._horizon.horizon,
            )
        return self._view

    def _key(self, waiting: Waiting) -> _Key:
        return (0 if self._fcfs else waiting.nice, waiting.eligible_since_s, waiting.job_id)

    def _place(self, waiting: Waiting) -> tuple[_Own, _Key]:
        lists = self._gpu if waiting.request.gpus else self._cpu
        own = lists.get(waiting.uid)
        if own is None:
            own = lists[waiting.uid] = _Own(waiting.uid, waiting.user)
        key = self._key(waiting)
        own.put(key, waiting)
        self._keys[waiting.job_id] = (own, key)
        self._view = None
        return own, key

    def _full(self, own: _Own) -> bool:
        return 0 < self._window_jobs <= len(own.window)

    def _enter_new(self, own: _Own, key: _Key, now_s: float) -> dict[_Key, Waiting]:
        """Only a job before the window's last, or with room left, changes the window."""
        changed: dict[_Key, Waiting] = {}
        if self._fcfs:
            return changed
        full = self._full(own)
        if (full and key > own.window[-1]) or not self._horizon.counts(own.jobs[key]):
            return changed
        if full:
            self._out(own, own.window.pop(), now_s, changed)
        self._in(own, key, now_s, changed)
        return changed

    def _fill(self, own: _Own, gone: _Key, now_s: float, changed: dict[_Key, Waiting]) -> None:
        """Fill the place of `gone` with the first counting job behind the window.

        All that count and stand before the window's last are inside already.
        """
        if self._window_jobs == 0:
            return
        last = max(gone, own.window[-1]) if own.window else gone
        for at in range(bisect_left(own.keys, last), len(own.keys)):
            key = own.keys[at]
            if own.jobs[key].window_since_s is None and self._horizon.counts(own.jobs[key]):
                self._in(own, key, now_s, changed)
                return

    def _rebuild(self, own: _Own, now_s: float, changed: dict[_Key, Waiting]) -> None:
        window: list[_Key] = []
        for key in own.keys:
            if 0 < self._window_jobs <= len(window):
                break
            if self._horizon.counts(own.jobs[key]):
                window.append(key)
        for key in set(own.window).difference(window):
            self._out(own, key, now_s, changed)
        fresh = [key for key in window if own.jobs[key].window_since_s is None]
        own.window = [key for key in window if own.jobs[key].window_since_s is not None]
        for key in fresh:
            self._in(own, key, now_s, changed)

    def _in(self, own: _Own, key: _Key, now_s: float, changed: dict[_Key, Waiting]) -> None:
        insort(own.window, key)
        self._store(own, key, replace(own.jobs[key], window_since_s=now_s), changed)

    def _out(self, own: _Own, key: _Key, now_s: float, changed: dict[_Key, Waiting]) -> None:
        self._store(own, key, _leave(own.jobs[key], now_s), changed)

    def _store(self, own: _Own, key: _Key, waiting: Waiting, changed: dict[_Key, Waiting]) -> None:
        own.replace(key, waiting)
        self._view = None
        changed[key] = waiting
