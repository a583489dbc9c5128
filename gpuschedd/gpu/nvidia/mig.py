"""MIG: a partitioned GPU is its slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpuschedd.gpu.nvidia.device import Device, MemoryReader, minor_of, text_of
from gpuschedd.gpu.nvidia.library import NOT_FOUND, Failed, Library
from gpuschedd.gpu.source import FIRST_SLICE_INDEX

MIG_WITHOUT_SLICES = "it is in MIG mode and has no slices; `nvidia-smi mig -cgi` makes some"


def open_slices(
    lib: Library, memory: MemoryReader, parent: Device, warnings: list[str]
) -> tuple[list[Device], list[dict[str, Any]]]:
    """A GPU in MIG mode is its slices; holes in the numbering are normal."""
    count = lib.ask("nvmlDeviceGetMaxMigDeviceCount", parent.handle) or 0
    minor = minor_of(lib, memory.proc, parent)
    minors = _minors(memory.proc, minor)
    devices: list[Device] = []
    found = []
    for slot in range(count):
        try:
            handle = lib.call("nvmlDeviceGetMigDeviceHandleByIndex", parent.handle, slot)
            uuid = lib.call("nvmlDeviceGetUUID", handle)
        except Failed as failure:
            if failure.code != NOT_FOUND:
                warnings.append(f"slice {slot} of GPU {parent.index}: {failure.text}")
            continue
        device = Device(handle, uuid, parent.index, None, parent=parent)
        device.gi = lib.ask("nvmlDeviceGetGpuInstanceId", handle)
        ci = lib.ask("nvmlDeviceGetComputeInstanceId", handle)
        name = lib.ask("nvmlDeviceGetName", handle)
        memory.measure(device, "", ())
        devices.append(device)
        found.append(_slice_facts(device, slot, ci, minor, str(name), minors))
    if found:
        return devices, found
    return [parent], [_bare_parent(lib, memory, parent, minor)]


def _slice_facts(
    device: Device,
    slot: int,
    ci: int | None,
    minor: int | None,
    name: str,
    minors: dict[str, int],
) -> dict[str, Any]:
    assert device.parent is not None
    caps = (minors.get(f"gi{device.gi}"), minors.get(f"gi{device.gi}/ci{ci}"))
    nodes = [f"/dev/nvidia{minor}"] if minor is not None else []
    nodes += [f"/dev/nvidia-caps/nvidia-cap{cap}" for cap in caps if cap is not None]
    return {
        "uuid": device.uuid,
        "index": FIRST_SLICE_INDEX * (device.index + 1) + slot,
        "minor": minor,
        "model": name,
        "total_bytes": device.total,
        "reserved_bytes": device.reserved,
        "pci": text_of(getattr(device.parent.pci, "busId", None)),
        "parent_uuid": device.parent.uuid,
        "gpu_instance": device.gi,
        "compute_instance": ci,
        "device_nodes": nodes,
    }


def _bare_parent(
    lib: Library, memory: MemoryReader, parent: Device, minor: int | None
) -> dict[str, Any]:
    """MIG mode without slices: shown, and nothing can run on it."""
    name = lib.ask("nvmlDeviceGetName", parent.handle)
    memory.measure(parent, "", ())
    return {
        "uuid": parent.uuid,
        "index": parent.index,
        "minor": minor,
        "model": str(name),
        "total_bytes": parent.total,
        "reserved_bytes": parent.reserved,
        "blocked": MIG_WITHOUT_SLICES,
    }


def _minors(proc: Path, minor: int | None) -> dict[str, int]:
    """Capability device numbers of this GPU's slices: "gi1" and "gi1/ci0"."""
    try:
        lines = (proc / "driver/nvidia-caps/mig-minors").read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        path, _, number = line.rpartition(" ")
        gpu, _, rest = path.partition("/")
        if gpu == f"gpu{minor}" and rest.endswith("/access") and number.isdecimal():
            found[rest.removesuffix("/access")] = int(number)
    return found
