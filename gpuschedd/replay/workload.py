"""Workloads: reading CSV and Standard Workload Format, plain or gzipped, and the host for them.

Owns the file formats. Decides nothing about order or time.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from gpusched_client.errors import Invalid
from gpusched_client.terms import GpuUuid
from gpuschedd.core.hostspec import parse_host
from gpuschedd.core.model import GIB, Gpu

HOST_GPUS_MAX = 100_000
DEFAULT_CARD_BYTES = 80 * GIB
TIME_S_MAX = 1e15
UNLIMITED_TEXT = "-1"
_SWF_USER = 11  # the last field that is looked at
_REQUIRED = ("job_id", "user", "submit_s", "gpus", "run_s")


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job of a workload. `name` is its id there; `limit_s` None: it has no limit.

    `command`: what its user's runs are told apart by.
    """

    name: str
    user: str
    submit_s: float
    gpus: int
    run_s: float
    limit_s: float | None
    vram_bytes: int | None = None
    command: str = ""

    @property
    def lasts_s(self) -> float:
        """A job ends after its run time or at its limit."""
        return self.run_s if self.limit_s is None else min(self.run_s, self.limit_s)


@dataclass(frozen=True, slots=True)
class Workload:
    """The jobs in input order; `unusable` counts lines without GPUs or, in SWF, run time (-1)."""

    jobs: tuple[TraceJob, ...]
    unusable: int = 0


def read_workload(path: Path) -> Workload:
    """By name: `.swf` or `.swf.gz` is Standard Workload Format, all else is CSV. Raises Invalid."""
    name = path.name.removesuffix(".gz")
    try:
        with _open(path) as lines:
            is_swf = name.endswith(".swf")
            return _read_swf(lines, path.name) if is_swf else _read_csv(lines, path.name)
    except (OSError, EOFError, zlib.error) as error:
        raise Invalid(f"{path}: {error}") from error


def _open(path: Path) -> TextIO:
    """As text; spreadsheets put a byte order mark first, and old traces name people in Latin-1."""
    encoding, errors = "utf-8-sig", "backslashreplace"
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding=encoding, errors=errors, newline="")
    return path.open(encoding=encoding, errors=errors, newline="")


def _read_csv(lines: TextIO, name: str) -> Workload:
    reader = csv.DictReader(lines, skipinitialspace=True)
    missing = [column for column in _REQUIRED if column not in (reader.fieldnames or ())]
    if missing:
        raise Invalid(
            f"{name}: no column {', '.join(missing)}; the first line must name "
            "job_id,user,submit_s,gpus,run_s[,limit_s][,vram_bytes][,command]"
        )
    jobs, unusable = [], 0
    try:
        for row in reader:
            job = _csv_job(row)
            unusable += job is None
            jobs += [] if job is None else [job]
    except (ValueError, csv.Error) as error:
        raise Invalid(f"{name}, line {reader.line_num}: {error}") from error
    return Workload(tuple(jobs), unusable)


def _csv_job(row: dict[str, str | None]) -> TraceJob | None:
    """None for a job without GPUs: it waits for none."""
    run_s, gpus = _seconds(row, "run_s"), _whole(row, "gpus")
    job = TraceJob(
        name=row["job_id"] or "",
        user=row["user"] or "",
        submit_s=_seconds(row, "submit_s"),
        gpus=gpus,
        run_s=run_s,
        limit_s=_limit(row) if row.get("limit_s") else run_s,
        vram_bytes=_whole(row, "vram_bytes") if row.get("vram_bytes") else None,
        command=(row.get("command") or "").strip(),
    )
    return job if gpus > 0 else None


def _limit(row: dict[str, str | None]) -> float | None:
    if _field(row, "limit_s") == UNLIMITED_TEXT:
        return None
    return _seconds(row, "limit_s", f"seconds from 0, or {UNLIMITED_TEXT} for no limit")


def _seconds(row: dict[str, str | None], column: str, legal: str = "seconds from 0") -> float:
    text = _field(row, column)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < TIME_S_MAX:
        raise ValueError(f"{column} is {text!r}; write {legal}")
    return value


def _whole(row: dict[str, str | None], column: str) -> int:
    text = _field(row, column)
    if not text.isdecimal():
        raise ValueError(f"{column} is {text!r}; write a whole number from 0")
    return int(text)


def _field(row: dict[str, str | None], column: str) -> str:
    text = row[column]
    if text is None:
        raise ValueError(f"the line ends before {column}")
    return text.strip()


def _read_swf(lines: TextIO, name: str) -> Workload:
    jobs, unusable = [], 0
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if not fields or fields[0].startswith(";"):
            continue
        try:
            job = _swf_job(fields)
        except (ValueError, OverflowError) as error:
            raise Invalid(f"{name}, line {number}: {error}") from error
        unusable += job is None
        jobs += [] if job is None else [job]
    return Workload(tuple(jobs), unusable)


def _swf_job(fields: list[str]) -> TraceJob | None:
    """Fields, from 0: id, submit, wait, run, processors, .., 7 asked, 8 limit, 11 user."""
    if len(fields) <= _SWF_USER:
        raise ValueError(f"{len(fields)} fields; a job of Standard Workload Format has 18")
    submit_s, run_s = float(fields[1]), float(fields[3])
    processors = int(fields[7]) if int(fields[7]) > 0 else int(fields[4])
    limit_s = float(fields[8])
    if processors < 1 or run_s < 0 or submit_s < 0:
        return None
    if not max(submit_s, run_s, limit_s) < TIME_S_MAX:
        raise ValueError("a time is not a number of seconds")
    return TraceJob(
        name=fields[0],
        user=fields[_SWF_USER],
        submit_s=submit_s,
        gpus=processors,
        run_s=run_s,
        limit_s=limit_s if limit_s > 0 else run_s,
    )


def host_of(text: str) -> tuple[Gpu, ...]:
    """The GPUs of "8x80G" or "2x80G+2x24G"; a bare size is in GiB. Raises Invalid."""
    cards = parse_host(text, gpus_max=HOST_GPUS_MAX, bare_unit="G")
    return tuple(
        _card(index, card.total_bytes, f"sim-{card.size}") for index, card in enumerate(cards)
    )


def equal_gpus(count: int) -> tuple[Gpu, ...]:
    """`--gpus N`."""
    if not 0 < count <= HOST_GPUS_MAX:
        raise Invalid(f"{count} GPUs; a host has 1 to {HOST_GPUS_MAX}")
    return tuple(_card(index, DEFAULT_CARD_BYTES, "sim") for index in range(count))


def _card(index: int, total_bytes: int, model: str) -> Gpu:
    return Gpu(uuid=GpuUuid(f"SIM-{index:05d}"), index=index, model=model, total_bytes=total_bytes)
