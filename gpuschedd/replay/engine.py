"""The virtual clock: applies all ends and submissions of one instant, then makes one pass.

Owns the event loop of a replay. All decisions are the core's; nothing here looks at the order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from gpusched_client.errors import GpuschedError
from gpusched_client.terms import JobId
from gpuschedd.core.admission import admit, seen
from gpuschedd.core.aftermath import running
from gpuschedd.core.fairshare import Accounts, charge_rate
from gpuschedd.core.lengths import Histories
from gpuschedd.core.model import (
    NEVER_S,
    Backfill,
    Gpu,
    Inventory,
    Kind,
    Order,
    Plan,
    Policy,
    Promise,
    PromiseEnd,
    QueueView,
    Request,
    Reservation,
    Run,
    RunningJob,
    Snapshot,
    Start,
    Waiting,
)
from gpuschedd.core.plan import plan
from gpuschedd.core.promises import becomes_promise_at_s
from gpuschedd.core.queues import Queues
from gpuschedd.core.snapshot import build_snapshot
from gpuschedd.core.timeline import Host
from gpuschedd.replay.workload import TraceJob


@dataclass(frozen=True, slots=True)
class Ran:
    """One job as it ran. `gpus`: indices, in the order of the grants."""

    job: TraceJob
    start_s: float
    end_s: float
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The outcome: `ran` in input order, None where a job was left out; promises by their end."""

    ran: tuple[Ran | None, ...]
    left_out: int
    passes: int
    promises: tuple[PromiseEnd, ...] = ()


@dataclass(slots=True)
class _State:
    queues: Queues
    host: Host
    accounts: Accounts | None  # None: nobody looks at usage
    histories: Histories = field(default_factory=Histories)
    running: dict[JobId, RunningJob] = field(default_factory=dict)
    ends: list[tuple[float, JobId]] = field(default_factory=list)
    promise: Promise | None = None
    reservation: Reservation | None = None
    due_s: float = NEVER_S  # when a pass is due though nothing happens


