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
    """Make the directories with their modes. 0711 lets users reach their own script, no more."""
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
            if error.errno in STORAGE_ERRNOS:
                raise  # not a wrong place: a later start may find room
            raise Unusable(f"{path} cannot be made: {error.strerror}") from error


def lock(state_dir: Path) -> int:
    """Hold the state directory for life; the descriptor is never closed by us.

    Raises AlreadyRunning. The kernel frees it when the process is gone, however it ends.
    """
    path = state_dir / LOCK_NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
            raise
        raise AlreadyRunning(
            f"another gpuschedd (pid {holder or 'unknown'}) runs on {state_dir}"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


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
    _remove_stale(path)
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


def _remove_stale(path: Path) -> None:
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
