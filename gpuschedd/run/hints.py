"""Hints: "ID.ATTEMPT" datagrams of supervisors. Only wake-ups: what does not read is dropped."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

from gpusched_client.terms import JobId
from gpuschedd.gpu.attribution import JobKey
from gpuschedd.system.listening import identity_of
from gpuschedd.system.state_dir import Unusable

HINT_BYTES_MAX = 64


class HintSocket:
    """The socket at which supervisors say that there is something to read."""

    def __init__(self, path: Path, take: Callable[[JobKey], None]) -> None:
        """Bound over its directory: the path of the state may be longer than a socket's address."""
        self._take = take
        self._path = path
        try:
            self._bind()
        except IsADirectoryError as error:
            raise Unusable(f"{path} is a directory; remove it") from error

    def _bind(self) -> None:
        path = self._path
        path.unlink(missing_ok=True)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                bound.bind(f"/proc/self/fd/{directory}/{path.name}")
            finally:
                os.close(directory)
            os.chmod(path, 0o600)
        except OSError:
            bound.close()
            raise
        self._socket, self._identity = bound, identity_of(path)
        asyncio.get_running_loop().add_reader(bound, self._read)

    def look(self) -> None:
        """Bind anew where the name was lost: call it with the state directory's lock held."""
        if identity_of(self._path) != self._identity:
            before = self._socket
            self._bind()  # or the one from before stays, and the next look tries again
            asyncio.get_running_loop().remove_reader(before)
            before.close()

    def close(self) -> None:
        """Stop listening; supervisors do not notice."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _read(self) -> None:
        while True:
            try:
                content = self._socket.recv(HINT_BYTES_MAX)
            except (BlockingIOError, InterruptedError):
                return
            job_id, dot, attempt = content.decode("ascii", "replace").partition(".")
            if dot and job_id.isdecimal() and attempt.isdecimal():
                self._take((JobId(int(job_id)), int(attempt)))
