"""Which job a process on a GPU belongs to, and how a foreign one is named. Reads /proc only.

`learn` reads and blocks, so it belongs in a thread; everybody else asks what it has learnt. The
order of the evidence: the unit's cgroup (PID 1 put it there), the supervisor among its ancestors
(it is a subreaper, so orphans lead to it too), and, as a hint that only its own user can give, the
marks in its environment.
"""

from __future__ import annotations

import os
import pwd
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpusched_client.terms import JobId, printable
from gpuschedd.gpu.source import GpuProcess
from gpuschedd.supervisor.procfs import ProcessStat, process_stat

ANCESTORS_MAX = 64
CACHE_MAX = 10_000
COMMAND_CHARS_MAX = 40
ENVIRON_BYTES_MAX = 2**20
DIGITS_MAX = 19  # of a number of 63 bits

K = TypeVar("K")
V = TypeVar("V")
JobKey = tuple[JobId, int]  # a job and its attempt

# Anchored at the root: a user's own service manager can make units of the same name below its own.
_UNIT = re.compile(
    rb"^(?:0:|\d+:name=systemd):/gpusched\.slice/gpusched-job-(\d+)-(\d+)\.service(?:/|$)",
    re.MULTILINE,
)

_NAMESPACE_PIDS = re.compile(rb"^NSpid:([\d\t ]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Supervisor:
    """A live supervisor: every process of its job descends from it, since it is a subreaper."""

    job_id: JobId
    start_ticks: int
    attempt: int = 1

    @property
    def key(self) -> JobKey:
        """The job's attempt."""
        return self.job_id, self.attempt


@dataclass(frozen=True, slots=True)
class ForeignProcess:
    """A process that belongs to no job of ours. `uid` None: it is gone."""

    pid: int
    uid: int | None
    user: str
    command: str
    is_contained: bool = False  # in a PID namespace of its own

    @property
    def text(self) -> str:
        """As a reason names it: pid, user and command."""
        if self.uid is None:
            return f"pid {self.pid}, which is gone"
        return f"pid {self.pid} of {self.user} ({self.command})"


Supervisors = Callable[[], Mapping[int, Supervisor]]
Holders = Callable[[], Mapping[JobKey, int]]  # who holds GPUs, and as which uid


class Attribution:
    """pid -> job. What was mapped once stays mapped, by pid and start time."""

    def __init__(
        self,
        supervisors: Supervisors,
        holders: Holders = dict,
        *,
        by_unit: bool = False,
        instance: str = "",
        proc: Path = Path("/proc"),
    ) -> None:
        """`by_unit`: PID 1 starts the jobs, so their cgroups tell; `instance` marks our jobs."""
        self._supervisors = supervisors
        self._holders = holders
        self._by_unit = by_unit
        self._instance = instance
        self._proc = proc
        self._known: OrderedDict[tuple[int, int], JobKey] = OrderedDict()
        self._foreign: OrderedDict[tuple[int, int | None], ForeignProcess] = OrderedDict()

    def learn(self, processes: Iterable[GpuProcess]) -> None:
        """Find out about those that are not known yet. Blocks."""
        for process in processes:
            ticks = process.start_ticks
            if ticks is None or (process.pid, ticks) in self._known:
                continue
            key = self._find(process.pid, ticks)
            if key is not None:
                _remember(self._known, (process.pid, ticks), key)
            elif (process.pid, ticks) not in self._foreign:
                _remember(self._foreign, (process.pid, ticks), self._look_at(process.pid))

    def owner_of(self, process: GpuProcess) -> JobKey | None:
        """The attempt whose process it is, or was; None: foreign."""
        if process.start_ticks is None:
            # It is dead: its last known identity is the newest one with this pid.
            for (pid, _), key in reversed(self._known.items()):
                if pid == process.pid:
                    return key
            return None
        return self._known.get((process.pid, process.start_ticks))

    def describe(self, process: GpuProcess) -> ForeignProcess:
        """A foreign process by name."""
        known = self._foreign.get((process.pid, process.start_ticks))
        return known or ForeignProcess(process.pid, None, "", "")

    # --- evidence -----------------------------------------------------------------------------

    def _find(self, pid: int, ticks: int) -> JobKey | None:
        stat = self._stat(pid)
        if stat is None or stat.start_ticks != ticks:
            return None
        if self._by_unit:
            return self._by_cgroup(pid)
        return self._by_ancestors(pid) or self._by_marks(pid)

    def _by_cgroup(self, pid: int) -> JobKey | None:
        match = _UNIT.search(self._read(pid, "cgroup"))
        if match is None:
            return None
        return JobId(int(match[1])), int(match[2])

    def _by_ancestors(self, pid: int) -> JobKey | None:
        """Walk up to a supervisor of ours."""
        supervisors = self._supervisors()
        for _ in range(ANCESTORS_MAX):
            stat = self._stat(pid)
            if stat is None:
                return None
            found = supervisors.get(pid)
            if found is not None and found.start_ticks == stat.start_ticks:
                return found.key
            if stat.parent <= 1:
                return None
            pid = stat.parent
        return None

    def _by_marks(self, pid: int) -> JobKey | None:
        """The variables that we gave the job; a hint that counts only for the job's own user."""
        words = self._read(pid, "environ").split(b"\0")
        pairs = dict(word.partition(b"=")[::2] for word in words if word.startswith(b"GPUSCHED_"))
        if pairs.get(b"GPUSCHED_INSTANCE") != self._instance.encode() or not self._instance:
            return None
        job_id, attempt = pairs.get(b"GPUSCHED_JOB_ID", b""), pairs.get(b"GPUSCHED_ATTEMPT", b"")
        if not (_is_number(job_id) and _is_number(attempt)):
            return None
        key = (JobId(int(job_id)), int(attempt))
        uid = self._holders().get(key)
        return key if uid is not None and uid == self._uid(pid) else None

    # --- /proc --------------------------------------------------------------------------------

    def _read(self, pid: int, name: str) -> bytes:
        try:
            with (self._proc / str(pid) / name).open("rb") as file:
                return file.read(ENVIRON_BYTES_MAX)
        except OSError:
            return b""

    def _stat(self, pid: int) -> ProcessStat | None:
        """None: gone."""
        try:
            return process_stat(pid, self._proc)
        except OSError:
            return None

    def _uid(self, pid: int) -> int | None:
        try:
            return os.stat(self._proc / str(pid)).st_uid
        except OSError:
            return None

    def _look_at(self, pid: int) -> ForeignProcess:
        uid = self._uid(pid)
        if uid is None:
            return ForeignProcess(pid, None, "", "")
        command = self._read(pid, "comm").decode(errors="replace").strip()
        shown = printable(command)
        # "NSpid: 4242 7": its pid here, and one more for each namespace that it is in.
        match = _NAMESPACE_PIDS.search(self._read(pid, "status"))
        contained = match is not None and len(match[1].split()) > 1
        return ForeignProcess(pid, uid, _user_name(uid), shown[:COMMAND_CHARS_MAX], contained)


def _is_number(word: bytes) -> bool:
    return word.isdigit() and len(word) <= DIGITS_MAX


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _remember(cache: OrderedDict[K, V], key: K, value: V) -> None:
    cache[key] = value
    while len(cache) > CACHE_MAX:
        cache.popitem(last=False)
