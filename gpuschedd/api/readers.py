"""Threads beside the loop whose work has turns: a user who queues a thousand delays only their own.

`FairReader` for questions to the database, `FairThreads` for the rest. Each user has one thread at
a time; among those who wait for one, the turn goes round.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from gpusched_client.errors import LimitReached
from gpuschedd.api.limits import QUESTIONS_PER_UID_MAX
from gpuschedd.store.history import History, read
from gpuschedd.system.threads import started_pool

T = TypeVar("T")
Work = Callable[[], Any]
Charge = Callable[[int, float], None]

READERS = 3  # connections: one user's long question leaves the others theirs


class FairThreads:
    """Some threads, and who waits for one. Nothing here knows what is asked."""

    def __init__(self, name: str, threads: int = 1, charge: Charge = lambda *_: None) -> None:
        """`charge`: takes the seconds that a thread was busy for an account."""
        self._threads = started_pool(threads, name)
        self._room = threads
        self._charge = charge
        self._waiting: dict[int, deque[tuple[Work, asyncio.Future[Any]]]] = {}
        self._turns: deque[int] = deque()  # each account of _waiting that has no thread, next first
        self._served: set[int] = set()

    async def do(self, account: int, work: Callable[[], T]) -> T:
        """The result, when the user's turn has come. Raises LimitReached."""
        own = self._waiting.get(account)
        if own is None:
            own = self._waiting[account] = deque()
            if account not in self._served:
                self._turns.append(account)
        if len(own) >= QUESTIONS_PER_UID_MAX:
            raise LimitReached(
                f"{len(own)} questions of yours wait for an answer; that is the limit"
            )
        reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        own.append((work, reply))
        self._next()
        return await reply

    def _next(self) -> None:
        """Give each thread that is idle to the next user."""
        while len(self._served) < self._room and self._turns:
            account = self._turns.popleft()
            work, reply = self._waiting[account].popleft()
            if not self._waiting[account]:
                del self._waiting[account]
            if reply.cancelled():
                self._back(account)
            else:
                self._served.add(account)
                asyncio.ensure_future(self._answer(account, work, reply))  # noqa: RUF006  # reply holds it

    def _back(self, account: int) -> None:
        if account in self._waiting:
            self._turns.append(account)

    async def _answer(self, account: int, work: Work, reply: asyncio.Future[Any]) -> None:
        loop = asyncio.get_running_loop()
        try:
            spent_s, result = await loop.run_in_executor(self._threads, _timed, work)
        except Exception as error:
            if not reply.done():
                reply.set_exception(error)
        else:
            self._charge(account, spent_s)
            if not reply.done():
                reply.set_result(result)
        finally:
            self._served.discard(account)
            self._back(account)
            self._next()

    def close(self) -> None:
        """Finish what is being done, and nothing more."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    began_s = time.thread_time()
    result = work()
    return time.thread_time() - began_s, result


class FairReader(FairThreads):
    """The reading connections and who waits for one."""

    def __init__(self, *histories: History, charge: Charge = lambda *_: None) -> None:
        super().__init__("history", len(histories), charge)
        self._histories = histories
        self._idle = deque(histories)

    @classmethod
    def over(cls, path: Path, charge: Charge) -> FairReader:
        """A few connections to the database."""
        return cls(*(History(path) for _ in range(READERS)), charge=charge)

    async def ask(self, account: int, work: Callable[[History], T]) -> T:
        """The answer, when the user's turn has come. Raises LimitReached."""
        return await self.do(account, lambda: self._read(work))

    def _read(self, work: Callable[[History], T]) -> T:
        history = self._idle.popleft()  # there are as many as threads
        try:
            return read(history, work)
        finally:
            self._idle.append(history)

    def close(self) -> None:
        """Finish the questions that are being answered, and close the connections."""
        super().close()
        for history in self._histories:
            history.close()
