"""Random small hosts and all that happens to them, for the properties of a pass.

All times are whole seconds, so that sums are exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from gpusched_client.terms import JobId
from gpuschedd.core.links import largest_set
from gpuschedd.core.model import (
    GIB,
    NEVER_S,
    Backfill,
    Gpu,
    GpuState,
    Plan,
    Policy,
    PromiseException,
    RunningJob,
    Topology,
    UserLimit,
)
from tests.support.core_builders import Sim, gpu, uuid, waiting

USERS = 4
MODELS = ("Card A", "Card B")


@dataclass(frozen=True)
class Arrival:
    """A job comes. `lasts`: sixteenths of its limit, of 200 s where it has none; more: it is late.

    The command says who runs alike; `estimate_s` is its owner's word.
    """

    gap_s: int
    uid: int
    gpus: int
    vram_gib: int | None
    limit_s: int | None
    lasts: int
    nice: int
    exclusive: bool
    model: str | None
    nvlink: bool
    command: str
    estimate_s: int | None


@dataclass(frozen=True)
class Disturbance:
    """It befalls the n-th GPU, or the n-th of the jobs that run."""

    gap_s: int
    trouble: str
    n: int


@dataclass(frozen=True)
class Scene:
    """A host, its policy, what users may hold, and what happens.

    `samples_take_s`: after each end its GPUs are unknown for so long.
    """

    cards: tuple[Gpu, ...]
    policy: Policy
    limits: dict[int, UserLimit]
    events: list[Arrival | Disturbance]
    samples_take_s: int = 0

    def host(self) -> Sampled:
        """The host before anything happens."""
        sim = Sampled(self.cards, self.policy, limits=self.limits, timely=True)
        sim.take_s = self.samples_take_s
        return sim


class Sampled(Sim):
    """GPUs on which a job has ended take nobody until they were looked at again."""

    take_s = 0
    due_s = NEVER_S

    def end(self, job_id: JobId) -> None:
        ended = {grant.uuid for grant in self.running[job_id].grants}
        super().end(job_id)
        if self.take_s:
            self.due_s = self.now_s + self.take_s
            self.cards = tuple(
                replace(card, fresh=False) if card.uuid in ended else card for card in self.cards
            )

    def next_step_s(self) -> float:
        return min(super().next_step_s(), self.due_s)

    def make_pass(self) -> Plan:
        if self.now_s >= self.due_s:
            _sample_in(self, 0)
            self.due_s = NEVER_S
        return super().make_pass()


def _set_gpu(n: int, sim: Sim, **facts: object) -> None:
    at = n % len(sim.cards)
    cards = list(sim.cards)
    cards[at] = replace(cards[at], **facts)  # type: ignore[arg-type]
    sim.cards = tuple(cards)


def _in_state(state: GpuState) -> Callable[[Sim, int], None]:
    return lambda sim, n: _set_gpu(n, sim, state=state)


def _foreign(sim: Sim, n: int) -> None:
    _set_gpu(n, sim, foreign_bytes=30 * GIB, whole_idle=False, foreign_since_s=sim.now_s)


def _no_foreign(sim: Sim, n: int) -> None:
    _set_gpu(n, sim, foreign_bytes=0, whole_idle=True, foreign_since_s=None)


def _sample_awaited(sim: Sim, n: int) -> None:
    """Of all but one, of all where there are few: jobs have ended on them."""
    for other in range(len(sim.cards)):
        _set_gpu(other, sim, fresh=other == n)


def _sample_in(sim: Sim, _n: int) -> None:
    sim.cards = tuple(replace(card, fresh=True) for card in sim.cards)


def _job(sim: Sim, n: int) -> RunningJob | None:
    ids = sorted(sim.running)
    return sim.running[ids[n % len(ids)]] if ids else None


def _grows(sim: Sim, n: int) -> None:
    """It holds more than it declared, as far as the GPU has it."""
    job = _job(sim, n)
    if job is not None and not job.whole:
        grants = tuple(replace(g, held_bytes=g.declared_bytes + 4 * GIB) for g in job.grants)
        sim.running[job.job_id] = replace(job, grants=grants)


def _extended(sim: Sim, n: int) -> None:
    job = _job(sim, n)
    if job is not None and job.time_limit_s is not None:
        sim.running[job.job_id] = replace(job, time_limit_s=job.time_limit_s + 150)


def _launched_late(sim: Sim, n: int) -> None:
    """It has just started, long after it was decided."""
    job = _job(sim, n)
    if job is not None and job.started_at_s == job.decided_at_s:
        sim.running[job.job_id] = replace(job, started_at_s=sim.now_s)


TROUBLES: dict[str, tuple[Callable[[Sim, int], None], tuple[PromiseException, ...]]] = {
    "drained": (_in_state(GpuState.DRAINED), (PromiseException.GPU_DRAINED,)),
    "lost": (_in_state(GpuState.LOST), (PromiseException.GPU_LOST,)),
    "in service": (_in_state(GpuState.OK), ()),
    "foreign": (_foreign, (PromiseException.FOREIGN_MEMORY,)),
    "foreign gone": (_no_foreign, ()),
    "sample awaited": (_sample_awaited, (PromiseException.GPU_UNREAD,)),
    "sample in": (_sample_in, ()),
    "grows": (_grows, (PromiseException.ABOVE_DECLARATION,)),
    "extended": (_extended, (PromiseException.LIMIT_EXTENDED,)),
    "launched late": (_launched_late, (PromiseException.LATE_LAUNCH, PromiseException.STUCK_JOB)),
}
LATE = (PromiseException.LATE_END, PromiseException.STUCK_JOB)


def _cards(linked: bool) -> st.SearchStrategy[tuple[Gpu, ...]]:
    """Linked ones in blocks of so many, some with a bridge to the next card."""
    one = st.tuples(
        st.sampled_from([80 * GIB, 80 * GIB, 40 * GIB]),
        st.sampled_from([MODELS[0], *MODELS]),
        st.sampled_from([0, 0, 0, 0, 10 * GIB]),  # of old foreign use
        st.sampled_from([True, True, True, True, False]),
        st.sampled_from([False, False, True]) if linked else st.just(False),
    )
    alike = st.integers(2, 6).map(lambda n: [(80 * GIB, MODELS[0], 0, True, False)] * n)
    blocks = st.sampled_from([2, 3, 6]) if linked else st.none()

    def made(of: tuple[list[tuple[int, str, int, bool, bool]], int | None]) -> tuple[Gpu, ...]:
        cards, block = of
        return tuple(
            gpu(
                at,
                total_bytes=size,
                model=model,
                foreign_bytes=held,
                whole_idle=held == 0,
                island=None if block is None else at // block,
                shareable=shareable,
                joined=(uuid(at + 1),) if bridge and at + 1 < len(cards) else (),
            )
            for at, (size, model, held, shareable, bridge) in enumerate(cards)
        )

    return st.tuples(alike | st.lists(one, min_size=2, max_size=6), blocks).map(made)


def _policies() -> st.SearchStrategy[Policy]:
    easy = Backfill.EASY
    return st.builds(
        Policy,
        kill_grace_s=st.sampled_from([0.0, 10.0]),
        launch_allowance_s=st.sampled_from([0.0, 5.0]),
        promise_within_s=st.sampled_from([0.0, 100.0, 86400.0, NEVER_S]),
        promise_slack_s=st.sampled_from([0.0, 50.0, 86400.0]),
        guess_length_s=st.sampled_from([20.0, 200.0, 86400.0]),
        head_patience_s=st.sampled_from([0.0, 0.0, 100.0, 86400.0]),
        learn_lengths=st.sampled_from([True, True, False]),
        backfill=st.sampled_from([easy, easy, easy, Backfill.BEFORE_RESERVATION, Backfill.OFF]),
        across_users=st.sampled_from([True, True, False]),
        max_jobs_per_gpu=st.sampled_from([2, 4]),
        age_jobs_per_user=st.sampled_from([0, 1, 2]),
        w_age_per_h=st.sampled_from([10.0, 36_000.0]),
        foreign_age_s=st.sampled_from([60.0, 600.0]),
        rerank_s=st.just(1e7),
    )


def _arrivals(limited: str, linked: bool) -> st.SearchStrategy[Arrival]:
    none = {"all": [], "some": [None] * 4, "few": [None] * 12}[limited]
    return st.builds(
        Arrival,
        gap_s=st.sampled_from([0, 0, 0, 1, 10, 60]),
        uid=st.integers(1, USERS),
        gpus=st.sampled_from([1, 1, 1, 2, 2, 3, 4, 6]),
        vram_gib=st.sampled_from([None, None, 9, 18, 39]),
        limit_s=st.sampled_from([5, 50, 100, 400, *none]),
        lasts=st.sampled_from([1, 4, 8, 15, 16, 16, 17, 40]),
        nice=st.sampled_from([0, 0, 0, 100, 1000]),
        exclusive=st.sampled_from([False, False, False, True]),
        model=st.sampled_from([None, None, None, *MODELS]),
        nvlink=st.sampled_from([True, True, False]) if linked else st.just(False),
        command=st.sampled_from("abc"),
        estimate_s=st.sampled_from([None, None, 1, 60]),
    )


def scenes(most: int = 30) -> st.SearchStrategy[Scene]:
    """Hosts with and without links, in peace and in trouble."""
    limit = st.builds(
        UserLimit,
        max_gpus=st.sampled_from([None, 1, 2, 4]),
        max_jobs=st.sampled_from([None, None, 2]),
    )
    trouble = st.builds(
        Disturbance,
        gap_s=st.sampled_from([0, 1, 30]),
        trouble=st.sampled_from(sorted(TROUBLES)),
        n=st.integers(0, 5),
    )

    def of(traits: tuple[str, bool, bool]) -> st.SearchStrategy[Scene]:
        limited, linked, troubled = traits
        arrival = _arrivals(limited, linked)
        event = arrival | arrival | arrival | trouble if troubled else arrival
        return st.builds(
            Scene,
            cards=_cards(linked),
            policy=_policies(),
            limits=st.just({}) | st.dictionaries(st.integers(1, USERS), limit, max_size=2),
            events=st.lists(event, min_size=10, max_size=most),
            samples_take_s=st.sampled_from([0, 0, 3]),
        )

    limited = st.sampled_from(["all", "some", "few"])
    return st.tuples(limited, st.booleans(), st.booleans()).flatmap(of)


def play(scene: Scene, sim: Sim, note: Callable[[PromiseException], object]) -> None:
    """Let it all happen, and what runs end. `note` hears of what may delay a promise, before."""
    at_s = 0.0
    if scene.samples_take_s:
        note(PromiseException.GPU_UNREAD)
    for number, event in enumerate(scene.events, start=1):
        at_s += event.gap_s
        sim.go_to(at_s)
        if isinstance(event, Disturbance):
            act, exceptions = TROUBLES[event.trouble]
            for exception in exceptions:
                note(exception)
            act(sim, event.n)
        else:
            lasts_s = (event.limit_s or 200) * event.lasts // 16
            if event.limit_s is not None and lasts_s > event.limit_s:
                for exception in LATE:
                    note(exception)
            _submit(sim, number, event, float(max(1, lasts_s)))
        sim.make_pass()
    _sample_in(sim, 0)
    sim.go_to(at_s + 5000)


def _submit(sim: Sim, number: int, event: Arrival, lasts_s: float) -> None:
    vram = None if event.vram_gib is None else event.vram_gib * GIB
    most = max(1, largest_set(sim.cards)) if event.nvlink else len(sim.cards)
    job = waiting(
        number,
        min(event.gpus, most),
        uid=event.uid,
        vram=vram,
        limit_s=None if event.limit_s is None else float(event.limit_s),
        exclusive=event.exclusive and vram is not None,
        nice=event.nice,
        gpu_model=event.model,
        topology=Topology.NVLINK if event.nvlink else Topology.ANY,
        length_key=event.command,
        estimate_s=None if event.estimate_s is None else float(event.estimate_s),
    )
    sim.submit(job, lasts_s)
