"""One pass: the stories of the contract, and each rule of order, EASY and unknown shadow times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpusched_client.terms import JobId, PendingReason
from gpuschedd.core import patience, queues
from gpuschedd.core.lengths import Histories
from gpuschedd.core.model import (
    DAY_S,
    GIB,
    HOUR_S,
    NEVER_S,
    Backfill,
    FirstHead,
    GpuState,
    Kind,
    LengthRow,
    Order,
    Policy,
    Promise,
    PromiseException,
    PromiseOutcome,
    Rule,
    Run,
    Topology,
    UserLimit,
)
from gpuschedd.core.plan import plan, reason_of
from gpuschedd.core.queues import Queues
from gpuschedd.core.timeline import end_if_decided_s, planned_end_s
from tests.support.core_builders import (
    CARD_BYTES,
    EXACT,
    MARGIN,
    Sim,
    gpu,
    gpus,
    running,
    snapshot_of,
    uuid,
    waiting,
)

OFF = replace(EXACT, backfill=Backfill.OFF)
BEFORE = replace(EXACT, backfill=Backfill.BEFORE_RESERVATION)


def test_four_job_story_of_a_four_gpu_host() -> None:
    """A 2 GPUs 20 s; B 4, promised by t+35; C 1 for 3 s backfills; D 1 for 40 s is held back."""
    sim = Sim(gpus(4), Policy())
    sim.submit(waiting(1, 2, limit_s=20.0, uid=1))
    sim.make_pass()
    sim.submit(waiting(2, 4, limit_s=60.0, uid=2))
    sim.submit(waiting(3, 1, limit_s=3.0, uid=3))
    sim.submit(waiting(4, 1, limit_s=40.0, uid=4))
    made = sim.make_pass()
    assert made.start_ids == (3,)
    assert made.promise == Promise(JobId(2), 0.0, 35.0)
    assert made.reasons[JobId(2)].code is PendingReason.RESOURCES
    assert made.reasons[JobId(2)].numbers["expected_at_s"] == 35.0
    assert made.reasons[JobId(2)].blocking_jobs == (1,)
    assert made.reasons[JobId(4)].code is PendingReason.RESERVED
    assert made.reasons[JobId(4)].numbers["head_at_s"] == 35.0
    assert made.reasons[JobId(4)].blocking_jobs == (2,)
    sim.go_to(20.0)
    assert sim.started_s[JobId(2)] == 20.0
    assert [end.outcome for end in sim.promise_ends] == [PromiseOutcome.KEPT]


def test_story_of_a_four_gpu_host_without_limits() -> None:
    """A 2 GPUs, expected 2 h; B 4, head by X; C, 1 h, fits in before; D, unknown, does not; A
    outlives what was expected, so longer ones do, until after two days all are closed for B.
    """
    two, one = (Run(0.0, 2.1 * HOUR_S), Run(1.0, 1.9 * HOUR_S)), (Run(0.0, HOUR_S),)
    sim = Sim(gpus(4), Policy())
    sim.histories = Histories([LengthRow(1, Kind("a", 2), two), LengthRow(3, Kind("c", 1), one)])

    def submit(job_id: int, gpus: int, uid: int, key: str) -> None:
        sim.submit(waiting(job_id, gpus, uid=uid, limit_s=None, length_key=key))

    submit(1, 2, 1, "a")
    sim.make_pass()
    submit(2, 4, 2, "b")
    submit(3, 1, 3, "c")
    submit(4, 1, 4, "d")
    made = sim.make_pass()
    assert made.start_ids == (3,)
    head = made.reservation
    assert head is not None
    assert (head.job_id, head.start_s, head.spare, head.guessed) == (2, 7_215.0, 0, True)
    assert made.promise is None
    assert made.reasons[JobId(2)].code is PendingReason.UNLIMITED_JOB
    assert "no planned end: job 1 has no limit" in made.reasons[JobId(2)].text
    assert made.reasons[JobId(2)].numbers["expected_at_s"] == 7_215.0
    assert made.reasons[JobId(4)].code is PendingReason.RESERVED
    sim.now_s = HOUR_S
    sim.end(JobId(3))
    sim.now_s = 7_215.0
    late = sim.make_pass().reservation
    assert late is not None
    assert (late.start_s, late.patient_until_s) == (7_275.0, 180_015.0)
    submit(5, 1, 3, "c")
    sim.now_s = 176_000.0
    assert sim.make_pass().start_ids == (4, 5)  # A has run for 49 h and may need 42 more
    sim.now_s = 179_600.0
    sim.end(JobId(5))
    submit(6, 1, 3, "c")
    sim.now_s = 180_015.0
    assert sim.make_pass().start_ids == ()
    sim.end(JobId(1))
    sim.end(JobId(4))
    assert sim.make_pass().start_ids == (2,)


def test_a_short_command_behind_many_long_ones_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many commands to keep, one request: by guesses each may have an end of its own."""
    monkeypatch.setattr(queues, "SHAPES_MAX", 1)
    sim = Sim(gpus(4), Policy())
    rows = {(1, "a", 2): 2 * HOUR_S, (3, "c", 1): HOUR_S, (3, "z", 1): 9 * HOUR_S}
    sim.histories = Histories(
        [LengthRow(uid, Kind(key, n), (Run(0.0, s),)) for (uid, key, n), s in rows.items()]
    )
    sim.submit(waiting(1, 2, uid=1, limit_s=None, length_key="a"))
    sim.make_pass()
    sim.submit(waiting(2, 4, uid=2, limit_s=None, length_key="b"))
    for job_id in range(3, 9):
        sim.submit(waiting(job_id, uid=3, limit_s=None, length_key="z"))
    sim.submit(waiting(9, uid=3, limit_s=None, length_key="c"))
    seen = sim.snapshot()
    (own,) = (queue for queue in seen.queues.gpu if queue.uid == 3)
    assert (own.shapes, len(own.requests or ())) == (None, 1)
    for explain in (-1, 0, 50):
        assert plan(seen, sim.policy, explain).start_ids == (9,)


