"""Work beside the loop: kept until it is done, ended together, its failures told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Tasks:
    """The tasks of one owner."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def go(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Begin it; after `close` nothing begins, and there is no task."""
        if self._is_closed:
            work.close()
            return None
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self) -> None:
        """End all of them, and wait until they have."""
        self._is_closed = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("attempt_work_failed", exc_info=error)
