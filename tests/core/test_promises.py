"""Promises: when a reservation sticks, what it withstands, and one test for each exception."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpusched_client.terms import JobId
from gpuschedd.core.forecast import raise_limit_allowed
from gpuschedd.core.model import (
    DAY_S,
    GIB,
    HOUR_S,
    NEVER_S,
    Gpu,
    GpuState,
    Grant,
    Order,
    Policy,
    Promise,
    PromiseException,
    PromiseOutcome,
    RunningJob,
    Snapshot,
)
from gpuschedd.core.plan import plan
from gpuschedd.core.timeline import is_stuck
from tests.support.core_builders import (
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

PROMISED = Promise(JobId(2), 0.0, 600.0)


def held(
    cards: tuple[Gpu, ...],
    busy: list[RunningJob],
    *,
    now_s: float = 100.0,
    policy: Policy = EXACT,
    vram: int | None = None,
) -> Snapshot:
    """Job 2 wants all cards and was promised to start by 600."""
    job = waiting(2, len(cards), vram=vram)
    return snapshot_of(cards, busy, [job], now_s=now_s, policy=policy, promise=PROMISED)


@pytest.mark.parametrize(
    ("slack_h", "frees_h", "promised_h"),
    [(24, 30, 30), (24, 24, 24), (24, 2, 24), (0, 2, 2), (1000, 30, 50)],
)
def test_a_promise_follows_early_ends_as_far_as_the_slack_from_now(
    slack_h: int, frees_h: int, promised_h: int
) -> None:
    """Nearer than that others may use what they free; and it never moves later."""
    policy = replace(EXACT, promise_slack_s=slack_h * HOUR_S, promise_within_s=NEVER_S)
    sim = Sim(gpus(2), policy)
    sim.submit(waiting(1, uid=1, limit_s=50 * HOUR_S))
    sim.submit(waiting(2, uid=2, limit_s=frees_h * HOUR_S))
    sim.make_pass()
    sim.submit(waiting(3, 2, uid=3))
    made = sim.make_pass()
    assert made.promise == Promise(JobId(3), 0.0, 50 * HOUR_S)
    sim.end(JobId(1))
    sim.submit(waiting(4, uid=4, limit_s=20 * HOUR_S))
    made = sim.make_pass()
    assert made.promise is not None
    assert made.promise.start_by_s == promised_h * HOUR_S
    assert made.start_ids == ((4,) if promised_h >= 20 else ())
    assert sim.promise_ends == []


def test_reservation_becomes_a_promise_within_reach() -> None:
    policy = replace(EXACT, promise_within_s=600.0)
    seen = snapshot_of(gpus(1), [running(1, [0], limit_s=600.0)], [waiting(2, 1)])
    assert plan(seen, policy).promise == Promise(JobId(2), 0.0, 600.0)
    nearer = plan(seen, replace(policy, promise_within_s=599.0))
    assert nearer.promise is None
    assert nearer.reservation is not None
    assert not nearer.reservation.promised


def test_promise_within_zero_is_plain_easy() -> None:
    policy = replace(EXACT, promise_within_s=0.0)
    made = plan(snapshot_of(gpus(1), [running(1, [0])], [waiting(2, 1)]), policy)
    assert made.promise is None
    assert made.reservation is not None


def test_age_that_outweighs_every_factor_makes_a_promise() -> None:
    """W_AGE * age > W_FAIR + nice: nothing that begins to age later can outrank it."""
    policy = replace(EXACT, promise_within_s=1.0)
    job = waiting(2, 1, since_s=0.0)
    busy = [running(1, [0], limit_s=200 * HOUR_S)]
    seen = snapshot_of(gpus(1), busy, [job], now_s=100 * HOUR_S)
    assert plan(seen, policy).promise is None
    assert plan(replace(seen, now_s=100 * HOUR_S + 1), policy).promise is not None
    nicer = snapshot_of(gpus(1), busy, [replace(job, nice=1)], now_s=100 * HOUR_S + 1)
    assert plan(nicer, policy).promise is None


def test_holder_is_first_whoever_outranks_it() -> None:
    """A lighter user's later job starts only where it cannot delay the promise."""
    queue = [waiting(2, 2, uid=1), waiting(3, 1, uid=2, limit_s=900.0)]
    busy = [running(1, [0], limit_s=600.0)]
    seen = snapshot_of(gpus(2), busy, queue, usage={1: 9e6}, promise=PROMISED)
    made = plan(seen, EXACT)
    assert made.start_ids == ()
    assert made.promise == PROMISED
    unpromised = replace(EXACT, promise_within_s=0.0)
    assert plan(replace(seen, promise=None), unpromised).start_ids == (3,)