def test_estimates_make_no_list_longer_where_ends_are_planned() -> None:
    """As many as jobs: the requests are the same, and fail together."""
    sim = Sim(gpus(4), Policy())
    for number in range(1, 100):
        job = waiting(number)
        asked = replace(job.request, estimate_s=float(number))
        sim.submit(replace(job, request=asked))
    (own,) = sim.snapshot().queues.gpu
    assert (own.shapes, len(own.requests or ())) == (None, 1)


def test_every_reason_names_who_has_the_gpus_that_are_free_first() -> None:
    """Not only the head's: GPU 1 is free before GPU 0."""
    busy = [running(1, [0], limit_s=900.0), running(2, [1], limit_s=600.0)]
    made = plan(snapshot_of(gpus(2), busy, [waiting(3, 2), waiting(4, 1)]), EXACT)
    assert made.reasons[JobId(3)].blocking_jobs == (1, 2)
    assert made.reasons[JobId(4)].blocking_jobs == (2,)
    assert made.reasons[JobId(4)].text.endswith("0 of 2 can take it now; waits for job 2")


def test_memory_where_a_job_may_not_sit_is_not_called_free() -> None:
    """GPU 0 has 69.5 GiB free, but its job wants nobody beside it; GPU 1 has 19.5 GiB."""
    alone = running(1, [0], vram=10 * GIB, exclusive=True)
    busy = [alone, running(2, [1], vram=60 * GIB)]
    made = plan(snapshot_of(gpus(2), busy, [waiting(3, vram=30 * GIB)]), EXACT)
    assert "the most free on one is 19.5 GiB" in made.reasons[JobId(3)].text
    made = plan(snapshot_of(gpus(1), [alone], [waiting(3, vram=30 * GIB)]), EXACT)
    assert "none takes it beside the jobs that are there" in made.reasons[JobId(3)].text


def test_a_reason_names_nobody_beside_whom_the_job_could_sit() -> None:
    """Job 3 would share GPU 0 with job 1; only GPU 1 is too full."""
    busy = [running(1, [0], vram=10 * GIB), running(2, [1], vram=60 * GIB)]
    made = plan(snapshot_of(gpus(2), busy, [waiting(3, 2, vram=30 * GIB)]), EXACT)
    assert made.reasons[JobId(3)].blocking_jobs == (2,)


def test_long_job_starts_beside_the_head_that_it_cannot_delay() -> None:
    """On 8 GPUs A holds 6 for 10 min, B wants 4, C wants 2 for 60 min: C starts at once."""
    made = plan(
        snapshot_of(
            gpus(8),
            [running(1, range(6), limit_s=600.0)],
            [waiting(2, 4, limit_s=600.0), waiting(3, 2, limit_s=3600.0, uid=2)],
        ),
        EXACT,
    )
    assert made.start_ids == (3,)
    assert made.reservation is not None
    assert (made.reservation.job_id, made.reservation.start_s) == (2, 600.0)
    assert made.reservation.spare == 2


@pytest.mark.parametrize("limit_s", [3600.0, None])
def test_job_behind_one_that_waits_for_a_drained_gpu_gets_the_reservation(
    limit_s: float | None,
) -> None:
    """X wants all 8, one is drained; Y of the same user wants 4, is reserved and then starts."""
    cards = (*gpus(7), gpu(7, state=GpuState.DRAINED, state_text="fan"))
    x, y = waiting(1, 8), waiting(2, 4, limit_s=limit_s, since_s=1.0)
    busy = [running(9, range(6), limit_s=600.0)]
    made = plan(snapshot_of(cards, busy, [x, y], now_s=2.0), EXACT)
    assert made.start_ids == ()
    assert made.unknown == {1}
    assert made.reasons[JobId(1)].code is PendingReason.GPU_UNAVAILABLE
    assert "GPU 7 drained (fan)" in made.reasons[JobId(1)].text
    assert made.reservation is not None
    assert made.reservation.job_id == 2
    assert plan(snapshot_of(cards, [], [x, y], now_s=2.0), EXACT).start_ids == (2,)


