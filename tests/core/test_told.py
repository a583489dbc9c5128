"""What a plan says of its jobs costs nothing until somebody asks."""

from __future__ import annotations

from benchmarks.plan import CASES, POLICY, SHORT
from gpusched_client.terms import JobId
from gpuschedd.core.model import Plan
from gpuschedd.core.plan import plan
from gpuschedd.core.told import Telling
from tests.support.core_builders import EXACT, gpus, running, snapshot_of, waiting
from tests.support.work import bytecodes


def told_plan() -> Plan:
    """One with a job that waits, and its reason."""
    return plan(snapshot_of(gpus(1), [running(1, [0])], [waiting(2)]), EXACT)


def test_a_plan_is_made_again_once_for_all_that_is_told() -> None:
    calls = []

    def tell() -> Plan:
        calls.append("told")
        return told_plan()

    told = Telling(tell)
    assert calls == []
    assert list(told.reasons) == list(told.priorities) == [JobId(2)]
    assert told.reasons[JobId(2)].text.startswith("needs 1 whole GPU")
    assert (len(told.reasons), calls) == (1, ["told"])


def test_two_plans_that_tell_the_same_are_equal() -> None:
    assert told_plan() == told_plan()
    assert repr(told_plan().reasons) == repr(dict(told_plan().reasons))


def test_reasons_that_nobody_reads_are_no_work() -> None:
    seen = CASES["full host"].snapshot(SHORT)
    plan(seen, POLICY)  # the first one fills memos
    made = plan(seen, POLICY)
    deciding = bytecodes(lambda: plan(seen, POLICY))
    telling = bytecodes(lambda: len(made.reasons))
    assert telling > deciding, "the pass is made again, with its texts"
    assert bytecodes(lambda: len(made.reasons)) < deciding / 10
