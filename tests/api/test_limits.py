"""Whose requests wait for whose: the budget of a uid, and the turns of those who read."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from gpusched_client.errors import LimitReached
from gpusched_client.wire.fields import InvalidValue
from gpuschedd.api import limits as budget
from gpuschedd.api import readers as reads
from gpuschedd.api.limits import Connections, RequestBudget, Turns, Unsent, cost_of
from gpuschedd.api.metering import metered
from gpuschedd.api.readers import FairReader
from gpuschedd.jobs.principal import STRANGERS

ALICE, BOB = 3001, 3002


class Books:
    """Stands for the reading connection: what is asked of it is done as asked."""

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as the budget sees it; a test moves it."""
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


def test_a_request_costs_what_it_names() -> None:
    assert cost_of({}) == 1.0
    assert cost_of({"job_ids": [1, 2, 3, 4]}) == 2.0
    assert cost_of({"jobs": [{}] * 400}) == 101.0
    assert cost_of({"jobs": 7, "ids": None}) == 1.0


@pytest.mark.parametrize("params", [None, 7, "text", b"bytes", [], [{}], InvalidValue("two keys")])
def test_what_is_no_map_costs_as_the_least(params: object) -> None:
    assert cost_of(params) == 1.0


def test_alone_nobody_waits(clock: list[float]) -> None:
    found = RequestBudget(100.0, is_shared=True)
    found.charge(ALICE, 1e6)
    assert found.debt_s(ALICE) == 0.0
    assert clock


def test_who_took_more_than_a_second_s_worth_waits_while_others_are_active(
    clock: list[float],
) -> None:
    found = RequestBudget(100.0, is_shared=True)
    found.charge(ALICE, 150.0)
    found.charge(BOB, 1.0)
    assert found.debt_s(ALICE) == pytest.approx(0.51)
    assert found.debt_s(BOB) == 0.0
    clock[0] += 0.6
    assert found.debt_s(ALICE) == 0.0


def test_of_those_who_took_too_much_the_one_with_least_waits_for_nobody(
    clock: list[float],
) -> None:
    found = RequestBudget(100.0, is_shared=True)
    found.charge(ALICE, 190.0)
    found.charge(BOB, 110.0)
    assert found.debt_s(ALICE) == pytest.approx(0.91)
    assert found.debt_s(BOB) == 0.0
    assert clock


def test_what_was_taken_alone_is_not_held_against_anybody_for_long(clock: list[float]) -> None:
    found = RequestBudget(100.0, is_shared=True)
    found.charge(ALICE, 1e6)
    found.charge(BOB, 1.0)
    assert found.debt_s(ALICE) <= budget.ACTIVE_S
    clock[0] += 1.1
    assert found.debt_s(ALICE) == 0.0


def test_root_and_a_daemon_of_one_user_wait_for_nobody(clock: list[float]) -> None:
    shared, own = RequestBudget(1.0, is_shared=True), RequestBudget(1.0, is_shared=False)
    for found in (shared, own):
        for uid in (0, ALICE):
            found.charge(uid, 1e6)
        found.charge(BOB, 1.5)
    assert shared.debt_s(0) == own.debt_s(ALICE) == 0.0
    assert shared.debt_s(ALICE) > 0
    assert clock


def test_reads_go_round_among_the_users() -> None:
    """Ten questions of alice's, then one of bob's: his is second."""
    order: list[str] = []

    async def run() -> None:
        found = FairReader(Books())  # type: ignore[arg-type]
        asked = [found.ask(ALICE, lambda _: order.append("alice")) for _ in range(10)]
        asked.append(found.ask(BOB, lambda _: order.append("bob")))
        await asyncio.gather(*asked)
        found.close()

    asyncio.run(run())
    assert order.index("bob") <= 2
    assert len(order) == 11


def test_a_question_that_fails_or_is_given_up_holds_up_nobody() -> None:
    async def run() -> list[Any]:
        found = FairReader(Books())  # type: ignore[arg-type]

        def fail(_: object) -> None:
            raise OverflowError("gone")

        given_up = asyncio.ensure_future(found.ask(ALICE, lambda _: 1))
        given_up.cancel()
        results = await asyncio.gather(
            found.ask(ALICE, fail), found.ask(ALICE, lambda _: 2), return_exceptions=True
        )
        found.close()
        return list(results)

    failed, answered = asyncio.run(run())
    assert isinstance(failed, OverflowError)
    assert answered == 2


