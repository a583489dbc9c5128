"""Is what the database holds what was written? A little at the start, all of it beside the service.

At the start: what is about to be acted on, and the newest rows. Later, in slices, each row's
checksum and SQLite's own structure, indices included. Damage is a DatabaseError whenever found.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from gpusched_client.terms import JobId
from gpuschedd.store import rows
from gpuschedd.store.census import COUNTED, read_census, require_counts
from gpuschedd.store.columns import job_from
from gpuschedd.store.database import StoreDamaged, StoreFull, connect, is_damage
from gpuschedd.store.queries import grants_of, read_payload
from gpuschedd.store.schema import missing_from

CHECKED_ROWS_MAX = 1_000  # at the start
CHECKED_BYTES_MAX = 16 * 2**20
ROWS_PER_SLICE = 100
_ROW_TABLES = ("submission", "account", "promise", "gpu_use", "gpu", "length")


def check_newest(db: sqlite3.Connection) -> None:
    """Checksums of the newest jobs and requests, live or not. Raises DatabaseError."""
    newest = db.execute("SELECT coalesce(max(job_id), 0) FROM job").fetchone()[0]
    _check_jobs(db, newest - CHECKED_ROWS_MAX, CHECKED_ROWS_MAX, CHECKED_BYTES_MAX)


def _check_jobs(db: sqlite3.Connection, after_id: int, limit: int, bytes_max: float) -> int | None:
    """The jobs after that one, with their requests, newest first; the last id, None at the end."""
    found = db.execute(
        "SELECT * FROM job WHERE job_id > ? ORDER BY job_id LIMIT ?", (after_id, limit)
    ).fetchall()
    if not found:
        return None
    first, last = int(found[0]["job_id"]), int(found[-1]["job_id"])
    grants = grants_of(db, f"job.job_id BETWEEN {first} AND {last}")
    for row in found:
        job_from(row, grants)
        if row["eligible_since_s"] is not None:
            rows.age_from(row)
    between = (first, last)
    for row in db.execute("SELECT * FROM brief WHERE job_id BETWEEN ? AND ?", between):
        rows.brief_of_row(row["job_id"], str(row["crc"]), row["content"])
    left = bytes_max
    sizes = db.execute(
        "SELECT job_id, length(payload.content) + coalesce(length(environment.content), 0)"
        " FROM payload LEFT JOIN environment USING (environment_id)"
        " WHERE job_id BETWEEN ? AND ? ORDER BY job_id DESC",
        between,
    ).fetchall()
    for job_id, size in sizes:
        left -= size
        if left < 0:
            break
        read_payload(db, JobId(job_id))
    return last


Step = Callable[[], None]
T = TypeVar("T")


def looked_at(look: Callable[[], T]) -> T:
    """What it gives. Raises StoreDamaged, or StoreFull where nothing could be read for now."""
    try:
        return look()
    except (sqlite3.Error, MemoryError) as error:
        if not is_damage(error):
            raise StoreFull(f"the database could not be read: {error}") from error
        raise _damaged(error) from error
    except Exception as error:  # what damage does where nobody thought of it
        raise _damaged(error) from error


def _damaged(error: Exception) -> StoreDamaged:
    return StoreDamaged(
        f"the database is damaged: {error}. Restore a backup, or move it away to begin afresh"
    )


class Checker:
    """A reading connection that goes through all of a database. Blocks: for a thread of its own."""

    def __init__(self, path: Path) -> None:
        self._db = connect(path)
        self._db.execute("PRAGMA query_only = ON")
        self._last = 0  # job that was looked at; below 0: all were

    def interrupt(self) -> None:
        """From another thread: let the present step fail soon."""
        self._db.interrupt()

    def close(self) -> None:
        """Close the connection."""
        self._db.close()

    def steps(self) -> Iterator[Step]:
        """Each looks at a part, and raises DatabaseError where that is damaged."""
        yield self._require_schema
        tables = self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for table in sorted(row[0] for row in tables):
            yield lambda table=table: self._check_structure(table)  # type: ignore[misc]
        self._last = 0
        while self._last >= 0:
            yield self._check_next_jobs
        for table in _ROW_TABLES:
            yield from self._table_steps(table)
        yield self._check_meta
        yield self._check_counts

    def _require_schema(self) -> None:
        """SQLite misses no table. What decides nothing is made anew by who may write."""
        missing_from(self._db)

    def _check_structure(self, table: str) -> None:
        """Pages, rows, and that each index has an entry for each of them."""
        verdict = self._db.execute(f"PRAGMA integrity_check('{table}')").fetchone()[0]
        if verdict != "ok":
            raise sqlite3.DatabaseError(f"integrity_check of {table}: {verdict}")

    def _check_next_jobs(self) -> None:
        self._db.execute("BEGIN")  # one state of all its tables
        try:
            last = _check_jobs(self._db, self._last, ROWS_PER_SLICE, float("inf"))
            self._last = -1 if last is None else last
        finally:
            self._db.execute("COMMIT")

    def _table_steps(self, table: str) -> Iterator[Step]:
        """Its rows in the order of its key, from where the step before ended."""
        key = ", ".join(
            row["name"]
            for row in sorted(self._db.execute(f"PRAGMA table_info({table})"), key=_key_place)
            if row["pk"]
        )
        marks = ", ".join("?" * (key.count(",") + 1))
        last: list[tuple[object, ...]] = []

        def step() -> None:
            where = f"WHERE ({key}) > ({marks})" if last else ""
            found = self._db.execute(
                f"SELECT * FROM {table} {where} ORDER BY {key} LIMIT {ROWS_PER_SLICE}",
                last.pop() if last else (),
            ).fetchall()
            for row in found:
                rows.checked(row, table)
            if len(found) == ROWS_PER_SLICE:
                last.append(tuple(found[-1][name] for name in key.split(", ")))

        yield step
        while last:
            yield step

    def _check_meta(self) -> None:
        for row in self._db.execute("SELECT key FROM meta").fetchall():
            rows.meta(self._db, row["key"])

    def _check_counts(self) -> None:
        self._db.execute("BEGIN")
        try:
            found = {what: self._db.execute(COUNTED[what]).fetchone()[0] for what in COUNTED}
            require_counts(read_census(self._db), found)
        finally:
            self._db.execute("COMMIT")


def _key_place(row: sqlite3.Row) -> int:
    place: int = row["pk"]
    return place
