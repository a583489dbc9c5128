"""Which job a process on a GPU belongs to, and how a foreign one is named. Reads /proc only."""

from __future__ import annotations

import pwd
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpusched_client.terms import JobId
from gpuschedd.gpus import GpuProcess

ANCESTORS_MAX = 64
CACHE_MAX = 10_000
COMMAND_CHARS_MAX = 40


@dataclass(frozen=True, slots=True)
class Supervisor:
    """A live supervisor: every process of its job descends from it, since it is a subreaper."""

    job_id: JobId
    start_ticks: int


Supervisors = Callable[[], Mapping[int, Supervisor]]


class Attribution:
    """pid -> job. What was mapped once stays mapped, by pid and start time."""

    def __init__(self, supervisors: Supervisors) -> None:
        self._supervisors = supervisors
        self._known: OrderedDict[tuple[int, int], JobId] = OrderedDict()

    def job_of(self, process: GpuProcess) -> JobId | None:
        """The job whose process it is; None: foreign, or gone."""
        stat = _stat(process.pid)
        ticks = process.start_ticks if process.start_ticks is not None else stat and stat[1]
        if ticks is None:
            return None
        known = self._known.get((process.pid, ticks))
        if known is not None:
            return known
        if stat is None or stat[1] != ticks:
            return None
        job_id = self._by_ancestors(process.pid)
        if job_id is not None:
            self._known[(process.pid, ticks)] = job_id
            while len(self._known) > CACHE_MAX:
                self._known.popitem(last=False)
        return job_id

    def _by_ancestors(self, pid: int) -> JobId | None:
        """Walk up to a supervisor of ours."""
        supervisors = self._supervisors()
        for _ in range(ANCESTORS_MAX):
            stat = _stat(pid)
            if stat is None:
                return None
            parent, ticks = stat
            found = supervisors.get(pid)
            if found is not None and found.start_ticks == ticks:
                return found.job_id
            if parent <= 1:
                return None
            pid = parent
        return None


def describe(pid: int) -> str:
    """A process as a reason names it: pid, user and command."""
    try:
        command = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return f"pid {pid}"
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    shown = "".join(char if char.isprintable() else "?" for char in command)
    return f"pid {pid} of {user} ({shown[:COMMAND_CHARS_MAX]})"


def _stat(pid: int) -> tuple[int, int] | None:
    """Parent and start ticks of a process; None: gone."""
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = content[content.rindex(b")") + 2 :].split()
    return int(fields[1]), int(fields[19])