def test_early_end_only_moves_a_promise_forward() -> None:
    sim = Sim(gpus(2))
    sim.submit(waiting(1, 2, limit_s=600.0), lasts_s=100.0)
    sim.make_pass()
    sim.submit(waiting(2, 2, uid=2))
    assert sim.make_pass().promise == Promise(JobId(2), 0.0, 600.0)
    sim.go_to(1000.0)
    assert sim.started_s[JobId(2)] == 100.0
    assert [end.outcome for end in sim.promise_ends] == [PromiseOutcome.KEPT]


def test_start_by_is_the_earliest_time_ever_promised() -> None:
    seen = held(gpus(2), [running(1, [0], limit_s=500.0)])
    assert plan(seen, EXACT).promise == Promise(JobId(2), 0.0, 500.0)


def test_late_start_breaks_the_promise_on_record() -> None:
    made = plan(replace(held(gpus(1), []), now_s=601.0), EXACT)
    assert made.start_ids == (2,)
    assert made.ended is not None
    assert (made.ended.outcome, made.ended.exception) == (
        PromiseOutcome.BROKEN,
        PromiseException.LATE_END,
    )


def test_holder_that_left_the_queue_withdraws_its_promise() -> None:
    made = plan(snapshot_of(gpus(1), [], [waiting(3, 1)], promise=PROMISED), EXACT)
    assert made.ended is not None
    assert made.ended.outcome is PromiseOutcome.WITHDRAWN
    assert made.start_ids == (3,)


def test_nothing_sticks_while_the_time_is_only_the_floor_of_now() -> None:
    """An overdue job is planned to end now; nobody planned that, so nothing is promised on it."""
    seen = snapshot_of(gpus(1), [running(1, [0], limit_s=50.0)], [waiting(2, 1)], now_s=100.0)
    made = plan(seen, EXACT)
    assert made.reservation is not None
    assert made.reservation.start_s == 100.0
    assert made.promise is None


def test_nothing_sticks_while_a_sample_is_awaited() -> None:
    """The allowance for a sample is no planned end: the sample may say that the GPU is not free."""
    seen = snapshot_of((gpu(0, fresh=False),), [], [waiting(2, 1)], now_s=100.0)
    made = plan(seen, EXACT)
    assert made.reservation is not None
    assert made.reservation.start_s == 100.0 + EXACT.fresh_allowance_s
    assert made.promise is None
    assert plan(replace(seen, promise=PROMISED), EXACT).promise == PROMISED


@pytest.mark.parametrize(
    ("state", "exception"),
    [
        (GpuState.DRAINED, PromiseException.GPU_DRAINED),
        (GpuState.LOST, PromiseException.GPU_LOST),
        (GpuState.SICK, PromiseException.GPU_SICK),
        (GpuState.UNREAD, PromiseException.GPU_UNREAD),
    ],
)
def test_gpu_out_of_service_loses_the_promise(state: GpuState, exception: PromiseException) -> None:
    cards = (gpu(0), gpu(1, state=state))
    made = plan(held(cards, [running(1, [0], limit_s=600.0)]), EXACT)
    assert made.promise is None
    assert made.ended is not None
    assert (made.ended.outcome, made.ended.exception) == (PromiseOutcome.LOST, exception)
    assert made.unknown == {2}


