"""What follows a commit: launches, orders, clean-up. Reads committed changes, makes none."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpusched_client.terms import GpuUuid, JobId, JobState, Launch, Mode
from gpuschedd.core.attempt import AttemptReport, Cancel, Orders
from gpuschedd.core.job import Job
from gpuschedd.gpu.source import GpuInfo
from gpuschedd.jobs.attempts import NO_EVIDENCE, Evidence, apply_report
from gpuschedd.jobs.controller import Change, Committed, Controller
from gpuschedd.run import device_filter as devices
from gpuschedd.run import environment as jobenv
from gpuschedd.run.job_dir import Spec
from gpuschedd.run.launchers.direct import AccountGone, Bounds, LaunchDeferred, Launcher
from gpuschedd.run.runner import DISOBEDIENCE_S, LaunchPlan, MakePlan, Runner
from gpuschedd.store.records import Payload
from gpuschedd.system.accounts import Accounts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where and how this daemon's jobs run."""

    state_dir: Path
    instance: str
    is_system: bool
    launch: Launch
    exec_jobs: bool
    sim_dir: Path | None

    @property
    def jobs_root(self) -> Path:
        """Parent of the job directories."""
        return self.state_dir / "jobs"

    @property
    def scripts_dir(self) -> Path:
        """Where submitted scripts lie while their attempt lives."""
        return self.state_dir / "scripts"

    @property
    def hint_socket(self) -> Path:
        """Where supervisors send their hints."""
        return self.state_dir / "hint.sock"


class Unfit(LaunchDeferred):
    """The last look before the launch: the GPUs are not as free any more as they were decided."""


class Eyes(Protocol):
    """The view on the GPUs that launches and ends need."""

    def begin(self, job: Job) -> None:
        """A job was placed."""

    async def last_look(self, job: Job) -> str | None:
        """Why a placed job does not fit any more, by a sample that is at most a second old."""

    async def evidence(self, job: Job, *, failed: bool, main_pid: int | None) -> Evidence:
        """What the GPUs tell of an attempt that is over."""


