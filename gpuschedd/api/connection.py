"""One connection of a client: its bytes, the order of its requests, and its time limits.

Requests are taken in the order they come; replies go out as they are ready.
"""

from __future__ import annotations

import asyncio
import logging
import select
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpusched_client.errors import GpuschedError, Internal, Unavailable
from gpusched_client.wire import framing
from gpusched_client.wire.catalog import METHODS, read_request
from gpusched_client.wire.message import Response
from gpusched_client.wire.methods import Request, Unread
from gpuschedd.api import replies
from gpuschedd.api.auth import Peer
from gpuschedd.api.limits import (
    DECODED_BYTES,
    IDLE_S,
    LINGER_S,
    LONG_COST,
    LONG_ROWS,
    OPEN_REQUESTS_MAX,
    TAKEN_AT_ONCE,
    UNSENT_BYTES_ENOUGH,
    WHOLE_REQUEST_S,
    Connections,
    OpenRequests,
    RequestBudget,
    Unsent,
    cost_of,
)
from gpuschedd.api.metering import metered
from gpuschedd.api.outgoing import Outgoing
from gpuschedd.api.readers import FairThreads
from gpuschedd.api.registry import Service

log = logging.getLogger(__name__)


LASTING = frozenset({"wait", "watch"})  # open for long, and no work meanwhile


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Shared:
    """What the connections of one server share."""

    service: Service
    budget: RequestBudget
    connections: Connections
    requests: OpenRequests[ServerConnection]
    open: set[ServerConnection]
    codec: FairThreads
    unsent: Unsent = field(default_factory=Unsent)
    finishing: set[asyncio.Task[None]] = field(default_factory=set)  # done to their end


