"""What a migration does that SQL alone cannot: checksums of rows from before there were any."""

from __future__ import annotations

import json
import sqlite3

from gpuschedd.store import rows
from gpuschedd.store.census import take_census


def give_checksums(db: sqlite3.Connection) -> None:
    """To single values and requests of live jobs; then what is there is counted for the first time.

    Requests of final jobs keep the sum that they have: nothing runs them, and they go before long.
    """
    for key, value in db.execute("SELECT key, value FROM meta").fetchall():
        db.execute("UPDATE meta SET crc = ? WHERE key = ?", (rows.crc((key, value)), key))
    live = db.execute(
        "SELECT job_id, payload.crc, digest FROM payload JOIN job USING (job_id)"
        " LEFT JOIN environment USING (environment_id) WHERE final = 0"
    ).fetchall()
    db.executemany(
        "UPDATE payload SET crc = ? WHERE job_id = ?",
        [(old ^ rows.link_crc(job_id, digest), job_id) for job_id, old, digest in live],
    )
    note_kept(db)
    census = take_census(db)
    census.write(db)


def note_kept(db: sqlite3.Connection) -> None:
    """The sizes of requests of final jobs, and when these ended in scheduler time."""
    clock = rows.meta(db, "clock")
    _, _, scheduler_s, wall_s = json.loads(clock) if clock else (None, None, 0.0, 0.0)
    db.execute(
        "INSERT INTO kept SELECT job_id, uid,"
        " length(payload.content) + coalesce(length(brief.content), 0),"
        " ? - max(0.0, ? - coalesce(ended_at_s, ?))"
        " FROM payload JOIN job USING (job_id) LEFT JOIN brief USING (job_id) WHERE final = 1",
        (scheduler_s, wall_s, wall_s),
    )
