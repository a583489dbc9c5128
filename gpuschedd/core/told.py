"""Told: what a plan says of its jobs, made when somebody asks.

Owns that it is made once. Knows no wording: it is handed the pass that tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Generic, TypeVar

from gpusched_client.terms import JobId
from gpuschedd.core.model import Plan, PriorityParts, Reason

T = TypeVar("T")


class Telling:
    """The reasons and priority parts of one plan."""

    def __init__(self, tell: Callable[[], Plan]) -> None:
        """`tell` makes the plan again, with both; it is called once at most."""
        self._tell: Callable[[], Plan] | None = tell
        self._plan: Plan | None = None
        self.reasons: Mapping[JobId, Reason] = _Part(self, attrgetter("reasons"))
        self.priorities: Mapping[JobId, PriorityParts] = _Part(self, attrgetter("priorities"))

    def plan(self) -> Plan:
        """The plan with all that is told of it. What it was made from is let go."""
        tell = self._tell
        if tell is not None:
            self._plan = tell()
            self._tell = None
        assert self._plan is not None
        return self._plan


class _Part(Mapping[JobId, T], Generic[T]):
    """One mapping of it."""

    def __init__(self, told: Telling, part: Callable[[Plan], Mapping[JobId, T]]) -> None:
        self._told = told
        self._part = part

    def __getitem__(self, job_id: JobId) -> T:
        return self._part(self._told.plan())[job_id]

    def __iter__(self) -> Iterator[JobId]:
        return iter(self._part(self._told.plan()))

    def __len__(self) -> int:
        return len(self._part(self._told.plan()))

    def __repr__(self) -> str:
        return repr(self._part(self._told.plan()))
