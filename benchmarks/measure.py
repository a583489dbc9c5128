"""How the benchmarks measure: in turns, beside a floor, and from /proc."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
BIN = Path(sys.executable).parent
_PR_SET_CHILD_SUBREAPER = 36
_CPUCLOCK_SCHED = 2  # clock_getcpuclockid(3) makes the same number
#: What a command cannot be without: the interpreter and the two packages that it is made of.
IMPORTS = (sys.executable, "-c", "import click, msgpack")

Measures = Mapping[str, Callable[[], float]]


def interleaved(measures: Measures, runs: int, warm_up_runs: int = 1) -> dict[str, list[float]]:
    """`runs` values of each, taken in turns, so that what else the host does falls on all alike.

    Every other round goes backwards: none always follows the same one.
    """
    taken: dict[str, list[float]] = {name: [] for name in measures}
    names = list(measures)
    for number in range(warm_up_runs + runs):
        for name in names if number % 2 else reversed(names):
            value = measures[name]()
            if number >= warm_up_runs:
                taken[name].append(value)
    return taken


def timed_ms(call: Callable[[], object]) -> float:
    """How long one call takes, by the clock."""
    began_ns = time.monotonic_ns()
    call()
    return (time.monotonic_ns() - began_ns) / 1e6


def command_ms(words: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> float:
    """A whole command from fork to its end; its output is dropped, its failure ours."""
    given = {"PATH": f"{BIN}:/usr/bin:/bin"} | dict(environment or {})
    return timed_ms(
        lambda: subprocess.run(
            words,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that so many of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


# --- floors ---------------------------------------------------------------------------------------


def fork_exec_ms() -> float:
    """No way of running `true` is shorter."""

    def once() -> None:
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)

    return timed_ms(once)


def fsync_ms(place: Path) -> float:
    """A small file that is new, and safe on the disk of `place`: what durable costs at least."""
    handle, name = tempfile.mkstemp(dir=place)
    try:
        os.write(handle, b"x" * 512)
        return timed_ms(lambda: os.fsync(handle))
    finally:
        os.close(handle)
        os.unlink(name)


# --- /proc ----------------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Be the parent of whatever loses its own below us, so that nothing's CPU time gets lost."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


def cpu_s(pid: int, *, with_children: bool = False) -> float:
    """CPU time of a process, and of its children that it has waited for."""
    fields = _stat(pid)
    return sum(map(int, fields[11 : 15 if with_children else 13])) / TICKS_A_SECOND


def process_cpu_s(pid: int) -> float:
    """CPU time of a process to the nanosecond, by its clock; /proc counts in hundredths."""
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


def tree_cpu_s() -> float:
    """CPU time of everything below this process, but for itself."""
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    alive_s = 0.0
    for pid in descendants(os.getpid()):
        try:
            alive_s += cpu_s(pid, with_children=True)
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended between the two looks
    return waited.ru_utime + waited.ru_stime + alive_s


def descendants(pid: int) -> Iterator[int]:
    """All processes below one."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in map(int, children):
        yield child
        yield from descendants(child)


def rss_mb(pid: int) -> float:
    """Memory that a process has in RAM, shared pages in full."""
    return _kib(Path(f"/proc/{pid}/status").read_text(), "VmRSS") / 1e3


def pss_mb(pid: int) -> float:
    """The same, each shared page divided by those who share it."""
    return _kib(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Pss") / 1e3


def switches(pid: int) -> int:
    """Context switches of all its threads: how often it woke up, or was pushed aside."""
    count = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if "ctxt_switches" in line:
                count += int(line.split()[1])
    return count


def _kib(content: str, name: str) -> float:
    line = next(line for line in content.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1.024


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


@contextmanager
def scratch(name: str, within: Path | None = None) -> Iterator[Path]:
    """A directory of its own, by default where temporary ones are."""
    with tempfile.TemporaryDirectory(prefix=f"gpusched-{name}-", dir=within) as place:
        yield Path(place)
