"""The client's end of the socket: which one, whether its server may be trusted, one call on it.

Must not know what is tried again, nor how anything is shown.
"""

from __future__ import annotations

import _socket as socket  # what `socket` is made of: that names its constants anew, for 3 ms
import errno
import os
import struct
import time
from collections.abc import Iterator
from typing import Any

from gpusched_client import paths
from gpusched_client.errors import Denied, GpuschedError, Internal, Invalid, Unavailable
from gpusched_client.wire import framing
from gpusched_client.wire.methods import Request

BACKLOG_WAIT_S = 5
_RECEIVE_BYTES = 256 * 1024
_OVERFLOW_UID = 65_534  # what a user namespace shows for a uid that it does not map


class ConnectionLost(Exception):
    """The connection broke before the reply: nobody knows whether the request was taken."""


class ReplyTimeout(Unavailable):
    """No reply in time; the daemon may be alive, so it is not asked again."""


class Connection:
    """One socket and its decoder; one call at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = framing.Decoder(framing.RESPONSE_LIMITS)
        self._msgid = 0
        self._notifications: list[framing.NotificationFrame] = []
        self._refusal: GpuschedError | None = None  # of no request: why the server closes

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def is_closed_by_peer(self) -> bool:
        """True when the server has closed this connection since the last call."""
        try:
            self._sock.settimeout(0)
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def call(self, request: Request[Any], timeout_s: float | None) -> object:
        """The decoded result of one call; raises its error, ReplyTimeout, or ConnectionLost."""
        self._msgid = (self._msgid + 1) % framing.MSGID_MAX
        data = framing.encode_request(self._msgid, request.method, request.to_wire())
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._sock.settimeout(timeout_s)
            self._sock.sendall(data)
        except TimeoutError as error:
            raise ReplyTimeout(f"the daemon took no request in {timeout_s:g} s") from error
        except OSError:
            pass  # a server that refuses and closes has said why: read it first
        while True:
            for message in self._receive(deadline, timeout_s):
                if not isinstance(message, framing.ResponseFrame):
                    continue
                if message.msgid in (None, self._msgid):
                    if message.error is not None:
                        raise message.error
                    return message.result

    def notifications(self) -> Iterator[framing.NotificationFrame]:
        """Notifications, earlier ones first; ends by ConnectionLost, or the error of the server."""
        while True:
            pending, self._notifications = self._notifications, []
            yield from pending
            if self._refusal is not None:
                raise self._refusal
            self._receive(None, None)

    def _receive(self, deadline: float | None, timeout_s: float | None) -> list[framing.Incoming]:
        """What comes next; notifications are put aside for notifications()."""
        try:
            self._sock.settimeout(_left_s(deadline))
            data = self._sock.recv(_RECEIVE_BYTES)
        except (TimeoutError, BlockingIOError) as error:
            raise ReplyTimeout(f"no reply in {timeout_s:g} s; {self._why_silent()}") from error
        except OSError as error:
            raise ConnectionLost from error
        if not data:
            raise ConnectionLost
        messages = self._decoder.feed(data)
        for message in messages:
            if isinstance(message, framing.NotificationFrame):
                self._notifications.append(message)
            elif isinstance(message, framing.ResponseFrame):
                self._refusal = message.error if message.msgid is None else self._refusal
            elif isinstance(message, framing.Malformed):
                raise Internal(f"the server does not speak our protocol: {message.error.message}")
        return messages

    def _why_silent(self) -> str:
        """What a silent server may suffer from: PID 1 also listens for one that does not start."""
        if self._sock.getpeername() == paths.SYSTEM_SOCKET:
            return (
                "the daemon is busy, stuck, or does not start; `systemctl status gpuschedd` tells "
                "which"
            )
        return "the daemon is busy or stuck. Try again later."


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.001, deadline - time.monotonic())


# -------------------------------------------------------------------------------- connecting


def connect(given: str | None) -> Connection:
    """A connection to the first live socket whose server may be trusted.

    `given` None looks where all clients look. Raises Unavailable, Denied, Invalid.
    """
    candidates = paths.client_sockets() if given is None else [given]
    refusals: list[tuple[str, str]] = []
    for path in candidates:
        try:
            sock = _open(path)
        except Invalid as error:
            if len(candidates) == 1:
                raise
            refusals.append((path, error.message))
            continue
        except OSError as error:
            refusals.append((path, (error.strerror or str(error)).lower()))
            continue
        try:
            _check_server(sock, path)
        except BaseException:
            sock.close()
            raise
        return Connection(sock)
    raise Unavailable(_nobody_there(refusals), {"paths": [path for path, _ in refusals]})


def _open(path: str) -> socket.socket:
    """A connected socket. A full backlog is a busy daemon, so it waits for some seconds."""
    if len(os.fsencode(path)) > paths.SOCKET_PATH_BYTES_MAX:
        raise Invalid(
            f"socket path {path!r} is longer than {paths.SOCKET_PATH_BYTES_MAX} bytes; "
            f"name a shorter one with {paths.SOCKET_ENV}"
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # In the kernel, where who waits for room in a full backlog is woken when there is some.
        timeval = struct.pack("ll", BACKLOG_WAIT_S, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        _connect(sock, path)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect(sock: socket.socket, path: str) -> None:
    deadline = time.monotonic() + BACKLOG_WAIT_S
    while True:
        sock.connect(path)
        try:
            sock.getpeername()
            return
        except OSError as error:
            # Interrupted by a signal or a stop while it waited, and taken for connected by Python.
            if error.errno != errno.ENOTCONN or time.monotonic() > deadline:
                raise


def _check_server(sock: socket.socket, path: str) -> None:
    """Refuse a server that is neither root nor this user: it would get our environment."""
    size = struct.calcsize("3i")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    uid = struct.unpack("iII", credentials)[1]
    if uid not in (0, os.geteuid()) and not _may_be_hidden_root(uid, path):
        raise Denied(
            f"the server at {path} runs as uid {uid}, which is neither root nor you; not used",
            {"uid": uid},
        )


def _may_be_hidden_root(uid: int, path: str, uid_map: str | None = None) -> bool:
    """Whether the server is the host's root, as a user namespace without root in its map shows it.

    Only at the system's own place, in a directory that is nobody's here and that we cannot change:
    on the host only root can have made it.
    """
    if uid != _OVERFLOW_UID or path != paths.SYSTEM_SOCKET:
        return False
    if uid_map is None:
        with open("/proc/self/uid_map") as file:
            uid_map = file.read()
    for line in uid_map.splitlines():
        first, count = map(int, line.split()[1:3])
        if first <= 0 < first + count:
            return False
    place = os.path.dirname(path)
    return os.stat(place).st_uid == _OVERFLOW_UID and not os.access(place, os.W_OK)


def _nobody_there(refusals: list[tuple[str, str]]) -> str:
    tried = "; ".join(f"{path}: {why}" for path, why in refusals)
    if [path for path, _ in refusals] == [paths.SYSTEM_SOCKET] and os.path.lexists(
        paths.SYSTEM_SOCKET
    ):
        return (
            f"the system's gpuschedd is not reachable ({tried}). Have an administrator start it "
            f"with `systemctl start gpuschedd.socket`, or name your own with {paths.SOCKET_ENV}."
        )
    return (
        f"no gpuschedd is reachable ({tried}). Start your own with `gpuschedd` "
        "(without GPUs: `gpuschedd --simulate 4x24G`), have an administrator start the system's "
        f"with `systemctl start gpuschedd.socket`, or name another with {paths.SOCKET_ENV}."
    )
