"""One method, one right, one function: what a request means once it is decoded and its peer known.

Authorises, asks the controller or the books, and builds the response. Knows no socket.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, TypeVar

from gpusched_client.errors import (
    Conflict,
    Denied,
    GpuschedError,
    LimitReached,
    NotFound,
    Unavailable,
)
from gpusched_client.terms import GpuUuid, JobId, JobState
from gpusched_client.wire import job_messages as messages
from gpusched_client.wire.admin_messages import (
    BackupRequest,
    Hello,
    HelloResult,
    ReloadRequest,
    ReloadResult,
    StatsRequest,
    StatsResult,
    StatusRequest,
    UsageRequest,
    UsageResult,
    UsageView,
)
from gpusched_client.wire.catalog import METHODS
from gpusched_client.wire.gpu_messages import (
    DrainRequest,
    DrainResult,
    GpusReleaseRequest,
    GpusRequest,
    GpusResult,
    GpusResumeRequest,
    GpuView,
    ResumeRequest,
    ResumeResult,
)
from gpusched_client.wire.job_messages import (
    EVENT_METHOD,
    CancelRequest,
    CancelResult,
    JobQuery,
    JobsRequest,
    JobsResult,
    JobView,
    Outcome,
    QueueRequest,
    QueueResult,
    TopRequest,
    TopResult,
    UpdateRequest,
    UpdateResult,
    WaitRequest,
    WaitResult,
    WatchRequest,
    WatchResult,
)
from gpusched_client.wire.limits import PROTOCOL_VERSION
from gpusched_client.wire.message import Response
from gpusched_client.wire.methods import Request, Right
from gpusched_client.wire.submit_messages import SubmitRequest, SubmitResult
from gpuschedd import __version__
from gpuschedd.api import views
from gpuschedd.api.health_report import Status
from gpuschedd.api.limits import Budget
from gpuschedd.api.peer import Peer, in_group, user_name
from gpuschedd.api.subscriptions import WATCHERS_MAX, Audience, Watcher
from gpuschedd.core import forecast
from gpuschedd.core.advice import beyond_limit
from gpuschedd.core.advice import warnings_for as advice_for
from gpuschedd.core.fairshare import share_of
from gpuschedd.core.job import Job
from gpuschedd.core.model import ExpectedStart, GpuState, Plan, Policy, Snapshot
from gpuschedd.core.plan import plan as make_plan
from gpuschedd.core.plan import reason_of
from gpuschedd.core.priority import queue_order
from gpuschedd.gpu.metering import GpuUse
from gpuschedd.gpu.source import parent_index
from gpuschedd.jobs import holds, orders
from gpuschedd.jobs.controller import Controller
from gpuschedd.jobs.orders import Caller
from gpuschedd.jobs.state import Batch
from gpuschedd.store.backup import Backups
from gpuschedd.store.database import History
from gpuschedd.store.readers import Reads
from gpuschedd.store.records import AuditRow, Event
from gpuschedd.system.accounts import Accounts, is_system_account

DENIALS_AN_HOUR_MAX = 100  # audit rows of denials per uid and hour; the rest is only counted
EXPECTED_FIRST = 200
POSITIONS_MAX = 2_000  # so far down the queue a job's place is looked for
WALK_REST = 20.0  # times as long as it took, before the next
VIEWS_AT_ONCE = 10  # a few tenths of a millisecond
CALLER_KEPT_S = 5.0  # an account that changes hands is another's after this
WAITS_PER_UID_MAX = 1_000
UID_DIGITS_MAX = 10  # more is nobody's number

T = TypeVar("T")


class Connection(Protocol):
    """What a handler may do with the connection beyond its one reply."""

    @property
    def peer(self) -> Peer:
        """Who is at the other end."""

    def notify(self, method: str, params: Mapping[str, Any]) -> bool:
        """Send a notification; False while the reader is too far behind."""

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call back when the connection is gone."""

    @property
    def is_watching(self) -> bool:
        """Whether a watch is on."""

    def keep_open(self) -> None:
        """A watch is on: the connection may be silent."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What only main knows of the GPUs' edge."""

    mode: str
    own_uid: int
    gpus_stale: Callable[[], bool]
    gpus_used: Callable[[], Mapping[GpuUuid, views.UsedGpu]]
    gpu_problem: Callable[[], str | None]
    retake_gpus: Callable[[], None]
    pardon_gpu: Callable[[GpuUuid], None]
    release_gpus: Callable[[str], Awaitable[None]]
    reopen_gpus: Callable[[], Awaitable[None]]
    uses_now: Callable[[Job], Sequence[GpuUse]]
    reload: Callable[[], Awaitable[tuple[str, ...]]]
    status: Status
    backups: Backups


