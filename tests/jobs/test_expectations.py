"""How good expectations were: by user and in all, bounded."""

from __future__ import annotations

from gpusched_client.terms import JobId
from gpuschedd.core.model import FirstHead, Rule, Start
from gpuschedd.jobs import expectations
from gpuschedd.jobs.expectations import Expectations


def _start(uid: int, *, guessed: bool = False, expected_s: float | None = None) -> Start:
    first = None if expected_s is None else FirstHead(0.0, expected_s)
    return Start(
        job_id=JobId(1),
        uid=uid,
        grants=(),
        whole=True,
        exclusive=False,
        planned_end_s=1.0,
        expected_s=1.0,
        rule=Rule.FIRST,
        rank=1,
        guessed=guessed,
        first_head=first,
    )


def test_each_user_and_all_have_their_median_error() -> None:
    """Of the longer of both: expected 2 h of 1 h is 50 %, as is expected 1 h of 2 h."""
    found = Expectations()
    assert found.total.median_error is None
    assert found.of(1).median_error is None
    found.ended(1, 3_600.0, 7_200.0)
    found.ended(1, 7_200.0, 3_600.0)
    found.ended(1, 100.0, 100.0)
    found.ended(2, 100.0, 90.0)
    assert found.of(1).median_error == 0.5
    assert found.of(2).median_error == 0.1
    assert found.total.median_error == 0.3


def test_starts_by_guess_and_late_heads_are_counted() -> None:
    found = Expectations()
    found.started(_start(1, guessed=True), 10.0)
    found.started(_start(1, expected_s=10.0), 10.0)
    found.started(_start(2, expected_s=9.0), 10.0)
    one, two = found.of(1), found.of(2)
    assert (one.by_guess, one.heads, one.late_heads) == (1, 1, 0)
    assert (two.by_guess, two.heads, two.late_heads) == (0, 1, 1)
    assert (found.total.by_guess, found.total.heads, found.total.late_heads) == (1, 2, 1)


def test_no_number_of_users_or_runs_fills_the_memory() -> None:
    found = Expectations()
    for _ in range(2 * expectations.ERRORS_KEPT_OF_ALL):
        found.ended(0, 1.0, 2.0)
    assert len(found.total.errors) == expectations.ERRORS_KEPT_OF_ALL
    assert len(found.of(0).errors) == expectations.ERRORS_KEPT
    for uid in range(1, expectations.USERS_MAX + 1):
        found.ended(uid, 1.0, 1.0)
    assert found.of(0).median_error is None
    assert found.of(1).median_error == 0.0
