"""The reading connection: questions about the past, so that a slow one never delays a commit."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gpusched_client.errors import StorageError
from gpusched_client.terms import EventKind, JobId, JobState
from gpuschedd.core.job import Job
from gpuschedd.store.columns import job_from
from gpuschedd.store.database import connect, typed_opening
from gpuschedd.store.queries import gpu_uses, grants_of, read_payload
from gpuschedd.store.records import Brief, Event, GpuUse, Payload, PromiseRow, Submission
from gpuschedd.store.retention import Ages, Old, find_old
from gpuschedd.store.rows import brief_of_row, checked, event_from, submission_from

log = logging.getLogger(__name__)

T = TypeVar("T")

READ_AT_ONCE = 25  # a few milliseconds
READ_PAUSE_S = 0.001


def _with_pauses(items: Iterable[T]) -> Iterator[T]:
    """The items; where they are many, the daemon's loop has the interpreter in between."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % READ_AT_ONCE == 0:
            time.sleep(READ_PAUSE_S)


class History:
    """The reading connection: questions about the past. Blocks: call it in a reader thread."""

    def __init__(self, path: Path) -> None:
        """Raises StoreUnusable or StoreFull where it cannot be opened, as the writer does."""
        with typed_opening(path):
            self._db = connect(path)
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
        states: Sequence[str] | None = None,
        name: str | None = None,
        ended_since_s: float | None = None,
        before_id: JobId | None = None,
        limit: int = 1_000,
        known: Mapping[JobId, Job] | None = None,
    ) -> tuple[list[Job], int]:
        """Matching jobs, newest last, at most limit of the newest; and how many match in all.

        `known`: jobs in memory, which are taken instead of rows in the same state.
        """
        found_by, order, values = _job_filter(ids, uids, users, states, name, ended_since_s)
        page, paged = found_by, values
        if before_id is not None:
            page, paged = f"SELECT * FROM ({found_by}) WHERE job_id < ?", [*values, before_id]
        # As one row, as `briefs`.
        total, found = self._db.execute(
            f"SELECT (SELECT count(*) FROM ({found_by})),"
            " (SELECT group_concat(job_id || ' ' || state, ',') FROM job WHERE job_id IN"
            f" (SELECT job_id FROM ({page}) ORDER BY {order} DESC LIMIT ?))",
            [*values, *paged, limit],
        ).fetchone()
        states_of = dict(_id_and_state(entry) for entry in found.split(",")) if found else {}
        jobs = {}
        for job_id, state in states_of.items():
            job = None if known is None else known.get(job_id)
            if job is not None and job.state == state:
                jobs[job_id] = job
        jobs.update(self._rows(job_id for job_id in states_of if job_id not in jobs))
        return [jobs[job_id] for job_id in sorted(jobs)], total

    def _rows(self, job_ids: Iterable[JobId]) -> dict[JobId, Job]:
        """The jobs as they are stored; those that are missing are left out."""
        picked = ",".join(str(int(job_id)) for job_id in job_ids)
        if not picked:
            return {}
        rows = self._db.execute(f"SELECT * FROM job WHERE job_id IN ({picked})").fetchall()
        grants = grants_of(self._db, f"job.job_id IN ({picked})")
        return {job.job_id: job for job in _with_pauses(job_from(row, grants) for row in rows)}

    def job(self, job_id: JobId) -> Job | None:
        """One job of any age."""
        jobs, _ = self.jobs(ids=[job_id], limit=1)
        return jobs[0] if jobs else None

    def payload(self, job_id: JobId) -> Payload | None:
        """What was asked, without the environment."""
        return read_payload(self._db, job_id, with_environment=False)

    def briefs(self, job_ids: Iterable[JobId]) -> dict[JobId, Brief]:
        """What lists show of these requests; jobs of an older schema are missing."""
        picked = ",".join(str(int(job_id)) for job_id in job_ids)
        # As one row: at each, a thread waits for its turn of the interpreter, milliseconds on a
        # busy host, and lists wait for this.
        (found,) = self._db.execute(
            "SELECT group_concat(job_id || ' ' || crc || ' ' || hex(content), ',')"
            f" FROM brief WHERE job_id IN ({picked})"
        ).fetchone()
        rows = [entry.split(" ") for entry in found.split(",")] if found else []
        return {
            JobId(int(job_id)): brief_of_row(int(job_id), crc, bytes.fromhex(content))
            for job_id, crc, content in rows
        }

    def submission(self, uid: int, submission_id: str) -> Submission | None:
        """An earlier submission under this id."""
        row = self._db.execute(
            "SELECT * FROM submission WHERE uid = ? AND submission_id = ?", (uid, submission_id)
        ).fetchone()
        return None if row is None else submission_from(row)

    def gpu_uses(self, job_id: JobId) -> list[GpuUse]:
        """What a job's last attempt used of its GPUs."""
        return gpu_uses(self._db, "job.job_id = ?", (job_id,))

    def events(self, job_id: JobId, limit: int = 100) -> list[Event]:
        """A job's newest events, oldest first."""
        rows = self._db.execute(
            "SELECT * FROM event WHERE job_id = ? ORDER BY event_id DESC LIMIT ?", (job_id, limit)
        ).fetchall()
        return [event_from(row) for row in reversed(rows)]

    def last_event(self, job_id: JobId, kind: EventKind, having: str = "") -> Event | None:
        """The job's newest event of that kind; `having`: with that key in its data."""
        row = self._db.execute(
            "SELECT * FROM event WHERE job_id = ? AND kind = ?"
            " AND (? = '' OR json_valid(data) AND json_extract(data, '$.' || ?) IS NOT NULL)"
            " ORDER BY event_id DESC LIMIT 1",
            (job_id, kind, having, having),
        ).fetchone()
        return None if row is None else event_from(row)

    def events_since(self, since: int, last: int, limit: int = 1_000) -> list[tuple[int, Event]]:
        """The newest events with since < id <= last, oldest first, with their ids."""
        rows = self._db.execute(
            "SELECT * FROM event WHERE event_id > ? AND event_id <= ?"
            " ORDER BY event_id DESC LIMIT ?",
            (since, last, limit),
        ).fetchall()
        return [(row["event_id"], event_from(row)) for row in reversed(rows)]

    def promise_of(self, job_id: JobId) -> PromiseRow | None:
        """The newest promise that job had."""
        row = self._db.execute(
            "SELECT * FROM promise WHERE job_id = ? ORDER BY promised_sched_s DESC LIMIT 1",
            (job_id,),
        ).fetchone()
        return PromiseRow(**checked(row, "promise")) if row else None

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

    def old(self, ages: Ages, now_sched_s: float, now_s: float) -> list[Old]:
        """What is past its limit, for the writer to drop."""
        return list(find_old(self._db, ages, now_sched_s, now_s))

    def state_counts(self) -> dict[str, int]:
        """How many jobs there are in each state, all time."""
        return {
            row[0]: row[1]
            for row in self._db.execute("SELECT state, count(*) FROM job GROUP BY state")
        }


