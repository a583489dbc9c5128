"""How the daemon is: driver, database, disk, stale samples, the last errors of its log.

Looks and counts; changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from gpusched_client import __version__
from gpusched_client.terms import HoldKind, JobState, Launch, Mode
from gpusched_client.units import bytes_text
from gpusched_client.wire.admin_messages import LoggedProblem, StatusResult
from gpuschedd.api.limits import Connections
from gpuschedd.core.model import GpuState
from gpuschedd.jobs import gates
from gpuschedd.jobs.controller import Controller
from gpuschedd.store.database import DATABASE_NAME
from gpuschedd.system.clock import wall_s

KEPT_ERRORS_MAX = 50
ERROR_CHARS_MAX = 1_000
SHOWN_IDS_MAX = 10
SHOWN_FAULTS_MAX = 3
LITTLE_DISK_BYTES = 256 * 2**20


#: What a line of the log puts right, by the first words of both.
_PUT_RIGHT = {
    "gpus_back": frozenset({"gpus_down", "driver_failed", "sample_failed"}),
    "reloaded": frozenset({"reload_refused"}),
    "storage_writable": frozenset({"storage_blocked"}),
    "host_open": frozenset({"host_closed"}),
}
#: Worth a line in the log, and nothing for a person to do.
_HARMLESS = frozenset({"no_device_filter", "driver_warning", "gpus_by_environment"})


class RecentErrors(logging.Handler):
    """The newest warnings and errors of the log, in memory, until they are put right."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.kept: deque[LoggedProblem] = deque(maxlen=KEPT_ERRORS_MAX)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line; of a traceback the error itself."""
        text = record.getMessage()
        word = text.partition(" ")[0]
        if record.levelno < logging.WARNING:
            self._put_right(_PUT_RIGHT.get(word, frozenset()))
            return
        if word in _HARMLESS:
            return
        if record.exc_info and record.exc_info[1] is not None:  # False is kept as it was given
            text += f": {record.exc_info[1]!r}"
        self.kept.append(LoggedProblem(at_s=record.created, text=text[:ERROR_CHARS_MAX]))

    def _put_right(self, words: frozenset[str]) -> None:
        left = [each for each in self.kept if each.text.partition(" ")[0] not in words]
        if len(left) < len(self.kept):
            self.kept.clear()
            self.kept.extend(left)


class GpuStatus(Protocol):
    """How looking at the GPUs goes."""

    @property
    def source_name(self) -> str:
        """Where the samples come from."""

    @property
    def problem(self) -> str | None:
        """Why the last sweep failed; None: it did not."""

    @property
    def sample_age_s(self) -> float | None:
        """Since the last sweep that worked; None before the first."""

    @property
    def needs_person(self) -> tuple[str, ...]:
        """What does, by the last sample: memory, and parts of the driver."""


class HealthReport:
    """What `gctl status` shows."""

    def __init__(
        self,
        controller: Controller,
        state_dir: Path,
        *,
        mode: Mode,
        launch: Launch,
        errors: RecentErrors,
        gpus: GpuStatus,
        connections: Connections,
    ) -> None:
        self._controller, self._state = controller, controller.state
        self._state_dir = state_dir
        self._mode, self._launch = mode, launch
        self._errors = errors
        self._gpus = gpus
        self._connections = connections
        self._started_at_s = wall_s()

    async def take(self, *, for_admin: bool) -> StatusResult:
        """The whole of it; the log's lines for admins only."""
        database_bytes, free_bytes = await asyncio.to_thread(self._look_at_disk)
        state, gpus = self._state, self._gpus
        return StatusResult(
            version=__version__,
            mode=self._mode.value,
            launch=self._launch.value,
            pid=os.getpid(),
            started_at_s=self._started_at_s,
            gpu_source=gpus.source_name,
            gpus=len(state.gpus),
            gpus_ok=sum(gpu.state is GpuState.OK for gpu in state.gpus),
            database=str(self._state_dir / DATABASE_NAME),
            running_jobs=len(state.holding),
            pending_jobs=len(state.jobs) - len(state.holding),
            connections=self._connections.total,
            sample_age_s=gpus.sample_age_s,
            database_bytes=database_bytes,
            disk_free_bytes=free_bytes,
            pass_s=self._controller.pass_s_last,
            problems=tuple(self._problems(free_bytes, for_admin=for_admin)),
            last_errors=tuple(self._errors.kept) if for_admin else (),
        )

    def _look_at_disk(self) -> tuple[int | None, int | None]:
        """Bytes of the database with its log, and what is free beside it. Blocks."""
        path = self._state_dir / DATABASE_NAME
        try:
            parts = [part for part in (path, path.with_name(path.name + "-wal")) if part.exists()]
            disk = os.statvfs(self._state_dir)
            return sum(part.stat().st_size for part in parts), disk.f_bavail * disk.f_frsize
        except OSError:
            return None, None

    def _problems(self, free_bytes: int | None, *, for_admin: bool) -> Iterator[str]:
        """What needs a person, each with what is known of it."""
        yield from self._gpu_problems()
        blocked = self._state.storage_blocked
        if blocked is not None:
            yield f"the state directory cannot be written: {blocked}"
        elif free_bytes is None:
            yield "the state directory cannot be looked at"
        elif free_bytes < LITTLE_DISK_BYTES:
            yield f"{bytes_text(free_bytes)} are left for the database"
        if self._state.host_closed is not None:
            yield f"no job starts: the host is closed to users, {self._state.host_closed}"
        yield from self._launch_problems(tells_why=for_admin)
        yield from self._job_problems()

    def _gpu_problems(self) -> Iterator[str]:
        if (problem := self._gpus.problem) is not None:
            yield f"GPUs cannot be read: {problem}"
        elif not self._state.gpus:
            why = self._state.gpu_problem
            yield f"no GPU is known: {why}" if why else "no GPU is known"
        for gpu in self._state.gpus:
            if gpu.state not in (GpuState.OK, GpuState.DRAINED):
                yield f"GPU {gpu.label} is {gpu.state}: {gpu.state_text}"
        yield from self._gpus.needs_person

    def _launch_problems(self, *, tells_why: bool) -> Iterator[str]:
        """Jobs that are put off since the host lacks processes, threads, files, an answer of PID 1.

        `tells_why`: the words may name what is a user's.
        """
        state, faults = self._state, dict[str, list[int]]()
        for job_id in sorted(state.delayed | state.holding):
            why = gates.launch_fault(state.jobs[job_id])
            if why is not None:
                faults.setdefault(why if tells_why else "", []).append(int(job_id))
        for why, job_ids in list(faults.items())[:SHOWN_FAULTS_MAX]:
            told = f": {why}" if why else ""
            yield f"jobs that cannot be started for now, and are tried again: {_ids(job_ids)}{told}"

    def _job_problems(self) -> Iterator[str]:
        state = self._state
        stuck = [int(job_id) for job_id in sorted(state.holding) if state.jobs[job_id].stuck]
        if stuck:
            yield f"jobs far past their planned end: {_ids(stuck)}"
        held = [
            int(job.job_id)
            for job in state.jobs.values()
            if job.state is JobState.PENDING and job.hold in (HoldKind.LAUNCH, HoldKind.ACCOUNT)
        ]
        if held:
            yield f"jobs held because they cannot be started: {_ids(held)}"


def _ids(job_ids: list[int]) -> str:
    shown = ", ".join(map(str, job_ids[:SHOWN_IDS_MAX]))
    more = len(job_ids) - SHOWN_IDS_MAX
    return shown if more <= 0 else f"{shown} and {more} more"
