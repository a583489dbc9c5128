"""The mark beside a database in use: which commit it has reached at least.

SQLite takes a log that is missing, cut or damaged for one that was never written, and goes on with
an older state in silence. So after each commit its number is written down here; a start that finds
an older database refuses it. The number is never ahead of what is durable, whenever the daemon or
the host goes down: it is written after the commit, and an older one is as right. An orderly end
takes the mark away.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpuschedd.supervisor.errors import SHORT_ERRNOS, STORAGE_ERRNOS
from gpuschedd.system.state_dir import is_at

log = logging.getLogger(__name__)

MARK_NAME = "gpuschedd.in-use"
_MARK_BYTES_MAX = 64
SYNC_EVERY = 32  # commits; a kill loses none of those between, a power cut may


def sync_directory(path: Path) -> None:
    """Make the names in it durable."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_mark(state_dir: Path) -> int | None:
    """The number of a commit that must be there; None: the last end was orderly, or says nothing.

    A mark that cannot be read accuses nobody.
    """
    try:
        # A FIFO in its place would be waited for.
        fd = os.open(state_dir / MARK_NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        content = os.read(fd, _MARK_BYTES_MAX)
    except OSError:
        return None
    finally:
        os.close(fd)
    number, _, check = content.rstrip(b"\n").partition(b" ")
    return int(number) if number.isdigit() and check == _check(number) else None


def _check(number: bytes) -> bytes:
    return b"%08x" % zlib.crc32(number)


@contextmanager
def _passing() -> Iterator[None]:
    """For what comes with a later commit where there is no room, or too little else, for now."""
    try:
        yield
    except OSError as error:
        if error.errno not in STORAGE_ERRNOS | SHORT_ERRNOS:
            raise


class Mark:
    """Written by the database thread of the daemon that has the state directory."""

    def __init__(self, state_dir: Path, commits: int) -> None:
        """Where there is no room for it, it comes with a later commit."""
        self._path = state_dir / MARK_NAME
        self._fd: int | None = None
        self._unsynced = 0
        self._commits = commits
        self.reach(commits)

    def reach(self, commits: int) -> None:
        """That commit is durable. What cannot be written stays older, which is as right."""
        self._commits = commits
        with _passing():
            self._reach()

    def look(self) -> None:
        """Make it again where it was removed or something else put in its place. Raises OSError."""
        if self._fd is None or is_at(self._fd, self._path):
            return
        with _passing():
            before, self._fd = self._fd, self._made()
            os.close(before)
            log.warning("mark_made_again path=%s text=its name was gone", self._path)

    def _content(self) -> bytes:
        number = b"%020d" % self._commits
        return number + b" " + _check(number) + b"\n"

    def _reach(self) -> None:
        if self._fd is None:
            self._fd = self._made()
            return
        os.pwrite(self._fd, self._content(), 0)
        if self._unsynced % SYNC_EVERY == 0:
            os.fsync(self._fd)
        self._unsynced += 1

    def _made(self) -> int:
        """A new one in the place of the last, whole or not at all."""
        temporary = self._path.with_name(f"{MARK_NAME}.tmp")
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, self._content())
            os.fsync(fd)
            os.replace(temporary, self._path)
            sync_directory(self._path.parent)
        except BaseException:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        return fd

    def close(self, *, complete: bool) -> None:
        """`complete`: all is in the database, nothing in its log. Then the mark goes."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if complete:
            self._path.unlink(missing_ok=True)
            with suppress(FileNotFoundError):  # the directory was moved away
                sync_directory(self._path.parent)
