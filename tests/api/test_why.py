"""Why a job was placed before others: on record at its start, told to whoever asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpusched_client.errors import NotFound
from gpusched_client.terms import EventKind, JobId
from gpusched_client.wire.job_messages import WhyRequest, WhyResult
from gpusched_client.wire.limits import NICE_MIN
from gpusched_client.wire.submit_messages import JobRequest, SubmitRequest
from gpuschedd.api.methods.why import why
from gpuschedd.api.readers import FairReader
from gpuschedd.api.registry import Call
from gpuschedd.jobs import submit as jobs_submit
from gpuschedd.jobs import update
from gpuschedd.jobs.batch import Batch
from gpuschedd.jobs.principal import Principal
from gpuschedd.store.history import History
from tests.sim.harness import Host, services_of

ALICE, BOB = 1001, 1002
CAROL = Principal(1003, "carol", 1, is_admin=True)


@asynccontextmanager
async def _host(place: Path) -> AsyncIterator[Host]:
    host = Host(place, 1)
    try:
        yield host
    finally:
        await host.controller.stop()
        host.controller.close()


async def _submit(host: Host, uid: int, gpus: int, limit_s: int) -> JobId:
    wanted = JobRequest(
        argv=(b"true",), cwd=b"/", environment={}, gpus=gpus, time_limit_s=limit_s, name="secret"
    )
    request = SubmitRequest(jobs=(wanted,))
    caller = host.caller(uid)
    made = await host.ask(lambda batch: jobs_submit.submit(batch, caller, request, None))
    return JobId(made.job_ids[0])


async def _ask(host: Host, who: Principal, job_id: int) -> WhyResult:
    reader = FairReader(History(host.store.path))
    try:
        connection: Any = None
        call = Call(connection, who, services_of(host, reader=reader))
        answer: Any = await why(call, WhyRequest(job_id))
        return WhyResult.from_wire(answer.to_wire())
    finally:
        reader.close()


def test_the_passed_jobs_owner_hears_why_and_where_all_stood(tmp_path: Path) -> None:
    async def play() -> None:
        async with _host(tmp_path) as host:
            first = await _submit(host, ALICE, 3, 600)
            head = await _submit(host, ALICE, 4, 600)
            gap = await _submit(host, BOB, 1, 60)
            alice, bob = host.caller(ALICE), host.caller(BOB)
            told = await _ask(host, bob, first)
            assert (told.rule, told.rank, told.head) == ("first", 1, None)
            assert [ranked.job_id for ranked in told.first] == [first]
            told = await _ask(host, alice, gap)
            assert (told.job_id, told.rule, told.head, told.guessed) == (gap, "gap", head, False)
            assert told.gpu_indices == (3,)
            promise = host.controller.state.promise
            assert promise is not None
            assert told.head_start_s == host.controller.clock.to_wall_s(promise.start_by_s)
            ranks = {ranked.job_id: ranked.priority for ranked in told.first}
            assert told.rank == 2
            assert set(ranks) == {head, gap}
            with pytest.raises(NotFound, match=f"gq {head}"):
                await _ask(host, alice, head)

    asyncio.run(play())


def test_who_put_a_job_first_is_named_unless_the_host_is_private(tmp_path: Path) -> None:
    async def play() -> None:
        async with _host(tmp_path) as host:
            running = await _submit(host, ALICE, 4, 600)
            await _submit(host, ALICE, 4, 600)
            moved = await _submit(host, BOB, 4, 600)
            await host.ask(lambda batch: update.top(batch, CAROL, moved))
            await host.pass_time(700.0)
            state = host.controller.state
            assert running not in state.jobs
            told = await _ask(host, host.caller(ALICE), moved)
            assert (told.put_first_by, told.nice) == ("carol", NICE_MIN)
            state.config = replace(state.config, private=True)
            told = await _ask(host, host.caller(ALICE), moved)
            assert told.put_first_by is None
            assert "secret" not in str(told.to_wire())

    asyncio.run(play())


def test_a_start_is_found_behind_any_number_of_later_changes(tmp_path: Path) -> None:
    """More than a job's view shows, before its start and after it."""

    def change(job_id: JobId, times: int) -> Callable[[Batch], None]:
        def emit(batch: Batch) -> None:
            for _ in range(times):
                batch.emit(EventKind.JOB_UPDATED, batch.job(job_id), changed=["name"], by="bob")

        return emit

    async def play() -> None:
        async with _host(tmp_path) as host:
            await _submit(host, ALICE, 4, 600)
            moved = await _submit(host, BOB, 4, 600)
            await host.ask(lambda batch: update.top(batch, CAROL, moved))
            await host.ask(change(moved, 150))
            await host.pass_time(700.0)
            await host.ask(change(moved, 150))
            told = await _ask(host, host.caller(ALICE), moved)
            assert (told.rule, told.rank, told.put_first_by) == ("promised", 1, "carol")

    asyncio.run(play())


def test_jobs_passed_over_since_they_are_over_a_limit_are_counted(tmp_path: Path) -> None:
    async def play() -> None:
        async with _host(tmp_path) as host:
            host.reload("limits.max_gpus=2")
            await _submit(host, ALICE, 2, 600)
            over = await _submit(host, ALICE, 1, 600)
            later = await _submit(host, BOB, 2, 600)
            told = await _ask(host, host.caller(ALICE), later)
            assert (told.rule, told.rank, told.over_limits) == ("first", 2, 1)
            assert [ranked.job_id for ranked in told.first] == [over, later]

    asyncio.run(play())
