"""What the child says, as the types of the seam; lists of processes outlive a sweep without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from gpusched_client.terms import GpuUuid
from gpuschedd.gpu.source import GpuInfo, GpuModes, GpuProcess, GpuReading, HealthChecks

LIST_FAILURES_MAX = 3  # in a row: so long the last list of a GPU's processes stands


class _Listed(NamedTuple):
    """The last list of a GPU's processes, and what was in use then."""

    processes: tuple[GpuProcess, ...] | None = None
    used_bytes: int | None = None
    boottime_s: float | None = None


class Readings:
    """Turns entries of sweeps into readings."""

    def __init__(self) -> None:
        self._lists: dict[GpuUuid, _Listed] = {}
        self._list_failures: dict[GpuUuid, int] = {}  # in a row

    def clear(self) -> None:
        """The driver was opened again."""
        self._lists.clear()
        self._list_failures.clear()

    def reading_of(self, entry: dict[str, Any], taken_s: float) -> GpuReading:
        """One GPU in one sweep, which was taken at taken_s (boot time)."""
        uuid = GpuUuid(entry["uuid"])
        if "processes" in entry:
            rows = tuple(GpuProcess(*row) for row in entry["processes"])
            self._lists[uuid] = _Listed(rows, entry.get("listed_used"), taken_s)
            self._list_failures.pop(uuid, None)
        elif "list_reason" in entry:
            failures = self._list_failures[uuid] = self._list_failures.get(uuid, 0) + 1
            if failures > LIST_FAILURES_MAX:
                self._lists.pop(uuid, None)
        listed = self._lists.get(uuid, _Listed())
        checks, modes = entry.get("checks"), entry.get("modes")
        return GpuReading(
            uuid=uuid,
            used_bytes=entry.get("used"),
            free_bytes=entry.get("free"),
            utilization=entry.get("utilization"),
            processes=listed.processes,
            listed_used_bytes=listed.used_bytes,
            listed_boottime_s=listed.boottime_s,
            power_w=entry.get("power_w"),
            process_utilization={
                int(pid): float(percent)
                for pid, percent in entry.get("process_utilization", {}).items()
            },
            fault=entry.get("fault"),
            reason=entry.get("reason") or entry.get("list_reason"),
            checks=None if checks is None else HealthChecks(**checks),
            modes=None if modes is None else GpuModes(**modes),
        )


def silent_reading(uuid: GpuUuid, function: str) -> GpuReading:
    """A GPU that is left out."""
    return GpuReading(uuid, None, None, fault="unread", reason=silent_text(function))


def silent_text(function: str) -> str:
    """Why it is left out."""
    return f"it hangs the driver ({function}) and is not asked for now"


def info_of(entry: dict[str, Any]) -> GpuInfo:
    """Identity of one GPU or slice."""
    names = set(GpuInfo.__dataclass_fields__)
    values = {name: value for name, value in entry.items() if name in names}
    for name in ("cpus", "device_nodes", "joined"):
        values[name] = tuple(values.get(name, ()))
    values["links"] = tuple((GpuUuid(peer), score) for peer, score in values.get("links", ()))
    return replace(GpuInfo(**values), uuid=GpuUuid(entry["uuid"]))
