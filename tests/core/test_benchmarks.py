"""The benchmarks keep what they claim: determinism, the gain of EASY, the cost of a pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.backfill import (
    CALM_S,
    CONTESTS,
    DETAIL,
    EASY,
    GPUS,
    POINTS_OFF_MAX,
    STRICT,
    UNLEARNED,
    WORKLOADS,
    Case,
    bound,
    replayed,
    text_plot,
)
from benchmarks.plan import CASES, FIRST_ID, POLICY, SHORT
from gpusched_client.terms import JobId
from gpuschedd.core.forecast import counterfactuals
from gpuschedd.core.plan import plan
from gpuschedd.replay.stats import figures
from tests.support.work import bytecodes


def test_backfill_benchmark_is_deterministic_and_easy_is_better() -> None:
    strict, easy = (figures(replayed(DETAIL, 1, way), GPUS) for way in (STRICT, EASY))
    assert easy == figures(replayed(DETAIL, 1, EASY), GPUS)
    assert strict.utilisation < easy.utilisation <= bound(DETAIL.jobs(1))
    assert easy.waits.mean_s < strict.waits.mean_s
    assert easy.by_size[8].max_s < strict.by_size[8].max_s
    assert easy.promises_broken == 0


def test_plot_shows_the_full_width() -> None:
    done = replayed(DETAIL, 1, EASY)
    assert len(text_plot("EASY", done.ran, 800_000.0)) == 8 + 74


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_who_has_limits_changes_nothing_else_of_a_workload(workload: str) -> None:
    nobody, half, everybody = (
        Case(workload, limits, CALM_S).jobs(1) for limits in ("nobody", "half", "all")
    )
    assert [replace(job, limit_s=None) for job in everybody] == list(nobody)
    assert all(job.limit_s is not None for job in everybody)
    with_limit = [pair for pair in zip(half, everybody, strict=True) if pair[0].limit_s is not None]
    assert [one for one, _ in with_limit] == [other for _, other in with_limit]
    assert len(nobody) / 3 < len(with_limit) < len(nobody) * 2 / 3


def test_who_has_used_a_command_before_is_foretold() -> None:
    """Nobody has limits: with what was learned the mean wait is shorter."""
    case = Case("repeated", "nobody", CALM_S)
    blind, learned = (figures(replayed(case, 1, way), GPUS) for way in (UNLEARNED, EASY))
    assert learned.waits.mean_s < blind.waits.mean_s


@pytest.mark.parametrize("contest", sorted(CONTESTS))
def test_users_get_what_their_shares_say_of_the_gpus(contest: str) -> None:
    """Three to one, and short jobs against long ones; with limits and without."""
    assert abs(CONTESTS[contest].part() - CONTESTS[contest].fair) < POINTS_OFF_MAX


def a_pass(case: str, queued: int) -> int:
    """The work of one pass over such a queue."""
    snapshot = CASES[case].snapshot(queued)
    plan(snapshot, POLICY)  # the first one fills memos
    return bytecodes(lambda: plan(snapshot, POLICY))


LONGER = 20 * SHORT


@pytest.mark.parametrize("case", sorted(CASES))
def test_pass_costs_no_more_with_a_queue_twenty_times_as_long(case: str) -> None:
    short = a_pass(case, SHORT)
    assert short > 10_000, "it does look at jobs"
    assert a_pass(case, LONGER) <= 1.5 * short


def an_answer(case: str, queued: int) -> int:
    """The work of telling one in the middle of the queue with what it would start."""
    snapshot = CASES[case].snapshot(queued)
    job_id = JobId(queued // 2)
    counterfactuals(snapshot, POLICY, job_id)
    return bytecodes(lambda: counterfactuals(snapshot, POLICY, job_id))


@pytest.mark.parametrize("case", ["reserved GPU, shared jobs", "reserved, shared, no two alike"])
def test_what_a_job_would_start_with_is_told_as_soon_in_a_long_queue(case: str) -> None:
    """Its user's list is copied; the rest of the work is that of a few passes."""
    assert an_answer(case, LONGER) <= 3 * an_answer(case, SHORT)


@pytest.mark.parametrize("case", sorted(CASES))
def test_nothing_of_the_measured_queues_starts(case: str) -> None:
    """Who starts would be dearer, and leave another queue behind."""
    made = plan(CASES[case].snapshot(SHORT), POLICY)
    assert made.start_ids == ()
    assert made.reservation is not None
    assert (made.reservation.job_id == FIRST_ID) is not case.startswith("full host")
