"""The daemon's sockets by their names: bound, looked at, bound anew where a name was lost.

A cleaner of old files, a logout or a careless rm takes a socket's name away; nobody can connect any
more, and nothing tells the daemon. What somebody else has put there is left alone.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpuschedd.system.state_dir import AlreadyRunning, Unusable, bind_socket

log = logging.getLogger(__name__)

Identity = tuple[int, int]  # device and inode


@dataclass(slots=True)
class Door:
    """One name that clients connect to. `listening` None: not bound for now."""

    path: Path
    mode: int
    dir_mode: int
    listening: socket.socket | None = None
    identity: Identity | None = None
    is_ours: bool = True  # False: the service manager bound it, and removes its name
    trouble: str | None = None  # why it could not be bound anew, as it was told last

    def bind(self) -> socket.socket:
        """Raises AlreadyRunning or Unusable."""
        self.listening = bind_socket(self.path, mode=self.mode, dir_mode=self.dir_mode)
        self.identity, self.is_ours = identity_of(self.path), True
        return self.listening

    @property
    def is_open(self) -> bool:
        """Whether the name still leads to our socket."""
        if self.listening is None or self.identity is None:
            return False
        return self.identity == identity_of(self.path)


class Doors:
    """All of them. `serve` and `leave` begin and end to accept on a socket."""

    def __init__(
        self, serve: Callable[[socket.socket], None], leave: Callable[[socket.socket], None]
    ) -> None:
        self._serve = serve
        self._leave = leave
        self._doors: list[Door] = []

    def open(self, door: Door, passed: socket.socket | None = None) -> None:
        """Serve it from now on; `passed`: bound by the service manager already.

        Raises AlreadyRunning or Unusable.
        """
        if passed is None:
            listening = door.bind()
        else:
            door.listening = listening = passed
            door.identity, door.is_ours = identity_of(door.path), False
        self._doors.append(door)
        self._serve(listening)
        if not door.is_open:  # the service manager's has lost its name
            self._bind_anew(door)

    def open_if_possible(self, door: Door) -> None:
        """A second way: where it cannot be had now, it is tried again at each look."""
        self._doors.append(door)
        self._bind_anew(door)

    def look(self) -> None:
        """Bind anew what has lost its name."""
        for door in self._doors:
            if not door.is_open:
                self._bind_anew(door)

    def close(self) -> None:
        """Accept no more; what we bound ourselves loses its name."""
        for door in self._doors:
            if door.listening is not None:
                self._leave(door.listening)
                door.listening.close()

    def remove_names(self) -> None:
        """After the end: names that are still ours go."""
        for door in self._doors:
            if door.is_ours and door.is_open:
                door.path.unlink(missing_ok=True)

    def _bind_anew(self, door: Door) -> None:
        before = door.listening
        try:
            listening = door.bind()
        except (AlreadyRunning, Unusable, OSError) as error:
            if str(error) != door.trouble:
                door.trouble = str(error)
                log.warning("socket_lost path=%s text=%s", door.path, error)
            return
        if before is not None:
            log.warning("socket_bound_anew path=%s text=its name was gone", door.path)
            self._leave(before)
            before.close()
        door.trouble = None
        self._serve(listening)


def identity_of(path: Path) -> Identity | None:
    """None where there is nothing of that name, or nobody can look."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
