"""Who the GPUs are: asked once, when the driver is opened."""

from __future__ import annotations

from typing import Any

from gpusched_client.terms import UNKNOWN_MODEL
from gpuschedd.gpu.nvidia.device import Device, MemoryReader, minor_of, text_of
from gpuschedd.gpu.nvidia.library import GPU_IS_LOST, NO_PERMISSION, Failed, Library
from gpuschedd.gpu.nvidia.mig import open_slices

_PROHIBITED, _EXCLUSIVE_PROCESS = 2, 3


class Identification:
    """The devices of one opening of the driver."""

    def __init__(self, library: Library, memory: MemoryReader) -> None:
        self._lib = library
        self._memory = memory
        self.devices: list[Device] = []
        self.left_out: dict[int, dict[str, Any]] = {}  # GPUs that could not be opened, by index
        self.nameless: dict[int, dict[str, Any]] = {}  # the same, for what no other try changes

    def open_gpu(
        self, index: int, request: dict[str, Any], warnings: list[str]
    ) -> list[dict[str, Any]]:
        """One GPU's identity, or its slices'; nothing with a warning where it cannot be opened."""
        self._lib.gpu = index
        try:
            handle = self._lib.call("nvmlDeviceGetHandleByIndex", index)
            uuid = self._lib.call("nvmlDeviceGetUUID", handle)
        except Failed as failure:
            why = "it may not be opened" if failure.code == NO_PERMISSION else "it is not there"
            warnings.append(f"GPU {index} is left out, {why}: {failure.text}")
            fault = "lost" if failure.code == GPU_IS_LOST else "unread"
            self.left_out[index] = {"fault": fault, "reason": failure.text}
            return []
        if not uuid or any(uuid == (known.parent or known).uuid for known in self.devices):
            text = f"its UUID is not a name of its own: {uuid!r}"
            warnings.append(f"GPU {index} is left out, {text}")
            self.nameless[index] = {"fault": "unread", "reason": text}
            return []
        device = Device(handle, uuid, index, None)
        mode = self._lib.ask("nvmlDeviceGetMigMode", handle)
        if mode is not None and mode[0] == 1:
            device.pci = self._lib.ask("nvmlDeviceGetPciInfo", handle)
            devices, facts_of_slices = open_slices(self._lib, self._memory, device, warnings)
            self.devices += devices
            return facts_of_slices
        facts = self._identify(device, request, warnings)
        self.devices.append(device)
        if request.get("accounting", True):
            self._keep_accounts(device, warnings)
        return [facts]

    def _identify(
        self, device: Device, request: dict[str, Any], warnings: list[str]
    ) -> dict[str, Any]:
        lib, handle = self._lib, device.handle
        name = lib.ask("nvmlDeviceGetName", handle)
        model = str(name) if name is not None else UNKNOWN_MODEL
        device.pci = lib.ask("nvmlDeviceGetPciInfo", handle)
        numa_memory = lib.ask("nvmlDeviceGetNumaNodeId", handle)
        minor = minor_of(lib, self._memory.proc, device)
        mode = lib.ask("nvmlDeviceGetComputeMode", handle)
        self._memory.measure(device, model, request.get("integrated_models", ()))
        if lib.ask("nvmlDeviceGetPersistenceMode", handle) == 0:
            warnings.append(
                f"GPU {device.index} has persistence mode off: every job's start takes seconds; "
                "run `nvidia-smi -pm 1` or nvidia-persistenced"
            )
        return {
            "uuid": device.uuid,
            "index": device.index,
            "minor": minor,
            "model": model,
            "total_bytes": device.total,
            "reserved_bytes": device.reserved,
            "pci": text_of(getattr(device.pci, "busId", None)),
            "shareable": mode != _EXCLUSIVE_PROCESS,
            "blocked": "its compute mode is prohibited" if mode == _PROHIBITED else None,
            "integrated": device.integrated,
            "coherent": numa_memory is not None,
            "device_nodes": [] if minor is None else [f"/dev/nvidia{minor}"],
        }

    def _keep_accounts(self, device: Device, warnings: list[str]) -> None:
        """The driver's own peaks. Root may switch them on; else they are as they are."""
        mode = self._lib.ask("nvmlDeviceGetAccountingMode", device.handle)
        if mode == 0:
            try:
                self._lib.call("nvmlDeviceSetAccountingMode", device.handle, 1)
            except Failed as failure:
                warnings.append(
                    f"GPU {device.index} keeps no accounts ({failure.text}): peaks are sampled; "
                    "`nvidia-smi --accounting-mode=1`, as root, makes them exact"
                )
