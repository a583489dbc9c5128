"""What must hold for every history: random small hosts, random jobs, random disturbances.

300 examples each in the normal run; GPUSCHED_SOAK=1 makes it thousands.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpusched_client.terms import JobId
from gpuschedd.core import lengths
from gpuschedd.core.aftermath import all_running
from gpuschedd.core.fairshare import Accounts
from gpuschedd.core.model import (
    GIB,
    HOUR_S,
    NEVER_S,
    Backfill,
    Gpu,
    Plan,
    Policy,
    PromiseOutcome,
    RunningJob,
    Snapshot,
    Start,
    Waiting,
)
from gpuschedd.core.patience import closed_for
from gpuschedd.core.plan import plan
from gpuschedd.core.queues import Queues
from gpuschedd.core.reservation import Hold, shadow
from gpuschedd.core.snapshot import build_snapshot
from gpuschedd.core.timeline import Host, compatible, end_if_decided_s
from tests.support.core_builders import Sim, gpu, waiting

SOAK = bool(os.environ.get("GPUSCHED_SOAK"))
EXAMPLES = 3000 if SOAK else 300
LIGHT = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
USERS = 4
SIZES = (24 * GIB, 40 * GIB, 80 * GIB)


@dataclass(frozen=True)
class Arrival:
    """One job of a random history: when, what, how long it truly runs (share of its limit)."""

    gap_s: int
    uid: int
    gpus: int
    vram_gib: int | None
    limit_s: int | None
    lasts: float
    nice: int
    exclusive: bool


def arrivals(most: int = 24, *, unlimited: bool = False) -> st.SearchStrategy[list[Arrival]]:
    """Histories; `lasts` above 1: the job ends late, within the grace."""
    limits = st.sampled_from([5, 50, 100, 400]) | st.integers(1, 400)
    one = st.builds(
        Arrival,
        gap_s=st.sampled_from([0, 0, 0, 1, 30, 120]),
        uid=st.integers(1, USERS),
        gpus=st.sampled_from([1, 1, 1, 2, 2, 3, 4, 6]),
        vram_gib=st.one_of(st.none(), st.none(), st.integers(1, 39)),
        limit_s=st.one_of(st.none(), limits) if unlimited else limits,
        lasts=st.floats(0.05, 1.0) | st.just(1.0),
        nice=st.sampled_from([0, 0, 0, 100, 1000]),
        exclusive=st.sampled_from([False, False, False, True]),
    )
    return st.lists(one, min_size=3, max_size=most)


def hosts() -> st.SearchStrategy[tuple[Gpu, ...]]:
    """4 to 8 GPUs, some with old foreign use."""
    card = st.tuples(st.sampled_from(SIZES), st.sampled_from([0, 0, 0, 10 * GIB]))
    alike = st.integers(4, 8).map(lambda count: [(80 * GIB, 0)] * count)
    return (alike | st.lists(card, min_size=4, max_size=8)).map(
        lambda cards: tuple(
            gpu(n, total_bytes=size, foreign_bytes=held, whole_idle=held == 0)
            for n, (size, held) in enumerate(cards)
        )
    )


def policies() -> st.SearchStrategy[Policy]:
    """Backfilling policies with and without grace, and with promises early or always."""
    return st.builds(
        Policy,
        kill_grace_s=st.sampled_from([0.0, 10.0]),
        launch_allowance_s=st.sampled_from([0.0, 5.0]),
        promise_within_s=st.sampled_from([100.0, 86400.0, NEVER_S]),
        promise_slack_s=st.sampled_from([0.0, 50.0, 86400.0]),
        guess_length_s=st.sampled_from([20.0, 200.0, 86400.0]),
        head_patience_s=st.sampled_from([0.0, 100.0, 86400.0]),
        backfill=st.sampled_from([Backfill.EASY, Backfill.EASY, Backfill.BEFORE_RESERVATION]),
        across_users=st.sampled_from([True, True, False]),
        max_jobs_per_gpu=st.sampled_from([2, 4]),
        age_jobs_per_user=st.sampled_from([0, 1, 2]),
    )


def asked(number: int, one: Arrival, cards: tuple[Gpu, ...]) -> Waiting:
    """The arrival as a job; one that asks more memory than enough cards have waits for ever."""
    vram = None if one.vram_gib is None else one.vram_gib * GIB
    return waiting(
        number,
        min(one.gpus, len(cards)),
        uid=one.uid,
        vram=vram,
        limit_s=None if one.limit_s is None else float(one.limit_s),
        exclusive=one.exclusive and vram is not None,
        nice=one.nice,
    )


def play(cards: tuple[Gpu, ...], policy: Policy, history: list[Arrival], sim: Sim) -> None:
    """Submit the history, let everything end. Jobs that run to their limit use up the grace."""
    at_s = 0.0
    for number, one in enumerate(history, start=1):
        at_s += one.gap_s
        sim.go_to(at_s)
        job = asked(number, one, cards)
        limit_s = 200.0 if one.limit_s is None else float(one.limit_s)
        late_s = policy.kill_grace_s if one.lasts == 1.0 and one.limit_s is not None else 0.0
        sim.submit(job, limit_s * one.lasts + late_s)
        sim.make_pass()
    sim.go_to(at_s + 1e6)


def check_host(seen: Snapshot, made: Plan, policy: Policy) -> None:
    """No GPU beyond its memory or given twice to one job; whole-GPU jobs alone."""
    held = {card.uuid: card.foreign_bytes for card in seen.gpus}
    jobs: dict[str, list[bool]] = {card.uuid: [] for card in seen.gpus}
    holders: tuple[RunningJob | Start, ...] = (*seen.running, *made.starts)
    for job in holders:
        assert len({grant.uuid for grant in job.grants}) == len(job.grants)
        for grant in job.grants:
            held[grant.uuid] += 0 if job.whole else grant.held_bytes
            jobs[grant.uuid].append(job.whole or job.exclusive)
    for card in seen.gpus:
        assert held[card.uuid] <= card.capacity_bytes
        assert len(jobs[card.uuid]) == 1 or not any(jobs[card.uuid])
        assert len(jobs[card.uuid]) <= policy.max_jobs_per_gpu


@LIGHT
@given(hosts(), policies(), arrivals(unlimited=True))
def test_no_gpu_is_promised_beyond_its_memory_or_twice(
    cards: tuple[Gpu, ...], policy: Policy, history: list[Arrival]
) -> None:
    sim = Sim(cards, policy)
    sim.on_plan = lambda seen, made: check_host(seen, made, policy)
    play(cards, policy, history, sim)


@LIGHT
@given(hosts(), policies(), arrivals(unlimited=True))
def test_a_promised_start_never_moves_later(
    cards: tuple[Gpu, ...], policy: Policy, history: list[Arrival]
) -> None:
    """Whatever is submitted, by whom, with what priority, and though jobs end early or in grace."""
    sim = Sim(cards, policy)
    promised: dict[int, float] = {}

    def look(_seen: Snapshot, made: Plan) -> None:
        if made.promise is not None:
            before_s = promised.get(made.promise.job_id, NEVER_S)
            assert made.reservation is not None
            assert made.reservation.start_s <= before_s
            assert made.promise.delayed_by is None
            promised[made.promise.job_id] = made.promise.start_by_s

    sim.on_plan = look
    play(cards, policy, history, sim)
    assert all(end.outcome is PromiseOutcome.KEPT for end in sim.promise_ends)
    for job_id, start_by_s in promised.items():
        assert sim.started_s[JobId(job_id)] <= start_by_s


@LIGHT
@given(hosts(), policies(), arrivals(unlimited=True))
def test_off_never_overtakes(
    cards: tuple[Gpu, ...], policy: Policy, history: list[Arrival]
) -> None:
    """A job that waits with a known shadow time is the last one that was looked at."""
    strict = replace(policy, backfill=Backfill.OFF)
    sim = Sim(cards, strict)

    def look(seen: Snapshot, made: Plan) -> None:
        from gpuschedd.core.priority import queue_order

        order = [job.job_id for job, _parts in queue_order(seen, strict)]
        started = set(made.start_ids)
        waited = [job_id for job_id in order if job_id not in started | made.unknown]
        if waited:
            behind = order[order.index(waited[0]) :]
            assert not started.intersection(behind)

    sim.on_plan = look
    play(cards, strict, history, sim)


@LIGHT
@given(hosts(), policies(), arrivals(unlimited=True))
def test_idle_gpu_beside_a_job_that_fits_is_justified_by_the_reservation(
    cards: tuple[Gpu, ...], policy: Policy, history: list[Arrival]
) -> None:
    """Each job that could sit now and does not would run past the hold and find no spare, or is
    kept from GPUs that patience has closed; and each that starts behind the head may.
    """
    sim = Sim(cards, policy)

    def look(seen: Snapshot, made: Plan) -> None:
        if made.reservation is None:
            return
        jobs = {job.job_id: job for queue in seen.queues.gpu for job in queue.jobs}
        head = jobs[made.reservation.job_id]
        expected = made.reservation.guessed
        host = _after(seen, made, policy, expected=expected)
        need = host.need(head.request, head.uid)
        planned = shadow(_after(seen, made, policy), need)
        assert (planned is None) is expected
        by_its_kind = shadow(host, need)
        assert by_its_kind is not None
        start_by_s = 0.0 if made.promise is None else made.promise.start_by_s
        assert made.reservation.start_s >= max(by_its_kind.at_s, start_by_s)
        found = shadow(host, need, made.reservation.start_s)
        assert found is not None
        hold = Hold(host, head, need, found)
        patient_until_s = made.reservation.patient_until_s or NEVER_S
        is_over = seen.now_s >= patient_until_s
        closed = closed_for(_after(seen, made, policy, expected=True), need) if is_over else ()
        for job in jobs.values():
            own = host.need(job.request, job.uid)
            fitting = [slot for slot in host.fitting(own) if slot.position not in closed]
            if job.job_id in made.start_ids or len(fitting) < own.gpus:
                continue
            if is_over and policy.backfill is Backfill.BEFORE_RESERVATION:
                continue
            length_s = job.request.time_limit_s
            if expected:
                length_s = lengths.expected(seen.lengths, job.uid, "", job.request, policy).length_s
            assert end_if_decided_s(seen.now_s, length_s, policy) > found.at_s
            easy = policy.backfill is Backfill.EASY
            assert not easy or hold.select(own, fitting) is None

    sim.on_plan = look
    play(cards, policy, history, sim)


def _after(seen: Snapshot, made: Plan, policy: Policy, *, expected: bool = False) -> Host:
    """The host with the plan's starts on it."""
    running = all_running(seen, made)
    return Host(replace(seen, running=running), policy, expected=expected)


