"""The books: opened, checked, migrated, and never silently empty."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpusched_client.terms import Cause, GpuUuid, JobId, JobState
from gpuschedd.core.job import CancelOrder, Gone, Job, Placed, Started, advance
from gpuschedd.core.model import Grant, Request
from gpuschedd.store import database, migrations
from gpuschedd.store.checks import Checker, looked_at
from gpuschedd.store.database import (
    DATABASE_NAME,
    MARKER_NAME,
    StoreBusy,
    StoreFull,
    StoreUnusable,
    connect,
    copy_database,
)
from gpuschedd.store.history import History
from gpuschedd.store.in_use import MARK_NAME
from gpuschedd.store.records import Age, Brief, Changes, Event, Payload, brief_of
from gpuschedd.store.writer import Store
from gpuschedd.system.clock import ClockMark
from tests.support.daemon import DaemonProcess, until

GIB = 2**30


def a_job(job_id: int = 1) -> Job:
    return Job(
        job_id=JobId(job_id),
        uid=1000,
        user="alice",
        name="train",
        request=Request(gpus=2, vram_bytes=18 * GIB, time_limit_s=60.0),
        submitted_at_s=1_767_225_600.0,
        submitted_sched_s=10.0,
    )


def a_payload(environment: tuple[tuple[bytes, bytes], ...] = ((b"A", b"\xff"),)) -> Payload:
    return Payload(
        argv=(b"python", b"\xfe"),
        script=None,
        cwd=b"/home/alice",
        umask=0o22,
        rlimits=(("nofile", 10, 20),),
        output=None,
        error=None,
        environment=environment,
    )


def test_what_is_committed_is_loaded_back_the_same(tmp_path: Path) -> None:
    """A running job with grants, a cancel order and signals; its age; the clock."""
    store = Store.open(tmp_path)
    grants = (Grant(GpuUuid("GPU-a"), 19 * GIB, 18 * GIB),)
    placed = advance(a_job(), Placed(grants, False, 12.0, 60.0, 60.0))
    running = replace(
        advance(placed, Started(1_767_225_601.0, 13.0)),
        cancel=CancelOrder(1000, "alice", 1_767_225_602.0, "typo"),
        signals=((1, 10), (2, 12)),
    )
    mark = ClockMark("boot", 1.5, 14.0, 1_767_225_602.0)
    store.commit(
        Changes(
            mark=mark,
            jobs={running.job_id: running},
            payloads={running.job_id: a_payload()},
            ages={running.job_id: Age(10.0, 2.0, None)},
            gpu_index_of={GpuUuid("GPU-a"): 3},
            events=[(1, Event("job_started", 1.0, running.job_id, 1000, {"n": 1}))],
        )
    )
    store.close()
    again = Store.open(tmp_path)
    loaded = again.load()
    assert loaded.jobs == (running,)
    assert loaded.ages == {running.job_id: Age(10.0, 2.0, None)}
    assert loaded.mark == mark
    assert loaded.next_job_id == 2
    assert loaded.last_event_id == 1
    assert again.payload(running.job_id) == a_payload()


def test_jobs_that_ask_the_same_share_it_once_loaded(tmp_path: Path) -> None:
    """A hundred thousand queued jobs have a handful of requests, names and times between them."""
    store = Store.open(tmp_path)
    other = replace(a_job(3), request=Request(gpus=1))
    jobs = (a_job(1), a_job(2), other)
    store.commit(
        Changes(
            jobs={job.job_id: job for job in jobs},
            payloads={job.job_id: a_payload() for job in jobs},
            ages={job.job_id: Age(10.5, 0.0, 10.5) for job in jobs},
        )
    )
    store.close()
    reopened = Store.open(tmp_path)
    loaded = reopened.load()
    reopened.close()
    first, second, third = loaded.jobs
    assert loaded.jobs == jobs
    assert first.request is second.request
    assert first.request is not third.request
    for name in ("user", "name", "submitted_at_s", "submitted_sched_s"):
        assert getattr(first, name) is getattr(third, name), name
    assert len({id(age.eligible_since_s) for age in loaded.ages.values()}) == 1


def test_an_environment_is_kept_once_and_gone_when_its_last_job_is_final(tmp_path: Path) -> None:
    """Secrets do not outlive the jobs that need them."""
    store = Store.open(tmp_path)
    jobs = {JobId(number): a_job(number) for number in (1, 2)}
    store.commit(Changes(jobs=jobs, payloads={job_id: a_payload() for job_id in jobs}))
    db = sqlite3.connect(tmp_path / DATABASE_NAME)
    assert db.execute("SELECT count(*) FROM environment").fetchone() == (1,)
    ended = Gone(JobState.COMPLETED, 5.0, code=0, cause=Cause.EXIT)
    for job_id, left in ((JobId(1), 1), (JobId(2), 0)):
        placed = advance(jobs[job_id], Placed((), False, 1.0, 10.0, 60.0))
        store.commit(Changes(jobs={job_id: advance(placed, ended)}))
        assert db.execute("SELECT count(*) FROM environment").fetchone() == (left,)
    payload = store.payload(JobId(1))
    assert payload is not None
    assert payload.environment == ()
    assert payload.argv == (b"python", b"\xfe")


def test_a_failed_batch_leaves_nothing(tmp_path: Path) -> None:
    """All or nothing: a broken row takes the whole batch with it."""
    store = Store.open(tmp_path)
    broken = Changes(jobs={JobId(1): a_job(1)}, payloads={JobId(99): a_payload()})
    with pytest.raises(sqlite3.IntegrityError):
        store.commit(broken)
    assert store.load().jobs == ()


def test_the_books_answer_with_filters_and_pages(tmp_path: Path) -> None:
    """Newest last, the newest `limit`, and how many there are in all."""
    store = Store.open(tmp_path)
    store.commit(
        Changes(
            jobs={JobId(n): replace(a_job(n), uid=1000 + n % 2) for n in range(1, 8)},
            payloads={JobId(n): a_payload() for n in range(1, 8)},
        )
    )
    history = History(tmp_path / DATABASE_NAME)
    jobs, total = history.jobs(uids=[1001], limit=2)
    assert ([job.job_id for job in jobs], total) == ([5, 7], 4)
    jobs, total = history.jobs(uids=[1001], limit=2, before_id=JobId(5))
    assert ([job.job_id for job in jobs], total) == ([1, 3], 4)


def test_a_vanished_database_is_refused_not_replaced(tmp_path: Path) -> None:
    """An empty queue in silence would look like lost jobs."""
    Store.open(tmp_path).close()
    for name in (DATABASE_NAME, DATABASE_NAME + "-wal", DATABASE_NAME + "-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(StoreUnusable, match=MARKER_NAME):
        Store.open(tmp_path)


def test_who_reads_makes_no_database(tmp_path: Path) -> None:
    """Where it lay there may be another directory now, or nothing yet."""
    path = tmp_path / DATABASE_NAME
    with pytest.raises(StoreUnusable, match="unable to open database file"):
        History(path)
    with pytest.raises(StoreFull, match="could not be read"):
        looked_at(lambda: Checker(path))
    with pytest.raises(StoreFull):
        copy_database(path, tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_cannot_be_made_names_what_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More room on the disk would not help who has no descriptor left."""
    Store.open(tmp_path).close()
    path = tmp_path / DATABASE_NAME
    monkeypatch.setattr(database, "DESCRIPTORS_NEEDED", 10**6)
    monkeypatch.setattr(database, "backup_to", lambda *_: connect(tmp_path / "none"))
    with pytest.raises(StoreFull, match="may open no more files for now"):
        copy_database(path, tmp_path / "copy")


