"""Processes as the kernel shows them below /proc: the one reader of /proc/PID/stat."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROC = "/proc"


_boot_id: list[str] = []  # read once: no process outlives its boot


def boot_id() -> str:
    """Of the running kernel: a pid and its start ticks count in one boot."""
    if not _boot_id:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            _boot_id.append(file.read().decode("ascii").strip())
    return _boot_id[0]


def line_after(words: bytes, content: bytes) -> bytes | None:
    """The rest of the first line that begins so. No regular expression: to compile one takes 1 ms.

    That would be a tenth of what a short job costs.
    """
    for line in content.split(b"\n"):
        if line.startswith(words):
            return line[len(words) :]
    return None


class ProcessStat:
    """The fields of /proc/PID/stat that tell a process from a later one with its pid, and a few."""

    __slots__ = ("arguments", "group", "parent", "session", "start_ticks", "state", "threads")

    def __init__(self, line: bytes) -> None:
        # The name may hold anything, so the fields are counted from its last parenthesis.
        fields = line[line.rindex(b")") + 2 :].split()
        self.state = fields[0].decode("ascii")
        self.parent, self.group, self.session = (int(field) for field in fields[1:4])
        self.threads = int(fields[17])
        self.start_ticks = int(fields[19])
        # Where they lie in its memory; 0 and 0 for whoever may not know, and of a kernel's thread.
        self.arguments = (int(fields[45]), int(fields[46])) if len(fields) > 46 else (0, 0)

    @property
    def alive(self) -> bool:
        """Also where only the first thread has ended: the state is that one's alone."""
        return self.state not in "ZX" or self.threads > 1


def process_stat(pid: int, proc: str | os.PathLike[str] = PROC) -> ProcessStat | None:
    """None where no such process exists. Raises OSError where that cannot be said."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            return ProcessStat(file.read())
    except (FileNotFoundError, ProcessLookupError):
        return None


def catches(pid: int, signum: int, proc: str | os.PathLike[str] = PROC) -> bool:
    """Whether a process has a handler for a signal, by /proc/PID/status."""
    try:
        with open(f"{proc}/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    except OSError:
        return False
    return False


def start_ticks_of(pid: int) -> int | None:
    """The start of a live process, by which a later one with its pid is told from it; else None."""
    try:
        found = process_stat(pid)
    except OSError:
        return None
    return found.start_ticks if found is not None and found.alive else None


def is_running(pid: int, start_ticks: int) -> bool:
    """Whether this very process runs: a zombie does not, and another one with its pid is not it."""
    found = process_stat(pid)
    return found is not None and found.alive and found.start_ticks == start_ticks


def pids() -> Iterator[int]:
    """All that /proc shows now."""
    return (int(name) for name in os.listdir(PROC) if name.isdigit())


def children_of(pid: int) -> list[int]:
    """Children of all threads of pid; may miss some while they are being made."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found.extend(int(child) for child in file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        return found
    return found


def _children_by_parent() -> dict[int, list[int]]:
    """For kernels without CONFIG_PROC_CHILDREN."""
    tree: dict[int, list[int]] = {}
    for pid in pids():
        if (found := process_stat(pid)) is not None:
            tree.setdefault(found.parent, []).append(pid)
    return tree


def descendants(root: int) -> list[int]:
    """All processes below root, parents before children."""
    lookup: Callable[[int], list[int]] = children_of
    if not os.path.exists(f"/proc/{root}/task/{root}/children"):
        tree = _children_by_parent()
        lookup = lambda pid: tree.get(pid, [])  # noqa: E731
    found = lookup(root)
    for pid in found:  # grows while it is walked
        found.extend(lookup(pid))
    return found


RECORD_VERSION = 1
