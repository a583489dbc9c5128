"""A command that names many jobs is done some at a time: others come in between, order stays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuschedd.api import registry
from gpuschedd.api.limits import Turns
from gpuschedd.api.registry import Call
from gpuschedd.jobs.batch import Batch
from tests.sim.harness import Host, call_of, services_of

SOME = 10


@pytest.fixture(autouse=True)
def _some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "CHANGED_AT_ONCE", SOME)


def _run(place: Path, test: Callable[[Host, Call, Call], Awaitable[None]]) -> None:
    async def run() -> None:
        host = Host(place, 1)
        services = services_of(host, changes=Turns(SOME))
        none: Any = None
        looping = asyncio.ensure_future(host.controller.run())
        try:
            await test(host, call_of(host, services), Call(none, host.caller(1002), services))
        finally:
            await host.controller.stop()
            await looping
            services.planner.close()
            host.controller.close()

    asyncio.run(run())


def test_each_job_has_its_outcome_in_the_order_in_which_it_was_named(tmp_path: Path) -> None:
    seen: list[Sequence[int]] = []

    def evaluate(_batch: Batch, job_ids: Sequence[int]) -> list[str]:
        seen.append(job_ids)
        return [f"did {job_id}" for job_id in job_ids]

    async def test(_host: Host, call: Call, _other: Call) -> None:
        named = [*range(25, 0, -1), 25, 3, 3]
        assert await call.change_each(named, evaluate) == tuple(f"did {n}" for n in named)

    _run(tmp_path, test)
    assert [len(some) for some in seen] == [10, 10, 5]


def test_the_commands_of_others_come_in_between_and_the_user_s_own_behind(tmp_path: Path) -> None:
    order: list[str] = []

    def evaluate(_batch: Batch, job_ids: Sequence[int]) -> list[None]:
        order.append(f"hers {job_ids[0]}")
        return [None] * len(job_ids)

    async def test(_host: Host, call: Call, other: Call) -> None:
        hers = asyncio.ensure_future(call.change_each(range(30), evaluate))
        await asyncio.sleep(0)
        behind = asyncio.ensure_future(call.change(lambda _: order.append("hers after"), 1))
        his = asyncio.ensure_future(other.change(lambda _: order.append("his"), 1))
        await asyncio.gather(hers, behind, his)

    _run(tmp_path, test)
    assert order[-1] == "hers after"
    assert order.index("his") < order.index("hers 10")
