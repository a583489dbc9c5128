"""When a database is looked through beside the service: its pace, by a virtual clock."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusched_client.terms import GpuUuid, JobId, JobState
from gpuschedd.core.job import Gone, Job, Placed, advance
from gpuschedd.jobs import upkeep
from gpuschedd.jobs.upkeep import Upkeep
from gpuschedd.store.checks import looked_at
from gpuschedd.store.database import StoreDamaged
from gpuschedd.store.records import Changes, GpuUse
from gpuschedd.store.writer import Store
from tests.sim.harness import Host
from tests.store.test_database import a_job, a_payload

HOUR_S = 3_600.0
SLICE_S = 0.05  # one of 100 jobs with their requests, on a machine that has others to serve
MANY = 1_000_000


class Looked(Exception):
    """All of it was."""


class Pace:
    """Time that passes in slices and in the rests between them, and in nothing else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.meanwhile: Callable[[], None] = lambda: None  # in the rest before the first look
        beside = SimpleNamespace(sleep=self._sleep, get_running_loop=asyncio.get_running_loop)
        monkeypatch.setattr(upkeep, "asyncio", beside)
        monkeypatch.setattr(upkeep, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(upkeep, "looked_at", self._looked_at)

    async def _sleep(self, seconds: float) -> None:
        if seconds >= HOUR_S:
            raise Looked
        self.now_s += seconds
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()

    def _looked_at(self, look: Callable[[], Any]) -> Any:
        if getattr(look, "func", None) is not next:  # which only says what comes next
            self.now_s += SLICE_S
        return looked_at(look)


def ended(number: int) -> Job:
    placed = advance(a_job(number), Placed((), False, 1.0, 10.0, 4.0))
    return advance(placed, Gone(JobState.COMPLETED, 5.0, code=0))


def fill(place: Path, count: int) -> None:
    """Jobs that have ended, each with its request and what it used of a GPU."""
    place.mkdir(exist_ok=True)
    store = Store.open(place)
    new = {JobId(number): a_job(number) for number in range(1, count + 1)}
    store.commit(Changes(jobs=new, payloads=dict.fromkeys(new, a_payload())))
    over = Changes(jobs={number: ended(number) for number in new})
    over.gpu_index_of[GpuUuid("GPU-a")] = 0
    over.gpu_uses += [GpuUse(number, 1, GpuUuid("GPU-a"), 7) for number in new]
    store.commit(over)
    store.close()


def looked_through_s(place: Path, pace: Pace, found: type[Exception] = Looked) -> float:
    """When the first look of a daemon is over, from its start, and with what."""

    async def live() -> None:
        host = Host(place, 1)
        running = asyncio.ensure_future(host.controller.run())
        looking = Upkeep(host.controller, host.store.path)
        try:
            await looking.check_regularly()
        finally:
            await host.controller.stop()
            looking.close()
            results = await asyncio.gather(running, return_exceptions=True)
            host.controller.close()
        assert isinstance(results[0], found)

    began_s = pace.now_s
    if found is Looked:
        with pytest.raises(Looked):
            asyncio.run(live())
    else:
        asyncio.run(live())
    return pace.now_s - began_s


def test_a_million_jobs_are_looked_through_within_the_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what a thousand take beyond none: the time grows with the rows, slice by slice."""
    pace = Pace(monkeypatch)
    fill(tmp_path / "empty", 0)
    empty_s = looked_through_s(tmp_path / "empty", pace)
    fill(tmp_path / "some", 1_000)
    some_s = looked_through_s(tmp_path / "some", pace)
    slices = 2 * 1_000 / 100  # of the jobs, and of what they used
    assert some_s - empty_s >= slices * SLICE_S
    assert empty_s + (some_s - empty_s) * MANY / 1_000 <= HOUR_S


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE job SET exit_code = 7 WHERE job_id = 1000",
        "UPDATE payload SET content = x'80' WHERE job_id = 500",
        "UPDATE gpu_use SET peak_bytes = 8 WHERE job_id = 1000",
    ],
)
def test_damage_anywhere_is_found_by_the_first_look_and_ends_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    """It began by itself, soon after the start; what is in the last slice is found as well."""
    pace = Pace(monkeypatch)
    fill(tmp_path, 1_000)

    def damage() -> None:
        with closing(sqlite3.connect(tmp_path / "gpuschedd.sqlite3")) as db, db:
            assert db.execute(statement).rowcount == 1

    pace.meanwhile = damage
    assert looked_through_s(tmp_path, pace, StoreDamaged) <= HOUR_S
