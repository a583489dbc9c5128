"""Every decision of a pass on random hosts, against the rules written down once more by hand.

With all that may happen to a host: whole, shared and exclusive jobs, models, NVLink, jobs without
limit, drains, foreign use, samples that are late, users' limits, late ends and late launches.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuschedd.core.aftermath import all_running
from gpuschedd.core.fairshare import Accounts
from gpuschedd.core.model import (
    NEVER_S,
    Plan,
    PromiseException,
    PromiseOutcome,
    Rule,
    Snapshot,
)
from gpuschedd.core.patience import closed_for
from gpuschedd.core.plan import plan
from gpuschedd.core.queues import Queues
from gpuschedd.core.snapshot import build_snapshot
from gpuschedd.core.timeline import Host
from tests.core.test_properties import LIGHT, SOAK
from tests.support.by_hand import Board, Walk
from tests.support.random_hosts import Arrival, Scene, play, scenes

#: GPUSCHED_EXAMPLES=1000 looks longer, of one file: with GPUSCHED_SOAK=1 at new ones each time.
EXAMPLES = int(os.environ.get("GPUSCHED_EXAMPLES", 1000 if SOAK else 50))
MANY = settings(LIGHT, max_examples=EXAMPLES)
#: Met at least so often in each run, or the generator is not worth much.
HARD = (
    "head by guesses",
    "patience over",
    "NVLink head without T",
    "NVLink head, patience over",
    "shared head, patience over",
    "closed GPUs with shared jobs",
    "kept from closed GPUs",
    "limit and reservation",
    "awaited sample makes it late",
)
MET_AT_LEAST = 3

Look = Callable[[Snapshot, Plan], None]


def watched(scene: Scene, look: Look) -> None:
    """Play it, with a look at each pass."""
    sim = scene.host()
    sim.on_plan = look
    play(scene, sim, lambda _exception: None)


def test_each_decision_is_the_one_that_the_rules_give() -> None:
    """Who starts, who waits, the head, its T or X and its spare; work is conserved both ways."""
    met: Counter[str] = Counter()

    @settings(LIGHT, max_examples=3 * EXAMPLES)
    @given(scenes())
    def look_at(scene: Scene) -> None:
        watched(scene, lambda seen, made: met.update(Walk(seen, scene.policy, made).check()))

    look_at()
    assert min(met[word] for word in HARD) >= MET_AT_LEAST, met


@MANY
@given(scenes())
def test_patience_closes_the_gpus_that_the_rules_name(scene: Scene) -> None:
    """For whoever waits and has X: where it could sit now, then whose youngest job is oldest."""

    def look(seen: Snapshot, _made: Plan) -> None:
        host = Host(seen, scene.policy, expected=True)
        board = Board.of(seen, scene.policy)
        for job in (job for queue in seen.queues.gpu for job in queue.jobs):
            if board.first_s(job, guesses=True) < NEVER_S:
                closed = closed_for(host, host.need(job.request, job.uid))
                assert tuple(sorted(closed)) == board.closed_for(job)

    watched(scene, look)


@MANY
@given(scenes())
def test_no_promise_is_late_but_by_what_happened(scene: Scene) -> None:
    """And it never rises; it falls with early ends, but not to less than the slack from now."""
    sim = scene.host()
    excuses: set[PromiseException | None] = set()

    def look(seen: Snapshot, made: Plan) -> None:
        before, after = seen.promise, made.promise
        if made.ended is not None:
            end = made.ended
            is_kept = end.outcome is PromiseOutcome.KEPT
            assert is_kept == (end.exception is None)
            assert is_kept or end.exception in excuses
            if end.outcome is not PromiseOutcome.LOST:
                assert is_kept == (end.at_s <= end.promise.start_by_s)
        if after is None:
            return
        assert made.reservation is not None
        assert made.reservation.job_id == after.job_id
        assert after.delayed_by is None or after.delayed_by in excuses
        if after.delayed_by is None:
            assert made.reservation.start_s <= after.start_by_s
        if before is not None and before.job_id == after.job_id and made.ended is None:
            least_s = min(before.start_by_s, seen.now_s + scene.policy.promise_slack_s)
            assert least_s <= after.start_by_s <= before.start_by_s

    sim.on_plan = look
    play(scene, sim, excuses.add)


@MANY
@given(scenes())
def test_a_second_pass_at_the_same_moment_changes_nothing(scene: Scene) -> None:
    def look(seen: Snapshot, made: Plan) -> None:
        policy = scene.policy
        jobs = [job for queue in seen.queues.gpu for job in queue.jobs]
        queues = Queues.restore(policy, jobs, seen.queues.horizon)
        for start in made.starts:
            queues.remove(start.job_id, seen.now_s)
        queues.settle(made.horizon, seen.now_s)
        queues.note_heads(made.first_heads)
        again = replace(
            seen,
            running=all_running(seen, made),
            queues=queues.view(),
            promise=made.promise,
            reservation=made.reservation,
        )
        second = plan(again, policy)
        assert (second.starts, second.first_heads) == ((), {})

    watched(scene, look)


@MANY
@given(
    scenes(),
    st.randoms(use_true_random=False),
    st.sampled_from([-1, 0, 1, 3, 1000]),
    st.sampled_from([("shapes",), ("shapes", "requests"), ()]),
)
def test_neither_the_order_of_input_nor_how_much_is_explained_changes_a_plan(
    scene: Scene, rng: Random, explain: int, unknown: tuple[str, ...]
) -> None:
    """Nor what is known of a list as a whole, by which a pass leaves it out."""

    def look(seen: Snapshot, made: Plan) -> None:
        assert plan(shuffled(seen, scene, rng), scene.policy) == made
        other = plan(less_known(seen, unknown), scene.policy, explain)
        assert [(s.job_id, s.grants, s.rule, s.head) for s in other.starts] == [
            (s.job_id, s.grants, s.rule, s.head) for s in made.starts
        ]
        assert (other.promise, other.ended, other.first_heads) == (
            made.promise,
            made.ended,
            made.first_heads,
        )
        assert other.next_change_at_s == made.next_change_at_s
        assert (other.reservation is None) == (made.reservation is None)
        if other.reservation is not None and made.reservation is not None:
            assert replace(other.reservation, gpus=()) == replace(made.reservation, gpus=())

    watched(scene, look)


def less_known(seen: Snapshot, unknown: Iterable[str]) -> Snapshot:
    """The same with lists of too many shapes, or too many requests, to keep."""
    nothing: dict[str, Any] = dict.fromkeys(unknown)
    lists = tuple(replace(queue, **nothing) for queue in seen.queues.gpu)
    return replace(seen, queues=replace(seen.queues, gpu=lists))


def shuffled(seen: Snapshot, scene: Scene, rng: Random) -> Snapshot:
    """The same from rows, running jobs and GPUs in another order."""
    rows = [job for queue in seen.queues.gpu for job in queue.jobs]
    cards, running = list(seen.gpus), list(seen.running)
    for each in (rows, cards, running):
        rng.shuffle(each)
    queues = Queues.restore(scene.policy, rows, seen.queues.horizon)
    made = build_snapshot(
        now_s=seen.now_s,
        gpus=cards,
        running=running,
        queues=queues.view(),
        accounts=Accounts(scene.policy),
        promise=seen.promise,
        reservation=seen.reservation,
        lengths=seen.lengths,
    )
    return replace(made, standings=seen.standings)


def test_who_stays_head_with_a_planned_end_is_never_put_off() -> None:
    """By nobody who started behind it, whatever they were expected to take; in peace."""
    met: Counter[str] = Counter()

    def look(seen: Snapshot, made: Plan) -> None:
        before, after = seen.reservation, made.reservation
        if before is None or after is None or before.job_id != after.job_id:
            return
        if before.guessed or any(start.rule is Rule.FIRST for start in made.starts):
            return
        assert not after.guessed
        assert after.start_s <= max(before.start_s, seen.now_s)
        met.update(start.rule for start in made.starts)
        met["beside jobs without limit"] += any(run.time_limit_s is None for run in seen.running)

    @settings(LIGHT, max_examples=3 * EXAMPLES)
    @given(scenes().map(in_peace))
    def look_at(scene: Scene) -> None:
        watched(scene, look)

    look_at()
    words = (Rule.GAP, Rule.SPARE, "beside jobs without limit")
    assert min(met[word] for word in words) >= MET_AT_LEAST, met


def in_peace(scene: Scene) -> Scene:
    """Nothing befalls its GPUs, and nobody outlasts his limit."""
    jobs = [each for each in scene.events if isinstance(each, Arrival)]
    timely = [replace(job, lasts=min(job.lasts, 16)) for job in jobs]
    return replace(scene, events=[*timely], samples_take_s=0)
