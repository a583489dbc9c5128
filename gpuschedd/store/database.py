"""The books: the only module that speaks SQL.

One connection writes, in one dedicated thread, one transaction per batch with synchronous=FULL:
when `commit` returns, the batch survives a power cut. A second, read-only connection answers
questions about the past, so that a slow question never delays a commit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from gpusched_client.errors import StorageError
from gpusched_client.terms import Cause, GpuUuid, HoldKind, JobId, JobState
from gpuschedd.core.job import CancelOrder, Job
from gpuschedd.core.model import Grant, Request, Topology
from gpuschedd.store.migrations import MIGRATIONS, NEWEST, Migration
from gpuschedd.store.records import (
    AccountRow,
    Age,
    AttemptEnd,
    Brief,
    Changes,
    Event,
    GpuRow,
    GpuUse,
    Loaded,
    Payload,
    PromiseRow,
    Remembered,
    Submission,
    brief_of,
)
from gpuschedd.system.clock import ClockMark

log = logging.getLogger(__name__)

T = TypeVar("T")

DATABASE_NAME = "gpuschedd.sqlite3"
MARKER_NAME = "gpuschedd.instance"  # says that a database existed: an empty one is never made twice
EVENTS_MAX = 1_000_000
AUDIT_ROWS_MAX = 100_000
SUBMISSION_KEPT_S = 7 * 86_400.0
RECENT_SUBMISSIONS_MAX = 100_000  # kept in memory
BUSY_TIMEOUT_S = 10.0
WAL_PAGES = 250  # 1 MiB: on a small disk it must not take the room that the database grows into
CHECKED_ROWS_MAX = 20_000  # whose checksums are looked at when the daemon starts


class StoreUnusable(Exception):
    """The database is corrupt, newer or gone; the text says what to do. The daemon exits 78."""


class StoreFull(Exception):
    """No room on the disk: nothing of the batch was written, and trying again later is right."""


class StoreBusy(StoreFull):
    """Somebody else holds the database's lock for long: nothing was written, as without room."""


class StoreBroken(Exception):
    """An I/O error: later commits cannot be trusted, the daemon must end and read again."""


class StoreVanished(StoreBroken):
    """Somebody removed or replaced the file in use: what is written to it, nobody ever reads."""


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    connection.row_factory = sqlite3.Row
    return connection


def _sqlite_code(error: sqlite3.Error) -> int:
    """SQLite's extended result code, 0 where the binding gives none."""
    return getattr(error, "sqlite_errorcode", 0) or 0


def _passing(error: sqlite3.Error) -> StoreFull | None:
    """The error as one that passes: no room (also for the shared-memory file), or a long lock."""
    code = _sqlite_code(error)
    if code & 0xFF == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE:
        return StoreFull(f"{error}; free some space")
    if code & 0xFF == sqlite3.SQLITE_BUSY:
        return StoreBusy(f"{error} by another program; end its transaction")
    return None


def _empty_wal(db: sqlite3.Connection) -> bool:
    """Copy all of the WAL to the database, so that the next writer begins it anew. False: not yet.

    It waits for nobody: neither for readers of the WAL nor for room where the database must grow.
    """
    try:
        is_busy, in_wal, copied = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    except sqlite3.Error:
        return False
    return not is_busy and in_wal == copied


@contextmanager
def _typed_errors() -> Iterator[None]:
    """What SQLite raises at a write, by what the caller can do."""
    try:
        yield
    except sqlite3.Error as error:
        if (passing := _passing(error)) is not None:
            raise passing from error
        if _sqlite_code(error) & 0xFF in _UNTRUSTED:
            raise StoreBroken(str(error)) from error
        raise


