"""Builds every concrete part, runs the loop, tells the service manager. No policy, no SQL."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpusched_client.errors import GpuschedError, StorageError
from gpusched_client.simulation import DIRECTORY_NAME, SYSTEM_DIR
from gpusched_client.terms import HoldKind, Launch, Mode
from gpuschedd import __version__
from gpuschedd.api.backups import Backups
from gpuschedd.api.handlers import Handlers, Outlook
from gpuschedd.api.health_report import Look, RecentErrors, Status
from gpuschedd.api.limits import Budget
from gpuschedd.api.server import Server
from gpuschedd.api.subscriptions import Audience
from gpuschedd.config import keys as config
from gpuschedd.core import fairshare
from gpuschedd.gpu.attribution import Attribution
from gpuschedd.gpu.monitor import GpuWatch
from gpuschedd.gpu.simulated.source import SimulatedGpus
from gpuschedd.gpu.source import GpuSource
from gpuschedd.jobs import holds
from gpuschedd.jobs.controller import Controller
from gpuschedd.jobs.state import State, policy_of
from gpuschedd.logs import log_events, set_up_logging
from gpuschedd.run.dispatcher import Actions, Surroundings
from gpuschedd.run.launchers.direct import DirectLauncher, Launcher
from gpuschedd.run.launchers.systemd import SystemdLauncher
from gpuschedd.store.database import (
    DATABASE_NAME,
    History,
    Store,
    StoreBroken,
    StoreFull,
    StoreUnusable,
    StoreVanished,
)
from gpuschedd.supervisor import STORAGE_ERRNOS, closed_by
from gpuschedd.system import state_dir as places
from gpuschedd.system.accounts import Accounts, unknown_names
from gpuschedd.system.capabilities import check_launch
from gpuschedd.system.clock import Clock, SchedulerClock, SystemClock
from gpuschedd.system.sd_notify import ServiceManager, passed_socket

log = logging.getLogger("gpuschedd")

EX_TEMPFAIL = 75  # another daemon runs here
EX_CONFIG = 78  # a restart does not help: configuration, database, places
EX_IOERR = 74
PRUNE_EVERY_S = 6 * 3600.0
THREAD_TURN_S = 0.001
COLLECTOR = (50_000, 20, 100)
ACCOUNTS_EVERY_S = 60.0
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

    def __init__(self, options: Options, settings: config.Config, clock: Clock) -> None:
        self.options = options
        self.settings = settings
        self.clock = clock
        self.manager = ServiceManager()
        self.errors = RecentErrors()
        logging.getLogger().addHandler(self.errors)
        self._stop = asyncio.Event()
        self._made_socket = False

    async def run(self) -> int:
        """Serve until told to stop; the exit status."""
        state_dir = self.options.state_dir
        store = Store.open(state_dir)
        loaded = store.load()
        clock = SchedulerClock(self.clock, loaded.mark)
        self._uses_before = loaded.gpu_uses
        self._same_boot = loaded.mark is not None and loaded.mark.boot_id == self.clock.boot_id()
        with suppress(StoreFull):  # a full disk ends no daemon; what is past its limit goes later
            store.prune(clock.now_s())
        state = State.restore(self.settings, loaded, fairshare.Accounts(policy_of(self.settings)))
        self.accounts = Accounts(lambda: self.controller.hold_by_config())
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
        self.controller.restore_accounts(loaded.accounts)
        state.rebuild_queues(clock.now_s())
        self.controller.hold_by_config()
        self._build(store, loaded.instance)
        return await self._serve()

    def _build(self, store: Store, instance: str) -> None:
        """Everything around the controller."""
        options, state_dir = self.options, self.options.state_dir
        claims_dir = SYSTEM_DIR if options.is_system else state_dir / DIRECTORY_NAME
        sim_dir = claims_dir if self._simulates else None
        around = Surroundings(
            state_dir=state_dir,
            instance=instance,
            is_system=options.is_system,
            launch=options.launch,
            exec_jobs=self.settings.exec_jobs,
            sim_dir=sim_dir,
        )
        self.source = self._source(sim_dir)
        self.actions = Actions(
            self.controller,
            self._launcher(),
            around,
            lambda: self.watch.info(),
            lambda job: self.watch.job_gone(job),
            self.accounts,
            lambda: self.watch,
        )
        self.watch = GpuWatch(
            self.source,
            self.controller,
            Attribution(
                self.actions.runner.supervisors,
                self.controller.state.holders,
                by_unit=options.launch is Launch.PID1,
                instance=instance,
            ),
            same_boot=self._same_boot,
        )
        self.watch.meter.resume(self._uses_before)
        self.budget = Budget(self.settings.limits.requests_per_second, is_shared=options.is_system)
        self.audience = Audience()
        self.controller.on_commit.append(self.audience.after_commit)
        self.controller.on_commit.append(log_events)
        self.handlers = Handlers(
            self.controller,
            History(store.path),
            self.audience,
            self._outlook(),
            self.accounts,
            self.budget,
        )
        self.server = Server(
            self.handlers,
            connections_per_uid=self.settings.limits.connections,
            connections_all=self.settings.limits.connections_all,
            budget=self.budget,
            only_uid=None if options.is_system else os.getuid(),
        )
        self.around = around

    def _launcher(self) -> Launcher:
        return SystemdLauncher() if self.options.launch is Launch.PID1 else DirectLauncher()

    @property
    def _simulates(self) -> bool:
        return bool(self.settings.simulate)

    def _source(self, sim_dir: Path | None) -> GpuSource:
        if sim_dir is not None:
            return SimulatedGpus(self.settings.simulate, sim_dir, shared=self.options.is_system)
        from gpuschedd.gpu.nvidia.source import NvmlGpus

        return NvmlGpus(lambda: self.settings.nvml)

    def _status(self) -> Status:
        return Status(
            self.controller.state,
            self.options.state_dir,
            mode=self.options.mode,
            launch=self.options.launch,
            errors=self.errors,
            look=Look(
                gpu_source=lambda: "simulated" if self._simulates else "NVML",
                gpu_problem=lambda: self.watch.problem,
                sample_age_s=lambda: self.watch.sample_age_s,
                connections=lambda: len(self.server.open),
                pass_s=lambda: self.controller.pass_s_last,
            ),
        )

    def _outlook(self) -> Outlook:
        return Outlook(
            status=self._status(),
            backups=Backups(self.options.state_dir / DATABASE_NAME),
            mode=self.options.mode,
            own_uid=os.getuid(),
            gpus_stale=lambda: self.watch.is_stale,
            gpus_used=lambda: self.watch.used(),
            gpu_problem=lambda: self.watch.trouble,
            retake_gpus=lambda: self.watch.refresh(),
            pardon_gpu=lambda uuid: self.watch.pardon(uuid),
            release_gpus=lambda why: self.watch.release(why),
            reopen_gpus=lambda: self.watch.resume(),
            uses_now=lambda job: self.watch.meter.uses((job.job_id, job.attempt)),
            reload=self.reload,
        )

    async def _serve(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload_soon)
        self.actions.runner.open_hints(self.around.hint_socket)
        self.controller.await_gpus()
        looping = asyncio.ensure_future(self.controller.run())
        watching = asyncio.ensure_future(self.watch.run())
        stopping = asyncio.ensure_future(self._stop.wait())
        starting = asyncio.ensure_future(self._start(looping))
        ends: set[asyncio.Future[Any]] = {looping, watching, stopping}
        # A driver that hangs may make the start long; who is told to stop does not wait for it.
        await asyncio.wait({starting, *ends}, return_when=asyncio.FIRST_COMPLETED)
        helpers: list[asyncio.Future[Any]] = [starting]
        if starting.done():
            starting.result()
            helpers += [
                asyncio.ensure_future(self._prune_regularly()),
                asyncio.ensure_future(self._feed_watchdog()),
                asyncio.ensure_future(self._look_for_accounts()),
                asyncio.ensure_future(self._look_for_names()),
            ]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        self.manager.send("STOPPING=1")
        for task in (*helpers, *ends - {looping}):
            task.cancel()
        return await self._shut_down(looping, watching)

    async def _start(self, looping: asyncio.Future[None]) -> None:
        """Find every job again, look at the GPUs, then let clients in."""
        await self.actions.recover_all()
        await asyncio.wait({looping, self._settled()}, return_when=asyncio.FIRST_COMPLETED)
        await self._first_sweep(looping)
        self.controller.gpus_known()
        await self.server.listen(self._listening())
        self.manager.send("READY=1")
        log.info("ready version=%s socket=%s", __version__, self.options.socket)

    def _settled(self) -> asyncio.Future[None]:
        """Done when what recovery found is in the books, or has to wait for room there."""

        async def ask() -> None:
            with suppress(StorageError):
                await self.controller.ask(lambda _: None)  # commands are taken in order

        return asyncio.ensure_future(ask())

    async def _first_sweep(self, looping: asyncio.Future[None]) -> None:
        """Have GPUs, or a reason for none, before the first client asks."""
        first = asyncio.ensure_future(self.watch.first_sweep.wait())
        tasks: set[asyncio.Future[Any]] = {first, looping}
        await asyncio.wait(tasks, timeout=FIRST_SWEEP_S, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()

    async def _shut_down(
        self, looping: asyncio.Future[None], watching: asyncio.Future[None]
    ) -> int:
        """Jobs and their supervisors live on; what is acknowledged is durable already."""
        await self.server.close()
        await self.controller.stop()
        await self.actions.runner.close()
        await self.watch.close()
        await self.source.close()
        status = 0
        for task in (looping, watching):
            try:
                await task
            except asyncio.CancelledError:
                continue
            except StoreVanished as gone:
                log.error("database_vanished error=%s", gone)
                status = EX_CONFIG
            except StoreBroken as broken:
                log.error("database_io_error error=%s", broken)
                status = EX_IOERR
            except Exception:
                log.exception("stopped_by_bug")
                status = 70
        self.handlers.close()
        self.controller.close()
        if self._made_socket:
            self.options.socket.unlink(missing_ok=True)
        log.info("stopped")
        return status

    def _listening(self) -> socket.socket:
        passed = passed_socket()
        if passed is not None:
            return passed
        is_system = self.options.is_system
        bound = places.bind_socket(
            self.options.socket,
            mode=0o666 if is_system else 0o600,
            dir_mode=0o755 if is_system else 0o700,
        )
        self._made_socket = True
        return bound

    async def reload(self) -> tuple[str, ...]:
        """Read the configuration again; a bad one changes nothing and raises Invalid."""
        from gpusched_client.errors import Invalid

        try:
            fresh = read_config(self.options)
        except config.ConfigError as error:
            raise Invalid(f"the configuration was not changed: {error}") from error
        changed = config.changed_keys(self.settings, fresh)
        self.settings = fresh
        self.controller.reconfigure(fresh)
        self.handlers.forget_callers()
        self.server.connections_per_uid = fresh.limits.connections
        self.server.connections_all = fresh.limits.connections_all
        self.budget.per_second = fresh.limits.requests_per_second
        self.watch.reconfigure()
        log.info("reloaded changed=%s", ",".join(changed))
        await self._look_for_names()
        return tuple(
            f"{key} (from the next start)" if key in config.READ_AT_START else key
            for key in changed
        )

    def _reload_soon(self) -> None:
        self._reloading = asyncio.ensure_future(self._reload_quietly())

    async def _reload_quietly(self) -> None:
        self.manager.send("RELOADING=1")
        try:
            await self.reload()
        except GpuschedError as error:
            log.error("reload_refused error=%s", error)
        self.manager.send("READY=1")

    async def _prune_regularly(self) -> None:
        while True:
            await asyncio.sleep(PRUNE_EVERY_S)
            now_s = self.controller.clock.now_s()
            try:
                await self.controller.in_database(partial(Store.prune, now_sched_s=now_s))
            except StoreFull:
                continue
            except StoreBroken:
                return  # the controller ends with it, and the daemon with that

    async def _look_for_accounts(self) -> None:
        """Jobs whose account is there again go on."""
        while True:
            await asyncio.sleep(ACCOUNTS_EVERY_S)
            back = []
            for job in tuple(self.controller.state.jobs.values()):
                if job.hold != HoldKind.ACCOUNT:
                    continue
                try:
                    if await self.accounts.problem_of(job.user, job.uid) is None:
                        back.append(job.job_id)
                except (TimeoutError, OSError, RuntimeError) as error:  # or no thread was left
                    log.warning("account_not_looked_at job=%d error=%r", job.job_id, error)
            if back:
                self.controller.tell(partial(holds.release_accounts, job_ids=back))

    async def _look_for_names(self) -> None:
        """A name in the configuration that is nobody's is a slip, or an account to come."""
        if not self.options.is_system:
            return
        if loose := config.place_warning(self.options.config):
            log.warning("config_loose text=%s", loose)
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


