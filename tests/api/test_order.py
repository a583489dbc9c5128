"""Requests take effect in the order they came, however slowly others answer; watches that end."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from gpusched_client.errors import StorageError, Unavailable
from gpusched_client.terms import Mode
from gpuschedd.api import auth
from gpuschedd.api.auth import Authenticator, Peer
from gpuschedd.api.limits import Connections, RequestBudget, Turns
from gpuschedd.api.registry import Services
from gpuschedd.api.server import Server
from gpuschedd.api.service import Api
from gpuschedd.jobs.controller import Committed
from gpuschedd.store.records import Event
from gpuschedd.system.accounts import NameService
from tests.sim.harness import Host, services_of

PEER = Peer(os.getuid(), 0, os.getpid())


class Names:
    """A name service whose answers a test gives, in any order."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[None]] = []

    async def ask(self, question: Callable[[], Any]) -> Any:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked.append(answer)
        await answer
        return question()


@contextmanager
def authenticator(place: Path) -> Iterator[tuple[Authenticator, Names]]:
    host, names = Host(place, 1), Names()
    service: Any = names
    yield Authenticator(host.controller, service, Mode.USER, os.getuid()), names
    host.controller.close()


async def rounds(count: int) -> None:
    """So many rounds of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def _request(found: Authenticator, number: int, through: list[int]) -> None:
    await found.identify(PEER)
    through.append(number)


async def _asked_for_each(
    count: int, found: Authenticator, names: Names, through: list[int]
) -> list[asyncio.Future[None]]:
    """So many requests, for each of which the name service was asked."""
    tasks: list[asyncio.Future[None]] = []
    for number in range(count):
        tasks.append(asyncio.ensure_future(_request(found, number, through)))
        while len(names.asked) <= number or PEER.uid in found._callers:
            await asyncio.sleep(0)
    return tasks


def test_who_comes_as_the_answer_comes_is_not_before_those_who_waited_for_it(
    tmp_path: Path,
) -> None:
    """One request in each round of the loop, before, during and after the answer."""
    through: list[int] = []

    async def run() -> None:
        with authenticator(tmp_path) as (found, names):
            tasks = []
            for number in range(20):
                tasks.append(asyncio.ensure_future(_request(found, number, through)))
                if number == 5:
                    names.asked[0].set_result(None)
                await rounds(1)
            await asyncio.wait(tasks)
            assert len(names.asked) == 1

    asyncio.run(run())
    assert through == list(range(20))


def test_a_newer_answer_that_is_there_first_helps_nobody_past_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer is kept for seconds, and a slow one takes longer than that."""
    monkeypatch.setattr(auth, "CALLER_KEPT_S", 0.0)
    through: list[int] = []

    async def run() -> None:
        with authenticator(tmp_path) as (found, names):
            tasks = await _asked_for_each(3, found, names, through)
            for answer in reversed(names.asked):
                assert through == []
                answer.set_result(None)
                await rounds(5)
            await asyncio.wait(tasks)

    asyncio.run(run())
    assert through == [0, 1, 2]


def test_one_that_fails_or_gives_up_leaves_the_order_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "CALLER_KEPT_S", 0.0)
    through: list[int] = []

    async def run() -> None:
        with authenticator(tmp_path) as (found, names):
            tasks = await _asked_for_each(5, found, names, through)
            tasks[1].cancel()  # its connection is gone
            names.asked[2].set_exception(TimeoutError())
            for number in (4, 3):
                names.asked[number].set_result(None)
            await rounds(5)
            assert through == []
            names.asked[0].set_result(None)
            await asyncio.wait(tasks)
            assert tasks[1].cancelled()
            assert isinstance(tasks[2].exception(), Unavailable)
            assert found._last == {}

    asyncio.run(run())
    assert through == [0, 3, 4]


def test_whose_turn_has_come_is_before_who_comes_now() -> None:
    """Also in the round of the loop in which it does not go on yet."""
    order: list[int] = []

    async def work(turns: Turns, number: int, rows: int, ends: asyncio.Event) -> None:
        async with turns.of(1, rows):
            order.append(number)
            await ends.wait()

    async def run() -> None:
        turns, first_ends, others_end = Turns(rows_max=1_000), asyncio.Event(), asyncio.Event()
        tasks = [
            asyncio.ensure_future(work(turns, number, 600, ends))
            for number, ends in enumerate((first_ends, others_end))
        ]
        await rounds(2)
        first_ends.set()
        for number in range(2, 5):
            tasks.append(asyncio.ensure_future(work(turns, number, 100, others_end)))
        await rounds(5)
        assert order == [0, 1, 2, 3, 4]  # all of them: nobody waits for the end of the second
        others_end.set()
        await asyncio.wait(tasks)
        assert (turns._waiting, dict(turns._woken), dict(turns._under_way)) == ({}, {}, {})

    asyncio.run(run())


