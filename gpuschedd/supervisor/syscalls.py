"""System calls that Python 3.11 lacks: prctl, signalfd, timerfd, close_range, keyrings."""

from __future__ import annotations

import ctypes
import os
import select
import sys
import time

from gpuschedd.supervisor.procfs import process_stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as signal
    from collections.abc import Iterable
else:
    import _signal as signal  # without the enums around it, which take 1 ms of each start

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
CLOCK_BOOTTIME = time.CLOCK_BOOTTIME
TFD_TIMER_ABSTIME = 1
ALARM_S_MAX = 2.0**32  # of uptime: what timers take; nothing waits for later
SYS_CLOSE_RANGE = 436
SYS_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "ppc64le": 271, "s390x": 280}
KEYCTL_JOIN_SESSION_KEYRING = 1
FD_MAX = 2**32 - 1

libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def prctl(option: int, value: int) -> None:
    _checked(libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), 0, 0))


def join_new_keyring() -> None:
    """A session keyring of its own; where the kernel or machine has none there is none to leak."""
    number = SYS_KEYCTL.get(os.uname().machine)
    if number is not None:
        libc.syscall(number, KEYCTL_JOIN_SESSION_KEYRING, None, 0, 0, 0)


def show_as(text: str) -> None:
    """What ps shows as this process's command line, as far as it has room; best effort."""
    found = process_stat(os.getpid())
    begin, end = (0, 0) if found is None else found.arguments
    if 0 < begin < end:
        shown = text.encode("utf-8", "surrogateescape")[: end - begin - 1]
        ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def close_all_except(keep: Iterable[int]) -> None:
    """Close every descriptor above 2 but these."""
    first = 3
    for fd in [*sorted(keep), FD_MAX]:
        if first < fd:
            _close_range(first, fd - 1)
        first = fd + 1


def _close_range(first: int, last: int) -> None:
    if libc.syscall(SYS_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(last), 0) == 0:
        return
    for name in os.listdir("/proc/self/fd"):  # before Linux 5.9
        if first <= int(name) <= last:
            try:
                os.close(int(name))
            except OSError:
                pass  # the descriptor of the listing itself


class SignalQueue:
    """Signals as a descriptor: blocked, so none is lost and none interrupts."""

    ACCEPTED = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})
    #: Whatever else would end us and says nothing of the job; its child takes them all back.
    IGNORED = frozenset(
        {
            *(signal.SIGHUP, signal.SIGUSR2, signal.SIGPIPE, signal.SIGQUIT, signal.SIGALRM),
            *(signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGPWR, signal.SIGXCPU),
            *(signal.SIGXFSZ, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1)),
        }
    )
    _INFO_BYTES = 128

    def __init__(self) -> None:
        for signum in self.IGNORED:
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, self.ACCEPTED)
        word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
        mask = (ctypes.c_ulong * (1024 // word_bits))()
        for signum in self.ACCEPTED:
            mask[(signum - 1) // word_bits] |= 1 << ((signum - 1) % word_bits)
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self.fd = _checked(libc.signalfd(-1, ctypes.byref(mask), flags))

    def drain(self) -> set[int]:
        found: set[int] = set()
        while True:
            try:
                data = os.read(self.fd, 16 * self._INFO_BYTES)
            except BlockingIOError:
                return found
            for offset in range(0, len(data), self._INFO_BYTES):
                found.add(int.from_bytes(data[offset : offset + 4], sys.byteorder))


def boottime_s() -> float:
    """Seconds since the boot, suspended time included."""
    return time.clock_gettime(CLOCK_BOOTTIME)


class Alarms:
    """Named deadlines in boot time on one descriptor: no periodic wake-up, no drift in suspend."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self.fd = _checked(libc.timerfd_create(CLOCK_BOOTTIME, os.O_NONBLOCK | os.O_CLOEXEC))

    def set(self, name: str, at_s: float) -> None:
        self._due[name] = at_s
        self._arm()

    def clear(self, *names: str) -> None:
        for name in names:
            self._due.pop(name, None)
        self._arm()

    def is_due(self, name: str) -> bool:
        return name in self._due and self._due[name] <= boottime_s()

    def take_due(self) -> list[str]:
        """The names whose time has come, earliest first; they are cleared."""
        now_s = boottime_s()
        due = sorted((at_s, name) for name, at_s in self._due.items() if at_s <= now_s)
        self.clear(*(name for _, name in due))
        return [name for _, name in due]

    def wait(self) -> None:
        """Until one is due, which it clears; nothing else is looked at."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        poll.poll()
        self.take_due()

    def _arm(self) -> None:
        # Zero would disarm; a deadline in the past fires at once.
        first_s = min(min(self._due.values(), default=0.0), ALARM_S_MAX)
        first_ns = max(1, int(1e9 * first_s)) if self._due else 0
        spec = (ctypes.c_long * 4)(0, 0, first_ns // 10**9, first_ns % 10**9)
        _checked(libc.timerfd_settime(self.fd, TFD_TIMER_ABSTIME, ctypes.byref(spec), None))


RECORD_VERSION = 1
