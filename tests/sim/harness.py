"""The real controller and the real books under a virtual clock, with attempts that are played.

One seed decides everything: what users ask, when jobs end, when the disk is full, when the daemon
dies. Nothing here waits for real time.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpusched_client.errors import GpuschedError
from gpusched_client.terms import GpuUuid, JobId, Launch, Mode
from gpuschedd.api.auth import Authenticator
from gpuschedd.api.briefs import Briefs
from gpuschedd.api.expected import ExpectedStarts
from gpuschedd.api.limits import CHANGED_AT_ONCE, RequestBudget, Turns
from gpuschedd.api.planning import PlannerThread
from gpuschedd.api.recent import RecentEnds
from gpuschedd.api.registry import Call, Services
from gpuschedd.api.subscriptions import Subscriptions
from gpuschedd.config import toml as config_file
from gpuschedd.core import admission
from gpuschedd.core.attempt import (
    AttemptReport,
    Claim,
    EndedRecord,
    ExitRecord,
    Observation,
    Orders,
    StartedRecord,
)
from gpuschedd.core.fairshare import Accounts
from gpuschedd.core.job import Job
from gpuschedd.core.model import Gpu
from gpuschedd.gpu.attribution import JobKey
from gpuschedd.gpu.source import GpuInfo
from gpuschedd.jobs.attempts import NO_EVIDENCE, Evidence
from gpuschedd.jobs.controller import Controller
from gpuschedd.jobs.principal import Principal
from gpuschedd.jobs.reloads import Reload
from gpuschedd.jobs.state import State, policy_of
from gpuschedd.run.dispatcher import Dispatcher
from gpuschedd.run.spec import LaunchContext
from gpuschedd.store.database import StoreFull
from gpuschedd.store.records import Changes, GpuRow, Loaded
from gpuschedd.store.writer import Store
from gpuschedd.system.clock import SchedulerClock

GIB = 2**30
CARD = 24 * GIB
SETTINGS = ("scheduling.default_time_limit=600", "scheduling.max_cpu_jobs=2")


class VirtualClock:
    """Boot time and wall time that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def boottime_s(self) -> float:
        return self.now

    def wall_s(self) -> float:
        return 1_767_225_600.0 + self.now

    def boot_id(self) -> str:
        return "boot"


@dataclass
class Attempt:
    """A played attempt: what its directory would show."""

    claim: Claim | None = None
    started: StartedRecord | None = None
    ended: EndedRecord | None = None
    exit: ExitRecord | None = None
    is_dead: bool = False  # its supervisor was killed

    def seen(self) -> Observation:
        claimed = self.claim is not None and self.claim.by == "supervisor"
        alive = claimed and self.exit is None and not self.is_dead
        return Observation(self.claim, alive, self.started, self.ended, self.exit)


@dataclass
class World:
    """What outlives the daemon: time, attempts, and what will happen."""

    random: random.Random
    clock: VirtualClock = field(default_factory=VirtualClock)
    attempts: dict[JobKey, Attempt] = field(default_factory=dict)
    ran: dict[int, int] = field(default_factory=dict)  # job -> how often its main process started
    codes: dict[int, int | None] = field(default_factory=dict)  # job -> what its main process left
    agenda: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    disk_full: bool = False
    loop: asyncio.AbstractEventLoop | None = None
    midway: Callable[[], object] | None = (
        None  # happens once, while the next batch is being written
    )
    _count: int = 0

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self.agenda, (self.clock.now + delay_s, self._count, act))


