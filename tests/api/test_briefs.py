"""Lists read the requests of live jobs once; what is over is asked of the database."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusched_client.terms import JobId, JobState
from gpuschedd.api import briefs as briefs_module
from gpuschedd.api.briefs import Briefs
from gpuschedd.core.job import Job
from gpuschedd.store.history import History
from gpuschedd.store.records import Brief, Changes, brief_of
from gpuschedd.store.writer import Store
from tests.store.test_database import a_job, a_payload


class Counting(History):
    """The real connection; `asked` has what it was asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: list[list[JobId]] = []

    def briefs(self, job_ids: Iterable[JobId]) -> dict[JobId, Brief]:
        self.asked.append(list(job_ids))
        return super().briefs(self.asked[-1])


def _written(place: Path, jobs: int) -> tuple[Store, dict[JobId, Job]]:
    store = Store.open(place)
    live = {JobId(n): a_job(n) for n in range(1, jobs + 1)}
    payloads = {job_id: replace(a_payload(), cwd=b"/%d" % job_id) for job_id in live}
    store.commit(Changes(jobs=dict(live), payloads=payloads))
    return store, live


def _over(live: dict[JobId, Job]) -> Briefs:
    controller: Any = SimpleNamespace(state=SimpleNamespace(jobs=live))
    return Briefs(controller)


def test_a_live_job_is_read_once_and_one_that_is_over_each_time(tmp_path: Path) -> None:
    store, live = _written(tmp_path, 3)
    briefs = _over(live)
    with closing(Counting(store.path)) as history:
        found = briefs.read(history, [JobId(1), JobId(2)])
        assert {job_id: brief.cwd for job_id, brief in found.items()} == {1: b"/1", 2: b"/2"}
        assert found[JobId(1)] == brief_of(replace(a_payload(), cwd=b"/1"))
        briefs.keep(found)
        assert briefs.read(history, list(live)) == history.briefs(live)
        assert history.asked == [[1, 2], [3], [1, 2, 3]]
        del live[JobId(1)]
        assert briefs.known([JobId(1), JobId(2)]) == {2: found[JobId(2)]}
        briefs.read(history, [JobId(1), JobId(2)])
        assert history.asked[3:] == [[1]]
    store.close()


def test_the_oldest_go_when_there_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(briefs_module, "BRIEFS_KEPT_MAX", 2)
    store, live = _written(tmp_path, 3)
    briefs = _over(live)
    with closing(History(store.path)) as history:
        briefs.keep(history.briefs([JobId(1)]))
        briefs.keep(history.briefs([JobId(2), JobId(3)]))
    assert sorted(briefs.known(live)) == [2, 3]
    store.close()


def test_live_jobs_of_a_page_come_from_memory_unless_the_row_is_newer(tmp_path: Path) -> None:
    """A row in another state was committed a moment ago: what is in memory would not fit."""
    store, live = _written(tmp_path, 3)
    named = {job_id: replace(job, name="in memory") for job_id, job in live.items()}
    named[JobId(2)] = replace(named[JobId(2)], state=JobState.CONFIGURING)
    del named[JobId(3)]
    with closing(History(store.path)) as history:
        jobs, total = history.jobs(states=["PENDING"], limit=5, known=named)
        assert [job.name for job in jobs] == ["in memory", "train", "train"]
        assert (jobs[1:], total) == ([live[JobId(2)], live[JobId(3)]], 3)
        page, total = history.jobs(limit=1, before_id=JobId(2), known=named)
        assert ([job.job_id for job in page], total) == ([1], 3)
        assert history.jobs(users=["nobody"], known=named) == ([], 0)
    store.close()
