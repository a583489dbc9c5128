"""Who is on a GPU: lists of processes, merged and freed of garbled rows, and their use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpusched_client.units import MIB
from gpuschedd.gpu.nvidia.device import COMPUTE_LISTS, MEMORY_BYTES_MAX, Device
from gpuschedd.gpu.nvidia.library import (
    FUNCTION_NOT_FOUND,
    INSUFFICIENT_SIZE,
    NO_PERMISSION,
    NOT_SUPPORTED,
    Failed,
    Library,
)
from gpuschedd.supervisor.procfs import start_ticks_of
from gpuschedd.system.clock import wall_s

PID_MAX = 2**22
LIST_BUSY_S, LIST_IDLE_S, LIST_GRAPHICS_S = 1.0, 10.0, 60.0
LIST_TRIES = 3
MOVED_BYTES = 16 * MIB  # of memory in use: worth a look at who it is
UTILIZATION_STALE_S = 10.0
SERVER_NAME = "nvidia-cuda-mps"  # as /proc shows it: 15 bytes
_NO_ID = (None, 2**32 - 1)  # of an instance: the driver does not say
_GRAPHICS = (
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v2",
)
_MPS = ("nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses")


class ProcessLists:
    """Lists are dear, and jobs wait on the same lock: asked for only when that is due."""

    def __init__(self, library: Library) -> None:
        self._lib = library

    @staticmethod
    def is_due(device: Device, used: int | None, now_s: float, busy: bool, fresh: bool) -> bool:
        """Lists are dear, and jobs wait on the same lock: where our jobs are or memory moved."""
        if fresh or device.listed_s == 0.0:
            return True
        age_s = now_s - device.listed_s
        moved = abs((used or 0) - (device.listed_used or 0)) >= MOVED_BYTES
        # A hair early rather than a whole sweep late.
        return age_s >= (LIST_BUSY_S if busy or moved else LIST_IDLE_S) - 0.05

    def read(self, device: Device, reading: dict[str, Any], used: int | None, now_s: float) -> None:
        """The list of a device into its reading, or why there is none."""
        device.listed_s, device.listed_used = now_s, used
        try:
            kinds = self._rows(device, now_s, used)
        except Failed as failure:
            reading["list_reason"] = f"the driver lists no processes: {failure.text}"
            if failure.code not in (NOT_SUPPORTED, FUNCTION_NOT_FOUND, NO_PERMISSION):
                device.listed_s -= LIST_IDLE_S - LIST_BUSY_S  # soon again
            return
        device.listed_pids = frozenset(kinds)
        reading["listed_used"] = used
        reading["processes"] = [
            [pid, start_ticks_of(pid), size, kind == {"G"}, device.has_server and is_server(pid)]
            for pid, (size, kind) in kinds.items()
        ]

    def _rows(
        self, device: Device, now_s: float, used: int | None
    ) -> dict[int, tuple[int | None, set[str]]]:
        """Processes by pid. One that computes and draws is in two lists and has one memory.

        Who draws is dear to ask, too: now and then, and at once where memory came without an owner.
        """
        found: dict[int, tuple[int | None, set[str]]] = {}
        _merge(found, "C", self._listed(device, COMPUTE_LISTS))
        is_due = device.has_graphics or now_s - device.graphics_s >= LIST_GRAPHICS_S
        if is_due or _ownerless(found, used) >= device.ownerless + MOVED_BYTES:
            device.graphics_s = now_s
            rows = self._listed_or_none(device, _GRAPHICS)
            device.has_graphics = bool(rows)
            _merge(found, "G", rows)
            device.ownerless = _ownerless(found, used)
        device.ownerless = min(device.ownerless, _ownerless(found, used))
        device.has_server = any(is_server(pid) for pid in found)
        if device.has_server:
            _merge(found, "M", self._listed_or_none(device, _MPS))
        return found

    def _listed_or_none(self, device: Device, names: tuple[str, ...]) -> list[Any]:
        try:
            return self._listed(device, names)
        except Failed:
            return []

    def _listed(self, device: Device, names: tuple[str, ...]) -> list[Any]:
        """One list, tried again while it outgrows its size; the older form where rows are garbled.

        A driver that grew its rows under the old name interleaves pids and bytes.
        """
        rows = self._listed_once(device, names)
        if names[0].endswith("_v3") and any(_is_garbled(row, device.total) for row in rows):
            rows = self._listed_as_before(device, names, rows)
        return [row for row in rows if not _is_garbled(row, device.total)]

    def _listed_as_before(
        self, device: Device, names: tuple[str, ...], garbled: list[Any]
    ) -> list[Any]:
        """The list in its older form, from now on; a driver without it has the newer one only."""
        self._lib.prefer(names, names[-1])
        try:
            return self._listed_once(device, names)
        except Failed as failure:
            if failure.code != FUNCTION_NOT_FOUND:
                raise
            self._lib.prefer(names, names[0])
            return garbled

    def _listed_once(self, device: Device, names: tuple[str, ...]) -> list[Any]:
        for attempt in range(LIST_TRIES):
            try:
                rows = self._lib.newest(names, self._list_handle(device))
                return [r for r in rows if self._is_of(r, device)] or self._own_rows(device, names)
            except Failed as failure:
                last = attempt == LIST_TRIES - 1
                refuses = failure.code in (NO_PERMISSION, NOT_SUPPORTED)
                if refuses and device.parent is not None:
                    return list(self._lib.newest(names, device.handle))
                if failure.code != INSUFFICIENT_SIZE or last:
                    raise
        raise AssertionError("the last try returns or raises")

    def _own_rows(self, device: Device, names: tuple[str, ...]) -> list[Any]:
        """A slice's processes by its own word, where its parent tells of none there."""
        if device.parent is None:
            return []
        try:
            rows = self._lib.newest(names, device.handle)
        except Failed:
            return []
        return [row for row in rows if getattr(row, "gpuInstanceId", None) in (*_NO_ID, device.gi)]

    @staticmethod
    def _list_handle(device: Device) -> Any:
        """Of a slice the parent is asked: only its list tells instances apart."""
        return device.handle if device.parent is None else device.parent.handle

    @staticmethod
    def _is_of(row: Any, device: Device) -> bool:
        return device.parent is None or getattr(row, "gpuInstanceId", None) == device.gi

    def utilization(self, device: Device) -> dict[str, int]:
        """Percent by pid since the last question, without rows of others, old and absurd ones."""
        now_us = int(wall_s() * 1e6)
        since_us = device.utilization_since_us or now_us - int(UTILIZATION_STALE_S * 1e6)
        try:
            rows = self._lib.call("nvmlDeviceGetProcessUtilization", device.handle, since_us)
        except Failed:
            return {}  # also "Success": that means that there are none
        newest: dict[int, tuple[int, int]] = {}
        for row in rows:
            is_old = row.timeStamp < now_us - UTILIZATION_STALE_S * 1e6
            if row.smUtil > 100 or is_old or row.pid not in device.listed_pids:
                continue
            device.utilization_since_us = max(device.utilization_since_us, row.timeStamp)
            newest[row.pid] = max(newest.get(row.pid, (0, 0)), (row.timeStamp, row.smUtil))
        return {str(pid): sm for pid, (_, sm) in newest.items()}


def _ownerless(found: dict[int, tuple[int | None, set[str]]], used: int | None) -> int:
    return max(0, (used or 0) - sum(size or 0 for size, _ in found.values()))


def _merge(found: dict[int, tuple[int | None, set[str]]], kind: str, rows: Iterable[Any]) -> None:
    for row in rows:
        size, kinds = found.get(row.pid, (None, set()))
        used = row.usedGpuMemory
        if used is not None:
            size = used if size is None else max(size, used)
        found[row.pid] = (size, kinds | {kind})


def _is_garbled(row: Any, total: int | None) -> bool:
    """No process has this pid, or no card this memory."""
    if not 0 < row.pid <= PID_MAX:
        return True
    used = row.usedGpuMemory
    return used is not None and used > (total or MEMORY_BYTES_MAX)


def is_server(pid: int) -> bool:
    """The MPS server: it holds the contexts of its clients."""
    try:
        with open(f"/proc/{pid}/comm", encoding="ascii", errors="replace") as file:
            return file.read().strip() == SERVER_NAME
    except OSError:
        return False
