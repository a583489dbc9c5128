"""Gates: who is eligible, why not, when that changes by itself, and what it does to a job's age."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpusched_client.terms import HoldKind, JobId, JobState, PendingReason
from gpuschedd.core.job import CancelOrder, Job
from gpuschedd.core.model import Request
from gpuschedd.jobs import gates

NOW_S = 1_000.0
WAITING = Job(
    job_id=JobId(7),
    uid=1000,
    user="alice",
    name="j",
    request=Request(gpus=1),
    submitted_at_s=0.0,
    submitted_sched_s=0.0,
)
HELD = replace(WAITING, hold=HoldKind.USER)
BACKED_OFF = replace(WAITING, not_before_sched_s=NOW_S + 5.0, launch_failures=2)
TO_BEGIN = replace(WAITING, begin_at_sched_s=NOW_S + 60.0)


@pytest.mark.parametrize(
    ("job", "code", "text"),
    [
        (HELD, PendingReason.HELD, "held by its owner"),
        (replace(HELD, hold=HoldKind.ADMIN), PendingReason.HELD, "held by an admin"),
        (BACKED_OFF, PendingReason.LAUNCH_BACKOFF, "launch failed 2 time(s); next try in 5 s"),
        (TO_BEGIN, PendingReason.BEGIN_TIME, "begins in 60 s"),
        (
            replace(TO_BEGIN, hold=HoldKind.USER),
            PendingReason.HELD,
            "held by its owner",
        ),
    ],
)
def test_a_closed_gate_says_why(job: Job, code: PendingReason, text: str) -> None:
    """The first one in their order, with numbers."""
    reason = gates.blocked_by(job, NOW_S)
    assert reason is not None
    assert (reason.code, reason.text) == (code, text)
    assert not gates.is_eligible(job, NOW_S)


def test_whoever_waits_for_gpus_alone_is_eligible() -> None:
    """Not one that runs, nor one that is being cancelled."""
    assert gates.is_eligible(WAITING, NOW_S)
    assert not gates.is_eligible(replace(WAITING, state=JobState.RUNNING), NOW_S)
    cancelled = replace(WAITING, cancel=CancelOrder(1000, "alice", 1.0))
    assert not gates.is_eligible(cancelled, NOW_S)


@pytest.mark.parametrize(
    ("job", "opens_at_s", "rests"),
    [(BACKED_OFF, NOW_S + 5.0, False), (TO_BEGIN, NOW_S + 60.0, True)],
)
def test_a_gate_that_opens_by_time_is_left_without_a_trace(
    job: Job, opens_at_s: float, rests: bool
) -> None:
    """Its age begins again after a begin time, and goes on after a failed launch."""
    assert gates.is_timed(job)
    assert gates.opening_times_s(job) == (opens_at_s,)
    assert gates.is_eligible(job, opens_at_s)
    assert gates.opened(job) == (
        replace(job, not_before_sched_s=None, begin_at_sched_s=None),
        rests,
    )


def test_nothing_opens_by_itself_while_somebody_must_release_it() -> None:
    """So no timer is set for it."""
    assert gates.opening_times_s(replace(TO_BEGIN, hold=HoldKind.USER)) == ()
    assert gates.opening_times_s(WAITING) == ()
    assert not gates.is_timed(HELD)
