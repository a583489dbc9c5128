"""What moves along with the jobs of a batch before it is written: queues, accounts, histories.

The core's books are changed in place and say which rows changed. Where the batch cannot be written
they go back to the last commit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gpusched_client.terms import JobId
from gpuschedd.core.job import Job
from gpuschedd.core.lengths import Histories
from gpuschedd.core.model import Kind, LengthRow, Plan, Waiting
from gpuschedd.core.queues import rested
from gpuschedd.jobs.batch import Batch, Ended
from gpuschedd.jobs.charging import Charging
from gpuschedd.jobs.gates import is_eligible
from gpuschedd.jobs.state import State, age_of, waiting_for
from gpuschedd.store.records import Age, Changes, UsageRow


@dataclass(slots=True)
class Followed:
    """The rows that changed."""

    ages: dict[JobId, Waiting | None] = field(default_factory=dict)
    rates: dict[int, UsageRow] = field(default_factory=dict)
    lengths: dict[tuple[int, Kind], LengthRow] = field(default_factory=dict)
    ended: tuple[Ended, ...] = ()

    def join(self, later: Followed) -> None:
        """What changed after it, to be written with it."""
        self.ages.update(later.ages)
        self.rates.update(later.rates)
        self.lengths.update(later.lengths)
        self.ended += later.ended

    def into(self, changes: Changes) -> None:
        """What of them is to be written."""
        changes.ages.update(
            (job_id, None if row is None else age_of(row)) for job_id, row in self.ages.items()
        )
        changes.accounts.update(self.rates)
        changes.lengths += self.lengths.values()


class Following:
    """The books that follow the jobs."""

    def __init__(self, state: State, charging: Charging) -> None:
        self._state = state
        self._charging = charging
        self._lengths = state.histories.view()  # as committed

    def along(self, batch: Batch, settle: Plan | None = None) -> Followed:
        """Move them with the batch's jobs. `settle`: the pass whose starts the batch has."""
        rows, queues = Followed(), self._state.queues
        for job_id, job in batch.changed_jobs().items():
            for row in _follow_queue(batch, job):
                rows.ages[row.job_id] = row
            if job.is_final:
                rows.ages[job_id] = None
            account = self._charging.follow(batch, job)
            if account is not None:
                rows.rates[job.uid] = account
        for job_id in batch.fronted:
            for row in queues.to_front(job_id, batch.now_s):
                rows.ages[row.job_id] = row
        if settle is not None:
            settled = queues.settle(settle.horizon, batch.now_s)
            for row in (*settled, *queues.note_heads(settle.first_heads)):
                rows.ages[row.job_id] = row
        self._state.histories.forget(batch.now_s)
        for ended in batch.runs:
            for length in self._state.histories.note(ended.uid, ended.kind, ended.run):
                rows.lengths[ended.uid, length.kind] = length
        rows.ended = tuple(batch.runs)
        return rows

    def committed(self, rows: Followed) -> None:
        """They are durable."""
        for job_id, row in rows.ages.items():
            if row is None or job_id not in self._state.jobs:
                self._state.ages.pop(job_id, None)
            else:
                self._state.ages[job_id] = row
        self._charging.committed(rows.rates)
        self._lengths = self._state.histories.view()
        for uid, _kind, run, expected_s in rows.ended:
            self._state.expectations.ended(uid, run.length_s, expected_s)

    def back(self, now_s: float) -> None:
        """As of the last commit."""
        self._state.rebuild_queues(now_s)
        self._charging.restore_committed(now_s)
        self._state.histories = Histories.as_of(self._lengths)

    def policy(self, batch: Batch) -> None:
        """Queues and accounts by another policy."""
        self._state.rebuild_queues(batch.now_s)
        self._charging.follow_policy(batch)


def _follow_queue(batch: Batch, job: Job) -> tuple[Waiting, ...]:
    """Move a changed job in its user's list, before the commit; the rows whose age changed."""
    queues, now_s = batch.state.queues, batch.now_s
    present = queues.get(job.job_id)
    if not is_eligible(job, now_s):
        return queues.remove(job.job_id, now_s) if present is not None else ()
    row = present or batch.state.ages.get(job.job_id) or waiting_for(job, Age(now_s, 0.0, None))
    row = replace(row, request=job.request, nice=job.nice, length_key=job.length_key or "")
    if job.job_id in batch.rested:
        row = rested(row, now_s)
    if present is None:
        return queues.insert(row, now_s)
    return queues.update(row, now_s) if row != present else ()
