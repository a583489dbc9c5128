"""What must be there: counts of the rows that decide, committed with them, counted at a start.

A checksum finds a row that was changed; a row that has gone, or that an index no longer leads to,
is found by its absence here.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gpuschedd.store import rows

KEY = "census"
#: What is counted -> how.
COUNTED = {
    "live jobs": "SELECT count(*) FROM job WHERE final = 0",
    "accounts": "SELECT count(*) FROM account",
    "open promises": "SELECT count(*) FROM promise WHERE outcome IS NULL",
    "GPUs": "SELECT count(*) FROM gpu",
    "submissions": "SELECT count(*) FROM submission NOT INDEXED",
    "meta": f"SELECT count(*) FROM meta WHERE key <> '{KEY}'",
}


@dataclass(slots=True)
class Census:
    """As of one commit. `commits` counts them, so that a copy from before can be told."""

    commits: int = 0
    next_job_id: int = 1
    last_event_id: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))

    def copy(self) -> Census:
        """For the next batch, which may fail."""
        return replace(self, counts=dict(self.counts))

    def add(self, what: str, number: int = 1) -> None:
        """So many more of these; fewer where it is below 0."""
        self.counts[what] += number

    def write(self, db: sqlite3.Connection) -> None:
        """With the batch that it counts."""
        rows.write_meta(db, KEY, json.dumps(asdict(self)))


def read_census(db: sqlite3.Connection) -> Census:
    """As it was committed last. Raises DatabaseError where it is not there."""
    content = rows.meta(db, KEY)
    if content is None:
        raise sqlite3.DatabaseError("the counts of its rows are missing")
    return Census(**json.loads(content))


def take_census(db: sqlite3.Connection) -> Census:
    """Of a database that has none yet: what is there counts."""
    ask: Mapping[str, Any] = {
        what: db.execute(query).fetchone()[0] for what, query in COUNTED.items()
    }
    return Census(
        next_job_id=db.execute("SELECT coalesce(max(job_id), 0) + 1 FROM job").fetchone()[0],
        last_event_id=db.execute("SELECT coalesce(max(event_id), 0) FROM event").fetchone()[0],
        counts=dict(ask),
    )


def require_counts(census: Census, found: Mapping[str, int]) -> None:
    """Raise DatabaseError where rows have gone or come by another hand than the daemon's."""
    for what, number in found.items():
        if number != census.counts[what]:
            raise sqlite3.DatabaseError(
                f"{number} {what} are found where {census.counts[what]} were committed"
            )
