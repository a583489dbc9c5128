"""Builds every concrete part, runs the loop, tells the service manager. No policy, no SQL."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpusched_client import __version__, paths
from gpusched_client.errors import GpuschedError, StorageError
from gpusched_client.terms import Launch, Mode
from gpuschedd.api.auth import Authenticator
from gpuschedd.api.backups import Backups
from gpuschedd.api.briefs import Briefs
from gpuschedd.api.expected import ExpectedStarts
from gpuschedd.api.health_report import HealthReport, RecentErrors
from gpuschedd.api.limits import Connections, RequestBudget
from gpuschedd.api.planning import PlannerThread
from gpuschedd.api.readers import FairReader
from gpuschedd.api.recent import RecentEnds
from gpuschedd.api.registry import Services
from gpuschedd.api.server import Server
from gpuschedd.api.service import Api
from gpuschedd.api.subscriptions import Subscriptions
from gpuschedd.config import toml as config_file
from gpuschedd.config.keys import READ_AT_START, Config
from gpuschedd.config.toml import ConfigError, changed_keys, with_limits
from gpuschedd.core import fairshare
from gpuschedd.exits import EX_CONFIG, EX_IOERR, PLACES_LOST, how_it_ended, status_of
from gpuschedd.gpu.attribution import Attribution
from gpuschedd.gpu.monitor import GpuMonitor, first_look
from gpuschedd.gpu.vendors import vendor_of, with_visible_gpus
from gpuschedd.jobs.account_watch import AccountWatch
from gpuschedd.jobs.controller import Controller
from gpuschedd.jobs.state import State, policy_of
from gpuschedd.jobs.upkeep import Upkeep
from gpuschedd.logs import EventLog, set_up_logging
from gpuschedd.run.dispatcher import Dispatcher
from gpuschedd.run.hints import HintSocket
from gpuschedd.run.launchers.direct import Launcher
from gpuschedd.run.launchers.forking import ForkingLauncher
from gpuschedd.run.launchers.systemd import SystemdLauncher
from gpuschedd.run.runner import Runner
from gpuschedd.run.spec import LaunchContext, SpecMaker
from gpuschedd.store.database import (
    DATABASE_NAME,
    StoreBroken,
    StoreDamaged,
    StoreVanished,
    typed_opening,
)
from gpuschedd.store.records import Loaded
from gpuschedd.store.writer import Store
from gpuschedd.supervisor.pam import closed_by
from gpuschedd.system import state_dir as places
from gpuschedd.system.accounts import NameService, unknown_names
from gpuschedd.system.capabilities import check_launch
from gpuschedd.system.clock import Clock, SchedulerClock, SystemClock
from gpuschedd.system.listening import Door, Doors
from gpuschedd.system.memory import bound_heaps, give_back
from gpuschedd.system.sd_notify import ServiceManager, is_activated, passed_socket
from gpuschedd.system.tasks import kept_up
from gpuschedd.system.threads import started_pool

log = logging.getLogger("gpuschedd")

THREAD_TURN_S = 0.0001  # the loop waits so long at each call of the system while a thread is busy
COLLECTOR = (50_000, 20, 100)
PLACES_EVERY_S = 10.0  # as rarely as all else that an idle daemon does
WORK_THREADS = 4  # for what blocks and has no pool of its own
FIRST_SWEEP_S = 60.0  # READY=1 does not wait longer than this for the first look at the GPUs
SYSTEM_DEFAULT_LIMIT_S, SYSTEM_MAX_LIMIT_S = 86_400.0, 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, with every default filled in."""

    is_system: bool
    launch: Launch
    socket: Path
    state_dir: Path
    config: Path
    overrides: tuple[str, ...]

    @property
    def mode(self) -> Mode:
        """Whom the daemon serves."""
        return Mode.SYSTEM if self.is_system else Mode.USER