def test_gpus_that_are_out_for_one_reason_are_named_together() -> None:
    """A driver that is down says the same of sixteen GPUs: once is enough."""
    down = {"state": GpuState.UNREAD, "state_text": "no driver"}
    cards = (gpu(0, **down), gpu(1, **down), gpu(2, **down), gpu(3, state=GpuState.LOST))
    made = plan(snapshot_of(cards, [], [waiting(1, 1)]), EXACT)
    text = made.reasons[JobId(1)].text
    assert text.endswith("GPUs 0, 1 and 2 unread (no driver), GPU 3 lost")


def test_backfill_never_delays_the_head_job() -> None:
    made = plan(
        snapshot_of(
            gpus(2),
            [running(1, [0], limit_s=600.0)],
            [waiting(2, 2), waiting(3, 1, limit_s=900.0, uid=2)],
        ),
        EXACT,
    )
    assert made.start_ids == ()


def test_planned_end_equal_to_the_shadow_time_is_allowed() -> None:
    made = plan(
        snapshot_of(
            gpus(2),
            [running(1, [0], limit_s=600.0)],
            [waiting(2, 2), waiting(3, 1, limit_s=600.0, uid=2)],
        ),
        EXACT,
    )
    assert made.start_ids == (3,)


def test_planned_ends_count_the_allowance_and_the_grace() -> None:
    """A candidate that would end in time by its limit alone still delays the head."""
    policy = Policy()
    busy = running(1, [0], limit_s=100.0, decided_s=0.0)
    queue = [waiting(2, 2), waiting(3, 1, limit_s=101.0, uid=2)]
    assert plan(snapshot_of(gpus(2), [busy], queue, policy=policy), policy).start_ids == ()
    queue = [waiting(2, 2), waiting(3, 1, limit_s=100.0, uid=2)]
    assert plan(snapshot_of(gpus(2), [busy], queue, policy=policy), policy).start_ids == (3,)


@example(0.8711327079891485, 5.0, 0.0)
@given(st.floats(0.0, 1e9), st.floats(1.0, 1e7), st.sampled_from([0.0, 0.1, 10.0]))
def test_the_end_planned_at_the_decision_stays_the_same_to_the_last_bit(
    decided_s: float, limit_s: float, grace_s: float
) -> None:
    """What is promised by it would else be late by a rounding."""
    policy = Policy(kill_grace_s=grace_s)
    job = running(1, [0], limit_s=limit_s, decided_s=decided_s, started_at_s=None)
    assert planned_end_s(job, decided_s, policy) == end_if_decided_s(decided_s, limit_s, policy)


def test_candidate_takes_gpus_that_are_not_useful_to_the_head_first() -> None:
    """Best-fit alone would take the smaller card, which the head needs."""
    cards = (gpu(0), gpu(1), gpu(2, total_bytes=160 * GIB, model="large"))
    made = plan(
        snapshot_of(
            cards,
            [running(1, [0], limit_s=600.0)],
            [waiting(2, 2, gpu_model="sim"), waiting(3, 1, limit_s=9000.0, uid=2)],
        ),
        EXACT,
    )
    assert [grant.uuid for start in made.starts for grant in start.grants] == [uuid(2)]


def test_shared_candidate_may_sit_beside_the_head_on_a_useful_gpu() -> None:
    """Usefulness is about room at T, not about being empty."""
    made = plan(
        snapshot_of(
            gpus(1),
            [running(1, [0], limit_s=600.0, vram=50 * GIB)],
            [
                waiting(2, 1, vram=50 * GIB),
                waiting(3, 1, vram=28 * GIB, limit_s=9000.0, uid=2),
                waiting(4, 1, vram=29 * GIB, limit_s=9000.0, uid=3),
            ],
        ),
        EXACT,
    )
    assert made.start_ids == (3,)
    assert made.reasons[JobId(4)].code is PendingReason.RESOURCES


def test_spare_shrinks_with_each_long_candidate() -> None:
    made = plan(
        snapshot_of(
            gpus(8),
            [running(1, range(5), limit_s=600.0)],
            [waiting(2, 6), *(waiting(n, 1, limit_s=9000.0, uid=n) for n in (3, 4, 5))],
        ),
        EXACT,
    )
    assert made.start_ids == (3, 4)


def test_before_reservation_admits_only_jobs_that_end_by_then() -> None:
    queue = [
        waiting(2, 4),
        waiting(3, 1, limit_s=9000.0, uid=2),
        waiting(4, 1, limit_s=600.0, uid=3),
    ]
    seen = snapshot_of(gpus(8), [running(1, range(6), limit_s=600.0)], queue)
    assert plan(seen, BEFORE).start_ids == (4,)
    assert plan(seen, EXACT).start_ids == (3, 4)


