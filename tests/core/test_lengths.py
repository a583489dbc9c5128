"""Expected lengths: what runs teach, who is expected to run how long, and what has passed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuschedd.core import lengths
from gpuschedd.core.lengths import Basis, Histories, counts, expected, put_off_s
from gpuschedd.core.model import (
    DAY_S,
    HOUR_S,
    NEVER_S,
    Kind,
    LengthRow,
    Lengths,
    Policy,
    Request,
    Run,
)
from gpuschedd.core.timeline import expected_end_s
from tests.support.core_builders import EXACT, running


def noted(*runs: tuple[int, str, int, float]) -> Histories:
    """(uid, key, GPUs, length), one after the other."""
    histories = Histories()
    for number, (uid, key, gpus, length_s) in enumerate(runs):
        histories.note(uid, Kind(key, gpus), Run(float(number), length_s))
    return histories


def test_the_last_two_runs_of_the_nearest_kind_count() -> None:
    seen = noted(
        (1, "train", 1, 9.0),
        (1, "train", 1, 100.0),
        (1, "train", 1, 300.0),
        (1, "train", 2, 50.0),
        (1, "eval", 1, 7.0),
        (2, "train", 1, 1.0),
    ).view()

    def of(uid: int, key: str, gpus: int) -> tuple[float, Basis]:
        request = Request(gpus, time_limit_s=None)
        return expected(seen, uid, key, request, Policy())[:2]

    assert of(1, "train", 1) == (200.0, Basis.KIND)
    assert of(1, "train", 2) == (50.0, Basis.KIND)  # one will do
    assert of(1, "train", 8) == (175.0, Basis.KEY)
    assert of(1, "other", 1) == (28.5, Basis.OWNER)
    assert of(3, "train", 1) == (24 * HOUR_S, Basis.GUESS)


def test_an_estimate_comes_first_then_history_then_the_limit_or_the_guess() -> None:
    seen = noted((1, "k", 1, 500.0)).view()
    policy = Policy()

    def of(limit_s: float | None, estimate_s: float | None, uid: int = 1) -> tuple[float, Basis]:
        request = Request(time_limit_s=limit_s, estimate_s=estimate_s)
        return expected(seen, uid, "k", request, policy)[:2]

    assert of(None, 60.0) == (60.0, Basis.ESTIMATE)
    assert of(None, None) == (500.0, Basis.KIND)
    assert of(200.0, None) == (200.0, Basis.KIND)
    assert of(200.0, 900.0) == (200.0, Basis.ESTIMATE)
    assert of(200.0, None, uid=2) == (200.0, Basis.LIMIT)
    assert of(None, None, uid=2) == (24 * HOUR_S, Basis.GUESS)
    assert of(None, 0.2) == (1.0, Basis.ESTIMATE)
    forgetful = replace(policy, learn_lengths=False, guess_length_s=77.0)
    found = expected(seen, 1, "k", Request(time_limit_s=None), forgetful)
    assert found == (77.0, Basis.GUESS, ())


@given(st.floats(0.0, 1e9))
def test_each_step_is_later_than_the_one_before(first_s: float) -> None:
    """Asked at the very moment of a step, whatever is rounded."""
    at_s = put_off_s(first_s, first_s)
    for _ in range(30):
        assert put_off_s(first_s, at_s) > at_s
        at_s = put_off_s(first_s, at_s)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 2), st.sampled_from("ab"), st.integers(1, 2), st.floats(0.0, 30 * DAY_S)
        ),
        max_size=40,
    )
)
def test_rows_that_are_stored_give_the_same_expectations(
    runs: list[tuple[int, str, int, float]],
) -> None:
    """Runs come 9 days apart, some late; what is old is forgotten, by whoever it was."""
    histories, rows = Histories(), dict[tuple[int, Kind], LengthRow]()
    for number, (uid, key, gpus, length_s) in enumerate(runs):
        now_s = number * 9 * DAY_S
        run = Run(now_s - length_s, length_s)
        for row in histories.note(uid, Kind(key, gpus), run):
            rows[row.uid, row.kind] = row
        histories.forget(now_s)
        since_s = now_s - lengths.KEPT_S
        rows = {kind: row for kind, row in rows.items() if row.runs[-1].ended_s >= since_s}
        assert Histories(rows.values()).view() == histories.view()


def test_a_user_with_many_kinds_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "ROWS_PER_USER_MAX", 2)
    histories = noted((1, "a", 1, 10.0), (1, "b", 1, 20.0))
    changed = histories.note(1, Kind("c", 1), Run(9.0, 30.0))
    assert changed == (
        LengthRow(1, Kind("c", 1), (Run(9.0, 30.0),)),
        LengthRow(1, Kind("a", 1), ()),
    )


def test_a_view_stays_as_it_was() -> None:
    histories = noted((1, "a", 1, 10.0))
    before = histories.view()
    assert histories.view() is before
    histories.note(1, Kind("a", 1), Run(9.0, 30.0))
    assert before.by_uid[1].last == (Run(0.0, 10.0),)
    assert histories.view().by_uid[1].last == (Run(0.0, 10.0), Run(9.0, 30.0))
    assert Lengths() == Lengths({})


@pytest.mark.parametrize(
    ("ran_s", "by_itself", "failed", "teaches"),
    [
        (500.0, True, False, True),
        (5.0, True, False, True),
        (60.0, True, True, True),
        (59.0, True, True, False),
        (59.0, False, False, False),
        (1001.0, False, False, True),
        (1000.0, False, False, False),
    ],
)
def test_what_ends_otherwise_teaches_only_that_it_may_take_longer(
    ran_s: float, by_itself: bool, failed: bool, teaches: bool
) -> None:
    assert counts(ran_s, 1000.0, by_itself=by_itself, failed=failed) is teaches


def test_an_expectation_that_has_passed_is_put_off_in_growing_steps() -> None:
    ends_s = [100.0]
    while len(ends_s) < 15:
        ends_s.append(put_off_s(100.0, ends_s[-1]))
    steps_h = [(later - earlier) / HOUR_S for earlier, later in pairwise(ends_s)]
    assert steps_h == pytest.approx(
        [1 / 60, 5 / 60, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 100, 100, 100]
    )
    assert put_off_s(100.0, 99.0) == 100.0


@given(st.floats(0.0, 1e9), st.floats(1.0, 1e7), st.floats(0.0, 1e8))
def test_an_expected_end_is_later_than_now_and_by_the_planned_end(
    limit_s: float, length_s: float, now_s: float
) -> None:
    job = running(1, [0], limit_s=None, expected_s=length_s)
    assert now_s < expected_end_s(job, now_s, EXACT) < NEVER_S
    limited = running(1, [0], limit_s=limit_s, expected_s=length_s)
    if now_s < limit_s:
        assert now_s < expected_end_s(limited, now_s, EXACT) <= limit_s


def test_an_overdue_job_ends_as_planned_and_a_stuck_one_never() -> None:
    job = running(1, [0], limit_s=100.0, expected_s=10.0)
    assert expected_end_s(job, 5.0, EXACT) == 10.0
    assert expected_end_s(job, 99.0, EXACT) == 100.0
    assert expected_end_s(job, 130.0, EXACT) == 130.0
    assert expected_end_s(job, 161.0, EXACT) == NEVER_S
    endless = running(1, [0], limit_s=None, expected_s=10.0, stuck=True)
    assert expected_end_s(endless, 5.0, EXACT) == NEVER_S


def test_of_an_attempt_of_which_nobody_asked_the_limit_or_the_guess_is_expected() -> None:
    assert expected_end_s(running(1, [0], limit_s=100.0), 5.0, EXACT) == 100.0
    assert expected_end_s(running(1, [0], limit_s=None), 5.0, EXACT) == 24 * HOUR_S