def read_config(options: Options) -> config.Config:
    """File and --set over the defaults of the mode. Raises ConfigError."""
    base = config.Config()
    if options.is_system:
        base = config.with_limits(base, SYSTEM_DEFAULT_LIMIT_S, SYSTEM_MAX_LIMIT_S)
    return config.load(
        options.config, options.overrides, base, others_may=0o055 if options.is_system else 0o075
    )


def run(options: Options) -> int:
    """Everything after the command line; the exit status."""
    set_up_logging()
    # Threads read the books and look ahead; the loop must not wait long for its turn. Nor for the
    # collector: with ten thousand jobs in memory each full collection takes a tenth of a second,
    # and what we drop is hardly ever a cycle.
    sys.setswitchinterval(THREAD_TURN_S)
    gc.set_threshold(*COLLECTOR)
    try:
        settings = read_config(options)
        check_launch(options.launch, is_system=options.is_system, state_dir=options.state_dir)
        os.umask(0o077)
        places.prepare_state_dir(options.state_dir, is_system=options.is_system)
        places.lock(options.state_dir)
        return asyncio.run(Daemon(options, settings, SystemClock()).run())
    except places.AlreadyRunning as error:
        print(f"gpuschedd: {error}", file=sys.stderr)
        return EX_TEMPFAIL
    except (config.ConfigError, places.Unusable, StoreUnusable, GpuschedError) as error:
        print(f"gpuschedd: {error}", file=sys.stderr)
        return EX_CONFIG
    except StoreFull as error:
        print(f"gpuschedd: the database cannot be written: {error}", file=sys.stderr)
        return EX_IOERR
    except OSError as error:
        if error.errno not in STORAGE_ERRNOS:
            raise
        where = error.filename or options.state_dir
        print(f"gpuschedd: {where} cannot be written: {error.strerror}", file=sys.stderr)
        return EX_IOERR
