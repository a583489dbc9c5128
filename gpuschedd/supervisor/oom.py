"""Out of memory: whether the GPU's or the host's memory was what a failed job ran out of."""

from __future__ import annotations

import os
import re
import stat

from gpuschedd.supervisor.identity import become_user
from gpuschedd.supervisor.records import OOM_CUDA, OOM_UNKNOWN, read_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuschedd.supervisor.spec import Spec

OOM_SCAN_BYTES = 16 * 2**10


def shows_gpu_oom(data: bytes, patterns: tuple[str, ...]) -> bool:
    """Whether a program said that a GPU's memory was exhausted; `patterns` are the vendor's.

    Compiled here, when it is needed: most jobs do not fail, and it takes 1 ms.
    """
    joined = "|".join(patterns).encode()
    return bool(patterns) and re.search(joined, data.lower()) is not None


def scan_log(path: bytes, identity: list[int] | None, patterns: tuple[str, ...]) -> str | None:
    """Whether the end of this attempt's output shows an OOM; unknown where it cannot be read."""
    if identity is None:
        return OOM_UNKNOWN
    device, inode, begin = identity
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino) != (device, inode) or not stat.S_ISREG(found.st_mode):
        return OOM_UNKNOWN
    os.lseek(fd, max(begin, found.st_size - OOM_SCAN_BYTES), os.SEEK_SET)
    shown = shows_gpu_oom(read_all(fd, OOM_SCAN_BYTES), patterns)
    return OOM_CUDA if shown else None


def scan_as_user(spec: Spec, logs: list[list[int] | None]) -> bytes:
    """In a forked child: the answer as one word, empty for none."""
    become_user(spec, None)
    os.chdir(spec.cwd)
    paths = [spec.output] if spec.error is None else [spec.output, spec.error]
    pairs = zip(paths, logs, strict=False)
    found = {scan_log(path, log, spec.oom_patterns) for path, log in pairs}
    answer = OOM_CUDA if OOM_CUDA in found else OOM_UNKNOWN if OOM_UNKNOWN in found else ""
    return answer.encode()


def host_oom_kills() -> int | None:
    """OOM kills so far in this process's cgroup; None where version 2 does not count them."""
    try:
        with open("/proc/self/cgroup", "rb") as file:
            place = re.search(rb"^0::(/.*)$", file.read(), re.MULTILINE)
        if place is None:
            return None
        with open(b"/sys/fs/cgroup" + place[1] + b"/memory.events", "rb") as file:
            count = re.search(rb"^oom_kill (\d+)$", file.read(), re.MULTILINE)
    except OSError:
        return None
    return int(count[1]) if count else None


RECORD_VERSION = 1
