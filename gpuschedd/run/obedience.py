"""Supervisors that do not do what is due: woken a little after it, at last stopped.

What is due of a job follows from its record alone (a cancel, its time limit, the end of its main
process), so a daemon that starts again knows it as well as the one that gave the order.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Protocol

from gpusched_client.terms import JobId, JobState
from gpuschedd.core.job import Job
from gpuschedd.gpu.attribution import JobKey
from gpuschedd.system.clock import SchedulerClock

WAKE_AFTER_S = 5.0  # past the grace: a supervisor that was stopped goes on with what is due
STOP_AFTER_S = 30.0  # past the grace: then the supervisor itself is ended
GIVE_UP_S = 600.0  # past the grace, where only processes are left that no signal ends
AGAIN_S = 60.0  # between two tries of either


class Supervisors(Protocol):
    """Who can reach a supervisor."""

    def wake(self, key: JobKey) -> None:
        """Make it go on and read its orders."""

    def stop_disobedient(self, key: JobKey) -> None:
        """End it; what is left of its job follows."""


@dataclass(frozen=True, slots=True)
class Due:
    """When a job's supervisor is woken, and when it is stopped. Scheduler time; inf: never."""

    wake_s: float
    stop_s: float


def due_of(job: Job, cancel_known_s: float) -> Due:
    """By the job's record. `cancel_known_s`: when this daemon first knew of its cancel; inf: none.

    The wall time of a cancel is not used: the clock may have been stepped since.
    """
    assert job.decided_grace_s is not None
    grace_s = job.decided_grace_s
    ends = [cancel_known_s]
    if job.started_sched_s is not None and job.request.time_limit_s is not None:
        ends.append(job.started_sched_s + job.request.time_limit_s)
    if job.state is JobState.COMPLETING and job.main_ended_sched_s is not None:
        late_s = job.main_ended_sched_s + grace_s
        return Due(late_s + WAKE_AFTER_S, late_s + GIVE_UP_S)
    late_s = min(ends) + grace_s
    return Due(late_s + WAKE_AFTER_S, late_s + STOP_AFTER_S)


class Obedience:
    """One timer for each job that something is or will be due of."""

    def __init__(self, supervisors: Supervisors, clock: SchedulerClock) -> None:
        self._supervisors = supervisors
        self._clock = clock
        self._cancel_known_s: dict[JobId, float] = {}
        self._woken_s: dict[JobId, float] = {}  # first, for what is due now
        self._timers: dict[JobId, asyncio.TimerHandle] = {}

    def follow(self, job: Job) -> None:
        """A job that holds GPUs or runs: anew after each change, and once at start-up."""
        if job.cancel is not None:
            self._cancel_known_s.setdefault(job.job_id, self._clock.now_s())
        due = due_of(job, self._cancel_known_s.get(job.job_id, math.inf))
        self._set((job.job_id, job.attempt), due, min(due.wake_s, due.stop_s))

    def drop(self, job_id: JobId) -> None:
        """Nothing is due of it any more."""
        self._cancel_known_s.pop(job_id, None)
        self._woken_s.pop(job_id, None)
        if (timer := self._timers.pop(job_id, None)) is not None:
            timer.cancel()

    def _set(self, key: JobKey, due: Due, at_s: float) -> None:
        if (timer := self._timers.pop(key[0], None)) is not None:
            timer.cancel()
        if at_s < math.inf:
            delay_s = max(0.0, at_s - self._clock.now_s())
            loop = asyncio.get_running_loop()
            self._timers[key[0]] = loop.call_later(delay_s, self._act, key, due)

    def _act(self, key: JobKey, due: Due) -> None:
        now_s = self._clock.now_s()
        if now_s < due.wake_s:
            # The clock of timers runs on while the host sleeps, or ahead by a hair.
            self._set(key, due, due.wake_s)
            return
        woken_s = self._woken_s.get(key[0], -math.inf)
        is_woken = woken_s >= due.wake_s  # else that was for something else
        if not is_woken:
            woken_s = self._woken_s[key[0]] = now_s
        # A daemon that was away, or a host that slept, comes when both are due.
        stop_s = max(due.stop_s, woken_s + STOP_AFTER_S - WAKE_AFTER_S)
        if is_woken and now_s >= stop_s:
            self._supervisors.stop_disobedient(key)
            self._set(key, due, now_s + AGAIN_S)
        else:
            self._supervisors.wake(key)
            self._set(key, due, min(stop_s, now_s + AGAIN_S))
