"""What the database must consist of: tables that decide are never missed silently, others are made.

Anyone with root and `sqlite3` can drop a table. SQLite's own checks do not miss it.
"""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from functools import cache

from gpuschedd.store.migrations import MIGRATIONS
from gpuschedd.store.upgrade import note_kept

log = logging.getLogger(__name__)

#: Tables whose rows no decision rests on -> what is lost with them.
HISTORY = {
    "attempt": "how the attempts of jobs ended",
    "audit": "who was denied what and what administrators did",
    "event": "the events so far",
    "length": "how long jobs ran, from which it is told how long the next will run",
    "kept": "nothing, it is made out of the requests",
    "unseen": "nothing, it is made anew",
}


@cache
def _expected() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Each table, index and view of the newest schema -> its SQL and its columns."""
    with closing(sqlite3.connect(":memory:")) as db:
        for step in MIGRATIONS:
            for statement in step.statements:
                db.execute(statement)
        made = db.execute(
            "SELECT name, sql, type FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"
        )
        return {
            name: (sql, _columns(db, name) if kind == "table" else ())
            for name, sql, kind in made.fetchall()
        }


def _columns(db: sqlite3.Connection, table: str) -> tuple[str, ...]:
    return tuple(row[1] for row in db.execute(f"PRAGMA table_info({table})"))


def missing_from(db: sqlite3.Connection) -> list[str]:
    """What can be made anew. Raises DatabaseError where a table or column that decides has gone."""
    there = {row[0] for row in db.execute("SELECT name FROM sqlite_master")}
    missing = [name for name in _expected() if name not in there]
    for name in missing:
        if _expected()[name][1] and name not in HISTORY:
            raise sqlite3.DatabaseError(f"its table {name} is missing")
    for name, (_, columns) in _expected().items():
        if name in there and (
            gone := set(columns).difference(_columns(db, name) if columns else ())
        ):
            raise sqlite3.DatabaseError(f"{min(gone)} is missing from its table {name}")
    return missing


def mend(db: sqlite3.Connection) -> bool:
    """Make in a transaction what has gone and decides nothing, and say so; whether there was any.

    Raises DatabaseError where something that decides has gone.
    """
    missing = missing_from(db)
    for name in sorted(missing, key=_tables_first):
        db.execute(_expected()[name][0])
        if name == "kept":
            note_kept(db)
        if name == "unseen":
            _fill_unseen(db)
        log.warning("database_mended made_anew=%s lost=%r", name, HISTORY.get(name, "nothing"))
    return bool(missing)


def _tables_first(name: str) -> bool:
    return not _expected()[name][1]


def _fill_unseen(db: sqlite3.Connection) -> None:
    for step in MIGRATIONS:
        for statement in step.statements:
            if statement.startswith("INSERT INTO unseen "):
                db.execute(statement)
