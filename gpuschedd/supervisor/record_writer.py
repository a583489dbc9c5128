"""What the supervisor publishes: room taken in advance, in order, retried until it is out."""

from __future__ import annotations

import _socket
import os

from gpuschedd.supervisor.errors import complain
from gpuschedd.supervisor.procfs import boot_id, process_stat
from gpuschedd.supervisor.records import CLAIM, ENDED, EXIT, STARTED, Draft, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuschedd.supervisor.spec import Spec

RETRY_MIN_S, RETRY_MAX_S = 0.25, 30.0


class RecordWriter:
    """The drafts of one attempt's records; what the disk does not take is held and tried again."""

    def __init__(self, dir_fd: int, spec: Spec) -> None:
        self._dir_fd = dir_fd
        self._hint_socket = spec.hint_socket
        self._label = spec.label.encode()
        self._is_awaited = spec.launch != "pid1"
        self._drafts: dict[str, Draft] = {}
        try:
            for name in (CLAIM, STARTED, ENDED, EXIT):
                self._drafts[name] = Draft(dir_fd, name, reserve=True)
        except OSError:
            self.discard()
            raise
        self._held: list[tuple[str, bytes]] = []
        self._retry_s = RETRY_MIN_S

    def claim(self) -> bool:
        own = process_stat(os.getpid())
        assert own is not None, "a process sees itself"
        record = {
            "by": "supervisor",
            "boot_id": boot_id(),
            "pid": os.getpid(),
            "start_ticks": own.start_ticks,
        }
        won = self._drafts.pop(CLAIM).link(encode(record))
        if won and not self._is_awaited:
            self.hint()  # else whoever launched it is told
        return won

    def keep_directory(self) -> None:
        """Make its name outlive a power cut, as what is in it does. Raises OSError."""
        jobs_fd = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._dir_fd)
        try:
            os.fsync(jobs_fd)
        finally:
            os.close(jobs_fd)

    def publish(self, name: str, record: dict[str, Any]) -> None:
        """At once or OSError."""
        self._drafts[name].publish(encode(record))
        del self._drafts[name]
        self.hint()

    def hold(self, name: str, record: dict[str, Any]) -> None:
        """Keep it for flush(), behind what is held already."""
        self._held.append((name, encode(record)))

    def flush(self) -> float | None:
        """Seconds until the next try; None when nothing is held. One hint for all that came out."""
        before = len(self._held)
        try:
            return self._flush()
        finally:
            if len(self._held) < before:
                self.hint()

    def _flush(self) -> float | None:
        while self._held:
            name, data = self._held[0]
            try:
                self._drafts[name].publish(data)
            except OSError as error:
                if os.fstat(self._dir_fd).st_nlink == 0:
                    complain(f"{name} is dropped: the job directory was removed")
                    self._held.clear()
                    return None
                complain(f"{name} is held back: {error}")
                delay_s, self._retry_s = self._retry_s, min(2 * self._retry_s, RETRY_MAX_S)
                return delay_s
            del self._held[0], self._drafts[name]
        return None

    def discard(self) -> None:
        for draft in self._drafts.values():
            draft.discard()
        self._drafts.clear()

    def hint(self) -> None:
        """Only a wake-up: the daemon reads the same files when nobody hints.

        The way leads over the directory: a socket's whole path may be longer than its address.
        """
        flags = _socket.SOCK_DGRAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC
        parent, name = os.path.split(self._hint_socket)
        try:
            directory = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                hint = _socket.socket(_socket.AF_UNIX, flags)
                try:
                    hint.sendto(self._label, f"/proc/self/fd/{directory}/{name}")
                finally:
                    hint.close()
            finally:
                os.close(directory)
        except OSError:
            pass


RECORD_VERSION = 1
