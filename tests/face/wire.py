"""The socket as a client of a few lines sees it: plain MessagePack-RPC; the shapes of answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack

from tests.face.normal import Shapes, without_facts

REPLY_S = 60.0
#: Maps that stand in the answers of several methods, by a key that only they have.
MAPS = {"submitted_at_s": "<job>", "promised_bytes": "<gpu>"}


class Refused(Exception):
    """An error of the daemon's."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(error["message"])
        self.error = dict(error)


class Wire:
    """One connection."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(REPLY_S)
        self._socket.connect(str(path))
        self._unpacker = msgpack.Unpacker()
        self._msgid = 0
        self.shapes = Shapes(MAPS)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def shut(self) -> None:
        """End the stream under a thread that reads it."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one call, its shape noted. Raises Refused."""
        try:
            result = self.look(method, **params)
        except Refused as refused:
            self.shapes.add("error", refused.error)
            raise
        self.shapes.add(method, without_facts(result))
        return result

    def look(self, method: str, **params: Any) -> dict[str, Any]:
        """The same for what is asked again and again until it is so: its shape is chance."""
        self._msgid += 1
        self._socket.sendall(msgpack.packb([0, self._msgid, method, [params]]))
        kind, msgid, error, result = self.read()
        assert (kind, msgid) == (1, self._msgid)
        if error is not None:
            raise Refused(error)
        assert isinstance(result, dict)
        return result

    def read(self) -> list[Any]:
        """The next message."""
        while True:
            for message in self._unpacker:
                assert isinstance(message, list)
                return message
            data = self._socket.recv(65536)
            if not data:
                raise EOFError("the daemon hung up")
            self._unpacker.feed(data)


class Watch:
    """A connection that collects every event from the first one on."""

    def __init__(self, path: Path) -> None:
        self._wire = Wire(path)
        self._wire.look("watch", since=0)
        self._heard = threading.Condition()
        self._events: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        while True:
            try:
                kind, method, (event,) = self._wire.read()
            except (OSError, EOFError):
                return
            assert (kind, method) == (2, "event")
            with self._heard:
                self._events.append(event)
                self._heard.notify_all()

    def wait_for(self, kind: str, count: int = 1, **facts: Any) -> list[dict[str, Any]]:
        """All events so far, as soon as `count` of that kind and with these facts are there."""

        def is_there() -> bool:
            found = [e for e in self._events if e["kind"] == kind and facts.items() <= e.items()]
            return len(found) >= count

        with self._heard:
            assert self._heard.wait_for(is_there, REPLY_S), f"no {kind} {facts} in {REPLY_S:g} s"
            return list(self._events)

    def close(self) -> None:
        """End it; the thread ends with its connection."""
        self._wire.shut()
        self._thread.join(REPLY_S)
        self._wire.close()