class Actions:
    """Turns committed changes into work for the runner."""

    def __init__(
        self,
        controller: Controller,
        launcher: Launcher,
        around: Surroundings,
        gpu_info: Callable[[], dict[GpuUuid, GpuInfo]],
        job_gone: Callable[[Job], None],
        accounts: Accounts,
        eyes: Callable[[], Eyes] | None = None,
    ) -> None:
        """`gpu_info`: the last inventory; `job_gone` hears of each job whose GPUs become free."""
        self._accounts = accounts
        self._eyes = eyes
        self._reports: set[asyncio.Task[None]] = set()
        self._controller = controller
        self._around = around
        self._gpu_info = gpu_info
        self._job_gone = job_gone
        self.runner = Runner(launcher, around.jobs_root, around.instance, self._report)
        self._stop_timers: dict[JobId, asyncio.TimerHandle] = {}
        controller.on_commit.append(self._after_commit)

    async def recover_all(self) -> None:
        """At start-up: every job that held GPUs is looked for, and its state follows."""
        held = [job for job in self._controller.state.jobs.values() if job.holds_gpus]
        await self.runner.remove_abandoned({(job.job_id, job.attempt) for job in held})
        await asyncio.gather(
            *(
                self.runner.recover(
                    (job.job_id, job.attempt),
                    job.uid,
                    orders_of(job),
                    ran=job.state is not JobState.CONFIGURING,
                )
                for job in held
            )
        )

    def _report(self, report: AttemptReport) -> None:
        if report.storage_error is not None:
            self._controller.block_storage(report.storage_error)
        job = self._controller.state.jobs.get(report.job_id)
        if self._eyes is not None and job is not None and job.grants and _is_over(report):
            task = asyncio.ensure_future(self._report_end(self._eyes(), job, report))
            self._reports.add(task)
            task.add_done_callback(self._reports.discard)
            return
        self._take(report, NO_EVIDENCE)

    async def _report_end(self, eyes: Eyes, job: Job, report: AttemptReport) -> None:
        """The driver forgets ended processes: its figures are read before the end is booked."""
        try:
            seen = report.seen
            end = seen and (seen.exit or seen.ended)
            failed = end is not None and end.code != 0
            main_pid = seen.started.pid if seen and seen.started else None
            evidence = await eyes.evidence(job, failed=failed, main_pid=main_pid)
        except Exception:
            log.exception("evidence_failed job=%d", job.job_id)
            evidence = NO_EVIDENCE
        self._take(report, evidence)

    def _take(self, report: AttemptReport, evidence: Evidence) -> None:
        clock = self._controller.clock
        self._controller.tell(lambda batch: apply_report(batch, clock, report, evidence))

    def _after_commit(self, committed: Committed) -> None:
        for change in committed.changes:
            self._follow(change)

    def _follow(self, change: Change) -> None:
        before, after = change.before, change.after
        if before is None:
            return
        if before.holds_gpus and not (after.holds_gpus and after.attempt == before.attempt):
            self._drop_timer(after.job_id)
            self.runner.forget((before.job_id, before.attempt))
            self._job_gone(before)
        elif after.state is JobState.CONFIGURING and not before.holds_gpus:
            key = (after.job_id, after.attempt)
            if self._eyes is not None:
                self._eyes().begin(after)
            self.runner.launch(key, after.uid, self._plan_maker(after))
        elif after.holds_gpus:
            self._follow_orders(before, after)

    def _follow_orders(self, before: Job, after: Job) -> None:
        key, orders = (after.job_id, after.attempt), orders_of(after)
        if after.cancel is not None and before.cancel is None:
            self._arm_timer(after)
            if after.state is JobState.CONFIGURING:
                self.runner.fence(key, orders)
                return
        if orders != orders_of(before):
            self.runner.order(key, orders)

    def _arm_timer(self, job: Job) -> None:
        """A supervisor that does not obey a cancel is stopped itself."""
        delay_s = self._controller.state.policy.kill_grace_s + DISOBEDIENCE_S
        loop = asyncio.get_running_loop()
        self._stop_timers[job.job_id] = loop.call_later(
            delay_s, self.runner.stop_disobedient, (job.job_id, job.attempt)
        )

    def _drop_timer(self, job_id: JobId) -> None:
        timer = self._stop_timers.pop(job_id, None)
        if timer is not None:
            timer.cancel()

    def _plan_maker(self, job: Job) -> MakePlan:
        async def make() -> LaunchPlan | None:
            if self._around.is_system:
                await self._check_account(job)
            await self._look_again(job)
            present = self._controller.state.jobs.get(job.job_id)
            if present is None or present.attempt != job.attempt or present.cancel is not None:
                return None  # its cancel is on the way, and fences it
            payload = await self._controller.in_database(lambda store: store.payload(job.job_id))
            assert payload is not None, "a live job has its payload"
            return self._spec(present, payload), self._bounds(present)

        return make

    async def _look_again(self, job: Job) -> None:
        """Raises Unfit where foreign use came, or a GPU went, since the decision."""
        if self._eyes is None or not job.grants:
            return
        problem = await self._eyes().last_look(job)
        if problem is not None:
            raise Unfit(problem)

    async def _check_account(self, job: Job) -> None:
        """Raises AccountGone; the supervisor looks again, this one lets the job wait instead."""
        try:
            problem = await self._accounts.problem_of(job.user, job.uid)
        except TimeoutError:
            raise LaunchDeferred("the name service does not answer") from None
        if problem is not None:
            raise AccountGone(problem)

    def _bounds(self, job: Job) -> Bounds:
        known = self._gpu_info()
        return Bounds(
            minors=tuple(
                known[grant.uuid].minor if grant.uuid in known else None for grant in job.grants
            ),
            capabilities=tuple(
                node
                for grant in job.grants
                if grant.uuid in known and known[grant.uuid].parent_uuid is not None
                for node in known[grant.uuid].device_nodes
                if node.startswith(devices.CAPABILITY_NODES)
            ),
            memory_bytes=job.memory_bytes,
            cpus=job.cpus,
            tasks_max=self._controller.state.config.jobs.max_processes,
            grace_s=self._controller.state.policy.kill_grace_s,
        )

    def _spec(self, job: Job, payload: Payload) -> Spec:
        given = self._given(job, payload)
        around = self._around
        return Spec(
            job_id=job.job_id,
            attempt=job.attempt,
            instance=around.instance,
            mode=Mode.SYSTEM.value if around.is_system else Mode.USER.value,
            launch=around.launch.value,
            user=job.user,
            uid=job.uid,
            name=job.name,
            argv=payload.argv,
            script=payload.script,
            cwd=payload.cwd,
            environment=jobenv.environment_of(payload.environment, given),
            umask=payload.umask,
            rlimits=payload.rlimits,
            output=jobenv.expand(payload.output or jobenv.DEFAULT_OUTPUT, given),
            error=None if payload.error is None else jobenv.expand(payload.error, given),
            time_limit_s=job.request.time_limit_s,
            kill_grace_s=self._controller.state.policy.kill_grace_s,
            hint_socket=os.fspath(around.hint_socket),
            scripts_dir=os.fspath(around.scripts_dir),
            allow_system_uid=self._controller.state.config.jobs.system_users,
            no_exec=not around.exec_jobs,
            cpu_set=self._near_cpus(job) if self._controller.state.config.bind_cpus else (),
        )

    def _near_cpus(self, job: Job) -> tuple[int, ...]:
        """The CPUs near all its GPUs; those near any where they have none in common."""
        known = self._gpu_info()
        near = [set(known[g.uuid].cpus) for g in job.grants if g.uuid in known]
        if not near or not all(near):
            return ()
        return tuple(sorted(set.intersection(*near) or set.union(*near)))

    def _given(self, job: Job, payload: Payload) -> jobenv.Given:
        """What the job was given, in the order of the GPUs' indices."""
        known = self._gpu_info()
        indices = self._controller.state.gpu_index_of()
        uuids = sorted((grant.uuid for grant in job.grants), key=lambda uuid: indices.get(uuid, -1))
        numbers = [indices.get(uuid, -1) for uuid in uuids]
        config = self._controller.state.config
        visible = jobenv.visible_devices(
            config.visible_devices,
            list(zip(uuids, numbers, strict=True)),
            has_slices=any(uuid in known and known[uuid].parent_uuid for uuid in uuids),
            is_filtered=self._around.launch is Launch.PID1
            and bool(devices.gpu_nodes())
            and all(uuid in known and known[uuid].minor is not None for uuid in uuids),
        )
        return jobenv.Given(
            job_id=job.job_id,
            attempt=job.attempt,
            instance=self._around.instance,
            name=job.name,
            user=job.user,
            submit_dir=payload.cwd,
            gpu_uuids=[str(uuid) for uuid in uuids],
            gpu_indices=numbers,
            vram_bytes=job.request.vram_bytes,
            visible_devices=visible,
            cpu_affinity=jobenv.cpu_list(self._near_cpus(job)),
            sim_dir=None if self._around.sim_dir is None else os.fspath(self._around.sim_dir),
        )


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
