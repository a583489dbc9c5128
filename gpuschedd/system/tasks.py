"""Work that goes on for the daemon's life and that nobody waits for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

PAUSE_S = 5.0


async def kept_up(work: Callable[[], Awaitable[None]], pause_s: float = PAUSE_S) -> None:
    """Do it to its end. Whatever goes wrong in it is logged, and it begins again after a pause."""
    while True:
        try:
            await work()
            return
        except Exception:
            log.exception("work_failed name=%s", getattr(work, "__qualname__", work))
            await asyncio.sleep(pause_s)
