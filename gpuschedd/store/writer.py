"""The writing connection: one transaction a batch, durable when `commit` returns.

It lives in one dedicated thread, with synchronous=FULL: a committed batch survives a power cut.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack

from gpusched_client.terms import GpuUuid, JobId
from gpuschedd.core.job import Job
from gpuschedd.store import rows
from gpuschedd.store.columns import job_crc, job_from, job_values
from gpuschedd.store.database import (
    StoreBusy,
    StoreFull,
    StoreUnusable,
    StoreVanished,
    backup_to,
    empty_wal,
    files_of,
    open_database,
    transaction,
    typed_errors,
    unusable_text,
)
from gpuschedd.store.queries import gpu_uses, grants_of, read_payload
from gpuschedd.store.records import (
    RECENT_SUBMISSIONS_MAX,
    Age,
    AttemptEnd,
    Brief,
    Changes,
    Loaded,
    Payload,
    PromiseRow,
    Remembered,
    UsageRow,
    brief_of,
)
from gpuschedd.system.clock import ClockMark

EVENTS_MAX = 1_000_000
AUDIT_ROWS_MAX = 100_000
SUBMISSION_KEPT_S = 7 * 86_400.0
CHECKED_ROWS_MAX = 20_000  # whose checksums are looked at when the daemon starts


class Store:
    """The writing connection. Every method blocks: call it in the database thread."""

    def __init__(self, path: Path, connection: sqlite3.Connection, instance: str) -> None:
        self.path = path
        self.instance = instance
        self._db = connection
        self._files = files_of(path)

    @classmethod
    def open(cls, state_dir: Path) -> Store:
        """Open or create the database in state_dir; check it and bring it to the newest schema.

        Raises StoreUnusable (corrupt, newer, vanished) or StoreFull.
        """
        return cls(*open_database(state_dir))

    def close(self) -> None:
        """Close; nothing is pending, since every commit is complete."""
        self._db.close()

    def commit(self, changes: Changes) -> None:
        """Write one batch durably. Raises StoreFull (nothing written) or StoreBroken."""
        self._durably(lambda: self._write_checked(changes))

    def _durably(self, write: Callable[[], None]) -> None:
        """One transaction. Where it finds no room, once more over the old content of the WAL."""
        try:
            with typed_errors(), transaction(self._db):
                write()
        except StoreFull as full:
            if isinstance(full, StoreBusy) or not empty_wal(self._db):
                raise
            with typed_errors(), transaction(self._db):
                write()

    def _write_checked(self, changes: Changes) -> None:
        self._write(changes)
        self._check_files()

    def _check_files(self) -> None:
        """SQLite goes on writing to files that were removed under it, and says nothing."""
        if files_of(self.path) != self._files:
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
            [(*row, rows.crc(row)) for row in map(rows.submission_values, changes.submissions)],
        )
        for row in changes.accounts.values():
            _upsert(db, "account", rows.fields_of(row))
        for promise in changes.promises.values():
            _upsert(db, "promise", rows.fields_of(promise))
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
            raise StoreUnusable(unusable_text(self.path, error)) from error

    def _load(self) -> Loaded:
        db = self._db
        self._check_rows()
        live = db.execute("SELECT * FROM job WHERE final = 0 ORDER BY job_id").fetchall()
        grants = grants_of(db, "job.final = 0")
        recent = db.execute(
            "SELECT * FROM submission ORDER BY at_sched_s DESC LIMIT ?", (RECENT_SUBMISSIONS_MAX,)
        ).fetchall()
        next_id = db.execute("SELECT coalesce(max(job_id), 0) + 1 FROM job").fetchone()[0]
        return Loaded(
            instance=self.instance,
            mark=rows.mark_from(db),
            next_job_id=max(next_id, int(rows.meta(db, "next_job_id") or 1)),
            jobs=tuple(job_from(row, grants) for row in live),
            ages={
                JobId(row["job_id"]): rows.age_from(row)
                for row in live
                if row["eligible_since_s"] is not None
            },
            accounts=tuple(
                UsageRow(**rows.checked(row, "account"))
                for row in db.execute("SELECT * FROM account")
            ),
            promises=tuple(
                PromiseRow(**rows.checked(row, "promise"))
                for row in db.execute("SELECT * FROM promise WHERE outcome IS NULL")
            ),
            gpus=tuple(rows.gpu_row_from(row) for row in db.execute("SELECT * FROM gpu")),
            gpu_uses=tuple(gpu_uses(db, "job.final = 0")),
            health=rows.health_from(db),
            last_event_id=db.execute("SELECT coalesce(max(event_id), 0) FROM event").fetchone()[0],
            submissions=tuple(rows.submission_from(row) for row in reversed(recent)),
        )

    def _check_rows(self) -> None:
        """Checksums of the newest rows, live or not: damage is found before it is acted on."""
        newest = self._db.execute(
            "SELECT * FROM job ORDER BY job_id DESC LIMIT ?", (CHECKED_ROWS_MAX,)
        ).fetchall()
        if not newest:
            return
        grants = grants_of(self._db, f"job.job_id >= {int(newest[-1]['job_id'])}")
        for row in newest:
            job_from(row, grants)
        for (job_id,) in self._db.execute(
            "SELECT job_id FROM payload ORDER BY job_id DESC LIMIT ?", (CHECKED_ROWS_MAX,)
        ).fetchall():
            read_payload(self._db, job_id)
        for row in self._db.execute(
            "SELECT * FROM brief ORDER BY job_id DESC LIMIT ?", (CHECKED_ROWS_MAX,)
        ):
            rows.brief_from(row)

    def payload(self, job_id: JobId) -> Payload | None:
        """The launch's part of a request, environment included while the job is live.

        Raises StoreBroken.
        """
        with typed_errors():
            return read_payload(self._db, job_id)

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
        backup_to(self._db, target)


def _upsert(db: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> None:
    values = {**values, "crc": rows.crc(values.values())}
    names = ", ".join(values)
    marks = ", ".join("?" * len(values))
    db.execute(f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))


def _write_mark(db: sqlite3.Connection, mark: ClockMark) -> None:
    content = json.dumps([mark.boot_id, mark.offset_s, mark.scheduler_s, mark.wall_s])
    db.execute("INSERT OR REPLACE INTO meta VALUES ('clock', ?)", (content,))


def _write_gpus(db: sqlite3.Connection, changes: Changes) -> None:
    for gpu in changes.gpus.values():
        _upsert(db, "gpu", rows.fields_of(gpu))
    for use in changes.gpu_uses:
        _upsert(db, "gpu_use", rows.fields_of(use))
    if changes.health is not None:
        _write_health(db, changes.health)


def _write_health(db: sqlite3.Connection, health: Mapping[GpuUuid, Remembered]) -> None:
    content = json.dumps({uuid: [row.pardoned, row.errors_seen] for uuid, row in health.items()})
    db.execute("INSERT OR REPLACE INTO meta VALUES ('health', ?)", (content,))


def _write_job(db: sqlite3.Connection, job: Job, index_of: Mapping[GpuUuid, int]) -> None:
    """Insert or update one job, its allocation and its attempt."""
    values = job_values(job)
    values["crc"] = job_crc(values, job.grants)
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


def _write_age(db: sqlite3.Connection, job_id: JobId, age: Age | None) -> None:
    values: tuple[float | None, ...] = (None, None, None)
    if age is not None:
        values = (age.eligible_since_s, age.age_gained_s, age.window_since_s)
    db.execute(
        "UPDATE job SET eligible_since_s = ?, age_gained_s = ?, window_since_s = ?, age_crc = ?"
        " WHERE job_id = ?",
        (*values, rows.crc(values), job_id),
    )


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
    packed = rows.pack_payload(payload)
    db.execute(
        "INSERT OR REPLACE INTO payload VALUES (?, ?, ?, ?)",
        (job_id, environment_id, packed, zlib.crc32(packed)),
    )


def _write_brief(db: sqlite3.Connection, job_id: JobId, brief: Brief) -> None:
    values = (brief.argv, brief.whole, brief.cwd, brief.script_bytes)
    packed = msgpack.packb(values, use_bin_type=True)
    row = (job_id, packed, zlib.crc32(packed))
    db.execute("INSERT OR REPLACE INTO brief VALUES (?, ?, ?)", row)


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