def test_a_thousand_questions_of_one_user_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "QUESTIONS_PER_UID_MAX", 3)

    async def run() -> list[Any]:
        found = FairReader(Books())  # type: ignore[arg-type]
        asked = [found.ask(ALICE, lambda _: 1) for _ in range(9)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        found.close()
        return results

    assert any(isinstance(result, LimitReached) for result in asyncio.run(run()))


def test_what_takes_the_daemon_s_time_is_charged_by_it(clock: list[float]) -> None:
    """A tenth of a second of work costs more than a request, whatever it names."""
    found = RequestBudget(100.0, is_shared=True)
    found.charge(BOB, 1.0)
    found.charge(ALICE, 1.0)
    found.charge_time(ALICE, 0.3)
    assert found.debt_s(ALICE) > 0.0
    assert found.debt_s(BOB) == 0.0
    assert clock


def test_each_step_of_a_request_is_measured_and_waiting_is_not() -> None:
    spent: list[float] = []

    async def work() -> str:
        sum(range(300_000))
        await asyncio.sleep(0.05)
        sum(range(300_000))
        return "done"

    async def run() -> str:
        return await metered(work(), spent.append)

    assert asyncio.run(run()) == "done"
    busy = [step for step in spent if step > 0.0005]
    assert len(busy) == 2


def test_a_measured_request_can_be_cancelled() -> None:
    async def run() -> bool:
        task = asyncio.ensure_future(_measured_for_ever())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    async def _measured_for_ever() -> None:
        await metered(asyncio.sleep(3_600), lambda _spent: None)

    assert asyncio.run(run())


def test_a_user_s_large_commands_go_one_after_the_other_and_another_s_at_once() -> None:
    order: list[str] = []

    async def work(turns: Turns, uid: int, name: str, rows: int, until: asyncio.Event) -> None:
        async with turns.of(uid, rows):
            order.append(name)
            await until.wait()

    async def run() -> None:
        turns, until = Turns(rows_max=1_000), asyncio.Event()
        tasks = [
            asyncio.ensure_future(work(turns, *words, until))
            for words in (
                (ALICE, "large", 900),
                (ALICE, "second", 900),
                (ALICE, "small", 1),
                (BOB, "his", 900),
            )
        ]
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == ["large", "his"]
        tasks[1].cancel()  # its connection is gone
        until.set()
        await asyncio.wait(tasks)
        async with turns.of(ALICE, 1_000):
            order.append("last")

    asyncio.run(run())
    assert order == ["large", "his", "small", "last"]


class Stalled:
    """A reader that takes nothing."""

    def __init__(self, unsent: Unsent, account: int, size: int) -> None:
        self.unsent_bytes, self.is_cut = size, False
        unsent.begin(account, self)

    def cut(self, why: str) -> None:
        assert why
        self.is_cut, self.unsent_bytes = True, 0


def test_unread_bytes_of_one_user_have_a_bound_and_the_largest_goes_first() -> None:
    unsent, half = Unsent(), budget.UNSENT_PER_UID_MAX // 2
    small, large = Stalled(unsent, ALICE, half), Stalled(unsent, ALICE, half + 1)
    his = Stalled(unsent, BOB, half)
    unsent.bound(ALICE)
    assert (small.is_cut, large.is_cut, his.is_cut) == (False, True, False)


def test_unread_bytes_of_all_have_a_bound_and_who_has_the_most_is_cut() -> None:
    unsent, most = Unsent(), budget.UNSENT_PER_UID_MAX
    heavy = [Stalled(unsent, uid, most) for uid in range(100, 105)]
    his = Stalled(unsent, BOB, 1_000)
    unsent.bound(BOB)
    assert sum(reader.is_cut for reader in heavy) == 2
    assert not his.is_cut


def test_uids_without_an_account_share_a_few_connections() -> None:
    found = Connections(256, 4_096)
    for _ in range(budget.STRANGERS_CONNECTIONS_MAX):
        found.admit(STRANGERS)
    with pytest.raises(LimitReached, match=f"they share {budget.STRANGERS_CONNECTIONS_MAX}"):
        found.admit(STRANGERS)
    found.admit(BOB)
    found.release(STRANGERS)
    found.admit(STRANGERS)
