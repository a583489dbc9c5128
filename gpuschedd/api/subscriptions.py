"""Those who listen: `wait`ers for jobs to end, and `watch`ers of events. Knows no socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress

from gpusched_client.terms import JobId
from gpusched_client.wire.job_messages import EVENTS_DROPPED
from gpuschedd.jobs.controller import Committed
from gpuschedd.store.records import Event

WATCHERS_MAX = 1_000
WATCH_QUEUE_MAX = 1_000  # events that wait for one slow reader; then they are counted, not kept

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
        marker = Event(EVENTS_DROPPED, at_s, data={"count": self.dropped})
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


class Audience:
    """Wakes waiters and feeds watchers after each commit."""

    def __init__(self) -> None:
        self._waiters: dict[JobId, set[asyncio.Event]] = {}
        self.watchers: set[Watcher] = set()

    def after_commit(self, committed: Committed) -> None:
        """Hear of a committed batch."""
        for change in committed.changes:
            if change.after.is_final:
                for woken in self._waiters.pop(change.after.job_id, ()):
                    woken.set()
        for watcher in tuple(self.watchers):
            for number, event in committed.events:
                watcher.offer(number, event)

    async def wait_final(
        self,
        job_ids: Iterable[JobId],
        is_live: Callable[[JobId], bool],
        timeout_s: float | None,
    ) -> bool:
        """Wait until none of the jobs is live; False after timeout_s."""
        pending = [job_id for job_id in job_ids if is_live(job_id)]
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for job_id in pending:
                    await self._until_final(job_id, is_live)
                return True
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