class PlayedRunner:
    """Stands in for Runner: the same calls, attempts in the World."""

    def __init__(self, host: Host) -> None:
        self.host, self.world = host, host.world
        self.report: Callable[[AttemptReport], None]  # of the daemon that lives now

    def report_to(self, report: Callable[[AttemptReport], None]) -> None:
        """Of the daemon that lives now."""
        self.report = report

    def _claim(self, by: Any) -> Claim:
        return Claim(by, "boot", 1, 1)

    def launch(self, key: JobKey, uid: int, spec: object) -> None:
        del uid, spec
        attempt = self.world.attempts.setdefault(key, Attempt())
        if self.world.random.random() < 0.1:
            attempt.claim = self._claim("daemon")
            self.report(AttemptReport(*key, seen=attempt.seen(), launch_error="no such luck"))
            return
        self.world.later(self.world.random.uniform(0.1, 3.0), lambda: self._start(key))

    def _start(self, key: JobKey) -> None:
        attempt = self.world.attempts.get(key)
        if attempt is None or attempt.claim is not None:
            return
        now = self.world.clock.now
        attempt.claim = self._claim("supervisor")
        if self.world.random.random() < 0.05:
            self._die(key)
            return
        attempt.started = StartedRecord(2, 2, 2, self.world.clock.wall_s(), now, "boot")
        self.world.ran[key[0]] = self.world.ran.get(key[0], 0) + 1
        self.look(key)
        job = self.host.controller.state.jobs.get(JobId(key[0]))
        limit_s = job.request.time_limit_s if job is not None else None
        longest_s = min(400.0, limit_s or 400.0)
        self.world.later(self.world.random.uniform(1.0, longest_s), lambda: self._end(key, "exit"))

    def _end(self, key: JobKey, cause: str, code: int | None = None) -> None:
        """`code`: that of an exit; None: any."""
        attempt = self.world.attempts.get(key)
        if attempt is None or attempt.ended is not None or attempt.is_dead:
            return
        if cause == "exit" and code is None:
            code = self.world.random.choice([0, 0, 3])
        wall_s, now = self.world.clock.wall_s(), self.world.clock.now
        common: dict[str, Any] = {
            "code": code,
            "signal": None if code is not None else 15,
            "cause": cause,
            "reason": None,
            "cancel_by": None,
            "cancel_at_s": None,
            "cancel_reason": None,
            "at_s": wall_s,
            "boottime_s": now,
            "boot_id": "boot",
        }
        attempt.ended = EndedRecord(**common)
        self.world.codes[key[0]] = code
        self.look(key)

        def gone() -> None:
            if attempt.is_dead:
                return
            attempt.exit = ExitRecord(
                **common,
                finished_at_s=self.world.clock.wall_s(),
                cpu_user_s=1.0,
                cpu_system_s=0.5,
                max_rss_bytes=GIB,
                oom=None,
            )
            self.look(key)

        self.world.later(self.world.random.uniform(0.0, 9.0), gone)

    def _die(self, key: JobKey) -> None:
        """kill -9 of the supervisor: what it has not written is never known."""
        attempt = self.world.attempts.get(key)
        if attempt is not None and attempt.claim is not None and attempt.exit is None:
            attempt.is_dead = True
            self.look(key)

    def kill_one(self) -> None:
        """Of those that live."""
        alive = [
            key for key, attempt in self.world.attempts.items() if attempt.seen().supervisor_alive
        ]
        if alive:
            self._die(self.world.random.choice(alive))

    def look(self, key: JobKey) -> None:
        attempt = self.world.attempts.get(key)
        if attempt is not None:
            self.report(AttemptReport(*key, seen=attempt.seen()))

    def order(self, key: JobKey, orders: Orders) -> None:
        if orders.cancel is not None:
            self.world.later(0.2, lambda: self._end(key, "cancelled"))

    def fence(self, key: JobKey, orders: Orders) -> None:
        attempt = self.world.attempts.setdefault(key, Attempt())
        if attempt.claim is None:
            attempt.claim = self._claim("daemon")
            self.look(key)
        else:
            self.order(key, orders)

    def forget(self, key: JobKey) -> None:
        self.world.attempts.pop(key, None)

    def wake(self, key: JobKey) -> None:
        del key

    def stop_disobedient(self, key: JobKey) -> None:
        del key

    def recover(self, key: JobKey, orders: Orders) -> None:
        """As at start-up: fence what nobody claimed, order again, look."""
        attempt = self.world.attempts.setdefault(key, Attempt())
        if attempt.claim is None:
            attempt.claim = self._claim("daemon")
        elif orders.cancel is not None and attempt.ended is None:
            self.order(key, orders)
        self.look(key)