def test_old_foreign_memory_loses_the_promise() -> None:
    cards = (gpu(0), gpu(1, foreign_bytes=GIB, whole_idle=False, foreign_since_s=-600.0))
    made = plan(held(cards, [running(1, [0], limit_s=600.0)]), EXACT)
    assert made.ended is not None
    assert made.ended.exception is PromiseException.FOREIGN_MEMORY


def test_a_start_that_rests_on_a_stranger_is_expected_and_not_promised() -> None:
    """Young foreign use may stay; once it is gone the same start is promised."""
    young = gpu(1, foreign_bytes=GIB, whole_idle=False, foreign_since_s=0.0)
    queue, busy = [waiting(2, 2)], [running(1, [0], limit_s=60.0)]
    made = plan(snapshot_of((gpu(0), young), busy, queue), EXACT)
    assert made.reservation is not None
    assert (made.reservation.start_s, made.promise) == (600.0, None)
    made = plan(snapshot_of(gpus(2), busy, queue), EXACT)
    assert made.promise == Promise(JobId(2), 0.0, 60.0)
    # Two others are free by then: the stranger is in nobody's way.
    made = plan(snapshot_of((gpu(0), young, gpu(2)), busy, queue), EXACT)
    assert made.promise == Promise(JobId(2), 0.0, 60.0)


def test_a_promise_is_moved_forward_by_no_stranger() -> None:
    """One whose place would be free earlier if he left keeps its time."""
    young = gpu(1, foreign_bytes=GIB, whole_idle=False, foreign_since_s=-500.0)
    busy = [running(1, [0], limit_s=600.0), running(3, [2], limit_s=60.0)]
    seen = snapshot_of((gpu(0), young, gpu(2)), busy, [waiting(2, 2)])
    made = plan(replace(seen, promise=Promise(JobId(2), 0.0, 600.0)), EXACT)
    assert made.promise == Promise(JobId(2), 0.0, 600.0)


def test_young_foreign_memory_suspends_the_promise() -> None:
    """It stays first and keeps its time on record, with the cause of a delay."""
    cards = (gpu(0), gpu(1, foreign_bytes=GIB, whole_idle=False, foreign_since_s=50.0))
    seen = held(cards, [running(1, [0], limit_s=600.0)])
    made = plan(seen, EXACT)
    assert made.promise == replace(PROMISED, delayed_by=PromiseException.FOREIGN_MEMORY)
    assert made.reservation is not None
    assert made.reservation.start_s == 650.0
    gone = plan(replace(seen, gpus=gpus(2), promise=made.promise), EXACT)
    assert gone.promise == PROMISED


def test_nobody_gains_by_what_an_outdated_sample_shows() -> None:
    """A shared job has just ended on GPU 1; the last sample still has its memory.

    Job 3 would end before that memory counts as gone, but after the promised start.
    """
    cards = (gpu(0), gpu(1, fresh=False, foreign_bytes=GIB, whole_idle=False, foreign_since_s=99.0))
    busy = [running(1, [0], limit_s=600.0)]
    queue = [
        waiting(2, 3),
        waiting(3, 1, limit_s=550.0, uid=2),
        waiting(4, 1, limit_s=400.0, uid=3),
    ]
    seen = snapshot_of((*cards, gpu(2)), busy, queue, now_s=100.0, promise=PROMISED)
    made = plan(seen, EXACT)
    assert made.start_ids == (4,)
    assert made.promise == PROMISED
    assert made.reservation is not None
    assert made.reservation.start_s == 600.0


def test_a_start_that_passes_while_a_sample_is_awaited_is_late_for_that() -> None:
    """The job on GPU 0 has ended in time; who looked at the GPU since?"""
    made = plan(held((gpu(0, fresh=False),), [], now_s=601.0), EXACT)
    assert made.promise == replace(PROMISED, delayed_by=PromiseException.GPU_UNREAD)
    assert made.reservation is not None
    assert made.reservation.start_s == 601.0
    seen = replace(held(gpus(1), [], now_s=603.0), promise=made.promise)
    ended = plan(seen, EXACT).ended
    assert ended is not None
    assert (ended.outcome, ended.exception) == (
        PromiseOutcome.BROKEN,
        PromiseException.GPU_UNREAD,
    )


