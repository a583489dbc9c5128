"""A daemon of a few lines for the client's tests: a real socket, MessagePack, canned answers.

Speaks the wire with msgpack alone, so that a mistake in framing.py cannot cancel itself out.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

Handler = Callable[[dict[str, Any]], Any]


# What commands ask beside their one call; it is not among the kept requests.
HELLO = {"protocol": 1, "version": "0", "mode": "system", "uid": 0, "user": "root", "admin": False}


class Refusal(Exception):
    """What a handler raises to answer with an error."""

    def __init__(self, code: str, message: str, data: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.wire = {"code": code, "message": message, "data": data or {}}


class Hangup(Exception):
    """What a handler raises to close the connection without an answer."""


class Raw(Exception):
    """What a handler raises to answer with these very bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.data = data


class FakeServer:
    """Answers each method by its handler and keeps the requests it was sent."""

    def __init__(self, path: Path, handlers: dict[str, Handler]) -> None:
        self.path, self.handlers = path, handlers
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.follow_ups: list[dict[str, Any]] = []  # events: one goes out behind each reply
        self.connections = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening and drop every connection."""
        self.path.unlink(missing_ok=True)
        for sock in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def drop_connections(self) -> None:
        """Close what is connected; new connections are still taken."""
        for sock in self._open:
            sock.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        unpacker = msgpack.Unpacker(unicode_errors="surrogateescape")
        try:
            while data := sock.recv(65536):
                unpacker.feed(data)
                for kind, msgid, method, params in unpacker:
                    assert kind == 0
                    self._answer(sock, msgid, method, params[0])
        except (OSError, Hangup):
            pass
        finally:
            sock.close()

    def _answer(self, sock: socket.socket, msgid: int, method: str, params: Any) -> None:
        if method == "hello" and method not in self.handlers:
            sock.sendall(msgpack.packb([1, msgid, None, HELLO]))
            return
        self.requests.append((method, params))
        try:
            reply = [1, msgid, None, self.handlers[method](params)]
        except Refusal as refusal:
            reply = [1, msgid, refusal.wire, None]
        except Raw as raw:
            sock.sendall(raw.data)
            return
        sock.sendall(msgpack.packb(reply))
        if self.follow_ups:
            sock.sendall(msgpack.packb([2, "event", [self.follow_ups.pop(0)]]))
