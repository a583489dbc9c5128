"""What one reply says of many jobs was true at one instant."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from gpusched_client.terms import JobState
from gpusched_client.wire.job_messages import (
    CancelRequest,
    JobQuery,
    JobsRequest,
    QueueRequest,
    WaitRequest,
)
from gpusched_client.wire.submit_messages import JobRequest, SubmitRequest
from gpuschedd.api.limits import VIEWS_AT_ONCE, RequestBudget
from gpuschedd.api.methods.jobs import job, jobs
from gpuschedd.api.methods.queue import queue
from gpuschedd.api.methods.wait_watch import wait
from gpuschedd.api.readers import FairReader
from gpuschedd.api.registry import Call, Services
from gpuschedd.jobs import cancel as jobs_cancel
from gpuschedd.jobs import submit as jobs_submit
from gpuschedd.jobs.batch import Batch
from gpuschedd.store.history import History
from gpuschedd.store.records import Changes
from tests.sim.harness import Host, call_of, services_of

T = TypeVar("T")

HELD = SubmitRequest(jobs=(JobRequest(argv=(b"true",), cwd=b"/", environment={}, hold=True),))
JOBS = 3 * VIEWS_AT_ONCE
RESTS_S = [30.0, 120.0, 150.0]


class LongRests(RequestBudget):
    """In each of its pauses the host goes on for a while."""

    def __init__(self, host: Host, rest_s: float) -> None:
        super().__init__(1e6, is_shared=False)
        self.host, self.rest_s = host, rest_s

    async def pause(self, uid: int) -> None:
        del uid
        await self.host.pass_time(self.rest_s)


async def _services(host: Host, rest_s: float) -> Services:
    owner = host.caller(1001)
    whole = JobRequest(argv=(b"true",), cwd=b"/", environment={}, gpus=1, time_limit_s=60)
    wanted = SubmitRequest(jobs=(whole,) * JOBS)
    await host.ask(lambda batch: jobs_submit.submit(batch, owner, wanted, None))
    await host.pass_time(5.0)
    history = History(host.store.path)
    return services_of(host, reader=FairReader(history), budget=LongRests(host, rest_s))


async def _close(host: Host, services: Services) -> None:
    services.reader.close()
    await host.controller.stop()
    host.controller.close()


@pytest.mark.parametrize("rest_s", RESTS_S)
def test_no_list_shows_two_whole_jobs_on_one_gpu(tmp_path: Path, rest_s: float) -> None:
    """Jobs that start while a long list is made do not get into it beside those they follow."""
    asyncio.run(_a_list_of_holders(Host(tmp_path, 1), rest_s))


async def _a_list_of_holders(host: Host, rest_s: float) -> None:
    services = await _services(host, rest_s)
    reply: Any = await jobs(call_of(host, services), JobsRequest())
    live = [shown for shown in reply.jobs if not shown.state.is_final]
    holders = Counter(uuid for shown in live for uuid in shown.gpu_uuids or ())
    assert len(reply.jobs) == JOBS
    assert len(holders) == len(host.gpus)
    assert set(holders.values()) == {1}
    await _close(host, services)


@pytest.mark.parametrize("rest_s", RESTS_S)
def test_the_queue_shows_waiting_jobs_only(tmp_path: Path, rest_s: float) -> None:
    """Though some of them start while it is read."""
    asyncio.run(_a_list_of_waiting(Host(tmp_path, 1), rest_s))


async def _a_list_of_waiting(host: Host, rest_s: float) -> None:
    services = await _services(host, rest_s)
    reply: Any = await queue(call_of(host, services), QueueRequest())
    assert {shown.state for shown in reply.jobs} == {JobState.PENDING}
    await _close(host, services)


class HeldStore:
    """The real store; a commit is durable, and its writer hears of it when it is let go."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.is_durable, self.may_go = threading.Event(), threading.Event()

    def commit(self, changes: Changes) -> None:
        self._store.commit(changes)
        self.is_durable.set()
        assert self.may_go.wait(30)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class NotingReader(FairReader):
    """Says when the first question to the database is answered."""

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.has_answered = asyncio.Event()

    async def ask(self, account: int, work: Callable[[History], T]) -> T:
        answer = await super().ask(account, work)
        self.has_answered.set()
        return answer


@pytest.mark.parametrize("asks_for_one", [False, True])
def test_who_hears_of_an_end_hears_of_no_live_job_afterwards(
    tmp_path: Path, asks_for_one: bool
) -> None:
    """The database has the end before the daemon's own memory has it."""
    asyncio.run(_an_end_that_is_durable_alone(Host(tmp_path, 1), asks_for_one))