class Store:
    """The writing connection. Every method blocks: call it in the database thread."""

    def __init__(self, path: Path, connection: sqlite3.Connection, instance: str) -> None:
        self.path = path
        self.instance = instance
        self._db = connection
        self._files = _files_of(path)

    @classmethod
    def open(cls, state_dir: Path) -> Store:
        """Open or create the database in state_dir; check it and bring it to the newest schema.

        Raises StoreUnusable (corrupt, newer, vanished) or StoreFull.
        """
        path = state_dir / DATABASE_NAME
        marker = state_dir / MARKER_NAME
        existed = path.exists()
        if marker.exists() and not existed:
            raise StoreUnusable(
                f"{path} is gone, but {marker} says that it existed. Restore a backup, or remove "
                f"{marker} to begin with an empty queue and empty books."
            )
        try:
            connection = _connect(path)
            os.chmod(path, 0o600)
            _prepare(connection, path, check=existed, has_content=marker.exists())
            _migrate(connection, path)
            instance = _instance(connection)
            _empty_wal(connection)  # what a killed daemon left there; a full disk leaves it
            _write_marker(marker, instance)
        except sqlite3.Error as error:
            if (passing := _passing(error)) is not None:
                raise type(passing)(f"{path}: {passing}") from error
            raise StoreUnusable(_unusable_text(path, error)) from error
        except OSError as error:
            raise StoreFull(f"{path}: {error}") from error
        return cls(path, connection, instance)

    def close(self) -> None:
        """Close; nothing is pending, since every commit is complete."""
        self._db.close()

    def commit(self, changes: Changes) -> None:
        """Write one batch durably. Raises StoreFull (nothing written) or StoreBroken."""
        self._durably(lambda: self._write_checked(changes))

    def _durably(self, write: Callable[[], None]) -> None:
        """One transaction. Where it finds no room, once more over the old content of the WAL."""
        try:
            with _typed_errors(), _transaction(self._db):
                write()
        except StoreFull as full:
            if isinstance(full, StoreBusy) or not _empty_wal(self._db):
                raise
            with _typed_errors(), _transaction(self._db):
                write()

    def _write_checked(self, changes: Changes) -> None:
        self._write(changes)
        self._check_files()

    def _check_files(self) -> None:
        """SQLite goes on writing to files that were removed under it, and says nothing."""
        if _files_of(self.path) != self._files:
            raise StoreVanished(
                f"{self.path} or its -wal file was removed or replaced while in use. Restore a "
                "backup, or start the daemon again to go on with what is there"
            )

    def _write(self, changes: Changes) -> None:
        db = self._db
        if changes.mark is not None:
            _write_mark(db, changes.mark)
        for job in changes.jobs.values():
            _write_job(db, job, changes.gpu_index_of)
        for job_id, payload in changes.payloads.items():
            _write_payload(db, job_id, payload)
            _write_brief(db, job_id, brief_of(payload))
        for job_id, age in changes.ages.items():
            _write_age(db, job_id, age)
        for job in changes.jobs.values():
            if job.is_final:
                _forget_environment(db, job.job_id)
        db.executemany(
            "INSERT INTO submission VALUES (?, ?, ?, ?, ?, ?)",
            [(*row, _crc(row)) for row in map(_submission_values, changes.submissions)],
        )
        for row in changes.accounts.values():
            _upsert(db, "account", _fields(row))
        for promise in changes.promises.values():
            _upsert(db, "promise", _fields(promise))
        _write_gpus(db, changes)
        for end in changes.attempts:
            _write_attempt_end(db, end)
        db.executemany(
            "INSERT INTO event VALUES (?, ?, ?, ?, ?, ?)",
            [
                (number, e.at_s, e.kind, e.job_id, e.uid, json.dumps(dict(e.data)))
                for number, e in changes.events
            ],
        )
        db.executemany(
            "INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?)",
            [(a.at_s, a.uid, a.pid, a.method, a.outcome, a.detail) for a in changes.audits],
        )

    def load(self) -> Loaded:
        """Everything that is not history."""
        try:
            return self._load()
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise StoreUnusable(_unusable_text(self.path, error)) from error

    def _load(self) -> Loaded:
        db = self._db
        self._check_rows()
        rows = db.execute("SELECT * FROM job WHERE final = 0 ORDER BY job_id").fetchall()
        grants = _grants_of(db, "job.final = 0")
        recent = db.execute(
            "SELECT * FROM submission ORDER BY at_sched_s DESC LIMIT ?", (RECENT_SUBMISSIONS_MAX,)
        ).fetchall()
        next_id = db.execute("SELECT coalesce(max(job_id), 0) + 1 FROM job").fetchone()[0]
        return Loaded(
            instance=self.instance,
            mark=_read_mark(db),
            next_job_id=max(next_id, int(_meta(db, "next_job_id") or 1)),
            jobs=tuple(_job_from(row, grants) for row in rows),
            ages={
                JobId(row["job_id"]): _age_from(row)
                for row in rows
                if row["eligible_since_s"] is not None
            },
            accounts=tuple(
                AccountRow(**_checked(row, "account"))
                for row in db.execute("SELECT * FROM account")
            ),
            promises=tuple(
                PromiseRow(**_checked(row, "promise"))
                for row in db.execute("SELECT * FROM promise WHERE outcome IS NULL")
            ),
            gpus=tuple(_gpu_row_from(row) for row in db.execute("SELECT * FROM gpu")),
            gpu_uses=tuple(_gpu_uses(db, "job.final = 0")),
            health=_read_health(db),
            last_event_id=db.execute("SELECT coalesce(max(event_id), 0) FROM event").fetchone()[0],
            submissions=tuple(_submission_from(row) for row in reversed(recent)),
        )

    def _check_rows(self) -> None:
        """Checksums of the newest rows, live or not: damage is found before it is acted on."""
        rows = self._db.execute(
            "SELECT * FROM job ORDER BY job_id DESC LIMIT ?", (CHECKED_ROWS_MAX,)
        ).fetchall()
        if not rows:
            return
        grants = _grants_of(self._db, f"job.job_id >= {int(rows[-1]['job_id'])}")
        for row in rows:
            _job_from(row, grants)
        for (job_id,) in self._db.execute(
            "SELECT job_id FROM payload ORDER BY job_id DESC LIMIT ?", (CHECKED_ROWS_MAX,)
        ).fetchall():
            _read_payload(self._db, job_id)
        for row in self._db.execute(
            "SELECT * FROM brief ORDER BY job_id DESC LIMIT ?", (CHECKED_ROWS_MAX,)
        ):
            _brief_from(row)

    def payload(self, job_id: JobId) -> Payload | None:
        """The launch's part of a request, environment included while the job is live.

        Raises StoreBroken.
        """
        with _typed_errors():
            return _read_payload(self._db, job_id)

    def prune(self, now_sched_s: float) -> None:
        """Drop what is past its limit: old events, audit rows and submission ids.

        Raises StoreFull (nothing dropped) or StoreBroken.
        """
        self._durably(lambda: self._drop_old(now_sched_s))

    def _drop_old(self, now_sched_s: float) -> None:
        self._db.execute(
            "DELETE FROM event WHERE event_id <= (SELECT max(event_id) FROM event) - ?",
            (EVENTS_MAX,),
        )
        self._db.execute(
            "DELETE FROM audit WHERE rowid <= (SELECT max(rowid) FROM audit) - ?",
            (AUDIT_ROWS_MAX,),
        )
        self._db.execute(
            "DELETE FROM submission WHERE at_sched_s < ?", (now_sched_s - SUBMISSION_KEPT_S,)
        )

    def backup(self, target: Path) -> None:
        """A consistent copy of the database, while it is in use."""
        _backup(self._db, target)


