"""What the driver says of a GPU's health; what it means is judged by the daemon."""

from __future__ import annotations

from typing import Any

from gpuschedd.gpu.nvidia.device import Device
from gpuschedd.gpu.nvidia.library import SUCCESS, Failed, Library

_ECC_FIELD, _PENDING_FIELD, _FAILED_FIELD, _RECOVERY_FIELD = 4, 144, 145, 230
_UNCORRECTED, _VOLATILE = 1, 0
_SLOWDOWN = (
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)


def checks_of(lib: Library, device: Device) -> dict[str, Any]:
    """Recovery action, row remapping, ECC, compute mode, drain: what the driver will tell."""
    owner = device.parent or device
    values = _fields(lib, owner.handle)
    checks: dict[str, Any] = {
        "recovery_action": values.get(_RECOVERY_FIELD),
        "uncorrected_errors": values.get(_ECC_FIELD),
    }
    pending, failed = values.get(_PENDING_FIELD), values.get(_FAILED_FIELD)
    if pending is None or failed is None:
        rows = lib.ask("nvmlDeviceGetRemappedRows", owner.handle)
        pending, failed = (rows[2], rows[3]) if rows is not None else (None, None)
    if checks["uncorrected_errors"] is None:
        checks["uncorrected_errors"] = lib.ask(
            "nvmlDeviceGetTotalEccErrors", owner.handle, _UNCORRECTED, _VOLATILE
        )
    checks["remap_pending"] = None if pending is None else bool(pending)
    checks["remap_failed"] = None if failed is None else bool(failed)
    try:
        checks["slowdown"] = int(lib.newest(_SLOWDOWN, owner.handle))
    except Failed:
        checks["slowdown"] = None
    return checks | modes_of(lib, device)


def modes_of(lib: Library, device: Device) -> dict[str, Any]:
    """Whom the driver lets onto it."""
    owner = device.parent or device
    drained = None if owner.pci is None else lib.ask("nvmlDeviceQueryDrainState", owner.pci)
    return {
        "compute_mode": lib.ask("nvmlDeviceGetComputeMode", owner.handle),
        "drained": None if drained is None else bool(drained),
    }


def _fields(lib: Library, handle: Any) -> dict[int, int]:
    """The field values that the driver has, by id, in one call."""
    wanted = [_ECC_FIELD, _PENDING_FIELD, _FAILED_FIELD, _RECOVERY_FIELD]
    values = lib.ask("nvmlDeviceGetFieldValues", handle, wanted)
    if values is None:
        return {}
    return {
        int(value.fieldId): int(value.value.uiVal)
        for value in values
        if value.nvmlReturn == SUCCESS
    }