def test_off_lets_nobody_overtake_and_makes_no_reservation() -> None:
    queue = [waiting(2, 4), waiting(3, 1, limit_s=1.0, uid=2)]
    made = plan(snapshot_of(gpus(4), [running(1, [0])], queue), OFF)
    assert made.start_ids == ()
    assert made.reservation is None
    assert made.promise is None
    assert made.reasons[JobId(3)].code is PendingReason.PRIORITY


def test_off_passes_over_a_job_of_unknown_shadow_time() -> None:
    cards = (*gpus(3), gpu(3, state=GpuState.LOST))
    made = plan(snapshot_of(cards, [], [waiting(2, 4), waiting(3, 1, uid=2)]), OFF)
    assert made.start_ids == (3,)


def test_a_job_that_waits_for_one_without_limit_is_head_by_its_expected_end() -> None:
    """Of 4 GPUs one holds a job without limit, expected to run 24 h; job 2 wants all 4.

    Behind it a job starts if it is expected to have gone by then, also one that has no limit.
    """
    busy = [running(1, [3], limit_s=None)]
    queue = [
        waiting(2, 4),
        waiting(3, 1, limit_s=None, uid=2, estimate_s=3600.0),
        waiting(4, 1, limit_s=None, uid=3, estimate_s=25 * HOUR_S),
        waiting(5, 1, limit_s=9000.0, uid=4),
    ]
    made = plan(snapshot_of(gpus(4), busy, queue), EXACT)
    assert made.start_ids == (3, 5)
    assert made.reservation is not None
    assert (made.reservation.start_s, made.reservation.guessed) == (24 * HOUR_S, True)
    assert made.promise is None
    assert made.first_heads == {JobId(2): FirstHead(0.0, 24 * HOUR_S)}
    why = made.reasons[JobId(2)]
    assert (why.code, why.blocking_jobs) == (PendingReason.UNLIMITED_JOB, (1,))
    assert why.text.endswith("no planned end: job 1 has no limit")
    assert why.numbers["expected_at_s"] == 24 * HOUR_S
    assert "is expected to run 25 h" in made.reasons[JobId(4)].text
    # The next pass is due when the next job is expected to end.
    assert made.next_change_at_s == EXACT.rerank_s
    late = plan(snapshot_of(gpus(4), busy, queue), replace(EXACT, rerank_s=1e9))
    assert late.next_change_at_s == 3600.0


def test_what_runs_past_the_hold_may_sit_on_spare_gpus() -> None:
    """Of 4 GPUs the head wants 3, which are its own from 24 h on: one is free for anybody."""
    busy = [running(1, [3], limit_s=None), running(6, [2], limit_s=None)]
    queue = [waiting(2, 3), waiting(3, 1, limit_s=None, uid=2, estimate_s=50 * HOUR_S)]
    made = plan(snapshot_of(gpus(4), busy, queue), EXACT)
    assert made.start_ids == (3,)
    assert made.reservation is not None
    assert made.reservation.spare == 0


def test_no_guess_delays_a_head_that_has_a_planned_end() -> None:
    """It is held by planned ends: a job without limit has none, whatever is expected of it."""
    busy = [running(1, [0, 1, 2], limit_s=9000.0)]
    queue = [waiting(2, 4), waiting(3, 1, limit_s=None, uid=2, estimate_s=60.0)]
    made = plan(snapshot_of(gpus(4), busy, queue), EXACT)
    assert made.start_ids == ()
    assert made.reservation is not None
    assert not made.reservation.guessed


@pytest.mark.parametrize("backfill", list(Backfill))
def test_patience_closes_gpus_for_a_head_without_a_planned_end(backfill: Backfill) -> None:
    """First expected at 24 h, it has waited 48 h beyond that: those it could have are closed."""
    policy = replace(EXACT, backfill=backfill)
    busy = [
        running(1, [0], limit_s=None, decided_s=0.0),
        running(5, [1], limit_s=None, decided_s=70 * HOUR_S),
        running(6, [2], limit_s=None, decided_s=60 * HOUR_S),
    ]
    head = waiting(2, 3, first_head=FirstHead(0.0, 24 * HOUR_S))
    queue = [head, *(waiting(n, 1, limit_s=60.0, uid=n) for n in (3, 4))]
    before = plan(snapshot_of(gpus(5), busy, queue, now_s=72 * HOUR_S - 1), policy)
    after = plan(snapshot_of(gpus(5), busy, queue, now_s=72 * HOUR_S), policy)
    if backfill is Backfill.OFF:
        assert before.starts == after.starts == ()
        return
    assert before.start_ids == (3, 4)
    assert before.reservation is not None
    assert before.reservation.patient_until_s == 72 * HOUR_S
    # GPUs 3 and 4 are idle, GPU 0 has the oldest job.
    assert after.starts == ()
    reason = after.reasons[JobId(3)]
    assert (reason.code, reason.blocking_jobs) == (PendingReason.RESERVED, (2,))
    assert "nothing behind it starts" in reason.text