def test_foreign_memory_from_before_the_promise_is_not_blamed_for_what_came_later() -> None:
    """It was there when the start was promised; the job outlived its end since."""
    cards = (gpu(0), gpu(1, foreign_bytes=GIB, whole_idle=False, foreign_since_s=-900.0))
    seen = snapshot_of(
        cards,
        [running(1, [0], limit_s=600.0)],
        [waiting(2, 1)],
        now_s=661.0,
        promise=PROMISED,
    )
    ended = plan(seen, EXACT).ended
    assert ended is not None
    assert ended.exception is PromiseException.STUCK_JOB


def test_job_above_its_declaration_is_an_exception() -> None:
    """40 GiB beside 30 GiB fit on 80 GiB, but the job grew to 60."""
    fat = running(1, [0], limit_s=None, vram=30 * GIB)
    grown = replace(fat, grants=(Grant(uuid(0), 60 * GIB, 30 * GIB + MARGIN),))
    made = plan(held(gpus(1), [grown], vram=40 * GIB), EXACT)
    assert made.ended is not None
    assert made.ended.exception is PromiseException.ABOVE_DECLARATION


def test_limit_extended_by_an_admin_is_an_exception() -> None:
    longer = replace(running(1, [0], limit_s=600.0), time_limit_s=900.0)
    made = plan(held(gpus(1), [longer]), EXACT)
    assert made.promise == replace(PROMISED, delayed_by=PromiseException.LIMIT_EXTENDED)


def test_stuck_job_loses_the_promise() -> None:
    made = plan(held(gpus(1), [running(1, [0], limit_s=600.0)], now_s=661.0), EXACT)
    assert made.ended is not None
    assert (made.ended.outcome, made.ended.exception) == (
        PromiseOutcome.LOST,
        PromiseException.STUCK_JOB,
    )


def test_late_launch_is_an_exception() -> None:
    """Its limit runs from `started`, which came 30 s after the decision."""
    late = replace(running(1, [0], limit_s=600.0), started_at_s=30.0)
    made = plan(held(gpus(1), [late]), EXACT)
    assert made.promise == replace(PROMISED, delayed_by=PromiseException.LATE_LAUNCH)


def test_late_end_is_an_exception() -> None:
    made = plan(held(gpus(1), [running(1, [0], limit_s=600.0)], now_s=601.0), EXACT)
    assert made.promise == replace(PROMISED, delayed_by=PromiseException.LATE_END)


def test_change_by_an_admin_is_what_is_left_to_blame() -> None:
    """A job that no rule let in: say, one that an admin's `nice` or a larger margin put there."""
    made = plan(held(gpus(1), [running(1, [0], limit_s=900.0)]), EXACT)
    assert made.promise == replace(PROMISED, delayed_by=PromiseException.ADMIN_CHANGE)


def test_holder_whose_time_becomes_unknown_is_ranked_by_age_again() -> None:
    cards = (gpu(0), gpu(1, state=GpuState.DRAINED))
    queue = [waiting(2, 2, uid=1), waiting(3, 1, uid=2, since_s=1.0)]
    made = plan(snapshot_of(cards, [], queue, now_s=2.0, promise=PROMISED), EXACT)
    assert made.start_ids == (3,)
    assert made.reservation is None


def test_promise_survives_a_restart_as_its_row() -> None:
    """The snapshot carries the row; since and first time stay."""
    sim = Sim(gpus(1))
    sim.submit(waiting(1, 1, limit_s=600.0))
    sim.make_pass()
    sim.submit(waiting(2, 1, uid=2))
    first = sim.make_pass().promise
    sim.now_s = 300.0
    assert sim.make_pass().promise == first