@LIGHT
@given(arrivals(12), st.randoms(use_true_random=False))
def test_builder_does_not_depend_on_the_order_of_its_input(
    history: list[Arrival], rng: Random
) -> None:
    cards = tuple(gpu(n) for n in range(8))
    policy = Policy()
    jobs = [replace(asked(n, one, cards), eligible_since_s=5.0) for n, one in enumerate(history)]
    shuffled = list(jobs)
    rng.shuffle(shuffled)
    views = []
    for order in (jobs, shuffled):
        queues = Queues(policy)
        for job in order:
            queues.insert(job, 5.0)
        views.append(queues.view())
    one, other = (
        build_snapshot(now_s=9.0, gpus=some, running=(), queues=view, accounts=Accounts(policy))
        for view, some in zip(views, (cards, cards[::-1]), strict=True)
    )
    assert one == other
    assert plan(one, policy) == plan(other, policy)


@LIGHT
@given(hosts(), policies(), arrivals(unlimited=True))
def test_queues_restored_from_their_rows_are_the_same(
    cards: tuple[Gpu, ...], policy: Policy, history: list[Arrival]
) -> None:
    """Only the rows that the calls return are stored; a restart at any pass changes nothing."""
    sim = Sim(cards, policy)
    rows: dict[int, Waiting] = {}
    queues = sim.queues

    def look(seen: Snapshot, _made: Plan) -> None:
        again = Queues.restore(policy, rows.values(), seen.queues.horizon)
        assert again.view() == queues.view()

    _record(queues, rows)
    sim.on_plan = look
    play(cards, policy, history, sim)


