"""The rules of a pass once more, by exhaustive search: what small hosts are checked against.

Written from the contract's words, slowly and plainly, without the planner's own timeline, counts or
shortcuts: T and X by trying every end, "useful" by asking each GPU, sets by trying all of them. It
takes from the plan only which GPUs a start got, and from the queues only their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations

from gpusched_client.terms import JobId
from gpuschedd.core.lengths import expected
from gpuschedd.core.model import (
    HOUR_S,
    NEVER_S,
    Backfill,
    FirstHead,
    Gpu,
    GpuState,
    Plan,
    Policy,
    Request,
    RunningJob,
    Snapshot,
    Start,
    Topology,
    Waiting,
)
from gpuschedd.core.priority import queue_order

STEPS_S = (60.0, 300.0, 900.0, 1800.0, *(HOUR_S * h for h in (1, 2, 5, 10, 20, 50, 100)))
Set = tuple[int, ...]  # places of GPUs


@dataclass(frozen=True)
class Seat:
    """One job on one GPU."""

    held: int
    alone: bool
    uid: int
    since_s: float
    planned_s: float
    expected_s: float

    def end_s(self, guesses: bool) -> float:
        return self.expected_s if guesses else self.planned_s


def planned_end_s(job: RunningJob, now_s: float, policy: Policy) -> float:
    """max(decision + allowance + limit + grace, started + limit + grace, now); stuck: never."""
    if job.time_limit_s is None or job.stuck:
        return NEVER_S
    grace_s = policy.kill_grace_s
    ends_s = [job.decided_at_s + (policy.launch_allowance_s + job.time_limit_s) + grace_s]
    if job.started_at_s is not None:
        ends_s.append(job.started_at_s + job.time_limit_s + grace_s)
    if now_s > max(ends_s) + policy.stuck_after_s:
        return NEVER_S
    return max(*ends_s, now_s)


def expected_end_s(job: RunningJob, now_s: float, policy: Policy) -> float:
    """The first expectation, put off step by step until it is later than now."""
    planned_s = planned_end_s(job, now_s, policy)
    if job.stuck or planned_s == now_s or (planned_s == NEVER_S and job.time_limit_s is not None):
        return planned_s
    assert job.expected_s is not None
    end_s = job.decided_at_s + (policy.launch_allowance_s + job.expected_s) + policy.kill_grace_s
    steps_s = iter(STEPS_S)
    while end_s <= now_s:
        end_s += next(steps_s, STEPS_S[-1])
    return min(end_s, planned_s)


def wants_links(request: Request) -> bool:
    """Whether its GPUs have to be joined pair by pair."""
    return request.topology is Topology.NVLINK and request.gpus > 1


@dataclass
class Board:
    """The host during the pass: who sits where."""

    now_s: float
    policy: Policy
    gpus: tuple[Gpu, ...]
    seats: list[list[Seat]] = field(default_factory=list)

    @classmethod
    def of(cls, seen: Snapshot, policy: Policy) -> Board:
        board = cls(seen.now_s, policy, seen.gpus, [[] for _ in seen.gpus])
        places = {gpu.uuid: place for place, gpu in enumerate(seen.gpus)}
        for job in seen.running:
            planned_s = planned_end_s(job, seen.now_s, policy)
            ends_s = (planned_s, expected_end_s(job, seen.now_s, policy))
            for grant in job.grants:
                alone = job.whole or job.exclusive
                seat = Seat(grant.held_bytes, alone, job.uid, job.decided_at_s, *ends_s)
                board.seats[places[grant.uuid]].append(seat)
        return board

    def own_ends_s(self, request: Request, length_s: float) -> tuple[float, float]:
        """The planned and the expected end of a job that would be decided now."""
        after_s = self.policy.launch_allowance_s, self.policy.kill_grace_s
        limit_s = request.time_limit_s
        planned_s = NEVER_S if limit_s is None else self.now_s + (after_s[0] + limit_s) + after_s[1]
        return planned_s, min(planned_s, self.now_s + (after_s[0] + length_s) + after_s[1])

    def foreign_end_s(self, gpu: Gpu) -> float:
        if gpu.whole_idle and not gpu.foreign_bytes:
            return 0.0
        if gpu.leaves_by_s is not None and gpu.leaves_by_s > self.now_s:
            return gpu.leaves_by_s
        if gpu.foreign_since_s is None:
            return NEVER_S
        old_at_s = gpu.foreign_since_s + self.policy.foreign_age_s
        return old_at_s if old_at_s > self.now_s else NEVER_S

    def suits(self, gpu: Gpu, request: Request) -> bool:
        """In service, and the job could ever sit there."""
        model = request.gpu_model
        return (
            gpu.state is GpuState.OK
            and (model is None or model.casefold() in gpu.model.casefold())
            and gpu.total_bytes >= request.card_bytes
            and gpu.total_bytes - gpu.reserved_bytes >= self.bytes_of(request)
        )

    def bytes_of(self, request: Request) -> int:
        return 0 if request.vram_bytes is None else request.vram_bytes + self.policy.margin_bytes

    def takes(self, place: int, job: Waiting, beside: Iterable[Seat], foreign: bool) -> bool:
        """Could it sit there beside these jobs, and beside the foreign use if that is there?"""
        gpu, request, seats = self.gpus[place], job.request, list(beside)
        if not self.suits(gpu, request):
            return False
        if request.vram_bytes is None:
            return not seats and (gpu.whole_idle or not foreign)
        room = gpu.total_bytes - gpu.reserved_bytes - sum(seat.held for seat in seats)
        if foreign:
            room -= gpu.foreign_bytes
        if room < self.bytes_of(request):
            return False
        if not seats:
            return True
        if request.exclusive or not gpu.shareable or len(seats) >= self.policy.max_jobs_per_gpu:
            return False
        if not self.policy.across_users and any(seat.uid != job.uid for seat in seats):
            return False
        return not any(seat.alone for seat in seats)

    def takes_now(self, place: int, job: Waiting) -> bool:
        gpu = self.gpus[place]
        foreign = self.foreign_end_s(gpu) > 0
        return gpu.fresh and self.takes(place, job, self.seats[place], foreign)

    def useful(self, place: int, job: Waiting, at_s: float, guesses: bool) -> bool:
        """Could it sit there at that time, beside the jobs that run past it?"""
        gpu = self.gpus[place]
        if not gpu.fresh and at_s < self.now_s + self.policy.fresh_allowance_s:
            return False
        past = [seat for seat in self.seats[place] if seat.end_s(guesses) > at_s]
        return self.takes(place, job, past, self.foreign_end_s(gpu) > at_s)

    def sets(self, places: Iterable[int], request: Request) -> Iterator[Set]:
        """All choices of as many as it asks out of these; joined pair by pair where it must."""
        for chosen in combinations(places, request.gpus):
            if not wants_links(request) or self.are_joined(chosen):
                yield chosen

    def are_joined(self, chosen: Set) -> bool:
        return all(
            (one.island is not None and one.island == other.island)
            or other.uuid in one.joined
            or one.uuid in other.joined
            for one, other in combinations([self.gpus[place] for place in chosen], 2)
        )

    def sets_at(self, job: Waiting, at_s: float, guesses: bool) -> list[Set]:
        places = range(len(self.gpus))
        useful = [place for place in places if self.useful(place, job, at_s, guesses)]
        return list(self.sets(useful, job.request))

    def sets_now(self, job: Waiting, but: Iterable[int] = ()) -> list[Set]:
        closed = set(but)
        free = [p for p in range(len(self.gpus)) if p not in closed and self.takes_now(p, job)]
        return list(self.sets(free, job.request))

    def first_s(self, job: Waiting, guesses: bool) -> float:
        """T, or X: the earliest end at which enough GPUs are useful; NEVER_S: none is."""
        ends_s = {seat.end_s(guesses) for seats in self.seats for seat in seats}
        ends_s |= {self.foreign_end_s(gpu) for gpu in self.gpus}
        ends_s |= {self.now_s, self.now_s + self.policy.fresh_allowance_s}
        later = sorted(end_s for end_s in ends_s if self.now_s <= end_s < NEVER_S)
        return next((at_s for at_s in later if self.sets_at(job, at_s, guesses)), NEVER_S)

    def spare(self, job: Waiting, at_s: float, guesses: bool) -> int:
        """useful - gpus, in the largest set that it could take a part of."""
        useful = [p for p in range(len(self.gpus)) if self.useful(p, job, at_s, guesses)]
        linked = wants_links(job.request)
        for size in range(len(useful), job.request.gpus, -1):
            if not linked or any(map(self.are_joined, combinations(useful, size))):
                return size - job.request.gpus
        return 0

    def closed_for(self, job: Waiting) -> Set:
        """Of the GPUs it could ever use: where it could sit now, then whose youngest is oldest."""
        ever = [p for p in range(len(self.gpus)) if self.useful(p, job, 1e18, guesses=True)]

        def rank(place: int) -> tuple[bool, float, int]:
            youngest_s = max((seat.since_s for seat in self.seats[place]), default=0.0)
            return (not self.takes_now(place, job), youngest_s, place)

        def worst_first(chosen: Set) -> list[tuple[bool, float, int]]:
            return sorted(map(rank, chosen), reverse=True)

        return min(self.sets(ever, job.request), key=worst_first)

    def put(self, chosen: Set, job: Waiting, length_s: float) -> None:
        """It sits down."""
        request = job.request
        alone = request.vram_bytes is None or request.exclusive
        ends_s = self.own_ends_s(request, length_s)
        for place in chosen:
            gpu, held = self.gpus[place], self.bytes_of(request)
            held = held if request.vram_bytes is not None else gpu.total_bytes - gpu.reserved_bytes
            self.seats[place].append(Seat(held, alone, job.uid, self.now_s, *ends_s))

    def with_job(self, chosen: Set, job: Waiting, length_s: float) -> Board:
        other = Board(self.now_s, self.policy, self.gpus, [list(seats) for seats in self.seats])
        other.put(chosen, job, length_s)
        return other


@dataclass
class Held:
    """The head and its hold."""

    head: Waiting
    at_s: float
    guesses: bool
    first: FirstHead | None = None
    closed: Set = ()  # patience is over: nothing starts there
    spares: bool = True  # False: nothing may run past the hold
    is_promised: bool = False

    def is_over(self) -> bool:
        return bool(self.closed)


class Walk:
    """One pass by the rules, in the queue's order. `check` compares what the planner decided."""

    def __init__(self, seen: Snapshot, policy: Policy, made: Plan) -> None:
        self.seen, self.policy, self.made = seen, policy, made
        self.board = Board.of(seen, policy)
        self.starts: dict[JobId, Start] = {start.job_id: start for start in made.starts}
        self.held: Held | None = None
        self.unknown: set[JobId] = set()
        self.blocked = False
        self.promise = seen.promise
        self.happened: list[str] = []  # which hard cases this pass had

    def check(self) -> list[str]:
        """Every decision is as the rules say; what of the hard cases was met."""
        live = self._promise_lives()
        order_of = self.seen if live else replace(self.seen, promise=None)
        self.rooms = self._rooms(live)
        for job, _parts in queue_order(order_of, self.policy):
            self._one(job, is_promised=live and job.job_id == self.promise_of())
        assert self.unknown == self.made.unknown, (self.unknown, self.made.unknown)
        self._compare_head()
        return self.happened

    def promise_of(self) -> JobId | None:
        return None if self.promise is None else self.promise.job_id

    def _promise_lives(self) -> bool:
        """It ends in this pass where its holder has no T any more."""
        if self.promise is None:
            return False
        waits = [j for queue in self.seen.queues.gpu for j in queue.jobs]
        holder = next(job for job in waits if job.job_id == self.promise.job_id)
        can_start = bool(self.board.sets_now(holder))
        return can_start or self.board.first_s(holder, guesses=False) < NEVER_S

    def _rooms(self, live: bool) -> dict[int, list[float]]:
        rooms = {}
        for uid, standing in self.seen.standings.items():
            gpus, jobs = standing.limit.max_gpus, standing.limit.max_jobs
            own = [len(job.grants) for job in self.seen.running if job.uid == uid]
            if live:
                waits = [j for queue in self.seen.queues.gpu for j in queue.jobs]
                own += [
                    j.request.gpus for j in waits if j.uid == uid and j.job_id == self.promise_of()
                ]
            rooms[uid] = [
                NEVER_S if gpus is None else gpus - sum(own),
                NEVER_S if jobs is None else jobs - len(own),
            ]
        return rooms

    def _is_over_limit(self, job: Waiting) -> bool:
        gpus, jobs = self.rooms[job.uid]
        held = self.held
        if held is not None and held.head.uid == job.uid and not held.is_promised:
            gpus, jobs = gpus - held.head.request.gpus, jobs - 1
        return job.request.gpus > gpus or jobs < 1

    def _one(self, job: Waiting, *, is_promised: bool) -> None:
        if self.blocked or (not is_promised and self._is_over_limit(job)):
            assert job.job_id not in self.starts, f"job {job.job_id} may not be looked at"
            return
        allowed = self._allowed(job)
        start = self.starts.get(job.job_id)
        assert (start is not None) == bool(allowed), (
            f"job {job.job_id} {'starts' if start else 'waits'}; allowed: {allowed[:4]}"
        )
        if start is not None:
            places = {gpu.uuid: place for place, gpu in enumerate(self.seen.gpus)}
            chosen = tuple(sorted(places[grant.uuid] for grant in start.grants))
            assert chosen in allowed, f"job {job.job_id} on {chosen}, not one of {allowed[:4]}"
            self.board.put(chosen, job, self._length_s(job))
            if not is_promised:
                self.rooms[job.uid][0] -= job.request.gpus
                self.rooms[job.uid][1] -= 1
        elif self.board.first_s(job, guesses=True) == NEVER_S:
            self.unknown.add(job.job_id)
        elif self.held is None:
            self._becomes_head(job, is_promised=is_promised)

    def _length_s(self, job: Waiting) -> float:
        request, lengths = job.request, self.seen.lengths
        return expected(lengths, job.uid, job.length_key, request, self.policy).length_s

    def _allowed(self, job: Waiting) -> list[Set]:
        """The sets that it may start on now."""
        held = self.held
        if held is None:
            return self.board.sets_now(job)
        before_only = self.policy.backfill is Backfill.BEFORE_RESERVATION
        if before_only and held.is_over():
            return []
        sets = self.board.sets_now(job, held.closed)
        if self.board.own_ends_s(job.request, self._length_s(job))[held.guesses] <= held.at_s:
            if held.closed and len(sets) < len(self.board.sets_now(job)):
                self.happened.append("kept from closed GPUs")
            return sets
        if before_only or not held.spares:
            return []
        return [chosen for chosen in sets if self._head_stays(job, chosen, held)]

    def _head_stays(self, job: Waiting, chosen: Set, held: Held) -> bool:
        after = self.board.with_job(chosen, job, self._length_s(job))
        return bool(after.sets_at(held.head, held.at_s, held.guesses))

    def _becomes_head(self, job: Waiting, *, is_promised: bool) -> None:
        planned_s = self.board.first_s(job, guesses=False)
        expected_s = self.board.first_s(job, guesses=True)
        assert expected_s <= planned_s
        if self.policy.backfill is Backfill.OFF:
            self.blocked = True
            return
        guesses = planned_s == NEVER_S
        held = Held(job, expected_s if guesses else planned_s, guesses, is_promised=is_promised)
        held.first = job.first_head or FirstHead(self.seen.now_s, expected_s)
        if is_promised:
            self._is_promised(held)
        if guesses:
            latest_s = held.first.since_s + self.policy.guess_length_s
            if self.seen.now_s >= (
                min(held.first.expected_at_s, latest_s) + self.policy.head_patience_s
            ):
                held.closed = self.board.closed_for(job)
        self.held = held
        self._note(held)

    def _is_promised(self, held: Held) -> None:
        assert self.promise is not None
        awaited = any(not g.fresh for g in self.seen.gpus if g.state is GpuState.OK)
        if held.at_s > self.promise.start_by_s and awaited:
            held.at_s, held.spares = max(self.promise.start_by_s, self.seen.now_s), False
            return
        assert self.made.promise is not None
        held.at_s = max(held.at_s, self.made.promise.start_by_s)

    def _note(self, held: Held) -> None:
        nvlink = wants_links(held.head.request)
        limited = self.seen.standings[held.head.uid].limit
        words = {
            "head by guesses": held.guesses,
            "patience over": bool(held.closed),
            "NVLink head without T": nvlink and held.guesses,
            "NVLink head, patience over": nvlink and bool(held.closed),
            "shared head, patience over": bool(held.closed) and not held.head.request.whole,
            "closed GPUs with shared jobs": any(
                not seat.alone for place in held.closed for seat in self.board.seats[place]
            ),
            "limit and reservation": limited.max_gpus is not None or limited.max_jobs is not None,
            "awaited sample makes it late": not held.spares,
        }
        self.happened += [word for word, is_so in words.items() if is_so]

    def _compare_head(self) -> None:
        held, found = self.held, self.made.reservation
        assert (held is None) == (found is None)
        if held is None or found is None:
            return
        assert found.job_id == held.head.job_id
        assert found.guessed == held.guesses
        assert found.start_s == held.at_s
        if held.spares:
            assert found.spare == self.board.spare(held.head, held.at_s, held.guesses)
            assert self.board.sets_at(held.head, held.at_s, held.guesses)
        if held.head.first_head is None:
            assert self.made.first_heads[held.head.job_id] == held.first
