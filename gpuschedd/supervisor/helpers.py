"""Short-lived helpers: a forked child or a program that is asked something, under a deadline."""

from __future__ import annotations

import os
import select

from gpuschedd.supervisor.syscalls import boottime_s, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SYSTEMCTL_DEADLINE_S = 2.0


def ask_child(work: Callable[[], bytes], deadline_s: float) -> bytes | None:
    """The answer of a forked child; None where it failed, took too long or could not be made."""
    try:
        read_fd, write_fd = os.pipe()
    except OSError:
        return None
    try:
        pid = os.fork()
    except OSError:
        os.close(read_fd)
        os.close(write_fd)
        return None
    if pid == 0:
        try:
            os.write(write_fd, b"=" + work())
        finally:
            os._exit(0)
    os.close(write_fd)
    answer = _read_until(read_fd, boottime_s() + deadline_s)
    os.close(read_fd)
    _dismiss(pid)
    return answer[1:] if answer.startswith(b"=") else None


def _read_until(fd: int, deadline_s: float) -> bytes:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    data = b""
    while (left_s := deadline_s - boottime_s()) > 0 and poll.poll(1000 * left_s):
        part = os.read(fd, 4096)
        if not part:
            break
        data += part
    return data


def _dismiss(pid: int) -> None:
    """End a helper; one that hangs in the kernel is left behind rather than waited for."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return  # no descriptor is left; whoever reaps children takes it
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(1000)
    os.close(pidfd)
    os.waitpid(pid, os.WNOHANG)


def host_is_stopping() -> bool:
    """Whether PID 1 takes the host down; False where it does not say."""
    if not os.path.isdir("/run/systemd/system"):
        return False
    command = ["systemctl", "is-system-running"]
    try:
        read_fd, write_fd = os.pipe()
    except OSError:
        return False
    try:
        pid = os.posix_spawnp(
            command[0],
            command,
            {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            file_actions=[(os.POSIX_SPAWN_DUP2, write_fd, 1)],
            setsigmask=(),
        )
    except OSError:
        os.close(read_fd)
        return False
    finally:
        os.close(write_fd)
    answer = _read_until(read_fd, boottime_s() + SYSTEMCTL_DEADLINE_S)
    os.close(read_fd)
    _dismiss(pid)
    return answer.strip() == b"stopping"


RECORD_VERSION = 1