class ToldRunner(PlayedRunner):
    """Attempts start at once, and end when and as they are told."""

    def launch(self, key: JobKey, uid: int, spec: object) -> None:
        del uid, spec
        started = StartedRecord(
            2, 2, 2, self.world.clock.wall_s(), self.world.clock.now, self.world.clock.boot_id()
        )
        self.world.attempts[key] = Attempt(self._claim("supervisor"), started)
        self.look(key)

    def end(self, job_id: int, cause: str = "exit", code: int | None = None) -> None:
        """The main process ends, the last one a little later."""
        self._end((JobId(job_id), 1), cause, code)

    def die(self, job_id: int) -> None:
        """kill -9 of its supervisor."""
        self._die((JobId(job_id), 1))


async def _done(act: Callable[[], object]) -> None:
    act()


class UnseenGpus:
    """No driver: the GPUs are as the test says, and tell nothing of an end."""

    def info(self) -> dict[GpuUuid, GpuInfo]:
        return {}

    def begin(self, job: Job) -> None:
        del job

    async def preflight(self, job: Job) -> str | None:
        del job
        return None

    async def evidence(self, job: Job, *, failed: bool, main_pid: int | None) -> Evidence:
        del job, failed, main_pid
        return NO_EVIDENCE

    def job_gone(self, job: Job) -> None:
        del job


