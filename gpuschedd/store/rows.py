"""Rows and records: what a record looks like in SQLite's types, and its checksum.

A checksum is over the values as they are read, so that a damaged row is found and not acted on.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import msgpack

from gpusched_client.terms import GpuUuid, JobId
from gpuschedd.core.model import FirstHead, Kind, LengthRow, Run
from gpuschedd.store.records import (
    Age,
    Brief,
    Event,
    GpuRow,
    Payload,
    Remembered,
    Submission,
)
from gpuschedd.store.sharing import CommonValues
from gpuschedd.system.clock import ClockMark

TEXTS_MAX = 4096


class _Texts(dict[Any, str]):
    """How values read in a checksum. Kept for those that most rows consist of: None, 0, a day."""

    def __missing__(self, value: Any) -> str:
        if not isinstance(value, _NUMBERS):
            return repr(value)
        text = repr(number := float(value) + 0.0)  # of -0.0, which is the same key, too
        if number.is_integer() and len(self) < TEXTS_MAX:
            self[value] = text
        return text


_NUMBERS = (int, float)
_TEXTS = _Texts({None: "None"})


def fields_of(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def crc(values: Iterable[Any]) -> int:
    """A row's checksum: the same before it is written and after it is read."""
    # The text of a list of them, with each number as float: what it always was.
    text = f"[{', '.join(map(_TEXTS.__getitem__, values))}]"
    return zlib.crc32(text.encode("utf-8", "backslashreplace"))


def checked(row: sqlite3.Row, table: str) -> dict[str, Any]:
    """The row without its checksum. Raises DatabaseError where it does not fit."""
    values = dict(row)
    if values.pop("crc") != crc(values.values()):
        raise sqlite3.DatabaseError(f"a row of {table} is damaged: {next(iter(values.values()))}")
    return values


def meta(db: sqlite3.Connection, key: str) -> Any:
    """A value of the table of single values, None where it was never written."""
    row = db.execute("SELECT value, crc FROM meta WHERE key = ?", (key,)).fetchone()
    if row is not None and row[1] != crc((key, row[0])):
        raise sqlite3.DatabaseError(f"a row of meta is damaged: {key}")
    return row[0] if row else None


def write_meta(db: sqlite3.Connection, key: str, value: str) -> bool:
    """Put it there; True where it is new."""
    is_new = db.execute("SELECT 1 FROM meta WHERE key = ?", (key,)).fetchone() is None
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (key, value, crc((key, value))))
    return is_new


def health_from(db: sqlite3.Connection) -> dict[GpuUuid, Remembered]:
    content: dict[str, tuple[list[str], int]] = json.loads(meta(db, "health") or "{}")
    return {
        GpuUuid(uuid): Remembered(tuple(pardoned), errors)
        for uuid, (pardoned, errors) in content.items()
    }


def mark_from(db: sqlite3.Connection) -> ClockMark | None:
    content = meta(db, "clock")
    return ClockMark(*json.loads(content)) if content else None


def gpu_row_from(row: sqlite3.Row) -> GpuRow:
    values = checked(row, "gpu")
    return GpuRow(**{**values, "sick_until_reboot": bool(values["sick_until_reboot"])})


#: The columns of an age, and how many of them there were at first.
AGE_COLUMNS = (
    *("eligible_since_s", "age_gained_s", "window_since_s"),
    *("head_since_s", "head_expected_s"),
)
AGE_COLUMNS_AT_FIRST = 3


def age_values(age: Age | None) -> dict[str, float | None]:
    """The columns of an age; None: it has none any more."""
    if age is None:
        return dict.fromkeys(AGE_COLUMNS)
    since_s, expected_s = age.first_head or (None, None)
    own = (age.eligible_since_s, age.age_gained_s, age.window_since_s)
    return dict(zip(AGE_COLUMNS, (*own, since_s, expected_s), strict=True))


def age_crc(values: Sequence[float | None]) -> int:
    """Of the columns of an age; one that came later is not summed while it is None."""
    later = [value for value in values[AGE_COLUMNS_AT_FIRST:] if value is not None]
    return crc((*values[:AGE_COLUMNS_AT_FIRST], *later))


@lru_cache
def _age_places(names: tuple[str, ...]) -> itemgetter[tuple[Any, ...]]:
    return itemgetter(*map(names.index, (*AGE_COLUMNS, "age_crc")))


def age_from(row: sqlite3.Row, common: CommonValues | None = None) -> Age:
    """The age of a job that waits. Raises DatabaseError."""
    *values, summed = _age_places(tuple(row.keys()))(row)
    if summed != age_crc(values):
        raise sqlite3.DatabaseError(f"the age of job {row['job_id']} is damaged")
    if common is not None:
        values = [value if value is None else common.number(value) for value in values]
    since_s, gained_s, window_since_s, head_since_s, head_expected_s = values
    first = None if head_since_s is None else FirstHead(head_since_s, head_expected_s)
    return Age(since_s, gained_s, window_since_s, first)


