"""The processes below the supervisor: signalled, ended, reaped, and never any other."""

from __future__ import annotations

import os

from gpuschedd.supervisor.procfs import catches, descendants, is_running, process_stat
from gpuschedd.supervisor.syscalls import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

KILL_ROUND_MIN_S, KILL_ROUND_MAX_S = 0.002, 1.0
#: All that end a process which does not catch them, but for those meant to end it (INT, QUIT, KILL,
#: TERM) and what the kernel sends for a fault (ILL, TRAP, ABRT, BUS, FPE, SEGV, SYS).
TELLING_SIGNALS = frozenset(
    {
        *(signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGALRM),
        *(signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGPWR, signal.SIGSTKFLT),
        *(signal.SIGXCPU, signal.SIGXFSZ, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1)),
    }
)


def numbered_signal(row: Any) -> tuple[int, int]:
    """A row of the orders: its number, and the signal. Raises ValueError or TypeError."""
    number, signum = row
    if type(number) is not int or type(signum) is not int or not 1 <= signum < signal.NSIG:
        raise ValueError(f"signals must be rows of number and signal, not {row!r}")
    return number, signum


def send_signal(pid: int, signum: int, start_ticks: int) -> bool:
    """Signal this very process: the pidfd pins it, the second look proves which one it pins."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not is_running(pid, start_ticks):
            return False
        signal.pidfd_send_signal(pidfd, signum)
        return True
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(pidfd)


def live_count() -> int:
    """How many processes live below this one."""
    found = (process_stat(pid) for pid in descendants(os.getpid()))
    return sum(seen is not None and seen.alive for seen in found)


def signal_all(signum: int) -> None:
    """Signal every live process below this one; a stopped one is let go on, to take its TERM.

    A signal by which programs are told something goes to those that listen, if any does: a shell
    that waits for such a program would die of it.
    """
    own = os.getpid()
    live = [(pid, seen) for pid in descendants(own) if (seen := process_stat(pid)) and seen.alive]
    if signum in TELLING_SIGNALS:
        live = [(pid, seen) for pid, seen in live if catches(pid, signum)] or live
    for pid, found in live:
        # A pid is ours to trust while we are the parent; below that a pidfd must prove it.
        if found.parent == own:
            _kill_quietly(os.kill, pid, signum)
        else:
            send_signal(pid, signum, found.start_ticks)
        if signum == signal.SIGTERM and found.state in "Tt":
            send_signal(pid, signal.SIGCONT, found.start_ticks)


class KillRounds:
    """KILL for everything below this process, soon again while new processes show up."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._wait_s = KILL_ROUND_MIN_S

    def kill_all(self) -> float:
        """One round; the seconds until the next."""
        own, own_group = os.getpid(), os.getpgrp()
        found = set()
        for pid in descendants(own):
            seen = process_stat(pid)
            if seen is None or not seen.alive:
                continue
            found.add(pid)
            if seen.parent == own and seen.group != own_group:
                # Our unreaped child keeps the group's number from being anybody else's, and a
                # group is signalled at once: a process forked meanwhile does not slip through.
                _kill_quietly(os.killpg, seen.group, signal.SIGKILL)
            send_signal(pid, signal.SIGKILL, seen.start_ticks)
        fresh = bool(found - self._seen) or not found
        self._seen |= found
        self._wait_s = KILL_ROUND_MIN_S if fresh else min(2 * self._wait_s, KILL_ROUND_MAX_S)
        return self._wait_s


def _kill_quietly(kill: Callable[[int, int], None], pid: int, signum: int) -> None:
    # Gone, or a program that the job was allowed to run as somebody else.
    try:
        kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass


def dead_child() -> int | None:
    """A child that waits to be reaped; it still is."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid


def has_children() -> bool:
    """Whether a child is left, dead or alive. A subreaper without any has nothing below it."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


RECORD_VERSION = 1
