"""The I/O around one attempt: its directory, its launch, its supervisor's pidfd, its hints.

Blocking work goes to threads, one thing at a time per attempt. What a look at a directory means is
decided by core.recovery's table; what of it is I/O is carried out here (take the claim, watch the
supervisor, end what is left), and the rest is reported.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from gpuschedd.core.attempt import AttemptReport, Claim, Observation, Orders
from gpuschedd.core.recovery import Recovery
from gpuschedd.gpu.attribution import JobKey, Supervisor
from gpuschedd.run import launches
from gpuschedd.run.fencing import NoRoom, observe_fenced
from gpuschedd.run.job_dir import JobDir, JobDirCorrupt, JobDirError, abandoned_in
from gpuschedd.run.launchers.direct import Launcher
from gpuschedd.run.launches import NEVER_RAN, Launches, MakePlan, Parts
from gpuschedd.run.tasks import Tasks
from gpuschedd.run.tracking import Look, Tracked
from gpuschedd.system.threads import started_pool

log = logging.getLogger(__name__)

LEFTOVER_PAUSE_S = 0.2  # between two looks while the processes of a lost supervisor are ended
LOOK_PAUSE_MAX_S = 60.0  # between two looks while something keeps going wrong
SETUP_STUCK_S = 90.0  # three times what a set-up may take: its supervisor hangs
DELIVERY_S = 10.0  # so long an answer waits for orders that a full disk does not take
HINT_PAUSE_S = 0.01  # so long after the first hint of an attempt nobody looks for its sake alone
LOOK_THREADS = 8


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
        self._parts = Parts(
            launcher, jobs_root, report, Tasks(), started_pool(LOOK_THREADS, "attempt")
        )
        self._launches = Launches(self._parts, self.look)
        self._instance = instance
        self._attempts: dict[JobKey, Tracked] = {}

    @property
    def launcher(self) -> Launcher:
        """Who starts supervisors, and finds them again."""
        return self._parts.launcher

    def report_to(self, report: Callable[[AttemptReport], None]) -> None:
        """Who hears of attempts."""
        self._parts.report = report

    def warm_up(self) -> None:
        """Begin what the first launch would wait for."""
        self._launches.warm_up()

    # --- what the controller decided ----------------------------------------------------------

    def launch(self, key: JobKey, uid: int, make_plan: MakePlan) -> None:
        """Write the directory and start the supervisor; the plan is None when it is not wanted."""
        tracked = self._track(key, uid)
        tracked.launching = True
        self._parts.tasks.go(self._launches.launch(tracked, make_plan))

    def order(self, key: JobKey, orders: Orders) -> None:
        """Publish new orders and wake the supervisor."""
        if (tracked := self._attempts.get(key)) is not None:
            tracked.ordering = self._parts.tasks.go(self._order(tracked, orders))

    def fence(self, key: JobKey, orders: Orders) -> None:
        """Take the claim, so that nothing of this attempt runs; else order its end."""
        if (tracked := self._attempts.get(key)) is not None:
            tracked.cancel_requested = True
            tracked.ordering = self._parts.tasks.go(self._fence(tracked, orders))

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
        found = await self._parts.in_thread(lambda: abandoned_in(self._parts.jobs_root, kept))
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
            self._parts.tasks.go(self._recover_with_room(tracked, orders))

    def look(self, key: JobKey) -> None:
        """Read the directory soon; looks that are asked for meanwhile become one."""
        tracked = self._attempts.get(key)
        if tracked is None or tracked.told_exit:
            return
        if tracked.looking:
            tracked.look_again = True
            return
        tracked.looking = True
        self._parts.tasks.go(self._look_until_quiet(tracked))

    def hint(self, key: JobKey) -> None:
        """Its supervisor has written something; the first time, more may follow in a moment.

        A job that is over at once is then read, and committed, once and not twice.
        """
        tracked = self._attempts.get(key)
        if tracked is None:
            return
        if tracked.hinted is None:
            loop = asyncio.get_running_loop()
            tracked.hinted = loop.call_later(HINT_PAUSE_S, self.look, key)
            return
        tracked.hinted.cancel()
        self.look(key)

    def forget(self, key: JobKey) -> None:
        """The final state is durable: the directory goes."""
        if (tracked := self._attempts.get(key)) is not None:
            tracked.over = True
            tracked.unwatch()
            self._parts.tasks.go(self._forget(tracked))

    def look_again(self, key: JobKey) -> bool:
        """A look of the slow clock, which counts on nothing; False: nobody tracks this attempt."""
        tracked = self._attempts.get(key)
        if tracked is None:
            return False
        now_s = asyncio.get_running_loop().time()
        if tracked.is_unclaimed_since(now_s - 2 * launches.LAUNCH_TIMEOUT_S):
            self._launches.check_claimed(tracked)
        elif tracked.is_setting_up_since(now_s - SETUP_STUCK_S):
            self._parts.tasks.go(self._stop(tracked))
        tracked.told_exit = False
        self.look(key)
        return True

    def wake(self, key: JobKey) -> None:
        """Have its supervisor read its orders, also if it was stopped by a signal."""
        if (tracked := self._attempts.get(key)) is not None and tracked.pidfd is not None:
            self.launcher.wake(tracked.pidfd)

    def stop_disobedient(self, key: JobKey) -> None:
        """A supervisor that did not obey an order in time is ended."""
        if (tracked := self._attempts.get(key)) is not None:
            self._parts.tasks.go(self._stop(tracked))

    def supervisors(self) -> dict[int, Supervisor]:
        """The live supervisors by pid."""
        return dict(t.supervisor for t in self._attempts.values() if t.supervisor is not None)

    async def close(self) -> None:
        """Stop watching. Jobs and their supervisors live on; their hints wake the next daemon."""
        await self._parts.tasks.close()
        for tracked in self._attempts.values():
            tracked.unwatch()
        self._launches.close()
        await self._parts.in_thread(self.launcher.close)
        self._parts.threads.shutdown(wait=False, cancel_futures=True)

    # --- the claim ----------------------------------------------------------------------------

    async def _fence(self, tracked: Tracked, orders: Orders) -> None:
        async with tracked.lock:
            seen = await self._launches.fenced(tracked)
            is_ours = seen is not None and tracked.verdict(seen) in NEVER_RAN
            if not is_ours:
                await self._publish(tracked, orders)
        if is_ours:
            self._parts.report(AttemptReport(*tracked.key, seen=seen))
        else:
            self.look(tracked.key)

    # --- orders -------------------------------------------------------------------------------

    async def _order(self, tracked: Tracked, orders: Orders) -> None:
        async with tracked.lock:
            await self._publish(tracked, orders)
        self.look(tracked.key)

    async def _publish(self, tracked: Tracked, orders: Orders) -> None:
        """Write and wake. Repeated until it works: a full disk must not lose an order."""
        job_dir = self._parts.dir_of(tracked.key)
        while not tracked.over:
            try:
                await self._parts.in_thread(lambda: job_dir.write_orders(orders))
                pidfd = await self._attach(tracked)
            except (FileNotFoundError, NotADirectoryError) as error:
                # The attempt is over; or its directory was taken away, and obedience ends it.
                if tracked.pidfd is not None:
                    log.warning("orders_lost job=%d attempt=%d error=%s", *tracked.key, error)
                return
            except OSError as error:
                log.warning("orders_failed job=%d attempt=%d error=%s", *tracked.key, error)
                await asyncio.sleep(launches.ROOM_PAUSE_S)
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
            seen = await self._parts.in_thread(
                lambda: observe_fenced(self._parts.jobs_root, tracked)
            )
            verdict = None if seen is None else tracked.verdict(seen)
            try:
                is_adopted = verdict is Recovery.ADOPT and await self._attach(tracked) is not None
            except OSError as error:  # no descriptor was left
                raise NoRoom(str(error)) from error
        if is_adopted:
            self._parts.tasks.go(self._order(tracked, orders))
        elif verdict in NEVER_RAN:
            detail = "found unclaimed at start-up"
            self._parts.report(AttemptReport(*tracked.key, seen=seen, detail=detail))
        else:
            self.look(tracked.key)

    async def _recover_with_room(self, tracked: Tracked, orders: Orders) -> None:
        """Again until the disk takes the claim: before that nobody knows whether it may run."""
        while not tracked.over:
            await asyncio.sleep(launches.ROOM_PAUSE_S)
            with suppress(NoRoom):
                await self._recover(tracked, orders)
                return

    # --- looks --------------------------------------------------------------------------------

    async def _look_until_quiet(self, tracked: Tracked) -> None:
        """Look, and once more if somebody asked meanwhile."""
        try:
            await self._look_once(tracked)
            while tracked.look_again and not tracked.told_exit:
                tracked.look_again = False
                await self._look_once(tracked)
        finally:
            tracked.looking = False

    async def _look_once(self, tracked: Tracked) -> None:
        """Look until nothing more can be found out for now.

        Nobody else would look: what the host has no room for is tried again.
        """
        pause_s = launches.ROOM_PAUSE_S
        while not tracked.over:
            try:
                if not await self._take_look(tracked):
                    return
                pause_s = launches.ROOM_PAUSE_S
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
            look = await self._parts.in_thread(lambda: self._read(tracked))
        except JobDirCorrupt as error:
            problem = str(error)
        else:
            seen = look.seen
            if look.pidfd is not None and seen.claim is not None:
                self._watch(tracked, look.pidfd, seen.claim)
        tracked.has_started = seen is not None and seen.started is not None
        if seen is not None and seen.claim is None:
            if not tracked.claimed or tracked.pidfd is not None:
                return False  # its launch is under way, with a time-out; or its supervisor lives
            seen, problem = None, "its job directory is gone"
        if problem is not None:
            log.error("job_dir_unreadable job=%d attempt=%d error=%s", *tracked.key, problem)
        verdict = tracked.verdict(seen)
        if verdict is Recovery.ADOPT and tracked.pidfd is None:
            return not tracked.over  # it died behind the look
        left = False
        if verdict is Recovery.WAIT_FOR_PROCESSES or verdict in NEVER_RAN:
            # Also where nothing of the user's ran: the set-up of a dead supervisor may hang on.
            left = await self._end_leftovers(tracked, seen)
        if seen is not None or not left:
            report = AttemptReport(*tracked.key, seen=seen, processes_left=left, detail=problem)
            tracked.told_exit = verdict is Recovery.FINAL_FROM_EXIT
            self._parts.report(report)
        if left:
            await asyncio.sleep(LEFTOVER_PAUSE_S)
        return left

    def _read(self, tracked: Tracked) -> Look:
        """Its directory, and a supervisor that nobody watches yet. Blocks. Raises JobDirCorrupt."""
        seen = self._parts.dir_of(tracked.key).observe()
        is_new = tracked.pidfd is None and tracked.verdict(seen) is Recovery.ADOPT
        if not is_new or seen.claim is None:
            return Look(seen, None)
        return Look(seen, self.launcher.attach(seen.claim))

    async def _end_leftovers(self, tracked: Tracked, seen: Observation | None) -> bool:
        """End the processes of an attempt without supervisor; True while some are left."""
        if tracked.over:
            return False  # forgotten meanwhile: its end is on record
        started = None if seen is None else seen.started
        left = await self._parts.in_thread(
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
            claim = await self._parts.in_thread(self._parts.dir_of(tracked.key).claim)
        except JobDirCorrupt:
            return None
        if claim is None or claim.by != "supervisor":
            return None
        pidfd = await self._parts.in_thread(lambda: self.launcher.attach(claim))
        if pidfd is not None:
            self._watch(tracked, pidfd, claim)
        return tracked.pidfd

    def _watch(self, tracked: Tracked, pidfd: int, claim: Claim) -> None:
        if tracked.pidfd is not None or tracked.over:
            os.close(pidfd)
            return
        tracked.watch(pidfd, claim, lambda: self._supervisor_ended(tracked))

    def _supervisor_ended(self, tracked: Tracked) -> None:
        tracked.unwatch()
        self.look(tracked.key)

    async def _stop(self, tracked: Tracked) -> None:
        claim = tracked.claim  # the directory may be gone, or no longer say it
        if claim is None:
            claim = await self._parts.in_thread(self._parts.dir_of(tracked.key).claim)
        if claim is not None and not tracked.over:
            log.warning("supervisor_stopped job=%d attempt=%d", *tracked.key)
            await self._parts.in_thread(lambda: self.launcher.stop(claim))

    async def _forget(self, tracked: Tracked) -> None:
        async with tracked.lock:
            await self._remove(self._parts.dir_of(tracked.key))
            if self._attempts.get(tracked.key) is tracked:
                del self._attempts[tracked.key]

    async def _remove(self, job_dir: JobDir) -> None:
        try:
            await self._parts.in_thread(job_dir.remove)
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
