"""A launch: the plan, the directory, the supervisor, and the claim that must come in time.

What fails, or comes too late, is fenced before anything is said of it, so that nothing of the
attempt can start once the job waits again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpuschedd.core.attempt import AttemptReport, Observation
from gpuschedd.core.recovery import Recovery
from gpuschedd.gpu.attribution import JobKey
from gpuschedd.run.fencing import NoRoom, fence_once, remove_unstarted
from gpuschedd.run.job_dir import JobDir, JobDirError, Spec
from gpuschedd.run.launchers.direct import (
    AccountGone,
    Bounds,
    LaunchDeferred,
    Launcher,
    LaunchFailed,
    LaunchStorage,
    PlaceAway,
    is_host_short,
)
from gpuschedd.run.tasks import Tasks
from gpuschedd.run.tracking import Tracked
from gpuschedd.supervisor.errors import STORAGE_ERRNOS
from gpuschedd.system.threads import started_pool

log = logging.getLogger(__name__)

LAUNCH_TIMEOUT_S = 30.0  # from the launch to the supervisor's claim
ROOM_PAUSE_S = 1.0  # between two tries to write on a full disk
EARLY_LOOKS_S = (0.1, 1.0, 5.0, 30.0)  # after a launch, whose hints may get lost
LAUNCH_THREADS = 8

T = TypeVar("T")
LaunchPlan = tuple[Spec, Bounds]
MakePlan = Callable[[], Awaitable[LaunchPlan | None]]

#: Verdicts that are told at once: nothing is left to be done about the attempt here.
NEVER_RAN = frozenset({Recovery.REQUEUE, Recovery.CANCELLED})


@dataclass(slots=True)
class Parts:
    """What all work around attempts shares. `report` is set before anything is launched."""

    launcher: Launcher
    jobs_root: Path
    report: Callable[[AttemptReport], None]
    tasks: Tasks
    threads: ThreadPoolExecutor

    def dir_of(self, key: JobKey) -> JobDir:
        """Of an attempt, whether it exists or not."""
        return JobDir.open(self.jobs_root, *key)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """What blocks, beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)


class Launches:
    """Starts supervisors. `look`: have the directory of an attempt read."""

    def __init__(self, parts: Parts, look: Callable[[JobKey], None]) -> None:
        self._parts = parts
        self._look = look
        # Apart, so that a hung PID 1 delays starts and nothing else.
        self._threads = started_pool(LAUNCH_THREADS, "launch")

    def warm_up(self) -> None:
        """Make the launcher ready, beside everything else."""
        self._threads.submit(self._parts.launcher.warm_up)

    def close(self) -> None:
        """Begin no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def launch(self, tracked: Tracked, make_plan: MakePlan) -> None:
        loop = asyncio.get_running_loop()
        try:
            if await self._start_supervisor(tracked, make_plan):
                loop.call_later(LAUNCH_TIMEOUT_S, self.check_claimed, tracked)
                for after_s in EARLY_LOOKS_S:
                    loop.call_later(after_s, self._look, tracked.key)
        finally:
            tracked.launching = False
            tracked.quiet_since_s = loop.time()

    async def _start_supervisor(self, tracked: Tracked, make_plan: MakePlan) -> bool:
        """Whether there may be a supervisor now; a failure was reported."""
        async with tracked.lock:
            error: LaunchFailed | None = None
            try:
                made = await make_plan()
                if made is None:
                    return False
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(
                    self._threads,
                    _create_and_launch,
                    self._parts,
                    *made,
                )
            except LaunchFailed as failure:
                error = failure
            except Exception as bug:
                # Nobody else would look at the attempt again: it goes the way of failed launches.
                log.exception("launch_broke job=%d attempt=%d", *tracked.key)
                kind = LaunchDeferred if is_host_short(bug) else LaunchFailed
                error = kind(f"{type(bug).__name__}: {bug}")
            if error is not None:
                await self._launch_failed(tracked, error)
        return error is None

    async def _launch_failed(self, tracked: Tracked, error: LaunchFailed) -> None:
        """Nothing of it may start later: fence it, or remove what the full disk took of it."""
        log.warning("launch_failed job=%d attempt=%d error=%s", *tracked.key, error)
        if isinstance(error, LaunchStorage):
            await self._parts.in_thread(
                lambda: remove_unstarted(self._parts.jobs_root, tracked.key)
            )
            self._parts.report(AttemptReport(*tracked.key, seen=None, storage_error=str(error)))
            return
        seen = await self.fenced(tracked)
        if seen is not None and tracked.verdict(seen) not in NEVER_RAN:
            self._look(tracked.key)  # a supervisor came through all the same
            return
        self._parts.report(
            AttemptReport(
                *tracked.key,
                seen=seen,
                launch_error=str(error),
                deferred=isinstance(error, LaunchDeferred),
                account_gone=isinstance(error, AccountGone),
                place=error.place if isinstance(error, PlaceAway) else None,
            )
        )

    def check_claimed(self, tracked: Tracked) -> None:
        """The launch time-out: an attempt that nobody claimed is fenced."""
        if not tracked.over and tracked.pidfd is None:
            self._parts.tasks.go(self._time_out(tracked))

    async def _time_out(self, tracked: Tracked) -> None:
        async with tracked.lock:
            seen = await self.fenced(tracked)
        if seen is not None and seen.claim is not None and seen.claim.by == "supervisor":
            self._look(tracked.key)
            return
        error = f"no supervisor within {LAUNCH_TIMEOUT_S:.0f} s"
        lacked = await self._parts.in_thread(
            lambda: self._parts.launcher.lacked_program(*tracked.key)
        )
        if lacked:
            error += ": its files are missing or of several versions"
        self._parts.report(
            AttemptReport(*tracked.key, seen=seen, launch_error=error, deferred=lacked)
        )

    async def fenced(self, tracked: Tracked) -> Observation | None:
        """Take the claim if it is free; what stands afterwards. None: not even that is possible.

        A full disk, or no descriptor left, only delays it: giving up here would leave open whether
        anything starts later.
        """
        while not tracked.over:
            with suppress(NoRoom):
                return await self._parts.in_thread(
                    lambda: fence_once(self._parts.jobs_root, tracked.key)
                )
            await asyncio.sleep(ROOM_PAUSE_S)
        return None


def _create_and_launch(parts: Parts, spec: Spec, bounds: Bounds) -> None:
    """Write the directory, then start the supervisor. Blocks. Raises LaunchFailed."""
    try:
        job_dir = JobDir.create(parts.jobs_root, spec)
    except (OSError, JobDirError) as error:
        # The directory is ours, not the job's: whatever is wrong with it is put right.
        kind = LaunchDeferred if isinstance(error, OSError) else LaunchFailed
        if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
            kind = LaunchStorage
        raise kind(f"the job directory cannot be written: {error}") from error
    parts.launcher.launch(job_dir, bounds)
