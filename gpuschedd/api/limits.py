"""What one user may cost the others: connections, requests at once, waits, and the daemon's time.

Every limit on the users of the wire has its number here. Time is a bucket for each uid, filled at a
steady rate up to a second's worth: a request is charged by what it names when it is taken, and by
the time that it takes while it does; a long answer when its turn comes. A user in debt waits, but
only while somebody else is active: alone, anybody may have all of it. root waits for nobody. All
uids without an account share one bucket, and small numbers of everything else.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from gpusched_client.errors import LimitReached
from gpuschedd.jobs.principal import STRANGERS

# Of one connection.
OPEN_REQUESTS_MAX = 64  # then it is not read until some are answered
UNSENT_BYTES_MAX = 4 * 2**20
UNSENT_BYTES_ENOUGH = 64 * 1024  # then it is not read until all is sent
UNREAD_S = 60.0  # without a byte taken of what is unsent, then it is closed
TAKEN_AT_ONCE = 64  # messages; then the others have their turn
DECODED_BYTES = 4 * 1024  # at once: five bytes of a message may have a thousand when decoded
WHOLE_REQUEST_S = 10.0  # from a request's first byte to its last
IDLE_S = 60.0  # with no request open and no watch
LINGER_S = 1.0  # after an error that ends the connection

# Of one user. Connections per uid and requests a second are in the configuration.
OPEN_PER_UID_MAX = 16  # requests that are being answered; those that wait are not
WAITS_PER_UID_MAX = 1_000
WATCHERS_PER_UID_MAX = 256
UNSENT_PER_UID_MAX = 16 * 2**20  # bytes; then the connection with the most is closed
ROWS_AT_ONCE = 1_000  # jobs in a user's answers that are being made
CHANGED_AT_ONCE = 100  # jobs that a user's commands under way name: 30 ms of the database's time
QUESTIONS_PER_UID_MAX = 2_000  # to the database, that wait for their turn
DENIALS_AN_HOUR_MAX = 100  # audit rows of denials per uid and hour; the rest is only counted

# Of all uids without an account, together.
STRANGERS_CONNECTIONS_MAX = 16
STRANGERS_WATCHERS_MAX = 4
ARRIVING_MAX = 64  # connections whose account is being asked for

# Of all. Connections in all are in the configuration.
KEPT_FOR_ROOT = 16  # connections that only root may take
WATCHERS_MAX = 1_000
WATCH_QUEUE_MAX = 5_000  # newest events, kept for watchers; a slow one is told how many it missed
WATCH_SLICE = 50  # events at once; then the others have their turn
UNSENT_IN_ALL_MAX = 64 * 2**20  # bytes; then who has the most is cut
CROWD = 200  # connections; what they took is given back when most of them are gone
REFUSALS_MAX = 1_000  # texts of refused connections that are kept
REFUSALS_AT_ONCE = 32  # refused connections of a user in a second; the others are told later
REFUSALS_KEPT_S = 5.0  # so much later
REFUSALS_KEPT_MAX = 8_192  # of all users; the others are closed without a word

# Of long answers.
VIEWS_AT_ONCE = 10  # a few tenths of a millisecond
EXPECTED_FIRST = 200  # jobs whose expected start is walked to
BRIEFS_KEPT_MAX = 1_000  # of requests, a few KiB each at most
POSITIONS_MAX = 2_000  # so far down the queue a job's place is looked for
WALK_PATIENCE_S = 0.02  # then what the walk before it found is good enough
WALK_REST = 20.0  # times as long as it took, before the next

LONG_ROWS = 100  # from so many on a message is read or written beside the loop
LONG_COST = 1.0 + LONG_ROWS / 4.0  # as `cost_of` counts them

ACTIVE_S = 1.0  # so long after a request its sender counts as active
REST_S = 0.005
ROWS_A_REQUEST = 4.0  # jobs that are named or shown: so many cost as much as one more request
TIME_COST = 4.0  # a second of the daemon's time costs so many seconds' worth of requests
STRANGERS_COST = 4.0  # times what it costs a user: they share a part of one user's bucket
KEPT_MAX = 10_000  # buckets, and uids whose account is known
ACCOUNTS_KEPT_S = 60.0  # so long an account that was just made may be unknown

_NAMING = ("jobs", "job_ids", "ids")


def cost_of(params: object) -> float:
    """Of a request by the jobs that it names, at least 1.0. Looks at lengths alone.

    The parameters are not validated yet: a non-map is charged the minimum and refused later.
    """
    named = [params.get(key) for key in _NAMING] if isinstance(params, dict) else []
    rows = max((len(value) for value in named if isinstance(value, list | tuple)), default=0)
    return 1.0 + rows / ROWS_A_REQUEST


class Connections:
    """The open connections, by user."""

    def __init__(self, per_uid: int, in_all: int) -> None:
        self.per_uid = per_uid
        self.in_all = in_all
        self.total = 0
        self.most = 0  # since a crowd was gone
        self.on_crowd_gone: Callable[[], None] = lambda: None
        self.on_first: Callable[[], None] = lambda: None  # where none was open
        self._of: Counter[int] = Counter()

    def admit(self, uid: int) -> None:
        """Count one more of this user. Raises LimitReached; root is never refused."""
        if uid == STRANGERS and self._of[uid] >= STRANGERS_CONNECTIONS_MAX:
            raise LimitReached(
                f"{self._of[uid]} connections of uids without an account are open; they share "
                f"{STRANGERS_CONNECTIONS_MAX}. Close some, or connect as a user of this host."
            )
        if uid != 0 and self._of[uid] >= self.per_uid:
            raise LimitReached(
                f"{self._of[uid]} connections of uid {uid} are open; the limit is {self.per_uid}. "
                "Close some."
            )
        if uid != 0 and self.total >= self.in_all - KEPT_FOR_ROOT:
            raise LimitReached(
                f"{self.total} connections are open; the limit is {self.in_all}. Try again later."
            )
        self._of[uid] += 1
        self.total += 1
        self.most = max(self.most, self.total)
        if self.total == 1:
            self.on_first()

    def release(self, uid: int) -> None:
        """One of this user's is gone."""
        self.total -= 1
        self._of[uid] -= 1
        if self._of[uid] <= 0:
            del self._of[uid]
        if self.most >= CROWD and self.total <= self.most // 4:
            self.most = self.total
            self.on_crowd_gone()


