"""Taking a user's jobs one by one, where none has any age, changes no order and no decision."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched_client.terms import GpuUuid, JobId
from gpuschedd.core.fairshare import Accounts
from gpuschedd.core.model import (
    GIB,
    Gpu,
    Grant,
    Policy,
    Request,
    RunningJob,
    Snapshot,
    Waiting,
)
from gpuschedd.core.plan import plan
from gpuschedd.core.priority import queue_order
from gpuschedd.core.queues import Queues
from gpuschedd.core.snapshot import build_snapshot
from tests.support.work import bytecodes

EXAMPLES = 3_000 if os.environ.get("GPUSCHED_SOAK") == "1" else 300
CARDS = tuple(Gpu(GpuUuid(f"G{n}"), n, "m", 24 * GIB) for n in range(4))

AJob = tuple[int, int, int | None, float | None, int, float]
A_JOB = st.tuples(
    st.integers(1, 3),  # user
    st.integers(1, 4),  # GPUs
    st.sampled_from([None, 4 * GIB, 20 * GIB]),
    st.sampled_from([None, 60.0, 6_000.0]),
    st.sampled_from([0, 0, 0, 50]),  # nice
    st.sampled_from([0.0, 0.0, 0.0, 40.0]),  # age it brings, as after a requeue
)
TAKEN = st.lists(st.sampled_from([None, "unlimited", "limited"]), min_size=4, max_size=4)


def a_snapshot(jobs: Sequence[AJob], taken: list[str | None], policy: Policy) -> Snapshot:
    """Jobs that came one a second; the windows are those of a pass before the last job came."""
    queues = Queues(policy)
    running = [
        RunningJob(
            job_id=JobId(900 + n),
            uid=9,
            user="u9",
            request=Request(1, time_limit_s=None if kind == "unlimited" else 500.0),
            grants=(Grant(CARDS[n].uuid, 24 * GIB, 24 * GIB),),
            whole=True,
            exclusive=False,
            decided_at_s=0.0,
            started_at_s=0.0,
            time_limit_s=None if kind == "unlimited" else 500.0,
            decided_limit_s=None if kind == "unlimited" else 500.0,
        )
        for n, kind in enumerate(taken)
        if kind is not None
    ]

    def now(at_s: float) -> Snapshot:
        return build_snapshot(
            now_s=at_s, gpus=CARDS, running=running, queues=queues.view(), accounts=Accounts(policy)
        )

    for number, (uid, gpus, vram, limit_s, nice, age_s) in enumerate(jobs):
        request = Request(gpus=gpus, vram_bytes=vram, time_limit_s=limit_s)
        waiting = Waiting(
            job_id=JobId(number + 1),
            uid=uid,
            user=f"u{uid}",
            request=request,
            eligible_since_s=float(number),
            nice=nice,
            age_gained_s=age_s,
        )
        queues.insert(waiting, float(number))
        if number == len(jobs) // 2:
            queues.settle(plan(now(float(number)), policy).horizon, float(number))
    return now(float(len(jobs)))


def unchained(snapshot: Snapshot) -> Snapshot:
    """The same, looked at as if every job could have any age."""
    lists = tuple(replace(queue, aged_to=None) for queue in snapshot.queues.gpu)
    return replace(snapshot, queues=replace(snapshot.queues, gpu=lists))


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(A_JOB, min_size=1, max_size=25), TAKEN, st.integers(0, 2))
def test_the_order_and_the_plan_are_those_of_looking_at_all(
    jobs: list[AJob],
    taken: list[str | None],
    window: int,
) -> None:
    """Jobs with and without limit, of known and unknown start, with and without age."""
    policy = Policy(age_jobs_per_user=window)
    chained = a_snapshot(jobs, taken, policy)
    plain = unchained(chained)
    assert list(queue_order(chained, policy)) == list(queue_order(plain, policy))
    one, other = plan(chained, policy), plan(plain, policy)
    assert (one.starts, one.reservation, one.promise) == (
        other.starts,
        other.reservation,
        other.promise,
    )
    assert one.reasons == other.reasons


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(A_JOB, min_size=1, max_size=25), TAKEN, st.sampled_from([-1, 1, 2, 5]))
def test_what_starts_does_not_depend_on_how_many_jobs_are_explained(
    jobs: list[AJob],
    taken: list[str | None],
    explain: int,
) -> None:
    """Beyond those, a pass does not look at jobs and lists that fail in any case."""
    snapshot = a_snapshot(jobs, taken, Policy())
    full, short = plan(snapshot, Policy(), explain=100), plan(snapshot, Policy(), explain=explain)
    assert (full.starts, full.promise) == (short.starts, short.promise)
    # Which GPUs are shown is part of what is explained.
    held = [made.reservation and replace(made.reservation, gpus=()) for made in (full, short)]
    assert held[0] == held[1]


def test_a_queue_without_known_starts_costs_a_pass_no_more_when_it_is_long() -> None:
    """Every GPU held by a job without limit: 50,000 waiting jobs against 500."""

    def work(count: int) -> int:
        jobs = [(1 + n % 3, 1 + n % 4, None, None, 0, 0.0) for n in range(count)]
        snapshot = a_snapshot(jobs, ["unlimited"] * 4, Policy())
        return bytecodes(lambda: plan(snapshot, Policy()))

    assert work(50_000) < 2 * work(500)