_HEADER_BYTES = 100  # of every SQLite file
_UNTRUSTED = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class History:
    """The reading connection: questions about the past. Blocks: call it in a reader thread."""

    def __init__(self, path: Path) -> None:
        self._db = _connect(path)
        self._db.execute("PRAGMA query_only = ON")

    def close(self) -> None:
        """Close the connection."""
        self._db.close()

    def jobs(
        self,
        *,
        ids: Iterable[JobId] | None = None,
        uids: Iterable[int] | None = None,
        users: Iterable[str] | None = None,
        states: Iterable[str] | None = None,
        name: str | None = None,
        ended_since_s: float | None = None,
        before_id: JobId | None = None,
        limit: int = 1_000,
    ) -> tuple[list[Job], int]:
        """Matching jobs, newest last, at most limit of the newest; and how many match in all."""
        where, values = _job_filter(ids, uids, users, states, name, ended_since_s)
        total = self._db.execute(f"SELECT count(*) FROM job WHERE {where}", values).fetchone()[0]
        if before_id is not None:
            where, values = f"{where} AND job_id < ?", [*values, before_id]
        rows = self._db.execute(
            f"SELECT * FROM job WHERE {where} ORDER BY job_id DESC LIMIT ?", [*values, limit]
        ).fetchall()
        picked = ",".join(str(int(row["job_id"])) for row in rows) or "0"
        grants = _grants_of(self._db, f"job.job_id IN ({picked})")
        return [_job_from(row, grants) for row in reversed(rows)], total

    def job(self, job_id: JobId) -> Job | None:
        """One job of any age."""
        jobs, _ = self.jobs(ids=[job_id], limit=1)
        return jobs[0] if jobs else None

    def payload(self, job_id: JobId) -> Payload | None:
        """What was asked, without the environment."""
        return _read_payload(self._db, job_id, with_environment=False)

    def briefs(self, job_ids: Iterable[JobId]) -> dict[JobId, Brief]:
        """What lists show of these requests; jobs of an older schema are missing."""
        picked = ",".join(str(int(job_id)) for job_id in job_ids)
        rows = self._db.execute(f"SELECT * FROM brief WHERE job_id IN ({picked})")
        return {JobId(row["job_id"]): _brief_from(row) for row in rows}

    def submission(self, uid: int, submission_id: str) -> Submission | None:
        """An earlier submission under this id."""
        row = self._db.execute(
            "SELECT * FROM submission WHERE uid = ? AND submission_id = ?", (uid, submission_id)
        ).fetchone()
        return None if row is None else _submission_from(row)

    def gpu_uses(self, job_id: JobId) -> list[GpuUse]:
        """What a job's last attempt used of its GPUs."""
        return _gpu_uses(self._db, "job.job_id = ?", (job_id,))

    def events(self, job_id: JobId, limit: int = 100) -> list[Event]:
        """A job's newest events, oldest first."""
        rows = self._db.execute(
            "SELECT * FROM event WHERE job_id = ? ORDER BY event_id DESC LIMIT ?", (job_id, limit)
        ).fetchall()
        return [_event_from(row) for row in reversed(rows)]

    def events_since(self, since: int, last: int, limit: int = 1_000) -> list[tuple[int, Event]]:
        """The newest events with since < id <= last, oldest first, with their ids."""
        rows = self._db.execute(
            "SELECT * FROM event WHERE event_id > ? AND event_id <= ?"
            " ORDER BY event_id DESC LIMIT ?",
            (since, last, limit),
        ).fetchall()
        return [(row["event_id"], _event_from(row)) for row in reversed(rows)]

    def promise_of(self, job_id: JobId) -> PromiseRow | None:
        """The newest promise that job had."""
        row = self._db.execute(
            "SELECT * FROM promise WHERE job_id = ? ORDER BY promised_sched_s DESC LIMIT 1",
            (job_id,),
        ).fetchone()
        return PromiseRow(**_checked(row, "promise")) if row else None

    def promise_outcomes(self) -> dict[str, int]:
        """How many promises ended in each way, as "lost", and by what, as "lost_by_gpu_drained"."""
        counts: dict[str, int] = {}
        rows = self._db.execute(
            "SELECT coalesce(outcome, 'open'), detail, count(*) FROM promise GROUP BY 1, 2"
        )
        for outcome, detail, count in rows:
            counts[outcome] = counts.get(outcome, 0) + count
            if detail is not None:
                counts[f"{outcome}_by_{detail}"] = count
        return counts

    def state_counts(self) -> dict[str, int]:
        """How many jobs there are in each state, all time."""
        return {
            row[0]: row[1]
            for row in self._db.execute("SELECT state, count(*) FROM job GROUP BY state")
        }


