"""What a configuration that is read again does to the promised start. No I/O.

By whatever key: a limit, sharing, the GPUs that are ours, foreign use that is no longer ignored.
When its holder could start is asked before and after, with nothing else changed in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpusched_client.terms import JobId
from gpusched_client.units import duration_about
from gpuschedd.core.model import NEVER_S, Policy, Promise, PromiseException, Snapshot
from gpuschedd.core.promises import holder_start_s, sticks
from gpuschedd.jobs import passes
from gpuschedd.jobs.batch import Batch

MOVED_S = 1.0  # a start that comes later by less is no news


@dataclass(frozen=True, slots=True)
class Outlook:
    """The live promise, and when its holder could start as planned; inf where that is unknown."""

    promise: Promise | None
    start_s: float

    @classmethod
    def of(cls, snapshot: Snapshot, policy: Policy) -> Outlook:
        """As things are now."""
        return cls(snapshot.promise, holder_start_s(snapshot, policy))


class Reload:
    """One reload: what was promised before it, and what became of that."""

    def __init__(self, before: Outlook) -> None:
        self._before = before
        self._barred: JobId | None = None
        self._told = ""

    def note_barred(self, batch: Batch) -> None:
        """Whose promise ends since its user may run nothing any more."""
        self._barred = None
        promise = batch.state.promise
        if promise is not None and promise.job_id in batch.voided:
            self._barred = promise.job_id

    def follow(self, batch: Batch, snapshot: Snapshot) -> None:
        """End the promise, or mark it as late, where the configuration is to blame.

        `snapshot`: by the new configuration. A batch that found no room is judged again.
        """
        self._told = ""
        promise = batch.state.promise
        job = None if promise is None else batch.job(promise.job_id)
        if promise is None or job is None or job.hold is not None:
            return
        policy, by_s = batch.state.policy, max(promise.start_by_s, snapshot.now_s)
        if self._before.promise is not None and self._before.promise.job_id == job.job_id:
            by_s = max(by_s, self._before.start_s)
        start_s = holder_start_s(snapshot, policy)
        is_lost = not sticks(policy) or passes.is_above_limit(job, snapshot)
        if is_lost or by_s < start_s == NEVER_S:
            batch.voided[job.job_id] = PromiseException.CONFIG
            self._told = _lost(job.job_id)
        elif by_s + MOVED_S <= start_s < NEVER_S:
            batch.delayed[job.job_id] = PromiseException.CONFIG
            late = duration_about(start_s - by_s)
            self._told = f"the promised start of job {job.job_id} is {late} later (config)"

    @property
    def broken(self) -> tuple[str, ...]:
        """What it broke, in words, once it is judged."""
        if self._barred is not None:
            return (_lost(self._barred),)
        return (self._told,) if self._told else ()


def _lost(job_id: JobId) -> str:
    return f"the promised start of job {job_id} is lost (config)"
