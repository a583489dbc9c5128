"""What people read with `sqlite3`, and in the log, drives no terminal."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gpusched_client.terms import Cause, JobId, JobState, printable
from gpuschedd.core.job import Gone, Placed, advance
from gpuschedd.logs import OneLine
from gpuschedd.store.records import Changes, Event, PromiseRow, UsageRow
from gpuschedd.store.writer import Store
from tests.store.test_database import a_job, a_payload

#: Erases the screen, overwrites its own line, is deleted, turns right to left, cannot be seen.
SLY = "a\x1b[2J\rb\n\tc\x7fd\x9b1me\u202ef\u200bg\u2028h\ufeff\\ é 'quoted'"
SHOWN = printable(SLY)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """All texts that come from users, or from a name service, in their places."""
    store = Store.open(tmp_path)
    job = replace(a_job(), name=SLY, user=SLY)
    job = replace(job, request=replace(job.request, gpu_model=SLY))
    gone = Gone(JobState.CANCELLED, 5.0, cause=Cause.CANCELLED, detail=SLY)
    changes = Changes(
        jobs={JobId(1): advance(advance(job, Placed((), False, 1.0, 10.0, 60.0)), gone)},
        payloads={JobId(1): a_payload()},
        accounts={1000: UsageRow(1000, SLY, 5.0, 0.0, 1.0, 1e9)},
        events=[(1, Event("job_ended", 1e9, JobId(1), 1000, {"reason": SLY, "x": "\x7f"}))],
    )
    promise = PromiseRow(JobId(1), 1e9, 1.0, 1e9, 2.0, "lost", 1e9, None, SLY)
    changes.promises[(promise.job_id, 1.0)] = promise
    store.commit(changes)
    store.close()
    return store.path


@pytest.mark.parametrize(
    ("view", "columns"),
    [
        ("jobs_v", ("user", "name", "gpu_model", "cause_detail")),
        ("usage_v", ("user",)),
        ("promises_v", ("user", "name", "exception")),
    ],
)
def test_texts_are_shown_as_gq_shows_them(place: Path, view: str, columns: tuple[str, ...]) -> None:
    with closing(sqlite3.connect(place)) as db:
        (row,) = db.execute(f"SELECT {', '.join(columns)} FROM {view}").fetchall()
    assert SHOWN.isprintable()
    assert row == (SHOWN,) * len(columns)


def test_no_view_has_a_character_that_cannot_be_printed(place: Path) -> None:
    with closing(sqlite3.connect(place)) as db:
        views = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'view'")]
        rows = [
            value for view in views for row in db.execute(f"SELECT * FROM {view}") for value in row
        ]
    assert len(views) == 4
    assert [text for text in rows if isinstance(text, str) and not text.isprintable()] == []


def test_plain_texts_stay_as_they_are(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    names = ["train", "", "größe 模型 ✓", r"a\x1b"]
    jobs = {JobId(n): replace(a_job(n), name=name) for n, name in enumerate(names, start=1)}
    store.commit(Changes(jobs=jobs, payloads={job_id: a_payload() for job_id in jobs}))
    with closing(sqlite3.connect(store.path)) as db:
        assert [row[0] for row in db.execute("SELECT name FROM jobs_v ORDER BY job_id")] == names
    store.close()


def test_a_traceback_in_the_log_is_printable_line_by_line() -> None:
    """The words of an error may be a user's."""
    try:
        raise ValueError(SLY)
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "x", 1, "failed", (), None)
        record.exc_info = (ValueError, error, error.__traceback__)
        text = OneLine("%(message)s").format(record)
    assert "Traceback" in text
    assert [line for line in text.split("\n") if not line.isprintable()] == []
