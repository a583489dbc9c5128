"""Out of memory: whether the GPU's or the host's memory was what a failed job ran out of."""

from __future__ import annotations

import os
import re
import stat

from gpuschedd.supervisor.identity import become_user
from gpuschedd.supervisor.last_words import failed_of_something_else
from gpuschedd.supervisor.procfs import line_after
from gpuschedd.supervisor.records import OOM_CUDA, OOM_SHOWN, OOM_UNKNOWN, read_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuschedd.supervisor.spec import Spec

OOM_SCAN_BYTES = 2**19  # of the begin and of the end of an output, each

COLOURS = rb"\x1b\[[0-9;]*m"


def has_failed(ended: dict[str, Any]) -> bool:
    """Whether a main process ended otherwise than with 0."""
    return ended["signal"] is not None or ended["code"] not in (None, 0)


def shows_gpu_oom(data: bytes, patterns: tuple[str, ...]) -> bool:
    """Whether a program said that a GPU's memory was exhausted; `patterns` are the vendor's.

    Compiled here, when it is needed: most jobs do not fail, and it takes 1 ms.
    """
    return _around_oom(data, patterns) is not None


def gpu_oom(data: bytes, patterns: tuple[str, ...], signum: int | None = None) -> str | None:
    """What an output tells of the GPU's memory: its job failed of it, or went on and failed later.

    `signum` is what ended the main process, by itself or as a shell tells of it.
    """
    around = _around_oom(data, patterns)
    if around is None:
        return None
    return OOM_SHOWN if failed_of_something_else(*around, signum) else OOM_CUDA


def _around_oom(data: bytes, patterns: tuple[str, ...]) -> tuple[bytes, bytes, bytes] | None:
    """What is before the last OOM, its line, and the rest, in lower case; None without any."""
    if not patterns:
        return None
    data = re.sub(COLOURS, b"", data).lower()
    ends = [found.end() for found in re.finditer("|".join(patterns).encode(), data)]
    if not ends:
        return None
    begin = data.rfind(b"\n", 0, ends[-1]) + 1
    line, _, after = data[begin:].partition(b"\n")
    return data[:begin], line, after


def read_log(path: bytes, identity: list[int] | None) -> bytes | None:
    """The begin and the end of this attempt's output; None where it cannot be read."""
    if identity is None:
        return None
    device, inode, begin = identity
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino) != (device, inode) or not stat.S_ISREG(found.st_mode):
        return None
    os.lseek(fd, begin, os.SEEK_SET)
    head = read_all(fd, OOM_SCAN_BYTES)
    os.lseek(fd, max(begin + len(head), found.st_size - OOM_SCAN_BYTES), os.SEEK_SET)
    return head + read_all(fd, OOM_SCAN_BYTES)


def scan_as_user(spec: Spec, logs: list[list[int] | None], signum: int | None) -> bytes:
    """In a forked child: the answer as one word, empty for none."""
    become_user(spec, None)
    os.chdir(spec.cwd)
    paths = [spec.output] if spec.error is None else [spec.output, spec.error]
    pairs = zip(paths, logs, strict=False)
    texts = [read_log(path, log) for path, log in pairs]
    # An uncaught error is written to stderr, so that counts as the later one of the two.
    read = b"\n".join(text for text in texts if text is not None)
    shown = gpu_oom(read, spec.oom_patterns, signum)
    return (shown or (OOM_UNKNOWN if None in texts else "")).encode()


def host_oom_kills() -> int | None:
    """OOM kills so far in this process's cgroup; None where version 2 does not count them."""
    try:
        with open("/proc/self/cgroup", "rb") as file:
            place = line_after(b"0::", file.read())
        if place is None:
            return None
        with open(b"/sys/fs/cgroup" + place + b"/memory.events", "rb") as file:
            count = line_after(b"oom_kill ", file.read())
    except OSError:
        return None
    return int(count) if count is not None and count.isdigit() else None


RECORD_VERSION = 1
