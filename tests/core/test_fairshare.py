"""Fair-share: F, shares, billing, and long-run justice by simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpusched_client.terms import GpuUuid, JobId
from gpuschedd.core.fairshare import (
    Accounts,
    charge_rate,
    decayed,
    factors,
    share_of,
)
from gpuschedd.core.model import DAY_S, GIB, HOUR_S, Gpu, Grant, Policy
from tests.support.core_builders import EXACT, Sim, gpus, waiting

YEAR_S = 365 * DAY_S


def test_usage_halves_every_half_life() -> None:
    assert decayed(100.0, 14 * DAY_S, 7 * DAY_S) == 25.0


def test_factor_pools_usage_over_active_users() -> None:
    found = factors({1: 7200.0, 2: 0.0}, {1: 1.0, 2: 1.0})
    assert found == {1: 2.0**-2.0, 2: 1.0}


def test_usage_below_one_gpu_hour_weighs_little() -> None:
    """Without the floor a single second would be the whole pool."""
    assert factors({1: 36.0}, {1: 1.0})[1] == 2.0**-0.01


@pytest.mark.parametrize("shares", [(1.0, 1.0, 1.0), (3.0, 1.0, 20.0)])
def test_factor_is_one_half_at_entitlement(shares: tuple[float, ...]) -> None:
    """Who has used just what the shares give, whatever they are: F = 0.5."""
    by_uid = dict(enumerate(shares))
    usages = {uid: share * 40 * HOUR_S for uid, share in by_uid.items()}
    assert factors(usages, by_uid) == dict.fromkeys(by_uid, 0.5)


def test_share_of_zero_means_factor_zero() -> None:
    assert factors({1: 0.0, 2: 5.0}, {1: 0.0, 2: 1.0})[1] == 0.0


def test_joining_user_never_changes_the_order_of_the_others() -> None:
    usages = {1: 500.0, 2: 9000.0, 3: 40000.0}
    shares = {1: 1.0, 2: 3.0, 3: 20.0}
    before = factors(usages, shares)
    after = factors({**usages, 4: 1e7}, {**shares, 4: 2.0})
    assert sorted(usages, key=lambda uid: before[uid]) == sorted(usages, key=lambda uid: after[uid])


def test_past_users_change_nothing_for_the_present_ones() -> None:
    """18 users with usage but neither a running nor an eligible job are in no sum."""
    policy = Policy()
    alone, crowded = Sim(gpus(1), policy), Sim(gpus(1), policy)
    for uid in range(100, 118):
        crowded.accounts.set_rate(uid, JobId(uid), 5.0, -1e6)
        crowded.accounts.set_rate(uid, JobId(uid), 0.0, 0.0)
    for sim in (alone, crowded):
        sim.accounts.set_rate(1, JobId(99), 1.0, -1e5)
        sim.accounts.set_rate(1, JobId(99), 0.0, 0.0)
        sim.submit(waiting(1, 1, uid=1))
        sim.submit(waiting(2, 1, uid=2))
    assert alone.snapshot().standings == crowded.snapshot().standings


def test_own_name_comes_before_a_group_and_the_first_line_wins() -> None:
    shares = (("@lab", 2.0), ("ada", 5.0), ("@staff", 3.0), ("ada", 9.0))
    policy = Policy(shares=shares)
    assert share_of("ada", ["lab"], policy) == 5.0
    assert share_of("bob", ["staff", "lab"], policy) == 2.0
    assert share_of("eva", [], policy) == 1.0


def test_shared_job_is_charged_the_larger_of_held_and_the_minimum() -> None:
    card = Gpu(GpuUuid("a"), 0, "NVIDIA H100", 80 * GIB)
    small, large = Grant(card.uuid, GIB, GIB), Grant(card.uuid, 60 * GIB, 20 * GIB)
    known = {card.uuid: card}
    assert charge_rate([small], known, whole=False, policy=Policy()) == 0.25
    assert charge_rate([large], known, whole=False, policy=Policy()) == 0.75
    assert charge_rate([small], known, whole=True, policy=Policy()) == 1.0


def test_billing_weights_are_per_gpu_model() -> None:
    card = Gpu(GpuUuid("a"), 0, "NVIDIA H100", 80 * GIB)
    policy = Policy(billing=(("a100", 2.0), ("h100", 4.0)))
    grants = [Grant(card.uuid, card.total_bytes, card.total_bytes)]
    assert charge_rate(grants, {card.uuid: card}, whole=True, policy=policy) == 4.0


def test_usage_does_not_depend_on_how_often_it_is_looked_at() -> None:
    looked, left_alone = Accounts(EXACT), Accounts(EXACT)
    for accounts in (looked, left_alone):
        accounts.set_rate(1, JobId(1), 2.5, 100.0)
    for second in range(1000):
        looked.usage(1, 100.0 + 97.0 * second)
    assert looked.usage(1, 1e6) == left_alone.usage(1, 1e6)


def test_restart_changes_nothing() -> None:
    accounts = Accounts(EXACT)
    accounts.set_rate(1, JobId(1), 2.5, 100.0)
    accounts.set_rate(1, JobId(2), 0.25, 900.0)
    again = Accounts.restore(EXACT, accounts.rows())
    again.resume_rate(1, JobId(1), 2.5, 100.0)
    again.resume_rate(1, JobId(2), 0.25, 900.0)
    assert again.usage(1, 5e5) == accounts.usage(1, 5e5)
    assert again.rows() == accounts.rows()


@pytest.mark.parametrize("step_s", [YEAR_S, -YEAR_S, 100 * YEAR_S])
def test_clock_step_leaves_usage_finite_and_not_negative(step_s: float) -> None:
    accounts = Accounts(EXACT)
    accounts.set_rate(1, JobId(1), 8.0, 1e9)
    accounts.set_rate(1, JobId(1), 0.0, 1e9 + step_s)
    assert 0.0 <= accounts.usage(1, 1e9 + 2 * step_s) < 8 * 11 * DAY_S


def served(sim: Sim, uids: tuple[int, ...], sizes: dict[int, int], days: int) -> dict[int, float]:
    """Keep ten jobs of each user queued; GPU-seconds that each got, without the first fifth."""
    got = dict.fromkeys(uids, 0.0)
    number, until_s = 1, days * DAY_S
    owner: dict[int, int] = {}
    while sim.now_s < until_s:
        queued = {queue.uid: len(queue.jobs) for queue in sim.queues.view().gpu}
        for uid in uids:
            for _missing in range(10 - queued.get(uid, 0)):
                job = waiting(number, sizes[uid], uid=uid, limit_s=2 * HOUR_S)
                sim.submit(job, lasts_s=HOUR_S + 60.0 * (number % 7))
                owner[number] = uid
                number += 1
        sim.make_pass()
        sim.go_to(sim.next_end_s())
    for job_id, end_s in sim.ended_s.items():
        if end_s > until_s / 5:
            uid = owner[job_id]
            got[uid] += sizes[uid] * (end_s - sim.started_s[job_id])
    return got


def test_users_of_large_and_of_small_jobs_get_half_each() -> None:
    """4-GPU jobs against 1-GPU jobs, both always queued, on 8 GPUs: within 5 points of half."""
    got = served(Sim(gpus(8), Policy()), (1, 2), {1: 4, 2: 1}, days=20)
    assert abs(got[1] / sum(got.values()) - 0.5) < 0.05


def test_shares_of_three_to_one_give_three_quarters() -> None:
    sim = Sim(gpus(8), Policy(), shares={1: 3.0, 2: 1.0})
    got = served(sim, (1, 2), {1: 1, 2: 1}, days=20)
    assert abs(got[1] / sum(got.values()) - 0.75) < 0.05


def test_a_starved_user_is_rescued_by_age() -> None:
    """F = 0 for ever against newcomers of F = 1 without end: 1000 points, at 10 an hour."""
    policy = replace(
        Policy(), kill_grace_s=0.0, launch_allowance_s=0.0, promise_within_s=0.0
    )  # by its age alone, not by a promise
    sim = Sim(gpus(1), policy, shares={1: 0.0})
    sim.submit(waiting(1, 1, uid=50, limit_s=HOUR_S))
    sim.make_pass()
    sim.submit(waiting(2, 1, uid=1, limit_s=HOUR_S))
    number = 3
    while JobId(2) not in sim.started_s:
        assert sim.now_s < 200 * HOUR_S
        sim.submit(waiting(number, 1, uid=50 + number, limit_s=HOUR_S))
        number += 1
        sim.go_to(sim.next_end_s())
    assert 100 * HOUR_S <= sim.started_s[JobId(2)] <= 102 * HOUR_S


def test_newcomer_waits_no_longer_than_one_job_behind_a_flood() -> None:
    """300 jobs of one user; once a day somebody new comes with one job."""
    sim = Sim(gpus(8), replace(Policy(), kill_grace_s=0.0, launch_allowance_s=0.0))
    for number in range(300):
        sim.submit(waiting(number + 1, 1, uid=1, limit_s=2 * HOUR_S), 5000.0 + number % 7 * 300)
    sim.make_pass()
    for day in range(3):
        sim.go_to((day + 1) * DAY_S - 100.0)
        sim.submit(waiting(1000 + day, 1, uid=50 + day, limit_s=2 * HOUR_S))
        submitted_s = sim.now_s
        sim.go_to(submitted_s + 2 * HOUR_S)
        assert sim.started_s[JobId(1000 + day)] - submitted_s <= 2 * HOUR_S
