"""Out of memory: whether the GPU's or the host's memory was what a failed job ran out of."""

from __future__ import annotations

import os
import re
import stat

from gpuschedd.supervisor.identity import become_user
from gpuschedd.supervisor.records import OOM_CUDA, OOM_SHOWN, OOM_UNKNOWN, read_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuschedd.supervisor.spec import Spec

OOM_SCAN_BYTES = 2**19  # of the begin and of the end of an output, each

#: The last line of an uncaught exception, or of a program that gives up, in lower case.
LAST_WORDS = (
    rb"^(?:\[?(?:rank ?)?\d+\]?: ?)?"
    rb"((?:[\w.]*(?:error|exception|exit|interrupt)|fatal[a-z ]*|panic)(?::.*)?)$"
)
#: What the death of one process of a job does to the others, and what says that another failed.
AFTERMATH = (
    rb"nccl|gloo|rccl|\bmpi\b|distributed|collective|communicator|peer|rank|root cause"
    rb"|engine|worker|childfailed|processraised|processexited|calledprocess"
    rb"|brokenprocesspool|non-zero exit|broken ?pipe|connection|eoferror|socket"
    rb"|timeout|timed out|systemexit|keyboardinterrupt|cuda|cublas|cudnn"
    rb"|hip error|launch failure|out of memory|outofmemory"
)
#: These are a program's own mistakes, whatever words are in their messages.
OWN_ERRORS = (
    rb"(?:key|index|value|type|name|attribute|assertion|zerodivision|import|modulenotfound"
    rb"|filenotfound|permission|isadirectory|notadirectory|unicodedecode|recursion|syntax)error\b"
)
COLOURS = rb"\x1b\[[0-9;]*m"
#: An exception out of the handling of another one belongs to it.
CHAINED = b"the above exception"


def shows_gpu_oom(data: bytes, patterns: tuple[str, ...]) -> bool:
    """Whether a program said that a GPU's memory was exhausted; `patterns` are the vendor's.

    Compiled here, when it is needed: most jobs do not fail, and it takes 1 ms.
    """
    return _after_oom(data, patterns) is not None


def gpu_oom(data: bytes, patterns: tuple[str, ...]) -> str | None:
    """What an output tells of the GPU's memory: its job failed of it, or went on and failed later.

    Another error behind the last OOM, neither its aftermath nor chained to it, is the job's own.
    """
    after = _after_oom(data, patterns)
    if after is None:
        return None
    if CHAINED in after:
        return OOM_CUDA
    words = re.findall(LAST_WORDS, after, re.MULTILINE)
    own = [line for line in words if re.match(OWN_ERRORS, line) or not re.search(AFTERMATH, line)]
    return OOM_SHOWN if own else OOM_CUDA


def _after_oom(data: bytes, patterns: tuple[str, ...]) -> bytes | None:
    """The rest behind the line of the last OOM, in lower case; None where there is none."""
    if not patterns:
        return None
    data = re.sub(COLOURS, b"", data).lower()
    ends = [found.end() for found in re.finditer("|".join(patterns).encode(), data)]
    if not ends:
        return None
    _, _, after = data[ends[-1] :].partition(b"\n")
    return after


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


def scan_as_user(spec: Spec, logs: list[list[int] | None]) -> bytes:
    """In a forked child: the answer as one word, empty for none."""
    become_user(spec, None)
    os.chdir(spec.cwd)
    paths = [spec.output] if spec.error is None else [spec.output, spec.error]
    pairs = zip(paths, logs, strict=False)
    texts = [read_log(path, log) for path, log in pairs]
    # An uncaught error is written to stderr, so that counts as the later one of the two.
    shown = gpu_oom(b"\n".join(text for text in texts if text is not None), spec.oom_patterns)
    return (shown or (OOM_UNKNOWN if None in texts else "")).encode()


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