def _record(queues: Queues, rows: dict[int, Waiting]) -> None:
    """Keep what a store would hold."""
    insert, remove, settle, note = queues.insert, queues.remove, queues.settle, queues.note_heads

    def keep(changed: tuple[Waiting, ...]) -> tuple[Waiting, ...]:
        rows.update((row.job_id, row) for row in changed)
        return changed

    def drop(job_id: JobId, now_s: float) -> tuple[Waiting, ...]:
        changed = keep(remove(job_id, now_s))
        del rows[job_id]
        return changed

    queues.insert = lambda waiting, now_s: keep(insert(waiting, now_s))  # type: ignore[method-assign]
    queues.settle = lambda horizon, now_s: keep(settle(horizon, now_s))  # type: ignore[method-assign]
    queues.note_heads = lambda firsts: keep(note(firsts))  # type: ignore[method-assign]
    queues.remove = drop  # type: ignore[method-assign]


@LIGHT
@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 5), st.floats(0, 8)), max_size=30),
    st.floats(600, 1e7),
)
def test_usage_equals_the_integral(
    changes: list[tuple[float, int, float]], half_life_s: float
) -> None:
    """The closed form against the sum of each constant piece decayed to the end."""
    policy = Policy(half_life_s=half_life_s)
    accounts = Accounts(policy)
    pieces: list[tuple[float, float, float]] = []
    rates: dict[int, float] = {}
    now_s = 1000.0
    for gap_s, job_id, rate in changes:
        pieces.append((now_s, now_s + gap_s, sum(rates.values())))
        now_s += gap_s
        rates[job_id] = rate
        accounts.set_rate(1, JobId(job_id), rate, now_s)
        accounts.usage(1, now_s + 17.0)
    expected = sum(_integral(a, b, rate, now_s, half_life_s) for a, b, rate in pieces)
    assert abs(accounts.usage(1, now_s) - expected) <= 1e-9 * max(expected, 1e-9)


