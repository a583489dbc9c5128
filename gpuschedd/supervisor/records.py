"""The job directory's records: their names and form, read and written whole.

A record is a JSON object with a `version`; byte strings are text with one code point a byte, under
keys that end in `_b`. The daemon reads and writes them with the same functions.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SPEC, CLAIM, STARTED, ORDERS, ENDED, EXIT = "spec", "claim", "started", "orders", "ended", "exit"
LOG = "supervisor.log"

SPEC_BYTES_MAX = 16 * 2**20  # 768 KiB of argv, environment and script, escaped, and room
RECORD_BYTES_MAX = 64 * 2**10
RESERVED_BYTES = 4096  # taken in advance for each record of ours, so that a full disk loses none
REASON_CHARS_MAX = 300  # six bytes each in JSON at worst: a record stays within its reserve

# Causes: why the main process ended. The first one counts.
CAUSE_EXIT, CAUSE_SIGNAL, CAUSE_SETUP = "exit", "signal", "setup"
CAUSE_TIME_LIMIT, CAUSE_CANCELLED = "time_limit", "cancelled"
CAUSE_SHUTDOWN, CAUSE_STOPPED = "shutdown", "stopped"
CAUSE_ENVIRONMENT = "environment"  # nothing ran: something that the job needs is not there for now

OOM_CUDA, OOM_HOST, OOM_UNKNOWN = "cuda", "host", "unknown"
OOM_SHOWN = "shown"  # the program went on after it

_serial = itertools.count()  # threads of one process draft at the same time


def text_of(raw: bytes) -> str:
    """One code point a byte: the form of byte strings in records."""
    return raw.decode("latin-1")


def bytes_of(text: str) -> bytes:
    """The inverse of text_of; ValueError where the text holds anything above U+00FF."""
    return text.encode("latin-1")


def display(path: bytes) -> str:
    """A path for people, always printable text."""
    return path.decode("utf-8", "backslashreplace")


def encode(record: dict[str, Any]) -> bytes:
    return json.dumps({"version": RECORD_VERSION, **record}).encode("ascii") + b"\n"


def decode(data: bytes) -> dict[str, Any]:
    """One record; ValueError when it is none, or one of a newer version."""
    record = json.loads(data)
    if not isinstance(record, dict):
        raise ValueError("a record is a JSON object")
    version = record.pop("version", None)
    if type(version) is not int or not 1 <= version <= RECORD_VERSION:
        raise ValueError(f"record version {version!r}; this program knows 1 to {RECORD_VERSION}")
    return record


def read_file(dir_fd: int, name: str, bytes_max: int = RECORD_BYTES_MAX) -> bytes | None:
    """A file of the job directory, None where it is absent; ValueError where it cannot be one."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO would be waited for
    try:
        fd = os.open(name, flags, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise
        raise ValueError(f"{name} is not a file") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(f"{name} is not a file")
        data = read_all(fd, bytes_max + 1)
    finally:
        os.close(fd)
    if len(data) > bytes_max:
        raise ValueError(f"{name} has more than {bytes_max} bytes")
    return data


def read_all(fd: int, bytes_max: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while size < bytes_max and (part := os.read(fd, min(2**20, bytes_max - size))):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def read_record(dir_fd: int, name: str) -> dict[str, Any] | None:
    data = read_file(dir_fd, name, SPEC_BYTES_MAX if name == SPEC else RECORD_BYTES_MAX)
    return None if data is None else decode(data)


class Draft:
    """A record under a temporary name, whole and, if `durable`, on the disk before it gets its own.

    With `reserve` its inode and blocks are taken at once, for a disk that may be full later.
    """

    def __init__(self, dir_fd: int, name: str, reserve: bool = False, durable: bool = True) -> None:
        self.name = name
        self._durable = durable
        self._dir_fd = dir_fd
        self._temp = f".{name}.{os.getpid()}.{next(_serial)}"
        self._renamed = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._temp, flags, 0o600, dir_fd=dir_fd)
        try:
            os.fchmod(self._fd, 0o600)  # whatever the umask made of it
            if reserve:
                self._write(bytes(RESERVED_BYTES))
        except OSError:
            self.discard()
            raise

    def _write(self, data: bytes) -> None:
        offset = 0
        while offset < len(data):
            offset += os.pwrite(self._fd, data[offset:], offset)

    def fill(self, data: bytes) -> None:
        self._write(data)
        os.ftruncate(self._fd, len(data))
        if self._durable:
            os.fsync(self._fd)

    def publish(self, data: bytes) -> None:
        """Fill and rename; may be called again after an OSError."""
        if not self._renamed:
            self.fill(data)
            os.rename(self._temp, self.name, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
            self._renamed = True
        if self._durable:
            os.fsync(self._dir_fd)
        self.close()

    def link(self, data: bytes) -> bool:
        """Fill and link: False where the name is taken. Whole or absent, and only one side wins."""
        try:
            self.fill(data)
            os.link(self._temp, self.name, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
        except FileExistsError:
            return False
        finally:
            self.discard()
        os.fsync(self._dir_fd)
        return True

    def discard(self) -> None:
        if not self._renamed:
            try:
                os.unlink(self._temp, dir_fd=self._dir_fd)
            except OSError:
                pass  # what stays goes with the directory
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def publish(dir_fd: int, name: str, record: dict[str, Any]) -> None:
    """One record, replacing an earlier one of the name, whole and durable at the return."""
    _put(Draft(dir_fd, name), encode(record))


def place(dir_fd: int, name: str, data: bytes) -> None:
    """As `publish`, for what nobody needs after a power cut: whole for every reader until then."""
    _put(Draft(dir_fd, name, durable=False), data)


def _put(draft: Draft, data: bytes) -> None:
    try:
        draft.publish(data)
    except BaseException:
        draft.discard()
        raise


def open_directory(path: str | bytes) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


RECORD_VERSION = 1
