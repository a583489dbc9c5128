"""Builders for the tests of the core: GPUs, jobs, and a small host that obeys every plan.

`Sim` is the controller in miniature: virtual time, true ends chosen by the test, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpusched_client.terms import GpuUuid, JobId
from gpuschedd.core import aftermath, lengths
from gpuschedd.core.fairshare import Accounts, charge_rate
from gpuschedd.core.lengths import Histories
from gpuschedd.core.model import (
    GIB,
    NEVER_S,
    FirstHead,
    Gpu,
    Grant,
    Kind,
    Plan,
    Policy,
    Promise,
    PromiseEnd,
    Request,
    Reservation,
    Run,
    RunningJob,
    Snapshot,
    UserLimit,
    Waiting,
)
from gpuschedd.core.plan import plan
from gpuschedd.core.queues import Queues, rested
from gpuschedd.core.snapshot import build_snapshot

EXACT = Policy(kill_grace_s=0.0, launch_allowance_s=0.0, promise_slack_s=0.0)
CARD_BYTES = 80 * GIB
MARGIN = Policy().margin_bytes


def uuid(index: int) -> GpuUuid:
    """The id of the GPU with that index."""
    return GpuUuid(f"GPU-{index}")


def gpu(index: int, **changes: Any) -> Gpu:
    """An idle 80 GiB card."""
    return replace(Gpu(uuid(index), index, "sim", CARD_BYTES), **changes)


def gpus(count: int) -> tuple[Gpu, ...]:
    """So many idle cards."""
    return tuple(gpu(index) for index in range(count))


def waiting(
    job_id: int,
    gpus: int = 1,
    *,
    limit_s: float | None = 3600.0,
    vram: int | None = None,
    uid: int = 1,
    since_s: float = 0.0,
    **changes: Any,
) -> Waiting:
    """A job of user `u<uid>`; further changes go to the request where it has that field."""
    request = Request(gpus=gpus, vram_bytes=vram, time_limit_s=limit_s)
    own = {name: changes.pop(name) for name in list(changes) if name in Request.__slots__}
    job = Waiting(JobId(job_id), uid, f"u{uid}", replace(request, **own), since_s, since_s)
    return replace(job, **changes)


def running(
    job_id: int,
    on: Iterable[int],
    *,
    limit_s: float | None = 3600.0,
    vram: int | None = None,
    decided_s: float = 0.0,
    uid: int = 9,
    **changes: Any,
) -> RunningJob:
    """A job that has been on these GPUs since decided_s, started at once."""
    held = CARD_BYTES if vram is None else vram + MARGIN
    grants = tuple(Grant(uuid(index), held, held) for index in on)
    job = RunningJob(
        job_id=JobId(job_id),
        uid=uid,
        user=f"u{uid}",
        request=Request(len(grants), vram, time_limit_s=limit_s),
        grants=grants,
        whole=vram is None,
        exclusive=False,
        decided_at_s=decided_s,
        started_at_s=decided_s,
        time_limit_s=limit_s,
        decided_limit_s=limit_s,
    )
    return replace(job, **changes)


def snapshot_of(
    cards: Sequence[Gpu],
    running_jobs: Iterable[RunningJob] = (),
    pending: Iterable[Waiting] = (),
    *,
    now_s: float = 0.0,
    policy: Policy = EXACT,
    usage: dict[int, float] | None = None,
    **more: Any,
) -> Snapshot:
    """A snapshot of jobs that were inserted one after the other; `usage`: uid -> GPU-seconds."""
    queues = Queues(policy)
    for job in pending:
        queues.insert(job, job.eligible_since_s)
    accounts = Accounts.restore(
        policy, [_row(uid, used, now_s) for uid, used in (usage or {}).items()]
    )
    return build_snapshot(
        now_s=now_s,
        gpus=cards,
        running=running_jobs,
        queues=queues.view(),
        accounts=accounts,
        **more,
    )


def _row(uid: int, used: float, now_s: float) -> Any:
    from gpuschedd.core.fairshare import AccountRow

    return AccountRow(uid, used, now_s)


@dataclass
class Sim:
    """A host that obeys plans. `lasts_s` of a job is chosen at its submission.

    `timely`: passes are made when a plan asks for one, too, not only when something happens.
    """

    cards: tuple[Gpu, ...]
    policy: Policy = EXACT
    shares: dict[int, float] = field(default_factory=dict)
    limits: dict[int, UserLimit] = field(default_factory=dict)
    now_s: float = 0.0
    timely: bool = False

    def __post_init__(self) -> None:
        self.queues = Queues(self.policy)
        self.accounts = Accounts(self.policy)
        self.histories = Histories()
        self.keys: dict[JobId, str] = {}  # by which the runs of a job are told from others
        self.first_heads: dict[JobId, FirstHead] = {}
        self.running: dict[JobId, RunningJob] = {}
        self.lasts_s: dict[JobId, float] = {}
        self.started_s: dict[JobId, float] = {}
        self.ended_s: dict[JobId, float] = {}
        self.promise: Promise | None = None
        self.reservation: Reservation | None = None
        self.promised: list[Promise] = []
        self.promise_ends: list[PromiseEnd] = []
        self.last: Plan | None = None
        self.on_plan: Callable[[Snapshot, Plan], None] | None = None

    def submit(self, job: Waiting, lasts_s: float | None = None) -> None:
        """A job arrives now. It lasts its limit where nothing is said."""
        limit_s = job.request.time_limit_s
        self.lasts_s[job.job_id] = lasts_s if lasts_s is not None else (limit_s or 1e18)
        self.keys[job.job_id] = job.length_key
        self.queues.insert(rested(replace(job, submitted_at_s=self.now_s), self.now_s), self.now_s)

    def snapshot(self) -> Snapshot:
        """What a pass made now would look at."""
        return build_snapshot(
            now_s=self.now_s,
            gpus=self.cards,
            running=self.running.values(),
            queues=self.queues.view(),
            accounts=self.accounts,
            shares=self.shares,
            limits=self.limits,
            promise=self.promise,
            reservation=self.reservation,
            lengths=self.histories.view(),
        )

    def make_pass(self) -> Plan:
        """One pass, applied."""
        seen = self.snapshot()
        made = plan(seen, self.policy)
        if self.on_plan is not None:
            self.on_plan(seen, made)
        for start in made.starts:
            job = self.queues.remove(start.job_id, self.now_s)[0]
            self.running[start.job_id] = aftermath.running(
                start, job, self.now_s, started_at_s=self.now_s
            )
            self.started_s[start.job_id] = self.now_s
            rate = charge_rate(
                start.grants,
                {card.uuid: card for card in self.cards},
                whole=start.whole,
                policy=self.policy,
            )
            self.accounts.set_rate(job.uid, start.job_id, rate, self.now_s)
        self.queues.settle(made.horizon, self.now_s)
        self.queues.note_heads(made.first_heads)
        self.first_heads |= made.first_heads
        if made.promise is not None and made.promise != self.promise:
            self.promised.append(made.promise)
        if made.ended is not None:
            self.promise_ends.append(made.ended)
        self.promise, self.reservation, self.last = made.promise, made.reservation, made
        return made

    def end(self, job_id: JobId) -> None:
        """A job ends now, by itself; what it shows of such jobs is kept."""
        job = self.running.pop(job_id)
        self.accounts.set_rate(job.uid, job_id, 0.0, self.now_s)
        self.ended_s[job_id] = self.now_s
        ran_s = self.now_s - self.started_s[job_id]
        if lengths.counts(ran_s, job.expected_s or 0.0, by_itself=True, failed=False):
            kind = Kind(self.keys[job_id], job.request.gpus)
            self.histories.note(job.uid, kind, Run(self.now_s, ran_s))

    def next_end_s(self) -> float:
        """When the next running job truly ends."""
        return min(
            (self.started_s[job_id] + self.lasts_s[job_id] for job_id in self.running),
            default=NEVER_S,
        )

    def next_step_s(self) -> float:
        """When the next pass is due though nobody submits."""
        asked_s = self.last.next_change_at_s if self.timely and self.last is not None else None
        return min(self.next_end_s(), NEVER_S if asked_s is None else asked_s)

    def go_to(self, until_s: float) -> None:
        """Let time pass: all ends of one instant, then a pass; a pass at until_s as well."""
        while (step_s := self.next_step_s()) <= until_s:
            self.now_s = step_s
            ends = [
                job_id
                for job_id in self.running
                if self.started_s[job_id] + self.lasts_s[job_id] <= step_s
            ]
            for job_id in ends:
                self.end(job_id)
            self.make_pass()
        self.now_s = until_s
        self.make_pass()
