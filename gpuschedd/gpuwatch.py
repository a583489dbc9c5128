"""Looking at the GPUs again and again: samples in, facts to the controller.

Keeps the last sample when a sweep fails, marked stale: a failed sweep never frees a GPU.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace

from gpusched_client.terms import GpuUuid, JobId
from gpuschedd.attribution import Attribution, describe
from gpuschedd.controller import Controller
from gpuschedd.core import admission
from gpuschedd.core.lifecycle import Job
from gpuschedd.core.model import Grant
from gpuschedd.gpus import GpuInfo, GpuSource, GpuSourceDown, Sample, Want, pick
from gpuschedd.ledger import Facts, Ledger
from gpuschedd.state import Batch
from gpuschedd.store import GpuRow
from gpuschedd.views import UsedGpu

log = logging.getLogger(__name__)

STALE_AFTER_SWEEPS = 3  # missed ones
RETRY_S = 5.0  # after a failed sweep


class GpuWatch:
    """The sampling loop and what it knows."""

    def __init__(self, source: GpuSource, controller: Controller, attribution: Attribution) -> None:
        self._source = source
        self._controller = controller
        self._attribution = attribution
        self._ledger = Ledger(controller.state.config.sharing, describe)
        self._poke = asyncio.Event()
        self._sample: Sample | None = None
        self.problem: str | None = None
        self.first_sweep = asyncio.Event()

    @property
    def is_stale(self) -> bool:
        """True while the last sweeps failed."""
        return self.problem is not None

    @property
    def sample_age_s(self) -> float | None:
        """Since the last sweep that worked; None before the first."""
        if self._sample is None:
            return None
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self._sample.taken_boottime_s)

    def info(self) -> dict[GpuUuid, GpuInfo]:
        """The last inventory."""
        return {gpu.uuid: gpu for gpu in self._sample.inventory} if self._sample else {}

    def used(self) -> Mapping[GpuUuid, UsedGpu]:
        """The last readings, for display."""
        if self._sample is None:
            return {}
        return {
            reading.uuid: UsedGpu(reading.used_bytes, reading.utilization)
            for reading in self._sample.readings
        }

    def job_gone(self, job: Job) -> None:
        """Its GPUs need a look newer than its end."""
        uuids = [grant.uuid for grant in job.grants]
        if uuids:
            self._ledger.job_ended(uuids, time.clock_gettime(time.CLOCK_BOOTTIME))
            self._ledger.forget_job(job.job_id)
            self._poke.set()
            self.retake()

    def reconfigure(self) -> None:
        """The configuration was read again."""
        self._ledger.sharing = self._controller.state.config.sharing
        self.retake()

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            pause_s = self._controller.state.config.gpu_sample_interval_s
            if not await self._sweep():
                pause_s = max(pause_s, RETRY_S)
            self.first_sweep.set()
            try:
                async with asyncio.timeout(pause_s):
                    await self._poke.wait()
            except TimeoutError:
                continue

    async def _sweep(self) -> bool:
        """One sample; False when it failed."""
        fresh = self._poke.is_set()
        self._poke.clear()
        state = self._controller.state
        busy = frozenset(
            grant.uuid for job_id in state.holding for grant in state.jobs[job_id].grants
        )
        try:
            sample = await self._source.sample(Want(busy_uuids=busy, fresh=fresh))
        except GpuSourceDown as down:
            if self.problem != str(down):
                log.warning("gpus_down error=%s", down)
            self.problem = str(down)
            return False
        if self.problem is not None:
            log.info("gpus_back")
            self.problem = None
        wanted = pick(sample.inventory, state.config.gpus)
        self._sample = replace(sample, inventory=wanted)
        self.retake()
        return True

    def retake(self) -> None:
        """Facts from the last sample, with what changed beside it: drains, ends, configuration."""
        if self._sample is None:
            return
        controller = self._controller
        drained = {
            uuid: row.drained
            for uuid, row in controller.state.gpu_rows.items()
            if row.drained is not None
        }
        facts = self._ledger.take(
            self._sample, self._attribution.job_of, drained, controller.clock.now_s()
        )
        self._keep_inventory(facts)
        self._hold_overuse(facts)
        controller.set_gpus(facts.gpus)

    def _keep_inventory(self, facts: Facts) -> None:
        """Put GPUs that are new, or changed, into the books."""
        state = self._controller.state
        assert self._sample is not None
        wall_s = self._controller.clock.wall_s()
        new: dict[GpuUuid, GpuRow] = {}
        for info in self._sample.inventory:
            known = state.gpu_rows.get(info.uuid)
            row = GpuRow(
                uuid=info.uuid,
                gpu_index=info.index,
                minor=info.minor,
                model=info.model,
                total_bytes=info.total_bytes,
                reserved_bytes=info.reserved_bytes,
                seen_at_s=wall_s,
                drained=known.drained if known else None,
            )
            if known is None or replace(known, seen_at_s=wall_s) != row:
                new[info.uuid] = row
        if new:
            state.inventory = admission.seen(state.inventory, facts.gpus)
            state.gpu_rows.update(new)
            self._controller.tell(lambda batch: _keep_rows(batch, new))

    def _hold_overuse(self, facts: Facts) -> None:
        """A job above its own declaration holds its buffered peak."""
        state = self._controller.state
        buffer = 1 + state.config.sharing.spike_buffer
        grown: dict[JobId, tuple[Grant, ...]] = {}
        for job_id in state.holding:
            job = state.jobs[job_id]
            if job.whole or not job.grants:
                continue
            grants = tuple(
                _grown(grant, facts.peaks.get((job_id, grant.uuid), 0), job, buffer)
                for grant in job.grants
            )
            if grants != job.grants:
                grown[job_id] = grants
        if grown:
            self._controller.tell(lambda batch: _hold_more(batch, grown))


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
            batch.note(
                "job_over_declaration",
                job,
                declared_bytes=job.request.vram_bytes,
                held_bytes=max(grant.held_bytes for grant in grants),
            )


def _keep_rows(batch: Batch, rows: Mapping[GpuUuid, GpuRow]) -> None:
    batch.gpu_rows.update(rows)
    for row in rows.values():
        batch.note("gpu_seen", gpu=str(row.uuid), index=row.gpu_index, model=row.model)
