"""The columns of a job, each once: out of the record into its row, and back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any

from gpusched_client.terms import Cause, HoldKind, JobState
from gpuschedd.core.job import CancelOrder, EnvironmentWait, Job
from gpuschedd.core.model import Grant, Request, Topology
from gpuschedd.store.rows import crc
from gpuschedd.store.sharing import CommonValues

NO_SIGNALS = "[]"


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


def _own(name: str, read: Callable[[Any], Any] | None = None) -> Column:
    return Column(name, Home.JOB, name, str if _is_enum(read) else None, read)


def _asked(name: str, read: Callable[[Any], Any] | None = None) -> Column:
    return Column(name, Home.REQUEST, name, str if _is_enum(read) else None, read)


def _cancelled(name: str, field: str) -> Column:
    return Column(name, Home.CANCEL, field)


def _is_enum(read: object) -> bool:
    return isinstance(read, type) and issubclass(read, Enum)


def _written_signals(signals: tuple[tuple[int, int], ...]) -> str:
    return json.dumps(signals) if signals else NO_SIGNALS


def _signals(text: str) -> tuple[tuple[int, int], ...]:
    if text == NO_SIGNALS:  # nearly always
        return ()
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
_NAMES = tuple(column.name for column in COLUMNS)
_AT_FIRST = len(COLUMNS) - sum(column.later for column in COLUMNS)
_WRITES = tuple((at, column.write) for at, column in enumerate(COLUMNS) if column.write)
_ID_AT, _DECIDED_AT, _TOPOLOGY_AT, _CANCELLED_AT = map(
    _NAMES.index, ("job_id", "decided_sched_s", "topology", "cancel_at_s")
)
_UPSERT = (
    f"INSERT INTO job ({', '.join(_NAMES)}, crc) VALUES ({', '.join('?' * len(_NAMES))}, ?)"
    " ON CONFLICT (job_id) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in (*_NAMES, "crc") if name != "job_id")
)

Values = tuple[Any, ...]
#: Many jobs have these in common with others.
_COMMON_TEXTS = ("user", "name", "length_key")
_COMMON_TIMES = ("submitted_at_s", "submitted_sched_s")


# --- out of the record ----------------------------------------------------------------------------


def _getter(*, is_cancelled: bool) -> attrgetter[Values]:
    """All columns at once. Without an order each of its columns is None, as the order is."""
    places = {Home.REQUEST: "request.", Home.CANCEL: "cancel."}
    return attrgetter(
        *(
            "cancel"
            if column.home is Home.CANCEL and not is_cancelled
            else places.get(column.home, "") + column.field
            for column in COLUMNS
        )
    )


_VALUES, _VALUES_CANCELLED = _getter(is_cancelled=False), _getter(is_cancelled=True)


def _job_values(job: Job) -> list[Any]:
    """A job as it is stored, in the order of the columns."""
    values = list((_VALUES if job.cancel is None else _VALUES_CANCELLED)(job))
    for at, write in _WRITES:
        if values[at] is not None:
            values[at] = write(values[at])
    return values


def _job_crc(values: Sequence[Any], grants: tuple[Grant, ...]) -> int:
    """Over a job's row and what it holds."""
    held = [f"{g.uuid} {g.held_bytes} {g.declared_bytes}" for g in grants]
    later = [value for value in values[_AT_FIRST:] if value is not None]
    return crc([*values[:_AT_FIRST], *later, *sorted(held)])


def write_rows(db: sqlite3.Connection, jobs: Iterable[Job]) -> None:
    """Insert or update them, the columns of their age aside."""
    db.executemany(_UPSERT, map(_row_of, jobs))


def _row_of(job: Job) -> tuple[Any, ...]:
    values = _job_values(job)
    return (*values, _job_crc(values, job.grants))


# --- and back -------------------------------------------------------------------------------------


class _Part:
    """The columns of one record, and how their values become its fields."""

    def __init__(self, home: Home) -> None:
        own = [(at, column) for at, column in enumerate(COLUMNS) if column.home is home]
        self.values_of = itemgetter(*(at for at, _ in own))
        self.fields = tuple(column.field for _, column in own)
        self._reads = tuple((column.field, column.read) for _, column in own if column.read)

    def read(self, values: Values) -> dict[str, Any]:
        """The fields, out of the values of its own columns."""
        found = dict(zip(self.fields, values, strict=True))
        for field, read in self._reads:
            if found[field] is not None:
                found[field] = read(found[field])
        return found


_JOB, _REQUEST, _CANCEL = _Part(Home.JOB), _Part(Home.REQUEST), _Part(Home.CANCEL)


def job_from(
    row: sqlite3.Row, grants: Mapping[int, tuple[Grant, ...]], common: CommonValues | None = None
) -> Job:
    """A job out of its row and the grants of the jobs of a query. Raises DatabaseError."""
    *values, summed = _places(tuple(row.keys()))(row)
    job_id = values[_ID_AT]
    held = grants.get(job_id, ()) if values[_DECIDED_AT] is not None else ()
    try:
        if summed == _job_crc(_as_summed(values), held):
            return _job_from(tuple(values), held, common or CommonValues())
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        # A value that is none of its kind, before its checksum could say so.
        raise sqlite3.DatabaseError(f"the row of job {job_id} is damaged") from error
    raise sqlite3.DatabaseError(f"the row of job {job_id} is damaged")


@lru_cache
def _places(names: tuple[str, ...]) -> itemgetter[Values]:
    """What takes the columns and the checksum out of a row with these names."""
    return itemgetter(*map(names.index, (*_NAMES, "crc")))


def _as_summed(stored: Sequence[Any]) -> list[Any]:
    values = list(stored)
    values[_TOPOLOGY_AT] = Topology(values[_TOPOLOGY_AT])
    return values


def _job_from(values: Values, held: tuple[Grant, ...], common: CommonValues) -> Job:
    fields = _JOB.read(_JOB.values_of(values))
    for name in _COMMON_TEXTS:
        fields[name] = common.text(fields[name])
    for name in _COMMON_TIMES:
        fields[name] = common.number(fields[name])
    asked = _REQUEST.values_of(values)
    request = common.requests.get(asked)
    if request is None:
        request = common.requests[asked] = Request(**_REQUEST.read(asked))
    is_cancelled = values[_CANCELLED_AT] is not None
    cancel = CancelOrder(**_CANCEL.read(_CANCEL.values_of(values))) if is_cancelled else None
    return Job(**fields, request=request, cancel=cancel, grants=held)