def read(history: History, question: Callable[[History], T]) -> T:
    """The answer. Raises StorageError where the books cannot be read."""
    try:
        return question(history)
    except (sqlite3.Error, OSError) as error:
        log.warning("database_unreadable error=%s", error)
        raise StorageError(
            f"the daemon's database cannot be read: {error}; an administrator should look at its "
            "disk and log"
        ) from error


def _unusable_text(path: Path, error: Exception) -> str:
    return (
        f"{path} cannot be used: {error}. Restore a backup (the file with .backup- beside it, or "
        f"`gctl backup`'s), or move it away together with its marker {MARKER_NAME} to begin anew."
    )


def _files_of(path: Path) -> tuple[tuple[int, int] | None, ...]:
    """Device and inode of the database and of its log, None for one that is not there."""
    found: list[tuple[int, int] | None] = []
    for name in (path, f"{path}-wal"):
        try:
            status = os.stat(name)
            found.append((status.st_dev, status.st_ino))
        except FileNotFoundError:
            found.append(None)
    return tuple(found)


# --- opening --------------------------------------------------------------------------------


def _prepare(db: sqlite3.Connection, path: Path, *, check: bool, has_content: bool) -> None:
    """Pragmas, and a check of an existing file before anything is written to it.

    To SQLite a file that was cut to nothing, or to less than a header, is a new database.
    """
    if check:
        size = path.stat().st_size
        if 0 < size < _HEADER_BYTES:
            raise sqlite3.DatabaseError(f"{size} bytes are no database")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > NEWEST:
            raise StoreUnusable(
                f"{path} has schema {version}; this version knows up to {NEWEST}. Install the "
                "newer gpuschedd again, or restore a backup made before the upgrade."
            )
        verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise sqlite3.DatabaseError(f"quick_check: {verdict}")
        if version == 0 and has_content:
            raise sqlite3.DatabaseError("it is empty, but was not")
        if version == 0 and size > 0 and not _is_fresh(db):
            raise sqlite3.DatabaseError("it is not one of ours")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA secure_delete = ON")  # environments do not stay in free pages


