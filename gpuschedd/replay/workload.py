"""Workloads: reading CSV and Standard Workload Format, plain or gzipped, and the host for them.

Owns the file formats. Decides nothing about order or time.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from gpusched_client.errors import Invalid
from gpusched_client.terms import GpuUuid
from gpuschedd.core.model import GIB, Gpu

HOST_GPUS_MAX = 100_000
DEFAULT_CARD_BYTES = 80 * GIB
_UNITS = {"": GIB, "g": GIB, "m": 2**20, "t": 2**40}
_REQUIRED = ("job_id", "user", "submit_s", "gpus", "run_s")


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job of a workload. `name` is its id there; `limit_s` None: the run time is the limit."""

    name: str
    user: str
    submit_s: float
    gpus: int
    run_s: float
    limit_s: float
    vram_bytes: int | None = None

    @property
    def lasts_s(self) -> float:
        """A job ends after its run time or at its limit."""
        return min(self.run_s, self.limit_s)


@dataclass(frozen=True, slots=True)
class Workload:
    """The jobs in input order; `unusable` counts lines without size or run time (SWF: -1)."""

    jobs: tuple[TraceJob, ...]
    unusable: int = 0


def read_workload(path: Path) -> Workload:
    """By name: `.swf` or `.swf.gz` is Standard Workload Format, all else is CSV. Raises Invalid."""
    name = path.name.removesuffix(".gz")
    try:
        with _open(path) as lines:
            return _read_swf(lines) if name.endswith(".swf") else _read_csv(lines, path.name)
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise Invalid(f"{path}: {error}") from error


def _open(path: Path) -> TextIO:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _read_csv(lines: TextIO, name: str) -> Workload:
    reader = csv.DictReader(lines)
    missing = [column for column in _REQUIRED if column not in (reader.fieldnames or ())]
    if missing:
        raise Invalid(
            f"{name}: no column {', '.join(missing)}; the first line must name "
            "job_id,user,submit_s,gpus,run_s[,limit_s][,vram_bytes]"
        )
    jobs = []
    for row in reader:
        try:
            jobs.append(_csv_job(row))
        except (ValueError, TypeError, KeyError) as error:
            raise Invalid(f"{name}, line {reader.line_num}: {error}") from error
    return Workload(tuple(jobs))


def _csv_job(row: dict[str, str | None]) -> TraceJob:
    run_s = _number(row["run_s"])
    limit, vram = row.get("limit_s"), row.get("vram_bytes")
    return TraceJob(
        name=row["job_id"] or "",
        user=row["user"] or "",
        submit_s=_number(row["submit_s"]),
        gpus=_count(row["gpus"]),
        run_s=run_s,
        limit_s=_number(limit) if limit else run_s,
        vram_bytes=int(vram) if vram else None,
    )


def _number(text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e15:
        raise ValueError(f"{text!r} is not a time in seconds")
    return value


def _count(text: str | None) -> int:
    if text is None or not text.strip().isdecimal():
        raise ValueError(f"{text!r} is no number of GPUs")
    if int(text) < 1:
        raise ValueError(f"{text} GPUs; a job needs at least 1")
    return int(text)


def _read_swf(lines: TextIO) -> Workload:
    jobs, unusable = [], 0
    for number, line in enumerate(lines, start=1):
        if line.startswith(";") or not line.strip():
            continue
        try:
            job = _swf_job(line.split())
        except (ValueError, IndexError) as error:
            raise Invalid(f"line {number}: {error}") from error
        unusable += job is None
        jobs += [] if job is None else [job]
    return Workload(tuple(jobs), unusable)


def _swf_job(fields: list[str]) -> TraceJob | None:
    """Fields, from 0: id, submit, wait, run, processors, .., 7 asked, 8 limit, 11 user."""
    submit_s, run_s = float(fields[1]), float(fields[3])
    processors = int(fields[7]) if int(fields[7]) > 0 else int(fields[4])
    limit_s = float(fields[8])
    if processors < 1 or run_s < 0 or submit_s < 0:
        return None
    return TraceJob(
        name=fields[0],
        user=fields[11],
        submit_s=submit_s,
        gpus=processors,
        run_s=run_s,
        limit_s=limit_s if limit_s > 0 else run_s,
    )


def host_of(text: str) -> tuple[Gpu, ...]:
    """The GPUs of "8x80G" or "2x80G+2x24G". Raises Invalid."""
    gpus: list[Gpu] = []
    for part in text.split("+"):
        found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)([gmtGMT]?)(?:i?B)?", part.strip())
        if found is None:
            raise Invalid(f'"{text}" is no host; write it like 8x80G or 2x80G+2x24G')
        size = int(float(found[2]) * _UNITS[found[3].lower()])
        gpus += _cards(int(found[1]), size, f"sim-{found[2]}{found[3].upper() or 'G'}", len(gpus))
    if not 0 < len(gpus) <= HOST_GPUS_MAX:
        raise Invalid(f"{len(gpus)} GPUs; a host has 1 to {HOST_GPUS_MAX}")
    return tuple(gpus)


def equal_gpus(count: int) -> tuple[Gpu, ...]:
    """`--gpus N`."""
    if not 0 < count <= HOST_GPUS_MAX:
        raise Invalid(f"{count} GPUs; a host has 1 to {HOST_GPUS_MAX}")
    return tuple(_cards(count, DEFAULT_CARD_BYTES, "sim", 0))


def _cards(count: int, size: int, model: str, first: int) -> Iterator[Gpu]:
    if count > HOST_GPUS_MAX:
        raise Invalid(f"{count} GPUs; a host has 1 to {HOST_GPUS_MAX}")
    for index in range(first, first + count):
        yield Gpu(uuid=GpuUuid(f"SIM-{index:05d}"), index=index, model=model, total_bytes=size)
