"""Direct launch without a new interpreter each time: one process has the supervisor and forks it.

The forker may die or hang at any time: then the launch goes the longer way, and the next one starts
a new forker. Both ways may come to the same directory; its claim lets one of them run the job.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from gpuschedd.run.job_dir import JobDir
from gpuschedd.run.launchers.direct import (
    ENVIRONMENT,
    LAUNCH_DEADLINE_S,
    NO_BOUNDS,
    NO_CLAIM,
    REASON_BYTES_MAX,
    SUPERVISOR,
    Bounds,
    DirectLauncher,
    raise_for,
)
from gpuschedd.supervisor.forker import MARK

log = logging.getLogger(__name__)

END_DEADLINE_S = 1.0  # a forker whose socket was closed ends at once, unless it hangs
ANSWER_BYTES_MAX = 2**16

#: What tells one state of the supervisor's files from another: names, inodes, times and sizes.
Signature = tuple[tuple[str, int, int, int], ...]


class ForkerGone(Exception):
    """No supervisor came of it, and nobody says why; or not in time."""


class ForkingLauncher(DirectLauncher):
    """Supervisors forked by a process that ends with the daemon; they do not."""

    def __init__(self, python: str = sys.executable, program: str = SUPERVISOR) -> None:
        super().__init__(python, program)
        self._files = (Path(python), Path(program).parent)
        self._lock = threading.Lock()
        self._forker: Forker | None = None

    def warm_up(self) -> None:
        """Start the forker, so that the first job finds it."""
        try:
            self._current()
        except (OSError, ForkerGone) as error:
            log.warning("no_forker error=%s", error)

    def launch(self, job_dir: JobDir, bounds: Bounds = NO_BOUNDS) -> None:
        forker: Forker | None = None
        try:
            forker = self._current()
            status, said = forker.fork(job_dir.path)
        except (OSError, ForkerGone) as error:
            log.warning("no_forker job=%d error=%s", job_dir.job_id, error or "it is gone")
            self._drop(forker)
            super().launch(job_dir, bounds)
        else:
            raise_for(status, said)

    def close(self) -> None:
        with self._lock:
            self._replace(None)

    def _current(self) -> Forker:
        """The forker of the files that are there now. Raises OSError or ForkerGone."""
        signature = _signature(*self._files)
        with self._lock:
            if self._forker is None or self._forker.signature != signature:
                self._replace(Forker([*self._supervisor, "--forker"], signature))
            assert self._forker is not None, "it was just made"
            return self._forker

    def _drop(self, forker: Forker | None) -> None:
        """Never again this one; another thread may have replaced it already."""
        with self._lock:
            if forker is not None and forker is self._forker:
                self._replace(None)

    def _replace(self, forker: Forker | None) -> None:
        old, self._forker = self._forker, forker
        if old is not None:
            old.close()


class Forker:
    """The process and the socket that nobody else has. `signature`: of the files it was made of."""

    def __init__(self, command: Sequence[str], signature: Signature) -> None:
        self.signature = signature
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A forker that takes nothing must not hold up the launch for ever.
        self._requests.settimeout(LAUNCH_DEADLINE_S)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            self._requests.close()
            raise
        finally:
            theirs.close()

    def fork(self, path: Path) -> tuple[int, bytes]:
        """The exit status of a launch, EXIT_OK with the claim, and what was said of it.

        Raises ForkerGone after LAUNCH_DEADLINE_S, and that or OSError where nobody took it.
        """
        answer_fd, their_fd = os.pipe()
        try:
            try:
                socket.send_fds(self._requests, [os.fsencode(path)], [their_fd])
            finally:
                os.close(their_fd)
            return _answer(answer_fd, time.monotonic() + LAUNCH_DEADLINE_S)
        finally:
            os.close(answer_fd)

    def close(self) -> None:
        """It ends at the end of its socket, after what it was sent before."""
        self._requests.close()
        try:
            self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _answer(fd: int, deadline_s: float) -> tuple[int, bytes]:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    said = b""
    while MARK not in said[:-1]:
        if not poll.poll(1000 * max(0.0, deadline_s - time.monotonic())):
            raise ForkerGone(NO_CLAIM)
        part = os.read(fd, ANSWER_BYTES_MAX)
        if not part:
            raise ForkerGone(said[-REASON_BYTES_MAX:].decode("utf-8", "replace").strip())
        said = said[-ANSWER_BYTES_MAX:] + part
    said, _, status = said.partition(MARK)
    return status[0], said


def _signature(python: Path, package: Path) -> Signature:
    """Raises OSError where one of them is missing."""
    rows = [("python", python.stat())]
    with os.scandir(package) as entries:
        rows += [(entry.name, entry.stat()) for entry in entries if entry.name.endswith(".py")]
    return tuple(sorted((name, row.st_ino, row.st_mtime_ns, row.st_size) for name, row in rows))