async def _an_end_that_is_durable_alone(host: Host, asks_for_one: bool) -> None:
    owner, state = host.caller(1001), host.controller.state
    made = await host.ask(lambda batch: jobs_submit.submit(batch, owner, HELD, None))
    (job_id,) = made.job_ids
    cancel = CancelRequest(job_ids=(job_id,))
    async with _durable_alone(host, lambda batch: jobs_cancel.cancel(batch, owner, cancel)) as (
        call,
        let_go,
    ):
        assert job_id in state.jobs
        query, page = JobQuery(job_id), JobsRequest(ids=(job_id,))
        asking: asyncio.Future[Any] = asyncio.ensure_future(
            job(call, query) if asks_for_one else jobs(call, page)
        )
        was_live: list[bool] = []
        asking.add_done_callback(lambda _: was_live.append(job_id in state.jobs))
        await let_go()
        reply = await asking
    (shown,) = [reply] if asks_for_one else reply.jobs
    assert (shown.state, was_live) == (JobState.CANCELLED, [False])


def test_who_waits_for_a_job_that_is_hardly_there_waits_for_its_end(tmp_path: Path) -> None:
    """A new job, too, is in the database first: one that is not in memory was taken for ended."""
    asyncio.run(_a_job_that_is_durable_alone(Host(tmp_path, 1)))


async def _a_job_that_is_durable_alone(host: Host) -> None:
    owner, job_id = host.caller(1001), host.controller.state.next_job_id
    async with _durable_alone(host, lambda batch: jobs_submit.submit(batch, owner, HELD, None)) as (
        call,
        let_go,
    ):
        assert job_id not in host.controller.state.jobs
        asking: asyncio.Future[Any] = asyncio.ensure_future(
            wait(call, WaitRequest(job_ids=(job_id,), timeout_s=0))
        )
        await let_go()
        reply = await asking
    (shown,) = reply.jobs
    assert (shown.state, reply.timed_out) == (JobState.PENDING, True)


@asynccontextmanager
async def _durable_alone(
    host: Host, evaluate: Callable[[Any], Any]
) -> AsyncIterator[tuple[Call, Callable[[], Awaitable[None]]]]:
    """A command whose commit is in the database, and in memory once it is let go: that waits until
    the database has been asked, so that an answer that waits for nothing is there before.
    """
    reader = NotingReader(History(host.store.path))
    services = services_of(host, reader=reader, gpu_readings=SimpleNamespace(uses_now=lambda _: ()))
    held: Any = HeldStore(host.controller._store)
    host.controller._store = held
    asking = asyncio.ensure_future(host.controller.call(evaluate))
    await asyncio.sleep(0)
    stepping = asyncio.ensure_future(host.controller.step())
    await asyncio.to_thread(held.is_durable.wait, 30)

    async def let_go() -> None:
        await reader.has_answered.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        held.may_go.set()

    try:
        yield call_of(host, services), let_go
    finally:
        held.may_go.set()
        await asyncio.gather(asking, stepping)
        await _close(host, services)


def _submitted(caller: Any, wanted: SubmitRequest, batch: Batch) -> Any:
    return jobs_submit.submit(batch, caller, wanted, None)


def test_the_queue_of_some_keeps_their_places_among_all(tmp_path: Path) -> None:
    asyncio.run(_the_queue_of_some(Host(tmp_path, 1)))


async def _the_queue_of_some(host: Host) -> None:
    services = await _services(host, 0.0)
    other = host.caller(1002)
    named = JobRequest(argv=(b"true",), cwd=b"/", environment={}, name="mine", time_limit_s=60)
    made: list[int] = []
    for hold in (False, True):
        wanted = SubmitRequest(jobs=(named, replace(named, name="else", hold=hold)))
        result = await host.ask(partial(_submitted, other, wanted))
        made += result.job_ids
    call = call_of(host, services)
    everybody: Any = await queue(call, QueueRequest())
    place_of = {shown.job_id: shown.queue_position for shown in everybody.jobs}
    assert sorted(place_of.values()) == list(range(1, everybody.total + 1))
    theirs: Any = await queue(call, QueueRequest(users=("1002",)))
    assert {shown.job_id for shown in theirs.jobs} == set(made)
    assert theirs.total == len(made)
    assert {job.job_id: job.queue_position for job in theirs.jobs}.items() <= place_of.items()
    first, second = [job.job_id for job in theirs.jobs][:2]
    page: Any = await queue(call, QueueRequest(users=("1002",), after=first, limit=1))
    assert [job.job_id for job in page.jobs] == [second]
    mine: Any = await queue(call, QueueRequest(users=("1002",), name="mine"))
    assert {job.job_id for job in mine.jobs} == {made[0], made[2]}
    held: Any = await queue(call, QueueRequest(name="else", after=made[1]))
    assert [job.job_id for job in held.jobs] == [made[3]]
    assert (await queue(call, QueueRequest(users=("nobody",)))).jobs == ()  # type: ignore[attr-defined]
    await _close(host, services)
