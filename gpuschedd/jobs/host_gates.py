"""What keeps everything on this host from starting: a full disk, a host closed to users."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor

from gpuschedd.jobs.state import State

log = logging.getLogger(__name__)

STORAGE_RETRY_S = 1.0


class StorageGate:
    """Closed after a write that found no room, until a probe file can be written."""

    def __init__(
        self,
        state: State,
        probe: Callable[[], None],
        database: Executor,
        changed: Callable[[], None],
    ) -> None:
        """`probe` raises OSError; it runs between batches. `changed`: a pass should follow."""
        self._state = state
        self._probe = probe
        self._database = database
        self._changed = changed
        self._timer: asyncio.TimerHandle | None = None
        self._probing: asyncio.Future[None] | None = None

    def close(self, why: str) -> None:
        """Launch nothing; look for room again soon."""
        if self._state.storage_blocked is None:
            log.warning("storage_blocked error=%s", why)
            self._changed()
        self._state.storage_blocked = why
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(STORAGE_RETRY_S, self._start_probe)

    def stop(self) -> None:
        """The daemon ends."""
        if self._timer is not None:
            self._timer.cancel()

    def _start_probe(self) -> None:
        self._probing = asyncio.ensure_future(self._look())

    async def _look(self) -> None:
        """Room again: what waits is tried again. Else look again later."""
        self._timer = None
        try:
            await asyncio.get_running_loop().run_in_executor(self._database, self._probe)
        except OSError as error:
            self.close(str(error))
            return
        self._state.storage_blocked = None
        log.info("storage_writable")
        self._changed()


def follow_closed(state: State, closed: str | None) -> None:
    """As of this pass: jobs that were started on a closed host would all fail at their account."""
    if closed is not None and state.host_closed is None:
        log.warning("host_closed text=no job starts until this has ended: %s", closed)
    elif closed is None and state.host_closed is not None:
        log.info("host_open")
    state.host_closed = closed