class Waiter(Protocol):
    """Something that waits for room."""

    def go_on(self) -> None:
        """There may be room now."""


class Reader(Protocol):
    """Somebody who is sent something."""

    @property
    def unsent_bytes(self) -> int:
        """That it has not taken yet."""

    def cut(self, why: str) -> None:
        """Close it, and drop what is unsent."""


W = TypeVar("W", bound=Waiter)


class OpenRequests(Generic[W]):
    """The requests of each user that are being answered, and the connections that wait for room.

    A connection that takes all the room there is waits behind the others for more.
    """

    def __init__(self) -> None:
        self._open: Counter[int] = Counter()
        self._waiting: dict[int, dict[W, None]] = {}  # by uid, in the order in which they came

    def has_room(self, uid: int) -> bool:
        """Whether one more request of this user may be answered now."""
        return self._open[uid] < OPEN_PER_UID_MAX

    def begin(self, uid: int) -> None:
        """One more is being answered."""
        self._open[uid] += 1

    def end(self, uid: int) -> None:
        """One less: the user's connection that has waited longest may go on."""
        self._open[uid] -= 1
        if self._open[uid] <= 0:
            del self._open[uid]
        waiting = self._waiting.get(uid, {})
        while waiting and self.has_room(uid):
            first = next(iter(waiting))
            del waiting[first]
            first.go_on()
        if not waiting:
            self._waiting.pop(uid, None)

    def wait(self, uid: int, waiter: W) -> None:
        """Have it called when there is room."""
        self._waiting.setdefault(uid, {})[waiter] = None

    def forget(self, uid: int, waiter: W) -> None:
        """It is gone."""
        self._waiting.get(uid, {}).pop(waiter, None)


class Turns:
    """Work of one user under way at once, in rows: what would be more waits, in order.

    So no user can have more of one step of the daemon than that, however much is asked at once.
    """

    def __init__(self, rows_max: int = ROWS_AT_ONCE) -> None:
        self._rows_max = rows_max
        self._under_way: Counter[int] = Counter()  # rows, by account
        self._waiting: dict[int, deque[tuple[int, asyncio.Future[None]]]] = {}
        self._woken: Counter[int] = Counter()  # whose turn has come and who did not go on yet

    @asynccontextmanager
    async def of(self, account: int, rows: int) -> AsyncIterator[None]:
        """While the block lasts, so many rows of the account's are under way."""
        rows = max(1, min(rows, self._rows_max))
        is_behind = account in self._waiting or self._woken[account]
        if is_behind or not self._has_room(account, rows):
            await self._turn(account, rows)
        else:
            self._under_way[account] += rows
        try:
            yield
        finally:
            self._end(account, rows)

    async def _turn(self, account: int, rows: int) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(account, deque()).append((rows, mine))
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._woken[account] -= 1
                self._end(account, rows)
            raise
        self._woken[account] -= 1
        self._wake(account)  # who came while this one had not gone on

    def _end(self, account: int, rows: int) -> None:
        self._under_way[account] -= rows
        self._wake(account)
        if not self._under_way[account]:
            del self._under_way[account]

    def _has_room(self, account: int, rows: int) -> bool:
        return self._under_way[account] + rows <= self._rows_max

    def _wake(self, account: int) -> None:
        waiting = self._waiting.get(account, deque())
        while waiting and (waiting[0][1].done() or self._has_room(account, waiting[0][0])):
            wanted, first = waiting.popleft()
            if not first.done():  # its connection may be gone
                self._under_way[account] += wanted
                self._woken[account] += 1
                first.set_result(None)
        if not waiting:
            self._waiting.pop(account, None)
        if not self._woken[account]:
            del self._woken[account]