def read(history: History, question: Callable[[History], T]) -> T:
    """The answer. Raises StorageError where the database cannot be read."""
    try:
        return question(history)
    except (sqlite3.Error, OSError, ValueError, TypeError, LookupError) as error:
        log.warning("database_unreadable error=%s", error)
        raise StorageError(
            f"the daemon's database cannot be read: {error}; an administrator should look at its "
            "disk and log"
        ) from error


def _id_and_state(entry: str) -> tuple[JobId, str]:
    job_id, state = entry.split(" ")
    return JobId(int(job_id)), state


def _job_filter(
    ids: Iterable[JobId] | None,
    uids: Iterable[int] | None,
    users: Iterable[str] | None,
    states: Sequence[str] | None,
    name: str | None,
    ended_since_s: float | None,
) -> tuple[str, str, list[Any]]:
    """A query for the ids, what to order them by, and the query's values.

    Of live jobs, and of those that ended lately, there are few, and an index leads to them. SQLite
    would not take it where the rows are asked for in the order of the table, or by user, so that
    a list would read all jobs that ever were; the + keeps it from seeing that it could.
    """
    few = ids is None and (ended_since_s is not None or _are_live(states))
    clauses, values = list[str](), list[Any]()
    for column, wanted in (("job_id", ids), ("uid", uids), ("user", users), ("state", states)):
        if wanted is not None:
            picked = list(wanted)
            clauses.append(f"{'+' * few}{column} IN ({','.join('?' * len(picked))})")
            values.extend(picked)
    if name is not None:
        clauses.append("name = ?")
        values.append(name)

    def of(*more: str) -> str:
        return f"SELECT job_id FROM job WHERE {' AND '.join([*more, *clauses]) or '1'}"

    if ended_since_s is None or _are_live(states):
        return of("final = 0") if few else of(), "job_id", values
    if not few:
        return of("(final = 0 OR ended_at_s >= ?)"), "job_id", [ended_since_s, *values]
    live, ended = of("final = 0"), of("final = 1", "ended_at_s >= ?")
    return f"{live} UNION ALL {ended}", "+job_id", [*values, ended_since_s, *values]


def _are_live(states: Sequence[str] | None) -> bool:
    """Whether states are asked for, and no job in one of them has ended."""
    return states is not None and all(JobState(state).is_live for state in states)
