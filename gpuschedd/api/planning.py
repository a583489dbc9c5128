"""What only the planner can tell: dry runs, explanations, places in the queue.

Asked of snapshots, which are frozen, in threads beside the loop, one question of a user's at a
time. What it takes is charged to who asked: a thread holds up the loop half of the time that it is
busy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gpuschedd.api.limits import RequestBudget
from gpuschedd.api.readers import FairThreads

T = TypeVar("T")

PLANNERS = 2  # one user's long question leaves the others one


class PlannerThread:
    """Questions to the planner, in turns."""

    def __init__(self, budget: RequestBudget) -> None:
        self._budget = budget
        self._thread = FairThreads("planner", PLANNERS, budget.charge_time)

    async def ask(self, account: int, work: Callable[[], T]) -> T:
        """The answer, when the user's turn has come. Raises LimitReached."""
        await self._budget.settled(account)
        return await self._thread.do(account, work)

    def close(self) -> None:
        """Finish what is being asked."""
        self._thread.close()
