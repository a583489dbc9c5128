"""A user's own list: order, the age window, and what resets or keeps an age."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpusched_client.terms import JobId
from gpuschedd.core.model import GIB, HOUR_S, Order, Request, Waiting
from gpuschedd.core.priority import queue_order
from gpuschedd.core.queues import Queues, age_s, rested
from tests.support.core_builders import EXACT, gpus, snapshot_of, waiting


def got(queues: Queues, job_id: int) -> Waiting:
    """The job as it stands."""
    job = queues.get(JobId(job_id))
    assert job is not None
    return job


def ids(queues: Queues) -> list[int]:
    """The GPU lists, one after the other."""
    return [job.job_id for queue in queues.view().gpu for job in queue.jobs]


def test_own_list_is_ordered_by_nice_then_eligible_since_then_id() -> None:
    queues = Queues(EXACT)
    for job in (
        waiting(4, nice=1),
        waiting(3, since_s=5.0),
        waiting(2, since_s=5.0),
        waiting(1, since_s=9.0),
    ):
        queues.insert(job, 9.0)
    assert ids(queues) == [2, 3, 1, 4]


def test_only_the_first_jobs_of_a_list_gain_age() -> None:
    queues = Queues(EXACT)
    queues.insert(waiting(1), 0.0)
    queues.insert(waiting(2, since_s=1.0), 1.0)
    assert age_s(got(queues, 1), 10.0) == 10.0
    assert age_s(got(queues, 2), 10.0) == 0.0


def test_age_jobs_zero_lets_all_gain_age() -> None:
    queues = Queues(replace(EXACT, age_jobs_per_user=0))
    for number in (1, 2, 3):
        queues.insert(waiting(number, since_s=float(number)), float(number))
    queues.remove(JobId(2), 4.0)
    assert [age_s(got(queues, n), 10.0) for n in (1, 3)] == [9.0, 7.0]


def test_next_job_enters_the_window_when_one_starts() -> None:
    """Exactly the rows that changed come back."""
    queues = Queues(EXACT)
    queues.insert(waiting(1), 0.0)
    assert [row.job_id for row in queues.insert(waiting(2, since_s=1.0), 1.0)] == [2]
    gone, entered = queues.remove(JobId(1), 5.0)
    assert (gone.job_id, gone.age_gained_s, gone.window_since_s) == (1, 5.0, None)
    assert (entered.job_id, entered.window_since_s) == (2, 5.0)


def test_leaving_the_window_freezes_the_age() -> None:
    queues = Queues(EXACT)
    queues.insert(waiting(1, since_s=5.0, nice=5), 5.0)
    changed = queues.insert(waiting(2, since_s=10.0), 10.0)
    assert {row.job_id for row in changed} == {1, 2}
    assert age_s(got(queues, 1), 100.0) == 5.0
    queues.remove(JobId(2), 20.0)
    assert age_s(got(queues, 1), 23.0) == 8.0


def test_requeue_keeps_the_age() -> None:
    queues = Queues(EXACT)
    queues.insert(waiting(1), 0.0)
    gone = queues.remove(JobId(1), 30.0)[0]
    queues.insert(gone, 90.0)
    assert age_s(got(queues, 1), 100.0) == 40.0
    assert got(queues, 1).eligible_since_s == 0.0


@pytest.mark.parametrize("event", ["hold", "edit", "begin time", "dependency"])
def test_release_resets_the_age(event: str) -> None:
    """All of them go through `rested`: age 0, eligible since the release."""
    queues = Queues(EXACT)
    queues.insert(waiting(1), 0.0)
    gone = queues.remove(JobId(1), 30.0)[0]
    queues.insert(rested(gone, 90.0), 90.0)
    assert age_s(got(queues, 1), 100.0) == 10.0, event
    assert got(queues, 1).eligible_since_s == 90.0


def test_changed_nice_re_inserts_the_job_and_keeps_its_age() -> None:
    queues = Queues(EXACT)
    queues.insert(waiting(1), 0.0)
    queues.insert(waiting(2, since_s=1.0), 1.0)
    queues.update(replace(got(queues, 1), nice=10), 20.0)
    assert ids(queues) == [2, 1]
    assert age_s(got(queues, 1), 50.0) == 20.0
    assert age_s(got(queues, 2), 50.0) == 30.0


def test_unchanged_users_share_their_tuple_between_snapshots() -> None:
    queues = Queues(EXACT)
    queues.insert(waiting(1, uid=1), 0.0)
    queues.insert(waiting(2, uid=2), 0.0)
    before = queues.view()
    queues.insert(waiting(3, uid=2), 1.0)
    after = queues.view()
    assert after.gpu[0].jobs is before.gpu[0].jobs
    assert after.gpu[1].jobs is not before.gpu[1].jobs


def test_no_job_counts_higher_than_its_users_job_before_it() -> None:
    """Job 2 brings an old age; job 1 stands before it and caps it."""
    old = waiting(2, since_s=2.0, age_gained_s=50 * HOUR_S)
    seen = snapshot_of(gpus(1), [], [waiting(1), old], now_s=2.0)
    (_one, first), (_two, second) = queue_order(seen, EXACT)
    assert second.priority == first.priority
    assert second.capped_by == 1
    assert second.age == 500.0


def test_priority_is_fair_share_plus_age_minus_nice() -> None:
    job = waiting(1, nice=7)
    seen = snapshot_of(gpus(1), [], [job], now_s=2 * HOUR_S, usage={1: 7200.0})
    ((_job, parts),) = queue_order(seen, EXACT)
    assert parts.fair == 1000.0 * 2.0**-1.0
    assert parts.age == 20.0
    assert parts.priority == parts.fair + 20.0 - 7


def test_cpu_only_jobs_have_a_list_of_their_own() -> None:
    queues = Queues(EXACT)
    queues.insert(waiting(1, 0), 0.0)
    queues.insert(waiting(2, 1), 0.0)
    view = queues.view()
    assert [job.job_id for queue in view.cpu for job in queue.jobs] == [1]
    assert got(queues, 1).window_since_s is None


def test_fcfs_list_ignores_nice() -> None:
    queues = Queues(replace(EXACT, order=Order.FCFS))
    queues.insert(waiting(1, nice=500), 0.0)
    queues.insert(waiting(2, since_s=1.0), 1.0)
    assert ids(queues) == [1, 2]


def test_who_is_put_first_changes_one_row_and_gains_no_age() -> None:
    queues = Queues(EXACT)
    for number in range(1, 50):
        queues.insert(waiting(number, since_s=float(number)), 100.0)
    rows = queues.to_front(JobId(40), 200.0)
    assert ids(queues)[:3] == [40, 1, 2]
    assert {row.job_id for row in rows} <= {40, 1}  # it, and who leaves the window for it
    assert age_s(got(queues, 40), 200.0) == 0.0
    assert age_s(got(queues, 1), 200.0) == 100.0
    queues.to_front(JobId(41), 200.0)
    assert ids(queues)[:3] == [41, 40, 1]
    assert queues.to_front(JobId(41), 200.0) == ()
    assert queues.to_front(JobId(77), 200.0) == ()


def test_a_cpu_only_job_that_is_put_first_is_no_older_than_before() -> None:
    """Its age counts from when it became eligible, which puts it first."""
    queues = Queues(EXACT)
    queues.insert(waiting(1, gpus=0, since_s=0.0), 0.0)
    queues.insert(waiting(2, gpus=0, since_s=3_600.0), 3_600.0)
    queues.to_front(JobId(2), 7_200.0)
    snapshot = replace(snapshot_of(gpus(1), now_s=7_200.0), queues=queues.view())
    order = list(queue_order(snapshot, EXACT))
    assert [job.job_id for job, _ in order] == [2, 1]
    assert order[0][1].age == pytest.approx(EXACT.w_age_per_h * 1.0)


def test_rows_of_who_was_put_first_restore_the_same_list() -> None:
    queues = Queues(EXACT)
    kept = {}
    for number in (1, 2, 3):
        for row in queues.insert(waiting(number, since_s=float(number)), 5.0):
            kept[row.job_id] = row
    for row in queues.to_front(JobId(3), 9.0):
        kept[row.job_id] = row
    assert ids(Queues.restore(EXACT, kept.values())) == [3, 1, 2]


def test_the_least_of_a_list_is_below_all_with_the_same_wishes() -> None:
    """And follows what comes and goes, however many requests differ."""
    queues = Queues(EXACT)
    asked = [
        Request(4, 20 * GIB, time_limit_s=60.0),
        Request(2, 30 * GIB, time_limit_s=None, estimate_s=5.0),
        Request(3, gpu_model="a100", time_limit_s=None),
        Request(1, 10 * GIB, time_limit_s=900.0),
    ]
    for number, request in enumerate(asked, start=1):
        queues.insert(replace(waiting(number), request=request), 0.0)
    assert queues.view().gpu[0].least == frozenset(
        [Request(1, 10 * GIB, time_limit_s=60.0), Request(3, gpu_model="a100")]
    )
    for number in (1, 3, 4):
        queues.remove(JobId(number), 0.0)
    assert queues.view().gpu[0].least == frozenset([Request(2, 30 * GIB)])


def test_too_many_combinations_of_wishes_have_no_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuschedd.core.queues.SHAPES_MAX", 1)
    queues = Queues(EXACT)
    for number in (1, 2):
        queues.insert(replace(waiting(number), request=Request(1, card_bytes=number)), 0.0)
    assert queues.view().gpu[0].least is None
