"""A session: a connection that is opened when it is needed, and again when the daemon restarts.

Owns what is tried again and for how long. Must not know a single method.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from gpusched_client.errors import GpuschedError, Internal, Unavailable
from gpusched_client.wire.message import Response
from gpusched_client.wire.methods import Request
from gpusched_client.wire.transport import Connection, ConnectionLost, ReplyTimeout, connect

PAUSE_S, PAUSE_MAX_S = 0.02, 0.5

R = TypeVar("R", bound=Response)


class Session:
    """Calls of one client. A call is tried again for `reconnect_s` when its connection is lost.

    The first connection of all is not waited for.
    """

    def __init__(self, socket_path: str | None, *, timeout_s: float, reconnect_s: float) -> None:
        self._given_path = socket_path
        self._timeout_s, self._reconnect_s = timeout_s, reconnect_s
        self._connection: Connection | None = None
        self._was_connected = False

    def close(self) -> None:
        """Close the connection; a later call opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def call(
        self,
        request: Request[R] | Callable[[], Request[R]],
        *,
        extra_s: float | None = 0.0,
        repeatable: bool = True,
    ) -> R:
        """One request and its reply, tried again over a new connection when this one is lost.

        `request` may be a function, for what depends on the time of each try. The reply may take
        `extra_s` longer than the session's time-out; None: as long as it likes.
        """
        timeout_s = None if extra_s is None else self._timeout_s + extra_s
        deadline = self._deadline()
        while True:
            connection = self._connected(deadline)
            asked_at_s = time.monotonic()
            asked = request() if callable(request) else request
            try:
                return _typed(asked, connection.call(asked, timeout_s))
            except (ConnectionLost, Unavailable) as error:
                self.close()
                now_s = time.monotonic()
                if deadline is None or now_s - asked_at_s > self._reconnect_s:
                    deadline = now_s + self._reconnect_s
                if not repeatable or isinstance(error, ReplyTimeout) or now_s >= deadline:
                    raise _as_unavailable(error, asked.method) from error
                time.sleep(PAUSE_S)
            except GpuschedError:
                raise
            except BaseException:
                self.close()  # a reply may be half read
                raise

    def subscribe(self, request: Request[R]) -> tuple[Connection, R]:
        """A connection that is the caller's alone, and the reply to what it was asked first.

        The session's next call opens another. Raises ConnectionLost where it broke in between.
        """
        connection = self._connected(self._deadline())
        self._connection = None
        try:
            return connection, _typed(request, connection.call(request, self._timeout_s))
        except BaseException:
            connection.close()
            raise

    def _deadline(self) -> float | None:
        return time.monotonic() + self._reconnect_s if self._was_connected else None

    def _connected(self, deadline: float | None) -> Connection:
        pause_s = PAUSE_S
        if self._connection is not None and self._connection.is_closed_by_peer():
            self.close()  # idle for too long: nothing is lost
        while self._connection is None:
            try:
                self._connection = connect(self._given_path)
                self._was_connected = True
            except Unavailable:
                if deadline is None or time.monotonic() >= deadline:
                    raise
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
        return self._connection


def _as_unavailable(error: Exception, method: str) -> Unavailable:
    if isinstance(error, Unavailable):
        return error
    return Unavailable(f"the daemon closed the connection during {method}, and stays away")


def _typed(request: Request[R], result: object) -> R:
    """The reply as its type. One that is not is the daemon's bug, not the caller's mistake."""
    try:
        return request.read_result(result)
    except GpuschedError as error:
        raise Internal(f"the daemon's reply is not understood: {error.message}") from error