class Unsent:
    """The bytes that wait for readers, by user and in all: who reads nothing holds no memory."""

    def __init__(self) -> None:
        self._of: dict[int, set[Reader]] = {}

    def begin(self, account: int, reader: Reader) -> None:
        """Not all that was sent to it has been taken."""
        self._of.setdefault(account, set()).add(reader)

    def end(self, account: int, reader: Reader) -> None:
        """It has taken all, or is gone."""
        readers = self._of.get(account)
        if readers is not None:
            readers.discard(reader)
            if not readers:
                del self._of[account]

    def bound(self, account: int) -> None:
        """Cut those with the most until both bounds hold again."""
        while sum(self._sizes(account).values()) > UNSENT_PER_UID_MAX:
            self._cut(account)
        while (totals := {uid: sum(self._sizes(uid).values()) for uid in self._of}) and (
            sum(totals.values()) > UNSENT_IN_ALL_MAX
        ):
            self._cut(max(totals, key=totals.__getitem__))

    def _sizes(self, account: int) -> dict[Reader, int]:
        return {reader: reader.unsent_bytes for reader in self._of.get(account, ())}

    def _cut(self, account: int) -> None:
        sizes = self._sizes(account)
        largest = max(sizes, key=sizes.__getitem__)
        self.end(account, largest)
        largest.cut("has the most unread bytes")


class RequestBudget:
    """The buckets of all users."""

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
        self._take(uid, cost, now_s)

    def charge_time(self, uid: int, spent_s: float) -> None:
        """Take the daemon's time for this uid, whether it has asked or is only told something."""
        self._take(uid, spent_s * TIME_COST * self.per_second, time.monotonic())

    def _take(self, uid: int, cost: float, now_s: float) -> None:
        if len(self._left) >= KEPT_MAX or len(self._seen) >= KEPT_MAX:
            self._left.clear()
            self._seen.clear()
        if uid == STRANGERS:
            cost *= STRANGERS_COST
        self._left[uid] = (self._left_of(uid, now_s) - cost, now_s)

    def debt_s(self, uid: int) -> float:
        """How long the uid's next request has to wait now; 0.0 where it need not."""
        if uid == 0 or not self._is_shared:
            return 0.0
        now_s = time.monotonic()
        left = self._left_of(uid, now_s)
        if left > 0 or not self._others_had_less(uid, left, now_s):
            return 0.0
        return min(ACTIVE_S, (1.0 - left) / self.per_second)

    async def acquire(self, uid: int, rows: int) -> None:
        """Wait until this uid may have so many rows, and charge them."""
        await self.settled(uid)
        self.charge(uid, rows / ROWS_A_REQUEST)

    async def settled(self, uid: int) -> None:
        """Wait until this uid owes nobody time."""
        while (wait_s := self.debt_s(uid)) > 0:
            await asyncio.sleep(wait_s)

    async def pause(self, uid: int) -> None:
        """A pause in long work for this uid: long where it owes, else as short as can be."""
        await asyncio.sleep(REST_S if self.debt_s(uid) > 0 else 0)

    def _left_of(self, uid: int, now_s: float) -> float:
        left, at_s = self._left.get(uid, (self.per_second, now_s))
        # What was taken while nobody else was active is not held against anybody for long.
        return max(-self.per_second, min(self.per_second, left + (now_s - at_s) * self.per_second))

    def _others_had_less(self, uid: int, left: float, now_s: float) -> bool:
        """Whether somebody else is active who had less of late: who had least waits for nobody."""
        for other, at_s in reversed(self._seen.items()):
            if now_s - at_s > ACTIVE_S:
                return False
            if other != uid and self._left_of(other, now_s) > left:
                return True
        return False