class ServerConnection(asyncio.Protocol):
    """One client. Satisfies registry.Connection."""

    def __init__(self, shared: Shared, peer: Peer, account: int) -> None:
        """`peer`: who the kernel says is at the other end; counted already, as the account's."""
        self._shared = shared
        self.peer = peer
        self._account = account
        self._decoder = framing.Decoder(framing.REQUEST_LIMITS)
        self._transport: asyncio.Transport | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._close_callbacks: list[Callable[[], None]] = []
        self._watching = False
        self._on_drained: Callable[[], None] = _nothing
        self._outgoing = Outgoing(shared.unsent, account)
        self._paused = False
        self._is_dead = False  # takes nothing more: the boundaries of its messages are lost
        self._is_at_end = False  # the client sends nothing more
        self._has_lingered = False
        self._unread = memoryview(b"")  # what was received and not decoded yet
        self._waiting: deque[framing.Incoming] = deque()
        self._goes_on = False  # its next turn is set
        self._reading: asyncio.Task[None] | None = None  # a long one; what is behind it waits
        self._not_before: asyncio.TimerHandle | None = None  # its user asks too much
        self._is_gone = False  # the client is: seen when a turn has come that was waited for

    # --- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """From here on it is served."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._outgoing.begin(transport)
        self._shared.open.add(self)
        self._rearm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Uncount it and end what waits for it."""
        del exc
        for timer in (self._timer, self._not_before):
            if timer is not None:
                timer.cancel()
        for task in self._tasks - self._shared.finishing:
            task.cancel()
        uid = self._account
        self._outgoing.end_waiting()
        self._shared.open.discard(self)
        self._shared.requests.forget(uid, self)
        self._shared.connections.release(uid)
        for callback in self._close_callbacks:
            callback()

    def data_received(self, data: bytes) -> None:
        """Decode and take what is whole."""
        if self._is_dead:
            return
        began_mid_message = self._decoder.is_mid_message
        self._unread = memoryview(self._unread.tobytes() + data)
        self._take_waiting()
        self._rearm(keep=began_mid_message and self._decoder.is_mid_message)

    def eof_received(self) -> bool:
        """The client sends no more; replies to what it sent still go out."""
        self._is_at_end = True
        return bool(self._tasks or self._has_more)

    # --- requests -----------------------------------------------------------------------------

    @property
    def _has_more(self) -> bool:
        """Whether something that was received waits for its turn."""
        return not self._is_dead and bool(self._waiting or self._unread)

    def _take_waiting(self) -> None:
        """Take requests in order, as far as the limits on open ones and on the rate go."""
        for _ in range(TAKEN_AT_ONCE):
            if not self._may_take():
                break
            self._take(self._waiting.popleft())
        else:
            if self._has_more and not self._goes_on:
                self._goes_on = True
                asyncio.get_running_loop().call_soon(self._go_on_now)
        assert self._transport is not None
        should_pause = self._has_more
        if should_pause != self._paused and not self._transport.is_closing():
            self._paused = should_pause
            if should_pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _decode_some(self) -> None:
        """Decode until there is a message, or nothing left to decode."""
        while self._unread and not self._waiting:
            part, self._unread = self._unread[:DECODED_BYTES], self._unread[DECODED_BYTES:]
            self._waiting.extend(self._decoder.feed(part))

    def _may_take(self) -> bool:
        """Whether the next request's turn has come; if not, what will come back to it is set."""
        if self._is_dead or self._not_before is not None or self._reading:
            return False
        self._decode_some()
        if not self._waiting:
            return False
        if self._is_gone and _unread(self._waiting[0]) is Unread.NOTHING:
            return True  # and dropped, at no cost to those who wait
        if (
            len(self._tasks) >= OPEN_REQUESTS_MAX
            or self._outgoing.unsent_bytes > UNSENT_BYTES_ENOUGH
        ):
            return False
        shared, uid = self._shared, self._account
        if not shared.requests.has_room(uid):
            shared.requests.wait(uid, self)
            return False
        delay_s = shared.budget.debt_s(uid)
        if delay_s > 0:
            self._not_before = asyncio.get_running_loop().call_later(delay_s, self._go_on)
        return delay_s == 0

    def _go_on(self) -> None:
        self._not_before = None
        self.go_on()

    def _go_on_now(self) -> None:
        self._goes_on = False
        self.go_on()

    def go_on(self) -> None:
        """There may be room for another request of this user."""
        if self._transport is not None and not self._transport.is_closing():
            self._is_gone = self._is_gone or _is_hung_up(self._transport)
            self._take_waiting()
            self._rearm(keep=self._decoder.is_mid_message)
            self._end_when_done()

    def _take(self, message: framing.Incoming) -> None:
        if not isinstance(message, framing.RequestFrame):
            self._shared.budget.charge(self._account, 1.0)  # it costs time as well
        if isinstance(message, framing.Malformed):
            self._send(framing.encode_error(message.msgid, message.error))
            if message.is_fatal:
                self._close_after_linger()
            return
        if isinstance(message, framing.RequestFrame):
            if self._is_gone and _unread(message) is Unread.NOTHING:
                return
            cost = cost_of(message.params)
            self._shared.budget.charge(self._account, cost)
            task = asyncio.ensure_future(self._answer(message))
            self._tasks.add(task)
            if _unread(message) is Unread.FINISHED:
                self._shared.finishing.add(task)
                task.add_done_callback(self._shared.finishing.discard)
            if cost >= LONG_COST:
                self._reading = task  # from now on, not from its first step
            if message.method not in LASTING:
                self._shared.requests.begin(self._account)
                task.add_done_callback(lambda _: self._shared.requests.end(self._account))
            task.add_done_callback(self._answered)
            return
        # Notifications and responses get no answer in MessagePack-RPC.

    async def _answer(self, message: framing.RequestFrame) -> None:
        """Charged for each step that it takes here."""
        await metered(self._answer_it(message), self._charge_time)

    def _charge_time(self, spent_s: float) -> None:
        self._shared.budget.charge_time(self._account, spent_s)

    async def _answer_it(self, message: framing.RequestFrame) -> None:
        try:
            request = await self._read(message)
            response = await self._shared.service.handle(self, request)
            reply = await self._written(message.msgid, response)
        except GpuschedError as refusal:
            reply = framing.encode_error(message.msgid, refusal)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("request_failed method=%s", message.method[:64])
            bug = Internal(f"a bug in gpuschedd: {type(error).__name__}; its log has more")
            reply = framing.encode_error(message.msgid, bug)
        self._send(reply)

    async def _read(self, message: framing.RequestFrame) -> Request[Any]:
        """The typed request; a long one beside the loop, and no other is taken meanwhile."""
        if cost_of(message.params) < LONG_COST:
            return read_request(message.method, message.params)
        try:
            return await self._shared.codec.do(
                self._account, lambda: read_request(message.method, message.params)
            )
        finally:
            self._reading = None
            asyncio.get_running_loop().call_soon(self.go_on)

    async def _written(self, msgid: int, response: Response) -> bytes:
        """The reply's bytes; of a long one they are made beside the loop."""
        rows = getattr(response, "jobs", None) or getattr(response, "outcomes", None) or ()
        if len(rows) < LONG_ROWS:
            return replies.encode(msgid, response)
        return await self._shared.codec.do(self._account, lambda: replies.encode(msgid, response))

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._reading is task:  # it ended before its first step
            self._reading = None
        if self._transport is None or self._transport.is_closing():
            return
        self._take_waiting()
        self._rearm(keep=self._decoder.is_mid_message)
        self._end_when_done()

    def _end_when_done(self) -> None:
        """After the last reply of a connection that asks nothing more: end it."""
        assert self._transport is not None
        if self._tasks or self._has_more or self._transport.is_closing():
            return
        if self._is_at_end or self._has_lingered:
            self.close()
        elif self._is_dead and self._transport.can_write_eof():
            self._transport.write_eof()

    def _close_after_linger(self) -> None:
        """Take and drop what is still being sent, so that the client gets to read the error.

        Requests from before the flaw are answered all the same, however slow the disk is.
        """
        self._is_dead = True
        self._end_when_done()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._end_linger)

    def _end_linger(self) -> None:
        self._has_lingered = True
        self._end_when_done()
        if self._tasks:  # a `wait` among them may be answered never
            self._timer = asyncio.get_running_loop().call_later(WHOLE_REQUEST_S, self.close)
        else:
            self.close()

    # --- sending ------------------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        self._outgoing.send(data)

    def notify(self, data: bytes) -> bool:
        """Events for a watcher; False (and nothing sent) while it is half a limit behind."""
        return self._outgoing.send_unless_behind(data)

    def pause_writing(self) -> None:
        """The client does not take what it is sent."""
        self._outgoing.begin_waiting()

    def resume_writing(self) -> None:
        """It has taken all."""
        self._outgoing.end_waiting()
        self._on_drained()
        self.go_on()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call back when the connection is gone."""
        self._close_callbacks.append(callback)

    @property
    def is_watching(self) -> bool:
        """Whether a watch is on."""
        return self._watching

    def keep_open(self, on_drained: Callable[[], None]) -> None:
        """A watch is on: silence is no reason to close."""
        self._watching, self._on_drained = True, on_drained

    def watch_failed(self) -> None:
        """The watch ended by a bug: say so and close, for nothing else would be heard of it."""
        self.forget_watch()
        self._send(framing.encode_error(None, Internal("a bug in gpuschedd ended this watch")))
        self.close()

    def forget_watch(self) -> None:
        """There is none: another may begin, and silence counts again."""
        self._watching, self._on_drained = False, _nothing
        self._rearm(keep=self._decoder.is_mid_message)

    def close(self) -> None:
        """Send what is queued, then close."""
        if self._transport is not None:
            self._transport.close()

    # --- time limits --------------------------------------------------------------------------

    def _rearm(self, *, keep: bool = False) -> None:
        """The one timer of a connection: a whole request in time, or not idle for too long.

        None while it is the client that waits for its turn.
        """
        if self._is_dead or (keep and self._timer is not None and not self._has_more):
            return  # the unfinished request's own deadline stands
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._has_more:
            return
        loop = asyncio.get_running_loop()
        if self._decoder.is_mid_message:
            self._timer = loop.call_later(WHOLE_REQUEST_S, self._cut_slow)
        elif not self._tasks and not self._watching:
            self._timer = loop.call_later(IDLE_S, self.close)

    def _cut_slow(self) -> None:
        error = Unavailable(f"half a request and then silence for {WHOLE_REQUEST_S:.0f} s")
        self._send(framing.encode_error(None, error))
        self.close()


def _unread(message: framing.Incoming) -> Unread | None:
    """What is done of it where nobody is left to read the answer; None: it is no request."""
    known = METHODS.get(message.method) if isinstance(message, framing.RequestFrame) else None
    return None if known is None else known.unread


def _is_hung_up(transport: asyncio.Transport) -> bool:
    """Whether the other end is closed whole: while it is not read, nothing else tells."""
    look = select.poll()
    look.register(transport.get_extra_info("socket").fileno(), 0)
    return any(happened & select.POLLHUP for _, happened in look.poll(0))
