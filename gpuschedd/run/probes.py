"""Looks for places that jobs wait for: a launch without GPUs that sets up as the user, and ends.

One at a time for each user and place, by the times that the jobs' records hold, so that a restart
forgets none. What a probe finds is judged in jobs/environments.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from gpusched_client.terms import JobId
from gpuschedd.core.attempt import AttemptReport, EndedRecord
from gpuschedd.core.job import Awaited, Job
from gpuschedd.core.model import NEVER_S
from gpuschedd.gpu.attribution import JobKey
from gpuschedd.jobs.batch import Batch
from gpuschedd.jobs.controller import Controller
from gpuschedd.jobs.environments import found_again, next_try_s, still_lost
from gpuschedd.run.launches import LaunchPlan, MakePlan
from gpuschedd.run.runner import Runner
from gpuschedd.supervisor.records import display

log = logging.getLogger(__name__)

PROBE_ATTEMPT = 0  # no job's own, so that no directory is anybody else's
PROBES_MAX = 8  # at once; each is a process for a moment, or for its set-up's deadline
PROBES_PER_UID_MAX = 2  # or the dead mount of one user would keep all others waiting

Judged = Callable[[Batch], None]


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
        self._found: dict[Awaited, _Found] = {}  # until all of it is on record
        self._timer: asyncio.TimerHandle | None = None

    def follow(self) -> None:
        """Jobs have changed: the next probe may be another one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = self._controller.clock.now_s()
        times = self._times()
        for awaited, found in list(self._found.items()):
            if times.get(awaited, NEVER_S) > now_s:
                del self._found[awaited]  # all of it is on record
            elif found.is_judged:
                self._post(found)  # the next slice of its jobs
        idle = [at_s for awaited, at_s in times.items() if self._may_ask(awaited)]
        if idle and len(self._running) < PROBES_MAX:
            delay_s = max(0.0, min(idle) - now_s)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._probe_due)

    def _may_ask(self, awaited: Awaited) -> bool:
        under_way = [each.uid for each in self._running.values()].count(awaited.uid)
        is_asked = awaited in self._found or awaited in self._running.values()
        return not is_asked and under_way < PROBES_PER_UID_MAX

    def _times(self) -> dict[Awaited, float]:
        """When each place is looked for again."""
        awaiting = self._controller.state.awaiting
        return {awaited: next_try_s(jobs) for awaited, jobs in awaiting.items()}

    def _post(self, found: _Found) -> None:
        found.is_judged = False

        def judge(batch: Batch) -> None:
            found.is_judged = True
            found.change(batch)

        self._controller.post(judge)

    def waits_already(self, job: Job, cwd: bytes) -> str | None:
        """What another job of the same user found missing of what this one needs as well."""
        state = self._controller.state
        jobs = state.awaiting.get(Awaited(job.uid, f"directory {display(cwd)}"))
        wait = state.jobs[next(iter(jobs))].environment if jobs else None
        return None if wait is None else wait.fault

    def takes(self, report: AttemptReport) -> bool:
        """Whether this is a probe's report; then it is dealt with."""
        if report.attempt != PROBE_ATTEMPT:
            return False
        if report.job_id in self._running and not report.processes_left:
            self._conclude(report)
        return True

    def _probe_due(self) -> None:
        self._timer = None
        now_s = self._controller.clock.now_s()
        due = [(at_s, awaited) for awaited, at_s in self._times().items() if at_s <= now_s]
        for _at_s, awaited in sorted(due):
            if self._may_ask(awaited) and len(self._running) < PROBES_MAX:
                self._begin(awaited)
        self.follow()

    def _begin(self, awaited: Awaited) -> None:
        state = self._controller.state
        job = state.jobs[min(state.awaiting[awaited])]
        self._running[job.job_id] = awaited
        log.info("probe job=%d place=%s", job.job_id, awaited.place)
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
        found = self._found[awaited] = _Found(_change_by(report, end, awaited))
        self._post(found)
        self._runner.forget(_key(report.job_id))
        self.follow()


@dataclass(slots=True)
class _Found:
    """What a probe found, to be written down slice by slice."""

    change: Judged
    is_judged: bool = False  # the last slice that was posted


def _change_by(report: AttemptReport, end: EndedRecord | None, awaited: Awaited) -> Judged:
    """What a probe says of the place; of another one that it lacked it says nothing."""
    if end is not None:
        fault = end.reason if end.is_of_environment else None
        place = end.place if end.is_of_environment else None
    else:
        fault, place = report.launch_error, report.place
    if place is not None and place != awaited.place:
        place = None  # it stands for itself there, and its launch will say so
    elif place is None and end is None and not report.account_gone:
        # It could not be made. What does not pass by itself counts as not found.
        fault = None if report.deferred or report.storage_error is not None else fault
        return partial(still_lost, awaited=awaited, fault=fault)
    if place is None:
        return partial(found_again, awaited=awaited)
    return partial(still_lost, awaited=awaited, fault=fault)


def _key(job_id: JobId) -> JobKey:
    return (job_id, PROBE_ATTEMPT)
