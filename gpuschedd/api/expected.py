"""Expected starts: a walk on demand, beside the loop, kept as long as it is good enough."""

from __future__ import annotations

import asyncio
import math
import time

from gpusched_client.terms import JobId
from gpuschedd.api.limits import EXPECTED_FIRST, WALK_PATIENCE_S, WALK_REST
from gpuschedd.core import forecast
from gpuschedd.core.model import ExpectedStart, Plan, Policy, Snapshot
from gpuschedd.jobs.controller import Controller


class ExpectedStarts:
    """The last walk over the queue."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._walk: _Walk | None = None
        self._found: dict[JobId, ExpectedStart] | None = None  # of the last walk that has ended

    async def find(self) -> dict[JobId, ExpectedStart]:
        """The separate walk: only when somebody looks, for the newest pass, and beside the loop.

        One that takes long is kept a while over newer passes, so that lookers cannot have all of
        the daemon's time.
        """
        state = self._controller.state
        made = state.plan
        if made is None:
            return {}
        walk = self._walk
        if walk is None or (walk.made is not made and time.monotonic() >= walk.kept_until_s):
            walk = self._walk = _Walk(made)
            walk.begin(self._controller.snapshots.take(), state.policy)
        if self._found is not None and not walk.found.done():
            # On a busy daemon: what was true a moment ago, rather than nothing for long.
            await asyncio.wait({walk.found}, timeout=WALK_PATIENCE_S)
            if not walk.found.done():
                return self._found
        self._found = await asyncio.shield(walk.found)
        return self._found


class _Walk:
    """Expected starts as of one pass, and how long they are good enough."""

    def __init__(self, made: Plan) -> None:
        self.made = made
        self.kept_until_s = math.inf  # while it is under way

    def begin(self, snapshot: Snapshot, policy: Policy) -> None:
        """Walk in a thread."""
        self.found = asyncio.ensure_future(asyncio.to_thread(self._take, snapshot, policy))

    def _take(self, snapshot: Snapshot, policy: Policy) -> dict[JobId, ExpectedStart]:
        began_s = time.monotonic()
        walked = forecast.expected_starts(snapshot, policy, EXPECTED_FIRST)
        ended_s = time.monotonic()
        self.kept_until_s = ended_s + WALK_REST * (ended_s - began_s)
        return {entry.job_id: entry for entry in walked}
