"""What one reply says of many jobs was true at one instant."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gpusched_client.terms import JobState
from gpusched_client.wire.job_messages import JobsRequest, QueueRequest
from gpusched_client.wire.submit_messages import JobRequest, SubmitRequest
from gpuschedd.api.limits import VIEWS_AT_ONCE, RequestBudget
from gpuschedd.api.methods.jobs import jobs
from gpuschedd.api.methods.queue import queue
from gpuschedd.api.readers import FairReader
from gpuschedd.api.registry import Services
from gpuschedd.jobs import submit as jobs_submit
from gpuschedd.store.history import History
from tests.sim.harness import Host, call_of, services_of

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
    live = [job for job in reply.jobs if not job.state.is_final]
    holders = Counter(uuid for job in live for uuid in job.gpu_uuids or ())
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
    assert {job.state for job in reply.jobs} == {JobState.PENDING}
    await _close(host, services)
