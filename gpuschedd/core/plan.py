"""One pass: who starts now and where, who holds the reservation, and why the others wait.

`plan(snapshot, policy) -> Plan` is pure and the only place where order, placement, reservation and
promise meet. It decides; the controller commits and acts.

Theory. A pass is one walk along the queue in priority order, with at most one reservation:

  1. Nobody holds a reservation yet: a job that fits starts, since all before it have started or
     cannot be delayed (their shadow time is unknown).
  2. The first job that does not fit but that ends will bring its GPUs becomes the head (EASY
     backfill). It holds them from a time on: T, by planned ends, where there is one, else X, by
     expected ends.
  3. Behind the head a job that fits starts only if it cannot delay the head: either it ends by
     then, as planned or as expected, or the head still has its GPUs beside it (`reservation`). So
     no guess delays a head that has T, and guesses about one without T have an end (`patience`).

What a start changes is only more load, so a shape (`Need`) that failed fails for the rest of the
pass, and so does every larger one: that is why a long queue costs little. The promise's holder is
looked at before all others, so that no order of users can take a promised start away.

The invariant that makes a reservation a promise: every job that runs past T was counted at T when
it was let in, and every other one ends by T as planned. An early end only frees. So T, computed
anew in each pass, never moves later by our own doing; what else moves it (a drain, foreign memory,
a longer limit) is blamed by name (`promises`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from heapq import nsmallest

from gpusched_client.terms import GpuUuid, JobId
from gpuschedd.core import patience, promises, reasons
from gpuschedd.core.aftermath import after, joined
from gpuschedd.core.failures import NOW, PAST_HOLD, Failures
from gpuschedd.core.horizon import HorizonView, Rooms, rooms_of
from gpuschedd.core.lengths import expected
from gpuschedd.core.model import (
    NEVER_S,
    Backfill,
    FirstHead,
    Grant,
    Horizon,
    Order,
    Plan,
    Policy,
    PriorityParts,
    Promise,
    PromiseEnd,
    PromiseException,
    PromiseOutcome,
    Reason,
    Request,
    Reservation,
    Rule,
    Snapshot,
    Start,
    Topology,
    UserQueue,
    Waiting,
)
from gpuschedd.core.priority import Entry, Merge
from gpuschedd.core.reservation import (
    Hold,
    Shadow,
    could_select,
    is_sure,
    select_freely,
    shadow,
)
from gpuschedd.core.timeline import Host, Load, Need, Slot, end_if_decided_s
from gpuschedd.core.told import Telling
from gpuschedd.core.unknown import why_unknown

EXPLAINED_JOBS = 50
FIRST_JOBS = 10  # whose priorities are on record with each start
WHO_GPUS_MAX = 64  # on a larger host only the head's reason names jobs: a pass must stay short


def plan(
    snapshot: Snapshot,
    policy: Policy,
    explain: int = EXPLAINED_JOBS,
    host: Host | None = None,
) -> Plan:
    """What to start now, and what the rest waits for.

    `explain`: at least so many jobs get a reason of their own, where there are so many; below 0: no
    reasons and no priority parts at all (for `replay`). `host`: what the snapshot says of GPUs and
    running jobs, where a caller keeps it from pass to pass; those that start are on it afterwards.

    Most plans are never read but for their starts. So the reasons and priority parts are made when
    somebody asks, by the same pass made again.
    """
    made = _made(snapshot, policy, explain, host)
    if explain < 0:
        return made
    told = Telling(partial(_made, snapshot, policy, explain, tells=True))
    return replace(made, reasons=told.reasons, priorities=told.priorities)


def _made(
    snapshot: Snapshot,
    policy: Policy,
    explain: int,
    host: Host | None = None,
    *,
    tells: bool = False,
) -> Plan:
    seen, one = snapshot, _Pass(snapshot, policy, explain, host, tells=tells)
    made = one.run()
    while one.order_changed:
        # A job that was capped by one that starts may come before all that were looked at.
        seen = after(snapshot, made)
        one = _Pass(seen, policy, explain, host, tells=tells)
        made = joined(made, one.run(), snapshot)
    return made


def reason_of(made: Plan, job_id: JobId) -> Reason:
    """The reason of any job that waits for GPUs alone, also where the pass did not look at it."""
    return made.reasons.get(job_id, made.fallback)


class _Pass:
    """The state of one pass. Lives inside `plan` only."""

    def __init__(
        self,
        snapshot: Snapshot,
        policy: Policy,
        explain: int,
        host: Host | None,
        *,
        tells: bool,
    ) -> None:
        """`tells`: with reasons and priority parts."""
        self.snapshot = snapshot
        self.policy = policy
        self.explain = explain
        self.tells = tells
        self.now_s = snapshot.now_s
        self.host = Host(snapshot, policy) if host is None else host
        self.seats: list[tuple[GpuUuid, Load]] = []  # of those that start, as expected
        self._expected: Host | None = None
        self.rooms: Rooms = rooms_of(snapshot)
        self.horizon = HorizonView(self._horizon(), policy)
        self.failures = Failures()
        self.hope: dict[tuple[int | None, int | None], bool] = {}  # of _could_start, for now
        self.could: set[tuple[Need, int]] = set()  # could start, for now
        self.whole_rooms: dict[int, int] = {}  # of _whole_room, for now
        self.starts: list[Start] = []
        self.reasons: dict[JobId, Reason] = {}
        self.priorities: dict[JobId, PriorityParts] = {}
        self.unknown: set[JobId] = set()
        self.why: dict[Need, Reason] = {}  # of those that nothing brings GPUs
        self.lacks: dict[Need, Reason] = {}  # as the host is now
        self.hold: Hold | None = None
        self.guesses = False  # the hold is by expected ends
        self.closed: frozenset[int] = frozenset()  # positions on which nothing behind it starts
        self.first_heads: dict[JobId, FirstHead] = {}
        self.blocked_by: JobId | None = None  # `off`: the job that nobody overtakes
        self.examined = 0
        self.over_limits = 0  # of these
        self.first: list[tuple[JobId, float]] = []  # in the order, a few
        self.passes_over = False
        self.promise: Promise | None = snapshot.promise
        self.ended: PromiseEnd | None = None

    def run(self) -> Plan:
        merge = self.merge = self._open_merge()
        if self.snapshot.gpus:
            self._walk(merge)
        merge.close()
        self._cpu_jobs()
        reservation = self._reservation()
        return Plan(
            now_s=self.now_s,
            starts=tuple(self.starts),
            reservation=reservation,
            promise=self.promise,
            ended=self.ended,
            reasons=self.reasons,
            fallback=self._fallback(),
            priorities=self.priorities,
            unknown=frozenset(self.unknown),
            horizon=self._horizon(),
            next_change_at_s=self._next_change_at_s(reservation),
            first_heads=self.first_heads,
            first=tuple(self.first),
        )

    @property
    def order_changed(self) -> bool:
        """True if a second pass would take the jobs in another order: then it must be made.

        A job that starts caps its user's others no longer, and may leave those no room that did.
        """
        if self.policy.order is Order.FCFS:
            return False
        users = {start.uid for start in self.starts if start.grants}
        return any(self._was_capped(q) for q in self.snapshot.queues.gpu if q.uid in users)

    def _was_capped(self, queue: UserQueue) -> bool:
        """True if a job of the list may have come later than it would in a second pass.

        Only jobs with some age can: without any they are in the order of the list.
        """
        started, cap = {start.job_id for start in self.starts}, NEVER_S
        for job in queue.jobs[: queue.aged_to]:
            own = self.merge.own_priority(job, 0.0)
            is_started = job.job_id in started
            if own > cap and not is_started:
                return True
            if is_started or queue.uid in self.rooms:
                cap = min(cap, own)
        return False

    @property
    def expected(self) -> Host:
        """The host with expected ends; made when it is asked for."""
        if self._expected is None:
            self._expected = Host(self.snapshot, self.policy, expected=True)
            for uuid, load in self.seats:
                self._expected.add(self._expected.by_uuid[uuid], load)
        return self._expected

    # -- order ---------------------------------------------------------------------------------

    def _open_merge(self) -> Merge:
        """The merge of all lists; a live promise's holder was looked at before it."""
        holder = None if self.promise is None else self.promise.job_id
        merge = Merge(self.snapshot, self.policy, self.horizon, first=holder)
        if self.promise is None:
            return merge
        entry = merge.holder(self.snapshot)
        if entry is None:
            self._end_promise(PromiseOutcome.WITHDRAWN, None)
        elif not promises.sticks(self.policy):
            self._end_promise(PromiseOutcome.LOST, PromiseException.CONFIG)
        elif self._holder_waits_or_starts(entry):
            return merge
        # What was promised is no longer taken, of nobody's limit.
        self.rooms = rooms_of(replace(self.snapshot, promise=None))
        self.horizon = HorizonView(self._horizon(), self.policy)
        return Merge(self.snapshot, self.policy, self.horizon)

    def _holder_waits_or_starts(self, entry: Entry) -> bool:
        """Look at the promise's holder first. False: its start is unknown, the promise is lost."""
        assert self.promise is not None
        promise, job = self.promise, entry.job
        need = self.host.need(job.request, job.uid)
        fitting = self.host.fitting(need)
        chosen = select_freely(need, fitting)
        if chosen is not None:
            self._count(entry)
            self._note(entry, None)
            self._start(job, need, chosen, Rule.PROMISED)
            self._holder_started(promise)
            return True
        found = shadow(self.host, need)
        if found is None:
            self._end_promise(PromiseOutcome.LOST, self._blame(job, promise))
            return False
        self._count(entry)
        self.failures.add(need, NOW)
        if found.at_s > promise.start_by_s and self.host.awaits_sample:
            # The last sample counts for nothing where a job has ended since: what it shows there
            # may be that job's, and nobody may gain by a delay that the next sample takes back.
            if promise.start_by_s < self.now_s and promise.delayed_by is None:
                self.promise = replace(promise, delayed_by=self._blame(job, promise))
            closed = Shadow(max(promise.start_by_s, self.now_s), found.groups)
            self._become_head(entry, need, closed, is_closed=True)
            return True
        is_earlier = found.at_s < promise.start_by_s
        self.promise = promises.carried_on(
            promise,
            found.at_s,
            self.now_s + promises.slack_s(self.policy),
            lambda: self._blame(job, promise),
            planned=not is_earlier or self._can_be_promised(need, found.at_s),
        )
        if found.at_s < self.promise.start_by_s:
            found = shadow(self.host, need, self.promise.start_by_s) or found
        self._become_head(entry, need, found)
        return True

    def _walk(self, merge: Merge) -> None:
        if self.explain <= 0 and self.hold is not None:
            self._pass_over(merge)
            if not self._could_start(merge.whole_gpus_min, merge.shared_bytes_min):
                return
        while (entry := merge.pop()) is not None:
            self._count(entry)
            if self.blocked_by is not None:
                if self.tells:
                    self._note(entry, reasons.strict(self.blocked_by))
            elif not self.passes_over or not self._fails_again(entry.job):
                self._examine(entry)
            if self.examined >= self.explain:
                if self._hopeless(entry, merge):
                    return
                if self.hold is not None and not self.passes_over:
                    self._pass_over(merge)

    def _count(self, entry: Entry) -> None:
        self.examined += 1
        if len(self.first) < FIRST_JOBS:
            self.first.append((entry.job.job_id, -entry.minus_priority))

    def _pass_over(self, merge: Merge) -> None:
        """Skip what fails in any case."""
        self.passes_over = True
        merge.pass_over(self._fails_again, self._all_fail)

    def _all_fail(self, queue: UserQueue) -> bool:
        """True if no job in the list could start or become the head."""
        if not self._could_start(queue.whole_gpus_min, queue.shared_bytes_min):
            return True
        if self.rooms and self._all_over_limit(queue):
            return True
        if self.hold is None:
            return False
        uid = queue.uid
        # By guesses each key has an end of its own: with all of them fails who fails at once.
        if queue.least and self._each_fails(uid, queue.least):
            return True
        if queue.shapes is not None:
            for request, key in queue.shapes:
                if not self._fails(uid, request, self._level(uid, request, key)):
                    return False
            return True
        return queue.requests is not None and self._each_fails(uid, queue.requests)

    def _all_over_limit(self, queue: UserQueue) -> bool:
        """True if the limit of its user leaves no job of the list any room."""
        room = self._room_of(queue.uid)
        if room is None:
            return False
        if room[1] < 1:
            return True
        return bool(queue.least) and all(request.gpus > room[0] for request in queue.least or ())

    def _each_fails(self, uid: int, requests: frozenset[Request]) -> bool:
        """Whether none of these could start behind the head, whatever is guessed of its length."""
        for request in requests:
            if not self._fails(
                uid, request, NOW if self.guesses else self._level(uid, request, "")
            ):
                return False
        return True

    def _fails(self, uid: int, request: Request, level: int) -> bool:
        """Whether no job of that kind could start behind the head."""
        room = self._room_of(uid) if self.rooms else None
        if room is not None and (request.gpus > room[0] or room[1] < 1):
            return True
        if self._takes_any(request):
            return request.gpus > self._whole_room(level)
        vram = request.vram_bytes
        size = None if vram is None else vram + self.policy.margin_bytes
        if not self.host.could_take(request.gpus, size):
            return True
        need = self.host.need(request, uid)
        if (need, level) in self.could:
            return False
        if self.failures.covers(need, level):
            return True
        if self._could_select(need, level):
            self.could.add((need, level))
            return False
        self._failed(need, level)
        return True

    def _hopeless(self, entry: Entry, merge: Merge) -> bool:
        """True when no further job can start; drops a list in which none can."""
        if self.blocked_by is not None:
            return True
        if self._all_fail(entry.stream.queue):
            merge.drop(entry)
            return not self._could_start(merge.whole_gpus_min, merge.shared_bytes_min)
        return False

    def _could_start(self, whole_gpus_min: int | None, shared_bytes_min: int | None) -> bool:
        """Could the least of these asks sit now, or, with no head yet, become the head?"""
        key = (whole_gpus_min, shared_bytes_min)
        could = self.hope.get(key)
        if could is None:
            could = self.hope[key] = self._least_could_start(*key)
        return could

    def _least_could_start(self, whole_gpus_min: int | None, shared_bytes_min: int | None) -> bool:
        asks: list[tuple[int, int | None]] = []
        if whole_gpus_min is not None:
            asks.append((whole_gpus_min, None))
        if shared_bytes_min is not None:
            asks.append((1, shared_bytes_min + self.policy.margin_bytes))
        could = [self.host.could_take]
        if self.hold is None:
            could.append(self.host.could_ever_take)
        return any(could_take(*ask) for ask in asks for could_take in could)

    def _fails_again(self, job: Waiting) -> bool:
        """True if nothing is lost when the job is not looked at: it fails, and that is all."""
        request, vram = job.request, job.request.vram_bytes
        size = None if vram is None else vram + self.policy.margin_bytes
        if not self.host.could_take(request.gpus, size):
            return True
        level = self._level(job.uid, request, job.length_key)
        if size is None and request.gpus >= self.failures.whole_gpus[level]:
            return True
        if self.explain < 0 and self._takes_any(request):
            return request.gpus > self._whole_room(level)
        return self.failures.covers(self.host.need(request, job.uid), level)

    def _takes_any(self, request: Request) -> bool:
        """True if nothing but the number of idle GPUs matters to it."""
        return (
            request.vram_bytes is None
            and request.gpu_model is None
            and not request.card_bytes
            and request.topology is Topology.ANY
            and not self.host.has_slices
        )

    def _whole_room(self, level: int) -> int:
        """How many GPUs a request that takes any may have now: all fewer, and none more."""
        room = self.whole_rooms.get(level)
        if room is None:
            room = self.whole_rooms[level] = self._count_whole(level)
        return room

    def _count_whole(self, level: int) -> int:
        if self._may_not(level):
            return 0
        idle = [slot for slot in self.host.idle() if slot.position not in self.closed]
        if level == NOW or self.hold is None:
            return len(idle)
        return self.hold.room_beside(idle)

    # -- one job -------------------------------------------------------------------------------

    def _examine(self, entry: Entry) -> None:
        job = entry.job
        if self._over_limit(entry, self._room_of(job.uid)):
            return
        need = self.host.need(job.request, job.uid)
        level = self._level(job.uid, job.request, job.length_key)
        if not self.failures.covers(need, level):
            chosen = self._select(need, level)
            if chosen is not None:
                self._note(entry, None)
                self._start(job, need, chosen, self._rule(level))
                return
            level = self._failed(need, level)
        self._waits(entry, need, level)

    def _rule(self, level: int) -> Rule:
        if self.hold is None:
            return Rule.FIRST
        return Rule.SPARE if level > NOW else Rule.GAP

    def _failed(self, need: Need, level: int) -> int:
        """Remember that such a request failed; at which level it does."""
        if level > NOW and not could_select(need, self._fitting(need)):
            level = NOW
        self.failures.add(need, level)
        return level

    def _level(self, uid: int, request: Request, length_key: str) -> int:
        """What kind of permission a job needs, by its end of the hold's kind."""
        if self.hold is None:
            return NOW
        length_s = request.time_limit_s
        if self.guesses:
            length_s = self._expected_s(uid, request, length_key)
        if length_s is None:
            return PAST_HOLD
        end_s = end_if_decided_s(self.now_s, length_s, self.policy)
        return PAST_HOLD if end_s > self.hold.at_s else NOW

    def _expected_s(self, uid: int, request: Request, length_key: str) -> float:
        return expected(self.snapshot.lengths, uid, length_key, request, self.policy).length_s

    def _fitting(self, need: Need) -> Sequence[Slot]:
        """GPUs on which the request could sit this moment, the closed ones apart."""
        fitting = self.host.fitting(need)
        if not self.closed:
            return fitting
        return [slot for slot in fitting if slot.position not in self.closed]

    def _select(self, need: Need, level: int) -> list[Slot] | None:
        if self._may_not(level):
            return None
        fitting = self._fitting(need)
        if level == NOW or self.hold is None:
            return select_freely(need, fitting)
        return self.hold.select(need, fitting)

    def _could_select(self, need: Need, level: int) -> bool:
        """Whether there is a selection at all."""
        if self._may_not(level):
            return False
        fitting = self._fitting(need)
        if level == NOW or self.hold is None:
            return could_select(need, fitting)
        return self.hold.could_select(need, fitting)

    def _may_not(self, level: int) -> bool:
        """True where the policy lets no such job start behind the head."""
        is_before = self.policy.backfill is Backfill.BEFORE_RESERVATION
        return is_before and (bool(self.closed) or level > NOW)

    def _room_of(self, uid: int) -> tuple[float, float] | None:
        """What is left of a user's limit: a reservation counts as taken. None: no limit."""
        room, hold = self.rooms.get(uid), self.hold
        if room is None or hold is None or hold.head.uid != uid:
            return room
        if self.promise is not None and self.promise.job_id == hold.head.job_id:
            return room  # it is in there already
        return room[0] - hold.need.gpus, room[1] - 1

    def _over_limit(self, entry: Entry, room: tuple[float, float] | None) -> bool:
        if room is None or (entry.job.request.gpus <= room[0] and room[1] >= 1):
            return False
        self.over_limits += 1
        if self.tells:
            self._note(entry, self._why_over_limit(entry.job, room))
        return True

    def _why_over_limit(self, job: Waiting, room: tuple[float, float]) -> Reason:
        """Unless it could not start either if the limit were higher, since GPUs are away."""
        need = self.host.need(job.request, job.uid)
        if len(self.host.slots) < len(self.snapshot.gpus):
            eligible = len(self.host.eligible(need))
            if eligible < need.gpus:
                return reasons.unavailable(need, eligible, self.snapshot.gpus, ())
        limit = self.snapshot.standings[job.uid].limit
        hold = self.hold
        kept_for = hold.head.job_id if hold is not None and hold.head.uid == job.uid else None
        return reasons.user_limit(need.gpus, room, limit, kept_for)

    def _waits(self, entry: Entry, need: Need, level: int) -> None:
        """The job does not start in this pass: it becomes the head, or it is told why it waits."""
        if not self.horizon.known(entry.job.request, entry.job.uid):
            self._is_unknown(entry, need)
        elif self.hold is None:
            self._becomes_first(entry, need)
        elif self.tells and (self.examined <= self.explain or level > NOW):
            self._explain(entry, need, level)

    def _becomes_first(self, entry: Entry, need: Need) -> None:
        found = shadow(self.host, need)
        guesses = found is None
        if found is None:
            found = shadow(self.expected, need)
        assert found is not None, "the horizon knows what is expected to end"
        if self.policy.backfill is Backfill.OFF:
            self.blocked_by = entry.job.job_id
        self._become_head(entry, need, found, guesses=guesses)

    def _become_head(
        self,
        entry: Entry,
        need: Need,
        found: Shadow,
        *,
        guesses: bool = False,
        is_closed: bool = False,
    ) -> None:
        """`guesses`: by expected ends. `is_closed`: nothing may run past that time at all."""
        job, host = entry.job, self.expected if guesses else self.host
        hold = Hold(host, job, need, found, is_closed=is_closed)
        if self.tells:
            free = len(self.host.fitting(need))
            why = reasons.resources(self.host, need, free, found.at_s, hold.shown())
            self._note(entry, reasons.unplanned(why, self._unlimited(hold)) if guesses else why)
        if self.policy.backfill is Backfill.OFF:
            return
        first = self._first_as_head(job, need)
        self.hold, self.guesses = hold, guesses
        if guesses and self.now_s >= patience.ends_at_s(first, self.policy):
            self.closed = patience.closed_for(self.expected, need)
        self.hope.clear()
        self.could.clear()
        self.whole_rooms.clear()

    def _unlimited(self, hold: Hold) -> list[JobId]:
        """The jobs without limit on the GPUs that are shown as its future ones."""
        slots = (self.host.by_uuid[slot.gpu.uuid] for slot in hold.shown())
        loads = (load for slot in slots for load in slot.loads)
        return sorted({load.job_id for load in loads if load.end_s == NEVER_S and not load.stuck})

    def _first_as_head(self, job: Waiting, need: Need) -> FirstHead:
        if job.first_head is not None:
            return job.first_head
        found = shadow(self.expected, need)
        expected_at_s = self.now_s if found is None else found.at_s
        first = self.first_heads[job.job_id] = FirstHead(self.now_s, expected_at_s)
        return first

    def _is_unknown(self, entry: Entry, need: Need) -> None:
        self.unknown.add(entry.job.job_id)
        if not self.tells:
            return
        if need not in self.why:
            self.why[need] = why_unknown(self.expected, need, self.snapshot.gpus)
        self._note(entry, self.why[need])

    def _explain(self, entry: Entry, need: Need, level: int) -> None:
        assert self.hold is not None
        hold, job = self.hold, entry.job
        fitting = self.host.fitting(need)
        free = len(fitting)
        if not could_select(need, fitting):
            self._note(entry, self._lacks_gpus(need, free))
        elif level == NOW and self.closed:
            first, ended_at_s = self._first_of(hold.head), self._patient_until_s(hold.head)
            self._note(entry, reasons.closed(need, free, hold.head.job_id, first, ended_at_s))
        else:
            length_s = job.request.time_limit_s
            if self.guesses:
                length_s = self._expected_s(job.uid, job.request, job.length_key)
            head = hold.head.job_id
            self._note(
                entry,
                reasons.reserved(
                    need, free, length_s, head, hold.at_s, hold.spare, guesses=self.guesses
                ),
            )

    def _lacks_gpus(self, need: Need, free: int) -> Reason:
        """Too few are free, and who has those that are planned to be free first."""
        if need not in self.lacks:
            slots, first = self.host.eligible(need), list[Slot]()
            if len(slots) <= WHO_GPUS_MAX:
                timed = [(self.host.free_at_s(slot, need), slot.position, slot) for slot in slots]
                first = [slot for _at_s, _position, slot in nsmallest(need.gpus, timed)]
            self.lacks[need] = reasons.resources(self.host, need, free, None, first)
        return self.lacks[need]

    def _note(self, entry: Entry, reason: Reason | None) -> None:
        if not self.tells:
            return
        job_id = entry.job.job_id
        if reason is not None:
            self.reasons[job_id] = reason
        self.priorities[job_id] = entry.parts

    def _start(self, job: Waiting, need: Need, slots: list[Slot], rule: Rule) -> None:
        if self._level(job.uid, job.request, job.length_key) > NOW:
            assert self.hold is not None
            self.hold.commit(need, slots)
        start = self._start_of(job, _grants(need, slots), rule, self.examined)
        self._book(start)
        self._sit(start, slots, alone=need.whole or need.exclusive)
        self.hope.clear()
        self.could.clear()
        self.whole_rooms.clear()
        self.lacks.clear()

    def _start_of(self, job: Waiting, grants: tuple[Grant, ...], rule: Rule, rank: int) -> Start:
        """`grants` empty: it needs no GPU, so that no head and nobody before it matters."""
        hold = self.hold if grants else None
        return Start(
            job_id=job.job_id,
            uid=job.uid,
            grants=grants,
            whole=bool(grants) and job.request.whole,
            exclusive=job.request.exclusive,
            planned_end_s=end_if_decided_s(self.now_s, job.request.time_limit_s, self.policy),
            expected_s=self._expected_s(job.uid, job.request, job.length_key),
            rule=rule,
            rank=rank,
            over_limits=self.over_limits if grants else 0,
            without_end=len(self.unknown) if grants else 0,
            head=None if hold is None else (hold.head.job_id, hold.at_s),
            guessed=self.guesses and bool(grants),
            first_head=job.first_head,
        )

    def _sit(self, start: Start, slots: list[Slot], *, alone: bool) -> None:
        """From now on it is there, until its planned end or, on the other host, its expected."""
        expected_end_s = end_if_decided_s(self.now_s, start.expected_s, self.policy)
        end_s, load = start.planned_end_s, None
        for slot, grant in zip(slots, start.grants, strict=True):
            held = grant.held_bytes
            if load is None or load.held_bytes != held:
                load = Load(end_s, held, alone, start.uid, start.job_id, self.now_s, False)
                expected_load = load._replace(end_s=min(expected_end_s, end_s))
            self.host.add(slot, load)
            self.seats.append((grant.uuid, expected_load))
            if self._expected is not None:
                self._expected.add(self._expected.by_uuid[grant.uuid], expected_load)

    def _book(self, start: Start) -> None:
        room = self.rooms.get(start.uid)
        held = self.promise is not None and self.promise.job_id == start.job_id
        if room is not None and not held:
            self.rooms[start.uid] = (room[0] - len(start.grants), room[1] - 1)
        self.starts.append(start)

    # -- CPU-only jobs -------------------------------------------------------------------------

    def _cpu_jobs(self) -> None:
        if not self.snapshot.queues.cpu:
            return
        taken = sum(1 for job in self.snapshot.running if not job.grants)
        merge = Merge(self.snapshot, self.policy, self.horizon, cpu=True)
        self._walk_cpu(merge, taken)
        merge.close()

    def _walk_cpu(self, merge: Merge, taken: int) -> None:
        explained = rank = 0
        while (entry := merge.pop()) is not None:
            rank += 1
            # No reservation of GPUs counts here: such a job never waits for any.
            if self._over_limit(entry, self.rooms.get(entry.job.uid)):
                continue
            if taken < self.policy.max_cpu_jobs:
                taken += 1
                self._note(entry, None)
                self._book(self._start_of(entry.job, (), Rule.SLOT, rank))
                continue
            self._note(entry, reasons.cpu_slots(taken, self.policy.max_cpu_jobs))
            explained += 1
            if explained >= self.explain:
                return

    # -- promise and reservation ---------------------------------------------------------------

    def _blame(self, job: Waiting, promise: Promise) -> PromiseException:
        return promises.blame(self.snapshot, self.policy, job.request, job.uid, promise)

    def _can_be_promised(self, need: Need, at_s: float) -> bool:
        """Planned, by jobs that have to end; not by strangers who may leave."""
        return self.host.is_planned(at_s) and is_sure(self.host, need, at_s)

    def _holder_started(self, promise: Promise) -> None:
        if self.now_s <= promise.start_by_s:
            self._end_promise(PromiseOutcome.KEPT, None)
        else:
            # Its cause has just gone, or no pass would start it: nothing but a late end is left.
            cause = promise.delayed_by or PromiseException.LATE_END
            self._end_promise(PromiseOutcome.BROKEN, cause)

    def _end_promise(self, outcome: PromiseOutcome, cause: PromiseException | None) -> None:
        assert self.promise is not None
        self.ended = PromiseEnd(self.promise, outcome, cause, self.now_s)
        self.promise = None

    def _reservation(self) -> Reservation | None:
        hold = self.hold
        if hold is None:
            return None
        job, before = hold.head, self.snapshot.reservation
        if (
            self.promise is None
            and not self.guesses
            and promises.becomes_promise(job, hold.at_s, self.now_s, self.policy)
            and self._can_be_promised(hold.need, hold.at_s)
        ):
            self.promise = Promise(job.job_id, self.now_s, hold.at_s)
        same = before is not None and before.job_id == job.job_id
        return Reservation(
            job_id=job.job_id,
            start_s=hold.at_s,
            since_s=before.since_s if before is not None and same else self.now_s,
            promised=self.promise is not None and self.promise.job_id == job.job_id,
            gpus=self._uuids(hold.shown()) if self.explain >= 0 else (),
            spare=hold.spare,
            guessed=self.guesses,
            patient_until_s=self._patient_until_s(job) if self.guesses else None,
        )

    def _patient_until_s(self, head: Waiting) -> float:
        return patience.ends_at_s(self._first_of(head), self.policy)

    def _first_of(self, head: Waiting) -> FirstHead:
        return head.first_head or self.first_heads[head.job_id]

    # -- the rest of the plan ------------------------------------------------------------------

    @staticmethod
    def _uuids(slots: list[Slot]) -> tuple[GpuUuid, ...]:
        return tuple(slot.gpu.uuid for slot in slots)

    def _horizon(self) -> Horizon:
        made = Horizon(
            gpus=self.snapshot.gpus, residues=self.host.residues(), rooms=dict(self.rooms)
        )
        settled = self.snapshot.queues.horizon
        return settled if settled is not None and settled == made else made

    def _fallback(self) -> Reason:
        if not self.snapshot.gpus:
            return reasons.no_gpus()
        if self.blocked_by is not None:
            return reasons.strict(self.blocked_by)
        return reasons.behind(None if self.hold is None else self.hold.head.job_id)

    def _next_change_at_s(self, reservation: Reservation | None) -> float | None:
        """The earliest later time at which this plan may differ though nothing happened."""
        times = [self.host.next_change_s]
        if reservation is not None:
            assert self.hold is not None
            times.append(reservation.start_s)
            if reservation.patient_until_s is not None:
                times += [self.expected.next_change_s, reservation.patient_until_s]
            if not reservation.promised:
                times.append(self.now_s + self.policy.rerank_s)
            if not reservation.promised and not reservation.guessed:
                due_s = promises.becomes_promise_at_s(
                    self.hold.head, reservation.start_s, self.now_s, self.policy
                )
                times += [] if due_s is None else [due_s]
        if self.promise is not None:
            times.append(self.promise.start_by_s)
        return min((at_s for at_s in times if self.now_s < at_s < NEVER_S), default=None)


def _grants(need: Need, slots: Sequence[Slot]) -> tuple[Grant, ...]:
    """What the job holds on each of its GPUs."""
    grants = []
    for slot in slots:
        held = slot.gpu.capacity_bytes if need.whole else need.bytes
        grants.append(Grant(slot.gpu.uuid, held, held))
    return tuple(grants)
