"""What each user is charged: rates of the jobs that hold GPUs, and usage as of the last change.

Moves along with a batch before its commit; `restore` brings it back to the rows of the last one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpusched_client.terms import JobId
from gpuschedd.core import fairshare
from gpuschedd.core.fairshare import charge_rate
from gpuschedd.core.job import Job
from gpuschedd.jobs.batch import Batch
from gpuschedd.jobs.state import State
from gpuschedd.store.records import UsageRow


class Charging:
    """The accounts behind fair-share, kept in step with the jobs."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._rows: dict[int, UsageRow] = {}  # as committed
        self._rates: dict[JobId, float] = {}  # billed GPUs of each job that holds some

    def users(self) -> dict[int, str]:
        """Login names of everybody with an account."""
        return {row.uid: row.user for row in self._rows.values()}

    def rate_of_user(self, uid: int) -> float:
        """Billed GPUs that a user's jobs hold now."""
        jobs = self._state.jobs
        return sum(
            self._rates.get(job_id, 0.0)
            for job_id in self._state.holding
            if jobs[job_id].uid == uid
        )

    def rate_of(self, job: Job) -> float:
        """Billed GPUs of one job; 0.0 while it holds none, and once it is stuck."""
        if not job.holds_gpus or not job.grants or job.stuck:
            return 0.0
        known = {gpu.uuid: gpu for gpu in self._state.gpus}
        return charge_rate(job.grants, known, whole=job.whole, policy=self._state.policy)

    def rates(self) -> Mapping[JobId, float]:
        """The rates that are charged now, by job."""
        return self._rates

    def restore(self, rows: Iterable[UsageRow], now_s: float) -> None:
        """Accounts from rows, with the rates of the jobs that hold GPUs. Scheduler time."""
        self._rows = {row.uid: row for row in rows}
        accounts = fairshare.Accounts.restore(
            self._state.policy,
            [
                fairshare.AccountRow(row.uid, row.usage_gpu_s, row.at_sched_s)
                for row in self._rows.values()
            ],
        )
        self._rates = {}
        for job in map(self._state.jobs.__getitem__, self._state.holding):
            rate = self.rate_of(job)
            if rate > 0:
                self._rates[job.job_id] = rate
                since_s = job.decided_sched_s or now_s
                accounts.resume_rate(job.uid, job.job_id, rate, since_s)
        self._state.accounts = accounts

    def restore_committed(self, now_s: float) -> None:
        """As of the last commit, after a batch that could not be written."""
        self.restore(self._rows.values(), now_s)

    def follow(self, batch: Batch, job: Job) -> UsageRow | None:
        """The owner's account, if what the job is charged has changed."""
        rate = self.rate_of(job)
        if rate == self._rates.get(job.job_id, 0.0):
            return None
        if rate > 0:
            self._rates[job.job_id] = rate
        else:
            self._rates.pop(job.job_id, None)
        row = self._state.accounts.set_rate(job.uid, job.job_id, rate, batch.now_s)
        running = sum(
            self._rates.get(other, 0.0)
            for other in self._state.holding
            if other != job.job_id and self._state.jobs[other].uid == job.uid
        )
        return UsageRow(
            job.uid, job.user, row.usage_gpu_s, running + rate, row.as_of_s, batch.wall_s
        )

    def committed(self, rows: Mapping[int, UsageRow]) -> None:
        """These rows are durable now."""
        self._rows.update(rows)

    def follow_policy(self, batch: Batch) -> None:
        """By another policy; what was used so far stays as it was charged."""
        usages = {uid: self._state.accounts.usage(uid, batch.now_s) for uid in self._rows}
        self._rows = {
            uid: replace(row, usage_gpu_s=usages[uid], at_sched_s=batch.now_s, at_s=batch.wall_s)
            for uid, row in self._rows.items()
        }
        self.restore_committed(batch.now_s)
        rates: dict[int, float] = defaultdict(float)
        for job_id, rate in self._rates.items():
            rates[self._state.jobs[job_id].uid] += rate
        self._rows = {uid: replace(row, rate=rates[uid]) for uid, row in self._rows.items()}
        batch.accounts.update(self._rows)
