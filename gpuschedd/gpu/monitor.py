"""Looking at the GPUs again and again: samples in, facts to the controller.

Keeps the last sample when a sweep fails, marked stale: a failed sweep never frees a GPU, and ends
no job. Owns the cadence, what is missing since when, and the figures of the jobs that run.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from gpusched_client.terms import EventKind, GpuUuid, JobId
from gpuschedd.core.job import Job
from gpuschedd.core.model import Gpu, GpuState, Grant
from gpuschedd.gpu.attribution import Attribution, JobKey
from gpuschedd.gpu.free_memory import Facts, Holding, Ledger, Standing, Violation
from gpuschedd.gpu.health import HealthBook, HealthChange
from gpuschedd.gpu.metering import UseMeter
from gpuschedd.gpu.simulated.source import UUID_PREFIX
from gpuschedd.gpu.source import (
    Accounts,
    GpuEvent,
    GpuInfo,
    GpuReading,
    GpuSource,
    GpuSourceDown,
    HealthRules,
    Illness,
    Sample,
    UsedGpu,
    Want,
    nameless,
    pick,
    place,
)
from gpuschedd.jobs.attempts import Evidence
from gpuschedd.jobs.batch import Batch
from gpuschedd.jobs.controller import Controller
from gpuschedd.store.records import GpuRow, GpuUse
from gpuschedd.system.clock import boottime_s

log = logging.getLogger(__name__)

RETRY_S = 1.0  # after a failed sweep; the source has a back-off of its own
STALE_AFTER_S = 15.0  # without a sample: nothing new is placed
LOST_AFTER_S = 60.0  # of a GPU that the driver does not list any more
SICK_CHECK_S = 5.0  # between two health checks while a GPU is sick
COST_SHARE = 0.05  # of the time, at most, in the driver
INTERVAL_FACTOR_MAX = 16
LOOK_AGE_S = 1.0  # the last look before a launch is no older
EVIDENCE_DEADLINE_S = 2.0  # a job's end waits no longer for the driver's figures
REOPEN_DEADLINE_S = 30.0  # the answer to `resume` waits so long for the driver
FAULTS_KEPT_MAX = 1_000
FAULT_BLAME_S = 30.0  # a fault so long before a job's end may be its cause


@dataclass(frozen=True, slots=True)
class GpuFault:
    """A fault that the driver reported of one GPU, for the cause of a death."""

    uuid: GpuUuid
    number: int
    at_s: float


class GpuMonitor:
    """The sampling loop and what it knows."""

    def __init__(
        self,
        source: GpuSource,
        health_rules: Callable[[], HealthRules],
        controller: Controller,
        attribution: Attribution,
        *,
        same_boot: bool = True,
    ) -> None:
        """`same_boot`: the sick GPUs of the books are still as they were."""
        self._source = source
        self._health_rules = health_rules
        self._controller = controller
        self._attribution = attribution
        config = controller.state.config
        self._ledger = Ledger(config.sharing, attribution.owner_of, attribution.stranger)
        ill = self._ill_before()
        self._remembered = controller.state.health
        self._health = HealthBook(health_rules(), ill if same_boot else {}, self._remembered)
        if ill and not same_boot:
            self._controller.post(partial(_all_well, tuple(ill)))
        self.meter = UseMeter()
        self._poke = asyncio.Event()
        self._sample: Sample | None = None
        self._info: dict[GpuUuid, GpuInfo] = {}  # every GPU of this run, also those that are gone
        self._missing_since_s: dict[GpuUuid, float] = {}
        self._checked_s = 0.0
        self._wants_checks = False
        self._checks: dict[GpuUuid, GpuReading] = {}
        self._factor = 1
        self._looking: asyncio.Task[bool] | None = None
        self._strays: set[tuple[EventKind, Violation]] = set()  # told already
        self._told_rows: dict[GpuUuid, GpuRow] = {}
        self._faults: list[GpuFault] = []
        self._warned: frozenset[str] = frozenset()
        self._reopens = False  # until the first sample after a release
        self.released: str | None = None  # why the driver is let go of
        self.problem: str | None = None
        self.misnamed: str | None = None  # why none of the host's GPUs is ours
        self.first_sweep = asyncio.Event()

    # --- for others ---------------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """True while the last sweeps failed."""
        return self.problem is not None or self.released is not None

    @property
    def trouble(self) -> str | None:
        """Why there is nothing to place on, as far as driver and configuration tell."""
        return self.problem or self.misnamed

    @property
    def sample_age_s(self) -> float | None:
        """Since the last sweep that worked; None before the first."""
        if self._sample is None:
            return None
        return max(0.0, boottime_s() - self._sample.taken_boottime_s)

    @property
    def source_name(self) -> str:
        """Where the samples come from."""
        return self._source.name

    def info(self) -> dict[GpuUuid, GpuInfo]:
        """Every GPU seen in this run."""
        return self._info

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
        return self.meter.uses((job.job_id, job.attempt))

    def job_gone(self, job: Job) -> None:
        """Its GPUs need a look newer than its end."""
        key = (job.job_id, job.attempt)
        uuids = [grant.uuid for grant in job.grants]
        self.meter.forget(key)
        if uuids:
            self._ledger.job_ended(key, uuids, boottime_s())
            self._poke.set()
            self.retake()

    def reconfigure(self) -> None:
        """The configuration was read again."""
        config = self._controller.state.config
        self._ledger.sharing = config.sharing
        self._health.rules = self._health_rules()
        self.retake()

    def refresh(self) -> None:
        """Something beside the samples has changed."""
        self.retake()

    def acknowledge(self, uuid: GpuUuid) -> None:
        """An admin puts a sick GPU back into service."""
        self._health.acknowledge(uuid)
        self._keep_remembered()
        self.retake()

    async def release(self, why: str) -> None:
        """Let go of the driver; nothing is placed until `resume`."""
        self.released = why
        self.retake()
        await self._source.release()

    async def resume(self) -> None:
        """Open the driver again, with whatever GPUs and slices there are now."""
        if self.released is None:
            return
        self.released, self._reopens = None, True
        looking = asyncio.ensure_future(self._sweep())
        await asyncio.wait({looking}, timeout=REOPEN_DEADLINE_S)
        self._poke.set()

    async def preflight(self, job: Job) -> str | None:
        """Why a placed job no longer fits; a driver that is down for a moment stops none."""
        if not await self.look() and self._unread_text() is not None:
            return f"the GPUs cannot be looked at: {self.problem}"
        return self._misfit(job)

    async def look(self) -> bool:
        """A sample that is at most a second old; False where the driver gives none."""
        age_s = self.sample_age_s
        if age_s is not None and age_s <= LOOK_AGE_S:
            return True
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._sweep())
        return await asyncio.shield(self._looking)

    def _misfit(self, job: Job) -> str | None:
        gpus = {gpu.uuid: gpu for gpu in self._controller.state.gpus}
        for grant in job.grants:
            gpu = gpus.get(grant.uuid)
            if gpu is None or gpu.state is not GpuState.OK:
                text = gpu.state_text if gpu is not None else "it is gone"
                return f"GPU {gpu.index if gpu else grant.uuid} is out of service: {text}"
            if job.whole and not gpu.whole_idle:
                return f"GPU {gpu.index} is in use: {gpu.foreign_text}"
            held = sum(holding.held_bytes for holding in self._holdings().get(grant.uuid, ()))
            if not job.whole and gpu.capacity_bytes - gpu.foreign_bytes < held:
                return f"GPU {gpu.index} has too little left: {gpu.foreign_text}"
        return None

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
        pids = self.meter.pids(key)
        if main_pid is not None:
            for grant in job.grants:
                pids.setdefault(grant.uuid, set()).add(main_pid)
        pids = {uuid: found for uuid, found in pids.items() if found}
        accounts: Accounts = {}
        if failed and not self.is_stale:
            await self._look_now()
        if pids and not self.is_stale:
            asking = asyncio.ensure_future(self._source.accounts(pids))
            await asyncio.wait({asking}, timeout=EVIDENCE_DEADLINE_S)
            accounts = asking.result() if asking.done() else {}
        return Evidence(self.meter.uses(key, accounts, job.started_at_s), self._fault_of(job))

    def _fault_of(self, job: Job) -> str | None:
        """The fault that may have ended a job: on one of its GPUs, in its last half minute."""
        begun_s = max(self._controller.clock.wall_s() - FAULT_BLAME_S, job.started_at_s or 0.0)
        uuids = {grant.uuid for grant in job.grants}
        for fault in reversed(self._faults):
            if fault.uuid in uuids and begun_s <= fault.at_s:
                index = self._info[fault.uuid].index if fault.uuid in self._info else "?"
                return f"{self._health.rules.fault_text(fault.number)} on GPU {index}"
        return None

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
            await self._pause(worked)

    async def close(self) -> None:
        """End the look that is under way: nobody needs its answer any more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})

    async def _pause(self, worked: bool) -> None:
        pause_s = self._controller.state.config.gpu_sample_interval_s * self._factor
        if not worked:
            pause_s = max(pause_s, RETRY_S)
        try:
            async with asyncio.timeout(pause_s):
                await self._poke.wait()
        except TimeoutError:
            return
        self._poke.clear()
        if not worked:
            await asyncio.sleep(RETRY_S)

    async def _sweep(self) -> bool:
        """One sample; False when it failed."""
        began_s = boottime_s()
        try:
            sample = await self._source.sample(self._want())
        except GpuSourceDown as down:
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
        problem, self.problem = self.problem, None
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
        if problem is not None:
            log.info("gpus_back")
        return True

    async def _judge(self, sample: Sample, began_s: float) -> None:
        """Attribute what was seen, and take it over; a sample that fails leaves the last one."""
        self._reopens = False
        self._note_warnings((*sample.warnings, *self._slips(sample)))
        processes = [process for r in sample.readings for process in r.processes or ()]
        if processes:
            await asyncio.to_thread(self._attribution.learn, processes)
        self._keep_cheap(sample.cost_s, boottime_s() - began_s)
        before = self._sample
        try:
            self._take(sample)
        except Exception:
            self._sample = before
            raise

    def _want(self) -> Want:
        held = self._holdings()
        config = self._controller.state.config
        sample_s = self._sample.taken_boottime_s if self._sample is not None else 0.0
        every_s = config.nvml.health_interval_s
        if self._health.is_anyone_ill:
            every_s = min(every_s, SICK_CHECK_S)
        health = self._wants_checks or boottime_s() - self._checked_s >= every_s
        return Want(
            busy_uuids=frozenset(held),
            fresh_uuids=self._ledger.stale_since(sample_s),
            health=health,
        )

    def _note_down(self, text: str) -> None:
        if self.problem != text:
            log.warning("gpus_down error=%s", text)
        self.problem = text
        self.retake()

    def _slips(self, sample: Sample) -> tuple[str, ...]:
        """What the configuration calls GPUs and is none here."""
        wanted = self._controller.state.config.gpus
        names = nameless(sample.inventory, wanted)
        present = ", ".join(str(gpu.index) for gpu in sample.inventory) or "none"
        text = f"gpus names {', '.join(names)}: no such GPU here (there are {present})"
        self.misnamed = text if names and not pick(sample.inventory, wanted) else None
        self._controller.set_gpu_problem(self.misnamed)
        return (text,) if names else ()

    def _note_warnings(self, warnings: tuple[str, ...]) -> None:
        for text in warnings:
            if text not in self._warned:
                log.warning("driver_warning text=%s", text)
        self._warned = frozenset(warnings)

    def _keep_cheap(self, cost_s: float, took_s: float) -> None:
        """Jobs wait on the driver's lock while it answers us: look less often when that is dear."""
        interval_s = self._controller.state.config.gpu_sample_interval_s
        share = cost_s / max(interval_s * self._factor + took_s, 1e-3)
        if share > COST_SHARE and self._factor < INTERVAL_FACTOR_MAX:
            self._factor *= 2
            log.info("gpu_sweeps_slowed interval=%.1f share=%.3f", interval_s * self._factor, share)
        elif share < COST_SHARE / 4 and self._factor > 1:
            self._factor //= 2

    # --- one sample ---------------------------------------------------------------------------

    def _take(self, sample: Sample) -> None:
        config = self._controller.state.config
        wanted = pick(sample.inventory, config.gpus)
        wanted += self._left_out_but_held(sample.inventory, wanted)
        uuids = {info.uuid for info in wanted}
        readings = tuple(self._with_checks(r) for r in sample.readings if r.uuid in uuids)
        sample = replace(sample, inventory=wanted, readings=readings)
        now_s = boottime_s()
        for reading in readings:
            self._missing_since_s.pop(reading.uuid, None)
        self._info |= {info.uuid: info for info in wanted}
        for uuid in self._info.keys() - {reading.uuid for reading in readings}:
            self._missing_since_s.setdefault(uuid, now_s)
        gone = [info for uuid, info in self._info.items() if uuid not in uuids]
        gone = [info for info in gone if not self._is_replaced(info, wanted)]
        shown = tuple(sorted((*wanted, *gone), key=place))
        self._sample = replace(sample, inventory=shown)
        self._take_health(sample)
        facts = self.retake()
        if facts is not None:
            self._measure(sample, facts)

    def _left_out_but_held(
        self, inventory: Iterable[GpuInfo], wanted: Iterable[GpuInfo]
    ) -> tuple[GpuInfo, ...]:
        """GPUs that the configuration names no more, as far as jobs run there still."""
        chosen, held = {info.uuid for info in wanted}, self._holdings()
        kept = []
        for info in inventory:
            if info.uuid in chosen:
                continue
            if info.uuid in held:
                kept.append(replace(info, blocked="the configuration leaves it out (gpus)"))
            else:
                self._info.pop(info.uuid, None)
                self._missing_since_s.pop(info.uuid, None)
        return tuple(kept)

    def _is_replaced(self, info: GpuInfo, wanted: Iterable[GpuInfo]) -> bool:
        """A GPU whose slices are here now, or a slice that was taken apart, is not missing."""
        present = {gpu.uuid for gpu in wanted}
        parents = {gpu.parent_uuid for gpu in wanted}
        replaced = info.uuid in parents or info.parent_uuid in present | parents - {None}
        holds = info.uuid in self._holdings()
        if replaced and not holds:
            self._info.pop(info.uuid, None)
            self._missing_since_s.pop(info.uuid, None)
        return replaced and not holds

    def _with_checks(self, reading: GpuReading) -> GpuReading:
        """Checks are asked for now and then; what they said last still stands."""
        if reading.checks is not None:
            self._checks[reading.uuid] = reading
            return reading
        last = self._checks.get(reading.uuid)
        return reading if last is None else replace(reading, checks=last.checks)

    def _take_health(self, sample: Sample) -> None:
        asked = [r for r in sample.readings if self._checks.get(r.uuid) is r]
        if asked:
            self._checked_s = boottime_s()
        self._wants_checks = bool(sample.events)
        judged = replace(
            sample,
            readings=tuple(r if r in asked else replace(r, checks=None) for r in sample.readings),
        )
        changes = self._health.take(judged)
        if sample.events:
            self._note_events(sample.events)
        if changes:
            self._note_health(changes)
        self._keep_remembered()

    def _note_events(self, events: tuple[GpuEvent, ...]) -> None:
        wall_s = self._controller.clock.wall_s()
        faults = [event for event in events if event.kind == "fault"]
        self._faults += [GpuFault(event.uuid, event.number, wall_s) for event in faults]
        del self._faults[:-FAULTS_KEPT_MAX]
        for event in faults:
            index = self._info[event.uuid].index if event.uuid in self._info else None
            text = self._health.rules.fault_text(event.number)
            facts = {"gpu": str(event.uuid), "index": index, "xid": event.number, "text": text}
            self._controller.post(partial(_note_event, EventKind.GPU_XID, facts))

    def _keep_remembered(self) -> None:
        """Into the books where it changed: what an admin overruled, and errors already counted."""
        remembered = self._health.remembered()
        if remembered == self._remembered:
            return
        self._remembered = remembered

        def keep(batch: Batch) -> None:
            batch.health = remembered

        self._controller.post(keep)

    def _note_health(self, changes: list[HealthChange]) -> None:
        """Into the books: a restart of the daemon makes no GPU well."""

        def note(batch: Batch) -> None:
            for change in changes:
                row = batch.gpu_row(change.uuid)
                reason = change.illness.reason if change.illness else None
                if row is not None:
                    until = bool(change.illness and change.illness.until_reboot)
                    batch.gpu_rows[change.uuid] = replace(row, sick=reason, sick_until_reboot=until)
                kind = EventKind.GPU_SICK if reason else EventKind.GPU_RECOVERED
                index = row.gpu_index if row else None
                batch.emit(kind, gpu=str(change.uuid), index=index, reason=reason)

        self._controller.post(note)

    def retake(self) -> Facts | None:
        """Facts from the last sample, with what changed beside it: drains, ends, configuration."""
        controller = self._controller
        if self._sample is None:
            controller.set_gpu_problem(self.released or self.problem)
            controller.set_gpus(self._gpus_of_the_books())
            return None
        facts = self._ledger.take(
            self._sample, self._holdings(), self._standing(), controller.clock.now_s()
        )
        self._keep_inventory(facts)
        self._hold_overuse(facts)
        self._note_strays(facts)
        controller.set_gpus(facts.gpus)
        return facts

    def _standing(self) -> Standing:
        state, now_s = self._controller.state, boottime_s()
        rows = state.gpu_rows.items()
        sick = {uuid: self._health.illness(uuid) for uuid in self._info}
        warnings = {uuid: self._health.warning(uuid) for uuid in self._info}
        since = self._missing_since_s.items()
        lost = {
            uuid: "the driver does not list it any more"
            for uuid, since_s in since
            if now_s - since_s >= LOST_AFTER_S and not self.is_stale
        }
        return Standing(
            drained={uuid: row.drained for uuid, row in rows if row.drained is not None},
            sick={uuid: illness.reason for uuid, illness in sick.items() if illness is not None},
            warnings={uuid: warning for uuid, warning in warnings.items() if warning is not None},
            lost=lost,
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

    def _gpus_of_the_books(self) -> tuple[Gpu, ...]:
        """No sample yet: the GPUs that were here before, out of service, with the reason."""
        text = self.released or self.problem or "no look at the GPUs yet"
        rows = [
            row
            for row in self._controller.state.gpu_rows.values()
            if row.uuid.startswith(UUID_PREFIX) == self._source.is_simulated
        ]
        return tuple(
            Gpu(
                uuid=row.uuid,
                index=row.gpu_index,
                model=row.model,
                total_bytes=row.total_bytes or 0,
                reserved_bytes=row.reserved_bytes,
                minor=row.minor,
                state=GpuState.UNREAD,
                state_text=text,
            )
            for row in sorted(rows, key=lambda row: row.gpu_index)
        )

    def _holdings(self) -> dict[GpuUuid, list[Holding]]:
        """What our jobs hold on each GPU."""
        state = self._controller.state
        found: dict[GpuUuid, list[Holding]] = {}
        for job_id in state.holding:
            job = state.jobs[job_id]
            for grant in job.grants:
                holding = Holding((job_id, job.attempt), grant.held_bytes)
                found.setdefault(grant.uuid, []).append(holding)
        return found

    def _ill_before(self) -> dict[GpuUuid, Illness]:
        return {
            uuid: Illness(row.sick, row.sick_until_reboot)
            for uuid, row in self._controller.state.gpu_rows.items()
            if row.sick is not None
        }

    # --- into the books -----------------------------------------------------------------------

    def _keep_inventory(self, facts: Facts) -> None:
        """Put GPUs that are new, or changed, into the books."""
        state = self._controller.state
        assert self._sample is not None
        wall_s = self._controller.clock.wall_s()
        new: list[GpuRow] = []
        for info in self._sample.inventory:
            row = GpuRow(
                uuid=info.uuid,
                gpu_index=info.index,
                minor=info.minor,
                model=info.model,
                total_bytes=info.total_bytes,
                reserved_bytes=info.reserved_bytes,
                seen_at_s=wall_s,
            )
            # What was told may not be durable yet: a full disk keeps it waiting.
            known = self._told_rows.get(info.uuid) or state.gpu_rows.get(info.uuid)
            if known is None or _identity(known) != _identity(row):
                self._told_rows[info.uuid] = row
                new.append(row)
        if new:
            self._controller.post(lambda batch: _keep_rows(batch, new, facts.gpus))

    def _hold_overuse(self, facts: Facts) -> None:
        """A job above its own declaration holds its buffered peak."""
        state = self._controller.state
        buffer = 1 + state.config.sharing.spike_buffer
        grown: dict[JobId, tuple[Grant, ...]] = {}
        for job_id in state.holding:
            job = state.jobs[job_id]
            if job.whole or not job.grants:
                continue
            key = (job_id, job.attempt)
            grants = tuple(
                _grown(grant, facts.peaks.get((key, grant.uuid), 0), job, buffer)
                for grant in job.grants
            )
            if grants != job.grants:
                grown[job_id] = grants
        if grown:
            self._controller.post(lambda batch: _hold_more(batch, grown))

    def _note_strays(self, facts: Facts) -> None:
        """Once for each process: a job on a GPU that was not granted to it, a job's remains."""
        new = [
            (kind, stray)
            for kind, strays in (
                (EventKind.GPU_NOT_GRANTED, facts.violations),
                (EventKind.GPU_LEFT_BEHIND, facts.leftovers),
            )
            for stray in strays
        ]
        told = {(kind, stray) for kind, stray in self._strays if stray.uuid not in facts.listed}
        new, self._strays = [each for each in new if each not in self._strays], told | set(new)
        if not new:
            return

        def note(batch: Batch) -> None:
            for kind, stray in new:
                row = batch.gpu_row(stray.uuid)
                batch.emit(
                    kind,
                    batch.job(stray.key[0]),
                    pid=stray.pid,
                    gpu=str(stray.uuid),
                    index=row.gpu_index if row else None,
                    former_job=stray.key[0] if batch.job(stray.key[0]) is None else None,
                )

        self._controller.post(note)

    def _measure(self, sample: Sample, facts: Facts) -> None:
        """What the jobs use, into their meters; now and then into the books."""
        step_s = self.meter.step(sample.taken_boottime_s)
        readings = {reading.uuid: reading for reading in sample.readings}
        for (key, uuid), seen in facts.seen.items():
            if uuid in readings:
                self.meter.add(key, readings[uuid], seen, step_s)
        moved = self.meter.to_save(boottime_s())
        if moved:
            self._controller.post(lambda batch: batch.gpu_uses.extend(moved))

    def begin(self, job: Job) -> None:
        """A job was placed: what is in use on its GPUs before it."""
        readings = self._sample.readings if self._sample is not None else ()
        used = {r.uuid: r.used_bytes for r in readings if r.used_bytes is not None}
        key: JobKey = (job.job_id, job.attempt)
        self.meter.begin(key, [grant.uuid for grant in job.grants], used)


def _grown(grant: Grant, peak: int, job: Job, buffer: float) -> Grant:
    declared = job.request.vram_bytes or 0
    if peak <= declared:
        return grant
    return replace(grant, held_bytes=max(grant.held_bytes, math.ceil(peak * buffer)))


def _hold_more(batch: Batch, grown: Mapping[JobId, tuple[Grant, ...]]) -> None:
    for job_id, grants in grown.items():
        job = batch.job(job_id)
        if job is None or not job.holds_gpus or job.grants == grants:
            continue
        is_first = all(grant.held_bytes == grant.declared_bytes for grant in job.grants)
        batch.put(replace(job, grants=grants))
        if is_first:
            batch.emit(
                EventKind.JOB_OVER_DECLARATION,
                job,
                declared_bytes=job.request.vram_bytes,
                held_bytes=max(grant.held_bytes for grant in grants),
            )


def _all_well(uuids: tuple[GpuUuid, ...], batch: Batch) -> None:
    """A reboot has reset every GPU; what is still wrong with one will show."""
    for uuid in uuids:
        row = batch.gpu_row(uuid)
        if row is not None:
            batch.gpu_rows[uuid] = replace(row, sick=None, sick_until_reboot=False)


def _note_event(kind: EventKind, facts: Mapping[str, object], batch: Batch) -> None:
    batch.emit(kind, None, **facts)


def _identity(row: GpuRow) -> tuple[object, ...]:
    """What of a row the driver says; a change of it is worth another row."""
    return row.gpu_index, row.minor, row.model, row.total_bytes, row.reserved_bytes


def _keep_rows(batch: Batch, rows: Iterable[GpuRow], gpus: tuple[Gpu, ...]) -> None:
    batch.gpus_seen = gpus
    for row in rows:
        known = batch.gpu_row(row.uuid)
        if known is not None:
            row = replace(
                row,
                drained=known.drained,
                sick=known.sick,
                sick_until_reboot=known.sick_until_reboot,
            )
        batch.gpu_rows[row.uuid] = row
        batch.emit(EventKind.GPU_SEEN, gpu=str(row.uuid), index=row.gpu_index, model=row.model)
