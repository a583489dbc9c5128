"""Looks for places that jobs wait for: a launch without GPUs that sets up as the user, and ends.

One at a time for each user and place, by the times that the jobs' records hold, so that a restart
forgets none. What a probe finds is judged in jobs/environments.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from gpusched_client.terms import JobId
from gpuschedd.core.attempt import AttemptReport
from gpuschedd.core.job import Job
from gpuschedd.gpu.attribution import JobKey
from gpuschedd.jobs import environments
from gpuschedd.jobs.controller import Controller
from gpuschedd.jobs.environments import Awaited, Group
from gpuschedd.run.launches import LaunchPlan, MakePlan
from gpuschedd.run.runner import Runner
from gpuschedd.supervisor.records import display

log = logging.getLogger(__name__)

PROBE_ATTEMPT = 0  # no job's own, so that no directory is anybody else's
PROBES_MAX = 8  # at once; each is a process for a moment, or for its set-up's deadline


class Prober:
    """The timers, and the probes that are under way."""

    def __init__(
        self, controller: Controller, runner: Runner, plan: Callable[[Job], Awaitable[LaunchPlan]]
    ) -> None:
        """`plan` makes what a probe of a job is launched with."""
        self._controller = controller
        self._runner = runner
        self._plan = plan
        self._running: dict[JobId, Awaited] = {}  # by the job that stands for the others
        self._judged: set[Awaited] = set()  # what was found is not on record yet
        self._timer: asyncio.TimerHandle | None = None

    def follow(self) -> None:
        """Jobs have changed: the next probe may be another one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = self._controller.clock.now_s()
        groups = self._groups()
        self._judged &= {group.awaited for group in groups if group.next_try_s <= now_s}
        idle = [group for group in groups if not self._is_asked(group.awaited)]
        if idle and len(self._running) < PROBES_MAX:
            delay_s = max(0.0, min(group.next_try_s for group in idle) - now_s)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._probe_due)

    def _is_asked(self, awaited: Awaited) -> bool:
        return awaited in self._judged or awaited in self._running.values()

    def waits_already(self, job: Job, cwd: bytes) -> str | None:
        """What another job of the same user found missing of what this one needs as well."""
        place = f"directory {display(cwd)}"
        for group in self._groups():
            first = group.jobs[0].environment
            if group.awaited == (job.uid, place) and first is not None:
                return first.fault
        return None

    def takes(self, report: AttemptReport) -> bool:
        """Whether this is a probe's report; then it is dealt with."""
        if report.attempt != PROBE_ATTEMPT:
            return False
        if report.job_id in self._running and not report.processes_left:
            self._conclude(report)
        return True

    def _groups(self) -> list[Group]:
        state = self._controller.state
        waiting = (state.jobs[job_id] for job_id in state.awaiting)
        return list(environments.groups_of(waiting).values())

    def _probe_due(self) -> None:
        self._timer = None
        now_s = self._controller.clock.now_s()
        due = [group for group in self._groups() if group.next_try_s <= now_s]
        for group in sorted(due, key=lambda group: group.next_try_s):
            if not self._is_asked(group.awaited) and len(self._running) < PROBES_MAX:
                self._begin(group)
        self.follow()

    def _begin(self, group: Group) -> None:
        job = group.jobs[0]
        self._running[job.job_id] = group.awaited
        log.info("probe job=%d place=%s", job.job_id, group.awaited.place)
        self._runner.launch(_key(job.job_id), job.uid, self._maker(job))

    def _maker(self, job: Job) -> MakePlan:
        async def make() -> LaunchPlan:
            return await self._plan(job)

        return make

    def _conclude(self, report: AttemptReport) -> None:
        """The end of a probe, or a launch that came to nothing, which says nothing of the place."""
        seen = report.seen
        end = seen and (seen.exit or seen.ended)
        if end is None and seen is not None and seen.supervisor_alive:
            return  # it has begun
        awaited = self._running.pop(report.job_id)
        self._judged.add(awaited)
        if end is not None and not end.is_of_environment:
            change = partial(environments.found_again, awaited=awaited)
        else:
            fault = report.launch_error if report.place is not None else None
            fault = end.reason if end is not None else fault
            change = partial(environments.still_lost, awaited=awaited, fault=fault)
        self._controller.post(lambda batch: change(batch))
        self._runner.forget(_key(report.job_id))
        self.follow()


def _key(job_id: JobId) -> JobKey:
    return (job_id, PROBE_ATTEMPT)
