"""The columns of a job, each once: out of the record into its row, and back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

from gpusched_client.terms import Cause, HoldKind, JobState
from gpuschedd.core.job import CancelOrder, EnvironmentWait, Job
from gpuschedd.core.model import Grant, Request, Topology
from gpuschedd.store.rows import crc


class Home(Enum):
    """The record that a column's value belongs to."""

    JOB = "job"
    REQUEST = "request"
    CANCEL = "cancel"
    NONE = "none"  # derived: written for queries, not read back


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table `job`.

    `field` of its home holds the value; `write` makes it one of SQLite's, `read` the record's
    again; both leave None alone. `later`: added after others were written, so it is not summed
    while it is None and rows from before stay sound.
    """

    name: str
    home: Home
    field: str
    write: Callable[[Any], Any] | None = None
    read: Callable[[Any], Any] | None = None
    later: bool = False

    @property
    def path(self) -> str:
        """Where a job has the value."""
        has_record = self.home in (Home.REQUEST, Home.CANCEL)
        return f"{self.home.value}.{self.field}" if has_record else self.field

    def value_from(self, row: sqlite3.Row) -> Any:
        """As the record has it."""
        value = row[self.name]
        return value if value is None or self.read is None else self.read(value)


def _own(name: str, read: Callable[[Any], Any] | None = None) -> Column:
    return Column(name, Home.JOB, name, str if _is_enum(read) else None, read)


def _asked(name: str, read: Callable[[Any], Any] | None = None) -> Column:
    return Column(name, Home.REQUEST, name, str if _is_enum(read) else None, read)


def _cancelled(name: str, field: str) -> Column:
    return Column(name, Home.CANCEL, field)


def _is_enum(read: object) -> bool:
    return isinstance(read, type) and issubclass(read, Enum)


def _written_signals(signals: tuple[tuple[int, int], ...]) -> str:
    return json.dumps(signals) if signals else "[]"


def _signals(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((number, signum) for number, signum in json.loads(text))


def _written_wait(wait: EnvironmentWait) -> str:
    return json.dumps([getattr(wait, name) for name in wait.__dataclass_fields__])


def _wait_from(text: str) -> EnvironmentWait:
    return EnvironmentWait(*json.loads(text))


#: In the order of the checksum: a new one goes to the end, as `later`.
COLUMNS = (
    _own("job_id"),
    _own("uid"),
    _own("user"),
    _own("name"),
    _own("attempt"),
    _own("nice"),
    _own("default_limit", bool),
    _own("hold", HoldKind),
    _own("hold_detail"),
    _own("memory_bytes"),
    _own("cpus"),
    _own("whole_note"),
    _own("submitted_at_s"),
    _own("started_at_s"),
    _own("ended_at_s"),
    _own("submitted_sched_s"),
    _own("decided_sched_s"),
    _own("decided_limit_s"),
    _own("stuck", bool),
    _own("started_sched_s"),
    _own("main_ended_sched_s"),
    _own("warned_limit_s"),
    _own("not_before_sched_s"),
    _own("begin_at_sched_s"),
    _own("whole", bool),
    _own("exit_code"),
    _own("exit_signal"),
    _own("cause_detail"),
    _own("cpu_user_s"),
    _own("cpu_system_s"),
    _own("max_rss_bytes"),
    _own("launch_failures"),
    _own("retries"),
    _own("retries_used"),
    _asked("gpus"),
    _asked("vram_bytes"),
    _asked("gpu_model"),
    _asked("exclusive", bool),
    # Not made text by us but by SQLite: since the first schema its checksum is the enum's.
    Column("topology", Home.REQUEST, "topology", None, Topology),
    _asked("time_limit_s"),
    _asked("card_bytes"),
    _own("state", JobState),
    _own("cause", Cause),
    Column("signals", Home.JOB, "signals", _written_signals, _signals),
    Column("final", Home.NONE, "is_final", int),
    _cancelled("cancel_uid", "by_uid"),
    _cancelled("cancel_by", "by"),
    _cancelled("cancel_at_s", "at_s"),
    _cancelled("cancel_reason", "reason"),
    Column("environment_wait", Home.JOB, "environment", _written_wait, _wait_from, later=True),
    Column("decided_grace_s", Home.JOB, "decided_grace_s", later=True),
    Column("decided_expected_s", Home.JOB, "decided_expected_s", later=True),
    Column("length_key", Home.JOB, "length_key", later=True),
    Column("estimate_s", Home.REQUEST, "estimate_s", later=True),
)
_OF_JOB = tuple(column for column in COLUMNS if column.home is Home.JOB)
_OF_REQUEST = tuple(column for column in COLUMNS if column.home is Home.REQUEST)
_LATER = frozenset(column.name for column in COLUMNS if column.later)
_OF_CANCEL = tuple(column for column in COLUMNS if column.home is Home.CANCEL)


# Taken apart once: thousands of rows are written in one go.
_NAMES = tuple(column.name for column in COLUMNS)
_ALWAYS = tuple(column for column in COLUMNS if column.home is not Home.CANCEL)
_NAMES_ALWAYS = tuple(column.name for column in _ALWAYS)
_values_always = attrgetter(*(column.path for column in _ALWAYS))
_values_of_cancel = attrgetter(*(column.path for column in _OF_CANCEL))
_NAMES_OF_CANCEL = tuple(column.name for column in _OF_CANCEL)
_WRITTEN = tuple((column.name, column.write) for column in COLUMNS if column.write is not None)


def job_values(job: Job) -> dict[str, Any]:
    """A job as a row, by the names of its columns."""
    values: dict[str, Any] = dict.fromkeys(_NAMES)
    values.update(zip(_NAMES_ALWAYS, _values_always(job), strict=True))
    if job.cancel is not None:
        values.update(zip(_NAMES_OF_CANCEL, _values_of_cancel(job), strict=True))
    for name, write in _WRITTEN:
        if values[name] is not None:
            values[name] = write(values[name])
    return values


def job_crc(values: Mapping[str, Any], grants: tuple[Grant, ...]) -> int:
    """Over a job's row and what it holds."""
    held = [f"{g.uuid} {g.held_bytes} {g.declared_bytes}" for g in grants]
    summed = [value for name, value in values.items() if value is not None or name not in _LATER]
    return crc([*summed, *sorted(held)])


