"""Looking at the GPUs again and again: samples in, facts to the controller.

Keeps the last sample when a sweep fails, marked stale: a failed sweep never frees a GPU, and ends
no job. Owns when it is looked and the state of the driver; what a sample means for inventory,
health and jobs is booked by their own modules.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from gpusched_client.terms import GpuUuid
from gpuschedd.core.job import Job
from gpuschedd.core.model import GpuState
from gpuschedd.gpu import drains
from gpuschedd.gpu.attribution import Attribution
from gpuschedd.gpu.cadence import Cadence
from gpuschedd.gpu.facts import GpuFacts
from gpuschedd.gpu.free_memory import FreeMemory
from gpuschedd.gpu.health_watch import HealthWatch
from gpuschedd.gpu.holdings import holdings_of
from gpuschedd.gpu.inventory import HostInventory
from gpuschedd.gpu.job_use import JobUse
from gpuschedd.gpu.service_state import GpuConditions
from gpuschedd.gpu.simulated.source import UUID_PREFIX as SIMULATED_PREFIX
from gpuschedd.gpu.source import (
    DriverAccounts,
    GpuInfo,
    GpuSource,
    GpuSourceDown,
    HealthRules,
    Sample,
    SampleRequest,
    UsedGpu,
)
from gpuschedd.gpu.strangers import Strangers
from gpuschedd.jobs.attempts import Evidence
from gpuschedd.jobs.controller import Controller
from gpuschedd.jobs.state import State
from gpuschedd.store.records import GpuUse
from gpuschedd.system.clock import boottime_s

log = logging.getLogger(__name__)

RETRY_S = 1.0  # after a failed sweep; the source has a back-off of its own
STALE_AFTER_S = 15.0  # without a sample: nothing new is placed
PREFLIGHT_AGE_S = 0.1  # the look that a launch is checked by began no earlier before it
EVIDENCE_DEADLINE_S = 2.0  # a job's end waits no longer for the driver's figures
SAY_AGAIN_S = 3600.0  # that there are still none
REOPEN_DEADLINE_S = 30.0  # the answer to `resume` waits so long for the driver


class GpuMonitor:
    """The sampling loop, and the view on the GPUs that the rest of the daemon has."""

    def __init__(
        self,
        source: GpuSource,
        health_rules: Callable[[], HealthRules],
        controller: Controller,
        attribution: Attribution,
        *,
        same_boot: bool,
        uses_before: Iterable[GpuUse] = (),
        desktop_uid: int | None = None,
    ) -> None:
        """`same_boot`: GPUs that were sick still are. `uses_before`: what running jobs had used.

        `desktop_uid`: whose programs that only draw are a desktop, and keep no job away.
        """
        self._source = source
        self._controller = controller
        self._attribution = attribution
        self._free = FreeMemory(
            controller.state.config.sharing,
            attribution.owner_of,
            attribution.describe,
            desktop_uid,
        )
        self._free.hides_owners = controller.state.config.private
        self._inventory = HostInventory(controller, is_simulated=source.is_simulated)
        self._health = HealthWatch(health_rules, controller, same_boot=same_boot)
        self.use = JobUse(controller)
        self._strangers = Strangers()
        self.use.meter.resume(uses_before)
        self._poke = asyncio.Event()
        self._rests = False  # looks rarely: nobody needs the GPUs
        self._awaited = False  # no job is placed before the look that is to come
        self._all_seen: Sample | None = None  # the last sample, before it is narrowed to our GPUs
        self._sample: Sample | None = None
        self._cadence = Cadence()
        self.is_watched: Callable[[], bool] = lambda: False  # by a client that is connected
        self._looking: asyncio.Task[bool] | None = None
        self._launching: frozenset[GpuUuid] = frozenset()  # to be looked at before a launch
        self._looked_s: dict[GpuUuid, float] = {}  # boot time of the last such look
        self._said_s = 0.0  # boot time, that the GPUs are down
        self._warned: dict[str, float] = {}  # when it was said, boot time
        self._reopens = False  # until the first sample after a release
        self.released: str | None = None  # why the driver is released
        self.no_driver: str | None = None  # why none could ever answer, as things are installed
        self.problem: str | None = None
        self.needs_person: tuple[str, ...] = ()  # memory, and parts of the driver, as last seen
        self.first_sweep = asyncio.Event()

    # --- for others ---------------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """True while the last sweeps failed."""
        return self.problem is not None or self.released is not None

    @property
    def trouble(self) -> str | None:
        """Why there is nothing to place on, as far as driver and configuration tell."""
        return self.problem or self._inventory.misnamed

    @property
    def sample_age_s(self) -> float | None:
        """Since the last sweep that worked; None before the first."""
        if self._sample is None:
            return None
        return max(0.0, boottime_s() - self._sample.taken_boottime_s)

    @property
    def has_record(self) -> bool:
        """Whether the host has had GPUs."""
        uuids = self._controller.state.gpu_rows
        return any(not uuid.startswith(SIMULATED_PREFIX) for uuid in uuids)

    @property
    def source_name(self) -> str:
        """Where the samples come from."""
        return self._source.name

    def info(self) -> Mapping[GpuUuid, GpuInfo]:
        """Every GPU seen in this run; how programs count them is known of a fresh look alone."""
        info = self._inventory.info
        if not self.is_stale and not self._health.sick(info):
            return info
        return {uuid: replace(gpu, ordinal=None) for uuid, gpu in info.items()}

    def used(self) -> Mapping[GpuUuid, UsedGpu]:
        """The last readings, for display."""
        if self._sample is None:
            return {}
        return {
            reading.uuid: UsedGpu(reading.used_bytes, reading.utilization)
            for reading in self._sample.readings
        }

    def uses_now(self, job: Job) -> tuple[GpuUse, ...]:
        """What a job has used so far; empty where it is not metered."""
        return self.use.meter.uses((job.job_id, job.attempt))

    def job_gone(self, job: Job) -> None:
        """Its GPUs need a look newer than its end."""
        key = (job.job_id, job.attempt)
        uuids = [grant.uuid for grant in job.grants]
        self.use.meter.forget(key)
        if uuids:
            self._free.job_ended(key, uuids, boottime_s())
            self._poke.set()
            gpus = self._controller.state.gpus
            # What was known before stays until that look; the others' facts have not changed.
            self._controller.set_gpus(
                tuple(replace(gpu, fresh=False) if gpu.uuid in uuids else gpu for gpu in gpus)
            )

    def reconfigure(self) -> None:
        """The configuration was read again."""
        config = self._controller.state.config
        self._free.sharing = config.sharing
        self._free.hides_owners = config.private
        self._health.reconfigure()
        if self._all_seen is not None:
            self._narrow(self._all_seen)
            self._note_warnings(self._all_seen)
        self._derive()

    def refresh(self) -> None:
        """Something beside the samples has changed."""
        self._derive()

    def acknowledge(self, uuid: GpuUuid) -> None:
        """An admin puts a sick GPU back into service."""
        self._health.acknowledge(uuid)
        self._derive()

    def wake(self) -> None:
        """Somebody came: nothing is planned on a look from before that."""
        if self._rests:
            self._controller.await_gpus()
            self._awaited = True
            self._poke.set()

    async def release(self, why: str) -> None:
        """Release the driver; nothing is placed until `resume`."""
        self.released = why
        self._derive()
        await self._source.release()

    async def resume(self) -> None:
        """Open the driver again, with whatever GPUs and slices there are now."""
        if self.released is None:
            return
        self.released, self._reopens = None, True
        self._health.check_soon()
        looking = asyncio.ensure_future(self._sweep())
        await asyncio.wait({looking}, timeout=REOPEN_DEADLINE_S)
        self._poke.set()

    async def preflight(self, job: Job) -> str | None:
        """Why a placed job no longer fits; a driver that is down for a moment stops none."""
        uuids = frozenset(grant.uuid for grant in job.grants)
        if not await self._look_at(uuids) and self._unread_text() is not None:
            return f"the GPUs cannot be looked at: {self.problem}"
        return _misfit(self._controller.state, job)

    async def _look_at(self, uuids: frozenset[GpuUuid]) -> bool:
        """A look at these, processes and modes, of this moment; False where there is none.

        Launches of one moment share it. One that is under way began before it was asked for.
        """
        since_s = boottime_s() - PREFLIGHT_AGE_S
        while any(self._looked_s.get(uuid, -math.inf) < since_s for uuid in uuids):
            self._launching |= uuids  # once more: an earlier launch's look takes them off
            if self._looking is None or self._looking.done():
                self._looking = asyncio.ensure_future(self._sweep())
            if not await asyncio.shield(self._looking):
                return False
            if self.released is not None:
                return True
        return True

    async def _look_now(self) -> None:
        """Have the events of this moment: a fault is reported just before its job dies."""
        if self._looking is not None and not self._looking.done():
            await asyncio.wait({self._looking}, timeout=EVIDENCE_DEADLINE_S)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._sweep())
            await asyncio.wait({self._looking}, timeout=EVIDENCE_DEADLINE_S)

    async def evidence(self, job: Job, *, failed: bool, main_pid: int | None) -> Evidence:
        """The figures of an attempt that is over, the driver's accounts included, and a fault.

        The driver has accounts also of a process that no sweep has seen: the main one is asked for.
        """
        key = (job.job_id, job.attempt)
        pids = self.use.meter.pids(key)
        if main_pid is not None:
            for grant in job.grants:
                pids.setdefault(grant.uuid, set()).add(main_pid)
        pids = {uuid: found for uuid, found in pids.items() if found}
        accounts: DriverAccounts = {}
        if failed and not self.is_stale:
            await self._look_now()
        if pids and not self.is_stale:
            asking = asyncio.ensure_future(self._source.accounts(pids))
            await asyncio.wait({asking}, timeout=EVIDENCE_DEADLINE_S)
            accounts = asking.result() if asking.done() else {}
        fault = self._health.fault_of(job, self._inventory.info)
        uses = self.use.meter.uses(key, accounts, job.started_at_s)
        return Evidence(uses, fault, self._strangers.beside(job, self._inventory.info))

    # --- the loop -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            worked = True
            if self.released is None:
                if self._looking is None or self._looking.done():
                    self._looking = asyncio.ensure_future(self._sweep())
                worked = await asyncio.shield(self._looking)
            self.first_sweep.set()
            if self._awaited:
                self._awaited = False
                self._controller.gpus_known()
            await self._pause(worked)

    async def close(self) -> None:
        """End the look that is under way: nobody needs its answer."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})

    async def _pause(self, worked: bool) -> None:
        interval_s = self._controller.state.config.gpu_sample_interval_s
        self._rests = worked and self._nobody_cares()
        pause_s = self._cadence.pause_s(interval_s, rests=self._rests)
        if not worked:
            pause_s = max(pause_s, RETRY_S)
        try:
            async with asyncio.timeout(pause_s):
                await self._poke.wait()
        except TimeoutError:
            return
        finally:
            self._rests = False
        self._poke.clear()
        if not worked:
            await asyncio.sleep(RETRY_S)

    def _nobody_cares(self) -> bool:
        """No job runs or waits, none that has ended needs a look, and no client is connected."""
        is_busy = self._controller.state.jobs or self._free.outdated(self._sample)
        return not is_busy and not self.is_watched()

    async def _sweep(self) -> bool:
        """One sample; False when it failed."""
        began_s = boottime_s()
        request = self._request()
        try:
            sample = await self._source.sample(request)
        except GpuSourceDown as down:
            self.no_driver = str(down) if down.is_absent else None
            self._note_down(str(down))
            return False
        except Exception as error:
            # Nor may what a source reads end it: others can write some of that.
            text = f"the GPUs cannot be looked at: {error!r}"
            if text != self.problem:
                log.exception("sample_failed")
            self._note_down(text)
            return False
        if self.released is not None:
            return True
        problem, self.problem, self.no_driver = self.problem, None, None
        try:
            await self._judge(sample, began_s)
        except Exception as error:
            # What a driver may answer is without end: no answer of it may end the daemon.
            text = f"the driver's answer makes no sense: {error!r}"
            if text != problem:
                log.exception("sample_failed")
            self.problem = problem
            self._note_down(text)
            return False
        self._launching -= request.launch_uuids
        self._looked_s |= dict.fromkeys(request.launch_uuids, sample.taken_boottime_s)
        if problem is not None:
            log.info("gpus_back")
        return True

    async def _judge(self, sample: Sample, began_s: float) -> None:
        """Attribute what was seen, and take it over; a sample that fails leaves the last one."""
        self._reopens = False
        self._note_warnings(sample)
        processes = [process for r in sample.readings for process in r.processes or ()]
        if processes:
            await asyncio.to_thread(self._attribution.learn, processes)
        interval_s = self._controller.state.config.gpu_sample_interval_s
        self._cadence.keep_cheap(interval_s, sample.cost_s, boottime_s() - began_s)
        before = self._sample
        try:
            self._take(sample)
        except Exception:
            self._sample = before
            raise

    def _request(self) -> SampleRequest:
        config = self._controller.state.config
        return SampleRequest(
            busy_uuids=frozenset(holdings_of(self._controller.state)),
            fresh_uuids=self._free.outdated(self._sample),
            launch_uuids=self._launching,
            health=self._health.is_check_due(config.nvml.health_interval_s),
        )

    def _note_down(self, text: str) -> None:
        if self.problem != text or boottime_s() - self._said_s >= SAY_AGAIN_S:
            log.warning("gpus_down error=%s", text)
            self._said_s = boottime_s()
        self.problem = text
        self._derive()

    def _note_warnings(self, sample: Sample) -> None:
        warnings = (*sample.warnings, *self._inventory.unknown_names_in(sample))
        now_s = boottime_s()
        for text in warnings:
            if now_s - self._warned.get(text, -SAY_AGAIN_S) >= SAY_AGAIN_S:
                log.warning("driver_warning text=%s", text)
                self._warned[text] = now_s
        self._warned = {text: self._warned[text] for text in warnings}

    # --- one sample ---------------------------------------------------------------------------

    def _take(self, sample: Sample) -> None:
        ours = self._narrow(sample)
        self._health.take(ours, self._inventory.info)
        facts = self._derive()
        if facts is not None:
            self.use.take(ours, facts)
        self._all_seen = sample

    def _narrow(self, sample: Sample) -> Sample:
        held = holdings_of(self._controller.state)
        self._sample = self._health.with_checks(self._inventory.narrow(sample, held))
        return self._sample

    def begin(self, job: Job) -> None:
        """A job was placed: what is in use on its GPUs before it."""
        self.use.begin(job, self._sample)

    def _derive(self) -> GpuFacts | None:
        """The facts of the last sample, with what changed since: drains, ends, configuration."""
        controller = self._controller
        if self._sample is None:
            text = self.released or self.problem
            controller.set_gpu_problem(text)
            known = self._inventory.from_records(
                text or "no look at the GPUs yet", is_simulated=self._source.is_simulated
            )
            controller.set_gpus(known)
            return None
        facts = self._free.take(
            self._sample,
            holdings_of(controller.state),
            self._standing(),
            controller.clock.now_s(),
        )
        problems = (*facts.problems, *self._sample.problems)
        self.needs_person = problems if self._unread_text() is None else ()
        self._strangers.take(facts, self._sample.taken_boottime_s)
        self._inventory.keep(self._sample, facts)
        self.use.follow(facts)
        controller.set_gpus(facts.gpus)
        return facts

    def _standing(self) -> GpuConditions:
        assert self._sample is not None
        info = self._inventory.info
        return GpuConditions(
            drained=drains.drained(self._sample, self._controller.state.gpu_rows),
            sick=self._health.sick(info),
            warnings=self._health.warnings(info),
            lost={} if self.is_stale else self._inventory.lost(),
            unread=self._unread_text(),
        )

    def _unread_text(self) -> str | None:
        if self.released is not None:
            return f"released by an admin: {self.released}"
        if self._reopens:
            return self.problem or "the driver is being opened again"
        age_s = self.sample_age_s
        if self.problem is not None and age_s is not None and age_s > STALE_AFTER_S:
            return self.problem
        return None


