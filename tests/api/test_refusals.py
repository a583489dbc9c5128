"""Connections that are refused: the few are told at once, the many later, and nothing is kept."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from gpusched_client.errors import LimitReached
from gpusched_client.wire.catalog import METHODS
from gpusched_client.wire.methods import Unread
from gpuschedd.api import refusals, server
from gpuschedd.api.limits import Connections, RequestBudget
from gpuschedd.api.refusals import Refusals
from gpuschedd.api.server import Server

ALICE, BOB = 3001, 3002
REFUSAL = LimitReached("4 connections of uid 3001 are open; the limit is 4. Close some.")


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "REFUSALS_AT_ONCE", 2)
    monkeypatch.setattr(refusals, "REFUSALS_KEPT_S", 0.05)
    monkeypatch.setattr(refusals, "REFUSALS_KEPT_MAX", 3)


@contextmanager
def pairs(count: int) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """So many connections: the client's end, and the daemon's."""
    made = [socket.socketpair() for _ in range(count)]
    try:
        yield made
    finally:
        for ours, theirs in made:
            ours.close()
            theirs.close()


def _code(received: bytes) -> str | None:
    return msgpack.unpackb(received)[2]["code"] if received else None


def test_the_many_of_one_user_are_told_later_and_what_is_more_than_is_kept_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 7.5)  # all of them in one second

    async def refuse(ends: list[tuple[socket.socket, socket.socket]]) -> list[bool]:
        found = Refusals()
        for _, theirs in ends:
            found.refuse(theirs, ALICE, REFUSAL)
        at_once = [theirs.fileno() < 0 for _, theirs in ends]
        monkeypatch.undo()
        loop = asyncio.get_running_loop()
        for ours, _ in ends[2:5]:
            ours.setblocking(False)
            assert _code(await loop.sock_recv(ours, 4096)) == "limit"
        return at_once

    with pairs(7) as ends:
        assert asyncio.run(refuse(ends)) == [True, True, False, False, False, True, True]
        assert [_code(ours.recv(4096)) for ours, _ in ends[:2]] == ["limit", "limit"]
        assert [ours.recv(4096) for ours, _ in ends] == [b""] * 7


def test_a_flood_of_one_user_delays_nobody_else_s_refusal() -> None:
    async def refuse(ends: list[tuple[socket.socket, socket.socket]]) -> None:
        found = Refusals()
        for _, theirs in ends[:-1]:
            found.refuse(theirs, ALICE, REFUSAL)
        found.refuse(ends[-1][1], BOB, REFUSAL)
        assert ends[-1][1].fileno() < 0
        found.close()
        assert all(theirs.fileno() < 0 for _, theirs in ends)

    with pairs(6) as ends:
        asyncio.run(refuse(ends))


class Everybody:
    """On whose allowance a connection lives: the first ones are alice's, later ones bob's."""

    def __init__(self) -> None:
        self.now = ALICE

    def get(self, _uid: int) -> int:
        return self.now

    async def ask(self, _uid: int) -> int:
        return self.now


class Silent:
    """Answers nothing but that it is there."""

    async def handle(self, *_: object) -> Any:
        raise LimitReached("it is there")


def test_behind_a_flood_of_refused_connections_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a rest, which more of them at once than wait in the kernel bring about."""
    monkeypatch.setattr(server, "FLOOD", 10)
    accounts, handlers, rests = Everybody(), Silent(), list[float]()

    async def ask() -> Any:
        budget = RequestBudget(1_000.0, is_shared=True)
        found: Any = handlers
        serving = Server(found, Connections(1, 99), budget, known_accounts=accounts)
        pause = serving._pause_accepting

        def rest(listening: socket.socket, pause_s: float) -> None:
            rests.append(pause_s)
            pause(listening, pause_s)

        monkeypatch.setattr(serving, "_pause_accepting", rest)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(tmp_path / "s"))
            serving.listen(listening)
            flood = []
            for _ in range(40):
                flood.append(socket.socket(socket.AF_UNIX))
                flood[-1].connect(str(tmp_path / "s"))
            while not rests:
                await asyncio.sleep(0)
            accounts.now = BOB
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            writer.write(msgpack.packb([0, 1, "hello", []]))
            reply = msgpack.unpackb(await reader.read(4096))
            for connected in flood:
                connected.close()
            writer.close()
            await serving.close()
        return reply

    reply = asyncio.run(ask())
    assert (reply[1], reply[2]["message"]) == (1, "it is there")
    assert rests
    assert all(0 < rest_s <= server.FLOOD_REST_S_MAX for rest_s in rests)