def test_a_job_that_starts_caps_its_users_next_one_no_longer() -> None:
    """That one is older than the head, so it comes before it: in this pass, not in the next."""
    queue = [
        waiting(2, 3, uid=2, limit_s=None, age_gained_s=10 * HOUR_S),
        waiting(3, 1, uid=1, limit_s=None, estimate_s=60.0),
        waiting(4, 1, uid=1, limit_s=None, since_s=1.0, age_gained_s=50 * HOUR_S),
    ]
    seen = snapshot_of(gpus(3), [running(1, [0], limit_s=None, expected_s=600.0)], queue, now_s=2.0)
    made = plan(seen, EXACT)
    assert made.start_ids == (3, 4)
    assert [start.rule for start in made.starts] == [Rule.GAP, Rule.FIRST]
    assert made.reservation is not None
    assert made.reservation.start_s == 2.0 + DAY_S
    assert set(made.reasons) == {2}


def test_closed_gpus_are_no_more_than_the_head_asks() -> None:
    busy = [running(1, [0], limit_s=None), running(5, [1], limit_s=None, decided_s=9.0)]
    head = waiting(2, 3, first_head=FirstHead(0.0, 0.0), gpu_model="sim")
    queue = [head, *(waiting(n, 1, limit_s=60.0, uid=n) for n in (3, 4))]
    cards = (*gpus(4), gpu(4, model="other"))
    made = plan(snapshot_of(cards, busy, queue, now_s=72 * HOUR_S), EXACT)
    assert [grant.uuid for start in made.starts for grant in start.grants] == [uuid(4)]


def test_the_first_expectation_counts_as_at_most_the_guess_after_it_was_made() -> None:
    first = FirstHead(10.0, 1e9)
    assert patience.ends_at_s(first, EXACT) == 10.0 + 72 * HOUR_S
    assert patience.ends_at_s(FirstHead(10.0, 20.0), EXACT) == 20.0 + 48 * HOUR_S


