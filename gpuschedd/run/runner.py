"""The I/O around one attempt: its directory, its launch, its supervisor's pidfd, its hints.

Blocking work goes to threads, one thing at a time per attempt. What a look at a directory means is
decided by core.recovery's table; what of it is I/O is carried out here (take the claim, watch the
supervisor, end what is left), and the rest is reported.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from gpuschedd.core.attempt import AttemptReport, Observation, Orders
from gpuschedd.core.recovery import Recovery
from gpuschedd.gpu.attribution import JobKey, Supervisor
from gpuschedd.run.fencing import NoRoom, fence_once, observe_fenced, remove_unstarted
from gpuschedd.run.job_dir import JobDir, JobDirCorrupt, JobDirError, Spec, abandoned_in
from gpuschedd.run.launchers.direct import (
    AccountGone,
    Bounds,
    LaunchDeferred,
    Launcher,
    LaunchFailed,
    LaunchStorage,
    is_host_short,
)
from gpuschedd.run.tasks import Tasks
from gpuschedd.run.tracking import Tracked
from gpuschedd.supervisor.errors import STORAGE_ERRNOS
from gpuschedd.system.threads import started_pool

log = logging.getLogger(__name__)

LAUNCH_TIMEOUT_S = 30.0  # from the launch to the supervisor's claim
ROOM_PAUSE_S = 1.0  # between two tries to write on a full disk
LEFTOVER_PAUSE_S = 0.2  # between two looks while the processes of a lost supervisor are ended
LOOK_PAUSE_MAX_S = 60.0  # between two looks while something keeps going wrong
EARLY_LOOKS_S = (1.0, 5.0, 30.0)  # after a launch, whose hints may get lost
SETUP_STUCK_S = 90.0  # three times what a set-up may take: its supervisor hangs
DELIVERY_S = 10.0  # so long an answer waits for orders that a full disk does not take
LAUNCH_THREADS = 8

T = TypeVar("T")
LaunchPlan = tuple[Spec, Bounds]
MakePlan = Callable[[], Awaitable[LaunchPlan | None]]

#: Verdicts that are told at once: nothing is left to be done about the attempt here.
_NEVER_RAN = frozenset({Recovery.REQUEUE, Recovery.CANCELLED})


class Runner:
    """Carries out what the controller decided about attempts, and watches them."""

    def __init__(
        self,
        launcher: Launcher,
        jobs_root: Path,
        instance: str,
        report: Callable[[AttemptReport], None] = lambda _: None,
    ) -> None:
        """`report` may be set later, before anything is launched or recovered."""
        self.launcher = launcher
        self._jobs_root = jobs_root
        self._instance = instance
        self.report = report
        self._attempts: dict[JobKey, Tracked] = {}
        self._tasks = Tasks()
        self._threads = started_pool(LAUNCH_THREADS, "attempt")
        # Apart, so that a hung PID 1 delays starts and nothing else.
        self._launches = started_pool(LAUNCH_THREADS, "launch")

    # --- what the controller decided ----------------------------------------------------------

    def launch(self, key: JobKey, uid: int, make_plan: MakePlan) -> None:
        """Write the directory and start the supervisor; the plan is None when it is not wanted."""
        tracked = self._track(key, uid)
        tracked.launching = True
        self._tasks.go(self._launch(tracked, make_plan))

    def order(self, key: JobKey, orders: Orders) -> None:
        """Publish new orders and wake the supervisor."""
        if (tracked := self._attempts.get(key)) is not None:
            tracked.ordering = self._tasks.go(self._order(tracked, orders))

    def fence(self, key: JobKey, orders: Orders) -> None:
        """Take the claim, so that nothing of this attempt runs; else order its end."""
        if (tracked := self._attempts.get(key)) is not None:
            tracked.cancel_requested = True
            tracked.ordering = self._tasks.go(self._fence(tracked, orders))

    async def delivered(self, keys: Collection[JobKey]) -> None:
        """Until what was ordered of these is published, or the disk has not taken it for long.

        Their supervisors are woken in any case: who asks again means it.
        """
        found = [each for key in keys if (each := self._attempts.get(key)) is not None]
        if tasks := {each.ordering for each in found if each.ordering is not None}:
            await asyncio.wait(tasks, timeout=DELIVERY_S)
        for tracked in found:
            self.wake(tracked.key)

    async def remove_abandoned(self, kept: Collection[JobKey]) -> None:
        """Start-up, before anything is launched: the directories of all other attempts go.

        A kill between the commit of an end and the removal leaves one, with the environment in it.
        """
        found = await self._in_thread(lambda: abandoned_in(self._jobs_root, kept))
        for job_dir in found:
            log.info("job_dir_removed job=%d attempt=%d", job_dir.job_id, job_dir.attempt)
            await self._remove(job_dir)

    async def recover(self, key: JobKey, uid: int, orders: Orders, *, ran: bool) -> None:
        """Find out what became of an attempt while nobody watched; `ran`: the database says it did.

        The start waits for nothing that may take long: what needs room on a full disk, or an end
        of processes that do not end, goes on beside it.
        """
        tracked = self._track(key, uid)
        tracked.ran, tracked.cancel_requested = ran, orders.cancel is not None
        try:
            await self._recover(tracked, orders)
        except NoRoom:
            self._tasks.go(self._recover_with_room(tracked, orders))

    def look(self, key: JobKey) -> None:
        """Read the directory soon; looks that are asked for meanwhile become one."""
        tracked = self._attempts.get(key)
        if tracked is None:
            return
        if tracked.looking:
            tracked.look_again = True
            return
        tracked.looking = True
        self._tasks.go(self._look_until_quiet(tracked))

    def forget(self, key: JobKey) -> None:
        """The final state is durable: the directory goes."""
        if (tracked := self._attempts.get(key)) is not None:
            tracked.over = True
            tracked.unwatch()
            self._tasks.go(self._forget(tracked))

    def look_again(self, key: JobKey) -> bool:
        """A look of the slow clock, which counts on nothing; False: nobody tracks this attempt."""
        tracked = self._attempts.get(key)
        if tracked is None:
            return False
        now_s = asyncio.get_running_loop().time()
        if tracked.is_unclaimed_since(now_s - 2 * LAUNCH_TIMEOUT_S):
            self._check_claimed(tracked)
        elif tracked.is_setting_up_since(now_s - SETUP_STUCK_S):
            self._tasks.go(self._stop(tracked))
        self.look(key)
        return True

    def wake(self, key: JobKey) -> None:
        """Have its supervisor read its orders, also if it was stopped by a signal."""
        if (tracked := self._attempts.get(key)) is not None and tracked.pidfd is not None:
            self.launcher.wake(tracked.pidfd)

    def stop_disobedient(self, key: JobKey) -> None:
        """A supervisor that did not obey an order in time is ended."""
        if (tracked := self._attempts.get(key)) is not None:
            self._tasks.go(self._stop(tracked))

    def supervisors(self) -> dict[int, Supervisor]:
        """The live supervisors by pid."""
        return dict(t.supervisor for t in self._attempts.values() if t.supervisor is not None)

    async def close(self) -> None:
        """Stop watching. Jobs and their supervisors live on; their hints wake the next daemon."""
        await self._tasks.close()
        for tracked in self._attempts.values():
            tracked.unwatch()
        for threads in (self._threads, self._launches):
            threads.shutdown(wait=False, cancel_futures=True)

    # --- launches -----------------------------------------------------------------------------

    async def _launch(self, tracked: Tracked, make_plan: MakePlan) -> None:
        loop = asyncio.get_running_loop()
        try:
            if await self._start_supervisor(tracked, make_plan):
                loop.call_later(LAUNCH_TIMEOUT_S, self._check_claimed, tracked)
                for after_s in (0.0, *EARLY_LOOKS_S):
                    loop.call_later(after_s, self.look, tracked.key)
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
                    self._launches, _create_and_launch, self.launcher, self._jobs_root, *made
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
            await self._in_thread(lambda: remove_unstarted(self._jobs_root, tracked.key))
            self.report(AttemptReport(*tracked.key, seen=None, storage_error=str(error)))
            return
        seen = await self._fenced(tracked)
        if seen is not None and tracked.verdict(seen) not in _NEVER_RAN:
            self.look(tracked.key)  # a supervisor came through all the same
            return
        self.report(
            AttemptReport(
                *tracked.key,
                seen=seen,
                launch_error=str(error),
                deferred=isinstance(error, LaunchDeferred),
                account_gone=isinstance(error, AccountGone),
            )
        )

    def _check_claimed(self, tracked: Tracked) -> None:
        """The launch time-out: an attempt that nobody claimed is fenced."""
        if not tracked.over and tracked.pidfd is None:
            self._tasks.go(self._time_out(tracked))

    async def _time_out(self, tracked: Tracked) -> None:
        async with tracked.lock:
            seen = await self._fenced(tracked)
        if seen is not None and seen.claim is not None and seen.claim.by == "supervisor":
            self.look(tracked.key)
            return
        error = f"no supervisor within {LAUNCH_TIMEOUT_S:.0f} s"
        lacked = await self._in_thread(lambda: self.launcher.lacked_program(*tracked.key))
        if lacked:
            error += ": its files are missing or of several versions"
        self.report(AttemptReport(*tracked.key, seen=seen, launch_error=error, deferred=lacked))

    # --- the claim ----------------------------------------------------------------------------

    async def _fenced(self, tracked: Tracked) -> Observation | None:
        """Take the claim if it is free; what stands afterwards. None: not even that is possible.

        A full disk, or no descriptor left, only delays it: giving up here would leave open whether
        anything starts later.
        """
        while not tracked.over:
            with suppress(NoRoom):
                return await self._in_thread(lambda: fence_once(self._jobs_root, tracked.key))
            await asyncio.sleep(ROOM_PAUSE_S)
        return None

    async def _fence(self, tracked: Tracked, orders: Orders) -> None:
        async with tracked.lock:
            seen = await self._fenced(tracked)
            is_ours = seen is not None and tracked.verdict(seen) in _NEVER_RAN
            if not is_ours:
                await self._publish(tracked, orders)
        if is_ours:
            self.report(AttemptReport(*tracked.key, seen=seen))
        else:
            self.look(tracked.key)

    # --- orders -------------------------------------------------------------------------------

    async def _order(self, tracked: Tracked, orders: Orders) -> None:
        async with tracked.lock:
            await self._publish(tracked, orders)
        self.look(tracked.key)

    async def _publish(self, tracked: Tracked, orders: Orders) -> None:
        """Write and wake. Repeated until it works: a full disk must not lose an order."""
        job_dir = JobDir.open(self._jobs_root, *tracked.key)
        while not tracked.over:
            try:
                await self._in_thread(lambda: job_dir.write_orders(orders))
                pidfd = await self._attach(tracked)
            except FileNotFoundError:
                return  # the attempt is over
            except OSError as error:
                log.warning("orders_failed job=%d attempt=%d error=%s", *tracked.key, error)
                await asyncio.sleep(ROOM_PAUSE_S)
            else:
                if pidfd is not None:
                    self.launcher.wake(pidfd)
                return

    # --- start-up -----------------------------------------------------------------------------

    async def _recover(self, tracked: Tracked, orders: Orders) -> None:
        """Start-up: fence what nobody claimed, write the orders again for what lives.

        Raises NoRoom.
        """
        async with tracked.lock:
            seen = await self._in_thread(lambda: observe_fenced(self._jobs_root, tracked))
            verdict = None if seen is None else tracked.verdict(seen)
            try:
                is_adopted = verdict is Recovery.ADOPT and await self._attach(tracked) is not None
            except OSError as error:  # no descriptor was left
                raise NoRoom(str(error)) from error
        if is_adopted:
            self._tasks.go(self._order(tracked, orders))
        elif verdict in _NEVER_RAN:
            detail = "found unclaimed at start-up"
            self.report(AttemptReport(*tracked.key, seen=seen, detail=detail))
        else:
            self.look(tracked.key)

    async def _recover_with_room(self, tracked: Tracked, orders: Orders) -> None:
        """Again until the disk takes the claim: before that nobody knows whether it may run."""
        while not tracked.over:
            await asyncio.sleep(ROOM_PAUSE_S)
            with suppress(NoRoom):
                await self._recover(tracked, orders)
                return

    # --- looks --------------------------------------------------------------------------------

    async def _look_until_quiet(self, tracked: Tracked) -> None:
        """Look, and once more if somebody asked meanwhile."""
        try:
            await self._look_once(tracked)
            while tracked.look_again:
                tracked.look_again = False
                await self._look_once(tracked)
        finally:
            tracked.looking = False

    async def _look_once(self, tracked: Tracked) -> None:
        """Look until nothing more can be found out for now.

        Nobody else would look: what the host has no room for is tried again.
        """
        pause_s = ROOM_PAUSE_S
        while not tracked.over:
            try:
                if not await self._take_look(tracked):
                    return
                pause_s = ROOM_PAUSE_S
            except Exception as error:
                told = "look_failed job=%d attempt=%d error=%r"
                log.warning(told, *tracked.key, error, exc_info=not isinstance(error, OSError))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LOOK_PAUSE_MAX_S)

    async def _take_look(self, tracked: Tracked) -> bool:
        """Read the directory and carry out what follows. Whether to look once more."""
        seen: Observation | None = None
        problem = None
        try:
            seen = await self._in_thread(JobDir.open(self._jobs_root, *tracked.key).observe)
        except JobDirCorrupt as error:
            problem = str(error)
        tracked.has_started = seen is not None and seen.started is not None
        if seen is not None and seen.claim is None:
            if not tracked.claimed or tracked.pidfd is not None:
                return False  # its launch is under way, with a time-out; or its supervisor lives
            seen, problem = None, "its job directory is gone"
        if problem is not None:
            log.error("job_dir_unreadable job=%d attempt=%d error=%s", *tracked.key, problem)
        verdict = tracked.verdict(seen)
        if verdict is Recovery.ADOPT and await self._attach(tracked) is None:
            return True  # it died between the two looks
        left = False
        if verdict is Recovery.WAIT_FOR_PROCESSES or verdict in _NEVER_RAN:
            # Also where nothing of the user's ran: the set-up of a dead supervisor may hang on.
            left = await self._end_leftovers(tracked, seen)
        if seen is not None or not left:
            report = AttemptReport(*tracked.key, seen=seen, processes_left=left, detail=problem)
            self.report(report)
        if left:
            await asyncio.sleep(LEFTOVER_PAUSE_S)
        return left

    async def _end_leftovers(self, tracked: Tracked, seen: Observation | None) -> bool:
        """End the processes of an attempt without supervisor; True while some are left."""
        if tracked.over:
            return False  # forgotten meanwhile: its end is on record
        started = None if seen is None else seen.started
        left = await self._in_thread(
            lambda: self.launcher.kill_leftovers(*tracked.key, self._instance, tracked.uid, started)
        )
        return bool(left)

    # --- the supervisor -----------------------------------------------------------------------

    async def _attach(self, tracked: Tracked) -> int | None:
        """Watch the supervisor's pidfd; None when it is dead or there is none.

        A claim that cannot be understood is for a look to judge.
        """
        if tracked.pidfd is not None:
            return tracked.pidfd
        try:
            claim = await self._in_thread(JobDir.open(self._jobs_root, *tracked.key).claim)
        except JobDirCorrupt:
            return None
        if claim is None or claim.by != "supervisor":
            return None
        pidfd = await self._in_thread(lambda: self.launcher.attach(claim))
        if pidfd is None:
            return None
        if tracked.pidfd is not None or tracked.over:
            os.close(pidfd)
            return tracked.pidfd
        tracked.watch(pidfd, claim, lambda: self._supervisor_ended(tracked))
        return pidfd

    def _supervisor_ended(self, tracked: Tracked) -> None:
        tracked.unwatch()
        self.look(tracked.key)

    async def _stop(self, tracked: Tracked) -> None:
        claim = await self._in_thread(JobDir.open(self._jobs_root, *tracked.key).claim)
        if claim is not None and not tracked.over:
            log.warning("supervisor_stopped job=%d attempt=%d", *tracked.key)
            await self._in_thread(lambda: self.launcher.stop(claim))

    async def _forget(self, tracked: Tracked) -> None:
        async with tracked.lock:
            await self._remove(JobDir.open(self._jobs_root, *tracked.key))
            if self._attempts.get(tracked.key) is tracked:
                del self._attempts[tracked.key]

    async def _remove(self, job_dir: JobDir) -> None:
        try:
            await self._in_thread(job_dir.remove)
        except (OSError, JobDirError) as error:
            key = (job_dir.job_id, job_dir.attempt)
            log.warning("job_dir_left job=%d attempt=%d error=%s", *key, error)

    # --- helpers ------------------------------------------------------------------------------

    def _track(self, key: JobKey, uid: int) -> Tracked:
        """One whose number is given again waits until the first one's directory is gone."""
        before = self._attempts.get(key)
        lock = before.lock if before is not None else asyncio.Lock()
        tracked = self._attempts[key] = Tracked(key, uid, lock)
        tracked.quiet_since_s = asyncio.get_running_loop().time()
        return tracked

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _create_and_launch(launcher: Launcher, jobs_root: Path, spec: Spec, bounds: Bounds) -> None:
    """Write the directory, then start the supervisor. Blocks. Raises LaunchFailed."""
    try:
        job_dir = JobDir.create(jobs_root, spec)
    except (OSError, JobDirError) as error:
        kind = LaunchDeferred if is_host_short(error) else LaunchFailed
        if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
            kind = LaunchStorage
        raise kind(f"the job directory cannot be written: {error}") from error
    launcher.launch(job_dir, bounds)
