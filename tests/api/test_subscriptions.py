"""Watchers: slices, turns of their users, and what a slow reader is told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gpusched_client.errors import LimitReached
from gpusched_client.terms import EventKind
from gpuschedd.api import subscriptions as room
from gpuschedd.api.limits import STRANGERS_WATCHERS_MAX, RequestBudget
from gpuschedd.api.subscriptions import Subscriptions, Watcher
from gpuschedd.jobs.controller import Committed
from gpuschedd.jobs.principal import STRANGERS
from gpuschedd.store.records import Event

ALICE, BOB = 3001, 3002


class Heard:
    """A reader that may be behind."""

    def __init__(self, order: list[str], name: str) -> None:
        self.order, self.name = order, name
        self.events: list[tuple[int, Event]] = []
        self.is_behind = False

    def send(self, events: Sequence[tuple[int, Event]]) -> bool:
        if self.is_behind:
            return False
        self.order.append(self.name)
        self.events += events
        return True

    @property
    def ids(self) -> list[int]:
        return [number for number, event in self.events if event.kind != EventKind.EVENTS_DROPPED]

    @property
    def dropped(self) -> list[object]:
        return [e.data["count"] for _, e in self.events if e.kind == EventKind.EVENTS_DROPPED]


def committed(first: int, last: int) -> Committed:
    events = tuple((number, Event("job_submitted", 0.0)) for number in range(first, last + 1))
    return Committed((), events)


async def settled() -> None:
    """Until the feeding is over."""
    for _ in range(2_000):
        await asyncio.sleep(0)


def subscribed() -> Subscriptions:
    return Subscriptions(RequestBudget(1_000.0, is_shared=True))


def test_another_user_s_watcher_need_not_wait_for_all_slices_of_many() -> None:
    """A hundred watchers of alice's and a large batch: bob's turn is the second."""
    order: list[str] = []

    async def run() -> tuple[Heard, Heard]:
        found = subscribed()
        hers = [Heard(order, "alice") for _ in range(100)]
        for heard in hers:
            found.add(Watcher(ALICE, heard.send, 0))
        his = Heard(order, "bob")
        found.add(Watcher(BOB, his.send, 0))
        found.after_commit(committed(1, 1_000))
        assert order == []  # nothing is sent before the loop has had its turn
        await settled()
        return hers[0], his

    _, his = asyncio.run(run())
    assert "bob" in order[:2]
    assert his.ids == list(range(1, 1_001))


def test_each_watcher_hears_everything_once_and_in_order() -> None:
    async def run() -> Heard:
        found = subscribed()
        heard = Heard([], "x")
        watcher = Watcher(ALICE, heard.send, 5)
        watcher.is_held = True
        found.add(watcher)
        found.after_commit(committed(6, 300))
        await settled()
        assert heard.events == []
        watcher.take_missed([(4, Event("old", 0.0)), (5, Event("old", 0.0))], 2)
        found.go_on(watcher)
        found.after_commit(committed(301, 350))
        await settled()
        return heard

    heard = asyncio.run(run())
    assert heard.ids == list(range(4, 351))
    assert heard.dropped == [2]


def test_a_reader_that_is_behind_hears_how_many_it_missed() -> None:
    async def run() -> Heard:
        found = subscribed()
        heard = Heard([], "x")
        found.add(Watcher(ALICE, heard.send, 0))
        heard.is_behind = True
        found.after_commit(committed(1, 200))
        await settled()
        heard.is_behind = False
        found.after_commit(committed(201, 210))
        await settled()
        return heard

    heard = asyncio.run(run())
    assert heard.dropped == [200]
    assert heard.ids == list(range(201, 211))


def test_a_reader_that_reads_again_hears_at_once_how_many_it_missed() -> None:
    """On a quiet host the next event may be hours away."""

    async def run() -> Heard:
        found = subscribed()
        heard = Heard([], "x")
        watcher = Watcher(ALICE, heard.send, 0)
        found.add(watcher)
        heard.is_behind = True
        found.after_commit(committed(1, 200))
        await settled()
        heard.is_behind = False
        for _ in range(2):
            found.go_on(watcher)
            await settled()
        assert heard.events == [(200, Event("dropped", 0.0, data={"count": 200}))]
        found.after_commit(committed(201, 210))
        await settled()
        return heard

    heard = asyncio.run(run())
    assert heard.dropped == [200]
    assert heard.ids == list(range(201, 211))


def test_events_that_are_no_longer_kept_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "WATCH_QUEUE_MAX", 30)

    async def run() -> Heard:
        found = subscribed()
        heard = Heard([], "x")
        found.add(Watcher(ALICE, heard.send, 0))
        found.after_commit(committed(1, 100))
        await settled()
        return heard

    heard = asyncio.run(run())
    assert heard.dropped == [70]
    assert heard.ids == list(range(71, 101))


def test_who_is_gone_is_sent_nothing() -> None:
    async def run() -> Heard:
        found = subscribed()
        heard = Heard([], "x")
        watcher = Watcher(ALICE, heard.send, 0)
        found.add(watcher)
        found.after_commit(committed(1, 10))
        found.remove(watcher)
        await settled()
        assert found.watching == 0
        return heard

    assert asyncio.run(run()).events == []


def test_a_watcher_that_cannot_be_served_ends_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of the same user and of others, with this commit and with the next."""

    def broken(_: Sequence[tuple[int, Event]]) -> bool:
        raise ValueError("an event that cannot be encoded")

    ended: list[str] = []

    async def run() -> list[Heard]:
        found = subscribed()
        others = [Heard([], "alice"), Heard([], "bob")]
        found.add(Watcher(ALICE, broken, 0, lambda: ended.append("told")))
        for account, heard in zip((ALICE, BOB), others, strict=True):
            found.add(Watcher(account, heard.send, 0))
        for number in (1, 2):
            found.after_commit(committed(number, number))
            await settled()
        assert found.watching == 2
        return others

    assert [heard.ids for heard in asyncio.run(run())] == [[1, 2], [1, 2]]
    assert caplog.text.count("watcher_failed") == 1
    assert ended == ["told"]


def test_uids_without_an_account_share_a_few_watches() -> None:
    found = subscribed()
    heard = Heard([], "x")
    for _ in range(STRANGERS_WATCHERS_MAX):
        found.add(Watcher(STRANGERS, heard.send, 0))
    with pytest.raises(LimitReached):
        found.add(Watcher(STRANGERS, heard.send, 0))
    found.add(Watcher(BOB, heard.send, 0))