def _integral(a_s: float, b_s: float, rate: float, now_s: float, half_life_s: float) -> float:
    """By Gauss-Legendre on short steps: independent of the closed form."""
    nodes = ((-0.7745966692414834, 5 / 9), (0.0, 8 / 9), (0.7745966692414834, 5 / 9))
    steps = max(1, int((b_s - a_s) / half_life_s * 40) + 1)
    if rate == 0 or b_s == a_s:
        return 0.0
    width_s, total = (b_s - a_s) / steps, 0.0
    for step in range(steps):
        middle_s = a_s + (step + 0.5) * width_s
        for node, weight in nodes:
            at_s = middle_s + node * width_s / 2
            total += weight * 0.5 ** ((now_s - at_s) / half_life_s)
    return rate * total * width_s / 2


@settings(LIGHT, max_examples=max(20, EXAMPLES // 5))
@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 8), st.integers(60, 1200)), min_size=1, max_size=4),
    st.sampled_from([20.0, 200.0]),
)
def test_every_job_starts_within_its_bound_under_a_trickle_of_lighter_users(
    heavy: int, light: int, trickle: list[tuple[int, int]], w_fair: float
) -> None:
    """Guarantee 2: B + (N * age_jobs + 1)(L + grace), though new light jobs come for ever."""
    policy = Policy(w_fair=w_fair, promise_within_s=NEVER_S, w_age_per_h=100.0)
    sim = Sim(tuple(gpu(n) for n in range(8)), policy)
    sim.accounts.set_rate(1, JobId(999), 8.0, -1e6)
    sim.accounts.set_rate(1, JobId(999), 0.0, 0.0)
    longest_s = 1200.0 + policy.kill_grace_s + policy.launch_allowance_s
    bound_s = w_fair / policy.w_age_per_h * HOUR_S + (light + 2) * longest_s
    for number in range(2 * light):
        _trickle(sim, number, light, trickle)
    sim.make_pass()
    sim.submit(waiting(500, heavy, uid=1, limit_s=600.0))
    submitted_s, number = sim.now_s, 2 * light
    while JobId(500) not in sim.started_s:
        assert sim.now_s - submitted_s <= bound_s
        sim.make_pass()
        end_s = min(sim.next_end_s(), sim.now_s + 600.0)
        # Whoever's list runs dry gets the next job before the pass that could start the heavy one.
        number = _refill(sim, number, light, trickle)
        sim.go_to(end_s)
    assert sim.started_s[JobId(500)] - submitted_s <= bound_s


def _refill(sim: Sim, number: int, light: int, trickle: list[tuple[int, int]]) -> int:
    while len(sim.queues) < 2 * light + 1:
        _trickle(sim, number, light, trickle)
        number += 1
    return number


def _trickle(sim: Sim, number: int, light: int, trickle: list[tuple[int, int]]) -> None:
    gpus, lasts_s = trickle[number % len(trickle)]
    sim.submit(waiting(1000 + number, gpus, uid=2 + number % light, limit_s=float(lasts_s)))


def test_beside_is_what_check_host_checks() -> None:
    """A guard for the helper above: an alone job is never beside another."""
    policy = Policy()
    sim = Sim((gpu(0),), policy)
    host = Host(sim.snapshot(), policy)
    need = host.need(waiting(1, 1, vram=GIB).request, 1)
    assert compatible(host.slots[0].gpu, [], need, policy)
