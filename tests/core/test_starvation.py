"""Nobody starves without a limit: wide jobs beside a stream that never ends, in a virtual clock.

From when a wide job is head for the first time it waits until the start that it is expected to have
then, the patience and the longest job of the stream at most, whatever expectations are worth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

import pytest

from gpusched_client.terms import JobId
from gpuschedd.core.model import GIB, HOUR_S, NEVER_S, Policy, PromiseOutcome, Waiting
from tests.support.core_builders import Sim, gpus, waiting

MINUTE_S = 60.0
WIDE_USER = 77
FIRST_WIDE_S, WIDE_EVERY_S, WIDE_LASTS_S = 30 * HOUR_S, 40 * HOUR_S, 3 * HOUR_S
# Passes only because an order may have changed: one an hour instead of one a minute.
POLICY = replace(Policy(), rerank_s=HOUR_S)
BEFORE_AGE_WINS_S = POLICY.w_fair / POLICY.w_age_per_h * HOUR_S

Limits = Literal["nobody", "the wide ones", "all"]


@dataclass(frozen=True)
class Stream:
    """Jobs of one kind without end, which run `lasts_h`, and wide ones that ask `wide` GPUs.

    `estimate_s`: what the owners say of all of them. `at_once`: so many fill the host. `given_up_h`
    after the last wide job came nobody waits any more.
    """

    load: float
    users: int
    limits: Limits = "nobody"
    estimate_s: float | None = None
    lasts_h: tuple[float, float] = (3.0, 6.0)
    vram_gib: int | None = None
    gpus: int = 8
    at_once: int = 8
    wide: tuple[int, ...] = (8, 4)
    wide_user: int = WIDE_USER
    given_up_h: float = 100.0

    @property
    def longest_s(self) -> float:
        return self.lasts_h[1] * HOUR_S

    def jobs(self, seed: int) -> Iterator[tuple[float, Waiting, float]]:
        """When, what, and how long it runs."""
        random, at_s, number = Random(seed), 0.0, 0
        rate = self.load * self.at_once / (sum(self.lasts_h) / 2 * HOUR_S)
        while True:
            at_s, number = at_s + random.expovariate(rate), number + 1
            job = waiting(
                number,
                uid=random.randrange(self.users) + 1,
                vram=None if self.vram_gib is None else self.vram_gib * GIB,
                limit_s=self.longest_s if self.limits == "all" else None,
                estimate_s=self.estimate_s,
                length_key="stream",
            )
            yield at_s, job, random.uniform(*self.lasts_h) * HOUR_S

    def wide_jobs(self) -> list[tuple[float, Waiting]]:
        """They come one after the other."""
        limit_s = None if self.limits == "nobody" else 4 * HOUR_S
        return [
            (
                FIRST_WIDE_S + number * WIDE_EVERY_S,
                waiting(10**6 + number, asks, uid=self.wide_user, limit_s=limit_s),
            )
            for number, asks in enumerate(self.wide)
        ]


def flow(stream: Stream, policy: Policy, sim: Sim | None = None) -> tuple[Sim, dict[JobId, float]]:
    """Let it flow until all wide jobs have started, or for long; and when each of them came."""
    sim = sim or Sim(gpus(stream.gpus), policy, timely=True)
    due = stream.wide_jobs()
    came_s = {job.job_id: at_s for at_s, job in due}
    last_s = max(came_s.values()) + stream.given_up_h * HOUR_S
    for at_s, job, lasts_s in stream.jobs(seed=1):
        while due and due[0][0] <= at_s:
            _submit(sim, *due.pop(0), WIDE_LASTS_S)
        if at_s > last_s or all(job_id in sim.started_s for job_id in came_s):
            break
        _submit(sim, at_s, job, lasts_s)
    return sim, came_s


def _submit(sim: Sim, at_s: float, job: Waiting, lasts_s: float) -> None:
    sim.go_to(at_s)
    sim.submit(job, lasts_s)
    sim.make_pass()


def hours_late(sim: Sim, came_s: dict[JobId, float], longest_s: float) -> list[float]:
    """By how much each wide job missed its bound; 0 where it held. One never head has no X.

    X as first seen, but at most the guess from then, then patience, then the longest job.
    """
    late_h, policy = [], sim.policy
    for job_id, at_s in came_s.items():
        first = sim.first_heads.get(job_id)
        x_s = at_s
        if first is not None:
            x_s = min(first.expected_at_s, first.since_s + policy.guess_length_s)
        started_s = sim.started_s.get(job_id, NEVER_S)
        late_s = started_s - x_s - policy.head_patience_s - longest_s
        late_h.append(max(0.0, late_s) / HOUR_S)
    return late_h


FOUR_SHAPES = [
    Stream(load, users, limits)
    for load in (0.94, 1.1)
    for users in (1, 10)
    for limits in ("nobody", "the wide ones")
]
#: Each job is said to take a minute: no expected end keeps the next one back.
UNTRUE = [replace(stream, estimate_s=MINUTE_S) for stream in FOUR_SHAPES]
#: Four at a time, said to take an hour; 2 x 80 GiB.
SHARED = Stream(
    *(0.94, 10),
    estimate_s=HOUR_S,
    lasts_h=(40.0, 50.0),
    vram_gib=30,
    gpus=2,
    at_once=4,
    wide=(2, 1),
    given_up_h=200.0,
)
SHARED_SHAPES = [
    replace(SHARED, load=load, users=users, limits=limits)
    for load in (0.94, 1.1)
    for users in (1, 10)
    for limits in ("nobody", "the wide ones")
]


@pytest.mark.parametrize("learn", [True, False], ids=["learning", "not learning"])
@pytest.mark.parametrize("stream", FOUR_SHAPES, ids=str)
def test_wide_jobs_start_in_time_beside_a_stream(stream: Stream, learn: bool) -> None:
    """8 and 4 GPUs beside jobs of 1 GPU, with nothing but history and guesses."""
    sim, came_s = flow(stream, replace(POLICY, learn_lengths=learn))
    assert hours_late(sim, came_s, stream.longest_s) == [0.0, 0.0]


@pytest.mark.parametrize("learn", [True, False], ids=["learning", "not learning"])
@pytest.mark.parametrize("stream", [*UNTRUE, *SHARED_SHAPES], ids=str)
def test_wide_jobs_start_in_time_beside_a_stream_that_runs_longer_than_expected(
    stream: Stream, learn: bool
) -> None:
    """Whole GPUs, and shared ones with a job of whole GPUs between."""
    sim, came_s = flow(stream, replace(POLICY, learn_lengths=learn))
    assert hours_late(sim, came_s, stream.longest_s) == [0.0, 0.0]


@pytest.mark.parametrize("stream", [UNTRUE[0], UNTRUE[-1], SHARED], ids=str)
def test_it_is_patience_that_lets_them_start_then(stream: Stream) -> None:
    """With none that ends the first of them waits longer, most of them for ever."""
    endless = replace(POLICY, head_patience_s=NEVER_S)
    sim, came_s = flow(stream, endless)
    sim.policy = POLICY
    assert hours_late(sim, came_s, stream.longest_s)[0] > 0.0


@pytest.mark.parametrize("stream", [FOUR_SHAPES[0], UNTRUE[0]], ids=str)
def test_a_wide_job_of_the_streams_own_user_starts_in_time(stream: Stream) -> None:
    """Those that come after it stand behind it in the list."""
    sim, came_s = flow(replace(stream, wide_user=1), POLICY)
    assert hours_late(sim, came_s, stream.longest_s) == [0.0, 0.0]


@pytest.mark.parametrize("users", [1, 10])
@pytest.mark.parametrize("load", [0.94, 1.1])
def test_where_all_have_limits_the_promise_is_kept(load: float, users: int) -> None:
    """And each is promised: the wait is bounded by what was promised first."""
    stream = Stream(load, users, "all")
    sim, came_s = flow(stream, POLICY)
    assert hours_late(sim, came_s, stream.longest_s) == [0.0, 0.0]
    first = {promise.job_id: promise.start_by_s for promise in reversed(sim.promised)}
    assert all(sim.started_s[job_id] <= first[job_id] for job_id in came_s)
    assert {end.outcome for end in sim.promise_ends} == {PromiseOutcome.KEPT}


def of_a_heavy_user(stream: Stream, policy: Policy) -> tuple[Sim, dict[JobId, float]]:
    """The owner of the wide jobs has used more than all others together ever will."""
    sim = Sim(gpus(stream.gpus), policy, timely=True)
    sim.accounts.set_rate(WIDE_USER, JobId(999), 1000.0, -1e6)
    sim.accounts.set_rate(WIDE_USER, JobId(999), 0.0, 0.0)
    return flow(stream, policy, sim)


HEAVY = [
    Stream(load, 10, estimate_s=estimate_s, wide=(8,), given_up_h=300.0)
    for load in (0.94, 1.1)
    for estimate_s in (None, MINUTE_S)
]


@pytest.mark.parametrize("stream", HEAVY, ids=str)
def test_a_wide_job_of_a_heavy_user_starts_in_time_once_its_age_outweighs_the_rest(
    stream: Stream,
) -> None:
    """Until then each lighter user's job goes first; nothing that comes later does after that."""
    sim, came_s = of_a_heavy_user(stream, POLICY)
    ((job_id, at_s),) = came_s.items()
    last_s = at_s + BEFORE_AGE_WINS_S + POLICY.guess_length_s + POLICY.head_patience_s
    assert sim.started_s[job_id] <= last_s + stream.longest_s


def test_it_is_age_that_lets_them_start_then() -> None:
    """Without, users who are lighter go first for as long as they come."""
    sim, came_s = of_a_heavy_user(HEAVY[-1], replace(POLICY, w_age_per_h=1e-9))
    assert not sim.started_s.keys() & came_s.keys()
