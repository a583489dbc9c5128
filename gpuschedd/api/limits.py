"""What one user's requests may take of the daemon's time while others want some too.

A bucket for each uid, filled at a steady rate up to a second's worth. A request is charged by what
it touches when it is taken, a long answer when its turn comes. Whoever owes waits, but only while
somebody else is active: alone, anybody may have all of it. root waits for nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

ACTIVE_S = 1.0  # so long after a request its sender counts as active
REST_S = 0.005
ROWS_A_REQUEST = 4.0  # jobs that are named or shown: so many cost as much as one more request
KEPT_MAX = 10_000  # buckets

_NAMING = ("jobs", "job_ids", "ids")


def cost_of(params: object) -> float:
    """Of a request by the jobs that it names, at least 1.0. Looks at lengths alone.

    Nobody has read the parameters yet: what is no map is refused later, and costs as the least.
    """
    named = [params.get(key) for key in _NAMING] if isinstance(params, dict) else []
    rows = max((len(value) for value in named if isinstance(value, list | tuple)), default=0)
    return 1.0 + rows / ROWS_A_REQUEST


class Budget:
    """All buckets."""

    def __init__(self, per_second: float, *, is_shared: bool) -> None:
        """`is_shared` False: a daemon of one user, where nobody waits for anybody."""
        self.per_second = per_second
        self._is_shared = is_shared
        self._left: dict[int, tuple[float, float]] = {}  # uid -> (left, at)
        self._seen: OrderedDict[int, float] = OrderedDict()  # uid -> last request, oldest first

    def charge(self, uid: int, cost: float) -> None:
        """Take a request of this uid."""
        now_s = time.monotonic()
        self._seen[uid] = now_s
        self._seen.move_to_end(uid)
        if len(self._left) >= KEPT_MAX or len(self._seen) >= KEPT_MAX:
            self._left.clear()
            self._seen.clear()
        self._left[uid] = (self._left_of(uid, now_s) - cost, now_s)

    def owed_s(self, uid: int) -> float:
        """How long the uid's next request has to wait now; 0.0 where it need not."""
        if uid == 0 or not self._is_shared:
            return 0.0
        now_s = time.monotonic()
        left = self._left_of(uid, now_s)
        if left > 0 or not self._others_are_active(uid, now_s):
            return 0.0
        return min(ACTIVE_S, (1.0 - left) / self.per_second)

    async def turn(self, uid: int, rows: int) -> None:
        """Wait until this uid may have so many rows, and charge them."""
        while (wait_s := self.owed_s(uid)) > 0:
            await asyncio.sleep(wait_s)
        self.charge(uid, rows / ROWS_A_REQUEST)

    async def rest(self, uid: int) -> None:
        """A pause in long work for this uid: long where it owes, else as short as can be."""
        await asyncio.sleep(REST_S if self.owed_s(uid) > 0 else 0)

    def _left_of(self, uid: int, now_s: float) -> float:
        left, at_s = self._left.get(uid, (self.per_second, now_s))
        # What was taken while nobody else was active is not held against anybody for long.
        return max(-self.per_second, min(self.per_second, left + (now_s - at_s) * self.per_second))

    def _others_are_active(self, uid: int, now_s: float) -> bool:
        for other, at_s in reversed(self._seen.items()):
            if now_s - at_s > ACTIVE_S:
                return False
            if other != uid:
                return True
        return False