_UPSERT = (
    f"INSERT INTO job ({', '.join(_NAMES)}, crc) VALUES ({', '.join('?' * (len(_NAMES) + 1))})"
    " ON CONFLICT (job_id) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in (*_NAMES, "crc") if name != "job_id")
)


def write_rows(db: sqlite3.Connection, jobs: Iterable[Job]) -> None:
    """Insert or update them, the columns of their age aside."""
    db.executemany(_UPSERT, map(_row_of, jobs))


def _row_of(job: Job) -> tuple[Any, ...]:
    values = job_values(job)
    return (*values.values(), job_crc(values, job.grants))


def job_from(row: sqlite3.Row, grants: Mapping[int, tuple[Grant, ...]]) -> Job:
    """A job out of its row and the grants of the jobs of a query. Raises DatabaseError."""
    held = grants.get(row["job_id"], ()) if row["decided_sched_s"] is not None else ()
    try:
        job = _job_from(row, held)
        is_sound = row["crc"] == job_crc(job_values(job), held)
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        # A value that is none of its kind, before its checksum could say so.
        raise sqlite3.DatabaseError(f"the row of job {row['job_id']} is damaged") from error
    if not is_sound:
        raise sqlite3.DatabaseError(f"the row of job {row['job_id']} is damaged")
    return job


def _job_from(row: sqlite3.Row, held: tuple[Grant, ...]) -> Job:
    fields = _read(_OF_JOB, row)
    cancel = CancelOrder(**_read(_OF_CANCEL, row)) if row["cancel_at_s"] is not None else None
    return Job(**fields, request=Request(**_read(_OF_REQUEST, row)), cancel=cancel, grants=held)


def _read(columns: tuple[Column, ...], row: sqlite3.Row) -> dict[str, Any]:
    return {column.field: column.value_from(row) for column in columns}
