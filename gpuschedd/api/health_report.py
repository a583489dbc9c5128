"""How the daemon is: driver, database, disk, stale samples, the last errors of its log.

Looks and counts; changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpusched_client.terms import JobState
from gpusched_client.units import bytes_text
from gpusched_client.wire.admin_messages import LoggedProblem, StatusResult
from gpuschedd import __version__
from gpuschedd.core.model import GpuState
from gpuschedd.jobs.state import State
from gpuschedd.store.database import DATABASE_NAME
from gpuschedd.system.clock import wall_s

KEPT_ERRORS_MAX = 50
ERROR_CHARS_MAX = 1_000
SHOWN_IDS_MAX = 10
LITTLE_DISK_BYTES = 256 * 2**20


class RecentErrors(logging.Handler):
    """The newest warnings and errors of the log, in memory."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kept: deque[LoggedProblem] = deque(maxlen=KEPT_ERRORS_MAX)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line; of a traceback the error itself."""
        text = record.getMessage()
        if record.exc_info is not None and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        self.kept.append(LoggedProblem(at_s=record.created, text=text[:ERROR_CHARS_MAX]))


@dataclass(frozen=True, slots=True)
class Look:
    """What others know, asked when somebody wants to see it."""

    gpu_source: Callable[[], str]
    gpu_problem: Callable[[], str | None]
    sample_age_s: Callable[[], float | None]
    connections: Callable[[], int]
    pass_s: Callable[[], float]


class Status:
    """What `gctl status` shows."""

    def __init__(
        self,
        state: State,
        state_dir: Path,
        *,
        mode: str,
        launch: str,
        errors: RecentErrors,
        look: Look,
    ) -> None:
        self._state, self._state_dir = state, state_dir
        self._mode, self._launch = mode, launch
        self._errors = errors
        self._look = look
        self._started_at_s = wall_s()

    async def take(self, *, for_admin: bool) -> StatusResult:
        """The whole of it; the log's lines for admins only."""
        database_bytes, free_bytes = await asyncio.to_thread(self._look_at_disk)
        state, look = self._state, self._look
        return StatusResult(
            version=__version__,
            mode=self._mode,
            launch=self._launch,
            pid=os.getpid(),
            started_at_s=self._started_at_s,
            gpu_source=look.gpu_source(),
            gpus=len(state.gpus),
            gpus_ok=sum(gpu.state is GpuState.OK for gpu in state.gpus),
            database=str(self._state_dir / DATABASE_NAME),
            running_jobs=len(state.holding),
            pending_jobs=len(state.jobs) - len(state.holding),
            connections=look.connections(),
            sample_age_s=look.sample_age_s(),
            database_bytes=database_bytes,
            disk_free_bytes=free_bytes,
            pass_s=look.pass_s(),
            problems=tuple(self._problems(free_bytes)),
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

    def _problems(self, free_bytes: int | None) -> Iterator[str]:
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
        yield from self._job_problems()

    def _gpu_problems(self) -> Iterator[str]:
        if (problem := self._look.gpu_problem()) is not None:
            yield f"GPUs cannot be read: {problem}"
        elif not self._state.gpus:
            why = self._state.gpu_problem
            yield f"no GPU is known: {why}" if why else "no GPU is known"
        for gpu in self._state.gpus:
            if gpu.state not in (GpuState.OK, GpuState.DRAINED):
                yield f"GPU {gpu.index} is {gpu.state}: {gpu.state_text}"

    def _job_problems(self) -> Iterator[str]:
        state = self._state
        stuck = [int(job_id) for job_id in sorted(state.holding) if state.jobs[job_id].stuck]
        if stuck:
            yield f"jobs far past their planned end: {_ids(stuck)}"
        held = [
            int(job.job_id)
            for job in state.jobs.values()
            if job.state is JobState.PENDING and job.hold in ("launch", "account")
        ]
        if held:
            yield f"jobs held since they cannot be started: {_ids(held)}"


def _ids(job_ids: list[int]) -> str:
    shown = ", ".join(map(str, job_ids[:SHOWN_IDS_MAX]))
    more = len(job_ids) - SHOWN_IDS_MAX
    return shown if more <= 0 else f"{shown} and {more} more"
