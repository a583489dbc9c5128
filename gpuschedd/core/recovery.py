"""Recovery: what becomes of an attempt, from what its directory and its processes show.

Pure: the facts are handed in, the answer is one word. The runner asks whenever it has looked at a
directory, carries out what is its part (fence, watch, end what is left) and reports the rest; the
controller asks again inside the batch, where it is certain whether a cancel was committed. The
rules are one table, read from the top; the first row that fits decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from gpuschedd.core.attempt import AttemptReport, Observation


class ClaimKind(Enum):
    """Who holds the attempt."""

    NONE = "none"
    DAEMON = "daemon"
    SUPERVISOR = "supervisor"
    UNREADABLE = "unreadable"  # damaged, or gone together with its directory


class Recovery(Enum):
    """What follows; the runner's part first, then the controller's."""

    # Nobody holds it: take the claim, then look and ask again, for a supervisor may be faster.
    REQUEUE_AFTER_FENCE = "requeue_after_fence"
    CANCEL_AFTER_FENCE = "cancel_after_fence"
    # The supervisor lives: watch it, and write the orders again.
    ADOPT = "adopt"
    # The allocation stays: end what is left, and ask again.
    WAIT_FOR_PROCESSES = "wait_for_processes"
    # Nothing ran and nothing can: PENDING again with the next attempt, or CANCELLED.
    REQUEUE = "requeue"
    CANCELLED = "cancelled"
    # The end is known.
    FINAL_FROM_EXIT = "final_from_exit"
    FINAL_FROM_ENDED = "final_from_ended"
    # The end cannot be known, and nothing is left.
    NODE_FAIL = "node_fail"


@dataclass(frozen=True, slots=True)
class Facts:
    """One attempt. `ran`: by the database it was RUNNING, whatever its directory says.

    `processes_left` counts only once the supervisor is dead, and is true until somebody has looked.
    """

    claim: ClaimKind
    supervisor_alive: bool = False
    started: bool = False
    ended: bool = False
    exit: bool = False
    ran: bool = False
    cancel_requested: bool = False
    processes_left: bool = False

    @property
    def unreadable(self) -> bool:
        return self.claim is ClaimKind.UNREADABLE

    @property
    def unclaimed(self) -> bool:
        return self.claim is ClaimKind.NONE

    @property
    def fenced(self) -> bool:
        return self.claim is ClaimKind.DAEMON

    @property
    def lost(self) -> bool:
        """It did run, and its directory no longer says so: once more would be twice."""
        return self.ran and (self.fenced or not self.started)


# `exit` is written when the last process is gone, so it holds even before the supervisor is.
# `started` is durable before anything of the user's runs, so its absence proves that nothing did,
# on any boot; a directory with an end but without `started` failed before that and is final.
TABLE: tuple[tuple[Callable[[Facts], bool], Recovery], ...] = (
    (lambda f: f.unreadable and f.processes_left, Recovery.WAIT_FOR_PROCESSES),
    (lambda f: f.unreadable, Recovery.NODE_FAIL),
    (lambda f: f.unclaimed and f.cancel_requested, Recovery.CANCEL_AFTER_FENCE),
    (lambda f: f.unclaimed, Recovery.REQUEUE_AFTER_FENCE),
    (lambda f: f.fenced and f.lost and f.processes_left, Recovery.WAIT_FOR_PROCESSES),
    (lambda f: f.fenced and f.lost, Recovery.NODE_FAIL),
    (lambda f: f.fenced and f.cancel_requested, Recovery.CANCELLED),
    (lambda f: f.fenced, Recovery.REQUEUE),
    (lambda f: f.exit, Recovery.FINAL_FROM_EXIT),
    (lambda f: f.supervisor_alive, Recovery.ADOPT),
    (lambda f: f.ended and f.processes_left, Recovery.WAIT_FOR_PROCESSES),
    (lambda f: f.ended, Recovery.FINAL_FROM_ENDED),
    (lambda f: f.lost and f.processes_left, Recovery.WAIT_FOR_PROCESSES),
    (lambda f: f.lost, Recovery.NODE_FAIL),
    (lambda f: not f.started and f.cancel_requested, Recovery.CANCELLED),
    (lambda f: not f.started, Recovery.REQUEUE),
    (lambda f: f.processes_left, Recovery.WAIT_FOR_PROCESSES),
    (lambda f: f.started, Recovery.NODE_FAIL),
)


def recover(facts: Facts) -> Recovery:
    """What becomes of the attempt; every combination of facts has an answer."""
    return next(answer for fits, answer in TABLE if fits(facts))


def facts_of(
    seen: Observation | None, *, ran: bool, cancel_requested: bool, processes_left: bool
) -> Facts:
    """The facts of one look at a directory; `seen` None: it cannot be understood, or is gone."""
    if seen is None:
        claim = ClaimKind.UNREADABLE
        return Facts(
            claim, ran=ran, cancel_requested=cancel_requested, processes_left=processes_left
        )
    return Facts(
        claim=_claim_kind(seen),
        supervisor_alive=seen.supervisor_alive,
        started=seen.started is not None,
        ended=seen.ended is not None,
        exit=seen.exit is not None,
        ran=ran,
        cancel_requested=cancel_requested,
        processes_left=processes_left,
    )


def facts_reported(report: AttemptReport, *, ran: bool, cancel_requested: bool) -> Facts:
    """The facts of a report, with what only the database knows.

    A launch that failed and left no directory is as good as fenced: nothing starts without a spec.
    """
    facts = facts_of(
        report.seen,
        ran=ran,
        cancel_requested=cancel_requested,
        processes_left=report.processes_left,
    )
    if report.seen is None and (report.launch_error or report.storage_error):
        return Facts(ClaimKind.DAEMON, ran=ran, cancel_requested=cancel_requested)
    return facts


def _claim_kind(seen: Observation) -> ClaimKind:
    if seen.claim is None:
        return ClaimKind.NONE
    return ClaimKind.SUPERVISOR if seen.claim.by == "supervisor" else ClaimKind.DAEMON
