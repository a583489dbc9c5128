"""What a source of GPU facts gives the daemon: inventory and samples. Types only, no driver.

Two sources speak it: `nvml` (a child process that owns the driver library) and `simgpu`. Unknown is
None with a reason beside it, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from gpusched_client.terms import GpuUuid


class GpuSourceDown(Exception):
    """No GPU facts can be had now; the text says why and what helps."""


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """Identity of one GPU: what does not change while the driver stays loaded."""

    uuid: GpuUuid
    index: int  # the driver's order, for display
    minor: int | None  # of /dev/nvidiaN; None where the driver gives none
    model: str
    total_bytes: int | None
    reserved_bytes: int = 0  # the driver's own, never handed out
    pci: str | None = None
    shareable: bool = True  # False in exclusive-process mode
    parent_uuid: GpuUuid | None = None  # of a MIG slice
    island: int | None = None  # GPUs with the same number are connected by NVLink
    cpus: tuple[int, ...] = ()
    numa: int | None = None
    blocked: str | None = None  # why nothing may be placed here, e.g. compute mode prohibited


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process with memory on a GPU. The start time guards against a reused pid."""

    pid: int
    start_ticks: int | None
    used_bytes: int | None
    graphics_only: bool = False


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU in one sweep."""

    uuid: GpuUuid
    used_bytes: int | None  # without the driver's reserve
    free_bytes: int | None
    utilization: float | None = None  # percent
    processes: tuple[GpuProcess, ...] | None = None  # None: not asked or not answered
    power_w: float | None = None
    health: str = "ok"  # ok | sick | lost | unread
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One sweep over all GPUs. A failed sweep gives none: the last one is kept, marked stale."""

    taken_boottime_s: float
    inventory: tuple[GpuInfo, ...]
    readings: tuple[GpuReading, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Want:
    """What the daemon needs of the next sweep."""

    busy_uuids: frozenset[GpuUuid] = field(default_factory=frozenset)  # our jobs are there
    fresh: bool = False  # a job has just ended: process lists, now


class GpuSource(Protocol):
    """A source of samples. `sample` may take long or fail; it never blocks the loop."""

    @property
    def is_simulated(self) -> bool:
        """True where no driver is behind it."""

    async def sample(self, want: Want) -> Sample:
        """One sweep. Raises GpuSourceDown."""

    async def close(self) -> None:
        """End what was started."""


def pick(inventory: Iterable[GpuInfo], wanted: tuple[int | str, ...]) -> tuple[GpuInfo, ...]:
    """The GPUs that the configuration names by index, UUID or unique UUID prefix; () means all."""
    gpus = tuple(inventory)
    if not wanted:
        return gpus
    return tuple(
        gpu
        for gpu in gpus
        if any(
            gpu.index == name
            or str(gpu.index) == name
            or (isinstance(name, str) and len(name) >= 8 and gpu.uuid.startswith(name))
            for name in wanted
        )
    )