def test_owner_may_raise_a_limit_as_far_as_no_promise_moves() -> None:
    policy = Policy()
    busy = [running(1, [0], limit_s=100.0), running(4, [1], limit_s=1000.0)]
    promise = Promise(JobId(2), 0.0, 1015.0)
    seen = snapshot_of(gpus(2), busy, [waiting(2, 2)], policy=policy, promise=promise)
    assert raise_limit_allowed(seen, policy, JobId(1), 500.0) == 500.0
    assert raise_limit_allowed(seen, policy, JobId(1), 5000.0) == 1000.0
    assert raise_limit_allowed(seen, policy, JobId(4), 5000.0) == 1000.0
    spare = snapshot_of(gpus(3), busy, [waiting(2, 2)], policy=policy, promise=promise)
    assert raise_limit_allowed(spare, policy, JobId(4), DAY_S) == DAY_S


@pytest.mark.parametrize("grace_s", [0.0, 30.0, 600.0])
def test_another_grace_moves_no_end_of_a_job_that_was_decided(grace_s: float) -> None:
    """Its supervisor was given 30 s, whatever the policy says by now; a launch counts likewise."""
    policy = replace(EXACT, kill_grace_s=grace_s, promise_within_s=NEVER_S)
    busy = [
        running(1, [0], limit_s=570.0, decided_grace_s=30.0),
        running(4, [1], limit_s=570.0, decided_grace_s=30.0, started_at_s=None),
    ]
    made = plan(held(gpus(2), busy, policy=policy), policy)
    assert made.promise == PROMISED
    assert not any(is_stuck(job, 660.0, policy) for job in busy)
    assert all(is_stuck(job, 660.1, policy) for job in busy)


def test_a_job_that_is_not_decided_yet_is_planned_with_the_grace_of_today() -> None:
    """Job 3 would be gone by 600 with the old grace of 10 s; with 11 s it would not."""
    busy = [running(1, [0], limit_s=590.0, decided_grace_s=10.0)]
    queue = [waiting(2, 2), waiting(3, 1, limit_s=490.0, uid=2)]
    for grace_s, starts in ((10.0, (3,)), (11.0, ())):
        policy = replace(EXACT, kill_grace_s=grace_s)
        seen = snapshot_of(gpus(2), busy, queue, now_s=100.0, policy=policy, promise=PROMISED)
        assert plan(seen, policy).start_ids == starts


def test_a_late_end_is_judged_by_the_grace_of_the_decision() -> None:
    """After its 60 s, not after the 1 s of today's policy, a job is to blame."""
    busy = [running(1, [0], limit_s=540.0, decided_grace_s=60.0)]
    policy = replace(EXACT, kill_grace_s=1.0)
    in_time = plan(held(gpus(1), busy, now_s=599.0, policy=policy), policy)
    assert in_time.promise == PROMISED
    late = plan(held(gpus(1), busy, now_s=601.0, policy=policy), policy)
    assert late.promise == replace(PROMISED, delayed_by=PromiseException.LATE_END)


def test_a_limit_may_be_raised_as_far_as_the_grace_of_the_decision_lets() -> None:
    """With 100 s of it the job must be told to end 100 s before the promise, not 1 s."""
    policy = replace(EXACT, kill_grace_s=1.0)
    busy = [
        running(1, [0], limit_s=100.0, decided_grace_s=100.0),
        running(4, [1], limit_s=600.0, decided_grace_s=0.0),
    ]
    seen = held(gpus(2), busy, policy=policy)
    assert raise_limit_allowed(seen, policy, JobId(1), 5000.0) == 500.0


def test_fcfs_promises_by_distance_alone() -> None:
    policy = replace(EXACT, order=Order.FCFS, promise_within_s=1.0, w_fair=0.0)
    busy = [running(1, [0], limit_s=900 * HOUR_S)]
    seen = snapshot_of(gpus(1), busy, [waiting(2, 1)], now_s=500 * HOUR_S, policy=policy)
    assert plan(seen, policy).promise is None
    assert plan(seen, replace(policy, promise_within_s=NEVER_S)).promise is not None