def test_a_migration_makes_a_backup_and_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step in its own transaction; the state before it stays beside it."""
    newest = migrations.NEWEST
    Store.open(tmp_path).close()
    step = migrations.Migration(newest + 1, "a test", ("CREATE TABLE extra (x INTEGER)",))
    monkeypatch.setattr("gpuschedd.store.database.MIGRATIONS", (*migrations.MIGRATIONS, step))
    Store.open(tmp_path).close()
    db = sqlite3.connect(tmp_path / DATABASE_NAME)
    versions = [row[0] for row in db.execute("SELECT version FROM migration ORDER BY version")]
    assert versions == list(range(1, newest + 2))
    old = sqlite3.connect(tmp_path / f"{DATABASE_NAME}.backup-schema-{newest}")
    assert old.execute("SELECT max(version) FROM migration").fetchone() == (newest,)


def test_the_first_schema_becomes_the_newest(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / DATABASE_NAME, isolation_level=None)
    first = migrations.MIGRATIONS[0]
    for statement in first.statements:
        db.execute(statement)
    db.execute("CREATE TABLE migration (version INTEGER PRIMARY KEY, name TEXT, applied_at TEXT)")
    db.execute("INSERT INTO migration VALUES (1, ?, '2026-01-01')", (first.name,))
    db.execute("PRAGMA user_version = 1")
    Store.open(tmp_path).close()
    assert db.execute("PRAGMA user_version").fetchone() == (migrations.NEWEST,)
    assert db.execute("SELECT count(*) FROM brief").fetchone() == (0,)


@pytest.mark.parametrize(
    ("argv", "kept", "whole"),
    [
        ((b"python", b"train.py", b"\xff"), (b"python", b"train.py", b"\xff"), True),
        ((b"x" * 1024,), (b"x" * 1024,), True),
        ((b"x" * 1000, b"y" * 25), (b"x" * 1000, b"y" * 24), False),
        ((b"x",) * 65, (b"x",) * 64, False),
        ((), (), True),
    ],
)
def test_a_brief_is_a_bounded_part_of_a_request(
    argv: tuple[bytes, ...], kept: tuple[bytes, ...], whole: bool
) -> None:
    payload = Payload(argv, b"#!/bin/sh\n", b"/tmp", 0o022, (), None, None)
    assert brief_of(payload) == Brief(kept, whole, b"/tmp", 10)


def _damage_header_of_a_page(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xaa")


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _rest(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:10])


def _newer(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 999")
    db.close()


def _not_a_database(path: Path) -> None:
    path.write_bytes(b"hello" * 2000)


def _vanish(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    "damage",
    [_damage_header_of_a_page, _truncate, _empty, _rest, _newer, _not_a_database, _vanish],
)
def test_an_unusable_database_ends_the_daemon_with_78_and_the_next_step(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    """Exit 78: the service manager does not restart it in a loop."""
    daemon = DaemonProcess(tmp_path, "1x1G").start()
    with daemon.client() as client:
        client.submit(["true"], hold=True)
    daemon.stop()
    path = daemon.state_dir / DATABASE_NAME
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    damage(path)
    assert daemon.spawn().wait(30) == 78
    said = daemon.log_tail()
    assert "backup" in said
    assert "Traceback" not in said


def test_a_disk_that_takes_no_more_of_a_file_is_tried_again_and_accuses_no_content(
    tmp_path: Path,
) -> None:
    """As one that fails: SQLite has one word for both, and neither asks for a backup at once."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 2**10, limits[1]))
    try:
        with pytest.raises(StoreFull, match=r"takes no larger file \(ulimit -f"):
            Store.open(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    Store.open(tmp_path).close()


@pytest.mark.parametrize(
    "name",
    [
        *(DATABASE_NAME, f"{DATABASE_NAME}-wal", f"{DATABASE_NAME}-shm", MARK_NAME),
        *(f"{MARK_NAME}.tmp", "lock"),
    ],
)
def test_a_directory_in_the_place_of_a_file_has_words_and_no_traceback(
    tmp_path: Path, name: str
) -> None:
    daemon = DaemonProcess(tmp_path, "1x1G").start()
    daemon.stop()
    path = daemon.state_dir / name
    path.unlink(missing_ok=True)
    path.mkdir()
    assert daemon.spawn().wait(30) in (74, 78)
    said = daemon.log_tail()
    assert DATABASE_NAME in said or str(path) in said
    assert "Traceback" not in said


@pytest.mark.parametrize("place", range(24))
def test_a_flipped_byte_of_a_job_is_found_at_the_start(tmp_path: Path, place: int) -> None:
    """Also where the file is well-formed: every row that is acted on has a checksum."""
    store = Store.open(tmp_path)
    store.commit(Changes(jobs={JobId(1): a_job()}, payloads={JobId(1): a_payload()}))
    store.close()
    path = tmp_path / DATABASE_NAME
    content = bytearray(path.read_bytes())
    marks = [b"alice", b"train", b"PENDING", b"nofile", b"/home", b"python"]
    mark = marks[place % len(marks)]
    found = content.rindex if place // len(marks) % 2 else content.index  # whole or in brief
    content[found(mark) + place // len(marks)] ^= 0x01
    path.write_bytes(bytes(content))
    with pytest.raises(StoreUnusable, match=r"damaged|not a valid"):
        Store.open(tmp_path).load()


def test_promises_say_what_was_promised_and_what_came_of_it(daemon: DaemonProcess) -> None:
    """In the database for people, in `stats` for programs: kept, or lost and by what."""
    with daemon.client() as client:
        running = client.submit(["sleep", "600"], gpus=4, time_limit=600, cwd=daemon.work_dir)
        waiting = client.submit(["true"], gpus=4, time_limit=60, cwd=daemon.work_dir)
        until(lambda: client.job(waiting.id).promised_start_s, "its start is promised")
        client.drain(0, "fan")
        until(lambda: "promises_lost" in client.stats(), "the promise is lost")
        client.resume(0)
        until(lambda: "promises_open" in client.stats(), "its start is promised again")
        client.cancel(running.id)
        client.wait(waiting.id, timeout_s=30)
        stats = client.stats()
    assert {name: stats[name] for name in stats if name.startswith("promises_")} == {
        "promises_kept": 1,
        "promises_lost": 1,
        "promises_lost_by_gpu_drained": 1,
    }
    db = sqlite3.connect(f"file:{daemon.state_dir / DATABASE_NAME}?mode=ro", uri=True)
    rows = db.execute(
        "SELECT job_id, outcome, exception, late_s < 0, start_by_utc > promised_utc"
        " FROM promises_v ORDER BY outcome DESC"
    ).fetchall()
    assert rows == [(waiting.id, "lost", "gpu_drained", None, 1), (waiting.id, "kept", None, 1, 1)]


def test_a_lock_held_by_another_program_is_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An administrator's open transaction is no reason to end: nothing is written, then all is."""
    monkeypatch.setattr("gpuschedd.store.database.BUSY_TIMEOUT_S", 0.05)
    store = Store.open(tmp_path)
    changes = Changes(jobs={JobId(1): a_job()}, payloads={JobId(1): a_payload()})
    other = sqlite3.connect(tmp_path / DATABASE_NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy, match="locked by another program"):
        store.commit(changes)
    other.execute("ROLLBACK")
    other.close()
    store.commit(changes)
    assert [job.job_id for job in store.load().jobs] == [1]
    store.close()


def test_people_may_read_the_views(daemon: DaemonProcess) -> None:
    """Plain units, while the daemon runs."""
    with daemon.client() as client:
        job = client.submit(["sh", "-c", "exit 4"], vram="2G", cwd=daemon.work_dir)
        client.wait(job.id, timeout_s=30)
    db = sqlite3.connect(f"file:{daemon.state_dir / DATABASE_NAME}?mode=ro", uri=True)
    row = db.execute("SELECT state, exit_code, vram_mib FROM jobs_v").fetchone()
    assert row == ("FAILED", 4, 2048)
    assert db.execute("SELECT count(*) FROM usage_v").fetchone()[0] == 1
    kinds = {row[0] for row in db.execute("SELECT kind FROM events_v")}
    assert {"job_submitted", "job_started", "job_ended"} <= kinds
