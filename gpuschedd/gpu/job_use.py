"""What the jobs do to the GPUs: their use, what they hold above their declaration, and strays."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from gpusched_client.terms import EventKind, JobId, JobState
from gpuschedd.core.job import Job
from gpuschedd.core.model import Grant
from gpuschedd.gpu.attribution import JobKey
from gpuschedd.gpu.facts import GpuFacts, Violation
from gpuschedd.gpu.holdings import may_be_there
from gpuschedd.gpu.metering import UseMeter
from gpuschedd.gpu.source import Sample
from gpuschedd.jobs.batch import Batch
from gpuschedd.jobs.controller import Controller
from gpuschedd.system.clock import boottime_s

log = logging.getLogger(__name__)

SAVE_DEADLINE_S = 2.0  # a stop waits no longer for a disk


class JobUse:
    """Meters the jobs, and turns what a sample shows of them into commands."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.meter = UseMeter()
        self._strays: set[tuple[EventKind, Violation]] = set()  # told already

    def begin(self, job: Job, sample: Sample | None) -> None:
        """A job was placed: what is in use on its GPUs before it."""
        readings = sample.readings if sample is not None else ()
        used = {r.uuid: r.used_bytes for r in readings if r.used_bytes is not None}
        key: JobKey = (job.job_id, job.attempt)
        self.meter.begin(key, [grant.uuid for grant in job.grants], used)

    def take(self, sample: Sample, facts: GpuFacts) -> None:
        """The use of a fresh sample."""
        step_s = self.meter.step(sample.taken_boottime_s)
        taken_s = self._controller.clock.now_s() - (boottime_s() - sample.taken_boottime_s)
        readings = {reading.uuid: reading for reading in sample.readings}
        holders: dict[JobKey, Job] = {(job.job_id, job.attempt): job for job in self._holders()}
        ran_s = {key: _ran_s(job, taken_s, step_s) for key, job in holders.items()}
        for (key, uuid), seen in facts.seen.items():
            if uuid in readings and (job := holders.get(key)) is not None:
                self.meter.add(key, readings[uuid], seen, ran_s[key], whole=job.whole)
        for key, job in holders.items():
            for reading in (readings[g.uuid] for g in job.grants if g.uuid in readings):
                own = facts.seen.get((key, reading.uuid))
                if job.state is not JobState.CONFIGURING:
                    if own is None:
                        self.meter.add_absent(key, reading, ran_s[key], whole=job.whole)
                elif not (own and own.pids) and not may_be_there(self._controller.state, job):
                    self.meter.begin_anew(key, reading)
        moved = self.meter.to_save(boottime_s())
        if moved:
            self._controller.post(lambda batch: batch.gpu_uses.extend(moved))

    async def save(self) -> None:
        """What the jobs have used so far survives the daemon."""
        uses = self.meter.all_uses()
        if not uses:
            return
        saving = asyncio.ensure_future(
            self._controller.call(lambda batch: batch.gpu_uses.extend(uses))
        )
        await asyncio.wait({saving}, timeout=SAVE_DEADLINE_S)
        if saving.done() and saving.exception() is not None:
            log.warning("gpu_uses_not_saved error=%s", saving.exception())

    def _holders(self) -> Iterator[Job]:
        state = self._controller.state
        return (state.jobs[job_id] for job_id in state.holding)

    def follow(self, facts: GpuFacts) -> None:
        """What the facts say of jobs, beside the figures."""
        self._hold_overuse(facts)
        self._emit_strays(facts)

    def _hold_overuse(self, facts: GpuFacts) -> None:
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

    def _emit_strays(self, facts: GpuFacts) -> None:
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

        def emit(batch: Batch) -> None:
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

        self._controller.post(emit)


def _ran_s(job: Job, taken_s: float, step_s: float) -> float:
    """Seconds of the step_s before scheduler time taken_s in which it ran: not before its start."""
    if job.started_sched_s is None:
        return 0.0
    ended_s = job.main_ended_sched_s
    last_s = taken_s if ended_s is None else min(taken_s, ended_s)
    return max(0.0, last_s - max(job.started_sched_s, taken_s - step_s))


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
