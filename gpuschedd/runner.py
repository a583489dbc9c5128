"""The I/O around one attempt: its directory, its launch, its supervisor's pidfd, its hints.

Blocking work goes to threads, one thing at a time per attempt. What is found is reported as a
Sighting; what it means is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gpusched_client.terms import JobId
from gpuschedd.attribution import Supervisor
from gpuschedd.job_dir import (
    JobDir,
    JobDirCorrupt,
    JobDirError,
    Observation,
    Orders,
    Spec,
    Started,
    abandoned_in,
)
from gpuschedd.launcher import (
    AccountGone,
    Bounds,
    LaunchDeferred,
    Launcher,
    LaunchFailed,
    LaunchStorage,
)
from gpuschedd.supervisor.errors import STORAGE_ERRNOS

log = logging.getLogger(__name__)

LAUNCH_TIMEOUT_S = 30.0  # from the launch to the supervisor's claim
ROOM_PAUSE_S = 1.0  # between two tries to write on a full disk
LEFTOVER_PAUSE_S = 0.2  # between two looks while the processes of a lost supervisor are ended
DISOBEDIENCE_S = 30.0  # past the grace: then the supervisor itself is stopped
HINT_BYTES_MAX = 64
LAUNCH_THREADS = 8

Key = tuple[JobId, int]
T = TypeVar("T")
Plan = tuple[Spec, Bounds]
MakePlan = Callable[[], Awaitable[Plan | None]]


@dataclass(frozen=True, slots=True)
class Sighting:
    """What was found of one attempt."""

    job_id: JobId
    attempt: int
    seen: Observation | None  # None: the directory cannot be read
    processes_left: bool = False  # asked only when the supervisor is dead
    launch_error: str | None = None
    deferred: bool = False  # launch_error is the host's fault
    account_gone: bool = False  # launch_error is that the job is nobody's any more
    storage_error: str | None = None
    detail: str | None = None


class NoRoom(Exception):
    """The host does not take the claim for now, so nobody can say whether the attempt may run."""


class Runner:
    """Carries out what the controller decided about attempts, and watches them."""

    def __init__(
        self,
        launcher: Launcher,
        jobs_root: Path,
        instance: str,
        report: Callable[[Sighting], None],
    ) -> None:
        self._launcher = launcher
        self._jobs_root = jobs_root
        self._instance = instance
        self._report = report
        self._locks: dict[Key, asyncio.Lock] = {}
        self._pidfds: dict[Key, int] = {}
        self._claimed: set[Key] = set()  # had a supervisor, whatever the directory says
        self._supervisors: dict[Key, tuple[int, Supervisor]] = {}
        self._looking: dict[Key, bool] = {}  # value: look once more afterwards
        self._uids: dict[Key, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._hints: socket.socket | None = None
        self._is_closed = False
        self._threads = ThreadPoolExecutor(LAUNCH_THREADS, thread_name_prefix="attempt")
        # Apart, so that a hung PID 1 delays starts and nothing else.
        self._launches = ThreadPoolExecutor(LAUNCH_THREADS, thread_name_prefix="launch")

    # --- orders from the controller -----------------------------------------------------------

    def launch(self, key: Key, uid: int, make_plan: MakePlan) -> None:
        """Write the directory and start the supervisor; the plan is None when it is not wanted."""
        self._uids[key] = uid
        self._go(self._launch(key, make_plan))

    def order(self, key: Key, orders: Orders) -> None:
        """Publish new orders and wake the supervisor."""
        self._go(self._order(key, orders))

    def fence(self, key: Key, orders: Orders) -> None:
        """Take the claim, so that nothing of this attempt runs; else order its end."""
        self._go(self._fence(key, orders))

    async def remove_abandoned(self, kept: Collection[Key]) -> None:
        """Start-up, before anything is launched: the directories of all other attempts go.

        A kill between the commit of an end and the removal leaves one, with the environment in it.
        """
        found = await self._in_thread(lambda: abandoned_in(self._jobs_root, kept))
        for job_dir in found:
            log.info("job_dir_removed job=%d attempt=%d", job_dir.job_id, job_dir.attempt)
            await self._remove(job_dir)

    async def recover(self, key: Key, uid: int, orders: Orders, *, ran: bool) -> None:
        """Find out what became of an attempt while nobody watched; `ran`: the books say it did.

        The start waits for nothing that may take long: what needs room on a full disk, or an end
        of processes that do not end, goes on beside it.
        """
        self._uids[key] = uid
        try:
            await self._recover(key, orders, ran=ran)
        except NoRoom:
            self._go(self._recover_with_room(key, orders, ran=ran))

    async def _recover_with_room(self, key: Key, orders: Orders, *, ran: bool) -> None:
        """Again until the disk takes the claim: before that nobody knows whether it may run."""
        while key in self._uids:
            await asyncio.sleep(ROOM_PAUSE_S)
            with suppress(NoRoom):
                await self._recover(key, orders, ran=ran)
                return

    def look(self, key: Key) -> None:
        """Read the directory soon; looks that are asked for meanwhile become one."""
        if key in self._looking:
            self._looking[key] = True
            return
        self._looking[key] = False
        self._go(self._look_until_quiet(key))

    def forget(self, key: Key) -> None:
        """The final state is durable: the directory goes."""
        self._detach(key)
        self._go(self._forget(key))

    def stop_disobedient(self, key: Key) -> None:
        """A supervisor that did not obey an order in time is ended."""
        self._go(self._stop(key))

    def supervisors(self) -> dict[int, Supervisor]:
        """The live supervisors by pid."""
        return dict(self._supervisors.values())

    async def close(self) -> None:
        """Stop watching. Jobs and their supervisors live on; their hints wake the next daemon."""
        self._is_closed = True
        if self._hints is not None:
            asyncio.get_running_loop().remove_reader(self._hints)
            self._hints.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for key in tuple(self._pidfds):
            self._detach(key)
        for threads in (self._threads, self._launches):
            threads.shutdown(wait=False, cancel_futures=True)

    # --- hints --------------------------------------------------------------------------------

    def open_hints(self, path: Path) -> None:
        """Listen for "ID.ATTEMPT" datagrams: only a wake-up, so what does not read is dropped.

        Bound over its directory: the path of the state may be longer than a socket's address.
        """
        path.unlink(missing_ok=True)
        hints = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            hints.bind(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)
        os.chmod(path, 0o600)
        asyncio.get_running_loop().add_reader(hints, self._take_hints, hints)
        self._hints = hints

    def _take_hints(self, hints: socket.socket) -> None:
        while True:
            try:
                content = hints.recv(HINT_BYTES_MAX)
            except (BlockingIOError, InterruptedError):
                return
            job_id, dot, attempt = content.decode("ascii", "replace").partition(".")
            if dot and job_id.isdecimal() and attempt.isdecimal():
                key = (JobId(int(job_id)), int(attempt))
                if key in self._uids:
                    self.look(key)

    # --- one attempt --------------------------------------------------------------------------

    async def _launch(self, key: Key, make_plan: MakePlan) -> None:
        async with self._lock(key):
            error: LaunchFailed | None = None
            try:
                made = await make_plan()
                if made is None:
                    return
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._launches, self._create_and_launch, *made)
            except LaunchFailed as failure:
                error = failure
            except Exception as bug:
                # Nobody else would look at the attempt again: it goes the way of failed launches.
                log.exception("launch_broke job=%d attempt=%d", *key)
                error = LaunchFailed(f"{type(bug).__name__}: {bug}")
            if error is not None:
                await self._launch_failed(key, error)
                return
        self.look(key)
        loop = asyncio.get_running_loop()
        loop.call_later(LAUNCH_TIMEOUT_S, self._check_claimed, key)

    def _create_and_launch(self, spec: Spec, bounds: Bounds) -> None:
        try:
            job_dir = JobDir.create(self._jobs_root, spec)
        except (OSError, JobDirError) as error:
            number = error.errno if isinstance(error, OSError) else None
            kind = LaunchStorage if number in STORAGE_ERRNOS else LaunchFailed
            raise kind(f"the job directory cannot be written: {error}") from error
        self._launcher.launch(job_dir, bounds)

    async def _launch_failed(self, key: Key, error: LaunchFailed) -> None:
        """Nothing of it may start later: fence it, or remove what the full disk took of it."""
        log.warning("launch_failed job=%d attempt=%d error=%s", *key, error)
        if isinstance(error, LaunchStorage):
            await self._in_thread(lambda: self._remove_unstarted(key))
            self._report(Sighting(*key, seen=None, storage_error=str(error)))
            return
        seen = await self._fenced(key)
        self._report(
            Sighting(
                *key,
                seen=seen,
                launch_error=str(error),
                deferred=isinstance(error, LaunchDeferred),
                account_gone=isinstance(error, AccountGone),
            )
        )

    def _remove_unstarted(self, key: Key) -> None:
        """The launching process ended without a claim: nobody will look for the directory."""
        try:
            JobDir.open(self._jobs_root, *key).remove()
        except (OSError, JobDirError) as error:
            log.warning("job_dir_left job=%d attempt=%d error=%s", *key, error)

    def _check_claimed(self, key: Key) -> None:
        """The launch time-out: an attempt that nobody claimed is fenced."""
        if key in self._uids and key not in self._pidfds:
            self._go(self._time_out(key))

    async def _time_out(self, key: Key) -> None:
        async with self._lock(key):
            seen = await self._fenced(key)
        if seen is not None and seen.claim is not None and seen.claim.by == "supervisor":
            self.look(key)
            return
        error = f"no supervisor within {LAUNCH_TIMEOUT_S:.0f} s"
        lacked = await self._in_thread(lambda: self._launcher.lacked_program(*key))
        if lacked:
            error += ": its files are missing or of several versions"
        self._report(Sighting(*key, seen=seen, launch_error=error, deferred=lacked))

    async def _fenced(self, key: Key) -> Observation | None:
        """Take the claim if it is free; what stands afterwards. None: not even that is possible.

        A full disk, or no descriptor left, only delays it: who gave up here could not say that
        nothing starts later.
        """
        while key in self._uids:
            with suppress(NoRoom):
                return await self._in_thread(lambda: self._fence_once(key))
            await asyncio.sleep(ROOM_PAUSE_S)
        return None

    def _fence_once(self, key: Key) -> Observation | None:
        """The same. Raises NoRoom."""
        job_dir = JobDir.open(self._jobs_root, *key)
        try:
            job_dir.fence()
            return job_dir.observe()
        except (OSError, JobDirError) as error:
            log.warning("fence_failed job=%d attempt=%d error=%s", *key, error)
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise NoRoom(str(error)) from error
            return None

    async def _order(self, key: Key, orders: Orders) -> None:
        async with self._lock(key):
            await self._publish(key, orders)
        self.look(key)

    async def _publish(self, key: Key, orders: Orders) -> None:
        """Write and wake. A full disk is no reason to forget: done again until it works."""
        job_dir = JobDir.open(self._jobs_root, *key)
        while key in self._uids:
            try:
                await self._in_thread(lambda: job_dir.write_orders(orders))
                pidfd = await self._attach(key)
            except FileNotFoundError:
                return  # the attempt is over
            except OSError as error:
                log.warning("orders_failed job=%d attempt=%d error=%s", *key, error)
                await asyncio.sleep(ROOM_PAUSE_S)
            else:
                if pidfd is not None:
                    self._launcher.wake(pidfd)
                return

    async def _fence(self, key: Key, orders: Orders) -> None:
        async with self._lock(key):
            seen = await self._fenced(key)
            if seen is None or (seen.claim is not None and seen.claim.by == "supervisor"):
                await self._publish(key, orders)
                seen = None
        if seen is None:
            self.look(key)
        else:
            self._report(Sighting(*key, seen=seen))

    async def _recover(self, key: Key, orders: Orders, *, ran: bool) -> None:
        """Start-up: fence what nobody claimed, write the orders again for what lives.

        Raises NoRoom.
        """
        async with self._lock(key):
            seen = await self._in_thread(lambda: self._fence_once(key))
            lives = await self._attach(key) is not None
        if lives:
            self._go(self._order(key, orders))
        elif seen is None or (seen.claim is not None and seen.claim.by == "supervisor"):
            self.look(key)
        elif ran and await self._end_leftovers(key, seen.started):
            self._go(self._report_unclaimed(key, seen))
        else:
            self._report(_unclaimed(key, seen))

    async def _report_unclaimed(self, key: Key, seen: Observation) -> None:
        """Its processes outlived its directory: its GPUs are free when the last one is gone."""
        while await self._end_leftovers(key, seen.started):
            await asyncio.sleep(LEFTOVER_PAUSE_S)
        self._report(_unclaimed(key, seen))

    async def _look_until_quiet(self, key: Key) -> None:
        """Look, and once more if somebody asked meanwhile."""
        try:
            await self._look_once(key)
            while self._looking.get(key):
                self._looking[key] = False
                await self._look_once(key)
        finally:
            self._looking.pop(key, None)

    async def _look_once(self, key: Key) -> None:
        """Look until there is no more to be found out for now.

        Nobody else would look: what the host has no room for is tried again.
        """
        while key in self._uids:
            try:
                if not await self._take_look(key):
                    return
            except OSError as error:
                log.warning("look_failed job=%d attempt=%d error=%s", *key, error)
                await asyncio.sleep(ROOM_PAUSE_S)

    async def _take_look(self, key: Key) -> bool:
        """Read the directory; where the supervisor is dead, end what it left behind.

        Whether to look once more.
        """
        try:
            seen = await self._in_thread(JobDir.open(self._jobs_root, *key).observe)
        except JobDirCorrupt as error:
            await self._end_unreadable(key, str(error))
            return False
        except FileNotFoundError:
            return False  # not written yet, or gone
        if seen.claim is None and key in self._claimed:
            if key not in self._pidfds:
                await self._end_unreadable(key, "its job directory is gone")
            return False
        if seen.exit is not None or not await self._is_orphan(key, seen):
            self._report(Sighting(*key, seen=seen))
            return False
        left = await self._end_leftovers(key, seen.started)
        if seen.supervisor_alive:
            return True  # it died between the two looks
        self._report(Sighting(*key, seen=seen, processes_left=left))
        if left:
            await asyncio.sleep(LEFTOVER_PAUSE_S)
        return left

    async def _end_unreadable(self, key: Key, text: str) -> None:
        """Nobody can say what is in the directory: its GPUs are free when no process is left."""
        log.error("job_dir_unreadable job=%d attempt=%d error=%s", *key, text)
        while await self._end_leftovers(key, None):
            await asyncio.sleep(LEFTOVER_PAUSE_S)
        self._report(Sighting(*key, seen=None, detail=text))

    async def _is_orphan(self, key: Key, seen: Observation) -> bool:
        """Claimed by a supervisor that is dead; one that lives is watched from now on."""
        if seen.claim is None or seen.claim.by != "supervisor":
            return False
        return await self._attach(key) is None

    async def _end_leftovers(self, key: Key, started: Started | None) -> bool:
        """End the processes of an attempt without supervisor; True while some are left."""
        uid = self._uids.get(key)
        if uid is None:
            return False  # forgotten meanwhile: its end is in the books
        left = await self._in_thread(
            lambda: self._launcher.kill_leftovers(*key, self._instance, uid, started)
        )
        return bool(left)

    async def _attach(self, key: Key) -> int | None:
        """Watch the supervisor's pidfd; None when it is dead or there is none.

        A claim that cannot be understood is for a look to judge.
        """
        if key in self._pidfds:
            return self._pidfds[key]
        try:
            claim = await self._in_thread(JobDir.open(self._jobs_root, *key).claim)
        except JobDirCorrupt:
            return None
        if claim is None or claim.by != "supervisor":
            return None
        pidfd = await self._in_thread(lambda: self._launcher.attach(claim))
        if pidfd is None:
            return None
        if key in self._pidfds or key not in self._uids:
            os.close(pidfd)
            return self._pidfds.get(key)
        self._pidfds[key] = pidfd
        self._claimed.add(key)
        self._supervisors[key] = (claim.pid, Supervisor(key[0], claim.start_ticks, key[1]))
        asyncio.get_running_loop().add_reader(pidfd, self._supervisor_ended, key)
        return pidfd

    def _supervisor_ended(self, key: Key) -> None:
        self._detach(key)
        self.look(key)

    def _detach(self, key: Key) -> None:
        pidfd = self._pidfds.pop(key, None)
        self._supervisors.pop(key, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    async def _forget(self, key: Key) -> None:
        async with self._lock(key):
            self._uids.pop(key, None)
            self._claimed.discard(key)
            self._detach(key)
            await self._remove(JobDir.open(self._jobs_root, *key))
        self._locks.pop(key, None)

    async def _remove(self, job_dir: JobDir) -> None:
        try:
            await self._in_thread(job_dir.remove)
        except (OSError, JobDirError) as error:
            key = (job_dir.job_id, job_dir.attempt)
            log.warning("job_dir_left job=%d attempt=%d error=%s", *key, error)

    async def _stop(self, key: Key) -> None:
        claim = await self._in_thread(JobDir.open(self._jobs_root, *key).claim)
        if claim is not None and key in self._uids:
            log.warning("supervisor_stopped job=%d attempt=%d", *key)
            await self._in_thread(lambda: self._launcher.stop(claim))

    # --- helpers ------------------------------------------------------------------------------

    def _lock(self, key: Key) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        if self._is_closed:
            work.close()
            return
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("attempt_work_failed", exc_info=error)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _unclaimed(key: Key, seen: Observation) -> Sighting:
    return Sighting(*key, seen=seen, detail="found unclaimed at start-up")
