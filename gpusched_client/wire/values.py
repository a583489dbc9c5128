"""The values that messages of several groups carry, each with its reader."""

from __future__ import annotations

from gpusched_client.wire.fields import (
    FLOAT_EXACT_MAX,
    Reader,
    integer,
    list_of,
    number,
    refuse,
    shown,
    text,
)
from gpusched_client.wire.limits import (
    IDS_MAX,
    JOB_NAME_BYTES_MAX,
    TIME_LIMIT_S_MAX,
    UNLIMITED_S,
)

JOB_ID = integer(1)
JOB_IDS = list_of(JOB_ID, IDS_MAX, 1)
COUNT = integer(0)
SIZE = integer(0)  # bytes
TIME = number(-FLOAT_EXACT_MAX, FLOAT_EXACT_MAX)  # Unix time in seconds
NUMBER = number(-FLOAT_EXACT_MAX, FLOAT_EXACT_MAX)
AMOUNT = number(0, FLOAT_EXACT_MAX)
PERCENT = number(0, 100)
USER = text(256)
SHORT_TEXT = text()
ANY_TEXT = text(64 * 1024)
TEXTS = list_of(ANY_TEXT, 1_000)

_seconds = integer(UNLIMITED_S, TIME_LIMIT_S_MAX)
_name = text(JOB_NAME_BYTES_MAX)


def _read_time_limit(value: object, path: str) -> int:
    limit_s: int = _seconds.read(value, path)
    if limit_s == 0:
        refuse(path, "0 seconds", f"use 1 to {TIME_LIMIT_S_MAX}, or {UNLIMITED_S} for unlimited")
    return limit_s


TIME_LIMIT = Reader(
    _read_time_limit,
    "integer",
    f"seconds, 1 to {TIME_LIMIT_S_MAX}, or {UNLIMITED_S} for unlimited",
)


def _read_job_name(value: object, path: str) -> str:
    name: str = _name.read(value, path)
    if not name.isprintable() or not name or name != name.strip():
        cure = "use printable text that does not begin or end with a blank"
        refuse(path, f"{shown(name)} is not allowed", cure)
    return name


JOB_NAME = Reader(
    _read_job_name,
    "text",
    f"1 to {JOB_NAME_BYTES_MAX} bytes, printable, no blank at either end",
)
"""Anything that a line of a table can show, as in "lr=0.1 bs=32"."""
