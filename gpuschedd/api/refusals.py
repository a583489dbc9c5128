"""Connections that are refused: told why and closed, the many of one user later than the few.

Who opens another one as soon as one is closed would have the daemon accept and close all day; so
beyond some a second they are kept open, unread, for a while. What is kept is bounded too: what is
more is closed without a word.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass

from gpusched_client.errors import GpuschedError
from gpusched_client.wire import framing
from gpuschedd.api.limits import (
    REFUSALS_AT_ONCE,
    REFUSALS_KEPT_MAX,
    REFUSALS_KEPT_S,
    REFUSALS_MAX,
)

CLOSED_AT_ONCE = 64  # of those that were kept; then the others have their turn


@dataclass(frozen=True, slots=True)
class Kept:
    """One that hears later why."""

    until_s: float  # monotonic
    connection: socket.socket
    message: bytes


class Refusals:
    """Owner of what is refused."""

    def __init__(self) -> None:
        descriptors, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._kept_max = min(REFUSALS_KEPT_MAX, descriptors // 4)
        self._kept: deque[Kept] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._second = 0  # monotonic: the one that is counted
        self._told: Counter[int] = Counter()  # refused at once in it, by account
        self._messages: dict[str, bytes] = {}

    def refuse(self, connection: socket.socket, account: int, refusal: GpuschedError) -> None:
        """Close it now or soon; the peer reads why."""
        now_s = time.monotonic()
        if self._is_at_once(account, now_s):
            _close(connection, self._message(refusal))
        elif len(self._kept) < self._kept_max:
            self._kept.append(Kept(now_s + REFUSALS_KEPT_S, connection, self._message(refusal)))
            self._set_timer()
        else:
            connection.close()

    def close(self) -> None:
        """Close what is kept."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._kept:
            self._close_first()

    def _is_at_once(self, account: int, now_s: float) -> bool:
        if int(now_s) != self._second:
            self._second = int(now_s)
            self._told.clear()
        self._told[account] += 1
        return self._told[account] <= REFUSALS_AT_ONCE

    def _message(self, refusal: GpuschedError) -> bytes:
        """A flood gets the same one again and again."""
        known = self._messages.get(refusal.message)
        if known is None:
            if len(self._messages) >= REFUSALS_MAX:
                self._messages.clear()
            known = self._messages[refusal.message] = framing.encode_error(None, refusal)
        return known

    def _set_timer(self) -> None:
        if self._timer is None and self._kept:
            loop = asyncio.get_running_loop()
            delay_s = max(0.0, self._kept[0].until_s - time.monotonic())
            self._timer = loop.call_later(delay_s, self._close_due)

    def _close_due(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        for _ in range(CLOSED_AT_ONCE):
            if not self._kept or self._kept[0].until_s > now_s:
                break
            self._close_first()
        self._set_timer()

    def _close_first(self) -> None:
        kept = self._kept.popleft()
        _close(kept.connection, kept.message)


def _close(connection: socket.socket, message: bytes) -> None:
    with suppress(OSError):
        connection.send(message, socket.MSG_DONTWAIT)
    connection.close()
