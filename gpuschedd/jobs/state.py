"""What the controller keeps in memory, as of the last commit. Nothing here does I/O.

Nothing outside this folder writes it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpusched_client.terms import GpuUuid, JobId, JobState
from gpuschedd.config.keys import Config
from gpuschedd.core import admission
from gpuschedd.core.fairshare import Accounts
from gpuschedd.core.job import Awaited, Job
from gpuschedd.core.lengths import Histories
from gpuschedd.core.model import (
    Backfill,
    Gpu,
    GpuState,
    Inventory,
    Plan,
    Policy,
    Promise,
    PromiseException,
    Reservation,
    RunningJob,
    Waiting,
)
from gpuschedd.core.queues import Queues
from gpuschedd.jobs.expectations import Expectations
from gpuschedd.jobs.gates import is_eligible, is_timed
from gpuschedd.store.records import (
    RECENT_SUBMISSIONS_LOADED,
    Age,
    GpuRow,
    Loaded,
    PromiseRow,
    Remembered,
    Submission,
)


def policy_of(config: Config) -> Policy:
    """The core's knobs out of the configuration."""
    scheduling, sharing = config.scheduling, config.sharing
    return Policy(
        w_fair=scheduling.w_fair,
        w_age_per_h=scheduling.w_age_per_h,
        half_life_s=scheduling.half_life_s,
        age_jobs_per_user=scheduling.age_jobs_per_user,
        backfill=Backfill(scheduling.backfill),
        promise_within_s=scheduling.promise_within_s,
        promise_slack_s=scheduling.promise_slack_s,
        learn_lengths=scheduling.learn_lengths,
        guess_length_s=scheduling.guess_length_s,
        head_patience_s=scheduling.head_patience_s,
        margin_bytes=sharing.margin_bytes,
        max_jobs_per_gpu=sharing.max_jobs_per_gpu,
        across_users=sharing.across_users,
        min_share=sharing.min_share,
        kill_grace_s=scheduling.kill_grace_s,
        max_cpu_jobs=scheduling.max_cpu_jobs,
        shares=config.shares,
        billing=config.billing,
    )


@dataclass(slots=True)
class State:
    """Everything the controller knows, as of the last commit."""

    config: Config
    policy: Policy
    queues: Queues
    accounts: Accounts
    next_job_id: int
    jobs: dict[JobId, Job] = field(default_factory=dict)  # those that are not final
    ages: dict[JobId, Waiting] = field(default_factory=dict)  # committed age rows of these
    submissions: OrderedDict[tuple[int, str], Submission] = field(default_factory=OrderedDict)
    submissions_forgotten: bool = False  # older ones are in the database only
    live_of: Counter[int] = field(default_factory=Counter)  # uid -> jobs that are not final
    request_bytes: dict[JobId, int] = field(default_factory=dict)  # of these jobs
    bytes_of: Counter[int] = field(default_factory=Counter)  # uid -> the sum of these
    user_of: dict[int, str] = field(default_factory=dict)  # login names of those with jobs
    histories: Histories = field(default_factory=Histories)  # how long jobs run
    expectations: Expectations = field(default_factory=Expectations)  # how good they were
    holding: set[JobId] = field(default_factory=set)  # jobs that hold GPUs or a CPU slot
    delayed: set[JobId] = field(default_factory=set)  # jobs with a begin time or a back-off
    #: Jobs that wait for their environment, by what they wait for, and when it is looked for again.
    awaiting: dict[Awaited, dict[JobId, float]] = field(default_factory=dict)
    awaited_by: dict[JobId, Awaited] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    gpu_rows: dict[GpuUuid, GpuRow] = field(default_factory=dict)
    health: Mapping[GpuUuid, Remembered] = field(default_factory=dict)  # as committed
    gpu_problem: str | None = None  # why no GPU has been seen yet
    inventory: Inventory = field(default_factory=Inventory)
    promise: Promise | None = None
    promise_row: PromiseRow | None = None
    reservation: Reservation | None = None
    plan: Plan | None = None
    storage_blocked: str | None = None  # why nothing is launched: the state dir cannot be written
    host_closed: str | None = None  # why nothing is launched: no user is let in

    @classmethod
    def restore(cls, config: Config, loaded: Loaded, accounts: Accounts) -> State:
        """The state that was committed last."""
        policy = policy_of(config)
        jobs = {job.job_id: _with_grace(job, policy) for job in loaded.jobs}
        ages = {job_id: waiting_for(jobs[job_id], age) for job_id, age in loaded.ages.items()}
        state = cls(
            config=config,
            policy=policy,
            queues=Queues(policy),
            accounts=accounts,
            next_job_id=loaded.next_job_id,
            jobs=jobs,
            ages=ages,
            live_of=Counter(job.uid for job in loaded.jobs),
            gpu_rows={row.uuid: row for row in loaded.gpus},
            health=loaded.health,
            histories=Histories(loaded.lengths),
        )
        for job_id, job in jobs.items():
            state.index(job)
            size = loaded.request_bytes.get(job_id)
            if size is not None:
                state.request_bytes[job_id] = size  # by the job's own id: one object for all uses
                state.bytes_of[job.uid] += size
        state.inventory = admission.seen(state.inventory, _seen_gpus(loaded.gpus))
        for submission in loaded.submissions:
            state.submissions[(submission.uid, submission.submission_id)] = submission
        state.submissions_forgotten = len(state.submissions) >= RECENT_SUBMISSIONS_LOADED
        for row in loaded.promises:
            state.promise_row = row
            late = None if row.detail is None else PromiseException(row.detail)
            state.promise = Promise(row.job_id, row.promised_sched_s, row.start_by_sched_s, late)
        return state

    def index(self, job: Job) -> None:
        """Keep the small sets that a pass reads instead of all jobs."""
        for members, belongs in (
            (self.holding, job.holds_gpus),
            (self.delayed, is_timed(job)),
        ):
            if belongs:
                members.add(job.job_id)
            else:
                members.discard(job.job_id)
        self._index_wait(job)
        self.user_of[job.uid] = job.user

    def _index_wait(self, job: Job) -> None:
        before = self.awaited_by.pop(job.job_id, None)
        if before is not None:
            del self.awaiting[before][job.job_id]
            if not self.awaiting[before]:
                del self.awaiting[before]
        wait = job.environment
        # A held one waits for somebody first.
        if wait is not None and job.state is JobState.PENDING and job.hold is None:
            awaited = Awaited(job.uid, wait.place)
            self.awaiting.setdefault(awaited, {})[job.job_id] = wait.next_try_s
            self.awaited_by[job.job_id] = awaited

    def gpu_index_of(self) -> dict[GpuUuid, int]:
        """Display index of each GPU ever seen."""
        return {uuid: row.gpu_index for uuid, row in self.gpu_rows.items()}

    def rebuild_queues(self, now_s: float) -> None:
        """The queues of the last commit, after a batch that could not be written."""
        rows = [
            self.ages[job.job_id]
            for job in self.jobs.values()
            if job.job_id in self.ages and is_eligible(job, now_s)
        ]
        horizon = self.plan.horizon if self.plan is not None else None
        self.queues = Queues.restore(self.policy, rows, horizon)

    def holders(self) -> dict[tuple[JobId, int], int]:
        """The attempts that hold GPUs now, and as which uid they run."""
        held = map(self.jobs.__getitem__, self.holding)
        return {(job.job_id, job.attempt): job.uid for job in held if job.grants}

    def running(self) -> tuple[RunningJob, ...]:
        """The jobs that hold GPUs or a CPU slot, as the core sees them."""
        return tuple(_running(self.jobs[job_id]) for job_id in self.holding)


