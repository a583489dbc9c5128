"""Jobs that ended lately are what the database says of them, and there are never many."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from gpusched_client.terms import JobId
from gpusched_client.wire.submit_messages import JobRequest, SubmitRequest
from gpuschedd.api.recent import ENDS_KEPT_MAX, ENDS_KEPT_S, RecentEnds
from gpuschedd.core.job import Job
from gpuschedd.jobs import submit as jobs_submit
from gpuschedd.jobs.controller import Change, Committed
from gpuschedd.store.history import History
from tests.sim.harness import Host

HOUR_S = 3600.0


def committed(*jobs: Job) -> Committed:
    return Committed(tuple(Change(None, job) for job in jobs), ())


async def some_ended(host: Host) -> RecentEnds:
    """Four jobs, run to their ends."""
    recent = RecentEnds()
    host.controller.on_commit.append(recent.after_commit)
    one = JobRequest(argv=(b"true",), cwd=b"/", environment={}, gpus=1, time_limit_s=60)
    wanted, owner = SubmitRequest(jobs=(one,) * 4), host.caller(1001)
    await host.ask(lambda batch: jobs_submit.submit(batch, owner, wanted, None))
    assert not recent.jobs
    for _ in range(4):
        await host.pass_time(HOUR_S)
    return recent


def test_an_end_in_memory_is_the_one_on_record(tmp_path: Path) -> None:
    host = Host(tmp_path, 1)
    recent = asyncio.run(some_ended(host))
    with closing(History(host.store.path)) as history:
        on_record, _ = history.jobs()
    assert recent.jobs
    assert [recent.jobs[job.job_id] for job in on_record if job.job_id in recent.jobs] == [
        job for job in on_record if job.job_id in recent.jobs
    ]
    host.controller.close()


def test_ends_are_forgotten_by_age_and_by_number(tmp_path: Path) -> None:
    host = Host(tmp_path, 1)
    ended = next(iter(asyncio.run(some_ended(host)).jobs.values()))
    host.controller.close()
    recent = RecentEnds()

    def end(number: int, at_s: float) -> None:
        recent.after_commit(committed(replace(ended, job_id=JobId(number), ended_at_s=at_s)))

    end(1, 0.0)
    end(2, ENDS_KEPT_S)
    assert list(recent.jobs) == [1, 2]
    end(3, ENDS_KEPT_S + 1)
    assert list(recent.jobs) == [2, 3]
    for number in range(4, 4 + ENDS_KEPT_MAX):
        end(number, ENDS_KEPT_S + 1)
    assert len(recent.jobs) == ENDS_KEPT_MAX
    assert next(iter(recent.jobs)) == 4