def _is_fresh(db: sqlite3.Connection) -> bool:
    """True for a file that was created and not yet migrated."""
    return not db.execute("SELECT 1 FROM sqlite_master WHERE name NOT LIKE 'migration'").fetchall()


def _migrate(db: sqlite3.Connection, path: Path) -> None:
    """Apply what is missing, each step recorded in its own transaction, after a backup."""
    db.execute(
        "CREATE TABLE IF NOT EXISTS migration"
        " (version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at TEXT NOT NULL)"
    )
    done = db.execute("SELECT coalesce(max(version), 0) FROM migration").fetchone()[0]
    missing = [step for step in MIGRATIONS if step.version > done]
    if missing and done > 0:
        _backup(db, path.with_name(f"{path.name}.backup-schema-{done}"))
    for step in missing:
        _apply(db, step)


def _apply(db: sqlite3.Connection, step: Migration) -> None:
    with _transaction(db):
        for statement in step.statements:
            db.execute(statement)
        db.execute(
            "INSERT INTO migration VALUES (?, ?, datetime('now'))", (step.version, step.name)
        )
        db.execute(f"PRAGMA user_version = {step.version}")


def _instance(db: sqlite3.Connection) -> str:
    """The random id of this state directory; it marks our jobs' processes."""
    found = _meta(db, "instance")
    if found is None:
        found = uuid.uuid4().hex
        with _transaction(db):
            db.execute("INSERT INTO meta VALUES ('instance', ?)", (found,))
    return str(found)


