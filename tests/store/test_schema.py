"""A table, index or view that somebody dropped: refused where it decides, else made anew."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gpusched_client.terms import JobId
from gpuschedd.jobs.upkeep import Upkeep
from gpuschedd.store.database import StoreDamaged, StoreUnusable
from gpuschedd.store.records import AuditRow, Changes, Event
from gpuschedd.store.schema import HISTORY
from gpuschedd.store.writer import Store
from tests.sim.harness import Host
from tests.store.test_damage import change, check, filled, load, submitted

DECIDES = (
    *("account", "allocation", "brief", "environment", "gpu", "gpu_use", "job", "meta"),
    *("payload", "promise", "submission"),
)
#: Beside HISTORY; the version of the schema is in the file's header as well.
MADE_ANEW = (*HISTORY, "migration")


def schema(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as db:
        return {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE sql NOT NULL")}


def tables(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return {row[0] for row in rows if not row[0].startswith("sqlite_")}


def test_of_each_table_it_is_known_whether_it_decides(tmp_path: Path) -> None:
    assert tables(filled(tmp_path)) == {*DECIDES, *MADE_ANEW}


@pytest.mark.parametrize("table", DECIDES)
def test_a_table_that_decides_is_missed_by_its_name(tmp_path: Path, table: str) -> None:
    """At a start, by the check beside the service, and before that by whoever writes."""
    path = filled(tmp_path)
    store = Store.open(tmp_path)
    change(path, f"DROP TABLE {table}")
    with pytest.raises(StoreDamaged, match=f"its table {table} is missing"):
        check(path)
    with pytest.raises(StoreDamaged, match=f"its table {table} is missing"):
        store.mend()
    store.close()
    with pytest.raises(StoreUnusable, match=f"its table {table} is missing. Restore a backup"):
        load(tmp_path)


@pytest.mark.parametrize("table", MADE_ANEW)
def test_a_table_that_decides_nothing_is_made_anew_with_a_word(
    tmp_path: Path, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = filled(tmp_path)
    before = schema(path)
    change(path, f"DROP TABLE {table}")
    assert load(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert schema(path) == before
    check(path)
    assert f"made_anew={table} lost=" in caplog.text
    caplog.clear()
    assert load(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert caplog.text == ""


@pytest.mark.parametrize("table", HISTORY)
def test_a_commit_goes_through_though_its_history_has_gone(tmp_path: Path, table: str) -> None:
    """While the daemon runs; nothing of the batch is written twice or is missing."""
    path = filled(tmp_path)
    store = Store.open(tmp_path)
    store.load()
    change(path, f"DROP TABLE {table}")
    changes = submitted(7)
    changes.events.append((2, Event("job_submitted", 1e9, JobId(7), 1000)))
    changes.audits.append(AuditRow(1e9, 1000, 1, "drain", "denied", ""))
    store.commit(changes)
    store.commit(Changes(events=[(3, Event("x", 1e9))]))
    store.close()
    assert load(tmp_path) == [1, 2, 3, 4, 5, 6, 7]


def test_indices_and_views_are_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = filled(tmp_path)
    before = schema(path)
    change(path, "DROP INDEX job_live", "DROP INDEX event_of_job", "DROP VIEW jobs_v")
    with caplog.at_level(logging.WARNING):
        load(tmp_path)
    assert schema(path) == before
    assert "made_anew=job_live lost='nothing'" in caplog.text


def test_what_takes_the_place_of_a_table_is_that_table_s_content(tmp_path: Path) -> None:
    """The letters that views hide, and how much is kept of whom, are made out of what is there."""
    path = filled(tmp_path)
    store = Store.open(tmp_path)
    with closing(sqlite3.connect(path)) as db:
        letters = db.execute("SELECT * FROM unseen").fetchall()
    change(path, "DROP TABLE unseen")
    assert store.mend()
    store.close()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT * FROM unseen").fetchall() == letters


def test_a_column_that_has_gone_is_missed_by_its_name(tmp_path: Path) -> None:
    path = filled(tmp_path)
    change(path, "ALTER TABLE gpu DROP COLUMN drained")
    with pytest.raises(StoreUnusable, match="drained is missing from its table gpu"):
        load(tmp_path)


def test_upkeep_goes_on_where_history_has_gone_and_ends_where_more_has(tmp_path: Path) -> None:
    async def story() -> None:
        host = Host(tmp_path, 1)
        running = asyncio.ensure_future(host.controller.run())
        await host.controller.call(lambda _: None)
        upkeep = Upkeep(host.controller, host.store.path)
        for look in (upkeep.forget, upkeep.check):
            change(host.store.path, "DROP TABLE audit", "DROP TABLE event")
            await look()
            assert {"audit", "event"} <= tables(host.store.path)
        change(host.store.path, "DROP TABLE account")
        with pytest.raises(StoreDamaged, match="its table account is missing"):
            await upkeep.check()
        with pytest.raises(StoreDamaged):
            await asyncio.wait_for(running, 30)
        upkeep.close()
        host.controller.close()

    asyncio.run(story())
