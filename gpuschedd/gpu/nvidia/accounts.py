"""The driver's own accounts of processes, also of those that have ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpuschedd.gpu.nvidia.device import MEMORY_BYTES_MAX, Device
from gpuschedd.gpu.nvidia.library import NOT_FOUND, Failed, Library


def accounts_of(lib: Library, devices: Iterable[Device], request: dict[str, Any]) -> dict[str, Any]:
    """What the driver kept of these processes: peak, average use, start."""
    found: dict[str, dict[str, list[Any]]] = {}
    by_uuid = {device.uuid: device for device in devices}
    for uuid, pids in request["pids"].items():
        device = by_uuid.get(uuid)
        if device is None or device.parent is not None:
            continue  # slices keep no accounts
        found[uuid] = {}
        for pid in pids:
            try:
                with lib.part("accounts", device.index):
                    stats = lib.call("nvmlDeviceGetAccountingStats", device.handle, pid)
            except Failed as failure:
                if failure.code == NOT_FOUND:
                    continue
                break  # not kept here
            used = stats.gpuUtilization
            peak = stats.maxMemoryUsage
            if peak is not None and peak > (device.total or MEMORY_BYTES_MAX):
                continue
            found[uuid][str(pid)] = [
                peak,
                used if used <= 100 else None,
                stats.startTime / 1e6,
            ]
    return {"accounts": found}