def _with_grace(job: Job, policy: Policy) -> Job:
    """The grace of an attempt from before it was kept: what it is as the daemon starts."""
    if not job.holds_gpus or job.decided_grace_s is not None:
        return job
    return replace(job, decided_grace_s=policy.kill_grace_s)


def waiting_for(job: Job, age: Age) -> Waiting:
    """A job and its age as the core's queue takes them."""
    return Waiting(
        job_id=job.job_id,
        uid=job.uid,
        user=job.user,
        request=job.request,
        eligible_since_s=age.eligible_since_s,
        submitted_at_s=job.submitted_sched_s,
        nice=job.nice,
        age_gained_s=age.age_gained_s,
        window_since_s=age.window_since_s,
        length_key=job.length_key or "",
        first_head=age.first_head,
    )


def age_of(waiting: Waiting) -> Age:
    """The part of a queue row that is kept."""
    return Age(
        waiting.eligible_since_s,
        waiting.age_gained_s,
        waiting.window_since_s,
        waiting.first_head,
    )


def _running(job: Job) -> RunningJob:
    assert job.decided_sched_s is not None
    return RunningJob(
        job_id=job.job_id,
        uid=job.uid,
        user=job.user,
        request=job.request,
        grants=job.grants,
        whole=job.whole,
        exclusive=job.request.exclusive,
        decided_at_s=job.decided_sched_s,
        started_at_s=job.started_sched_s,
        time_limit_s=job.request.time_limit_s,
        decided_limit_s=job.decided_limit_s,
        stuck=job.stuck,
        decided_grace_s=job.decided_grace_s,
        expected_s=job.decided_expected_s,
    )


def _seen_gpus(rows: tuple[GpuRow, ...]) -> tuple[Gpu, ...]:
    """GPUs of earlier days, for the judgement of what could ever run."""
    return tuple(
        Gpu(
            uuid=row.uuid,
            index=row.gpu_index,
            model=row.model,
            total_bytes=row.total_bytes,
            reserved_bytes=row.reserved_bytes,
            minor=row.minor,
            state=GpuState.LOST,
            is_slice=row.uuid.startswith("MIG-"),
        )
        for row in rows
        if row.total_bytes is not None
    )