# --- over a socket ------------------------------------------------------------------------------


JOB = {"argv": ["true"], "cwd": "/", "environment": {}, "gpus": 0, "hold": True}


class Client:
    """One end of a connection; messages as they come."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._unpacker = msgpack.Unpacker()

    def ask(self, msgid: int, method: str, **params: Any) -> None:
        self.writer.write(msgpack.packb([0, msgid, method, [params]]))

    async def next(self) -> Any:
        """The next message; None at the end of the stream."""
        while True:
            for message in self._unpacker:
                return message
            data = await asyncio.wait_for(self.reader.read(65536), 30)
            if not data:
                return None
            self._unpacker.feed(data)


@asynccontextmanager
async def served(
    place: Path, names: Any, reader: Any = None
) -> AsyncIterator[tuple[Host, Services, Client]]:
    """A host, what its handlers use, and a connection to it."""
    host = Host(place, 1)
    who = Authenticator(host.controller, names, Mode.USER, os.getuid())
    services = services_of(host, auth=who, reader=reader)
    looping = asyncio.ensure_future(host.controller.run())
    host.controller.on_commit.append(services.subscriptions.after_commit)
    server = Server(Api(services), Connections(9, 99), RequestBudget(1_000.0, is_shared=False))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place / "s"))
        server.listen(listening)
        client = Client(*await asyncio.open_unix_connection(place / "s"))
        try:
            yield host, services, client
        finally:
            client.writer.close()
            await server.close()
            await host.controller.stop()
            await looping
            services.planner.close()
            host.controller.close()


def test_pipelined_requests_take_effect_in_order_over_a_slow_name_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a question of its own here, of which the last is answered first."""
    monkeypatch.setattr(auth, "CALLER_KEPT_S", 0.0)
    names = Names()

    async def run() -> list[int]:
        async with served(tmp_path, names) as (_host, services, client):
            for msgid in range(6):
                client.ask(msgid, "submit", jobs=[{**JOB, "name": f"job-{msgid}"}])
                while len(names.asked) <= msgid or PEER.uid in services.auth._callers:
                    await asyncio.sleep(0)
            for answer in reversed(names.asked):
                answer.set_result(None)
                await rounds(10)
            replies = dict([(await client.next())[1::2] for _ in range(6)])
            return [replies[msgid]["job_ids"][0] for msgid in range(6)]

    assert asyncio.run(run()) == [1, 2, 3, 4, 5, 6]


def test_a_watch_that_breaks_is_told_and_its_connection_closed(tmp_path: Path) -> None:
    """Else its client would wait for ever on a connection on which nothing comes any more."""
    names = NameService()

    async def run() -> list[Any]:
        async with served(tmp_path, names) as (host, _services, client):
            client.ask(1, "watch")
            heard = [await client.next()]
            broken = Event("job_held", 1.0, data={"cannot be": object()})
            host.controller.on_commit[-1](
                Committed((), ((host.controller.last_event_id + 1, broken),))
            )
            return [*heard, await client.next(), await client.next()]

    try:
        begun, told, end = asyncio.run(run())
    finally:
        names.close()
    assert begun[2] is None
    assert (told[1], told[2]["code"], told[3]) == (None, "internal", None)
    assert "watch" in told[2]["message"]
    assert end is None


def test_a_watch_that_could_not_begin_leaves_room_for_another(tmp_path: Path) -> None:
    """Of the same connection, which is not taken for a silent watcher's either."""
    names = NameService()

    class Broken:
        """The reading connections, on a disk that is not there."""

        async def ask(self, *_: object) -> object:
            raise StorageError("cannot be read")

    async def run() -> tuple[Any, Any]:
        async with served(tmp_path, names, Broken()) as (host, services, client):
            host.controller.post(lambda batch: batch.events.append(Event("x", 1.0)))
            await host.controller.call(lambda _: None)
            client.ask(1, "watch", since=0)
            refused = await client.next()
            assert services.subscriptions.watching == 0
            client.ask(2, "watch")
            return refused, await client.next()

    try:
        refused, begun = asyncio.run(run())
    finally:
        names.close()
    assert (refused[1], refused[2]["code"]) == (1, "storage")
    assert (begun[1], begun[2]) == (2, None)
