"""What one change may cost: ids that are named again, many extensions, `top` of a long queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpusched_client.terms import JobId
from gpusched_client.wire.job_messages import CancelRequest, Outcome, UpdateRequest
from gpusched_client.wire.submit_messages import JobRequest, SubmitRequest
from gpuschedd.core import forecast
from gpuschedd.core.model import Promise
from gpuschedd.jobs import cancel as jobs_cancel
from gpuschedd.jobs import submit as jobs_submit
from gpuschedd.jobs import update as jobs_update
from tests.sim.harness import Host

WHOLE = JobRequest(argv=(b"true",), cwd=b"/", environment={}, gpus=1, time_limit_s=3_600)


def on_host(place: Path, story: Callable[[Host], Awaitable[None]]) -> None:
    """The story on one daemon, which ends well."""

    async def told() -> None:
        host = Host(place, 1)
        await story(host)
        await host.controller.stop()
        host.controller.close()

    asyncio.run(told())


async def submitted(host: Host, *jobs: JobRequest) -> list[JobId]:
    owner, wanted = host.caller(1001), SubmitRequest(jobs=jobs)
    made = await host.ask(lambda batch: jobs_submit.submit(batch, owner, wanted, None))
    return [JobId(job_id) for job_id in made.job_ids]


async def topped(host: Host, job_id: JobId) -> Outcome:
    owner = host.caller(1001)
    outcome: Outcome = await host.ask(lambda batch: jobs_update.top(batch, owner, job_id))
    return outcome


def waiting_ids(host: Host) -> list[JobId]:
    return [job.job_id for queue in host.controller.state.queues.view().gpu for job in queue.jobs]


def test_an_id_that_is_named_a_thousand_times_is_judged_once(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        ids = await submitted(host, *[WHOLE] * 6)
        named = (ids[5], ids[4], *[ids[5]] * 998)
        request = UpdateRequest(job_ids=named, nice=3)
        owner, told = host.caller(1001), list[str]()
        host.controller.on_commit.append(
            lambda committed: told.extend(event.kind for _, event in committed.events)
        )
        outcomes = await host.ask(lambda batch: jobs_update.update(batch, owner, request, None))
        assert [entry.job_id for entry in outcomes] == list(named)
        assert {entry.text for entry in outcomes} == {"nice 3"}
        assert told.count("job_updated") == 2
        ended = CancelRequest(job_ids=named)
        outcomes = await host.ask(lambda batch: jobs_cancel.cancel(batch, owner, ended))
        assert {entry.text for entry in outcomes} == {"cancelled"}

    on_host(tmp_path, story)


def test_a_new_name_is_what_runs_are_told_apart_by_and_costs_no_age(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        ids = await submitted(host, *[WHOLE] * 5)
        owner, queues = host.caller(1001), host.controller.state.queues
        before = queues.get(ids[4])
        assert before is not None
        assert before.length_key == "true"
        request = UpdateRequest(job_ids=(ids[0], ids[4]), name="sweep-17")
        await host.ask(lambda batch: jobs_update.update(batch, owner, request, None))
        assert queues.get(ids[4]) == replace(before, length_key="sweep-")
        assert host.controller.state.jobs[ids[0]].length_key == "sweep-"

    on_host(tmp_path, story)


def test_the_planner_is_asked_a_few_times_in_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nothing is promised never; else as often as EXTENSIONS_MAX, and the rest is told so."""
    asked: list[JobId] = []

    def allowed(_snapshot: object, _policy: object, job_id: JobId, limit_s: float) -> float:
        asked.append(job_id)
        return limit_s

    monkeypatch.setattr(forecast, "raise_limit_allowed", allowed)
    monkeypatch.setattr(jobs_update, "EXTENSIONS_MAX", 2)

    async def story(host: Host) -> None:
        ids = await submitted(host, *[WHOLE] * 4)
        await host.settle()
        request = UpdateRequest(job_ids=tuple(ids), time_limit_s=7_200)
        owner, snapshot = host.caller(1001), host.controller.snapshots.take()
        assert len(snapshot.running) == 4

        def extend(promise: Promise | None, wanted: UpdateRequest) -> Callable[[Any], Any]:
            seen = replace(snapshot, promise=promise)
            return lambda batch: jobs_update.update(batch, owner, wanted, seen)

        outcomes = await host.ask(extend(None, request))
        assert [entry.code for entry in outcomes] == [None] * 4
        assert asked == []
        outcomes = await host.ask(
            extend(Promise(JobId(99), 0.0, 1e9), replace(request, time_limit_s=9_000))
        )
        assert [entry.code for entry in outcomes] == [None, None, "limit", "limit"]
        assert "another" in outcomes[3].text
        assert len(asked) == 2

    on_host(tmp_path, story)


def test_top_in_a_loop_changes_the_place_of_one_job_each_time(tmp_path: Path) -> None:
    """However many others there are: none of their rows is written."""

    async def story(host: Host) -> None:
        ids = await submitted(host, *[WHOLE] * 60)
        await host.settle()
        jobs = host.controller.state.jobs
        for job_id in (ids[40], ids[50], ids[40]):
            before = dict(jobs)
            outcome = await topped(host, job_id)
            assert outcome.text == "first of yours"
            assert waiting_ids(host)[0] == job_id
            assert all(jobs[other] == before[other] for other in ids if other in jobs)
        assert waiting_ids(host)[1] == ids[50]

    on_host(tmp_path, story)


def test_those_of_a_smaller_nice_value_give_way_up_to_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_update, "GIVING_WAY_MAX", 10)

    async def story(host: Host) -> None:
        ids = await submitted(host, *[WHOLE] * 12, replace(WHOLE, nice=5))
        await host.settle()
        jobs = host.controller.state.jobs
        outcome = await topped(host, ids[12])
        assert outcome.text == "first of yours; 8 others have nice 5 now"
        assert waiting_ids(host)[0] == ids[12]
        assert {jobs[job_id].nice for job_id in ids[4:]} == {5}
        more = await submitted(host, *[WHOLE] * 11)
        outcome = await topped(host, ids[12])
        assert outcome.code == "limit"
        assert "11 other jobs of yours" in outcome.text
        assert jobs[more[0]].nice == 0

    on_host(tmp_path, story)


def test_a_job_that_is_held_is_not_put_first(tmp_path: Path) -> None:
    """It would lose its place when it is released."""

    async def story(host: Host) -> None:
        (held,) = await submitted(host, replace(WHOLE, hold=True))
        outcome = await topped(host, held)
        assert outcome.code == "conflict"
        assert "waits for more than its turn" in outcome.text

    on_host(tmp_path, story)