def _write_marker(marker: Path, instance: str) -> None:
    if marker.exists():
        return
    descriptor = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, instance.encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    directory = os.open(marker.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def copy_database(source: Path, target: Path) -> None:
    """A consistent copy over a connection of its own: the writer is not held up. Blocks."""
    db = _connect(source)
    try:
        db.execute("PRAGMA query_only = ON")
        _backup(db, target)
    except sqlite3.Error as error:
        raise StoreFull(str(error)) from error
    finally:
        db.close()


def _backup(db: sqlite3.Connection, target: Path) -> None:
    temporary = target.with_name(target.name + ".tmp")
    temporary.unlink(missing_ok=True)
    copy = _connect(temporary)
    try:
        db.backup(copy)
    finally:
        copy.close()
    os.chmod(temporary, 0o600)
    os.replace(temporary, target)


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """The one transaction idiom: all of it, durable, or nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


# --- rows -----------------------------------------------------------------------------------


def _fields(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def _upsert(db: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> None:
    values = {**values, "crc": _crc(values.values())}
    names = ", ".join(values)
    marks = ", ".join("?" * len(values))
    db.execute(f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))


def _crc(values: Iterable[Any]) -> int:
    """A row's checksum: the same before it is written and after it is read."""
    plain = [float(value) if isinstance(value, int | float) else value for value in values]
    return zlib.crc32(repr(plain).encode("utf-8", "backslashreplace"))


def _checked(row: sqlite3.Row, table: str) -> dict[str, Any]:
    """The row without its checksum. Raises DatabaseError where it does not fit."""
    values = dict(row)
    if values.pop("crc") != _crc(values.values()):
        raise sqlite3.DatabaseError(f"a row of {table} is damaged: {next(iter(values.values()))}")
    return values


def _meta(db: sqlite3.Connection, key: str) -> Any:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return row[0] if row else None


def _write_mark(db: sqlite3.Connection, mark: ClockMark) -> None:
    content = json.dumps([mark.boot_id, mark.offset_s, mark.scheduler_s, mark.wall_s])
    db.execute("INSERT OR REPLACE INTO meta VALUES ('clock', ?)", (content,))


def _write_gpus(db: sqlite3.Connection, changes: Changes) -> None:
    for gpu in changes.gpus.values():
        _upsert(db, "gpu", _fields(gpu))
    for use in changes.gpu_uses:
        _upsert(db, "gpu_use", _fields(use))
    if changes.health is not None:
        _write_health(db, changes.health)


def _write_health(db: sqlite3.Connection, health: Mapping[GpuUuid, Remembered]) -> None:
    content = json.dumps({uuid: [row.pardoned, row.errors_seen] for uuid, row in health.items()})
    db.execute("INSERT OR REPLACE INTO meta VALUES ('health', ?)", (content,))


def _read_health(db: sqlite3.Connection) -> dict[GpuUuid, Remembered]:
    content: dict[str, tuple[list[str], int]] = json.loads(_meta(db, "health") or "{}")
    return {
        GpuUuid(uuid): Remembered(tuple(pardoned), errors)
        for uuid, (pardoned, errors) in content.items()
    }


def _read_mark(db: sqlite3.Connection) -> ClockMark | None:
    content = _meta(db, "clock")
    return ClockMark(*json.loads(content)) if content else None


_SAME_NAME = (
    *("job_id", "uid", "user", "name", "attempt", "nice", "default_limit", "hold", "hold_detail"),
    *(
        "memory_bytes",
        "cpus",
        "whole_note",
        "submitted_at_s",
        "started_at_s",
        "ended_at_s",
        "submitted_sched_s",
    ),
    *("decided_sched_s", "decided_limit_s", "stuck", "started_sched_s", "main_ended_sched_s"),
    *("warned_limit_s",),
    *("not_before_sched_s", "begin_at_sched_s", "whole", "exit_code", "exit_signal"),
    *("cause_detail", "cpu_user_s", "cpu_system_s", "max_rss_bytes", "launch_failures"),
    *("retries", "retries_used"),
)
_OF_REQUEST = (
    *("gpus", "vram_bytes", "gpu_model", "exclusive", "topology", "time_limit_s", "card_bytes"),
)


def _job_values(job: Job) -> dict[str, Any]:
    values = {name: getattr(job, name) for name in _SAME_NAME}
    values |= {name: getattr(job.request, name) for name in _OF_REQUEST}
    cancel = job.cancel
    values |= {
        "hold": str(job.hold) if job.hold else None,
        "state": str(job.state),
        "cause": str(job.cause) if job.cause else None,
        "signals": json.dumps(job.signals),
        "final": int(job.is_final),
        "cancel_uid": cancel.by_uid if cancel else None,
        "cancel_by": cancel.by if cancel else None,
        "cancel_at_s": cancel.at_s if cancel else None,
        "cancel_reason": cancel.reason if cancel else None,
    }
    return values


def _job_crc(job: Job) -> int:
    """Over the job and what it holds."""
    grants = [f"{g.uuid} {g.held_bytes} {g.declared_bytes}" for g in job.grants]
    return _crc([*_job_values(job).values(), *sorted(grants)])


def _write_job(db: sqlite3.Connection, job: Job, index_of: Mapping[GpuUuid, int]) -> None:
    """Insert or update one job, its allocation and its attempt."""
    values = _job_values(job)
    values["crc"] = _job_crc(job)
    names = list(values)
    updates = ", ".join(f"{name} = excluded.{name}" for name in names if name != "job_id")
    db.execute(
        f"INSERT INTO job ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
        f" ON CONFLICT (job_id) DO UPDATE SET {updates}",
        tuple(values.values()),
    )
    if job.decided_sched_s is None:
        return
    db.execute(
        "INSERT INTO attempt VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (job_id, attempt) DO UPDATE SET started_at_s = excluded.started_at_s,"
        " ended_at_s = excluded.ended_at_s, outcome = excluded.outcome,"
        " exit_code = excluded.exit_code, exit_signal = excluded.exit_signal,"
        " detail = excluded.detail",
        (
            job.job_id,
            job.attempt,
            job.decided_sched_s,
            job.started_at_s,
            job.ended_at_s,
            str(job.state) if job.is_final else None,
            job.exit_code,
            job.exit_signal,
            job.cause_detail,
        ),
    )
    db.execute("DELETE FROM allocation WHERE job_id = ? AND attempt = ?", (job.job_id, job.attempt))
    db.executemany(
        "INSERT INTO allocation VALUES (?, ?, ?, ?, ?, ?)",
        [
            (
                job.job_id,
                job.attempt,
                grant.uuid,
                index_of.get(grant.uuid, -1),
                grant.held_bytes,
                grant.declared_bytes,
            )
            for grant in job.grants
        ],
    )


def _write_attempt_end(db: sqlite3.Connection, end: AttemptEnd) -> None:
    db.execute(
        "UPDATE attempt SET started_at_s = ?, ended_at_s = ?, outcome = ?, exit_code = ?,"
        " exit_signal = ?, detail = ? WHERE job_id = ? AND attempt = ?",
        (
            *(end.started_at_s, end.ended_at_s, end.outcome, end.exit_code, end.exit_signal),
            *(end.detail, end.job_id, end.attempt),
        ),
    )


def _gpu_row_from(row: sqlite3.Row) -> GpuRow:
    values = _checked(row, "gpu")
    return GpuRow(**{**values, "sick_until_reboot": bool(values["sick_until_reboot"])})


def _gpu_uses(db: sqlite3.Connection, where: str, values: tuple[Any, ...] = ()) -> list[GpuUse]:
    """Rows of the present attempt of the jobs that match."""
    rows = db.execute(
        "SELECT gpu_use.* FROM gpu_use JOIN job ON job.job_id = gpu_use.job_id"
        f" AND job.attempt = gpu_use.attempt WHERE {where} ORDER BY gpu_uuid",
        values,
    )
    return [GpuUse(**_checked(row, "gpu_use")) for row in rows]


def _grants_of(db: sqlite3.Connection, where: str) -> dict[int, tuple[Grant, ...]]:
    """The grants of the present attempt of each job that matches."""
    found: dict[int, list[Grant]] = {}
    for row in db.execute(
        "SELECT allocation.* FROM allocation JOIN job ON job.job_id = allocation.job_id"
        f" AND job.attempt = allocation.attempt WHERE {where} ORDER BY gpu_index, gpu_uuid"
    ):
        grant = Grant(GpuUuid(row["gpu_uuid"]), row["held_bytes"], row["declared_bytes"])
        found.setdefault(row["job_id"], []).append(grant)
    return {job_id: tuple(grants) for job_id, grants in found.items()}


def _job_from(row: sqlite3.Row, grants: Mapping[int, tuple[Grant, ...]]) -> Job:
    values: dict[str, Any] = {name: row[name] for name in _SAME_NAME}
    request = {name: row[name] for name in _OF_REQUEST}
    request["exclusive"] = bool(request["exclusive"])
    request["topology"] = Topology(request["topology"])
    cancel = None
    if row["cancel_at_s"] is not None:
        cancel = CancelOrder(
            row["cancel_uid"], row["cancel_by"], row["cancel_at_s"], row["cancel_reason"]
        )
    values["hold"] = HoldKind(values["hold"]) if values["hold"] else None
    values["default_limit"] = bool(values["default_limit"])
    values["whole"] = bool(values["whole"])
    values["stuck"] = bool(values["stuck"])
    held = grants.get(row["job_id"], ()) if row["decided_sched_s"] is not None else ()
    job = Job(
        **values,
        request=Request(**request),
        state=JobState(row["state"]),
        cause=Cause(row["cause"]) if row["cause"] else None,
        signals=tuple((number, signum) for number, signum in json.loads(row["signals"])),
        cancel=cancel,
        grants=held,
    )
    if row["crc"] != _job_crc(job):
        raise sqlite3.DatabaseError(f"the row of job {row['job_id']} is damaged")
    return job


def _write_age(db: sqlite3.Connection, job_id: JobId, age: Age | None) -> None:
    values: tuple[float | None, ...] = (None, None, None)
    if age is not None:
        values = (age.eligible_since_s, age.age_gained_s, age.window_since_s)
    db.execute(
        "UPDATE job SET eligible_since_s = ?, age_gained_s = ?, window_since_s = ?, age_crc = ?"
        " WHERE job_id = ?",
        (*values, _crc(values), job_id),
    )


def _age_from(row: sqlite3.Row) -> Age:
    values = (row["eligible_since_s"], row["age_gained_s"], row["window_since_s"])
    if row["age_crc"] != _crc(values):
        raise sqlite3.DatabaseError(f"the age of job {row['job_id']} is damaged")
    return Age(*values)


def _write_payload(db: sqlite3.Connection, job_id: JobId, payload: Payload) -> None:
    """Environments are kept once per content: an array of jobs shares one."""
    content = msgpack.packb([list(pair) for pair in payload.environment], use_bin_type=True)
    digest = hashlib.sha256(content).digest()
    db.execute(
        "INSERT OR IGNORE INTO environment (digest, content) VALUES (?, ?)", (digest, content)
    )
    environment_id = db.execute(
        "SELECT environment_id FROM environment WHERE digest = ?", (digest,)
    ).fetchone()[0]
    packed = _pack_payload(payload)
    db.execute(
        "INSERT OR REPLACE INTO payload VALUES (?, ?, ?, ?)",
        (job_id, environment_id, packed, zlib.crc32(packed)),
    )


def _write_brief(db: sqlite3.Connection, job_id: JobId, brief: Brief) -> None:
    values = (brief.argv, brief.whole, brief.cwd, brief.script_bytes)
    packed = msgpack.packb(values, use_bin_type=True)
    row = (job_id, packed, zlib.crc32(packed))
    db.execute("INSERT OR REPLACE INTO brief VALUES (?, ?, ?)", row)


def _brief_from(row: sqlite3.Row) -> Brief:
    if zlib.crc32(row["content"]) != row["crc"]:
        raise sqlite3.DatabaseError(f"the request of job {row['job_id']} is damaged in brief")
    argv, whole, cwd, script_bytes = msgpack.unpackb(row["content"], raw=False)
    return Brief(tuple(argv), whole, cwd, script_bytes)


def _pack_payload(payload: Payload) -> bytes:
    packed: bytes = msgpack.packb(
        {
            "argv": list(payload.argv),
            "script": payload.script,
            "cwd": payload.cwd,
            "umask": payload.umask,
            "rlimits": [list(limit) for limit in payload.rlimits],
            "output": payload.output,
            "error": payload.error,
        },
        use_bin_type=True,
    )
    return packed


def _read_payload(
    db: sqlite3.Connection, job_id: JobId, *, with_environment: bool = True
) -> Payload | None:
    row = db.execute(
        "SELECT payload.content, crc, digest, environment.content AS environment FROM payload"
        " LEFT JOIN environment USING (environment_id) WHERE job_id = ?",
        (job_id,),
    ).fetchone()
    if row is None:
        return None
    _check_payload(row, job_id)
    content = msgpack.unpackb(row["content"], raw=False)
    pairs = msgpack.unpackb(row["environment"]) if with_environment and row["environment"] else []
    return Payload(
        argv=tuple(content["argv"]),
        script=content["script"],
        cwd=content["cwd"],
        umask=content["umask"],
        rlimits=tuple((name, soft, hard) for name, soft, hard in content["rlimits"]),
        output=content["output"],
        error=content["error"],
        environment=tuple((key, value) for key, value in pairs),
    )


def _check_payload(row: sqlite3.Row, job_id: int) -> None:
    """Raise DatabaseError where a request is not what was submitted: it must not run."""
    environment = row["environment"]
    is_sound = zlib.crc32(row["content"]) == row["crc"] and (
        environment is None or hashlib.sha256(environment).digest() == row["digest"]
    )
    if not is_sound:
        raise sqlite3.DatabaseError(f"the request of job {job_id} is damaged")


def _forget_environment(db: sqlite3.Connection, job_id: JobId) -> None:
    """A final job's environment goes; the last user of a shared one takes it along."""
    row = db.execute("SELECT environment_id FROM payload WHERE job_id = ?", (job_id,)).fetchone()
    if row is None or row[0] is None:
        return
    db.execute("UPDATE payload SET environment_id = NULL WHERE job_id = ?", (job_id,))
    db.execute(
        "DELETE FROM environment WHERE environment_id = ? AND NOT EXISTS"
        " (SELECT 1 FROM payload WHERE environment_id = environment.environment_id)",
        (row[0],),
    )


def _submission_values(row: Submission) -> tuple[Any, ...]:
    return row.uid, row.submission_id, row.digest, json.dumps(row.job_ids), row.at_sched_s


def _submission_from(row: sqlite3.Row) -> Submission:
    _checked(row, "submission")
    ids = tuple(JobId(value) for value in json.loads(row["job_ids"]))
    return Submission(row["uid"], row["submission_id"], row["digest"], ids, row["at_sched_s"])


def _event_from(row: sqlite3.Row) -> Event:
    job_id = JobId(row["job_id"]) if row["job_id"] is not None else None
    return Event(row["kind"], row["at_s"], job_id, row["uid"], json.loads(row["data"]))


def _job_filter(
    ids: Iterable[JobId] | None,
    uids: Iterable[int] | None,
    users: Iterable[str] | None,
    states: Iterable[str] | None,
    name: str | None,
    ended_since_s: float | None,
) -> tuple[str, list[Any]]:
    """A WHERE clause and its values."""
    clauses, values = ["1"], []
    for column, wanted in (("job_id", ids), ("uid", uids), ("user", users), ("state", states)):
        if wanted is not None:
            picked = list(wanted)
            clauses.append(f"{column} IN ({','.join('?' * len(picked))})")
            values.extend(picked)
    if name is not None:
        clauses.append("name = ?")
        values.append(name)
    if ended_since_s is not None:
        clauses.append("(final = 0 OR (final = 1 AND ended_at_s >= ?))")
        values.append(ended_since_s)
    return " AND ".join(clauses), values