def _misfit(state: State, job: Job) -> str | None:
    """Why a placed job does not fit what was just seen."""
    gpus = {gpu.uuid: gpu for gpu in state.gpus}
    for grant in job.grants:
        gpu = gpus.get(grant.uuid)
        if gpu is None or gpu.state is not GpuState.OK:
            text = gpu.state_text if gpu is not None else "it is gone"
            return f"GPU {gpu.index if gpu else grant.uuid} is out of service: {text}"
        if job.whole and not gpu.whole_idle:
            return f"GPU {gpu.index} is in use: {gpu.foreign_text}"
        held = sum(h.held_bytes for h in holdings_of(state).get(grant.uuid, ()))
        if not job.whole and gpu.capacity_bytes - gpu.foreign_bytes < held:
            return f"GPU {gpu.index} has too little left: {gpu.foreign_text}"
    return None


async def first_look(monitor: GpuMonitor, ended: asyncio.Future[None], within_s: float) -> bool:
    """Have GPUs, or a reason for none, before the first client asks; or the end of `ended`.

    False: no driver is installed, and no GPU is on record, so it is not away for a while.
    """
    first = asyncio.ensure_future(monitor.first_sweep.wait())
    tasks: set[asyncio.Future[Any]] = {first, ended}
    await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    first.cancel()
    if monitor.no_driver is None or monitor.has_record:
        return True
    log.error("no_driver text=%s", monitor.no_driver)
    return False