def test_the_nvlink_set_closes_whose_jobs_are_all_older() -> None:
    """Else one whose jobs began after patience ended could take its place again and again."""
    cards = tuple(gpu(n, island=n // 2) for n in range(4))
    busy = [running(5, [1], limit_s=None), running(6, [2], limit_s=None, decided_s=50.0)]
    head = waiting(2, 2, topology=Topology.NVLINK, first_head=FirstHead(0.0, 0.0))
    queue = [head, *(waiting(n, 1, limit_s=1.0, uid=n) for n in (3, 4))]
    made = plan(snapshot_of(cards, busy, queue, now_s=72 * HOUR_S), EXACT)
    assert [grant.uuid for start in made.starts for grant in start.grants] == [uuid(3)]


def test_an_unpromised_reservation_counts_against_its_owners_limit() -> None:
    """Else a later job of the same owner would take its place under the limit."""
    limits = {1: UserLimit(max_gpus=2)}
    busy = [running(9, [0], limit_s=None)]
    queue = [waiting(2, 2), waiting(3, 1, limit_s=60.0)]
    made = plan(snapshot_of(gpus(2), busy, queue, limits=limits), EXACT)
    assert made.start_ids == ()
    assert made.reasons[JobId(3)].code is PendingReason.USER_LIMIT
    assert plan(snapshot_of(gpus(2), busy, queue), EXACT).start_ids == (3,)
    # The head itself is within it, so it ages and caps those behind.
    assert made.horizon.rooms == {1: (2, NEVER_S)}


def test_job_that_waits_for_foreign_use_keeps_no_gpus() -> None:
    cards = (*gpus(3), gpu(3, foreign_bytes=GIB, whole_idle=False, foreign_text="pid 7 of eva"))
    queue = [waiting(2, 4), waiting(3, 3, limit_s=None, uid=2)]
    made = plan(snapshot_of(cards, [], queue), EXACT)
    assert made.start_ids == (3,)
    assert made.reasons[JobId(2)].code is PendingReason.FOREIGN_USE
    assert "GPU 3: 1 GiB (pid 7 of eva)" in made.reasons[JobId(2)].text


def test_unknown_job_respects_the_reservation_of_others() -> None:
    """It fits nowhere without delaying the head, so it waits though it holds no reservation."""
    queue = [waiting(2, 2, limit_s=100.0), waiting(3, 1, limit_s=None, uid=2)]
    made = plan(snapshot_of(gpus(2), [running(1, [0], limit_s=600.0)], queue), EXACT)
    assert made.start_ids == ()


def test_young_foreign_use_counts_as_ending_when_it_gets_old() -> None:
    young = gpu(0, foreign_bytes=GIB, whole_idle=False, foreign_since_s=-500.0)
    made = plan(snapshot_of((young, gpu(1)), [], [waiting(1, 2)]), EXACT)
    assert made.reservation is not None
    assert made.reservation.start_s == 100.0
    assert made.promise is None  # it may stay
    assert made.next_change_at_s == EXACT.rerank_s
    old = replace(young, foreign_since_s=-600.0)
    assert plan(snapshot_of((old, gpu(1)), [], [waiting(1, 2)]), EXACT).unknown == {1}


def test_gpu_without_a_fresh_sample_takes_no_job_and_is_useful_soon() -> None:
    stale = (gpu(0, fresh=False), gpu(1))
    made = plan(snapshot_of(stale, [], [waiting(1, 2), waiting(2, 1, uid=2)]), EXACT)
    assert made.start_ids == ()
    assert made.reservation is not None
    assert made.reservation.start_s == EXACT.fresh_allowance_s


def test_stuck_job_takes_its_gpus_off_the_timeline() -> None:
    busy = [running(1, [0], limit_s=100.0)]
    seen = snapshot_of(gpus(2), busy, [waiting(2, 2)], now_s=160.0)
    assert plan(seen, EXACT).reservation is not None
    made = plan(replace(seen, now_s=160.5), EXACT)
    assert made.unknown == {2}
    assert "stuck job 1" in made.reasons[JobId(2)].text


def test_full_host_costs_no_look_at_the_whole_queue() -> None:
    """Jobs that were not looked at still have a reason."""
    queue = [waiting(n, 1, uid=n % 5) for n in range(2, 400)]
    made = plan(snapshot_of(gpus(1), [running(1, [0])], queue), EXACT, explain=10)
    assert len(made.reasons) < 20
    assert reason_of(made, JobId(399)).code is PendingReason.PRIORITY


def test_no_gpus_seen_yet() -> None:
    made = plan(snapshot_of((), [], [waiting(1, 1)]), EXACT)
    assert reason_of(made, JobId(1)).code is PendingReason.NO_GPUS


def test_fcfs_follows_submission_and_then_the_id() -> None:
    policy = replace(EXACT, order=Order.FCFS)
    queue = [waiting(5, 1, uid=1, since_s=0.0), waiting(3, 1, uid=2, since_s=0.0)]
    seen = snapshot_of(gpus(1), [], queue, usage={2: 1e9}, policy=policy)
    assert plan(seen, policy).start_ids == (3,)


def test_user_with_less_usage_goes_first() -> None:
    queue = [waiting(1, 1, uid=1), waiting(2, 1, uid=2, since_s=1.0)]
    seen = snapshot_of(gpus(1), [], queue, now_s=2.0, usage={1: 9e5, 2: 1e5})
    assert plan(seen, EXACT).start_ids == (2,)


def test_user_limit_leaves_a_job_out_of_the_order() -> None:
    """It is no head, so others pass, and says so."""
    queue = [waiting(1, 2, uid=1), waiting(2, 1, uid=1, since_s=1.0), waiting(3, 2, uid=2)]
    seen = snapshot_of(
        gpus(4),
        [running(9, [0], uid=1)],
        queue,
        now_s=2.0,
        limits={1: UserLimit(max_gpus=2)},
    )
    made = plan(seen, EXACT)
    assert set(made.start_ids) == {2, 3}
    assert made.reasons[JobId(1)].code is PendingReason.USER_LIMIT
    assert made.reasons[JobId(1)].text == "needs 2 GPUs; its user's limit of 2 leaves 1"
    assert made.reservation is None


def test_user_limit_of_jobs_says_its_number() -> None:
    busy = [running(9, [0], uid=1)]
    made = plan(snapshot_of(gpus(4), busy, [waiting(1)], limits={1: UserLimit(max_jobs=1)}), EXACT)
    assert made.reasons[JobId(1)].text == "its user's limit of 1 running job is reached"


def test_promised_gpus_count_against_the_users_limit() -> None:
    queue = [waiting(1, 2, uid=1), waiting(2, 1, uid=1, since_s=1.0, limit_s=10.0)]
    seen = snapshot_of(
        gpus(4),
        [running(9, [0, 1, 2], limit_s=600.0)],
        queue,
        now_s=2.0,
        limits={1: UserLimit(max_gpus=2)},
        promise=Promise(JobId(1), 0.0, 600.0),
    )
    made = plan(seen, EXACT)
    assert made.start_ids == ()
    assert made.reasons[JobId(2)].code is PendingReason.USER_LIMIT


def test_a_lost_promise_counts_against_no_limit() -> None:
    """What its holder was to take is free again for its user, in the very pass that loses it."""
    drained = (*gpus(3), replace(gpus(4)[3], state=GpuState.DRAINED))
    queue = [waiting(1, 4, uid=1, limit_s=60.0), waiting(2, 2, uid=1, since_s=1.0, limit_s=60.0)]
    seen = snapshot_of(
        drained,
        [running(9, [0], limit_s=600.0)],
        queue,
        now_s=2.0,
        limits={1: UserLimit(max_gpus=4)},
        promise=Promise(JobId(1), 0.0, 600.0),
    )
    made = plan(seen, EXACT)
    assert made.ended is not None
    assert made.ended.exception is PromiseException.GPU_DRAINED
    assert made.reasons[JobId(1)].code is PendingReason.GPU_UNAVAILABLE
    assert made.start_ids == (2,)


def test_a_gpu_that_is_away_goes_before_a_limit() -> None:
    """Whoever waits for both could not start either if the limit were higher."""
    drained = (*gpus(3), replace(gpus(4)[3], state=GpuState.DRAINED, state_text="fan"))
    busy, limits = [running(9, [0], uid=1)], {1: UserLimit(max_gpus=4)}
    made = plan(snapshot_of(drained, busy, [waiting(1, 4)], limits=limits), EXACT)
    assert made.reasons[JobId(1)].code is PendingReason.GPU_UNAVAILABLE
    assert made.reasons[JobId(1)].text.endswith(
        "only 3 of the GPUs can take it: GPU 3 drained (fan)"
    )
    made = plan(snapshot_of(gpus(4), busy, [waiting(1, 4)], limits=limits), EXACT)
    assert made.reasons[JobId(1)].code is PendingReason.USER_LIMIT


def test_cpu_jobs_wait_for_slots_alone() -> None:
    policy = replace(EXACT, max_cpu_jobs=2)
    queue = [waiting(1, 4), *(waiting(n, 0, uid=n) for n in (2, 3, 4))]
    made = plan(snapshot_of(gpus(1), [], queue), policy)
    assert made.start_ids == (2, 3)
    assert made.reasons[JobId(4)].code is PendingReason.CPU_SLOTS
    assert made.starts[0].grants == ()


def test_whole_job_waits_for_an_idle_gpu_and_says_who_is_there() -> None:
    made = plan(snapshot_of(gpus(1), [running(1, [0], vram=GIB)], [waiting(2, 1)]), EXACT)
    assert made.reasons[JobId(2)].blocking_jobs == (1,)


def test_exclusive_job_sits_beside_foreign_use_but_beside_no_job() -> None:
    cards = (gpu(0, foreign_bytes=10 * GIB, whole_idle=False), gpu(1))
    busy = [running(1, [1], vram=GIB)]
    job = waiting(2, 1, vram=60 * GIB, exclusive=True)
    made = plan(snapshot_of(cards, busy, [job]), EXACT)
    assert [grant.uuid for grant in made.starts[0].grants] == [uuid(0)]
    again = snapshot_of(
        cards[:1], [running(2, [0], vram=20 * GIB, exclusive=True)], [waiting(3, 1, vram=GIB)]
    )
    assert plan(again, EXACT).start_ids == ()


def test_headroom_counts_the_margin_of_each_declaration() -> None:
    half = CARD_BYTES // 2 - MARGIN
    queue = [waiting(n, 1, vram=half, uid=n) for n in (1, 2)]
    assert plan(snapshot_of(gpus(1), [], queue), EXACT).start_ids == (1, 2)
    queue = [waiting(n, 1, vram=half + 1, uid=n) for n in (1, 2)]
    assert plan(snapshot_of(gpus(1), [], queue), EXACT).start_ids == (1,)


def test_at_most_max_jobs_per_gpu() -> None:
    queue = [waiting(n, 1, vram=GIB, uid=n) for n in range(1, 7)]
    assert plan(snapshot_of(gpus(1), [], queue), EXACT).start_ids == (1, 2, 3, 4)


def test_across_users_false_keeps_users_apart() -> None:
    policy = replace(EXACT, across_users=False)
    queue = [
        waiting(1, 1, vram=GIB, uid=1),
        waiting(2, 1, vram=GIB, uid=2),
        waiting(3, 1, vram=GIB, uid=1, since_s=1.0),
    ]
    assert plan(snapshot_of(gpus(1), [], queue, now_s=1.0), policy).start_ids == (1, 3)


def test_nvlink_job_takes_one_island_and_waits_for_one() -> None:
    cards = tuple(gpu(n, island=n // 4) for n in range(8))
    busy = [running(1, [0], limit_s=600.0), running(2, [4, 5], limit_s=300.0)]
    job = waiting(3, 4, topology=Topology.NVLINK)
    made = plan(snapshot_of(cards, busy, [job]), EXACT)
    assert made.reservation is not None
    assert made.reservation.start_s == 300.0
    small = waiting(3, 3, topology=Topology.NVLINK)
    started = plan(snapshot_of(cards, busy, [small]), EXACT).starts[0]
    assert [grant.uuid for grant in started.grants] == [uuid(1), uuid(2), uuid(3)]


def test_nvlink_head_keeps_its_island_from_long_jobs() -> None:
    """Island 0 is free at 300; of the other, which is never enough for it, anyone may take."""
    cards = tuple(gpu(n, island=n // 4) for n in range(8))
    busy = [running(1, [0], limit_s=300.0), running(2, [4], limit_s=9000.0)]
    queue = [waiting(3, 4, topology=Topology.NVLINK)]
    queue += [waiting(n, 1, limit_s=3600.0, uid=n) for n in (4, 5, 6, 7)]
    made = plan(snapshot_of(cards, busy, queue), EXACT)
    taken = [grant.uuid for start in made.starts for grant in start.grants]
    assert taken == [uuid(5), uuid(6), uuid(7)]


def test_two_gpu_job_goes_to_the_island_that_is_broken_into() -> None:
    cards = tuple(gpu(n, island=n // 4) for n in range(8))
    busy = [running(1, [4, 5])]
    started = plan(snapshot_of(cards, busy, [waiting(2, 2)]), EXACT).starts[0]
    assert [grant.uuid for grant in started.grants] == [uuid(6), uuid(7)]


def test_job_of_unknown_shadow_time_neither_ages_nor_caps_those_behind() -> None:
    cards = (*gpus(1), gpu(1, state=GpuState.DRAINED))
    queues = Queues(EXACT)
    queues.insert(waiting(1, 2), 0.0)
    queues.insert(waiting(2, 1, since_s=1.0), 1.0)
    first = queues.get(JobId(1))
    assert first is not None
    assert first.window_since_s == 0.0
    made = plan(snapshot_of(cards, [], [], now_s=2.0), EXACT)
    queues.settle(made.horizon, 2.0)
    one, two = queues.get(JobId(1)), queues.get(JobId(2))
    assert one is not None
    assert two is not None
    assert (one.age_gained_s, one.window_since_s) == (2.0, None)
    assert (two.age_gained_s, two.window_since_s) == (0.0, 2.0)


def test_next_change_is_when_the_reservation_becomes_a_promise() -> None:
    policy = replace(EXACT, promise_within_s=100.0, rerank_s=NEVER_S)
    made = plan(snapshot_of(gpus(1), [running(1, [0])], [waiting(2, 1)]), policy)
    assert made.promise is None
    assert made.next_change_at_s == 3500.0


def test_who_waits_for_gpus_that_the_host_no_longer_has_is_told_which_it_has() -> None:
    """They are gone, or the configuration leaves them to others: no row says so."""
    snapshot = snapshot_of(gpus(2), [], [waiting(1, 4), waiting(2, 1, gpu_model="H100")])
    reasons = plan(snapshot, EXACT).reasons
    now = "the scheduler has 2 GPUs now (sim)"
    assert reasons[JobId(1)].text == (f"needs 4 whole GPUs; only 2 of the GPUs can take it: {now}")
    assert reasons[JobId(2)].text.endswith(f"no GPU can take it: {now}")


def test_each_start_is_on_record_with_its_rule_and_the_first_of_the_order() -> None:
    busy = [running(1, [0], limit_s=600.0)]
    queue = [
        waiting(2, 1, limit_s=600.0),
        waiting(3, 5, limit_s=600.0, uid=2),
        waiting(4, 1, limit_s=60.0, uid=3, nice=1),
        waiting(5, 1, limit_s=9000.0, uid=4, nice=2),
        waiting(6, 0, limit_s=9000.0, uid=5),
    ]
    made = plan(snapshot_of(gpus(6), busy, queue), EXACT)
    told = {start.job_id: (start.rule, start.rank, start.head) for start in made.starts}
    assert told == {
        2: (Rule.FIRST, 1, None),
        4: (Rule.GAP, 3, (3, 600.0)),
        5: (Rule.SPARE, 4, (3, 600.0)),
        6: (Rule.SLOT, 1, None),
    }
    assert [job_id for job_id, _priority in made.first] == [2, 3, 4, 5]
    assert not any(start.guessed for start in made.starts)
    promised = replace(snapshot_of(gpus(6), [], queue), promise=Promise(JobId(3), 0.0, 600.0))
    assert plan(promised, EXACT).starts[0].rule is Rule.PROMISED


def test_a_job_without_gpus_waits_for_no_reservation_of_its_user() -> None:
    """Its user may have one job at once, and another waits for GPUs."""
    queue = [waiting(2, 2, limit_s=None), waiting(3, 0, limit_s=None)]
    busy = [running(1, [0, 1], limit_s=None)]
    seen = snapshot_of(gpus(2), busy, queue, limits={1: UserLimit(max_jobs=1)})
    made = plan(seen, replace(EXACT, max_cpu_jobs=2))
    assert made.reservation is not None
    assert [(start.job_id, start.rule, start.rank) for start in made.starts] == [(3, Rule.SLOT, 1)]


def test_who_loses_a_promise_is_counted_once_in_the_order() -> None:
    lost = Promise(JobId(2), 0.0, 500.0)
    old = gpu(1, foreign_bytes=GIB, whole_idle=False, foreign_since_s=-1_000.0)
    queue = [waiting(2, 2, uid=2), waiting(3, 1, uid=3)]
    made = plan(replace(snapshot_of((gpu(0), old), [], queue), promise=lost), EXACT)
    assert made.ended is not None
    assert [job_id for job_id, _priority in made.first] == [2, 3]
    assert [(start.job_id, start.rank) for start in made.starts] == [(3, 2)]