class FickleStore:
    """The real store, on a disk that is full now and then; others act while it writes."""

    def __init__(self, store: Store, world: World) -> None:
        self._store, self._world = store, world

    def commit(self, changes: Changes) -> None:
        act, self._world.midway = self._world.midway, None
        if act is not None:
            assert self._world.loop is not None
            asyncio.run_coroutine_threadsafe(_done(act), self._world.loop).result(30)
        if self._world.disk_full:
            raise StoreFull("database or disk is full")
        self._store.commit(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Host:
    """One daemon on the world; `restart` is what kill -9 and a new start are."""

    def __init__(
        self,
        place: Path,
        seed: int,
        gpus: int = 4,
        runner: type[PlayedRunner] = PlayedRunner,
        settings: tuple[str, ...] = SETTINGS,
    ) -> None:
        self.place = place
        self._settings = settings
        self.world = World(random.Random(seed))
        self.gpus = tuple(
            Gpu(uuid=GpuUuid(f"GPU-{index}"), index=index, model="Card", total_bytes=CARD)
            for index in range(gpus)
        )
        self.settings = config_file.load(Path("none"), settings)
        self.runner = runner(self)
        self.start()

    def start(self) -> None:
        self.store = Store.open(self.place)
        loaded = self.store.load()
        clock = SchedulerClock(self.world.clock, loaded.mark)
        state = State.restore(self.settings, loaded, Accounts(policy_of(self.settings)))
        for gpu in self.gpus:
            row = GpuRow(gpu.uuid, gpu.index, None, gpu.model, gpu.total_bytes, 0, 0.0)
            state.gpu_rows[gpu.uuid] = row
        state.gpus = self.gpus
        state.inventory = admission.seen(state.inventory, self.gpus)
        fickle: Any = FickleStore(self.store, self.world)
        self.controller = Controller(
            fickle, state, clock, lambda _: (), self._probe, loaded.last_event_id
        )
        self.controller.restore(loaded.accounts)
        context = LaunchContext(self.place, loaded.instance, False, Launch.DIRECT, True)
        runner: Any = self.runner
        unasked: Any = SimpleNamespace()  # launches are played, so nobody asks for these
        self.dispatcher = Dispatcher(
            self.controller, runner, context, unasked, self.watch(loaded), unasked
        )

    def watch(self, loaded: Loaded) -> Any:
        """Who looks at the GPUs."""
        del loaded
        return UnseenGpus()

    def _probe(self) -> None:
        if self.world.disk_full:
            raise OSError(28, "No space left on device")

    async def free_disk(self) -> None:
        """There is room again, and the daemon has seen it; it looks for that by a real clock."""
        self.world.disk_full = False
        gate = self.controller._storage
        gate.stop()
        if gate._probing is not None:  # it may have looked just before
            await gate._probing
            gate.stop()
        await gate._look()
        await self.settle()

    async def restart(self) -> None:
        """The daemon dies between two batches and comes back."""
        await self.controller.stop()
        self.controller.close()
        self.start()
        for job in list(self.controller.state.jobs.values()):
            if job.holds_gpus:
                from gpuschedd.run.dispatcher import orders_of

                self.runner.recover((job.job_id, job.attempt), orders_of(job))
        await self.settle()

    def see_gpu(self, index: int, **facts: Any) -> None:
        """What an administrator, a foreign process or the driver changes of one GPU."""
        seen = [replace(gpu, **facts) if gpu.index == index else gpu for gpu in self.gpus]
        self.gpus = tuple(seen)
        self.controller.set_gpus(self.gpus)

    def reload(self, *overrides: str) -> Reload:
        """What `gctl reload` does after such a change of the configuration."""
        self.settings = config_file.load(Path("none"), [*self._settings, *overrides])
        return self.controller.reconfigure(self.settings)

    def reload_midway(self, *overrides: str) -> None:
        """The same while the next batch is being written."""
        self.world.loop = asyncio.get_running_loop()
        self.world.midway = lambda: self.reload(*overrides)

    async def settle(self) -> None:
        """Work off all commands and passes that are due now."""
        for _ in range(1_000):
            await self.dispatcher.settled()
            if not await self.controller.step():
                return
        raise AssertionError("the controller never comes to rest")

    def promised_job(self) -> JobId | None:
        """Whose start is promised now."""
        promise = self.controller.state.promise
        return None if promise is None else promise.job_id

    async def ask(self, evaluate: Callable[[Any], Any]) -> Any:
        """A client's command, carried to its end; refusals come back as values."""
        asking = asyncio.ensure_future(self.controller.call(evaluate))
        await asyncio.sleep(0)
        await self.settle()
        try:
            return await asking
        except GpuschedError as error:
            return error

    async def pass_time(self, seconds: float) -> None:
        """Let seconds pass; what is due happens at its own time, and passes with it."""
        end = self.world.clock.now + seconds
        while self.world.agenda and self.world.agenda[0][0] <= end:
            at, _, act = heapq.heappop(self.world.agenda)
            self.world.clock.now = max(at, self.world.clock.now)
            act()
            self.controller.request_pass()
            await self.settle()
        self.world.clock.now = end
        self.controller.request_pass()
        await self.settle()

    def caller(self, uid: int) -> Principal:
        return Principal(uid, f"user{uid}", 1, is_admin=False)


def services_of(host: Host, **parts: Any) -> Services:
    """What handlers use, with nothing behind what is not given."""
    unasked: Any = None
    budget = RequestBudget(1_000.0, is_shared=False)
    made: dict[str, Any] = {
        "mode": Mode.USER,
        "controller": host.controller,
        "auth": Authenticator(host.controller, unasked, Mode.USER, 1001),
        "budget": budget,
        "expected": ExpectedStarts(host.controller),
        "briefs": Briefs(host.controller),
        "subscriptions": Subscriptions(budget),
        "planner": PlannerThread(budget),
        "changes": Turns(CHANGED_AT_ONCE),
        "lists": Turns(),
        "recent": RecentEnds(),
    }
    absent = dict.fromkeys(field.name for field in fields(Services))
    return Services(**{**absent, **made, **parts})


def call_of(host: Host, services: Services) -> Call:
    """A request of the first user's."""
    connection: Any = None
    return Call(connection, host.caller(1001), services)
