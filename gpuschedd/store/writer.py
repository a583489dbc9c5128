"""The writing connection: one transaction a batch, durable when `commit` returns.

It lives in one dedicated thread, with synchronous=FULL: a committed batch survives a power cut.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack

from gpusched_client.terms import GpuUuid, JobId
from gpuschedd.core.job import Job
from gpuschedd.core.model import LengthRow
from gpuschedd.store import retention, rows
from gpuschedd.store.census import COUNTED, Census, read_census, require_counts
from gpuschedd.store.checks import check_newest
from gpuschedd.store.columns import job_from, write_rows
from gpuschedd.store.database import (
    MARKER_NAME,
    StoreBroken,
    StoreBusy,
    StoreDamaged,
    StoreFull,
    StoreVanished,
    backup_to,
    empty_wal,
    files_of,
    mend_schema,
    open_database,
    transaction,
    typed_errors,
    typed_opening,
    write_marker,
)
from gpuschedd.store.in_use import Mark
from gpuschedd.store.queries import gpu_uses, grants_of, live_request_bytes, read_payload
from gpuschedd.store.records import (
    RECENT_SUBMISSIONS_LOADED,
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
from gpuschedd.store.retention import KeptBytes
from gpuschedd.store.sharing import CommonValues
from gpuschedd.system.clock import ClockMark


class Store:
    """The writing connection. Every method blocks: call it in the database thread."""

    def __init__(
        self, path: Path, connection: sqlite3.Connection, instance: str, mark: Mark
    ) -> None:
        self.path = path
        self.instance = instance
        self._db = connection
        self._mark = mark
        self._is_whole = True
        self._kept: KeptBytes = {}
        self._files = files_of(path)
        with typed_opening(path):
            self._census = read_census(connection)

    @classmethod
    def open(cls, state_dir: Path) -> Store:
        """Open or create the database in state_dir; check it and bring it to the newest schema.

        Raises StoreUnusable (corrupt, newer, vanished) or StoreFull.
        """
        return cls(*open_database(state_dir))

    def close(self) -> None:
        """Close; nothing is pending, since every commit is complete."""
        complete = self._is_whole and empty_wal(self._db)
        self._mark.close(complete=complete)
        self._db.close()

    def look(self) -> None:
        """Make the names beside the database again that somebody has removed. Raises OSError."""
        if files_of(self.path) == self._files:  # or the next commit says what has happened
            write_marker(self.path.with_name(MARKER_NAME), self.instance)
            self._mark.look()

    def commit(self, changes: Changes) -> None:
        """Write one batch durably. Raises StoreFull (nothing written) or StoreBroken."""
        self._durably(lambda census, kept: self._write(changes, census, kept))

    def _durably(self, write: Callable[[Census, KeptBytes], None]) -> None:
        """One transaction. Where it finds no room, once more over the old content of the WAL.

        So too where a table has gone that decides nothing and that could be made anew.
        """
        try:
            self._in_transaction(write)
        except StoreFull as full:
            if isinstance(full, StoreBusy) or not empty_wal(self._db):
                raise
            self._in_transaction(write)
        except StoreDamaged:
            if not self.mend():
                raise
            self._is_whole = True
            self._in_transaction(write)

    def _in_transaction(self, write: Callable[[Census, KeptBytes], None]) -> None:
        """With the counts that belong to it; the mark follows what is durable."""
        census, kept = self._census.copy(), self._kept.copy()
        census.commits += 1
        try:
            with typed_errors(), transaction(self._db):
                write(census, kept)
                census.write(self._db)
                self._check_files()
        except StoreBroken:
            self._is_whole = False
            raise
        self._census, self._kept = census, kept
        self._mark.reach(census.commits)

    def _check_files(self) -> None:
        """SQLite goes on writing to files that were removed under it, and says nothing."""
        if files_of(self.path) != self._files:
            raise StoreVanished(
                f"{self.path} or its -wal file was removed or replaced while in use. Restore a "
                "backup, or start the daemon again to go on with what is there"
            )

    def _write(self, changes: Changes, census: Census, kept: KeptBytes) -> None:
        db = self._db
        if changes.mark is not None:
            census.add("meta", _write_mark(db, changes.mark))
        census.add("live jobs", _write_jobs(db, changes, census.next_job_id))
        census.next_job_id = max([census.next_job_id, *(number + 1 for number in changes.jobs)])
        _write_payloads(db, changes.payloads)
        db.executemany(_UPDATE_AGE, [_age_row(*each) for each in changes.ages.items()])
        ended_sched_s = 0.0 if changes.mark is None else changes.mark.scheduler_s
        for job in changes.jobs.values():
            if job.is_final:
                _forget_environment(db, job.job_id)
                retention.keep(db, job, ended_sched_s, kept)
        retention.drop_excess(db, {j.uid for j in changes.jobs.values() if j.is_final}, kept)
        census.add("submissions", len(changes.submissions))
        db.executemany(
            "INSERT INTO submission VALUES (?, ?, ?, ?, ?, ?)",
            [(*row, rows.crc(row)) for row in map(rows.submission_values, changes.submissions)],
        )
        for row in changes.accounts.values():
            census.add("accounts", _is_new(db, "account", "uid = ?", row.uid))
            _upsert(db, "account", rows.fields_of(row))
        for promise in changes.promises.values():
            census.add("open promises", _write_promise(db, promise))
        _write_gpus(db, changes, census)
        for length in changes.lengths:
            _write_length(db, length)
        for end in changes.attempts:
            _write_attempt_end(db, end)
        db.executemany(
            "INSERT INTO event VALUES (?, ?, ?, ?, ?, ?)",
            [
                (number, e.at_s, e.kind, e.job_id, e.uid, json.dumps(dict(e.data)))
                for number, e in changes.events
            ],
        )
        census.last_event_id = max([census.last_event_id, *(n for n, _ in changes.events)])
        db.executemany(
            "INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?)",
            [(a.at_s, a.uid, a.pid, a.method, a.outcome, a.detail) for a in changes.audits],
        )

    def load(self) -> Loaded:
        """Everything that is not history."""
        with typed_opening(self.path):
            return self._load()

    def _load(self) -> Loaded:
        db = self._db
        jobs, ages = self._live()
        self._require_live(jobs)
        check_newest(db)
        recent = db.execute(
            "SELECT * FROM submission ORDER BY at_sched_s DESC LIMIT ?",
            (RECENT_SUBMISSIONS_LOADED,),
        ).fetchall()
        loaded = Loaded(
            instance=self.instance,
            mark=rows.mark_from(db),
            next_job_id=self._census.next_job_id,
            jobs=tuple(jobs.values()),
            ages=ages,
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
            last_event_id=self._census.last_event_id,
            submissions=tuple(rows.submission_from(row) for row in reversed(recent)),
            request_bytes=live_request_bytes(db),
            lengths=tuple(map(rows.length_from, db.execute("SELECT * FROM length"))),
        )
        found = {"accounts": len(loaded.accounts), "open promises": len(loaded.promises)}
        # Where there are more they are counted beside the service: a start does not read them all.
        all_of_them = min(self._census.counts["submissions"], RECENT_SUBMISSIONS_LOADED)
        if len(recent) != all_of_them:
            found["submissions"] = len(recent)
        require_counts(self._census, {**found, "GPUs": len(loaded.gpus)})
        return loaded

    def _live(self) -> tuple[dict[JobId, Job], dict[JobId, Age]]:
        """The jobs that have not ended, and the ages of those that wait. Raises DatabaseError."""
        grants, common = grants_of(self._db, "job.final = 0"), CommonValues()
        jobs: dict[JobId, Job] = {}
        ages: dict[JobId, Age] = {}
        # Row by row: all of them at once take more memory than what is made of them.
        for row in self._db.execute("SELECT * FROM job WHERE final = 0 ORDER BY job_id"):
            job = job_from(row, grants, common)
            jobs[job.job_id] = job
            if row["eligible_since_s"] is not None:
                ages[job.job_id] = rows.age_from(row, common)
        return jobs, ages

    def _require_live(self, jobs: Mapping[JobId, Job]) -> None:
        """All jobs that were committed as live, each with what it runs. Raises DatabaseError."""
        is_live = [not job.is_final for job in jobs.values()]
        require_counts(self._census, {"live jobs": sum(is_live)})
        require_counts(self._census, {"meta": self._db.execute(COUNTED["meta"]).fetchone()[0]})
        highest = self._db.execute("SELECT coalesce(max(job_id), 0) FROM job").fetchone()[0]
        if highest + 1 != self._census.next_job_id or not all(is_live):
            raise sqlite3.DatabaseError(
                f"the newest job is {highest}, and {self._census.next_job_id - 1} was committed"
            )
        without = self._db.execute(
            "SELECT job_id FROM job WHERE final = 0 AND NOT EXISTS (SELECT 1 FROM payload"
            " JOIN environment USING (environment_id) WHERE payload.job_id = job.job_id)"
        ).fetchone()
        if without is not None:
            raise sqlite3.DatabaseError(f"the request or environment of job {without[0]} is gone")

    def payload(self, job_id: JobId) -> Payload:
        """The launch's part of a request, environment included while the job is live.

        Raises StoreBroken, where it is not there as well.
        """
        with typed_errors():
            found = read_payload(self._db, job_id)
            if found is None:
                raise sqlite3.DatabaseError(f"the request of job {job_id} is gone")
        return found

    def drop(self, old: retention.Old) -> bool:
        """Forget a few rows that are past their limit; True where there may be more of them.

        Raises StoreFull (nothing dropped) or StoreBroken.
        """
        dropped = 0

        def write(census: Census, kept: KeptBytes) -> None:
            nonlocal dropped
            dropped = retention.drop(self._db, old, kept)
            if old.table == "submission":
                census.add("submissions", -dropped)

        self._durably(write)
        return dropped > 0

    def mend(self) -> bool:
        """Make what has gone of the schema and decides nothing; True where there was any.

        Raises StoreDamaged where something that decides has gone, and StoreFull.
        """
        with typed_errors():
            return mend_schema(self._db)

    def backup(self, target: Path) -> None:
        """A consistent copy of the database, while it is in use."""
        backup_to(self._db, target)


def _upsert(db: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> None:
    values = {**values, "crc": rows.crc(values.values())}
    names = ", ".join(values)
    marks = ", ".join("?" * len(values))
    db.execute(f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))


def _write_mark(db: sqlite3.Connection, mark: ClockMark) -> bool:
    content = json.dumps([mark.boot_id, mark.offset_s, mark.scheduler_s, mark.wall_s])
    return rows.write_meta(db, "clock", content)


def _is_new(db: sqlite3.Connection, table: str, where: str, *key: Any) -> bool:
    return db.execute(f"SELECT 1 FROM {table} WHERE {where}", key).fetchone() is None


def _write_promise(db: sqlite3.Connection, promise: PromiseRow) -> int:
    """By how many the open ones become more, or fewer."""
    before = db.execute(
        "SELECT outcome FROM promise WHERE job_id = ? AND promised_sched_s = ?",
        (promise.job_id, promise.promised_sched_s),
    ).fetchone()
    _upsert(db, "promise", rows.fields_of(promise))
    was_open = before is not None and before[0] is None
    return int(promise.outcome is None) - int(was_open)


def _write_gpus(db: sqlite3.Connection, changes: Changes, census: Census) -> None:
    for gpu in changes.gpus.values():
        census.add("GPUs", _is_new(db, "gpu", "uuid = ?", gpu.uuid))
        _upsert(db, "gpu", rows.fields_of(gpu))
    for use in changes.gpu_uses:
        _upsert(db, "gpu_use", rows.fields_of(use))
    if changes.health is not None:
        census.add("meta", _write_health(db, changes.health))


def _write_health(db: sqlite3.Connection, health: Mapping[GpuUuid, Remembered]) -> bool:
    content = json.dumps({uuid: [row.pardoned, row.errors_seen] for uuid, row in health.items()})
    return rows.write_meta(db, "health", content)


def _write_jobs(db: sqlite3.Connection, changes: Changes, next_job_id: int) -> int:
    """Insert or update jobs, their allocations and attempts; how many more are live by them.

    From `next_job_id` on they are new.
    """
    jobs = changes.jobs.values()
    were_live = sum(job.job_id < next_job_id and _is_live(db, job.job_id) for job in jobs)
    write_rows(db, jobs)
    for job in jobs:
        if job.decided_sched_s is not None:
            _write_attempt(db, job, changes.gpu_index_of)
    return sum(not job.is_final for job in jobs) - were_live


def _is_live(db: sqlite3.Connection, job_id: JobId) -> bool:
    row = db.execute("SELECT final FROM job WHERE job_id = ?", (job_id,)).fetchone()
    return row is not None and not row[0]


def _write_attempt(db: sqlite3.Connection, job: Job, index_of: Mapping[GpuUuid, int]) -> None:
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


_UPDATE_AGE = (
    f"UPDATE job SET {', '.join(f'{column} = ?' for column in rows.AGE_COLUMNS)}, age_crc = ?"
    " WHERE job_id = ?"
)


def _age_row(job_id: JobId, age: Age | None) -> tuple[Any, ...]:
    values = tuple(rows.age_values(age).values())
    return (*values, rows.age_crc(values), job_id)


def _write_length(db: sqlite3.Connection, row: LengthRow) -> None:
    if not row.runs:
        key = (row.uid, *row.kind)
        db.execute("DELETE FROM length WHERE uid = ? AND key = ? AND gpus = ?", key)
        return
    values = rows.length_values(row)
    db.execute(
        "INSERT OR REPLACE INTO length VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (*values, rows.crc(values)),
    )


def _write_payloads(db: sqlite3.Connection, payloads: Mapping[JobId, Payload]) -> None:
    """Environments are kept once per content: the jobs of one submission mostly share one."""
    written: list[tuple[Any, ...]] = []
    before, environment_id, digest = None, 0, b""
    for job_id, payload in payloads.items():
        if payload.environment is not before:
            environment_id, digest = _write_environment(db, payload)
            before = payload.environment
        packed = rows.pack_payload(payload)
        crc = rows.payload_crc(job_id, packed, digest)
        written.append((job_id, environment_id, packed, crc))
    db.executemany("INSERT OR REPLACE INTO payload VALUES (?, ?, ?, ?)", written)
    db.executemany(
        "INSERT OR REPLACE INTO brief VALUES (?, ?, ?)",
        [_brief_row(job_id, brief_of(payload)) for job_id, payload in payloads.items()],
    )


def _write_environment(db: sqlite3.Connection, payload: Payload) -> tuple[int, bytes]:
    """The id of its row, and its digest."""
    content = msgpack.packb(payload.environment, use_bin_type=True)
    digest = hashlib.sha256(content).digest()
    db.execute(
        "INSERT OR IGNORE INTO environment (digest, content) VALUES (?, ?)", (digest, content)
    )
    found = db.execute("SELECT environment_id FROM environment WHERE digest = ?", (digest,))
    return found.fetchone()[0], digest


def _brief_row(job_id: JobId, brief: Brief) -> tuple[Any, ...]:
    values = (brief.argv, brief.whole, brief.cwd, brief.script_bytes)
    packed = msgpack.packb(values, use_bin_type=True)
    return job_id, packed, rows.brief_crc(job_id, packed)


def _forget_environment(db: sqlite3.Connection, job_id: JobId) -> None:
    """A final job's environment goes; the last user of a shared one takes it along."""
    row = db.execute(
        "SELECT environment_id, digest, crc FROM payload JOIN environment USING (environment_id)"
        " WHERE job_id = ?",
        (job_id,),
    ).fetchone()
    if row is None:
        return
    environment_id, digest, before = row
    # What is known of the content goes on without the environment, unread.
    after = before ^ rows.link_crc(job_id, digest) ^ rows.link_crc(job_id, None)
    db.execute(
        "UPDATE payload SET environment_id = NULL, crc = ? WHERE job_id = ?", (after, job_id)
    )
    db.execute(
        "DELETE FROM environment WHERE environment_id = ? AND NOT EXISTS"
        " (SELECT 1 FROM payload WHERE environment_id = environment.environment_id)",
        (environment_id,),
    )
