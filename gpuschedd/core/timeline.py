"""Timeline: when running jobs end as planned, and when each GPU becomes free enough for a request.

Owns planned ends, what never ends, and the pass's working copy of the host (`Host`, `Slot`). Knows
no order of jobs.

Theory. Planned end = start + launch allowance + time limit + grace for the kill: nothing that we
start is there any later. The grace is that of the decision, since a later policy reaches no
supervisor that runs. A job past that end is *stuck* and, like one without limit and old foreign
use, never ends: a time that is only hoped for would become a promise that nobody can keep.

Between two starts things only leave. So what is free on a GPU grows with time, a request that fits
at t fits at every later t until somebody starts, and the earliest time at which it fits is one of
the planned ends: those are all the times that are ever looked at, in order.

A GPU without a fresh sample is taken to be known a moment from now (`fresh_allowance_s`), so that
one look at a driver that is late does not move every expected start to "unknown".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import NamedTuple

from gpusched_client.terms import JobId
from gpusched_client.units import is_slice_profile
from gpuschedd.core.lengths import put_off_s
from gpuschedd.core.model import (
    NEVER_S,
    Gpu,
    GpuState,
    Policy,
    Request,
    Residue,
    RunningJob,
    Snapshot,
)


def end_if_decided_s(decided_at_s: float, length_s: float | None, policy: Policy) -> float:
    """The end of a job that would be decided at that time, by the present policy.

    `length_s`: its limit, for the planned end (None: it has none), or how long it is expected to
    run.
    """
    if length_s is None:
        return NEVER_S
    # Summed as in decided_end_s: a promise must not become late by a rounding.
    return decided_at_s + (policy.launch_allowance_s + length_s) + policy.kill_grace_s


def grace_s_of(job: RunningJob, policy: Policy) -> float:
    """How long the job may take from TERM on, as was decided with it."""
    return policy.kill_grace_s if job.decided_grace_s is None else job.decided_grace_s


def decided_end_s(job: RunningJob, policy: Policy) -> float:
    """The planned end as of the decision, whenever the job started; NEVER_S without limit."""
    if job.time_limit_s is None:
        return NEVER_S
    allowed_s = policy.launch_allowance_s + job.time_limit_s
    return job.decided_at_s + allowed_s + grace_s_of(job, policy)


def _latest_end_s(job: RunningJob, limit_s: float, policy: Policy) -> float:
    """The later of both formulas of the planned end, which has no floor of now."""
    end_s = decided_end_s(job, policy)
    if job.started_at_s is None:
        return end_s
    return max(end_s, job.started_at_s + limit_s + grace_s_of(job, policy))


def is_stuck(job: RunningJob, now_s: float, policy: Policy) -> bool:
    """True once a job is `stuck_after_s` past both formulas: its GPUs leave the timeline."""
    if job.stuck:
        return True
    if job.time_limit_s is None:
        return False
    return now_s > _latest_end_s(job, job.time_limit_s, policy) + policy.stuck_after_s


def planned_end_s(job: RunningJob, now_s: float, policy: Policy) -> float:
    """When the job is planned to have freed its GPUs; NEVER_S without limit and when stuck."""
    limit_s = job.time_limit_s
    if limit_s is None or job.stuck:
        return NEVER_S
    end_s = _latest_end_s(job, limit_s, policy)
    if end_s >= now_s:
        return end_s
    return NEVER_S if now_s > end_s + policy.stuck_after_s else now_s


def expected_end_s(job: RunningJob, now_s: float, policy: Policy) -> float:
    """When the job will probably have freed its GPUs: later than now, by its planned end at most.

    Put off in steps once it has passed; that of an overdue or stuck job is its planned end.
    """
    planned_s = planned_end_s(job, now_s, policy)
    if job.stuck or planned_s <= now_s or (planned_s == NEVER_S and job.time_limit_s is not None):
        return planned_s
    length_s = job.expected_s
    if length_s is None:
        length_s = policy.guess_length_s if job.time_limit_s is None else job.time_limit_s
    first_s = job.decided_at_s + (policy.launch_allowance_s + length_s) + grace_s_of(job, policy)
    return min(planned_s, put_off_s(first_s, now_s))


def foreign_end_s(gpu: Gpu, now_s: float, policy: Policy) -> float:
    """When foreign use counts as ended: as it reaches `foreign_age_s`; never once it is older.

    An ended job's memory counts as that job's for a while: it leaves soon.
    """
    if gpu.leaves_by_s is not None and gpu.leaves_by_s > now_s:
        return gpu.leaves_by_s
    if gpu.foreign_since_s is None:
        return NEVER_S
    old_at_s = gpu.foreign_since_s + policy.foreign_age_s
    return old_at_s if old_at_s > now_s else NEVER_S


class Load(NamedTuple):
    """One job on one GPU, as planned."""

    end_s: float
    held_bytes: int
    alone: bool
    uid: int
    job_id: JobId
    since_s: float
    stuck: bool


class Need(NamedTuple):
    """A request as placement sees it. `bytes`: per GPU, margin included; 0 for whole GPUs."""

    gpus: int
    whole: bool
    bytes: int
    exclusive: bool
    model: str | None
    card_bytes: int
    nvlink: bool
    uid: int  # -1 where the user does not matter


class Slot:
    """One GPU in service during a pass: what is on it now, and when that leaves."""

    # Class attributes for what is rare: a pass makes one slot per GPU.
    alone = False
    whole_idle = True
    foreign_held = False
    foreign_end_s = 0.0
    busy_until_s = 0.0  # the last planned end on it; 0 when nothing is

    def __init__(self, gpu: Gpu, position: int) -> None:
        self.gpu = gpu
        self.position = position
        self.headroom_bytes = gpu.total_bytes - gpu.reserved_bytes - gpu.foreign_bytes
        self.loads: list[Load] = []
        if gpu.foreign_bytes or not gpu.whole_idle:
            self.foreign_held = True
            self.whole_idle = gpu.whole_idle

    def add(self, load: Load) -> None:
        """Put one job on the GPU."""
        self.loads.append(load)
        self.headroom_bytes -= load.held_bytes
        if load.end_s > self.busy_until_s:
            self.busy_until_s = load.end_s
        if load.alone:
            self.alone = True

    def remove(self, job_id: JobId) -> None:
        """Take one job off it."""
        left = []
        for load in self.loads:
            if load.job_id == job_id:
                self.headroom_bytes += load.held_bytes
            else:
                left.append(load)
        self.loads = left
        self.busy_until_s = max([load.end_s for load in left], default=0.0)
        self.alone = any(load.alone for load in left)


def _holds(rooms: Sequence[int], gpus: int, size: int) -> bool:
    """Do so many of the rooms, largest first, hold that many bytes?"""
    return gpus <= len(rooms) and size <= rooms[gpus - 1]


_IS_SLICE, _FRESH = attrgetter("is_slice"), attrgetter("fresh")


def _idle_among(slots: list[Slot]) -> list[Slot]:
    """Those on which a whole-GPU job could sit now."""
    return [slot for slot in slots if not slot.loads and slot.whole_idle and slot.gpu.fresh]


class Host:
    """The GPUs of one pass and the jobs on them. Mutable inside the pass only."""

    def __init__(self, snapshot: Snapshot, policy: Policy, *, expected: bool = False) -> None:
        """`expected`: jobs end as expected, not as planned."""
        self.now_s = snapshot.now_s
        self.policy = policy
        self._end_s = expected_end_s if expected else planned_end_s
        self.slots = [
            Slot(gpu, position)
            for position, gpu in enumerate(snapshot.gpus)
            if gpu.state is GpuState.OK
        ]
        self.by_uuid = {slot.gpu.uuid: slot for slot in self.slots}
        self._least_bytes: int | None = None  # the smallest card
        self._eligible: dict[tuple[str | None, int, int, bool], list[Slot]] = {}
        in_service = [slot.gpu for slot in self.slots]
        self.has_slices = any(map(_IS_SLICE, in_service))
        self.foreign_held = False  # foreign use is on one at least
        self.lasting = False  # something on the host is not even expected to end
        self._idle_now: list[Slot] | None = None
        self._rooms_now: list[int] | None = None
        self._free_ever: tuple[int, list[int]] | None = None
        self.awaits_sample = not all(map(_FRESH, in_service))
        self._next_change_s: float | None = NEVER_S  # None: to be looked for
        self._age_foreign()
        self._load(snapshot.running)

    def is_planned(self, at_s: float) -> bool:
        """True if at_s is when something is planned to leave.

        False where it is but a floor: of now (a job is overdue), or of a sample that is awaited.
        """
        floor_s = self.now_s + self.policy.fresh_allowance_s if self.awaits_sample else self.now_s
        return at_s > self.now_s and at_s != floor_s

    @contextmanager
    def foreign_staying(self) -> Iterator[None]:
        """Foreign use that is thought to leave as it gets old does not."""
        young = [
            slot
            for slot in self.slots
            if slot.foreign_end_s != NEVER_S and slot.gpu.leaves_by_s is None and slot.foreign_held
        ]
        before = [slot.foreign_end_s for slot in young]
        for slot in young:
            slot.foreign_end_s = NEVER_S
        try:
            yield
        finally:
            for slot, end_s in zip(young, before, strict=True):
                slot.foreign_end_s = end_s

    def _age_foreign(self) -> None:
        for slot in self.slots:
            if slot.foreign_held:
                self.foreign_held = True
                slot.foreign_end_s = foreign_end_s(slot.gpu, self.now_s, self.policy)
                self._may_change_at(slot.foreign_end_s)
                self.lasting = self.lasting or slot.foreign_end_s == NEVER_S

    @property
    def next_change_s(self) -> float:
        """When foreign use gets old or a planned end passes: the timeline itself changes."""
        if self._next_change_s is None:
            self._next_change_s = NEVER_S
            for slot in self.slots:
                self._may_change_at(slot.foreign_end_s)
                for load in slot.loads:
                    self._may_change_at(load.end_s)
        return self._next_change_s

    def _may_change_at(self, at_s: float) -> None:
        known_s = self._next_change_s
        if known_s is not None and self.now_s < at_s < known_s:
            self._next_change_s = at_s

    def _load(self, running: Iterable[RunningJob]) -> None:
        by_uuid, now_s, policy = self.by_uuid, self.now_s, self.policy
        for job in running:
            end_s = self._end_s(job, now_s, policy)
            self._may_change_at(end_s)
            stuck = job.stuck or (end_s == NEVER_S and job.time_limit_s is not None)
            self.lasting = self.lasting or stuck
            alone = job.whole or job.exclusive
            held, load = -1, None
            for grant in job.grants:
                if load is None or grant.held_bytes != held:
                    held = grant.held_bytes
                    load = Load(end_s, held, alone, job.uid, job.job_id, job.decided_at_s, stuck)
                slot = by_uuid.get(grant.uuid)
                if slot is not None:
                    slot.loads.append(load)
                    slot.headroom_bytes -= held
                    if end_s > slot.busy_until_s:
                        slot.busy_until_s = end_s
                    if alone:
                        slot.alone = True

    def add(self, slot: Slot, load: Load) -> None:
        """A job of this pass sits down."""
        slot.add(load)
        self._idle_now = self._rooms_now = self._free_ever = None
        self._may_change_at(load.end_s)

    def leave(self, job: RunningJob) -> None:
        """A job has ended. For a host that is kept from pass to pass (`go_to`)."""
        for grant in job.grants:
            self.by_uuid[grant.uuid].remove(job.job_id)
        self._idle_now = self._rooms_now = self._free_ever = None
        if self._end_s(job, self.now_s, self.policy) == self._next_change_s:
            self._next_change_s = None

    def go_to(self, now_s: float) -> None:
        """A later pass looks at it.

        All that differs by the time alone is what has passed its planned end, is stuck or gets old:
        whoever keeps a host has none of these.
        """
        self.now_s = now_s
        if self._next_change_s is not None and self._next_change_s <= now_s:
            self._next_change_s = None

    def could_take(self, gpus: int, size: int | None) -> bool:
        """A bound, exact for a request without further wishes: could it sit now?

        `size`: bytes per GPU, margin included; None for whole GPUs.
        """
        if size is None:
            return gpus <= len(self.idle())
        if self._rooms_now is None:
            open_slots = [slot for slot in self.slots if slot.gpu.fresh and self._is_open(slot)]
            self._rooms_now = sorted((s.headroom_bytes for s in open_slots), reverse=True)
        return _holds(self._rooms_now, gpus, size)

    def could_ever_take(self, gpus: int, size: int | None) -> bool:
        """The same bound once all that is expected to end has ended."""
        if self._free_ever is None:
            kept = {residue.uuid: residue for residue in self.residues()}
            idle, rooms = 0, []
            for slot in self.slots:
                residue = kept.get(slot.gpu.uuid)
                if residue is None or (residue.jobs == 0 and residue.whole_idle):
                    idle += 1
                if residue is None:
                    rooms.append(slot.gpu.capacity_bytes)
                elif not residue.alone:
                    rooms.append(residue.headroom_bytes)
            self._free_ever = idle, sorted(rooms, reverse=True)
        idle, rooms = self._free_ever
        return gpus <= idle if size is None else _holds(rooms, gpus, size)

    def idle(self) -> list[Slot]:
        """The GPUs on which a whole-GPU job could sit now."""
        if self._idle_now is None:
            self._idle_now = _idle_among(self.slots)
        return self._idle_now

    def _is_open(self, slot: Slot) -> bool:
        """May a shared job sit there, memory and user apart?"""
        if not slot.loads:
            return True
        if slot.alone or not slot.gpu.shareable:
            return False
        return len(slot.loads) < self.policy.max_jobs_per_gpu

    def need(self, request: Request, uid: int) -> Need:
        """The request as placement sees it, margin included."""
        vram = request.vram_bytes
        return Need(
            request.gpus,
            vram is None,
            0 if vram is None else vram + self.policy.margin_bytes,
            request.exclusive,
            request.gpu_model,
            request.card_bytes,
            request.topology == "nvlink",
            -1 if self.policy.across_users else uid,
        )

    def eligible(self, need: Need) -> list[Slot]:
        """GPUs in service that the request could ever use, were they empty."""
        size = max(need.bytes, need.card_bytes)
        whole_cards = self.has_slices and need.gpus > 1
        if need.model is None and not whole_cards and (size == 0 or size <= self._smallest()):
            return self.slots
        key = (need.model, need.card_bytes, need.bytes, whole_cards)
        found = self._eligible.get(key)
        if found is None:
            found = [slot for slot in self.slots if card_suits(slot.gpu, need)]
            self._eligible[key] = found
        return found

    def _smallest(self) -> int:
        if self._least_bytes is None:
            sizes = (slot.gpu.capacity_bytes for slot in self.slots)
            self._least_bytes = min(sizes, default=0)
        return self._least_bytes

    def fitting(self, need: Need) -> Sequence[Slot]:
        """GPUs on which the request could sit this moment."""
        eligible = self.eligible(need)
        if need.whole:
            return self.idle() if eligible is self.slots else _idle_among(eligible)
        return [slot for slot in eligible if slot.gpu.fresh and self._fits(slot, need)]

    def _fits(self, slot: Slot, need: Need) -> bool:
        return slot.headroom_bytes >= need.bytes and self.is_open_to(slot, need)

    def is_open_to(self, slot: Slot, need: Need) -> bool:
        """May the shared request sit there, memory apart?"""
        return not slot.loads or compatible(slot.gpu, slot.loads, need, self.policy)

    def free_at_s(self, slot: Slot, need: Need) -> float:
        """The earliest time at which the request could sit on that GPU, from now on."""
        first_s = self.now_s if slot.gpu.fresh else self.now_s + self.policy.fresh_allowance_s
        if need.whole:
            free_s = max(first_s, slot.busy_until_s)
            return free_s if slot.whole_idle else max(free_s, slot.foreign_end_s)
        return self._shared_free_at_s(slot, need, first_s, slot.loads)

    def free_times_s(self, slots: Sequence[Slot], need: Need) -> list[float]:
        """`free_at_s` of each of them, in their order."""
        if not need.whole or self.awaits_sample or self.foreign_held:
            return [self.free_at_s(slot, need) for slot in slots]
        now_s = self.now_s
        return [slot.busy_until_s if slot.busy_until_s > now_s else now_s for slot in slots]

    def _shared_free_at_s(self, slot: Slot, need: Need, first_s: float, loads: list[Load]) -> float:
        ends = sorted({load.end_s for load in loads if load.end_s > first_s})
        if slot.foreign_held and first_s < slot.foreign_end_s < NEVER_S:
            ends = sorted({*ends, slot.foreign_end_s})
        for at_s in (first_s, *ends):
            if at_s < NEVER_S and self.fits_at(slot, need, at_s):
                return at_s
        return NEVER_S

    def fits_at(self, slot: Slot, need: Need, at_s: float, extra: Need | None = None) -> bool:
        """True if a shared request could sit there at at_s beside what runs past it and `extra`."""
        staying = [load for load in slot.loads if load.end_s > at_s]
        room = slot.gpu.capacity_bytes - sum(load.held_bytes for load in staying)
        if slot.foreign_end_s > at_s:
            room -= slot.gpu.foreign_bytes
        if extra is not None:
            room -= extra.bytes
            staying.append(Load(NEVER_S, extra.bytes, False, extra.uid, JobId(0), 0.0, False))
        return room >= need.bytes and (
            not staying or compatible(slot.gpu, staying, need, self.policy)
        )

    def residues(self) -> tuple[Residue, ...]:
        """The GPUs in service on which something is not even expected to end."""
        if not self.lasting:
            return ()
        return tuple(residue for slot in self.slots if (residue := _residue(slot)) is not None)


def card_suits(gpu: Gpu, need: Need) -> bool:
    """True if the request could use that GPU, were it in service and empty."""
    if need.model is not None and not model_matches(need.model, gpu.model):
        return False
    if gpu.is_slice and need.gpus > 1:
        return False
    return gpu.capacity_bytes >= need.bytes and gpu.total_bytes >= need.card_bytes


def model_matches(wanted: str, model: str) -> bool:
    """`--gpu-model a100` means every model with that in its name, in any case.

    The profile of a slice is a word that is the same or is not: 1g.10gb is not 1g.10gb+me.
    """
    wanted, model = wanted.casefold(), model.casefold()
    if wanted not in model:
        return False
    words = wanted.split()
    return not (words and is_slice_profile(words[-1])) or f" {wanted} " in f" {model} "


def compatible(gpu: Gpu, loads: list[Load], need: Need, policy: Policy) -> bool:
    """May a shared request sit beside these jobs, memory apart?"""
    if need.exclusive or not gpu.shareable or len(loads) >= policy.max_jobs_per_gpu:
        return False
    return not any(load.alone or need.uid not in (-1, load.uid) for load in loads)


def _residue(slot: Slot) -> Residue | None:
    staying = [load for load in slot.loads if load.stuck]
    foreign = slot.foreign_end_s == NEVER_S
    if not staying and not foreign:
        return None
    room = slot.gpu.capacity_bytes - sum(load.held_bytes for load in staying)
    return Residue(
        uuid=slot.gpu.uuid,
        headroom_bytes=room - slot.gpu.foreign_bytes if foreign else room,
        jobs=len(staying),
        uids=frozenset(load.uid for load in staying),
        alone=any(load.alone for load in staying),
        whole_idle=slot.whole_idle or not foreign,
    )