def test_what_a_client_that_is_gone_asked_to_see_is_not_made(tmp_path: Path) -> None:
    """Its questions wait for room that others of the same user have; its changes are made."""
    asked: list[tuple[str, bool]] = []
    room, gone = asyncio.Event(), asyncio.Event()

    class Counting:
        async def handle(self, _connection: object, request: Any) -> Any:
            asked.append((request.method, gone.is_set()))
            await room.wait()
            raise LimitReached("no more")

    async def run() -> None:
        handlers: Any = Counting()
        serving = Server(handlers, Connections(9, 99), RequestBudget(1e6, is_shared=False))
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(tmp_path / "s"))
            serving.listen(listening)
            first = await asyncio.open_unix_connection(tmp_path / "s")
            first[1].write(b"".join(msgpack.packb([0, n, "jobs", [{}]]) for n in range(16)))
            while len(asked) < 16:
                await asyncio.sleep(0)
            _, leaving = await asyncio.open_unix_connection(tmp_path / "s")
            questions = [msgpack.packb([0, n, "jobs", [{}]]) for n in range(500)]
            change = msgpack.packb([0, 500, "cancel", [{"job_ids": [1]}]])
            leaving.write(b"".join([*questions, change]))
            while len(serving.open) < 2 or not serving._shared.requests._waiting:
                await asyncio.sleep(0)
            leaving.close()
            await leaving.wait_closed()
            gone.set()
            room.set()
            while len(serving.open) > 1:
                await asyncio.sleep(0)
            first[1].close()
            await serving.close()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert [method for method, late in asked if late] == ["cancel"]


class Known(Everybody):
    """Alice is known; whoever comes later is bob, who has to be asked for."""

    def get(self, uid: int) -> Any:
        return None if self.now == BOB else super().get(uid)


def test_a_user_in_debt_takes_nobody_s_place_among_those_who_are_not_known_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ARRIVING_MAX", 3)
    accounts, handlers = Known(), Silent()

    async def ask() -> Any:
        budget = RequestBudget(100.0, is_shared=True)
        found: Any = handlers
        serving = Server(found, Connections(99, 999), budget, known_accounts=accounts)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(tmp_path / "s"))
            serving.listen(listening)
            budget.charge(ALICE, 1e6)
            budget.charge(7, 1.0)  # somebody else is active
            hers = [await asyncio.open_unix_connection(tmp_path / "s") for _ in range(6)]
            while len(serving._arriving) < 6:
                await asyncio.sleep(0)
            accounts.now = BOB
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            writer.write(msgpack.packb([0, 1, "hello", []]))
            reply = msgpack.unpackb(await reader.read(4096))
            await serving.close()
            assert not serving._arriving
            assert len(serving.open) <= 1  # his: who waited is not served by one that closes
            for _, to_hers in [*hers, (reader, writer)]:
                to_hers.close()
        return reply

    assert asyncio.run(ask())[2]["message"] == "it is there"


@pytest.mark.parametrize(
    ("unread", "names"),
    [
        (Unread.NOTHING, "gpus hello job jobs queue stats status usage wait watch why"),
        (Unread.FINISHED, "cancel drain gpus_release gpus_resume reload resume top update"),
        (Unread.OPEN, "backup submit"),
    ],
)
def test_what_is_done_of_each_method_for_nobody_is_decided(unread: Unread, names: str) -> None:
    """By its declaration; a new one is written here on purpose."""
    assert sorted(n for n, kind in METHODS.items() if kind.unread is unread) == names.split()
