"""Questions that the writer and the readers share."""

from __future__ import annotations

import sqlite3
from typing import Any

from gpusched_client.terms import GpuUuid, JobId
from gpuschedd.core.model import Grant
from gpuschedd.store.records import GpuUse, Payload
from gpuschedd.store.rows import checked, payload_from


def gpu_uses(db: sqlite3.Connection, where: str, values: tuple[Any, ...] = ()) -> list[GpuUse]:
    """Rows of the present attempt of the jobs that match."""
    rows = db.execute(
        "SELECT gpu_use.* FROM gpu_use JOIN job ON job.job_id = gpu_use.job_id"
        f" AND job.attempt = gpu_use.attempt WHERE {where} ORDER BY gpu_uuid",
        values,
    )
    return [GpuUse(**checked(row, "gpu_use")) for row in rows]


def grants_of(db: sqlite3.Connection, where: str) -> dict[int, tuple[Grant, ...]]:
    """The grants of the present attempt of each job that matches."""
    found: dict[int, list[Grant]] = {}
    for row in db.execute(
        "SELECT allocation.* FROM allocation JOIN job ON job.job_id = allocation.job_id"
        f" AND job.attempt = allocation.attempt WHERE {where} ORDER BY gpu_index, gpu_uuid"
    ):
        grant = Grant(GpuUuid(row["gpu_uuid"]), row["held_bytes"], row["declared_bytes"])
        found.setdefault(row["job_id"], []).append(grant)
    return {job_id: tuple(grants) for job_id, grants in found.items()}


def live_request_bytes(db: sqlite3.Connection) -> dict[JobId, int]:
    """What the requests of live jobs take, each with its environment, though some share one.

    SQLite knows the length of what it stores without reading that.
    """
    rows = db.execute(
        "SELECT job_id, length(payload.content) + coalesce(length(environment.content), 0)"
        " FROM payload JOIN job USING (job_id) LEFT JOIN environment USING (environment_id)"
        " WHERE final = 0"
    )
    sizes: dict[int, int] = {}  # most are alike: one number each
    return {JobId(job_id): sizes.setdefault(size, size) for job_id, size in rows}


def read_payload(
    db: sqlite3.Connection, job_id: JobId, *, with_environment: bool = True
) -> Payload | None:
    row = db.execute(
        "SELECT payload.content, payload.crc, digest, environment.content AS environment, final"
        " FROM payload JOIN job USING (job_id) LEFT JOIN environment USING (environment_id)"
        " WHERE job_id = ?",
        (job_id,),
    ).fetchone()
    if row is None:
        return None
    return payload_from(row, job_id, with_environment=with_environment)
