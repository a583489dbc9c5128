"""Subscriptions: who waits for jobs to end, and who watches events. Knows no socket.

Events are kept once for all watchers and sent in slices: the users with something to send have
turns, the loop has one after each, and who owes time to others waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice

from gpusched_client.errors import LimitReached
from gpusched_client.terms import EventKind, JobId
from gpuschedd.api.event_bytes import EventBytes
from gpuschedd.api.limits import (
    STRANGERS_WATCHERS_MAX,
    WAITS_PER_UID_MAX,
    WATCH_QUEUE_MAX,
    WATCH_SLICE,
    WATCHERS_MAX,
    WATCHERS_PER_UID_MAX,
    RequestBudget,
)
from gpuschedd.jobs.controller import Committed
from gpuschedd.jobs.principal import STRANGERS
from gpuschedd.store.records import Event
from gpuschedd.system.clock import wall_s

log = logging.getLogger(__name__)

Numbered = tuple[int, Event]
#: Sends some events; False while the reader is behind, and then none was sent.
Send = Callable[[Sequence[Numbered]], bool]


class Watcher:
    """One subscription of the user `account`, and up to where it was told."""

    __slots__ = ("_missed", "account", "dropped", "end", "is_held", "is_ready", "seen", "send")

    def __init__(
        self, account: int, send: Send, seen: int, end: Callable[[], None] = lambda: None
    ) -> None:
        """`seen`: the id of the last event that it need not be told; `end`: it cannot be served."""
        self.account, self.send, self.seen, self.end = account, send, seen, end
        self.dropped = 0
        self.is_held = False  # while older events are fetched
        self.is_ready = False  # its turn will come
        self._missed: deque[Numbered] = deque()

    def take_missed(self, missed: Iterable[Numbered], forgotten: int) -> None:
        """Events from before the subscription, of which the `forgotten` oldest are not there."""
        self._missed.extend(missed)
        self.dropped += forgotten
        self.is_held = False

    def serve(self, recent: Recent) -> bool:
        """Send one slice, or count what could not be sent. Whether there may be more to send."""
        if self._missed:
            ready = [self._missed.popleft() for _ in range(min(WATCH_SLICE, len(self._missed)))]
        else:
            lost, ready = recent.after(self.seen)
            self.dropped += lost
            self.seen += lost + len(ready)
        if not ready:
            self._tell_dropped(recent)
            return False
        if self.dropped:
            number, event = ready[0]
            ready.insert(0, self._marker(number - 1, event.at_s))
        if self.send(ready):
            self.dropped = 0
        else:
            self.dropped += len(ready) - (1 if self.dropped else 0)
        return True

    def _tell_dropped(self, recent: Recent) -> None:
        """Behind which nothing comes for now: whoever reads again need not wait for the next."""
        if self.dropped and self.send([self._marker(self.seen, recent.newest_at_s)]):
            self.dropped = 0

    def _marker(self, number: int, at_s: float) -> Numbered:
        return number, Event(EventKind.EVENTS_DROPPED.value, at_s, data={"count": self.dropped})


class Recent:
    """The newest events by id, for all watchers alike; ids have no gaps."""

    def __init__(self) -> None:
        self._kept: deque[Numbered] = deque(maxlen=WATCH_QUEUE_MAX)

    def add(self, events: Iterable[Numbered]) -> None:
        """Those of one commit."""
        self._kept.extend(events)

    @property
    def newest_at_s(self) -> float:
        """When the newest was; now, where none is kept."""
        return self._kept[-1][1].at_s if self._kept else wall_s()

    def after(self, seen: int) -> tuple[int, list[Numbered]]:
        """How many behind `seen` are no longer kept, and a slice of those that are."""
        if not self._kept or self._kept[-1][0] <= seen:
            return 0, []
        at = max(0, seen + 1 - self._kept[0][0])
        lost = max(0, self._kept[0][0] - seen - 1)
        return lost, list(islice(self._kept, at, at + WATCH_SLICE))


class Subscriptions:
    """Wakes those who wait and feeds watchers after each commit."""

    def __init__(self, budget: RequestBudget) -> None:
        self._budget = budget
        self._waiters: dict[JobId, set[asyncio.Event]] = {}
        self._waits: Counter[int] = Counter()  # open ones, by account
        self._recent = Recent()
        self.faces = EventBytes()
        self._watchers: set[Watcher] = set()
        self._watching: Counter[int] = Counter()  # by account
        self._ready: dict[int, deque[Watcher]] = {}  # by account, the next first
        self._turns: deque[int] = deque()  # each account of _ready that need not wait, once
        self._feeding: asyncio.Future[None] | None = None

    @property
    def watching(self) -> int:
        """How many watchers there are."""
        return len(self._watchers)

    # --- watchers -----------------------------------------------------------------------------

    def add(self, watcher: Watcher) -> None:
        """One more watcher. Raises LimitReached."""
        mine = self._watching[watcher.account]
        most = WATCHERS_PER_UID_MAX if watcher.account != STRANGERS else STRANGERS_WATCHERS_MAX
        if mine >= most and watcher.account != 0:
            raise LimitReached(f"{mine} watches of yours are open; that is the limit. Close some.")
        if len(self._watchers) >= WATCHERS_MAX and watcher.account != 0:
            raise LimitReached(f"{WATCHERS_MAX} watchers are there already; that is the limit")
        self._watchers.add(watcher)
        self._watching[watcher.account] += 1

    def remove(self, watcher: Watcher) -> None:
        """It is gone."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)
            self._watching[watcher.account] -= 1

    def go_on(self, watcher: Watcher) -> None:
        """There may be something for it."""
        if watcher.is_held or watcher.is_ready or watcher not in self._watchers:
            return
        watcher.is_ready = True
        waiting = self._ready.get(watcher.account)
        if waiting is None:
            waiting = self._ready[watcher.account] = deque()
            self._turns.append(watcher.account)
        waiting.append(watcher)
        if self._feeding is None:
            self._feeding = asyncio.ensure_future(self._feed())

    async def _feed(self) -> None:
        """One slice after the other; between two of them the loop does what else there is."""
        try:
            await asyncio.sleep(0)  # whose commit it was is answered first
            while self._turns:
                account = self._turns.popleft()
                began_s = time.perf_counter()
                self._serve_one(account)
                spent_s = time.perf_counter() - began_s
                self._budget.charge_time(account, spent_s)
                if account in self._ready:
                    self._next_turn(account)
                await asyncio.sleep(0)
        finally:
            self._feeding = None

    def _serve_one(self, account: int) -> None:
        waiting = self._ready[account]
        watcher = waiting.popleft()
        watcher.is_ready = False
        if watcher in self._watchers and not watcher.is_held and self._is_served(watcher):
            watcher.is_ready = True
            waiting.append(watcher)
        if not waiting:
            del self._ready[account]

    def _is_served(self, watcher: Watcher) -> bool:
        """Whether there may be more for it; one that cannot be served ends, and no other."""
        try:
            return watcher.serve(self._recent)
        except Exception:
            log.exception("watcher_failed account=%d", watcher.account)
            self.remove(watcher)
            watcher.end()
            return False

    def _next_turn(self, account: int) -> None:
        """At once, or when it owes nobody time."""
        delay_s = self._budget.debt_s(account)
        if delay_s == 0:
            self._turns.append(account)
        else:
            asyncio.get_running_loop().call_later(delay_s, self._come_back, account)

    def _come_back(self, account: int) -> None:
        self._turns.append(account)
        if self._feeding is None:
            self._feeding = asyncio.ensure_future(self._feed())

    def after_commit(self, committed: Committed) -> None:
        """Hear of a committed batch."""
        for change in committed.changes:
            if change.after.is_final:
                for woken in self._waiters.pop(change.after.job_id, ()):
                    woken.set()
        if committed.events:
            self._recent.add(committed.events)
            for watcher in self._watchers:
                self.go_on(watcher)

    # --- waits --------------------------------------------------------------------------------

    async def wait_final(
        self,
        account: int,
        job_ids: Iterable[JobId],
        is_live: Callable[[JobId], bool],
        timeout_s: float | None,
    ) -> bool:
        """Wait until none of the jobs is live; False after timeout_s. Raises LimitReached."""
        if self._waits[account] >= WAITS_PER_UID_MAX:
            raise LimitReached(f"{WAITS_PER_UID_MAX} waits are open already; that is the limit")
        pending = [job_id for job_id in job_ids if is_live(job_id)]
        self._waits[account] += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    for job_id in pending:
                        await self._until_final(job_id, is_live)
                    return True
        finally:
            self._waits[account] -= 1
            if not self._waits[account]:
                del self._waits[account]
        return not any(is_live(job_id) for job_id in pending)

    async def _until_final(self, job_id: JobId, is_live: Callable[[JobId], bool]) -> None:
        while is_live(job_id):
            woken = asyncio.Event()
            waiters = self._waiters.setdefault(job_id, set())
            waiters.add(woken)
            try:
                await woken.wait()
            finally:
                waiters.discard(woken)
                if not waiters and self._waiters.get(job_id) is waiters:
                    del self._waiters[job_id]
