"""Lists of jobs out of the database: what they hold, and that they read no more than that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpusched_client.terms import JobId, JobState
from gpuschedd.core.job import Gone, Job, Placed, advance
from gpuschedd.store.history import History
from gpuschedd.store.records import Changes
from gpuschedd.store.writer import Store
from tests.store.test_database import a_job

STATES = ("PENDING", "CONFIGURING", "COMPLETED", "FAILED")
SINCE_S = 1_767_225_610.0


def _job(number: int) -> Job:
    """Of every state, of three users and two names; some ended before SINCE_S."""
    job = replace(
        a_job(number),
        uid=1000 + number % 3,
        user=f"user{number % 3}",
        name=f"name{number % 2}",
    )
    state = STATES[number % 4]
    if state == "PENDING":
        return job
    placed = advance(job, Placed((), False, 1.0, 10.0, 60.0))
    if state == "CONFIGURING":
        return placed
    return replace(
        advance(placed, Gone(JobState(state), 5.0, code=number % 2)),
        ended_at_s=SINCE_S + number - 20,
    )


JOBS = {JobId(number): _job(number) for number in range(1, 41)}


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    store = Store.open(tmp_path)
    store.commit(Changes(jobs=JOBS))
    with closing(History(store.path)) as opened:
        yield opened
    store.close()


def _passes(job: Job, asked: dict[str, Any]) -> bool:
    """The same filters, without SQL."""
    since_s = asked.get("ended_since_s")
    return (
        ("ids" not in asked or job.job_id in asked["ids"])
        and ("uids" not in asked or job.uid in asked["uids"])
        and ("users" not in asked or job.user in asked["users"])
        and ("states" not in asked or job.state in asked["states"])
        and ("name" not in asked or job.name == asked["name"])
        and (since_s is None or not job.is_final or (job.ended_at_s or 0.0) >= since_s)
    )


@pytest.mark.parametrize("ids", [{}, {"ids": [JobId(n) for n in range(10, 30)]}])
@pytest.mark.parametrize("of", [{}, {"uids": [1000, 1002]}, {"users": ["user1"]}])
@pytest.mark.parametrize("name", [{}, {"name": "name1"}])
@pytest.mark.parametrize("since", [{}, {"ended_since_s": SINCE_S}])
@pytest.mark.parametrize(
    "states", [{}, {"states": ["PENDING"]}, {"states": ["FAILED", "CONFIGURING"]}, {"states": []}]
)
@pytest.mark.parametrize("before", [None, JobId(33)])
def test_filters_pass_the_same_jobs_whichever_index_is_taken(
    history: History,
    before: JobId | None,
    ids: dict[str, Any],
    of: dict[str, Any],
    name: dict[str, Any],
    since: dict[str, Any],
    states: dict[str, Any],
) -> None:
    asked = {**ids, **of, **name, **since, **states}
    passing = [job for job in JOBS.values() if _passes(job, asked)]
    page = [job for job in passing if before is None or job.job_id < before][-5:]
    jobs, total = history.jobs(**asked, before_id=before, limit=5)
    assert ([job.job_id for job in jobs], total) == ([job.job_id for job in page], len(passing))


@pytest.mark.parametrize(
    "asked",
    [
        {"ended_since_s": SINCE_S},
        {"ended_since_s": SINCE_S, "uids": [1000]},
        {"ended_since_s": SINCE_S, "users": ["user1"], "name": "name1"},
        {"ended_since_s": SINCE_S, "states": ["FAILED"]},
        {"states": ["PENDING"]},
        {"states": ["RUNNING", "CONFIGURING"], "uids": [1000], "before_id": JobId(30)},
    ],
)
def test_a_list_of_what_is_live_or_ended_lately_reads_nothing_else(
    history: History, asked: dict[str, Any]
) -> None:
    """However many jobs there were: a table of a million would be read by id, or by user."""
    statements: list[str] = []
    history._db.set_trace_callback(statements.append)
    history.jobs(**asked, limit=5)
    history._db.set_trace_callback(None)
    plan = [row["detail"] for row in history._db.execute(f"EXPLAIN QUERY PLAN {statements[0]}")]
    read = {step for step in plan if " job" in f" {step}" and step.startswith(("SCAN", "SEARCH"))}
    allowed = ("job_live (final=?", "job_ended (ended_at_s>?", "PRIMARY KEY (rowid=?")
    assert any("job_live" in step for step in read)
    assert all(any(way in step for way in allowed) for step in read if "(subquery" not in step)
