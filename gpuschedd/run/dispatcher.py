"""What follows a commit: launches, orders, clean-up. Reads committed changes, makes none."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from gpusched_client.terms import GpuUuid, JobId, JobState
from gpuschedd.core.attempt import AttemptReport, Cancel, Orders
from gpuschedd.core.job import Job
from gpuschedd.gpu.source import DeviceAccess, DeviceMissing, GpuInfo, GrantedGpu
from gpuschedd.jobs.attempts import NO_EVIDENCE, Evidence, apply_report
from gpuschedd.jobs.batch import Batch
from gpuschedd.jobs.controller import Change, Committed, Controller
from gpuschedd.run.launchers.direct import (
    UNFILTERED,
    AccountGone,
    LaunchDeferred,
    PlaceAway,
)
from gpuschedd.run.launches import LaunchPlan, MakePlan
from gpuschedd.run.obedience import Obedience
from gpuschedd.run.probes import PROBE_ATTEMPT, Prober
from gpuschedd.run.runner import Runner
from gpuschedd.run.spec import LaunchContext, SpecMaker
from gpuschedd.supervisor.records import display
from gpuschedd.system.accounts import NameService

log = logging.getLogger(__name__)

LOOK_EVERY_S = 60.0


class NoLongerFits(LaunchDeferred):
    """The last look before the launch: the GPUs are no longer as free as when it was decided."""


class LaunchGpus(Protocol):
    """The view on the GPUs that launches and ends need."""

    def info(self) -> Mapping[GpuUuid, GpuInfo]:
        """Every GPU seen in this run."""

    def begin(self, job: Job) -> None:
        """A job was placed."""

    async def preflight(self, job: Job) -> str | None:
        """Why a placed job no longer fits, by a look of this moment."""

    async def evidence(self, job: Job, *, failed: bool, main_pid: int | None) -> Evidence:
        """What the GPUs tell of an attempt that is over."""

    def job_gone(self, job: Job) -> None:
        """Its GPUs become free."""


def keep_time(batch: Batch) -> None:
    """Commit the clock, though nothing else has changed."""
    batch.keeps_time = True


class Dispatcher:
    """Turns committed changes into work for the runner."""

    def __init__(
        self,
        controller: Controller,
        runner: Runner,
        context: LaunchContext,
        specs: SpecMaker,
        gpus: LaunchGpus,
        accounts: NameService,
    ) -> None:
        self._controller = controller
        self._runner = runner
        self._context = context
        self._specs = specs
        self._gpus = gpus
        self._accounts = accounts
        self._reports: set[asyncio.Task[None]] = set()
        self._obedience = Obedience(runner, controller.clock)
        self._prober = Prober(controller, runner, self._probe_plan)
        runner.report_to(self._report)
        controller.on_commit.append(self._after_commit)

    async def recover_all(self) -> None:
        """At start-up: every job that held GPUs is looked for, and its state follows."""
        held = self._held()
        for job in held:
            self._watch_over(job)
        await self._runner.remove_abandoned({(job.job_id, job.attempt) for job in held})
        await asyncio.gather(*(self._recover(job) for job in held))
        self._prober.follow()

    async def _recover(self, job: Job) -> None:
        ran = job.state is not JobState.CONFIGURING
        await self._runner.recover((job.job_id, job.attempt), job.uid, orders_of(job), ran=ran)

    def _held(self) -> list[Job]:
        return [job for job in self._controller.state.jobs.values() if job.holds_gpus]

    async def look_regularly(self) -> None:
        """By a slow clock at every attempt that holds something, so that no lost event is for ever.

        What nobody tracks, through whatever failed, is found again as at a start.
        """
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            held = self._held()
            if held:  # each batch commits the time: a power cut is known to have come after it
                self._controller.post(keep_time)
            for job in held:
                if not self._runner.look_again((job.job_id, job.attempt)):
                    log.warning("attempt_untracked job=%d attempt=%d", job.job_id, job.attempt)
                    await self._recover(job)

    async def deliver(self, job_ids: Sequence[JobId]) -> None:
        """Until orders of these jobs are where their supervisors read them."""
        jobs = self._controller.state.jobs
        named = (jobs.get(job_id) for job_id in job_ids)
        await self._runner.delivered(
            [(job.job_id, job.attempt) for job in named if job is not None and job.holds_gpus]
        )

    async def settled(self) -> None:
        """Until the ends that are known now were handed to the controller."""
        while self._reports:
            await asyncio.wait(tuple(self._reports))

    def _report(self, report: AttemptReport) -> None:
        if self._prober.takes(report):
            return
        if report.storage_error is not None:
            self._controller.block_storage(report.storage_error)
        job = self._controller.state.jobs.get(report.job_id)
        if job is not None and job.grants and _is_over(report):
            task = asyncio.ensure_future(self._report_end(job, report))
            self._reports.add(task)
            task.add_done_callback(self._reports.discard)
            return
        self._take(report, NO_EVIDENCE)

    async def _report_end(self, job: Job, report: AttemptReport) -> None:
        """The driver forgets ended processes: its figures are read before the end is recorded."""
        try:
            seen = report.seen
            end = seen and (seen.exit or seen.ended)
            failed = end is not None and end.code != 0
            main_pid = seen.started.pid if seen and seen.started else None
            evidence = await self._gpus.evidence(job, failed=failed, main_pid=main_pid)
        except Exception:
            log.exception("evidence_failed job=%d", job.job_id)
            evidence = NO_EVIDENCE
        self._take(report, evidence)

    def _take(self, report: AttemptReport, evidence: Evidence) -> None:
        clock = self._controller.clock
        self._controller.post(lambda batch: apply_report(batch, clock, report, evidence))

    def _after_commit(self, committed: Committed) -> None:
        for change in committed.changes:
            self._follow(change)
        if any(_awaits(change) for change in committed.changes):
            self._prober.follow()

    def _follow(self, change: Change) -> None:
        before, after = change.before, change.after
        held_before = before is not None and before.holds_gpus
        if (
            before is not None
            and held_before
            and not (after.holds_gpus and after.attempt == before.attempt)
        ):
            self._obedience.drop(after.job_id)
            self._runner.forget((before.job_id, before.attempt))
            self._gpus.job_gone(before)
        elif after.state is JobState.CONFIGURING and not held_before:
            key = (after.job_id, after.attempt)
            self._gpus.begin(after)
            self._runner.launch(key, after.uid, self._plan_maker(after))
        elif before is not None and after.holds_gpus:
            self._follow_orders(before, after)

    def _follow_orders(self, before: Job, after: Job) -> None:
        key, orders = (after.job_id, after.attempt), orders_of(after)
        self._watch_over(after)
        is_cancelled_now = after.cancel is not None and before.cancel is None
        if is_cancelled_now and after.state is JobState.CONFIGURING:
            self._runner.fence(key, orders)
            return
        if orders != orders_of(before):
            self._runner.order(key, orders)

    def _watch_over(self, job: Job) -> None:
        """What is due of its supervisor will be seen to."""
        self._obedience.follow(job)

    def _plan_maker(self, job: Job) -> MakePlan:
        async def make() -> LaunchPlan | None:
            if self._context.is_system:
                await self._check_account(job)
            await self._look_again(job)
            present = self._controller.state.jobs.get(job.job_id)
            if present is None or present.attempt != job.attempt or present.cancel is not None:
                return None  # its cancel is on the way, and fences it
            payload = await self._controller.payloads.take(job.job_id)
            if (fault := self._prober.waits_already(job, payload.cwd)) is not None:
                raise PlaceAway(f"directory {display(payload.cwd)}", fault)
            gpus = self._specs.granted(present, self._gpus.info())
            access = await self._device_access(gpus)
            spec = self._specs.spec(present, payload, gpus)
            return spec, self._specs.bounds(present, access)

        return make

    async def _probe_plan(self, job: Job) -> LaunchPlan:
        """Its set-up alone, on no GPU. Raises PlaceAway."""
        if self._context.is_system:
            await self._check_account(job)
        payload = await self._controller.payloads.take(job.job_id)
        spec = self._specs.spec(job, payload, ())
        access = await self._device_access(())
        probe = replace(spec, probe=True, attempt=PROBE_ATTEMPT, time_limit_s=None)
        return probe, self._specs.bounds(job, access)

    async def _device_access(self, gpus: Sequence[GrantedGpu]) -> DeviceAccess:
        """For a launcher that can filter. Raises LaunchDeferred: it is the host that lacks it."""
        if not self._runner.launcher.filters_devices:
            return UNFILTERED
        try:
            return await asyncio.to_thread(self._specs.device_access, gpus)
        except (OSError, DeviceMissing) as error:
            raise LaunchDeferred(f"no device filter can be made: {error}") from error

    async def _look_again(self, job: Job) -> None:
        """Raises NoLongerFits where foreign use came, or a GPU went, since the decision."""
        if not job.grants:
            return
        problem = await self._gpus.preflight(job)
        if problem is not None:
            raise NoLongerFits(problem)

    async def _check_account(self, job: Job) -> None:
        """Raises AccountGone or PlaceAway; the supervisor looks again by itself."""
        place = f"account {job.user}"
        try:
            found = await self._accounts.look_up(job.user, job.uid)
        except TimeoutError:
            raise PlaceAway(place, f"{place}: the name service does not answer") from None
        if found.is_missing:
            raise PlaceAway(place, f"{place}: unknown; it had uid {job.uid} at submit")
        if found.problem is not None:
            raise AccountGone(found.problem)


def _awaits(change: Change) -> bool:
    """Whether what a job waits for of its environment has changed."""
    before = None if change.before is None else change.before.environment
    return change.after.environment is not None or before is not None


def _is_over(report: AttemptReport) -> bool:
    seen = report.seen
    if seen is None or report.processes_left:
        return False
    return seen.exit is not None or (seen.ended is not None and not seen.supervisor_alive)


def orders_of(job: Job) -> Orders:
    """All that is ordered of a job so far; written whole each time."""
    limit_s = job.request.time_limit_s
    cancel = job.cancel
    return Orders(
        time_limit_s=math.inf if limit_s is None else limit_s,
        cancel=None if cancel is None else Cancel(cancel.by, cancel.at_s, cancel.reason),
        signals=job.signals,
    )
