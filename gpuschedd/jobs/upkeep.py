"""Upkeep of the database beside the service: what is old goes, all of it is looked through.

In small slices with pauses: no commit waits long for one, and no slice holds the loop up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gpusched_client.errors import StorageError
from gpuschedd.jobs.controller import Controller
from gpuschedd.store.checks import Checker, looked_at
from gpuschedd.store.database import StoreBroken, StoreDamaged, StoreFull
from gpuschedd.store.history import History, read
from gpuschedd.store.retention import Ages, Old
from gpuschedd.store.writer import Store
from gpuschedd.system.threads import started_pool

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 60.0
CHECK_AFTER_S = 30.0  # from the start, which has enough to do
CHECK_AGAIN_S = 86_400.0
DROP_PAUSE_FACTOR = 3.0  # a slice is followed by so many times its own time of rest
CHECK_PAUSE_FACTOR = 1.0
CHECK_RETRY_S = 60.0


class Upkeep:
    """Two tasks of the daemon, with a thread and reading connections of their own."""

    def __init__(self, controller: Controller, path: Path) -> None:
        self._controller = controller
        self._path = path
        self._thread = started_pool(1, "upkeep")
        self._checker: Checker | None = None

    def close(self) -> None:
        """After the tasks have been cancelled; a long look is cut short."""
        if self._checker is not None:
            self._checker.interrupt()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._close_checker()

    def _close_checker(self) -> None:
        if self._checker is not None:
            self._checker.close()
            self._checker = None

    async def _apart(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # --- retention ------------------------------------------------------------------------------

    async def forget_regularly(self) -> None:
        """Drop what is past its limit; a full disk or another's lock is waited out."""
        while True:
            try:
                await self.forget()
            except StoreBroken:
                return  # the controller ends with it, and the daemon with that
            except (StoreFull, StorageError, RuntimeError) as error:
                log.warning("retention_put_off error=%s", error)
            await asyncio.sleep(SWEEP_EVERY_S)

    async def forget(self) -> None:
        """All that is past its limit now."""
        kept, clock = self._controller.state.config.retention, self._controller.clock
        ages = Ages(kept.requests_s, kept.events_s)
        await self._controller.in_database(Store.mend)
        find = partial(_find_old, self._path, ages, clock.now_s(), clock.wall_s())
        for old in await self._apart(find):
            while await self._drop(old):
                pass

    async def _drop(self, old: Old) -> bool:
        began_s = time.monotonic()
        more: bool = await self._controller.in_database(partial(Store.drop, old=old))
        await asyncio.sleep(DROP_PAUSE_FACTOR * (time.monotonic() - began_s))
        return more

    # --- checks ---------------------------------------------------------------------------------

    async def check_regularly(self) -> None:
        """Look through everything, once a day. What is damaged ends the daemon."""
        await asyncio.sleep(CHECK_AFTER_S)
        while True:
            try:
                await self.check()
            except StoreBroken:
                return
            except (StoreFull, RuntimeError) as error:
                log.warning("check_put_off error=%s", error)
                await asyncio.sleep(CHECK_RETRY_S)
                continue
            log.info("database_checked")
            await asyncio.sleep(CHECK_AGAIN_S)

    async def check(self) -> None:
        """All of the database once. Raises StoreDamaged, and the controller ends with it."""
        self._close_checker()  # of a look that was put off
        await self._controller.in_database(Store.mend)
        self._checker = await self._looked_at(partial(Checker, self._path))
        assert self._checker is not None
        steps = self._checker.steps()
        while (step := await self._looked_at(partial(next, steps, None))) is not None:
            began_s = time.monotonic()
            await self._looked_at(step)
            await asyncio.sleep(CHECK_PAUSE_FACTOR * min(1.0, time.monotonic() - began_s))
        self._close_checker()

    async def _looked_at(self, look: Callable[[], Any]) -> Any:
        try:
            return await self._apart(partial(looked_at, look))
        except StoreDamaged as damage:
            await self._controller.in_database(partial(_give_up, damage))


def _find_old(path: Path, ages: Ages, now_sched_s: float, now_s: float) -> list[Old]:
    history = History(path)
    try:
        return read(history, lambda history: history.old(ages, now_sched_s, now_s))
    finally:
        history.close()


def _give_up(damage: StoreDamaged, _: Store) -> None:
    """Where the writer works: no later commit is trusted."""
    raise damage
