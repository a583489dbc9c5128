"""Threads beside the loop whose work has turns: a user who queues a thousand delays only their own.

One thread each: `FairReader` for questions to the database, `PlannerThread` of `planning` for what
only the planner can tell. Among the users who have work waiting, the turn goes round.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from gpusched_client.errors import LimitReached
from gpuschedd.api.limits import QUESTIONS_PER_UID_MAX
from gpuschedd.store.history import History, read
from gpuschedd.system.threads import started_pool

T = TypeVar("T")
Work = Callable[[], Any]


class FairThread:
    """One thread, and who waits for it. Nothing here knows what is asked."""

    def __init__(self, name: str) -> None:
        self._thread = started_pool(1, name)
        self._waiting: dict[int, deque[tuple[Work, asyncio.Future[Any]]]] = {}
        self._turns: deque[int] = deque()  # each account of _waiting once, next first
        self._busy = False

    async def do(self, account: int, work: Callable[[], T]) -> T:
        """The result, when the user's turn has come. Raises LimitReached."""
        own = self._waiting.get(account)
        if own is None:
            own = self._waiting[account] = deque()
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
        """Give the next user one turn, unless somebody has it."""
        while not self._busy and self._turns:
            account = self._turns.popleft()
            work, reply = self._waiting[account].popleft()
            if self._waiting[account]:
                self._turns.append(account)
            else:
                del self._waiting[account]
            if not reply.cancelled():
                self._busy = True
                asyncio.ensure_future(self._answer(work, reply))  # noqa: RUF006  # reply holds it

    async def _answer(self, work: Work, reply: asyncio.Future[Any]) -> None:
        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._thread, work)
        except Exception as error:
            if not reply.done():
                reply.set_exception(error)
        else:
            if not reply.done():
                reply.set_result(result)
        finally:
            self._busy = False
            self._next()

    def close(self) -> None:
        """Finish what is being done, and nothing more."""
        self._thread.shutdown(wait=True, cancel_futures=True)


class FairReader(FairThread):
    """The reading connection and who waits for it."""

    def __init__(self, history: History) -> None:
        super().__init__("history")
        self._history = history

    async def ask(self, account: int, work: Callable[[History], T]) -> T:
        """The answer, when the user's turn has come. Raises LimitReached."""
        return await self.do(account, lambda: read(self._history, work))

    def close(self) -> None:
        """Finish the question that is being answered, and close the connection."""
        super().close()
        self._history.close()
