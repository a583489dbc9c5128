"""One pass: who starts now and where, who holds the reservation, and why the others wait.

`plan(snapshot, policy) -> Plan` is pure and the only place where order, placement, reservation and
promise meet. It decides; the controller commits and acts.

Theory. A pass is one walk along the queue in priority order, with at most one reservation:

  1. Nobody holds a reservation yet: a job that fits starts, since all before it have started or
     cannot be delayed (their shadow time is unknown).
  2. The first job that does not fit but has a shadow time T becomes the head (EASY backfill).
  3. Behind the head a job that fits starts only if it cannot delay the head: either it ends by T
     as planned, or the head still has its GPUs at T beside it (`reservation`).

What a start changes is only more load, so a shape (`Need`) that failed fails for the rest of the
pass, and so does every larger one: that is why a long queue costs little. The promise's holder is
looked at before all others, so that no order of users can take a promised start away.

The invariant that makes a reservation a promise: every job that runs past T was counted at T when
it was let in, and every other one ends by T. An early end only frees. So T, computed anew in each
pass, never moves later by our own doing; what else moves it (a drain, foreign memory, a longer
limit) is blamed by name (`promises`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import nsmallest

from gpusched_client.terms import GpuUuid, JobId
from gpuschedd.core import promises, reasons
from gpuschedd.core.horizon import UNBOUNDED_GPUS, HorizonView, Rooms, rooms_of
from gpuschedd.core.model import (
    NEVER_S,
    Backfill,
    Grant,
    Horizon,
    Plan,
    Policy,
    PriorityParts,
    Promise,
    PromiseEnd,
    PromiseException,
    PromiseOutcome,
    Reason,
    Reservation,
    Snapshot,
    Start,
    UserQueue,
    Waiting,
)
from gpuschedd.core.priority import Entry, Merge
from gpuschedd.core.reservation import Hold, Shadow, is_sure, select_freely, shadow
from gpuschedd.core.timeline import Host, Load, Need, Slot, end_if_decided_s
from gpuschedd.core.unknown import why_unknown

EXPLAINED_JOBS = 50
WHO_GPUS_MAX = 64  # on a larger host only the head's reason names jobs: a pass must stay short

# What a failed request did not manage: to sit anywhere now; to sit there past T; to do so without
# a limit where GPUs are kept. Who fails at one level fails at those above.
NOW, PAST_T, WITHOUT_LIMIT = 0, 1, 2


def plan(snapshot: Snapshot, policy: Policy, explain: int = EXPLAINED_JOBS) -> Plan:
    """What to start now, and what the rest waits for.

    `explain`: at least so many jobs get a reason of their own, where there are so many; below 0: no
    reasons and no priority parts at all (for `replay`).
    """
    return _Pass(snapshot, policy, explain).run()


def reason_of(made: Plan, job_id: JobId) -> Reason:
    """The reason of any job that waits for GPUs alone, also where the pass did not look at it."""
    return made.reasons.get(job_id, made.fallback)


class _Failures:
    """Shapes that failed in this pass: a larger request of the same class fails with them."""

    def __init__(self) -> None:
        self._exact: set[tuple[Need, int]] = set()
        self._classes: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        # Per level the fewest whole GPUs that failed with no further wish: the more fail with them.
        self.whole_gpus = [UNBOUNDED_GPUS] * (WITHOUT_LIMIT + 1)

    def covers(self, need: Need, level: int) -> bool:
        """True if the request is known to fail."""
        if (need, level) in self._exact:
            return True
        known = self._classes.get((*need[1:2], *need[3:], level))
        if known is not None:
            gpus, size = need.gpus, need.bytes
            for failed_gpus, failed_bytes in known:
                if failed_gpus <= gpus and failed_bytes <= size:
                    self._exact.add((need, level))
                    return True
        return False

    def add(self, need: Need, level: int) -> None:
        """Remember a failure at this level and those above."""
        gpus, size = need.gpus, need.bytes
        for above in range(level, WITHOUT_LIMIT + 1):
            self._exact.add((need, above))
            key = (*need[1:2], *need[3:], above)
            known = self._classes.get(key, [])
            if need.whole and need.model is None and not need.card_bytes and not need.nvlink:
                self.whole_gpus[above] = min(self.whole_gpus[above], gpus)
            self._classes[key] = [pair for pair in known if pair[0] < gpus or pair[1] < size] + [
                (gpus, size)
            ]


class _Pass:
    """The state of one pass. Lives inside `plan` only."""

    def __init__(self, snapshot: Snapshot, policy: Policy, explain: int) -> None:
        self.snapshot = snapshot
        self.policy = policy
        self.explain = explain
        self.now_s = snapshot.now_s
        self.host = Host(snapshot, policy)
        self.rooms: Rooms = rooms_of(snapshot)
        self.horizon = HorizonView(self._horizon(), policy)
        self.failures = _Failures()
        self.hope: dict[tuple[int | None, int | None], bool] = {}  # of _could_start, for now
        self.starts: list[Start] = []
        self.view, self.view_starts = self.horizon, 0  # of the host with so many starts
        self.reasons: dict[JobId, Reason] = {}
        self.priorities: dict[JobId, PriorityParts] = {}
        self.unknown: set[JobId] = set()
        self.why: dict[Need, tuple[Reason, list[Slot]]] = {}  # of those without a shadow time
        self.lacks: dict[Need, Reason] = {}  # as the host is now
        self.hold: Hold | None = None
        self.kept: frozenset[int] = frozenset()  # positions on which nothing without limit starts
        self.kept_for = JobId(0)
        self.blocked_by: JobId | None = None  # `off`: the job that nobody overtakes
        self.examined = 0
        self.passes_over = False
        self.promise: Promise | None = snapshot.promise
        self.ended: PromiseEnd | None = None

    def run(self) -> Plan:
        merge = self._open_merge()
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
        )

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
            self._note(entry, None)
            self._start(job, need, chosen)
            self._holder_started(promise)
            return True
        found = shadow(self.host, need)
        if found is None:
            self._end_promise(PromiseOutcome.LOST, self._blame(job, promise))
            return False
        self.failures.add(need, NOW)
        if found.at_s > promise.start_by_s and self.host.awaits_sample:
            # The last sample counts for nothing where a job has ended since: what it shows there
            # may be that job's, and nobody may gain by a delay that the next sample takes back.
            closed_at_s = max(promise.start_by_s, self.now_s)
            self._become_head(entry, need, found, len(fitting), closed_at_s)
            return True
        self._become_head(entry, need, found, len(fitting))
        is_earlier = found.at_s < promise.start_by_s
        self.promise = promises.carried_on(
            promise,
            found.at_s,
            lambda: self._blame(job, promise),
            planned=not is_earlier or self._can_be_promised(job, need, found.at_s),
        )
        return True

    def _walk(self, merge: Merge) -> None:
        if self.explain <= 0 and self.hold is not None:
            self._pass_over(merge)
            if not self._could_start(merge.whole_gpus_min, merge.shared_bytes_min):
                return
        while (entry := merge.pop()) is not None:
            self.examined += 1
            if self.blocked_by is not None:
                self._note(entry, reasons.strict(self.blocked_by))
            elif not self.passes_over or not self._fails_again(entry.job):
                self._examine(entry)
            if self.examined >= self.explain:
                if self._hopeless(entry, merge):
                    return
                if self.hold is not None and not self.passes_over:
                    self._pass_over(merge)

    def _pass_over(self, merge: Merge) -> None:
        """Skip what fails in any case."""
        self.passes_over = True
        merge.pass_over(self._fails_again, self._all_fail)

    def _all_fail(self, queue: UserQueue) -> bool:
        """True if nothing is lost when the list is not looked at, as in _fails_again."""
        if self._could_start(queue.whole_gpus_min, queue.shared_bytes_min):
            return False
        return self._keeps_none() or self._horizon_now().knows_all(queue)

    def _keeps_none(self) -> bool:
        """No GPUs are kept for a further job: the first that waits for one without limit has."""
        return bool(self.kept) or not self.host.unlimited

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
        """True if nothing is lost when the job is not looked at: it fails, and that is all.

        (By a job without limit that starts later in this pass its start may become unknown; the
        next pass, which follows at once, sees that.)
        """
        request, vram = job.request, job.request.vram_bytes
        size = None if vram is None else vram + self.policy.margin_bytes
        if self.host.could_take(request.gpus, size):
            end_s = end_if_decided_s(self.now_s, request.time_limit_s, self.policy)
            if size is not None or request.gpus < self.failures.whole_gpus[self._level(end_s)]:
                return False
        return self._keeps_none() or self._horizon_now().known(request, job.uid)

    def _horizon_now(self) -> HorizonView:
        if self.view_starts != len(self.starts):
            self.view_starts = len(self.starts)
            self.view = HorizonView(self._horizon(), self.policy)
        return self.view

    # -- one job -------------------------------------------------------------------------------

    def _examine(self, entry: Entry) -> None:
        job = entry.job
        if self._over_limit(entry):
            return
        need = self.host.need(job.request, job.uid)
        end_s = end_if_decided_s(self.now_s, job.request.time_limit_s, self.policy)
        level = self._level(end_s)
        if self.failures.covers(need, level):
            self._waits(entry, need, level)
            return
        fitting = self.host.fitting(need)
        if level == WITHOUT_LIMIT:
            fitting = [slot for slot in fitting if slot.position not in self.kept]
        chosen = self._select(need, fitting, level)
        if chosen is not None:
            self._note(entry, None)
            self._start(job, need, chosen)
            return
        if level > NOW and select_freely(need, self.host.fitting(need)) is None:
            level = NOW
        self.failures.add(need, level)
        self._waits(entry, need, level)

    def _level(self, end_s: float) -> int:
        """What kind of permission a job with that planned end needs."""
        if end_s == NEVER_S and self.kept:
            return WITHOUT_LIMIT
        return PAST_T if self.hold is not None and end_s > self.hold.at_s else NOW

    def _select(self, need: Need, fitting: Sequence[Slot], level: int) -> list[Slot] | None:
        if level == NOW or self.hold is None:
            return select_freely(need, fitting)
        if self.policy.backfill is Backfill.BEFORE_RESERVATION:
            return None
        return self.hold.select(need, fitting)

    def _over_limit(self, entry: Entry) -> bool:
        room = self.rooms.get(entry.job.uid)
        if room is None or (entry.job.request.gpus <= room[0] and room[1] >= 1):
            return False
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
        return reasons.user_limit(need.gpus, room, limit)

    def _waits(self, entry: Entry, need: Need, level: int) -> None:
        """The job does not start in this pass: it becomes the head, or it is told why it waits."""
        if self.hold is None:
            limit_s = entry.job.request.time_limit_s
            barred = self.kept if limit_s is None else frozenset()
            found = None if need in self.why else shadow(self.host, need, barred)
            if found is not None:
                self._becomes_first(entry, need, found)
            elif barred and need not in self.why and shadow(self.host, need) is not None:
                self.unknown.add(entry.job.job_id)
                self._note(entry, reasons.kept(need, self.kept_for))
            else:
                self._is_unknown(entry, need)
        elif self._may_be_unknown(need.gpus) and (
            need in self.why or shadow(self.host, need) is None
        ):
            self._is_unknown(entry, need)
        elif self.examined <= self.explain or (level > NOW and self.explain >= 0):
            self._explain(entry, need, level)

    def _may_be_unknown(self, gpus: int) -> bool:
        """A cheap test: with everything in service and ending, every shadow time is known."""
        if self.explain < 0 and self.kept:
            return False
        in_service = len(self.host.slots)
        return self.host.lasting or in_service < len(self.snapshot.gpus) or gpus > in_service

    def _becomes_first(self, entry: Entry, need: Need, found: Shadow) -> None:
        if self.policy.backfill is Backfill.OFF:
            self.blocked_by = entry.job.job_id
        free = len(self.host.fitting(need)) if self.explain >= 0 else 0
        self._become_head(entry, need, found, free)

    def _become_head(
        self, entry: Entry, need: Need, found: Shadow, free: int, closed_at_s: float | None = None
    ) -> None:
        """`closed_at_s`: nothing may run past that time at all."""
        hold = Hold(self.host, entry.job, need, found, closed_at_s)
        if self.explain >= 0:
            reason = reasons.resources(self.host, need, free, found.at_s, hold.shown())
            self._note(entry, reason)
        if self.policy.backfill is not Backfill.OFF:
            self.hold = hold
            self.hope.clear()

    def _is_unknown(self, entry: Entry, need: Need) -> None:
        self.unknown.add(entry.job.job_id)
        if need not in self.why:
            self.why[need] = why_unknown(self.host, need, self.snapshot.gpus)
        reason, kept = self.why[need]
        self._note(entry, reason)
        if kept and not self.kept:
            self.kept = frozenset(slot.position for slot in kept)
            self.kept_for = entry.job.job_id

    def _explain(self, entry: Entry, need: Need, level: int) -> None:
        assert self.hold is not None
        free = len(self.host.fitting(need))
        if level == WITHOUT_LIMIT:
            self._note(entry, reasons.kept(need, self.kept_for))
            return
        if level == NOW or free < need.gpus:
            self._note(entry, self._lacks_gpus(need, free))
            return
        hold, limit_s = self.hold, entry.job.request.time_limit_s
        head = hold.head.job_id
        self._note(entry, reasons.reserved(need, free, limit_s, head, hold.at_s, hold.spare))

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
        if self.explain < 0:
            return
        job_id = entry.job.job_id
        if reason is not None:
            self.reasons[job_id] = reason
        self.priorities[job_id] = entry.parts

    def _start(self, job: Waiting, need: Need, slots: list[Slot]) -> None:
        end_s = end_if_decided_s(self.now_s, job.request.time_limit_s, self.policy)
        if self.hold is not None and end_s > self.hold.at_s:
            self.hold.commit(need, slots)
        alone = need.whole or need.exclusive
        grants = []
        for slot in slots:
            held = slot.gpu.capacity_bytes if need.whole else need.bytes
            load = Load(end_s, held, alone, job.uid, job.job_id, self.now_s, False)
            self.host.add(slot, load)
            grants.append(Grant(slot.gpu.uuid, held, held))
        self.hope.clear()
        self.lacks.clear()
        self._book(job, tuple(grants), need.whole, end_s)

    def _book(self, job: Waiting, grants: tuple[Grant, ...], whole: bool, end_s: float) -> None:
        room = self.rooms.get(job.uid)
        held = self.promise is not None and self.promise.job_id == job.job_id
        if room is not None and not held:
            self.rooms[job.uid] = (room[0] - len(grants), room[1] - 1)
        self.starts.append(Start(job.job_id, job.uid, grants, whole, job.request.exclusive, end_s))

    # -- CPU-only jobs -------------------------------------------------------------------------

    def _cpu_jobs(self) -> None:
        if not self.snapshot.queues.cpu:
            return
        taken = sum(1 for job in self.snapshot.running if not job.grants)
        merge = Merge(self.snapshot, self.policy, self.horizon, cpu=True)
        self._walk_cpu(merge, taken)
        merge.close()

    def _walk_cpu(self, merge: Merge, taken: int) -> None:
        explained = 0
        while (entry := merge.pop()) is not None:
            if self._over_limit(entry):
                continue
            if taken < self.policy.max_cpu_jobs:
                taken += 1
                self._note(entry, None)
                limit_s = entry.job.request.time_limit_s
                end_s = end_if_decided_s(self.now_s, limit_s, self.policy)
                self._book(entry.job, (), False, end_s)
                continue
            self._note(entry, reasons.cpu_slots(taken, self.policy.max_cpu_jobs))
            explained += 1
            if explained >= self.explain:
                return

    # -- promise and reservation ---------------------------------------------------------------

    def _blame(self, job: Waiting, promise: Promise) -> PromiseException:
        return promises.blame(self.snapshot, self.policy, job.request, job.uid, promise.start_by_s)

    def _can_be_promised(self, job: Waiting, need: Need, at_s: float) -> bool:
        """Planned, by jobs that have to end; not by strangers who may leave."""
        barred = self.kept if job.request.time_limit_s is None else frozenset()
        return self.host.is_planned(at_s) and is_sure(self.host, need, at_s, barred)

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
            and promises.becomes_promise(job, hold.at_s, self.now_s, self.policy)
            and self._can_be_promised(job, hold.need, hold.at_s)
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
        )

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
            if not reservation.promised:
                times.append(self.now_s + self.policy.rerank_s)
                due_s = promises.becomes_promise_at_s(
                    self.hold.head, reservation.start_s, self.now_s, self.policy
                )
                times += [] if due_s is None else [due_s]
        if self.promise is not None:
            times.append(self.promise.start_by_s)
        return min((at_s for at_s in times if self.now_s < at_s < NEVER_S), default=None)