class Daemon:
    """All parts of one running daemon."""

    def __init__(self, options: Options, settings: Config, clock: Clock, lock: places.Lock) -> None:
        self.options = options
        self.lock = lock
        self.settings = settings
        self.clock = clock
        self.manager = ServiceManager()
        self.errors = RecentErrors()
        logging.getLogger().addHandler(self.errors)
        self._stop = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        """Serve until told to stop; the exit status."""
        asyncio.get_running_loop().set_default_executor(started_pool(WORK_THREADS, "work"))
        store = Store.open(self.options.state_dir)
        self._build(store, await self._restore(store))
        return await self._serve()

    async def _restore(self, store: Store) -> Loaded:
        """The controller as of the last commit; what else was loaded with it."""
        state_dir = self.options.state_dir
        loaded = store.load()
        clock = SchedulerClock(self.clock, loaded.mark)
        self._same_boot = loaded.mark is not None and loaded.mark.boot_id == self.clock.boot_id()
        with typed_opening(store.path):
            state = State.restore(
                self.settings, loaded, fairshare.Accounts(policy_of(self.settings))
            )
        # All of it is in State now. What it took is free for the queues.
        loaded = replace(loaded, jobs=(), ages={}, request_bytes={})
        self.accounts = NameService(lambda: self.controller.hold_by_config())
        self.controller = Controller(
            store,
            state,
            clock,
            self.accounts.groups,
            lambda: places.probe(state_dir),
            loaded.last_event_id,
            closed_by if self.options.is_system else lambda: None,
        )
        if self.settings.names_groups:
            await self.accounts.learn(state.user_of.values())
        with typed_opening(store.path):
            self.controller.restore(loaded.accounts)
        self.upkeep = Upkeep(self.controller, store.path)
        give_back()  # what the jobs were read from
        gc.freeze()  # a long queue is no garbage: no collection need look through it
        return loaded

    def _build(self, store: Store, loaded: Loaded) -> None:
        """Everything around the controller, from the processes outwards to the socket."""
        options, state_dir = self.options, self.options.state_dir
        vendor = vendor_of(lambda: self.settings, state_dir, is_system=options.is_system)
        context = LaunchContext(
            state_dir=state_dir,
            instance=loaded.instance,
            is_system=options.is_system,
            launch=options.launch,
            exec_jobs=self.settings.exec_jobs,
        )
        self.hint_socket = context.hint_socket
        self.runner = Runner(self._launcher(), context.jobs_root, loaded.instance)
        self.source = vendor.open()
        self.monitor = GpuMonitor(
            self.source,
            vendor.health_rules,
            self.controller,
            Attribution(
                self.runner.supervisors,
                self.controller.state.holders,
                by_unit=options.launch is Launch.PID1,
                instance=loaded.instance,
            ),
            same_boot=self._same_boot,
            uses_before=loaded.gpu_uses,
            desktop_uid=None if options.is_system else os.getuid(),
        )
        self.dispatcher = Dispatcher(
            self.controller,
            self.runner,
            context,
            SpecMaker(self.controller.state, context, vendor),
            self.monitor,
            self.accounts,
        )
        self._build_api(store)

    def _build_api(self, store: Store) -> None:
        """The wire's side."""
        options, limits = self.options, self.settings.limits
        self.budget = RequestBudget(limits.requests_per_second, is_shared=options.is_system)
        self.connections = Connections(limits.connections, limits.connections_all)
        self.connections.on_first = self.monitor.wake
        self.monitor.is_watched = lambda: self.connections.total > 0
        self.auth = Authenticator(self.controller, self.accounts, options.mode, os.getuid())
        subscriptions, recent = Subscriptions(self.budget), RecentEnds()
        self.controller.on_commit += [
            recent.after_commit,
            subscriptions.after_commit,
            EventLog().after_commit,
        ]
        self.api = Api(
            Services(
                mode=options.mode,
                controller=self.controller,
                auth=self.auth,
                budget=self.budget,
                reader=FairReader.over(store.path, self.budget.charge_time),
                planner=PlannerThread(self.budget),
                expected=ExpectedStarts(self.controller),
                briefs=Briefs(self.controller),
                subscriptions=subscriptions,
                gpu_readings=self.monitor,
                gpu_control=self.monitor,
                orders=self.dispatcher,
                health=HealthReport(
                    self.controller,
                    options.state_dir,
                    mode=options.mode,
                    launch=options.launch,
                    errors=self.errors,
                    gpus=self.monitor,
                    connections=self.connections,
                ),
                backups=Backups(options.state_dir / DATABASE_NAME),
                reload=self.reload,
                recent=recent,
            )
        )
        self.server = Server(
            self.api,
            self.connections,
            self.budget,
            known_accounts=self.auth.known_accounts,
            only_uid=None if options.is_system else os.getuid(),
        )

    def _launcher(self) -> Launcher:
        return SystemdLauncher() if self.options.launch is Launch.PID1 else ForkingLauncher()

    async def _serve(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload_soon)
        self.hints = HintSocket(self.hint_socket, self.runner.hint)
        self.doors = Doors(self.server.listen, self.server.leave)
        self.controller.await_gpus()
        self.runner.warm_up()
        looping = asyncio.ensure_future(self.controller.run())
        watching = asyncio.ensure_future(self.monitor.run())
        stopping = asyncio.ensure_future(self._stop.wait())
        starting = asyncio.ensure_future(self._start(looping))
        ends: set[asyncio.Future[Any]] = {looping, watching, stopping}
        # A driver that hangs may make the start long; who is told to stop does not wait for it.
        await asyncio.wait({starting, *ends}, return_when=asyncio.FIRST_COMPLETED)
        helpers: list[asyncio.Future[Any]] = [starting]
        if starting.done():
            starting.result()
            regular = (
                self.upkeep.forget_regularly,
                self.upkeep.check_regularly,
                self.dispatcher.look_regularly,
                self._keep_places,
                self._feed_watchdog,
                AccountWatch(self.controller, self.accounts).look_regularly,
                self._look_for_names,
            )
            helpers += [asyncio.ensure_future(kept_up(work)) for work in regular]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        self.manager.send("STOPPING=1")
        for task in (*helpers, *ends - {looping}):
            task.cancel()
        self.hints.close()
        return await self._shut_down(looping, watching)

    async def _start(self, looping: asyncio.Future[None]) -> None:
        """Find every job again, look at the GPUs, then let clients in."""
        await self.dispatcher.recover_all()
        await asyncio.wait({looping, self._settled()}, return_when=asyncio.FIRST_COMPLETED)
        if not await first_look(self.monitor, looping, FIRST_SWEEP_S):
            self._status = EX_CONFIG
            self._stop.set()
            return
        self.controller.gpus_known()
        self._open_doors()
        self.manager.send("READY=1")
        log.info("ready version=%s socket=%s", __version__, self.options.socket)

    def _settled(self) -> asyncio.Future[None]:
        """Done when what recovery found is durable, or has to wait for room on the disk."""

        async def ask() -> None:
            with suppress(StorageError):
                await self.controller.call(lambda _: None)  # commands are taken in order

        return asyncio.ensure_future(ask())

    async def _shut_down(
        self, looping: asyncio.Future[None], watching: asyncio.Future[None]
    ) -> int:
        """Jobs and their supervisors live on; what is acknowledged is durable already."""
        await self.server.close()
        self.doors.close()
        await self.monitor.use.save()
        await self.controller.stop()
        await self.runner.close()
        await self.monitor.close()
        await self.source.close()
        status = self._status
        for task in (looping, watching):
            try:
                await task
            except asyncio.CancelledError:
                continue
            except StoreVanished as gone:
                log.error("database_vanished error=%s", gone)
                status = EX_CONFIG
            except StoreDamaged as damaged:
                log.error("database_damaged error=%s", damaged)
                status = EX_CONFIG
            except StoreBroken as broken:
                log.error("database_io_error error=%s", broken)
                status = EX_IOERR
            except Exception:
                log.exception("stopped_by_bug")
                status = 70
        self.api.close()
        self.upkeep.close()
        self.controller.close()
        self.doors.remove_names()
        log.info("stopped")
        return status

    def _open_doors(self) -> None:
        """The socket, and in user mode a second way: the first may vanish with a log-in session."""
        if self.options.is_system:
            self.doors.open(Door(self.options.socket, 0o666, 0o755), passed_socket())
            return
        self.doors.open(Door(self.options.socket, 0o600, 0o700), passed_socket())
        second = self.options.state_dir / paths.SOCKET_NAME
        if second != self.options.socket and paths.fits_address(second):
            self.doors.open_if_possible(Door(second, 0o600, 0o700))

    async def _keep_places(self) -> None:
        """Names in the file system can be taken away: the lock's, the marks', the sockets'."""
        told = ""
        while True:
            await asyncio.sleep(PLACES_EVERY_S)
            trouble = ""
            try:
                self.lock.look()
                places.keep_directories(self.options.state_dir, is_system=self.options.is_system)
                self.hints.look()
                self.doors.look()
                await self.controller.in_database(Store.look)
            except StoreBroken:
                return  # the controller ends with it
            except PLACES_LOST as lost:
                log.error("place_lost text=%s", lost)
                self._status = status_of(lost)
                self._stop.set()
                return
            except OSError as error:
                trouble = str(error)
                if trouble != told:
                    log.warning("places_not_kept error=%s", error)
            told = trouble

    async def reload(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Read the configuration again: the keys that changed, and what that broke.

        A bad one changes nothing and raises Invalid.
        """
        from gpusched_client.errors import Invalid

        try:
            fresh = read_config(self.options)
        except ConfigError as error:
            raise Invalid(f"the configuration was not changed: {error}") from error
        changed = changed_keys(self.settings, fresh)
        self.settings = fresh
        reload = self.controller.reconfigure(fresh)
        self.auth.forget()
        self.server.follow(fresh.limits)
        self.monitor.reconfigure()
        broken = await self.controller.broken_by(reload)
        log.info("reloaded changed=%s", ",".join(changed))
        await self._look_for_names()
        shown = [f"{key} (from the next start)" if key in READ_AT_START else key for key in changed]
        return tuple(shown), broken

    def _reload_soon(self) -> None:
        self._reloading = asyncio.ensure_future(self._reload_quietly())

    async def _reload_quietly(self) -> None:
        self.manager.send("RELOADING=1")
        try:
            await self.reload()
        except GpuschedError as error:
            log.error("reload_refused error=%s", error)
        self.manager.send("READY=1")

    async def _look_for_names(self) -> None:
        """An unknown name in the configuration is a typo or an account not created yet."""
        if not self.options.is_system:
            return
        names, admin_group = self.settings.names, self.settings.admin_group
        with suppress(TimeoutError):
            for text in await self.accounts.ask(partial(unknown_names, names, admin_group)):
                log.warning("config_names_nobody text=%s", text)

    async def _feed_watchdog(self) -> None:
        """From the loop that does the work: a stuck loop is a dead daemon."""
        if self.manager.watchdog_s is None:
            return
        while True:
            self.manager.send("WATCHDOG=1")
            await asyncio.sleep(self.manager.watchdog_s)


def read_config(options: Options) -> Config:
    """File and --set over the defaults of the mode. Raises ConfigError."""
    base = Config()
    if options.is_system:
        base = with_limits(base, SYSTEM_DEFAULT_LIMIT_S, SYSTEM_MAX_LIMIT_S)
    found = config_file.load(
        options.config, options.overrides, base, others_may=0o055 if options.is_system else 0o075
    )
    return found if options.is_system else with_visible_gpus(found)


def run(options: Options) -> int:
    """Everything after the command line; the exit status."""
    set_up_logging()
    # Threads read the database and walk ahead; the loop must wait long neither for its turn nor for
    # the collector: with ten thousand jobs in memory each full collection takes a tenth of a
    # second, and what we drop is hardly ever a cycle.
    sys.setswitchinterval(THREAD_TURN_S)
    gc.set_threshold(*COLLECTOR)
    bound_heaps()
    try:
        settings = read_config(options)
        check_launch(options.launch, is_system=options.is_system, state_dir=options.state_dir)
        os.umask(0o077)
        places.prepare_state_dir(options.state_dir, is_system=options.is_system)
        lock = places.Lock(options.state_dir)
        if not is_activated():
            # Before anything is read or recovered: two daemons must not plan the same GPUs.
            places.remove_stale(options.socket)
        with asyncio.Runner() as runner:
            runner.get_loop()  # or the reason why there is none
            return runner.run(Daemon(options, settings, SystemClock(), lock).run())
    except Exception as error:
        end = how_it_ended(error, options.state_dir)
        if end is None:
            raise
        status, text = end
        print(f"gpuschedd: {text}", file=sys.stderr)
        return status