class Handlers:
    """The methods of the wire."""

    def __init__(
        self,
        controller: Controller,
        history: History,
        audience: Audience,
        outlook: Outlook,
        accounts: Accounts,
        budget: Budget,
    ) -> None:
        self._accounts = accounts
        self._budget = budget
        self._controller = controller
        self._audience = audience
        self._outlook = outlook
        self._reads = Reads(history)
        self._callers: dict[int, asyncio.Future[Caller]] = {}
        self._walk: _Walk | None = None
        self._denials: dict[tuple[int, int], int] = {}
        self._waits: dict[int, int] = {}
        self._table: dict[type[Request[Any]], Callable[..., Awaitable[Response]]] = {
            Hello: self._hello,
            SubmitRequest: self._submit,
            JobsRequest: self._jobs,
            QueueRequest: self._queue,
            JobQuery: self._job,
            CancelRequest: self._cancel,
            UpdateRequest: self._update,
            WaitRequest: self._wait,
            WatchRequest: self._watch,
            GpusRequest: self._gpus,
            UsageRequest: self._usage,
            StatsRequest: self._stats,
            DrainRequest: self._drain,
            ResumeRequest: self._resume,
            ReloadRequest: self._reload,
            GpusReleaseRequest: self._gpus_release,
            GpusResumeRequest: self._gpus_resume,
            TopRequest: self._top,
            StatusRequest: self._status,
            BackupRequest: self._backup,
        }

    async def handle(self, connection: Connection, method: str, request: Request[Any]) -> Response:
        """Authorise and answer. Raises GpuschedError."""
        caller = await self._caller(connection.peer)
        if not self._has_right(caller, method):
            self._audit_denial(caller, method, "not an admin")
            who = "root" if METHODS[method].right is Right.ROOT else "admins"
            raise Denied(f"{method} is for {who}; you are {caller.user} (uid {caller.uid})")
        return await self._table[type(request)](connection, caller, request)

    def _has_right(self, caller: Caller, method: str) -> bool:
        right = METHODS[method].right
        if right is Right.ROOT:
            return caller.uid in (0, self._outlook.own_uid)
        return right in (Right.ALL, Right.OWNER) or (right is Right.ADMIN and caller.is_admin)

    def close(self) -> None:
        """End the reader thread and its connection."""
        self._reads.close()

    # --- who ----------------------------------------------------------------------------------

    async def _caller(self, peer: Peer) -> Caller:
        """The peer with name and rights, asked of the system every few seconds at most per uid.

        Requests that wait for the same answer go on in the order they came.
        """
        known = self._callers.get(peer.uid)
        if known is None:
            known = asyncio.ensure_future(self._look_up(peer))
            self._callers[peer.uid] = known
            known.add_done_callback(lambda done: self._forget_failure(peer.uid, done))
            asyncio.get_running_loop().call_later(CALLER_KEPT_S, self._callers.pop, peer.uid, None)
        caller = known.result() if known.done() else await asyncio.shield(known)
        return caller if caller.pid == peer.pid else replace(caller, pid=peer.pid)

    def _forget_failure(self, uid: int, done: asyncio.Future[Caller]) -> None:
        """A name service that did not answer is asked again by the next request."""
        if not done.cancelled() and done.exception() is not None:
            self._callers.pop(uid, None)

    async def _look_up(self, peer: Peer) -> Caller:
        config = self._controller.state.config
        try:
            caller = await self._accounts.ask(lambda: self._identify(peer, config.admin_group))
        except TimeoutError:
            raise Unavailable("the host's name service does not answer; try again later") from None
        if config.names_groups:
            await self._accounts.learn([caller.user])
            caller = replace(caller, groups=self._accounts.groups(caller.user))
        if not holds.is_allowed(caller.user, caller.groups, config.jobs.users):
            text = f"{caller.user} may not submit: the configuration (jobs.users) does not name you"
            caller = replace(caller, barred=text)
        return caller

    def _identify(self, peer: Peer, admin_group: str) -> Caller:
        """Name and rights of a peer. Blocks."""
        user = user_name(peer.uid)
        if self._outlook.mode == "user":
            return Caller(peer.uid, user, peer.pid, peer.uid == self._outlook.own_uid)
        is_admin = peer.uid == 0 or (bool(admin_group) and in_group(peer.uid, admin_group))
        barred = None
        if user == str(peer.uid):
            barred = f"uid {peer.uid} has no account on this host, so nothing can run as it"
        elif is_system_account(peer.uid) and not self._controller.state.config.jobs.system_users:
            barred = (
                f"jobs of {user} (uid {peer.uid}, below UID_MIN) are not taken here; submit as a "
                "person, for instance `runuser -u NAME -- gsub ...`, or set jobs.system_users"
            )
        return Caller(peer.uid, user, peer.pid, is_admin, barred=barred)

    def forget_callers(self) -> None:
        """The configuration changed: rights are looked up again."""
        self._callers.clear()

    def _audit_denial(self, caller: Caller, method: str, detail: str) -> None:
        """On record, up to a number an hour; a flood of denials does not become a flood of rows."""
        now_s = self._controller.clock.wall_s()
        key = (caller.uid, int(now_s // 3600))
        count = self._denials.get(key, 0) + 1
        if key not in self._denials:
            self._denials = {k: n for k, n in self._denials.items() if k[1] >= key[1]}
        self._denials[key] = count
        self._controller.counters["denials"] = self._controller.counters.get("denials", 0) + 1
        if count <= DENIALS_AN_HOUR_MAX:
            row = AuditRow(now_s, caller.uid, caller.pid, method, "denied", detail)
            self._controller.tell(lambda batch: batch.audits.append(row))

    def _hides_names(self, caller: Caller) -> bool:
        """Whether the names of others' jobs are not for this caller."""
        return self._controller.state.config.private and not caller.is_admin

    async def _read(self, caller: Caller, work: Callable[[History], T]) -> T:
        return await self._reads.ask(caller.uid, work)

    # --- methods ------------------------------------------------------------------------------

    async def _hello(self, _connection: Connection, caller: Caller, _request: Hello) -> Response:
        return HelloResult(
            protocol=PROTOCOL_VERSION,
            version=__version__,
            mode=self._outlook.mode,
            uid=caller.uid,
            user=caller.user,
            admin=caller.is_admin,
        )

    async def _submit(
        self, _connection: Connection, caller: Caller, request: SubmitRequest
    ) -> Response:
        if request.dry_run:
            return self._dry_run(caller, request)
        state, key = self._controller.state, (caller.uid, request.submission_id or "")
        # Taken along: it may be forgotten before the request's turn comes.
        earlier = state.submissions.get(key)
        if request.submission_id and state.submissions_forgotten and earlier is None:
            earlier = await self._read(caller, lambda history: history.submission(*key))
        result: SubmitResult = await self._controller.ask(
            lambda batch: orders.submit(batch, caller, request, earlier)
        )
        return self._advised(caller, result)

    def _advised(self, caller: Caller, result: SubmitResult) -> SubmitResult:
        """With a warning where foreign use, drains or a limit of the user's are in the way."""
        state = self._controller.state
        ids = map(JobId, result.job_ids)
        jobs = [state.jobs[job_id] for job_id in ids if job_id in state.jobs]
        most = self._controller.limit_of(caller.user).max_gpus
        advice = (*beyond_limit(jobs, most), *advice_for(jobs, state.gpus, state.policy))
        return replace(result, warnings=(*result.warnings, *advice)) if advice else result

    def _dry_run(self, caller: Caller, request: SubmitRequest) -> SubmitResult:
        """What would happen to the jobs if they were submitted now. Stores nothing."""
        state = self._controller.state
        batch = self._controller.new_batch()
        child = batch.child()
        result = orders.submit(child, caller, replace(request, submission_id=None), None)
        trial = [child.job(JobId(job_id)) for job_id in result.job_ids]
        jobs = [job for job in trial if job is not None and job.hold is None]
        snapshot = self._controller.snapshot_with(jobs)
        made = make_plan(snapshot, state.policy, len(jobs) + 1_000)
        indices = state.gpu_index_of()
        starting = {start.job_id: start for start in made.starts}
        would_start, reasons = [], []
        for job in trial:
            assert job is not None
            start = starting.get(job.job_id)
            if job.hold is not None:
                would_start.append("")
                reasons.append("it would be held until it is released")
            elif start is None:
                would_start.append("")
                reasons.append(reason_of(made, job.job_id).text)
            else:
                numbers = sorted(indices.get(grant.uuid, -1) for grant in start.grants)
                named = "GPU " if len(numbers) == 1 else "GPUs "
                would_start.append(named + ", ".join(map(str, numbers)) if numbers else "no GPU")
                reasons.append("")
        return replace(result, job_ids=(), would_start=tuple(would_start), reasons=tuple(reasons))

    async def _jobs(
        self, _connection: Connection, caller: Caller, request: JobsRequest
    ) -> Response:
        since_s = None
        if request.ended_within_s is not None:
            since_s = self._controller.clock.wall_s() - request.ended_within_s
        names, uids = _names_and_uids(request.users)
        if request.name is not None and self._hides_names(caller):
            # Who may not see a name may not try it either.
            uids = [caller.uid] if uids is None or caller.uid in uids else []
        await self._budget.turn(caller.uid, request.limit)
        jobs, total = await self._read(
            caller,
            lambda history: history.jobs(
                ids=None if request.ids is None else [JobId(job_id) for job_id in request.ids],
                uids=uids,
                users=names,
                states=None if request.states is None else [str(s) for s in request.states],
                name=request.name,
                ended_since_s=since_s,
                before_id=None if request.before_id is None else JobId(request.before_id),
                limit=request.limit,
            ),
        )
        return JobsResult(jobs=await self._views(caller, jobs), total=total)

    async def _views(self, caller: Caller, jobs: Iterable[Job]) -> tuple[JobView, ...]:
        """As the caller may see them, each as it is given: jobs of different instants would
        contradict each other. Others have their turns in between.
        """
        state, clock = self._controller.state, self._controller.clock
        jobs = tuple(jobs)
        waits = any(job.state is JobState.PENDING for job in jobs)
        expected = await self._expected_starts() if waits else {}
        job_ids = [job.job_id for job in jobs]
        briefs = await self._read(caller, lambda history: history.briefs(job_ids)) if jobs else {}
        shown = []
        for number, job in enumerate(jobs, start=1):
            own = caller.may_change(job)
            hides = self._hides_names(caller) and not own
            view = views.job_view(state, clock, job, expected, own=own, hides_name=hides)
            brief = None if hides else briefs.get(job.job_id)
            shown.append(view if brief is None else views.with_brief(view, brief))
            if number % VIEWS_AT_ONCE == 0:
                await self._budget.rest(caller.uid)
        return tuple(shown)

    async def _expected_starts(self) -> dict[JobId, ExpectedStart]:
        """The separate walk: only when somebody looks, for the newest pass, and beside the loop.

        One that takes long is kept a while over newer passes, so that lookers cannot have all of
        the daemon's time.
        """
        made = self._controller.state.plan
        if made is None:
            return {}
        walk = self._walk
        if walk is None or (walk.made is not made and time.monotonic() >= walk.kept_until_s):
            walk = self._walk = _Walk(made)
            walk.begin(self._controller.snapshot(), self._controller.state.policy)
        return await asyncio.shield(walk.found)

    async def _queue(
        self, _connection: Connection, caller: Caller, request: QueueRequest
    ) -> Response:
        state = self._controller.state
        await self._budget.turn(caller.uid, request.limit)
        rows = self._in_order()
        begin = 0
        if request.after is not None:
            for job, _ in rows:
                begin += 1
                if job.job_id == request.after:
                    break
            else:
                raise NotFound(
                    f"job {request.after} is not in the queue (any more); read it from the start",
                    {"job_id": request.after},
                )
        page = list(islice(rows, request.limit))
        shown = await self._views(caller, [job for job, _ in page])
        return QueueResult(
            jobs=tuple(
                replace(view, queue_position=begin + place + 1, priority=priority)
                for place, (view, (_, priority)) in enumerate(zip(shown, page, strict=True))
            ),
            total=len(state.jobs) - len(state.holding),
        )

    def _in_order(self) -> Iterator[tuple[Job, float | None]]:
        """Pending jobs in scheduling order, then those that are held, delayed or dependent."""
        state = self._controller.state
        for waiting, parts in queue_order(self._controller.snapshot(), state.policy):
            job = state.jobs.get(waiting.job_id)
            if job is not None:
                yield job, parts.priority
        for job_id, job in state.jobs.items():
            if job.state is JobState.PENDING and job_id not in state.queues:
                yield job, None

    async def _job(self, _connection: Connection, caller: Caller, request: JobQuery) -> Response:
        job_id = JobId(request.job_id)
        job = await self._find(caller, job_id)
        (view,) = await self._views(caller, [job])
        if not caller.may_change(job):
            return view
        payload, events, promise, uses = await self._read(
            caller,
            lambda history: (
                history.payload(job_id),
                history.events(job_id),
                history.promise_of(job_id),
                history.gpu_uses(job_id),
            ),
        )
        view = views.with_request(view, payload)
        state = self._controller.state
        view = views.with_use(view, state, job, self._outlook.uses_now(job) or uses)
        if job.state is JobState.PENDING and job_id in state.queues:
            view = self._explained(view, job)
        if promise is not None and view.promised_start_s is None:
            view = replace(view, promised_start_s=promise.start_by_s)
        return replace(view, events=tuple(views.job_event(event) for event in events))

    def _explained(self, view: JobView, job: Job) -> JobView:
        """Where it stands, its priority in parts, and with what it would start now."""
        snapshot, policy = self._controller.snapshot(), self._controller.state.policy
        found = forecast.counterfactuals(snapshot, policy, job.job_id)
        view = replace(view, explanations=tuple(f"would start now {entry.text}" for entry in found))
        front = islice(queue_order(snapshot, policy), POSITIONS_MAX)
        for place, (waiting, parts) in enumerate(front, start=1):
            if waiting.job_id == job.job_id:
                return replace(
                    view,
                    queue_position=place,
                    priority=parts.priority,
                    priority_parts={"fair": parts.fair, "age": parts.age, "nice": parts.nice},
                )
        return view

    async def _find(self, caller: Caller, job_id: JobId) -> Job:
        job = self._controller.state.jobs.get(job_id)
        if job is None:
            job = await self._read(caller, lambda history: history.job(job_id))
        if job is None:
            raise NotFound(f"there is no job {job_id}", {"job_id": job_id})
        return job

    async def _cancel(
        self, _connection: Connection, caller: Caller, request: CancelRequest
    ) -> Response:
        outcomes = await self._controller.ask(lambda batch: orders.cancel(batch, caller, request))
        outcomes = await self._with_finals(caller, outcomes, self._cancel_of_final)
        self._audit_outcomes(caller, "cancel", outcomes)
        return CancelResult(outcomes=outcomes)

    @staticmethod
    def _cancel_of_final(job: Job) -> Outcome:
        """Idempotent: a job that is over already is no error."""
        return Outcome(job_id=job.job_id, text=f"was {job.state} already", state=job.state)

    @staticmethod
    def _update_of_final(job: Job) -> Outcome:
        return Outcome(
            job_id=job.job_id,
            code=Conflict.code,
            text=f"job {job.job_id} is {job.state}; it cannot be changed any more",
            state=job.state,
        )

    async def _with_finals(
        self,
        caller: Caller,
        outcomes: tuple[Outcome, ...],
        of_final: Callable[[Job], Outcome],
    ) -> tuple[Outcome, ...]:
        """Jobs that are not live may be in the books: they are over, not unknown."""
        missed = [JobId(entry.job_id) for entry in outcomes if entry.code == NotFound.code]
        if not missed:
            return outcomes
        jobs, _ = await self._read(caller, lambda history: history.jobs(ids=missed))
        found = {job.job_id: job for job in jobs}

        def outcome_of(entry: Outcome) -> Outcome:
            job = found.get(JobId(entry.job_id))
            if entry.code != NotFound.code or job is None or not job.is_final:
                return entry
            if not caller.may_change(job):
                denied = orders.not_yours(job)
                return replace(entry, code=denied.code, text=denied.message)
            return of_final(job)

        return tuple(outcome_of(entry) for entry in outcomes)

    def _audit_outcomes(self, caller: Caller, method: str, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.code == "denied":
                self._audit_denial(caller, method, f"job {outcome.job_id}")

    async def _update(
        self, _connection: Connection, caller: Caller, request: UpdateRequest
    ) -> Response:
        controller = self._controller
        outcomes = await controller.ask(
            lambda batch: orders.update(
                batch,
                caller,
                request,
                controller.snapshot() if request.time_limit_s is not None else None,
            )
        )
        outcomes = await self._with_finals(caller, outcomes, self._update_of_final)
        self._audit_outcomes(caller, "update", outcomes)
        return UpdateResult(outcomes=outcomes)

    async def _wait(
        self, _connection: Connection, caller: Caller, request: WaitRequest
    ) -> Response:
        job_ids = [JobId(job_id) for job_id in request.job_ids]
        for job_id in job_ids:
            await self._find(caller, job_id)
        if self._waits.get(caller.uid, 0) >= WAITS_PER_UID_MAX:
            raise LimitReached(f"{WAITS_PER_UID_MAX} waits are open already; that is the limit")
        self._waits[caller.uid] = self._waits.get(caller.uid, 0) + 1
        try:
            done = await self._audience.wait_final(
                job_ids, self._controller.state.jobs.__contains__, request.timeout_s
            )
        finally:
            self._waits[caller.uid] -= 1
        jobs = [await self._find(caller, job_id) for job_id in job_ids]
        return WaitResult(jobs=await self._views(caller, jobs), timed_out=not done)

    async def _watch(
        self, connection: Connection, caller: Caller, request: WatchRequest
    ) -> Response:
        if connection.is_watching:
            raise Conflict("this connection has a watch already; open another for a second one")
        if len(self._audience.watchers) >= WATCHERS_MAX:
            raise LimitReached(f"{WATCHERS_MAX} watchers are there already; that is the limit")

        def send(number: int, event: Event) -> bool:
            shown = self._event(caller, number, event)
            return connection.notify(EVENT_METHOD, shown.to_wire())

        last = self._controller.last_event_id
        watcher = Watcher(send)
        self._audience.watchers.add(watcher)
        connection.on_close(lambda: self._audience.watchers.discard(watcher))
        connection.keep_open()
        if request.since is not None and request.since < last:
            since = request.since
            watcher.hold()
            try:
                missed = await self._read(caller, lambda history: history.events_since(since, last))
            except GpuschedError:
                self._audience.watchers.discard(watcher)
                raise
            forgotten = last - since - len(missed)  # ids have no gaps
            asyncio.get_running_loop().call_soon(watcher.release, missed, forgotten)
        return WatchResult(last_event_id=last)

    def _event(self, caller: Caller, number: int, event: Event) -> messages.Event:
        if not (caller.is_admin or event.uid in (None, caller.uid)):
            event = views.event_of_another(event, hides_name=self._hides_names(caller))
        return messages.Event(
            event_id=number,
            at_s=event.at_s,
            kind=event.kind,
            job_id=event.job_id,
            uid=event.uid,
            gpu_uuid=event.data.get("gpu"),
            text=views.event_text(event),
            data=dict(event.data),
        )

    async def _gpus(
        self, _connection: Connection, _caller: Caller, _request: GpusRequest
    ) -> Response:
        return GpusResult(gpus=tuple(self._gpu_views()), problem=self._outlook.gpu_problem())

    def _gpu_views(self) -> list[GpuView]:
        return views.gpu_views(
            self._controller.state, self._outlook.gpus_used(), stale=self._outlook.gpus_stale()
        )

    async def _usage(
        self, _connection: Connection, _caller: Caller, _request: UsageRequest
    ) -> Response:
        controller = self._controller
        state, snapshot = controller.state, controller.snapshot()
        names = dict(state.user_of) | controller.account_users()
        users = []
        for uid, user in names.items():
            standing = snapshot.standings.get(uid)
            own = [state.jobs[job_id] for job_id in state.holding if state.jobs[job_id].uid == uid]
            users.append(
                UsageView(
                    user=user,
                    uid=uid,
                    usage_gpu_s=state.accounts.usage(uid, snapshot.now_s),
                    shares=standing.share if standing else share_of(user, (), state.policy),
                    factor=standing.factor if standing else None,
                    running_jobs=len(own),
                    running_gpus=controller.running_rate(uid),
                    pending_jobs=state.live_of[uid] - len(own),
                )
            )
        users.sort(key=lambda view: (-(view.factor or 0.0), view.user))
        return UsageResult(users=tuple(users[:10_000]))

    async def _stats(
        self, _connection: Connection, caller: Caller, _request: StatsRequest
    ) -> Response:
        states, promises = await self._read(
            caller, lambda history: (history.state_counts(), history.promise_outcomes())
        )
        state = self._controller.state
        counters: dict[str, Any] = dict(self._controller.counters)
        counters |= {f"jobs_{name.lower()}": count for name, count in states.items()}
        counters |= {f"promises_{name}": count for name, count in promises.items()}
        counters |= {
            "pass_seconds_last": self._controller.pass_s_last,
            "watchers": len(self._audience.watchers),
            "gpus": len(state.gpus),
            "gpus_ok": sum(gpu.state is GpuState.OK for gpu in state.gpus),
            "gpus_stale": self._outlook.gpus_stale(),
            "gpu_problem": self._outlook.gpu_problem() or "",
            "storage_problem": state.storage_blocked or "",
        }
        return StatsResult(counters=counters)

    async def _drain(
        self, _connection: Connection, caller: Caller, request: DrainRequest
    ) -> Response:
        view = await self._set_drained(caller, request.gpu, request.reason, "drain")
        return DrainResult(gpu=view)

    async def _resume(
        self, _connection: Connection, caller: Caller, request: ResumeRequest
    ) -> Response:
        view = await self._set_drained(caller, request.gpu, None, "resume")
        return ResumeResult(gpu=view)

    async def _gpus_release(
        self, _connection: Connection, caller: Caller, request: GpusReleaseRequest
    ) -> Response:
        """No client of the driver is ours until gpus_resume: its GPUs can be reconfigured."""
        await self._note_gpus(caller, "gpus_release", "gpus_released", request.reason)
        await self._outlook.release_gpus(request.reason)
        return GpusResult(gpus=tuple(self._gpu_views()))

    async def _gpus_resume(
        self, _connection: Connection, caller: Caller, _request: GpusResumeRequest
    ) -> Response:
        await self._note_gpus(caller, "gpus_resume", "gpus_reopened", None)
        await self._outlook.reopen_gpus()
        return GpusResult(gpus=tuple(self._gpu_views()), problem=self._outlook.gpu_problem())

    async def _note_gpus(self, caller: Caller, method: str, kind: str, reason: str | None) -> None:
        def act(batch: Batch) -> None:
            batch.note(kind, None, by=caller.user, reason=reason)
            batch.audits.append(
                AuditRow(batch.wall_s, caller.uid, caller.pid, method, "done", reason or "")
            )

        await self._controller.ask(act)

    async def _set_drained(
        self, caller: Caller, name: str, reason: str | None, method: str
    ) -> GpuView:
        uuid = self._gpu_named(name)

        def act(batch: Batch) -> None:
            row = batch.gpu_row(uuid)
            assert row is not None, "a GPU that is shown is in the books"
            row = replace(row, drained=reason)
            if reason is None:
                row = replace(row, sick=None, sick_until_reboot=False)
            batch.gpu_rows[uuid] = row
            batch.note("gpu_drained" if reason else "gpu_resumed", gpu=str(uuid), reason=reason)
            batch.audits.append(
                AuditRow(batch.wall_s, caller.uid, caller.pid, method, "done", str(uuid))
            )

        await self._controller.ask(act)
        if reason is None:
            self._outlook.pardon_gpu(uuid)
        self._outlook.retake_gpus()
        return next(view for view in self._gpu_views() if view.uuid == uuid)

    def _gpu_named(self, name: str) -> GpuUuid:
        gpus = self._controller.state.gpus
        found = [
            gpu.uuid
            for gpu in gpus
            if name in (str(gpu.index), gpu.uuid) or (len(name) >= 8 and gpu.uuid.startswith(name))
        ]
        parts = [gpu.index for gpu in gpus if gpu.is_slice]
        slices = [str(index) for index in parts if str(parent_index(index)) == name]
        if slices and not found:
            raise NotFound(f"GPU {name} is in MIG mode; name its slices: {', '.join(slices)}")
        if len(found) != 1:
            known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus[:16]) or "none"
            matching = f"{len(found)} GPUs are" if found else "no GPU is"
            raise NotFound(f"{matching} named {name!r}; known: {known}")
        return found[0]

    async def _reload(
        self, _connection: Connection, caller: Caller, _request: ReloadRequest
    ) -> Response:
        changed = await self._outlook.reload()
        self._audit_done(caller, "reload", ", ".join(changed))
        return ReloadResult(changed=changed)

    def _audit_done(self, caller: Caller, method: str, detail: str) -> None:
        row = AuditRow(
            self._controller.clock.wall_s(), caller.uid, caller.pid, method, "done", detail
        )
        self._controller.tell(lambda batch: batch.audits.append(row))

    async def _top(self, _connection: Connection, caller: Caller, request: TopRequest) -> Response:
        job_id = JobId(request.job_id)
        outcome = await self._controller.ask(lambda batch: orders.top(batch, caller, job_id))
        (outcome,) = await self._with_finals(caller, (outcome,), self._update_of_final)
        self._audit_outcomes(caller, "top", (outcome,))
        return TopResult(outcome=outcome)

    async def _status(
        self, _connection: Connection, caller: Caller, _request: StatusRequest
    ) -> Response:
        return await self._outlook.status.take(for_admin=caller.is_admin)

    async def _backup(
        self, connection: Connection, caller: Caller, request: BackupRequest
    ) -> Response:
        result = await self._outlook.backups.answer(request, connection.on_close)
        if request.backup_id is None:
            self._audit_done(caller, "backup", f"{result.size_bytes} bytes")
        return result


class _Walk:
    """Expected starts as of one pass, and how long they are good enough."""

    def __init__(self, made: Plan) -> None:
        self.made = made
        self.kept_until_s = math.inf  # while it is under way

    def begin(self, snapshot: Snapshot, policy: Policy) -> None:
        """Walk in a thread."""
        self.found = asyncio.ensure_future(asyncio.to_thread(self._take, snapshot, policy))

    def _take(self, snapshot: Snapshot, policy: Policy) -> dict[JobId, ExpectedStart]:
        began_s = time.monotonic()
        walked = forecast.expected_starts(snapshot, policy, EXPECTED_FIRST)
        ended_s = time.monotonic()
        self.kept_until_s = ended_s + WALK_REST * (ended_s - began_s)
        return {entry.job_id: entry for entry in walked}


def _names_and_uids(
    users: tuple[str, ...] | None,
) -> tuple[list[str] | None, list[int] | None]:
    """Names, or decimal uids where all are numbers."""
    if users is None:
        return None, None
    if all(user.isascii() and user.isdecimal() for user in users):
        return None, [int(user) for user in users if len(user) <= UID_DIGITS_MAX]
    return list(users), None


__all__ = ["Connection", "Handlers", "Outlook"]
