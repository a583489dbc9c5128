"""Subscriptions: who waits for jobs to end, and who watches events. Knows no socket."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

from gpusched_client.errors import LimitReached
from gpusched_client.terms import EventKind, JobId
from gpuschedd.api.limits import WAITS_PER_UID_MAX, WATCH_QUEUE_MAX, WATCHERS_MAX
from gpuschedd.jobs.controller import Committed
from gpuschedd.store.records import Event

Send = Callable[[int, Event], bool]
Numbered = tuple[int, Event]


class Watcher:
    """One subscription. `send` returns False while its reader is behind."""

    __slots__ = ("_held", "dropped", "send")

    def __init__(self, send: Send) -> None:
        self.send = send
        self.dropped = 0
        self._held: list[Numbered] | None = None

    def offer(self, number: int, event: Event) -> None:
        """Send, or count what could not be sent and say so as soon as there is room."""
        if self._held is not None:
            if len(self._held) < WATCH_QUEUE_MAX:
                self._held.append((number, event))
            else:
                self.dropped += 1
            return
        if self.dropped and not self._send_marker(number - 1, event.at_s):
            self.dropped += 1
            return
        if not self.send(number, event):
            self.dropped += 1

    def hold(self) -> None:
        """Keep live events back while older ones are fetched."""
        self._held = []

    def _send_marker(self, number: int, at_s: float) -> bool:
        marker = Event(EventKind.EVENTS_DROPPED.value, at_s, data={"count": self.dropped})
        if not self.send(number, marker):
            return False
        self.dropped = 0
        return True

    def release(self, missed: Iterable[Numbered], forgotten: int) -> None:
        """A marker for the `forgotten` oldest, the other old ones, those kept back, live ones."""
        held, self._held = self._held or [], None
        self.dropped += forgotten
        for number, event in (*missed, *held):
            self.offer(number, event)


class Subscriptions:
    """Wakes those who wait and feeds watchers after each commit."""

    def __init__(self) -> None:
        self._waiters: dict[JobId, set[asyncio.Event]] = {}
        self._waits: Counter[int] = Counter()  # open ones, by uid
        self._watchers: set[Watcher] = set()

    @property
    def watching(self) -> int:
        """How many watchers there are."""
        return len(self._watchers)

    def add(self, watcher: Watcher) -> None:
        """One more watcher. Raises LimitReached."""
        if len(self._watchers) >= WATCHERS_MAX:
            raise LimitReached(f"{WATCHERS_MAX} watchers are there already; that is the limit")
        self._watchers.add(watcher)

    def remove(self, watcher: Watcher) -> None:
        """It is gone."""
        self._watchers.discard(watcher)

    def after_commit(self, committed: Committed) -> None:
        """Hear of a committed batch."""
        for change in committed.changes:
            if change.after.is_final:
                for woken in self._waiters.pop(change.after.job_id, ()):
                    woken.set()
        for watcher in tuple(self._watchers):
            for number, event in committed.events:
                watcher.offer(number, event)

    async def wait_final(
        self,
        uid: int,
        job_ids: Iterable[JobId],
        is_live: Callable[[JobId], bool],
        timeout_s: float | None,
    ) -> bool:
        """Wait until none of the jobs is live; False after timeout_s. Raises LimitReached."""
        if self._waits[uid] >= WAITS_PER_UID_MAX:
            raise LimitReached(f"{WAITS_PER_UID_MAX} waits are open already; that is the limit")
        pending = [job_id for job_id in job_ids if is_live(job_id)]
        self._waits[uid] += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    for job_id in pending:
                        await self._until_final(job_id, is_live)
                    return True
        finally:
            self._waits[uid] -= 1
            if not self._waits[uid]:
                del self._waits[uid]
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
