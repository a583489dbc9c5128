"""The table of recovery: every row, and that no combination of facts is without an answer."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from gpuschedd.core.recovery import ClaimKind, Facts, Recovery, recover

NONE, DAEMON, SUPERVISOR = ClaimKind.NONE, ClaimKind.DAEMON, ClaimKind.SUPERVISOR
UNREADABLE = ClaimKind.UNREADABLE
FLAGS = (
    "supervisor_alive",
    "started",
    "ended",
    "exit",
    "ran",
    "cancel_requested",
    "processes_left",
)


def after(claim: ClaimKind, *true: str) -> Recovery:
    return recover(Facts(claim, **{flag: flag in true for flag in FLAGS}))


@pytest.mark.parametrize(
    ("facts", "answer"),
    [
        ((NONE,), Recovery.REQUEUE_AFTER_FENCE),
        ((NONE, "cancel_requested"), Recovery.CANCEL_AFTER_FENCE),
        ((DAEMON,), Recovery.REQUEUE),
        ((DAEMON, "cancel_requested"), Recovery.CANCELLED),
        ((SUPERVISOR, "supervisor_alive"), Recovery.ADOPT),
        ((SUPERVISOR, "supervisor_alive", "cancel_requested"), Recovery.ADOPT),
        ((SUPERVISOR, "supervisor_alive", "started", "ended"), Recovery.ADOPT),
        ((SUPERVISOR, "started", "ended", "exit"), Recovery.FINAL_FROM_EXIT),
        ((SUPERVISOR, "ended", "exit"), Recovery.FINAL_FROM_EXIT),
        ((SUPERVISOR, "ended", "exit", "cancel_requested"), Recovery.FINAL_FROM_EXIT),
        ((SUPERVISOR, "started", "ended"), Recovery.FINAL_FROM_ENDED),
        ((SUPERVISOR, "started", "ended", "processes_left"), Recovery.WAIT_FOR_PROCESSES),
        ((SUPERVISOR,), Recovery.REQUEUE),
        ((SUPERVISOR, "cancel_requested"), Recovery.CANCELLED),
        ((SUPERVISOR, "started"), Recovery.NODE_FAIL),
        ((SUPERVISOR, "started", "cancel_requested"), Recovery.NODE_FAIL),
        ((SUPERVISOR, "started", "processes_left"), Recovery.WAIT_FOR_PROCESSES),
        ((SUPERVISOR, "supervisor_alive", "started", "ended", "exit"), Recovery.FINAL_FROM_EXIT),
        ((DAEMON, "ran", "processes_left"), Recovery.WAIT_FOR_PROCESSES),
        ((DAEMON, "ran"), Recovery.NODE_FAIL),
        ((DAEMON, "ran", "cancel_requested"), Recovery.NODE_FAIL),
        ((SUPERVISOR, "ran"), Recovery.NODE_FAIL),
        ((SUPERVISOR, "ran", "processes_left"), Recovery.WAIT_FOR_PROCESSES),
        ((UNREADABLE, "processes_left"), Recovery.WAIT_FOR_PROCESSES),
        ((UNREADABLE,), Recovery.NODE_FAIL),
        ((UNREADABLE, "cancel_requested"), Recovery.NODE_FAIL),
    ],
)
def test_each_row_gives_its_answer(facts: tuple[Any, ...], answer: Recovery) -> None:
    assert after(*facts) is answer


ALL = [Facts(claim, *flags) for claim in ClaimKind for flags in product((False, True), repeat=7)]


def test_every_combination_has_an_answer() -> None:
    assert len([recover(facts) for facts in ALL]) == 4 * 2**7


@pytest.mark.parametrize("answer", [Recovery.REQUEUE, Recovery.CANCELLED])
def test_nothing_that_started_or_ended_is_dropped_or_run_again(answer: Recovery) -> None:
    dropped = [f for f in ALL if f.claim is SUPERVISOR and recover(f) is answer]
    assert not [f for f in dropped if f.started or f.ended or f.exit or f.supervisor_alive]


@pytest.mark.parametrize("answer", [Recovery.REQUEUE, Recovery.CANCELLED])
def test_what_ran_by_the_database_is_never_run_again(answer: Recovery) -> None:
    assert not [f for f in ALL if f.ran and recover(f) is answer]


def test_an_end_is_never_taken_while_processes_are_left_unless_the_exit_record_says_so() -> None:
    final = {Recovery.FINAL_FROM_ENDED, Recovery.NODE_FAIL}
    assert not [f for f in ALL if f.processes_left and recover(f) in final]


def test_only_a_live_supervisor_is_adopted() -> None:
    adopted = [f for f in ALL if recover(f) is Recovery.ADOPT]
    assert adopted == [
        f for f in ALL if f.claim is SUPERVISOR and f.supervisor_alive and not f.exit
    ]


def test_a_fence_comes_before_any_decision_on_a_free_attempt() -> None:
    fences = {Recovery.REQUEUE_AFTER_FENCE, Recovery.CANCEL_AFTER_FENCE}
    assert {recover(f) for f in ALL if f.claim is NONE} == fences
