"""What is kept of the past, and for how long: by age, and of each user only so much.

A job's row stays. What its owner asked (argv, script, options) and all texts about it go with its
request; events, audit rows, submission ids and promises go by themselves. One user's flood never
takes another's history: every bound on numbers is a user's own. Here is what is looked for, beside
the service (`find_old`), and what the writer does about it, a few rows at a time (`drop`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gpuschedd.core.job import Job
from gpuschedd.core.lengths import KEPT_S
from gpuschedd.store.columns import job_from, write_rows
from gpuschedd.store.queries import grants_of

REQUEST_BYTES_PER_UID_MAX = 64 * 2**20  # of final jobs
EVENTS_PER_UID_MAX = 100_000
SUBMISSIONS_PER_UID_MAX = 100_000
DENIALS_PER_UID_MAX = 1_000
ADMIN_ROWS_MAX = 100_000
SUBMISSION_KEPT_S = 7 * 86_400.0

HOST = -2  # instead of a uid: rows of no user; all uids without an account are -1

ROWS_PER_DROP = 200
REQUESTS_PER_DROP = 20
_REQUEST_BYTES_PER_DROP = 2**20
_DROPS_PER_COMMIT = 5  # of each user; what is left then goes beside the service

#: uid -> bytes of the requests of its final jobs; of those who were looked at since the start.
KeptBytes = dict[int, int]


@dataclass(frozen=True, slots=True)
class Old:
    """Rows of a table that are past their limit: up to that id or time, of one user or of all."""

    table: str
    upto: float
    uid: int | None = None
    outcome: str | None = None  # of audit rows


@dataclass(frozen=True, slots=True)
class Ages:
    """What counts as old."""

    requests_s: float
    events_s: float


def _kept_by(db: sqlite3.Connection, uid: int, kept: KeptBytes) -> int:
    if uid not in kept:
        query = "SELECT coalesce(sum(bytes), 0) FROM kept WHERE uid = ?"
        kept[uid] = db.execute(query, (uid,)).fetchone()[0]
    return kept[uid]


def keep(db: sqlite3.Connection, job: Job, ended_sched_s: float, kept: KeptBytes) -> None:
    """A job has become final: its request counts from now on."""
    if db.execute("SELECT 1 FROM kept WHERE job_id = ?", (job.job_id,)).fetchone():
        return
    row = db.execute(
        "SELECT length(payload.content) + coalesce(length(brief.content), 0) FROM payload"
        " LEFT JOIN brief USING (job_id) WHERE job_id = ?",
        (job.job_id,),
    ).fetchone()
    if row is None:
        return
    before = _kept_by(db, job.uid, kept)
    db.execute("INSERT INTO kept VALUES (?, ?, ?, ?)", (job.job_id, job.uid, row[0], ended_sched_s))
    kept[job.uid] = before + row[0]


def drop_excess(db: sqlite3.Connection, uids: Iterable[int], kept: KeptBytes) -> None:
    """Of who has more than the limit the oldest requests go, as new ones come."""
    for uid in uids:
        for _ in range(_DROPS_PER_COMMIT):
            if not _drop_excess(db, uid, kept):
                break


def _drop_excess(db: sqlite3.Connection, uid: int, kept: KeptBytes) -> int:
    over = _kept_by(db, uid, kept) - REQUEST_BYTES_PER_UID_MAX
    if over <= 0:
        return 0
    return _drop_requests(db, "uid = ?", (uid,), kept, min(over, _REQUEST_BYTES_PER_DROP))


def drop(db: sqlite3.Connection, old: Old, kept: KeptBytes) -> int:
    """Forget a few of these rows; how many."""
    if old.table == "kept":
        _, where, values = _selected(old)
        return _drop_requests(db, where, values, kept, _REQUEST_BYTES_PER_DROP)
    if old.table == "excess":
        assert old.uid is not None
        return _drop_excess(db, old.uid, kept)
    key, where, values = _selected(old)
    picked = f"SELECT {key} FROM {old.table} WHERE {where} LIMIT {ROWS_PER_DROP}"
    return db.execute(f"DELETE FROM {old.table} WHERE ({key}) IN ({picked})", values).rowcount


def _drop_requests(
    db: sqlite3.Connection, where: str, values: tuple[float, ...], kept: KeptBytes, enough: int
) -> int:
    """The oldest of them, until they were `enough` bytes; how many."""
    found = db.execute(
        f"SELECT job_id, uid, bytes FROM kept WHERE {where} ORDER BY ended_sched_s, job_id LIMIT ?",
        (*values, REQUESTS_PER_DROP),
    ).fetchall()
    dropped = dropped_bytes = 0
    for job_id, uid, size in found:
        if dropped_bytes >= enough:
            break
        before = _kept_by(db, uid, kept)
        _forget_request(db, job_id)
        kept[uid] = before - size
        dropped += 1
        dropped_bytes += size
    return dropped


def _forget_request(db: sqlite3.Connection, job_id: int) -> None:
    """What was asked and what was said of it; what was used, and how it ended, stays."""
    for table in ("kept", "brief", "payload"):
        db.execute(f"DELETE FROM {table} WHERE job_id = ?", (job_id,))
    row = db.execute("SELECT * FROM job WHERE job_id = ?", (job_id,)).fetchone()
    job = job_from(row, grants_of(db, f"job.job_id = {int(job_id)}"))
    cancel = None if job.cancel is None else replace(job.cancel, reason=None)
    job = replace(job, length_key=None, whole_note=None, hold_detail=None, cause_detail=None)
    write_rows(db, [replace(job, cancel=cancel, signals=(), environment=None)])
    db.execute("UPDATE attempt SET detail = NULL WHERE job_id = ?", (job_id,))


#: Table -> its key, and which rows are past a limit.
_ROWS = {
    "kept": ("job_id", "ended_sched_s < ?"),
    "event": ("event_id", "event_id <= ?"),
    "audit": ("rowid", "rowid <= ?"),
    "submission": ("uid, submission_id", "at_sched_s < ?"),
    "length": ("uid, key, gpus", "ended_s < ?"),
    "promise": ("job_id, promised_sched_s", "outcome IS NOT NULL AND outcome_at_s < ?"),
}


def _selected(old: Old) -> tuple[str, str, tuple[float, ...]]:
    """The key of its table, which rows are meant, and the values in that."""
    key, where = _ROWS[old.table]
    values: list[float] = [old.upto]
    if old.uid == HOST:
        where += " AND uid IS NULL"
    elif old.uid is not None:
        where += " AND uid = ?"
        values.append(old.uid)
    if old.outcome is not None:
        where += f" AND outcome {old.outcome} 'denied'"
    return key, where, tuple(values)


def find_old(db: sqlite3.Connection, ages: Ages, now_sched_s: float, now_s: float) -> Iterator[Old]:
    """What is past its limit now, and there: a sweep that finds nothing costs the writer nothing.

    Reads for a while on a large database: not for the writer.
    """
    return (old for old in _limits(db, ages, now_sched_s, now_s) if _is_there(db, old))


def _is_there(db: sqlite3.Connection, old: Old) -> bool:
    if old.table == "excess":
        return True  # its bytes were counted
    _, where, values = _selected(old)
    query = f"SELECT 1 FROM {old.table} WHERE {where} LIMIT 1"
    return db.execute(query, values).fetchone() is not None


def _limits(db: sqlite3.Connection, ages: Ages, now_sched_s: float, now_s: float) -> Iterator[Old]:
    yield Old("kept", now_sched_s - ages.requests_s)
    for row in db.execute(
        "SELECT uid FROM kept GROUP BY uid HAVING sum(bytes) > ?", (REQUEST_BYTES_PER_UID_MAX,)
    ).fetchall():
        yield Old("excess", REQUEST_BYTES_PER_UID_MAX, uid=row[0])
    yield Old("submission", now_sched_s - SUBMISSION_KEPT_S)
    yield Old("length", now_sched_s - KEPT_S)
    yield Old("promise", now_s - ages.events_s)
    yield from _aged(db, "event", "event_id", now_s - ages.events_s)
    yield from _aged(db, "audit", "rowid", now_s - ages.events_s)
    yield from _many(db, "event", "event_id", "", EVENTS_PER_UID_MAX)
    yield from _many_submissions(db)
    yield from _many(db, "audit", "rowid", "= 'denied'", DENIALS_PER_UID_MAX)
    row = db.execute(
        "SELECT rowid FROM audit WHERE outcome <> 'denied' ORDER BY rowid DESC LIMIT 1 OFFSET ?",
        (ADMIN_ROWS_MAX,),
    ).fetchone()
    if row is not None:
        yield Old("audit", row[0], outcome="<>")


def _aged(db: sqlite3.Connection, table: str, key: str, before_s: float) -> Iterator[Old]:
    """In the order in which they were written, up to the first that is young enough."""
    young = db.execute(
        f"SELECT {key} FROM {table} WHERE at_s >= ? ORDER BY {key} LIMIT 1", (before_s,)
    ).fetchone()
    newest = db.execute(f"SELECT max({key}) FROM {table}").fetchone()[0]
    if newest is not None:
        yield Old(table, newest if young is None else young[0] - 1)


def _many(db: sqlite3.Connection, table: str, key: str, outcome: str, most: int) -> Iterator[Old]:
    """Of each user who has more than that many, all but the newest."""
    only = f" AND outcome {outcome}" if outcome else ""
    counts = db.execute(
        f"SELECT uid FROM {table} WHERE true{only} GROUP BY uid HAVING count(*) > ?", (most,)
    ).fetchall()
    for (uid,) in counts:
        row = db.execute(
            f"SELECT {key} FROM {table} WHERE uid IS ?{only} ORDER BY {key} DESC LIMIT 1 OFFSET ?",
            (uid, most),
        ).fetchone()
        yield Old(table, row[0], uid=HOST if uid is None else uid, outcome="=" if outcome else None)


def _many_submissions(db: sqlite3.Connection) -> Iterator[Old]:
    counts = db.execute(
        "SELECT uid FROM submission GROUP BY uid HAVING count(*) > ?", (SUBMISSIONS_PER_UID_MAX,)
    ).fetchall()
    for (uid,) in counts:
        row = db.execute(
            "SELECT at_sched_s FROM submission WHERE uid = ?"
            " ORDER BY at_sched_s DESC LIMIT 1 OFFSET ?",
            (uid, SUBMISSIONS_PER_UID_MAX - 1),
        ).fetchone()
        yield Old("submission", row[0], uid=uid)