class Replay:
    """One workload on one host under one policy."""

    def __init__(
        self,
        jobs: Sequence[TraceJob],
        gpus: tuple[Gpu, ...],
        policy: Policy,
        shares: Mapping[str, float] | None = None,
        on_start: Callable[[int], None] | None = None,
    ) -> None:
        """`shares`: user -> share. `on_start` is told how many jobs started in each pass."""
        self._jobs = jobs
        self._gpus = gpus
        self._by_uuid = {gpu.uuid: gpu for gpu in gpus}
        self._policy = policy
        self._on_start = on_start
        self._uids: dict[str, int] = {}
        for job in jobs:
            self._uids.setdefault(job.user, len(self._uids))
        self._shares = {self._uids[u]: s for u, s in (shares or {}).items() if u in self._uids}
        self._requests, self._arrivals = self._admitted()
        self._ran: list[Ran | None] = [None] * len(jobs)
        self._ended: list[PromiseEnd] = []
        empty = Snapshot(0.0, gpus, (), QueueView(), {})
        accounts = None if policy.order is Order.FCFS else Accounts(policy)
        self._state = _State(Queues(policy), Host(empty, policy), accounts)
        self.plans: Callable[[Plan], None] | None = None

    def run(self) -> Replayed:
        """Until every job that can run has ended."""
        arrivals, at, passes = self._arrivals, 0, 0
        state = self._state
        while at < len(arrivals) or state.ends:
            next_submit_s = self._jobs[arrivals[at]].submit_s if at < len(arrivals) else NEVER_S
            next_end_s = state.ends[0][0] if state.ends else NEVER_S
            now_s = min(next_submit_s, next_end_s, state.due_s)
            new = at
            while at < len(arrivals) and self._jobs[arrivals[at]].submit_s <= now_s:
                at += 1
            # Whether it matters is asked of the queue as the last pass left it.
            idles = now_s < min(next_end_s, state.due_s) and self._only_queue_up(arrivals[new:at])
            self._end_jobs(now_s)
            for position in arrivals[new:at]:
                self._submit(position, now_s)
            if not idles:
                self._make_pass(now_s)
                passes += 1
        return Replayed(
            tuple(self._ran), len(self._jobs) - len(arrivals), passes, tuple(self._ended)
        )

    def _admitted(self) -> tuple[dict[int, Request], list[int]]:
        """The requests that this host could ever meet, and their positions by submission."""
        inventory = seen(Inventory(), self._gpus)
        known: dict[tuple[int, int | None, float | None], Request | None] = {}
        requests: dict[int, Request] = {}
        for position, job in enumerate(self._jobs):
            asked = (job.gpus, job.vram_bytes, job.limit_s)
            if asked not in known:
                known[asked] = self._admit(job, inventory)
            request = known[asked]
            if request is not None:
                requests[position] = request
        return requests, sorted(requests, key=lambda position: self._jobs[position].submit_s)

    def _admit(self, job: TraceJob, inventory: Inventory) -> Request | None:
        """Without its limit: a workload may have jobs of no length, which nobody could submit."""
        asked = Request(gpus=job.gpus, vram_bytes=job.vram_bytes)
        try:
            return replace(admit(asked, inventory, self._policy).request, time_limit_s=job.limit_s)
        except GpuschedError:
            return None

    def _submit(self, position: int, now_s: float) -> None:
        job = self._jobs[position]
        waiting = Waiting(
            job_id=JobId(position),
            uid=self._uids[job.user],
            user=job.user,
            request=self._requests[position],
            eligible_since_s=job.submit_s,
            submitted_at_s=job.submit_s,
            length_key=job.command,
        )
        self._state.queues.insert(waiting, now_s)

    def _only_queue_up(self, arrivals: Sequence[int]) -> bool:
        """True if a pass could start nothing though these have come, and nothing else happened.

        While nothing ends, what could not start cannot later on: less and less ends by the same T.
        That holds while the head stays the same, as it does where jobs are taken in order of
        arrival, or where it has a promise.
        """
        state, policy = self._state, self._policy
        held = state.reservation
        if policy.backfill is Backfill.OFF and policy.order is Order.FCFS:
            return len(state.queues) > 0
        if held is None or held.guessed or not (held.promised or policy.order is Order.FCFS):
            return False
        idle, asked = len(state.host.idle()), (self._requests[one] for one in arrivals)
        return all(request.whole and request.gpus > idle for request in asked)

    def _end_jobs(self, now_s: float) -> None:
        ends = self._state.ends
        while ends and ends[0][0] <= now_s:
            _end_s, job_id = heappop(ends)
            gone = self._state.running.pop(job_id)
            if self._policy.learn_lengths:
                self._learn(gone, now_s)
            self._state.host.leave(gone)
            if self._state.accounts is not None:
                self._state.accounts.set_rate(gone.uid, job_id, 0.0, now_s)

    def _learn(self, gone: RunningJob, now_s: float) -> None:
        """All end by themselves or at their limit, so each run counts."""
        self._state.histories.forget(now_s)
        kind = Kind(self._jobs[gone.job_id].command, gone.request.gpus)
        self._state.histories.note(gone.uid, kind, Run(now_s, now_s - gone.decided_at_s))

    def _make_pass(self, now_s: float) -> None:
        state = self._state
        snapshot = build_snapshot(
            now_s=now_s,
            gpus=self._gpus,
            running=state.running.values(),
            queues=state.queues.view(),
            accounts=state.accounts,
            shares=self._shares,
            promise=state.promise,
            reservation=state.reservation,
            lengths=state.histories.view(),
        )
        state.host.go_to(now_s)
        made = plan(snapshot, self._policy, explain=-1, host=state.host)
        if self.plans is not None:
            self.plans(made)
        for start in made.starts:
            self._start(start, now_s)
        state.queues.settle(made.horizon, now_s)
        state.queues.note_heads(made.first_heads)
        state.promise, state.reservation = made.promise, made.reservation
        state.due_s = self._due_s(made)
        if made.ended is not None:
            self._ended.append(made.ended)
        if made.starts and self._on_start is not None:
            self._on_start(len(made.starts))

    def _due_s(self, made: Plan) -> float:
        held = made.reservation
        if held is None or held.promised:
            return NEVER_S
        if held.guessed:
            return made.next_change_at_s or NEVER_S
        head = self._state.queues.get(held.job_id)
        assert head is not None
        due_s = becomes_promise_at_s(head, held.start_s, made.now_s, self._policy)
        return NEVER_S if due_s is None or due_s <= made.now_s else due_s

    def _start(self, start: Start, now_s: float) -> None:
        state, position = self._state, int(start.job_id)
        waiting = state.queues.remove(start.job_id, now_s)[0]
        job = self._jobs[position]
        state.running[start.job_id] = running(start, waiting, now_s, started_at_s=now_s)
        if state.accounts is not None:
            rate = charge_rate(start.grants, self._by_uuid, whole=start.whole, policy=self._policy)
            state.accounts.set_rate(start.uid, start.job_id, rate, now_s)
        end_s = now_s + job.lasts_s
        heappush(state.ends, (end_s, start.job_id))
        indices = tuple(self._by_uuid[grant.uuid].index for grant in start.grants)
        self._ran[position] = Ran(job, now_s, end_s, indices)
