"""The one loop that changes job state.

All waiting commands are taken together, each judged in arrival order against memory and the batch's
earlier changes, written in one transaction by the database thread, and only after COMMIT made real:
applied, answered, acted on, published. One batch is in flight at a time. A pass of the planner is a
batch of its own, made when something that it looks at has changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from gpusched_client.errors import GpuschedError, Internal, StorageError, Unavailable
from gpusched_client.terms import EventKind, JobId, JobState
from gpuschedd.config.keys import Config
from gpuschedd.core import fairshare
from gpuschedd.core.fairshare import charge_rate, share_of
from gpuschedd.core.job import Job, Placed
from gpuschedd.core.model import (
    Gpu,
    Plan,
    Promise,
    PromiseEnd,
    PromiseOutcome,
    QueueView,
    Snapshot,
    Standing,
    Start,
    UserLimit,
    UserQueue,
    Waiting,
)
from gpuschedd.core.plan import plan as make_plan
from gpuschedd.core.queues import rested
from gpuschedd.core.snapshot import build_snapshot
from gpuschedd.core.timeline import is_stuck
from gpuschedd.jobs import gates, holds
from gpuschedd.jobs.gates import is_eligible
from gpuschedd.jobs.state import Batch, State, age_of, apply, policy_of, waiting_for
from gpuschedd.store.database import Store, StoreBroken, StoreFull
from gpuschedd.store.records import AccountRow, Age, Changes, Event, PromiseRow
from gpuschedd.system.clock import SchedulerClock

log = logging.getLogger(__name__)

BATCH_COMMANDS_MAX = 1_000
QUEUE_COMMANDS_MAX = 20_000
STORAGE_RETRY_S = 1.0
CLOSED_RETRY_S = 5.0  # between two looks whether the host lets users in again
WARNED_PART = 0.9  # of a time limit: then watchers and the log hear of it
PROMISE_NEWS_S = 1.0  # a promise that moves forward by less is no event

Evaluate = Callable[[Batch], Any]


@dataclass(slots=True)
class Command:
    """Something that may change state. Without `reply` it is the daemon's own and never dropped."""

    evaluate: Evaluate
    reply: asyncio.Future[Any] | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One job before and after a committed batch; `before` None: it is new."""

    before: Job | None
    after: Job


@dataclass(frozen=True, slots=True)
class Committed:
    """What a committed batch changed, for those who act on it."""

    changes: tuple[Change, ...]
    events: tuple[tuple[int, Event], ...]  # with their ids


class Controller:
    """Owner of State. Everybody else reads it, or sends a command."""

    def __init__(
        self,
        store: Store,
        state: State,
        clock: SchedulerClock,
        groups_of: Callable[[str], tuple[str, ...]],
        probe: Callable[[], None],
        last_event_id: int = 0,
        closed_by: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`probe` writes and removes a file in the state directory, or raises OSError.

        `closed_by` says what closes the host to users.
        """
        self.state = state
        self.clock = clock
        self._store = store
        self._groups_of = groups_of
        self._probe = probe
        self._closed_by = closed_by
        self.last_event_id = last_event_id
        self._probing: asyncio.Future[None] | None = None
        self._commands: list[Command] = []
        self._wake = asyncio.Event()
        self._dirty = True
        self._knows_gpus = True
        self._timer: asyncio.TimerHandle | None = None
        self._storage_timer: asyncio.TimerHandle | None = None
        self._stopping = False
        self._broken: StoreBroken | None = None
        self._database = ThreadPoolExecutor(1, thread_name_prefix="database")
        self._account_rows: dict[int, AccountRow] = {}
        self._rates: dict[JobId, float] = {}
        self.on_commit: list[Callable[[Committed], None]] = []
        self.counters = {"batches": 0, "commands": 0, "passes": 0, "starts": 0, "storage_full": 0}
        self.pass_s_last = 0.0

    # --- commands -----------------------------------------------------------------------------

    async def ask(self, evaluate: Evaluate) -> Any:
        """A client's command: its result, after it is durable. Raises GpuschedError."""
        if self._stopping:
            raise Unavailable("the daemon is stopping; try again in a moment")
        if len(self._commands) >= QUEUE_COMMANDS_MAX:
            raise Unavailable(f"{len(self._commands)} commands wait already; try again in a moment")
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._commands.append(Command(evaluate, reply))
        self._wake.set()
        return await reply

    def tell(self, evaluate: Evaluate) -> None:
        """The daemon's own command: kept until it is durable."""
        self._commands.append(Command(evaluate))
        self._wake.set()

    def poke(self) -> None:
        """Something that a pass looks at has changed."""
        self._dirty = True
        self._wake.set()

    def await_gpus(self) -> None:
        """Make no pass before `gpus_known`: one that sees no GPU would end the live promise."""
        self._knows_gpus = False

    def gpus_known(self) -> None:
        """The GPUs were looked at, or cannot be: plan with what there is."""
        self._knows_gpus = True
        self.poke()

    async def in_database(self, work: Callable[[Store], Any]) -> Any:
        """Run something with the writing connection, between batches.

        Whoever asked: after StoreBroken no later commit can be trusted, so `run` ends with it.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._database, self._while_whole, work
            )
        except StoreBroken:
            self._wake.set()
            raise

    def _while_whole(self, work: Callable[[Store], Any]) -> Any:
        """In the database thread, where one thing comes after the other."""
        if self._broken is not None:
            raise self._broken
        try:
            return work(self._store)
        except StoreBroken as broken:
            self._broken = broken
            raise

    # --- the loop -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Take, judge, commit, act; until `stop`. StoreBroken: the disk cannot be trusted."""
        while not self._stopping:
            await self._wake.wait()
            self._wake.clear()
            if self._broken is not None:
                raise self._broken
            while self._commands and not self._stopping:
                if not await self._run_batch():
                    break
            if self._dirty and self._knows_gpus and not self._stopping:
                self._dirty = False
                await self._run_pass()

    async def stop(self) -> None:
        """Take no more commands; those that wait are refused and can be sent again."""
        self._stopping = True
        self._wake.set()
        for timer in (self._timer, self._storage_timer):
            if timer is not None:
                timer.cancel()
        for command in self._commands:
            if command.reply is not None and not command.reply.done():
                command.reply.set_exception(Unavailable("the daemon is stopping; try again"))
        self._commands.clear()

    def close(self) -> None:
        """After `run` has ended: finish the database thread and close the database."""
        self._database.shutdown(wait=True)
        self._store.close()

    async def _run_batch(self) -> bool:
        """One batch. False: there was no room for it, so the rest waits too."""
        commands = self._commands[:BATCH_COMMANDS_MAX]
        del self._commands[:BATCH_COMMANDS_MAX]
        batch = self.new_batch()
        results: list[tuple[Command, Any]] = []
        for command in commands:
            results.append((command, self._judge(batch, command)))
        self.counters["batches"] += 1
        self.counters["commands"] += len(commands)
        voided = self._voided_rows(batch)
        try:
            await self._commit(batch, voided)
        except StoreFull as full:
            self._refuse_full([command for command, _ in results], full)
            return False
        if voided:
            self.state.promise = self.state.promise_row = None
        for command, result in results:
            _answer(command, result)
        return True

    def _voided_rows(self, batch: Batch) -> list[PromiseRow]:
        """The promise's end, where its holder was changed by more than name or a shorter limit."""
        promise = self.state.promise
        if promise is None or promise.job_id not in batch.voided:
            return []
        exception = batch.voided[promise.job_id]
        outcome = PromiseOutcome.WITHDRAWN if exception is None else PromiseOutcome.LOST
        return [self._ended_row(batch, PromiseEnd(promise, outcome, exception, batch.now_s))]

    def _judge(self, batch: Batch, command: Command) -> Any:
        """The command's result, or the error that refused it; a refused one leaves no trace."""
        child = batch.child()
        try:
            result = command.evaluate(child)
        except GpuschedError as error:
            return error
        except Exception as error:
            log.exception("command_failed")
            return Internal(f"a bug in gpuschedd: {type(error).__name__}; its log has more")
        batch.absorb(child)
        return result

    def _refuse_full(self, commands: list[Command], full: StoreFull) -> None:
        """No room: clients hear it at once, the daemon's own commands wait for room."""
        own = [command for command in commands if command.reply is None]
        for command in commands:
            if command.reply is not None:
                _answer(command, storage_error(full))
        self._commands[:0] = own
        self._note_full(full)

    def _note_full(self, full: StoreFull) -> None:
        self.counters["storage_full"] += 1
        self.block_storage(str(full))

    def block_storage(self, why: str) -> None:
        """Launch nothing until a probe file can be written; look for room again soon."""
        if self.state.storage_blocked is None:
            log.warning("storage_blocked error=%s", why)
            self.poke()
        self.state.storage_blocked = why
        if self._storage_timer is None:
            loop = asyncio.get_running_loop()
            self._storage_timer = loop.call_later(STORAGE_RETRY_S, self._start_probe)

    def _start_probe(self) -> None:
        self._probing = asyncio.ensure_future(self._probe_storage())

    async def _probe_storage(self) -> None:
        """Room again: what waits is tried again. Else look again later."""
        self._storage_timer = None
        try:
            await asyncio.get_running_loop().run_in_executor(self._database, self._probe)
        except OSError as error:
            self.block_storage(str(error))
            return
        self.state.storage_blocked = None
        log.info("storage_writable")
        self.poke()

    # --- commit -------------------------------------------------------------------------------

    def new_batch(self) -> Batch:
        """An empty overlay, as of now."""
        return Batch(self.state, self.clock.now_s(), self.clock.wall_s())

    async def _commit(
        self, batch: Batch, promises: Iterable[PromiseRow] = (), settle: Plan | None = None
    ) -> None:
        """Write the batch, then make it real. StoreFull leaves memory as it was."""
        changes = Changes(mark=self.clock.mark(), gpu_index_of=self.state.gpu_index_of())
        batch.into(changes)
        numbered = tuple(enumerate(batch.events, start=self.last_event_id + 1))
        changes.events += numbered
        changes.promises.update({(row.job_id, row.promised_sched_s): row for row in promises})
        ages, rates = self._follow(batch, settle)
        changes.ages.update(
            {job_id: None if row is None else age_of(row) for job_id, row in ages.items()}
        )
        changes.accounts.update(rates)
        if changes.is_empty:
            return
        try:
            await self.in_database(lambda store: store.commit(changes))
        except StoreFull:
            self._unfollow(batch.now_s)
            raise
        self.last_event_id += len(numbered)
        self._apply(batch, ages, rates, numbered)

    def _apply(
        self,
        batch: Batch,
        ages: dict[JobId, Waiting | None],
        rates: dict[int, AccountRow],
        events: tuple[tuple[int, Event], ...],
    ) -> None:
        pairs = tuple(
            Change(self.state.jobs.get(job_id), after)
            for job_id, after in batch.changed_jobs().items()
        )
        apply(self.state, batch)
        for job_id, row in ages.items():
            if row is None or job_id not in self.state.jobs:
                self.state.ages.pop(job_id, None)
            else:
                self.state.ages[job_id] = row
        self._account_rows.update(rates)
        if pairs:
            self._dirty = True
            self._wake.set()
        committed = Committed(pairs, events)
        for listen in self.on_commit:
            listen(committed)

    def _follow(
        self, batch: Batch, settle: Plan | None
    ) -> tuple[dict[JobId, Waiting | None], dict[int, AccountRow]]:
        """Move queues and accounts along with the batch's jobs; the rows that changed."""
        ages: dict[JobId, Waiting | None] = {}
        rates: dict[int, AccountRow] = {}
        for job_id, job in batch.changed_jobs().items():
            for row in self._follow_queue(batch, job):
                ages[row.job_id] = row
            if job.is_final:
                ages[job_id] = None
            account = self._follow_account(batch, job)
            if account is not None:
                rates[job.uid] = account
        if settle is not None:
            for row in self.state.queues.settle(settle.horizon, batch.now_s):
                ages[row.job_id] = row
        return ages, rates

    def _follow_queue(self, batch: Batch, job: Job) -> tuple[Waiting, ...]:
        queues, now_s = self.state.queues, batch.now_s
        present = queues.get(job.job_id)
        if not is_eligible(job, now_s):
            return queues.remove(job.job_id, now_s) if present is not None else ()
        if present is not None:
            row = replace(present, request=job.request, nice=job.nice)
            if job.job_id in batch.rested:
                row = rested(row, now_s)
            return queues.update(row, now_s) if row != present else ()
        row = self.state.ages.get(job.job_id) or waiting_for(job, Age(now_s, 0.0, None))
        row = replace(row, request=job.request, nice=job.nice)
        if job.job_id in batch.rested:
            row = rested(row, now_s)
        return queues.insert(row, now_s)

    def _follow_account(self, batch: Batch, job: Job) -> AccountRow | None:
        """The owner's account, if what the job is charged has changed."""
        rate = self._rate_of(job)
        if rate == self._rates.get(job.job_id, 0.0):
            return None
        if rate > 0:
            self._rates[job.job_id] = rate
        else:
            self._rates.pop(job.job_id, None)
        row = self.state.accounts.set_rate(job.uid, job.job_id, rate, batch.now_s)
        running = sum(
            self._rates.get(other, 0.0)
            for other in self.state.holding
            if other != job.job_id and self.state.jobs[other].uid == job.uid
        )
        return AccountRow(
            job.uid, job.user, row.usage_gpu_s, running + rate, row.as_of_s, batch.wall_s
        )

    def _rate_of(self, job: Job) -> float:
        if not job.holds_gpus or not job.grants or job.stuck:
            return 0.0
        known = {gpu.uuid: gpu for gpu in self.state.gpus}
        return charge_rate(job.grants, known, whole=job.whole, policy=self.state.policy)

    def _follow_policy(self, batch: Batch) -> None:
        """Queues and accounts by another policy; what was used so far stays as it was charged."""
        usages = {uid: self.state.accounts.usage(uid, batch.now_s) for uid in self._account_rows}
        self._account_rows = {
            uid: replace(row, usage_gpu_s=usages[uid], at_sched_s=batch.now_s, at_s=batch.wall_s)
            for uid, row in self._account_rows.items()
        }
        self._unfollow(batch.now_s)
        rates: dict[int, float] = defaultdict(float)
        for job_id, rate in self._rates.items():
            rates[self.state.jobs[job_id].uid] += rate
        self._account_rows = {
            uid: replace(row, rate=rates[uid]) for uid, row in self._account_rows.items()
        }
        batch.accounts.update(self._account_rows)

    def _unfollow(self, now_s: float) -> None:
        """Queues and accounts as of the last commit."""
        self.state.rebuild_queues(now_s)
        self.restore_accounts(self._account_rows.values())

    def restore_accounts(self, rows: Iterable[AccountRow]) -> None:
        """Accounts from rows, with the rates of the jobs that hold GPUs."""
        self._account_rows = {row.uid: row for row in rows}
        accounts = fairshare.Accounts.restore(
            self.state.policy,
            [
                fairshare.AccountRow(row.uid, row.usage_gpu_s, row.at_sched_s)
                for row in self._account_rows.values()
            ],
        )
        self._rates = {}
        for job in map(self.state.jobs.__getitem__, self.state.holding):
            rate = self._rate_of(job)
            if rate > 0:
                self._rates[job.job_id] = rate
                accounts.resume_rate(
                    job.uid, job.job_id, rate, job.decided_sched_s or self.clock.now_s()
                )
        self.state.accounts = accounts

    # --- the pass -----------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Everything one pass looks at, now."""
        state = self.state
        shares = {
            uid: share_of(user, self._groups_named(user), state.policy)
            for uid, user in state.user_of.items()
        }
        limits = {uid: self.limit_of(user) for uid, user in state.user_of.items()}
        return build_snapshot(
            now_s=self.clock.now_s(),
            gpus=state.gpus,
            running=state.running(),
            queues=state.queues.view(),
            accounts=state.accounts,
            shares=shares,
            limits=limits,
            promise=state.promise,
            reservation=state.reservation,
        )

    def _groups_named(self, user: str) -> tuple[str, ...]:
        """The user's groups, where the configuration names any."""
        return self._groups_of(user) if self.state.config.names_groups else ()

    def limit_of(self, user: str) -> UserLimit:
        """What the user's running jobs may hold together."""
        own = self.state.config.limits.of(user, self._groups_named(user))
        return UserLimit(max_gpus=own.max_gpus, max_jobs=own.max_jobs)

    async def _run_pass(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self._wake_waiting()
        snapshot = self.snapshot()
        made = make_plan(snapshot, self.state.policy)
        self.pass_s_last = loop.time() - began_s
        self.counters["passes"] += 1
        # As of the snapshot: a start decided even a moment later would end past what was planned.
        batch = Batch(self.state, snapshot.now_s, self.clock.to_wall_s(snapshot.now_s))
        self._see_whether_closed()
        blocked = gates.host_blocked_by(self.state) is not None
        if blocked:
            # Nothing starts, so no promise is kept or broken by a start either.
            made = replace(made, starts=(), promise=self.state.promise, ended=None)
        else:
            for start in made.starts:
                self._place(batch, start)
        self._mark_stuck(batch, snapshot)
        self._warn_of_limits(batch)
        rows = self._promise_rows(batch, made)
        try:
            await self._commit(batch, rows, settle=None if blocked else made)
        except StoreFull as full:
            self._note_full(full)
            return
        self._adopt_plan(made, rows)
        self.counters["starts"] += len(made.starts)
        self._set_timer(made)

    def _see_whether_closed(self) -> None:
        """As of this pass: jobs that were started now would all fail at their account."""
        closed = self._closed_by()
        if closed is not None and self.state.host_closed is None:
            log.warning("host_closed text=no job starts until this has ended: %s", closed)
        elif closed is None and self.state.host_closed is not None:
            log.info("host_open")
        self.state.host_closed = closed

    def _place(self, batch: Batch, start: Start) -> None:
        job = batch.job(start.job_id)
        assert job is not None
        index_of = self.state.gpu_index_of()
        grants = tuple(
            sorted(start.grants, key=lambda grant: (index_of.get(grant.uuid, -1), grant.uuid))
        )
        placed = batch.advance(job, Placed(grants, start.whole, batch.now_s))
        batch.emit(
            EventKind.JOB_PLACED, placed, gpus=[index_of.get(grant.uuid, -1) for grant in grants]
        )

    def _mark_stuck(self, batch: Batch, snapshot: Snapshot) -> None:
        """Jobs far past their planned end leave the timeline, on record."""
        for running in snapshot.running:
            if running.stuck or not is_stuck(running, snapshot.now_s, self.state.policy):
                continue
            job = batch.job(running.job_id)
            if job is not None and job.holds_gpus:
                batch.put(replace(job, stuck=True))
                batch.emit(EventKind.JOB_STUCK, job)

    def _warn_of_limits(self, batch: Batch) -> None:
        """Say once, for each limit, that most of it has passed."""
        for job_id in self.state.holding:
            job = batch.job(job_id)
            at_s = None if job is None else _warning_at_s(job)
            if job is not None and at_s is not None and batch.now_s >= at_s:
                limit_s = job.request.time_limit_s
                batch.put(replace(job, warned_limit_s=limit_s))
                batch.emit(
                    EventKind.JOB_NEAR_LIMIT, job, limit=f"{limit_s:.0f} s", used=WARNED_PART
                )

    def _promise_rows(self, batch: Batch, made: Plan) -> list[PromiseRow]:
        """The promise that this pass makes, moves or ends, as rows and events."""
        rows: list[PromiseRow] = []
        if made.ended is not None:
            rows.append(self._ended_row(batch, made.ended))
        promise = made.promise
        if promise is not None and promise != self.state.promise:
            rows.append(
                PromiseRow(
                    job_id=promise.job_id,
                    promised_at_s=self.clock.to_wall_s(promise.promised_at_s),
                    promised_sched_s=promise.promised_at_s,
                    start_by_s=self.clock.to_wall_s(promise.start_by_s),
                    start_by_sched_s=promise.start_by_s,
                    detail=promise.delayed_by and str(promise.delayed_by),
                )
            )
            job = batch.job(promise.job_id)
            if job is not None and _is_news(promise, self.state.promise):
                batch.emit(EventKind.START_PROMISED, job, start_by_s=rows[-1].start_by_s)
        return rows

    def _ended_row(self, batch: Batch, ended: PromiseEnd) -> PromiseRow:
        promise = ended.promise
        wall_s = self.clock.to_wall_s(ended.at_s)
        job = batch.job(promise.job_id)
        batch.emit(
            EventKind.PROMISE_ENDED,
            job,
            outcome=str(ended.outcome),
            exception=ended.exception and str(ended.exception),
        )
        kept = self.state.promise_row
        return PromiseRow(
            job_id=promise.job_id,
            promised_at_s=kept.promised_at_s
            if kept
            else self.clock.to_wall_s(promise.promised_at_s),
            promised_sched_s=promise.promised_at_s,
            start_by_s=kept.start_by_s if kept else self.clock.to_wall_s(promise.start_by_s),
            start_by_sched_s=promise.start_by_s,
            outcome=str(ended.outcome),
            outcome_at_s=wall_s,
            started_at_s=wall_s if job is not None and job.holds_gpus else None,
            detail=ended.exception and str(ended.exception),
        )

    def _adopt_plan(self, made: Plan, rows: list[PromiseRow]) -> None:
        state = self.state
        state.plan = made
        state.promise = made.promise
        state.reservation = made.reservation
        open_rows = [row for row in rows if row.outcome is None]
        if made.promise is None:
            state.promise_row = None
        elif open_rows:
            state.promise_row = open_rows[-1]

    def _wake_waiting(self) -> None:
        """Jobs whose back-off or begin time has passed become eligible."""
        now_s = self.clock.now_s()
        due = [
            self.state.jobs[job_id]
            for job_id in self.state.delayed
            if is_eligible(self.state.jobs[job_id], now_s)
        ]
        if due:
            self.tell(lambda batch: _touch(batch, due))

    def _set_timer(self, made: Plan) -> None:
        """The next time at which something changes by itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [made.next_change_at_s] if made.next_change_at_s is not None else []
        if self.state.host_closed is not None:
            times.append(self.clock.now_s() + CLOSED_RETRY_S)
        for job_id in self.state.delayed:
            times += gates.opening_times_s(self.state.jobs[job_id])
        warnings = (_warning_at_s(self.state.jobs[job_id]) for job_id in self.state.holding)
        times += [at_s for at_s in warnings if at_s is not None]
        if times:
            delay_s = max(0.01, min(times) - self.clock.now_s())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.poke)

    def hold_by_config(self) -> None:
        """Hold the jobs of users whom the configuration bars, release those it bars no more."""
        allowed = self.state.config.jobs.users

        def allows(user: str) -> bool:
            return holds.is_allowed(user, self._groups_named(user), allowed)

        self.tell(lambda batch: holds.follow_config(batch, allows))

    def reconfigure(self, config: Config) -> None:
        """A new configuration: policy, queues, accounts and holds follow."""
        self.state.config = config
        self.state.policy = policy_of(config)
        # As a command: a batch that is being written has moved queues and accounts already, while
        # its jobs are not in memory yet.
        self.tell(self._follow_policy)
        self.hold_by_config()
        self.poke()

    # --- for readers --------------------------------------------------------------------------

    def snapshot_with(self, jobs: Iterable[Job]) -> Snapshot:
        """The snapshot as it would be if these jobs of one user were queued too."""
        snapshot = self.snapshot()
        view = snapshot.queues
        gpu, cpu = list(view.gpu), list(view.cpu)
        for job in jobs:
            row = waiting_for(job, Age(snapshot.now_s, 0.0, None))
            _queue_up(gpu if job.request.gpus else cpu, row)
        if not snapshot.standings.keys() >= {queue.uid for queue in (*gpu, *cpu)}:
            standings = dict(snapshot.standings)
            for queue in (*gpu, *cpu):
                standings.setdefault(queue.uid, _newcomer(queue.uid, queue.user))
            snapshot = replace(snapshot, standings=standings)
        return replace(snapshot, queues=QueueView(tuple(gpu), tuple(cpu)))

    def account_users(self) -> dict[int, str]:
        """Login names of everybody with an account."""
        return {row.uid: row.user for row in self._account_rows.values()}

    def running_rate(self, uid: int) -> float:
        """Billed GPUs that a user's jobs hold now."""
        return sum(
            self._rates.get(job_id, 0.0)
            for job_id in self.state.holding
            if self.state.jobs[job_id].uid == uid
        )

    # --- GPUs ---------------------------------------------------------------------------------

    def set_gpus(self, gpus: tuple[Gpu, ...]) -> None:
        """New facts; a pass follows where they differ."""
        if gpus != self.state.gpus:
            self.state.gpus = gpus
            self.poke()


def _is_news(promise: Promise, before: Promise | None) -> bool:
    """Another job's promise, or one that has moved forward."""
    if before is None or before.job_id != promise.job_id:
        return True
    return before.start_by_s - promise.start_by_s >= PROMISE_NEWS_S


def _warning_at_s(job: Job) -> float | None:
    """When WARNED_PART of a running job's limit has passed; None: it has none, or was warned."""
    limit_s = job.request.time_limit_s
    if job.started_sched_s is None or limit_s is None or limit_s == job.warned_limit_s:
        return None
    if job.state is not JobState.RUNNING:
        return None
    return job.started_sched_s + WARNED_PART * limit_s


def _newcomer(uid: int, user: str) -> Standing:
    """A user without usage: the best factor."""
    return Standing(uid=uid, user=user, share=1.0, usage_gpu_s=0.0, factor=1.0)


def _queue_up(lists: list[UserQueue], row: Waiting) -> None:
    """Add a row to its user's list, in own order."""
    place = next((i for i, queue in enumerate(lists) if queue.uid == row.uid), None)
    queue = UserQueue(row.uid, row.user, ()) if place is None else lists[place]
    vram, gpus = row.request.vram_bytes, row.request.gpus
    whole, shared = queue.whole_gpus_min, queue.shared_bytes_min
    grown = replace(
        queue,
        jobs=tuple(sorted((*queue.jobs, row), key=lambda waiting: waiting.own_order)),
        whole_gpus_min=whole if vram is not None else min(gpus, whole or gpus),
        shared_bytes_min=shared if vram is None else min(vram, shared or vram),
        aged_to=None,
    )
    if place is None:
        lists.append(grown)
        lists.sort(key=lambda other: other.uid)
    else:
        lists[place] = grown


def _touch(batch: Batch, jobs: list[Job]) -> None:
    """Put jobs whose waiting is over; the queue follows."""
    for job in jobs:
        present = batch.job(job.job_id)
        if present is not None and is_eligible(present, batch.now_s):
            after, rests = gates.opened(present)
            if rests:
                batch.rested.add(job.job_id)
            batch.put(after)


def storage_error(full: Exception) -> StorageError:
    """What clients hear when the disk is full, or the database locked."""
    return StorageError(
        f"the daemon's state directory cannot be written ({full}); nothing was changed. "
        "Try again once that is mended."
    )


def _answer(command: Command, result: Any) -> None:
    if command.reply is None:
        if isinstance(result, GpuschedError):
            log.error("own_command_refused error=%s", result)
        return
    if command.reply.done():
        return
    if isinstance(result, GpuschedError):
        command.reply.set_exception(result)
    else:
        command.reply.set_result(result)
