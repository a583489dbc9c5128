"""Recovery: what becomes of an attempt, from what its directory and its processes show.

Pure: the facts are handed in, the answer is one word; who reads the facts and acts is not here. It
is asked at start-up, when a supervisor died, and when a launch failed or timed out. The rules are
one table, read from the top; the first row that fits decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class ClaimKind(Enum):
    """Who holds the attempt."""

    NONE = "none"
    DAEMON = "daemon"
    SUPERVISOR = "supervisor"


class Recovery(Enum):
    """What the controller does next."""

    # Nobody holds it: take the claim, then look and ask again, for a supervisor may be faster.
    REQUEUE_AFTER_FENCE = "requeue_after_fence"
    CANCEL_AFTER_FENCE = "cancel_after_fence"
    # Nothing ran and nothing can: PENDING again with the next attempt, or CANCELLED.
    REQUEUE = "requeue"
    CANCELLED = "cancelled"
    # The supervisor lives: watch it, and write the orders again.
    ADOPT = "adopt"
    # The end is known.
    FINAL_FROM_EXIT = "final_from_exit"
    FINAL_FROM_ENDED = "final_from_ended"
    # The end cannot be known, and nothing is left.
    NODE_FAIL = "node_fail"
    # The allocation stays: end what is left, and ask again.
    WAIT_FOR_PROCESSES = "wait_for_processes"


@dataclass(frozen=True, slots=True)
class Facts:
    """One attempt. `processes_left` counts only once the supervisor is dead."""

    claim: ClaimKind
    supervisor_alive: bool
    started: bool
    ended: bool
    exit: bool
    cancel_requested: bool
    processes_left: bool

    @property
    def unclaimed(self) -> bool:
        return self.claim is ClaimKind.NONE

    @property
    def fenced(self) -> bool:
        return self.claim is ClaimKind.DAEMON


# `started` is durable before anything of the user's runs, so its absence proves that nothing did,
# on any boot; a directory with an end but without `started` failed before that and is final.
TABLE: tuple[tuple[Callable[[Facts], bool], Recovery], ...] = (
    (lambda f: f.unclaimed and f.cancel_requested, Recovery.CANCEL_AFTER_FENCE),
    (lambda f: f.unclaimed, Recovery.REQUEUE_AFTER_FENCE),
    (lambda f: f.fenced and f.cancel_requested, Recovery.CANCELLED),
    (lambda f: f.fenced, Recovery.REQUEUE),
    (lambda f: f.supervisor_alive, Recovery.ADOPT),
    (lambda f: f.exit, Recovery.FINAL_FROM_EXIT),
    (lambda f: f.ended and f.processes_left, Recovery.WAIT_FOR_PROCESSES),
    (lambda f: f.ended, Recovery.FINAL_FROM_ENDED),
    (lambda f: not f.started and f.cancel_requested, Recovery.CANCELLED),
    (lambda f: not f.started, Recovery.REQUEUE),
    (lambda f: f.processes_left, Recovery.WAIT_FOR_PROCESSES),
    (lambda f: f.started, Recovery.NODE_FAIL),
)


def recover(
    claim: ClaimKind,
    *,
    supervisor_alive: bool,
    started: bool,
    ended: bool,
    exit: bool,
    cancel_requested: bool,
    processes_left: bool,
) -> Recovery:
    """What becomes of the attempt; total over its arguments."""
    facts = Facts(claim, supervisor_alive, started, ended, exit, cancel_requested, processes_left)
    return next(answer for fits, answer in TABLE if fits(facts))
