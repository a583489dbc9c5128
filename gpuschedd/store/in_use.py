"""The mark beside a database in use: which commit it has reached at least.

SQLite takes a log that is missing, cut or damaged for one that was never written, and goes on with
an older state in silence. So after each commit its number is written down here; a start that finds
an older database refuses it. The number is never ahead of what is durable, whenever the daemon or
the host goes down: it is written after the commit, and an older one is as right. An orderly end
takes the mark away.
"""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from pathlib import Path

from gpuschedd.supervisor.errors import SHORT_ERRNOS, STORAGE_ERRNOS

MARK_NAME = "gpuschedd.in-use"
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
        content = (state_dir / MARK_NAME).read_bytes()
    except FileNotFoundError:
        return None
    number, _, check = content.rstrip(b"\n").partition(b" ")
    return int(number) if number.isdigit() and check == _check(number) else None


def _check(number: bytes) -> bytes:
    return b"%08x" % zlib.crc32(number)


class Mark:
    """Written by the database thread of the daemon that has the state directory."""

    def __init__(self, state_dir: Path, commits: int) -> None:
        """Where there is no room for it, it comes with a later commit."""
        self._path = state_dir / MARK_NAME
        self._fd: int | None = None
        self._unsynced = 0
        self.reach(commits)

    def reach(self, commits: int) -> None:
        """That commit is durable. What cannot be written stays older, which is as right."""
        try:
            self._reach(commits)
        except OSError as error:
            if error.errno not in STORAGE_ERRNOS | SHORT_ERRNOS:
                raise

    def _reach(self, commits: int) -> None:
        number = b"%020d" % commits
        content = number + b" " + _check(number) + b"\n"
        if self._fd is None:
            self._fd = self._made(content)
            return
        os.pwrite(self._fd, content, 0)
        if self._unsynced % SYNC_EVERY == 0:
            os.fsync(self._fd)
        self._unsynced += 1

    def _made(self, content: bytes) -> int:
        """A new one in the place of the last, whole or not at all."""
        temporary = self._path.with_name(f"{MARK_NAME}.tmp")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, content)
            os.fsync(fd)
            os.replace(temporary, self._path)
            sync_directory(self._path.parent)
        except BaseException:
            os.close(fd)
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
