"""The one loop that changes job state.

All waiting commands are taken together, each judged in arrival order against memory and the batch's
earlier changes, written in one transaction by the database thread, and only after COMMIT made real:
applied, answered, acted on, published. One batch is in flight at a time. A pass of the planner is a
batch of its own, made when something that it looks at has changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from gpusched_client.errors import GpuschedError, Internal, StorageError, Unavailable
from gpusched_client.terms import JobState
from gpuschedd.config.keys import Config
from gpuschedd.core import admission
from gpuschedd.core.job import Job
from gpuschedd.core.model import NEVER_S, Gpu, Plan
from gpuschedd.core.plan import plan as make_plan
from gpuschedd.jobs import gates, holds, passes
from gpuschedd.jobs.batch import Batch, apply
from gpuschedd.jobs.charging import Charging
from gpuschedd.jobs.following import Followed, Following
from gpuschedd.jobs.gates import is_eligible
from gpuschedd.jobs.host_gates import StorageGate, follow_closed
from gpuschedd.jobs.payloads import LaunchPayloads
from gpuschedd.jobs.reloads import Outlook, Reload
from gpuschedd.jobs.snapshots import Snapshots
from gpuschedd.jobs.state import State, policy_of
from gpuschedd.jobs.waiting import host_blocked_by
from gpuschedd.store.database import StoreBroken, StoreFull
from gpuschedd.store.records import Changes, Event, PromiseRow, UsageRow
from gpuschedd.store.writer import Store
from gpuschedd.system.clock import SchedulerClock
from gpuschedd.system.threads import started_pool

log = logging.getLogger(__name__)

BATCH_COMMANDS_MAX = 1_000
QUEUE_COMMANDS_MAX = 20_000
ALONG_JOBS_MAX = 100  # live jobs, with which a submission and its pass are one commit

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


@dataclass(frozen=True, slots=True)
class Pass:
    """A plan and its changes, on the way to be written. `settles`: what moves the queues."""

    made: Plan
    batch: Batch
    rows: list[PromiseRow]
    settles: Plan | None


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
        self.charging = Charging(state)
        self._following = Following(state, self.charging)
        self.snapshots = Snapshots(state, clock, groups_of)
        self._closed_by = closed_by
        self.last_event_id = last_event_id
        self._commands: list[Command] = []
        self._wake = asyncio.Event()
        #: Set while what is durable is in State, too: a reader may see it some moments before.
        self.is_applied = asyncio.Event()
        self.is_applied.set()
        self._dirty = True
        self._knows_gpus = True
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = False
        self._broken: StoreBroken | None = None
        self._database = started_pool(1, "database")
        self.payloads = LaunchPayloads(self.in_database)
        self._storage = StorageGate(state, probe, self._database, self.request_pass)
        self.on_commit: list[Callable[[Committed], None]] = []
        self.counters = {
            "batches": 0,
            "commands": 0,
            "passes": 0,
            "starts": 0,
            "storage_full": 0,
        }
        self.pass_s_last = 0.0

    # --- commands -----------------------------------------------------------------------------

    async def call(self, evaluate: Evaluate) -> Any:
        """A client's command: its result, after it is durable. Raises GpuschedError."""
        if self._stopping:
            raise Unavailable("the daemon is stopping; try again in a moment")
        if len(self._commands) >= QUEUE_COMMANDS_MAX:
            raise Unavailable(f"{len(self._commands)} commands wait already; try again in a moment")
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._commands.append(Command(evaluate, reply))
        self._wake.set()
        return await reply

    def post(self, evaluate: Evaluate) -> None:
        """The daemon's own command: kept until it is durable."""
        self._commands.append(Command(evaluate))
        self._wake.set()

    def count_denial(self) -> None:
        """One more request that was refused for want of a right."""
        self.counters["denials"] = self.counters.get("denials", 0) + 1

    def request_pass(self) -> None:
        """Something that a pass looks at has changed."""
        self._dirty = True
        self._wake.set()

    def await_gpus(self) -> None:
        """Make no pass before `gpus_known`: one that sees no GPU would end the live promise."""
        self._knows_gpus = False

    def gpus_known(self) -> None:
        """The GPUs were looked at, or cannot be: plan with what there is."""
        self._knows_gpus = True
        self.request_pass()

    async def in_database(self, work: Callable[[Store], Any]) -> Any:
        """Run something with the writing connection, between batches.

        After StoreBroken no later commit can be trusted, so `run` ends with it.
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
            if self._needs_pass and not self._stopping:
                await self._run_pass()

    async def step(self) -> bool:
        """One batch, or one pass where no command waits. False: nothing to do, or no room.

        For those who drive the loop themselves, under a clock of their own.
        """
        if self._commands:
            return await self._run_batch()
        if self._needs_pass:
            await self._run_pass()
            return True
        return False

    @property
    def _needs_pass(self) -> bool:
        return self._dirty and self._knows_gpus

    async def stop(self) -> None:
        """Take no more commands; those that wait are refused and can be sent again."""
        self._stopping = True
        self._wake.set()
        if self._timer is not None:
            self._timer.cancel()
        self._storage.stop()
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
        change = passes.promise_change(batch, self.clock)
        rows = [] if change is None else [change.row]
        followed = self._following.along(batch)
        passed = self._pass_along(batch, followed) if change is None else None
        try:
            await self._commit(batch, followed, rows, passed)
        except StoreFull as full:
            self._refuse_full([command for command, _ in results], full)
            return False
        if change is not None:
            change.adopt(self.state)
        if passed is not None:
            self._adopt(passed)
            self.payloads.keep(batch)
        for command, result in results:
            _answer(command, result)
        return True

    def _pass_along(self, batch: Batch, followed: Followed) -> Pass | None:
        """A pass over what the batch adds, so that one commit makes both durable.

        None: not where it changes more than a snapshot of the last commit has with the queues; and
        behind a long queue the answer does not wait for a pass.
        """
        changed = batch.changed_jobs().keys()
        is_short = len(self.state.jobs) + len(changed) <= ALONG_JOBS_MAX
        if not changed or not is_short or not self._knows_gpus or changed & self.state.jobs.keys():
            return None
        passed = self._plan(batch)
        followed.join(self._following.along(passed.batch, passed.settles))
        batch.absorb(passed.batch)
        return passed

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
        """Launch nothing until a probe file can be written."""
        self._storage.close(why)

    # --- commit -------------------------------------------------------------------------------

    def new_batch(self) -> Batch:
        """An empty overlay, as of now."""
        return Batch(self.state, self.clock.now_s(), self.clock.wall_s())

    async def _commit(
        self,
        batch: Batch,
        followed: Followed,
        promises: Iterable[PromiseRow],
        passed: Pass | None = None,
    ) -> None:
        """Write the batch, then make it real. StoreFull leaves memory as it was.

        `passed`: the pass that is part of it, and has seen what it adds and starts.
        """
        changes = Changes(mark=self.clock.mark(), gpu_index_of=self.state.gpu_index_of())
        batch.into(changes)
        numbered = tuple(enumerate(batch.events, start=self.last_event_id + 1))
        changes.events += numbered
        rows = (*promises, *(passed.rows if passed is not None else ()))
        changes.promises.update({(row.job_id, row.promised_sched_s): row for row in rows})
        followed.into(changes)
        if changes.is_empty:
            return
        self.is_applied.clear()
        try:
            await self.in_database(lambda store: store.commit(changes))
            self.last_event_id += len(numbered)
            self._apply(batch, followed, numbered, planned=passed is not None)
        except StoreFull:
            self._following.back(batch.now_s)
            raise
        finally:
            self.is_applied.set()

    def _apply(
        self,
        batch: Batch,
        followed: Followed,
        events: tuple[tuple[int, Event], ...],
        *,
        planned: bool,
    ) -> None:
        pairs = tuple(
            Change(self.state.jobs.get(job_id), after)
            for job_id, after in batch.changed_jobs().items()
        )
        apply(self.state, batch)
        self._following.committed(followed)
        if any(_concerns_pass(change, planned=planned) for change in pairs):
            self._dirty = True
            self._wake.set()
        elif pairs and self.state.plan is not None:
            self._set_timer(self.state.plan)
        committed = Committed(pairs, events)
        for listen in self.on_commit:
            listen(committed)

    # --- the pass -----------------------------------------------------------------------------

    async def _run_pass(self) -> None:
        passed = self._plan()
        followed = self._following.along(passed.batch, passed.settles)
        try:
            await self._commit(passed.batch, followed, [], passed)
        except StoreFull as full:
            self._note_full(full)
            return
        self._adopt(passed)

    def _plan(self, beneath: Batch | None = None) -> Pass:
        """What the planner decides now; `beneath`: a batch that is not yet written."""
        self._dirty = False
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self._wake_waiting()
        snapshot = self.snapshots.take(beneath)
        made = make_plan(snapshot, self.state.policy)
        self.pass_s_last = loop.time() - began_s
        self.counters["passes"] += 1
        # As of the snapshot: a start decided even a moment later would end past what was planned.
        wall_s = self.clock.to_wall_s(snapshot.now_s)
        batch = Batch(self.state, snapshot.now_s, wall_s, beneath)
        follow_closed(self.state, self._closed_by())
        blocked = host_blocked_by(self.state) is not None
        if blocked:
            # Nothing starts, so no promise is kept or broken by a start either.
            made = replace(made, starts=(), promise=self.state.promise, ended=None)
        else:
            for start in made.starts:
                passes.place(batch, self.clock, start, made)
        passes.mark_stuck(batch, snapshot)
        passes.warn_of_limits(batch)
        rows = passes.promise_rows(batch, self.clock, made)
        return Pass(made, batch, rows, None if blocked else made)

    def _adopt(self, passed: Pass) -> None:
        """It is durable: the next pass goes on from it."""
        made = passed.made
        passes.adopt_plan(self.state, made, passed.rows)
        for start in made.starts:
            self.state.expectations.started(start, passed.batch.now_s)
        self.counters["starts"] += len(made.starts)
        self._set_timer(made)

    def _wake_waiting(self) -> None:
        """Jobs whose back-off or begin time has passed become eligible."""
        now_s = self.clock.now_s()
        due = [
            self.state.jobs[job_id]
            for job_id in self.state.delayed
            if is_eligible(self.state.jobs[job_id], now_s)
        ]
        if due:
            self.post(lambda batch: _touch(batch, due))

    def _set_timer(self, made: Plan) -> None:
        """The next time at which something changes by itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at_s = passes.next_pass_at_s(self.state, made, self.clock.now_s())
        if at_s is not None:
            delay_s = max(0.01, at_s - self.clock.now_s())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.request_pass)

    def restore(self, accounts: Iterable[UsageRow]) -> None:
        """At start-up: queues and accounts as of the last commit."""
        now_s = self.clock.now_s()
        self.charging.restore(accounts, now_s)
        self.state.rebuild_queues(now_s)
        self.hold_by_config()
        # The file may have changed since. What the GPUs are is not known yet.
        self._follow_promise(Reload(Outlook(self.state.promise, NEVER_S)))

    def hold_by_config(self, then: Callable[[Batch], None] = lambda _batch: None) -> None:
        """Hold the jobs of users whom the configuration bars, release those it no longer bars.

        `then` sees what that ends.
        """

        def allows(user: str) -> bool:
            # As it is when this is judged: on a full disk that may be after another reload.
            allowed = self.state.config.jobs.users
            return holds.is_allowed(user, self.snapshots.groups_named(user), allowed)

        def follow(batch: Batch) -> None:
            holds.follow_config(batch, allows)
            then(batch)

        self.post(follow)

    def _follow_promise(self, reload: Reload) -> None:
        self.post(lambda batch: reload.follow(batch, self.snapshots.take()))

    def reconfigure(self, config: Config) -> Reload:
        """A new configuration: policy, queues, accounts, holds and the promise follow.

        They do so as commands: what follows it in the same step, as the GPUs do, is seen by them.
        """
        reload = Reload(Outlook.of(self.snapshots.take(), self.state.policy))
        self.state.config = config
        self.state.policy = policy_of(config)
        # As a command: a batch that is being written has moved queues and accounts already, while
        # its jobs are not in memory yet.
        self.post(self._following.policy)
        self.hold_by_config(reload.note_barred)
        self._follow_promise(reload)
        self.request_pass()
        return reload

    async def broken_by(self, reload: Reload) -> tuple[str, ...]:
        """What `reconfigure` has broken, in words, once that is durable.

        Without room on the disk it is in force all the same, and becomes durable with the rest.
        """
        try:
            # Behind the commands of `reconfigure`: they are committed when it is answered.
            await self.call(lambda _batch: None)
        except StorageError:
            blocked = self.state.storage_blocked
            return *reload.broken, f"what changes for jobs is written once there is room: {blocked}"
        return reload.broken

    # --- GPUs ---------------------------------------------------------------------------------

    def set_gpu_problem(self, text: str | None) -> None:
        """Why no GPU is known, or none of the host's is ours; None: nothing is wrong."""
        self.state.gpu_problem = text

    def set_gpus(self, gpus: tuple[Gpu, ...]) -> None:
        """New facts; a pass follows where they differ."""
        if gpus != self.state.gpus:
            self.state.gpus = gpus
            self.state.inventory = admission.here(self.state.inventory, gpus)
            self.request_pass()


def _concerns_pass(change: Change, *, planned: bool) -> bool:
    """Whether a pass may find something new by it.

    Not by what a pass that was written with it has added or placed, nor by a start, which frees and
    adds nothing: its planned end is a moment later than was thought, as the next pass will see.
    """
    before, after = change.before, change.after
    if before is None:
        return not planned
    moves = {(JobState.CONFIGURING, JobState.RUNNING)}
    if planned:
        moves.add((JobState.PENDING, JobState.CONFIGURING))
    return (before.state, after.state) not in moves


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
