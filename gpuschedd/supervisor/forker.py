"""The forker: has all of the supervisor imported, and forks one per launch.

It takes messages from a socketpair on descriptor 0: the path of a job directory, with the writing
end of a pipe. What it forked writes its complaints there, then MARK and the exit status of the
launch: EXIT_OK with the claim. A pipe that ends without a mark says that there is no supervisor.
"""

from __future__ import annotations

import _socket
import gc
import os
import sys

from gpuschedd.supervisor.errors import EXIT_BUG, EXIT_OK, EXIT_UNAVAILABLE, reason_of
from gpuschedd.supervisor.start import become_bare, supervise_forked
from gpuschedd.supervisor.syscalls import show_as, signal

PATH_BYTES_MAX = 4096  # the kernel's
MARK = b"\0"  # in no complaint
_FD_BYTES = 4


def serve() -> int:
    """Fork for each message until the daemon's end is closed; the exit status."""
    become_bare(())
    signal.signal(signal.SIGCHLD, _reap)
    requests = _socket.socket(fileno=0)
    # What is here now is shared by all supervisors, unless a collection writes to it.
    gc.freeze()
    while True:
        path, answer_fd = _take(requests)
        if not path:
            return EXIT_OK
        if answer_fd >= 0:
            _fork(path, answer_fd)
            os.close(answer_fd)


def _take(requests: _socket.socket) -> tuple[bytes, int]:
    """A path and its answer's descriptor; an empty one at the end."""
    path, passed, _, _ = requests.recvmsg(
        PATH_BYTES_MAX, _socket.CMSG_SPACE(_FD_BYTES), _socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in passed:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS) and len(data) == _FD_BYTES:
            return path, int.from_bytes(data, sys.byteorder)
    return path, -1


def _reap(*_: object) -> None:
    """Whom it forked, as they end; what they used counts with the daemon's."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _fork(path: bytes, answer_fd: int) -> None:
    try:
        pid = os.fork()
    except OSError as error:
        reason = f"gpuschedd supervisor: no process for it: {reason_of(error)}\n"
        _write(answer_fd, reason.encode() + MARK + bytes([EXIT_UNAVAILABLE]))
        return
    if pid == 0:
        status = EXIT_BUG
        try:
            status = _live(os.fsdecode(path), answer_fd)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        os._exit(status)


def _live(path: str, answer_fd: int) -> int:
    """The whole life of a supervisor; its exit status."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Bare as the forker is: each page that is touched here is a copy.
    os.dup2(1, 0)  # /dev/null, where the requests came from
    os.dup2(answer_fd, 2)
    show_as(f"gpuschedd supervisor {path}")
    is_told = False

    def tell(status: int) -> None:
        nonlocal is_told
        if not is_told:
            is_told = True
            _write(answer_fd, MARK + bytes([status]))
            os.close(answer_fd)

    status = supervise_forked(path, lambda: tell(EXIT_OK))
    tell(status)
    return status


def _write(fd: int, data: bytes) -> None:
    try:
        os.write(fd, data)
    except OSError:
        pass  # the daemon died meanwhile; the job lives


RECORD_VERSION = 1
