"""The state directory and the socket: made, checked, locked. One daemon per place."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from gpuschedd.supervisor.errors import STORAGE_ERRNOS

LOCK_NAME = "lock"
PROBE_NAME = "probe"
UNWRITABLE_ERRNOS = STORAGE_ERRNOS | {errno.EROFS}  # of a right place, for now
PROBE_BYTES = 64 * 1024


class AlreadyRunning(Exception):
    """Another daemon holds the lock. It is left alone; exit 75."""


class Unusable(Exception):
    """A place is not ours or cannot be made; exit 78."""


def make_directory(path: Path, mode: int) -> None:
    """Make it and what is missing above it, whatever the umask; what is there stays as it is.

    Whom its mode lets in, those above let through.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
            each.chmod(mode if each == path else 0o700 | mode & 0o055)


def prepare_state_dir(state_dir: Path, *, is_system: bool) -> None:
    """Make the directories with their modes. 0711: users reach the script they may read, no more.

    Raises Unusable, or OSError where there is no room or nothing can be written for now.
    """
    mode = 0o711 if is_system else 0o700
    for path, wanted in (
        (state_dir, mode),
        (state_dir / "jobs", 0o700),
        (state_dir / "scripts", mode),
    ):
        try:
            make_directory(path, wanted)
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise Unusable(f"{path} is not a directory of ours; choose another --state-dir")
            if stat.S_IMODE(found.st_mode) != wanted:
                os.chmod(path, wanted)
        except OSError as error:
            if error.errno in UNWRITABLE_ERRNOS:
                raise  # not a wrong place: a later start may find room
            raise Unusable(f"{path} cannot be made: {error.strerror}") from error


def keep_directories(state_dir: Path, *, is_system: bool) -> None:
    """Make those again that somebody removed. Raises as `prepare_state_dir`."""
    if not all((state_dir / name).is_dir() for name in ("jobs", "scripts")):
        prepare_state_dir(state_dir, is_system=is_system)


class Lock:
    """The state directory, held for life. The kernel frees it when we are gone, however we end.

    Two locks, of a file that says by whom and of the directory itself: a file can be removed, and
    whoever made it again would hold a lock that nobody else knows.
    """

    def __init__(self, state_dir: Path) -> None:
        """Raises AlreadyRunning, Unusable, or OSError where nothing can be written for now."""
        self._state_dir = state_dir
        try:
            self._file = _lock_file(state_dir)
        except OSError as error:
            if error.errno in UNWRITABLE_ERRNOS:
                raise
            path = state_dir / LOCK_NAME
            raise Unusable(f"{path} cannot be locked: {error.strerror}; remove it") from error
        try:
            self._directory, self._is_alone = _lock_directory(state_dir)
        except AlreadyRunning:
            os.close(self._file)
            raise

    def look(self) -> None:
        """Make a lock file that was removed again.

        Raises AlreadyRunning where another daemon was faster, Unusable where the directory itself
        is gone or another one.
        """
        if not is_at(self._directory, self._state_dir):
            raise Unusable(f"{self._state_dir} was removed or replaced while it was in use")
        if not is_at(self._file, self._state_dir / LOCK_NAME):
            try:
                before, self._file = self._file, _lock_file(self._state_dir)
            except AlreadyRunning:
                if self._is_alone:
                    return  # a daemon that starts, and that the directory's lock turns away
                raise
            os.close(before)

    def release(self) -> None:
        """For those who live on without it."""
        os.close(self._file)
        os.close(self._directory)


def _lock_file(state_dir: Path) -> int:
    descriptor = os.open(state_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
            raise
        who = f"pid {holder}" if holder.isdecimal() else "pid unknown"
        raise AlreadyRunning(
            f"another gpuschedd ({who}) runs on {state_dir}. Use it, end it "
            f"(kill {holder or 'PID'}), or choose another --state-dir and --socket."
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _lock_directory(state_dir: Path) -> tuple[int, bool]:
    """The descriptor, and whether this file system locks directories."""
    descriptor = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            os.close(descriptor)
            raise AlreadyRunning(
                f"another gpuschedd runs on {state_dir}, though its lock file was removed. Find it "
                f"with `fuser {state_dir}` and end it, or choose another --state-dir and --socket."
            ) from error
        return descriptor, False  # the file's lock has to do
    return descriptor, True


def is_at(descriptor: int, path: Path) -> bool:
    """Whether path still leads to what the descriptor holds."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def bind_socket(path: Path, *, mode: int, dir_mode: int) -> socket.socket:
    """Listen at path. A stale socket goes only after a connect to it failed; a live one stays.

    Call it with the lock held.
    """
    directory = path.parent
    try:
        make_directory(directory, dir_mode)
        about = directory.stat()
    except OSError as error:
        raise Unusable(f"{directory} cannot be made: {error.strerror}") from error
    if about.st_uid not in (0, os.geteuid()):
        raise Unusable(f"{directory} belongs to uid {about.st_uid}; choose another --socket")
    remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        old_mask = os.umask(0o777 & ~mode)
        try:
            listening.bind(os.fspath(path))
        finally:
            os.umask(old_mask)
    except OSError as error:
        listening.close()
        raise Unusable(f"{path} cannot be bound: {error}; choose another --socket") from error
    listening.setblocking(False)
    return listening


def remove_stale(path: Path) -> None:
    """Take away a socket's name that nobody answers at. Raises AlreadyRunning or Unusable."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise Unusable(f"{path} exists and is not a socket; remove it or choose another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        try:
            trial.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            raise Unusable(f"{path} cannot be tried: {error}") from error
    raise AlreadyRunning(f"another daemon answers at {path}")


def probe(state_dir: Path) -> None:
    """Write, sync and remove a small file; OSError says that there is no room."""
    path = state_dir / PROBE_NAME
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, b"\0" * PROBE_BYTES)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