def length_values(row: LengthRow) -> tuple[Any, ...]:
    """A row of `length`: the newer run first."""
    newer, *before = reversed(row.runs)
    return (row.uid, *row.kind, *newer, *(before[0] if before else (None, None)))


def length_from(row: sqlite3.Row) -> LengthRow:
    values = checked(row, "length")
    before = [Run(values["before_ended_s"], values["before_length_s"])]
    runs = (*before, Run(values["ended_s"], values["length_s"]))
    kept = runs[1:] if runs[0].ended_s is None else runs
    return LengthRow(values["uid"], Kind(values["key"], values["gpus"]), kept)


def payload_crc(job_id: int, content: bytes, digest: bytes | None) -> int:
    """Over a request, whose it is, and the environment that it runs in while it is kept."""
    return zlib.crc32(content) ^ link_crc(job_id, digest)


def link_crc(job_id: int, digest: bytes | None) -> int:
    """The part of a request's checksum that is no content: known without reading that."""
    return crc((job_id, digest))


def brief_crc(job_id: int, content: bytes) -> int:
    return zlib.crc32(content) ^ crc((job_id,))


def brief_of_row(job_id: int, crc_text: str, content: bytes) -> Brief:
    """What lists show. Raises DatabaseError where the checksum does not fit."""
    # Those of the first schemas are their content's alone.
    sums = (brief_crc(job_id, content), zlib.crc32(content))
    if crc_text not in map(str, sums):
        raise sqlite3.DatabaseError(f"the request of job {job_id} is damaged in brief")
    argv, whole, cwd, script_bytes = msgpack.unpackb(content, raw=False)
    return Brief(tuple(argv), whole, cwd, script_bytes)


def pack_payload(payload: Payload) -> bytes:
    packed: bytes = msgpack.packb(
        {
            "argv": list(payload.argv),
            "script": payload.script,
            "cwd": payload.cwd,
            "umask": payload.umask,
            "rlimits": [list(limit) for limit in payload.rlimits],
            "output": payload.output,
            "error": payload.error,
            "niceness": payload.niceness,
            "affinity": list(payload.affinity),
            "script_path": payload.script_path,
            "checked": payload.checked,
        },
        use_bin_type=True,
    )
    return packed


def _check_payload(row: sqlite3.Row, job_id: int) -> None:
    """Raise DatabaseError where a request is not what was submitted: it must not run."""
    environment, digest, content = row["environment"], row["digest"], row["content"]
    if row["final"]:
        # Nothing runs it any more. Those that ended under the first schemas have no other sum.
        is_sound = row["crc"] in (payload_crc(job_id, content, None), zlib.crc32(content))
    else:
        if environment is None:
            raise sqlite3.DatabaseError(f"the environment of job {job_id}, which waits, is gone")
        is_sound = (
            row["crc"] == payload_crc(job_id, content, digest)
            and hashlib.sha256(environment).digest() == digest
        )
    if not is_sound:
        raise sqlite3.DatabaseError(f"the request of job {job_id} is damaged")


def submission_values(row: Submission) -> tuple[Any, ...]:
    return row.uid, row.submission_id, row.digest, json.dumps(row.job_ids), row.at_sched_s


def submission_from(row: sqlite3.Row) -> Submission:
    checked(row, "submission")
    ids = tuple(JobId(value) for value in json.loads(row["job_ids"]))
    return Submission(row["uid"], row["submission_id"], row["digest"], ids, row["at_sched_s"])


def event_from(row: sqlite3.Row) -> Event:
    job_id = JobId(row["job_id"]) if row["job_id"] is not None else None
    return Event(row["kind"], row["at_s"], job_id, row["uid"], json.loads(row["data"]))


def payload_from(row: sqlite3.Row, job_id: int, *, with_environment: bool) -> Payload:
    """A request; its environment where it is asked for and still kept. Raises DatabaseError."""
    _check_payload(row, job_id)
    content = msgpack.unpackb(row["content"], raw=False)
    pairs = msgpack.unpackb(row["environment"]) if with_environment and row["environment"] else []
    return Payload(
        argv=tuple(content["argv"]),
        script=content["script"],
        cwd=content["cwd"],
        umask=content["umask"],
        rlimits=tuple((name, soft, hard) for name, soft, hard in content["rlimits"]),
        output=content["output"],
        error=content["error"],
        environment=tuple((key, value) for key, value in pairs),
        # Requests from before these were kept.
        niceness=content.get("niceness", 0),
        affinity=tuple(content.get("affinity", ())),
        script_path=content.get("script_path"),
        checked=content.get("checked", False),
    )
