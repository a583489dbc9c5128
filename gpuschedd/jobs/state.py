"""What the controller keeps in memory, and the overlay in which a batch is tried before it is real.

State is as of the last commit. A Batch reads through to it; each command gets a child of its own,
so that a refused command leaves no trace. Nothing here does I/O.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gpusched_client.terms import EventKind, GpuUuid, JobId
from gpuschedd.config.keys import Config
from gpuschedd.core import admission
from gpuschedd.core.fairshare import Accounts
from gpuschedd.core.job import Job, JobEvent, advance
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
from gpuschedd.jobs.gates import is_eligible, is_timed
from gpuschedd.store.database import RECENT_SUBMISSIONS_MAX
from gpuschedd.store.records import (
    AccountRow,
    Age,
    AttemptEnd,
    AuditRow,
    Changes,
    Event,
    GpuRow,
    GpuUse,
    Loaded,
    Payload,
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
    submissions_forgotten: bool = False  # older ones are in the books only
    live_of: Counter[int] = field(default_factory=Counter)  # uid -> jobs that are not final
    user_of: dict[int, str] = field(default_factory=dict)  # login names of those with jobs
    holding: set[JobId] = field(default_factory=set)  # jobs that hold GPUs or a CPU slot
    delayed: set[JobId] = field(default_factory=set)  # jobs with a begin time or a back-off
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
        jobs = {job.job_id: job for job in loaded.jobs}
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
        )
        for job in loaded.jobs:
            state.index(job)
        state.inventory = admission.seen(state.inventory, _seen_gpus(loaded.gpus))
        for submission in loaded.submissions:
            state.submissions[(submission.uid, submission.submission_id)] = submission
        state.submissions_forgotten = len(state.submissions) >= RECENT_SUBMISSIONS_MAX
        for row in loaded.promises:
            state.promise_row = row
            state.promise = Promise(row.job_id, row.promised_sched_s, row.start_by_sched_s)
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
        self.user_of[job.uid] = job.user

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
    )


def age_of(waiting: Waiting) -> Age:
    """The part of a queue row that is kept."""
    return Age(waiting.eligible_since_s, waiting.age_gained_s, waiting.window_since_s)


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


class Batch:
    """Changes that are tried: reads fall through to the parent, and to the state beneath."""

    def __init__(self, state: State, now_s: float, wall_s: float, parent: Batch | None = None):
        self.state = state
        self.now_s = now_s
        self.wall_s = wall_s
        self._parent = parent
        self._jobs: dict[JobId, Job] = {}
        self._submissions: dict[tuple[int, str], Submission] = {}
        self._live_of: Counter[int] = Counter()
        self.payloads: dict[JobId, Payload] = {}
        self.rested: set[JobId] = set()  # jobs whose age begins anew
        self.voided: dict[JobId, PromiseException | None] = {}  # promises that end by a change
        self.events: list[Event] = []
        self.audits: list[AuditRow] = []
        self.gpu_rows: dict[GpuUuid, GpuRow] = {}
        self.gpu_uses: list[GpuUse] = []
        self.health: Mapping[GpuUuid, Remembered] | None = None
        self.accounts: dict[int, AccountRow] = {}
        self.attempts: list[AttemptEnd] = []
        self.next_job_id: int = parent.next_job_id if parent else state.next_job_id

    def child(self) -> Batch:
        """An overlay for one command."""
        return Batch(self.state, self.now_s, self.wall_s, self)

    def absorb(self, child: Batch) -> None:
        """Take over what a command that was not refused has changed."""
        self._jobs.update(child._jobs)
        self._submissions.update(child._submissions)
        self._live_of.update(child._live_of)
        self.payloads.update(child.payloads)
        self.rested |= child.rested
        self.voided |= child.voided
        self.events += child.events
        self.audits += child.audits
        self.gpu_rows.update(child.gpu_rows)
        self.gpu_uses += child.gpu_uses
        self.health = self.health if child.health is None else child.health
        self.accounts.update(child.accounts)
        self.attempts += child.attempts
        self.next_job_id = child.next_job_id

    def job(self, job_id: JobId) -> Job | None:
        """The job with the batch's changes; None when it is not live."""
        found = self._jobs.get(job_id)
        if found is not None:
            return found
        return self._parent.job(job_id) if self._parent else self.state.jobs.get(job_id)

    def gpu_row(self, uuid: GpuUuid) -> GpuRow | None:
        """A GPU's row with the batch's changes."""
        found = self.gpu_rows.get(uuid)
        if found is not None:
            return found
        return self._parent.gpu_row(uuid) if self._parent else self.state.gpu_rows.get(uuid)

    def live_jobs(self) -> Iterator[Job]:
        """Every live job with the batch's changes."""
        seen = set()
        level: Batch | None = self
        while level is not None:
            for job_id, job in level._jobs.items():
                if job_id not in seen:
                    seen.add(job_id)
                    yield job
            level = level._parent
        yield from (job for job_id, job in self.state.jobs.items() if job_id not in seen)

    def submission(self, uid: int, submission_id: str) -> Submission | None:
        """An earlier submission under this id, of this batch or before."""
        found = self._submissions.get((uid, submission_id))
        if found is not None:
            return found
        if self._parent:
            return self._parent.submission(uid, submission_id)
        return self.state.submissions.get((uid, submission_id))

    def live_count(self, uid: int) -> int:
        """A user's jobs that are not final."""
        below = self._parent.live_count(uid) if self._parent else self.state.live_of[uid]
        return below + self._live_of[uid]

    def live_total(self) -> int:
        """All jobs that are not final."""
        below = self._parent.live_total() if self._parent else len(self.state.jobs)
        return below + self._live_of.total()

    def take_job_id(self) -> JobId:
        """The next id; a refused command's ids are given again."""
        job_id = JobId(self.next_job_id)
        self.next_job_id += 1
        return job_id

    def add(self, job: Job, payload: Payload) -> None:
        """A new job."""
        self._jobs[job.job_id] = job
        self.payloads[job.job_id] = payload
        self._live_of[job.uid] += 1

    def remember(self, submission: Submission) -> None:
        """An idempotency key of this batch."""
        self._submissions[(submission.uid, submission.submission_id)] = submission

    def put(self, job: Job) -> None:
        """A changed job, in the same state."""
        before = self.job(job.job_id)
        assert before is not None
        assert before.state is job.state
        self._jobs[job.job_id] = job

    def advance(self, job: Job, event: JobEvent) -> Job:
        """Move a job through the table of states."""
        after = advance(job, event)
        if after.is_final:
            self._live_of[job.uid] -= 1
        self._jobs[job.job_id] = after
        return after

    def emit(self, kind: EventKind, job: Job | None = None, **data: object) -> None:
        """An event, for watchers, the log and the accounting database."""
        self.events.append(
            Event(
                kind=kind.value,
                at_s=self.wall_s,
                job_id=job.job_id if job else None,
                uid=job.uid if job else None,
                data=data,
            )
        )

    def changed_jobs(self) -> dict[JobId, Job]:
        """The jobs that this batch adds or changes."""
        return self._jobs

    def changed_submissions(self) -> list[Submission]:
        """The idempotency keys that this batch adds."""
        return list(self._submissions.values())

    def into(self, changes: Changes) -> None:
        """What of this batch is to be written."""
        changes.jobs.update(self._jobs)
        changes.payloads.update(self.payloads)
        changes.submissions += self.changed_submissions()
        changes.audits += self.audits
        changes.gpus.update(self.gpu_rows)
        changes.gpu_uses += self.gpu_uses
        changes.health = self.health
        changes.accounts.update(self.accounts)
        changes.attempts += self.attempts


def apply(state: State, batch: Batch) -> None:
    """Make a committed batch real."""
    for job_id, job in batch.changed_jobs().items():
        state.index(job)
        if job.is_final:
            state.jobs.pop(job_id, None)
            state.ages.pop(job_id, None)
        else:
            state.jobs[job_id] = job
    state.live_of.update(batch._live_of)
    for uid in batch._live_of:
        if state.live_of[uid] == 0:
            del state.live_of[uid]
            state.user_of.pop(uid, None)
    state.next_job_id = batch.next_job_id
    for submission in batch.changed_submissions():
        state.submissions[(submission.uid, submission.submission_id)] = submission
    while len(state.submissions) > RECENT_SUBMISSIONS_MAX:
        state.submissions.popitem(last=False)
        state.submissions_forgotten = True
    state.gpu_rows.update(batch.gpu_rows)
    state.health = state.health if batch.health is None else batch.health
