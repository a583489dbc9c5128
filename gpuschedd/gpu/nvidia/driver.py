"""What the driver is asked, inside the child process: identity once, a sweep each time.

Every driver call goes through Library. Raw facts go out, as JSON-ready maps; what they mean for
placement is judged in the daemon. Must not import pynvml, nor decide whether a GPU is healthy.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpusched_client.units import MIB
from gpuschedd.gpu.nvidia import topology as nvml_topology
from gpuschedd.gpu.nvidia.library import (
    ARGUMENT_VERSION_MISMATCH,
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    INSUFFICIENT_SIZE,
    INVALID_ARGUMENT,
    LIB_RM_MISMATCH,
    LIBRARY_NOT_FOUND,
    NEW_CHILD_CODES,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    SUCCESS,
    TIMEOUT,
    UNINITIALIZED,
    UNKNOWN,
    Failed,
    Library,
)
from gpuschedd.supervisor.procfs import start_ticks_of
from gpuschedd.system.clock import wall_s

SHUTDOWNS_MAX = 100  # an unbalanced init is undone so often
PID_MAX = 2**22
_NO_ID = (None, 2**32 - 1)  # of an instance: the driver does not say
MEMORY_BYTES_MAX = 2**50
POWER_MW_MAX = 10_000_000
GARBAGE = -1  # no code of the driver's: it answers, and the answer makes no sense
LIST_BUSY_S, LIST_IDLE_S, LIST_GRAPHICS_S = 1.0, 10.0, 60.0
MOVED_BYTES = 16 * MIB  # of memory in use: worth a look at who it is
UTILIZATION_EVERY_S, UTILIZATION_STALE_S = 2.0, 10.0
RESERVED_BYTES_MAX = 1024 * MIB  # more in use on an idle GPU is no reserve of an old driver's
LIST_TRIES = 3
DRIVER_EVENTS_MAX = 64  # taken per sweep
DRIVER_GPUS_MAX = 1_024  # on one host; a driver that counts more counts wrong
SERVER_NAME = "nvidia-cuda-mps"  # as /proc shows it: 15 bytes

_COMPUTE = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetComputeRunningProcesses_v2",
)
_GRAPHICS = (
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v2",
)
_MPS = ("nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses")
#: The driver has no version 2 of what is asked, in the words of different releases.
_NO_SUCH_FORM = (
    FUNCTION_NOT_FOUND,
    NOT_SUPPORTED,
    ARGUMENT_VERSION_MISMATCH,
    INVALID_ARGUMENT,
)
_XID, _MIG_CHANGED, _RECOVERY, _UNAVAILABLE = 0x8, 0x100, 0x8000, 0x4000
_ECC_FIELD, _PENDING_FIELD, _FAILED_FIELD, _RECOVERY_FIELD = 4, 144, 145, 230
_UNCORRECTED, _VOLATILE = 1, 0
_PROHIBITED, _EXCLUSIVE_PROCESS = 2, 3


@dataclass(slots=True)
class Device:
    """One GPU or slice, and what was seen on it last."""

    handle: Any
    uuid: str
    index: int  # of the GPU, for slices of their parent
    total: int | None
    reserved: int = 0
    pci: Any = None
    parent: Device | None = None
    integrated: bool = False
    gi: int | None = None
    v1_memory: bool = False
    listed_s: float = 0.0
    listed_used: int | None = None
    has_graphics: bool = True
    graphics_s: float = 0.0
    has_server: bool = False
    utilization_since_us: int = 0
    utilization_s: float = 0.0
    listed_pids: frozenset[int] = field(default_factory=frozenset)


class Driver:
    """The opened driver. One method per request; `handle` chooses."""

    def __init__(self, library: Library) -> None:
        self._lib = library
        self._devices: list[Device] = []
        self._proc = Path("/proc")
        self._events: Any = None
        self._recounted_s = 0.0
        self._recount_every_s = 0.0
        self._counted = 0
        self._count = 0  # of GPUs, by the driver, when it was opened
        self._left_out: dict[int, dict[str, Any]] = {}  # GPUs that could not be opened, by index
        self._new_child: str | None = None

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request's reply."""
        calls, busy_s = self._lib.calls, self._lib.busy_s
        match request["op"]:
            case "open":
                reply = self.open(request)
            case "sweep":
                reply = self.sweep(request)
            case "accounts":
                reply = self.accounts(request)
            case other:
                raise ValueError(f"unknown request {other}")
        self._lib.forget_page()
        reply["calls"] = self._lib.calls - calls
        reply["cost_s"] = self._lib.busy_s - busy_s
        return reply

    # --- open ---------------------------------------------------------------------------------

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Initialise once and enumerate; `down` with a reason where that fails."""
        self._proc = Path(request.get("proc", "/proc"))
        self._recount_every_s = request["recount_every_s"]
        self._lib.skip = frozenset(request.get("skip_calls", ()))
        try:
            self._lib.load()
            self.shut_down()
            self._lib.call("nvmlInit")
            count = self._lib.call("nvmlDeviceGetCount")
            if count > DRIVER_GPUS_MAX:
                raise Failed(GARBAGE, f"it counts {count} GPUs; the limit is {DRIVER_GPUS_MAX}")
        except Failed as failure:
            return {"down": down_text(failure), "code": failure.code}
        warnings: list[str] = []
        self._devices, self._left_out, self._count = [], {}, count
        inventory = []
        for index in range(count):
            if index not in request.get("skip_indices", ()):
                inventory += self._open_gpu(index, request, warnings)
        self._lib.gpu = -1
        self._counted = self._count_in_proc() or 0
        self._recounted_s = time.monotonic()
        self._open_events()
        whole = [device for device in self._devices if device.parent is None]
        nvml_topology.add_links(self._lib, [(d.uuid, d.handle) for d in whole], inventory)
        if self._in_pid_namespace():
            warnings.append(
                "the daemon runs in a PID namespace: the driver's pids are the host's, so GPU "
                "memory cannot be attributed to jobs"
            )
        version = self._lib.ask("nvmlSystemGetDriverVersion")
        return {
            "driver": str(version),
            "inventory": inventory,
            "left_out": [{"index": index, **why} for index, why in self._left_out.items()],
            "warnings": warnings,
        }

    def shut_down(self) -> None:
        """Undo every init: one too many would make the next a no-op with the old list of GPUs."""
        self._events = None
        for _ in range(SHUTDOWNS_MAX):
            try:
                self._lib.call("nvmlShutdown")
            except Failed:
                return

    def _open_gpu(
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
            self._left_out[index] = {"fault": fault, "reason": failure.text}
            return []
        if not uuid or any(uuid == (known.parent or known).uuid for known in self._devices):
            warnings.append(f"GPU {index} is left out, its UUID is no name of its own: {uuid!r}")
            return []
        device = Device(handle, uuid, index, None)
        mode = self._lib.ask("nvmlDeviceGetMigMode", handle)
        if mode is not None and mode[0] == 1:
            device.pci = self._lib.ask("nvmlDeviceGetPciInfo", handle)
            return self._open_slices(device, warnings)
        facts = self._identify(device, request, warnings)
        self._devices.append(device)
        if request.get("accounting", True):
            self._keep_accounts(device, warnings)
        return [facts]

    def _identify(
        self, device: Device, request: dict[str, Any], warnings: list[str]
    ) -> dict[str, Any]:
        lib, handle = self._lib, device.handle
        name = lib.ask("nvmlDeviceGetName", handle)
        model = str(name) if name is not None else "unknown"
        device.pci = lib.ask("nvmlDeviceGetPciInfo", handle)
        numa_memory = lib.ask("nvmlDeviceGetNumaNodeId", handle)
        minor = self._minor(device)
        mode = lib.ask("nvmlDeviceGetComputeMode", handle)
        self._measure(device, model, request.get("integrated_models", ()))
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
            "pci": _text(getattr(device.pci, "busId", None)),
            "shareable": mode != _EXCLUSIVE_PROCESS,
            "blocked": "its compute mode is prohibited" if mode == _PROHIBITED else None,
            "integrated": device.integrated,
            "coherent": numa_memory is not None,
            "numa": nvml_topology.numa_node(lib, handle, device.pci),
            "cpus": nvml_topology.cpus(lib, handle),
            "device_nodes": [] if minor is None else [f"/dev/nvidia{minor}"],
        }

    def _minor(self, device: Device) -> int | None:
        """N of /dev/nvidiaN: the kernel module tells it too, where the library does not."""
        told = self._lib.ask("nvmlDeviceGetMinorNumber", device.handle)
        if told is not None:
            return int(told)
        bus_id = (_text(getattr(device.pci, "busId", None)) or "").lower()
        for name in (bus_id, bus_id[4:]):  # the library writes four digits more
            try:
                text = (self._proc / "driver/nvidia/gpus" / name / "information").read_text()
            except OSError:
                continue
            found = re.search(r"^Device Minor:\s*(\d+)$", text, re.MULTILINE)
            return int(found[1]) if found else None
        return None

    def _measure(self, device: Device, model: str, integrated: Iterable[str]) -> None:
        """Total and reserve. Parts that share the host's memory have the host's figures."""
        try:
            memory = self._memory(device)
        except Failed as failure:
            device.integrated = failure.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND) and any(
                word.casefold() in model.casefold() for word in integrated
            )
            if device.integrated:
                device.total = self._host_memory()[0]
            return
        device.total, device.reserved = memory.total, getattr(memory, "reserved", 0)
        if device.v1_memory:
            self._find_reserve(device, memory.used)

    def _find_reserve(self, device: Device, used: int) -> None:
        """An old driver counts its reserve as used: on an idle GPU that is what is in use."""
        try:
            rows = self._lib.newest(_COMPUTE, device.handle)
        except Failed:
            return
        if not rows and used <= RESERVED_BYTES_MAX:
            device.reserved = used

    def _memory(self, device: Device) -> Any:
        """Memory of a GPU. Raises Failed also for figures that cannot be."""
        memory = self._told_memory(device)
        parts = (memory.used, memory.free, getattr(memory, "reserved", 0))
        if not 0 < memory.total <= MEMORY_BYTES_MAX or max(parts) > memory.total:
            raise Failed(
                GARBAGE, f"{memory.used} of {memory.total} bytes are in use, which cannot be"
            )
        return memory

    def _told_memory(self, device: Device) -> Any:
        """As the driver has it: version 2 tells its reserve apart, version 1 does not."""
        if not device.v1_memory:
            version = self._lib.load().nvmlMemory_v2
            try:
                return self._lib.call("nvmlDeviceGetMemoryInfo", device.handle, version=version)
            except Failed as failure:
                if failure.code not in _NO_SUCH_FORM:
                    raise
        memory = self._lib.call("nvmlDeviceGetMemoryInfo", device.handle)
        device.v1_memory = True
        return memory

    def _host_memory(self) -> tuple[int, int]:
        """MemTotal and MemAvailable in bytes."""
        values = {}
        for line in (self._proc / "meminfo").read_text().splitlines():
            key, _, rest = line.partition(":")
            if key in ("MemTotal", "MemAvailable"):
                values[key] = int(rest.split()[0]) * 1024
        return values["MemTotal"], values["MemAvailable"]

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

    # --- slices -------------------------------------------------------------------------------

    def _open_slices(self, parent: Device, warnings: list[str]) -> list[dict[str, Any]]:
        """A GPU in MIG mode is its slices; holes in the numbering are normal."""
        lib = self._lib
        count = lib.ask("nvmlDeviceGetMaxMigDeviceCount", parent.handle) or 0
        minor = self._minor(parent)
        minors = self._mig_minors(minor)
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
            self._measure(device, "", ())
            self._devices.append(device)
            found.append(self._slice_facts(device, slot, ci, minor, str(name), minors))
        return found or [self._bare_parent(parent, minor)]

    @staticmethod
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
            "index": 100 * (device.index + 1) + slot,
            "minor": minor,
            "model": name,
            "total_bytes": device.total,
            "reserved_bytes": device.reserved,
            "pci": _text(getattr(device.parent.pci, "busId", None)),
            "parent_uuid": device.parent.uuid,
            "gpu_instance": device.gi,
            "compute_instance": ci,
            "device_nodes": nodes,
        }

    def _bare_parent(self, parent: Device, minor: int | None) -> dict[str, Any]:
        """MIG mode without slices: shown, and nothing can run on it."""
        name = self._lib.ask("nvmlDeviceGetName", parent.handle)
        self._measure(parent, "", ())
        self._devices.append(parent)
        return {
            "uuid": parent.uuid,
            "index": parent.index,
            "minor": minor,
            "model": str(name),
            "total_bytes": parent.total,
            "reserved_bytes": parent.reserved,
            "blocked": "it is in MIG mode and has no slices; `nvidia-smi mig -cgi` makes some",
        }

    def _mig_minors(self, minor: int | None) -> dict[str, int]:
        """Capability device numbers of this GPU's slices: "gi1" and "gi1/ci0"."""
        try:
            lines = (self._proc / "driver/nvidia-caps/mig-minors").read_text().splitlines()
        except OSError:
            return {}
        found = {}
        for line in lines:
            path, _, number = line.rpartition(" ")
            gpu, _, rest = path.partition("/")
            if gpu == f"gpu{minor}" and rest.endswith("/access") and number.isdecimal():
                found[rest.removesuffix("/access")] = int(number)
        return found

    # --- sweep --------------------------------------------------------------------------------

    def sweep(self, request: dict[str, Any]) -> dict[str, Any]:
        """Every GPU once; what fails on one leaves the others alone."""
        now_s = time.monotonic()
        self._new_child = None
        busy, fresh = set(request.get("busy", ())), set(request.get("fresh", ()))
        skip = set(request.get("skip", ()))
        events = self._take_events()
        health = request.get("health", False) or bool(events)
        readings = []
        for device in self._devices:
            if device.uuid in skip:
                continue
            self._lib.gpu = device.index
            is_busy = device.uuid in busy
            reading = self._read(device, now_s, is_busy, device.uuid in fresh)
            if health and "fault" not in reading:
                reading["checks"] = self._checks(device)
            readings.append(reading)
        self._lib.gpu = -1
        codes = {reading.get("code") for reading in readings}
        if readings and codes == {UNKNOWN}:
            self._new_child = "every GPU answers with an unknown error"
        self._recount(now_s)
        return {"readings": readings, "events": events, "new_child": self._new_child}

    def _read(self, device: Device, now_s: float, busy: bool, fresh: bool) -> dict[str, Any]:
        """Memory, use, power, and the processes where that is due."""
        reading: dict[str, Any] = {"uuid": device.uuid}
        used: int | None = None
        free: int | None = None
        try:
            used, free = self._used_and_free(device)
        except Failed as failure:
            self._note_failure(reading, failure)
            if reading["fault"] != "unsupported":
                return reading
        reading |= {"used": used, "free": free}
        if device.parent is None:
            self._read_use(device, reading, busy)
        if self._list_is_due(device, used, now_s, busy, fresh):
            self._list_processes(device, reading, used, now_s)
        if busy and device.parent is None and now_s - device.utilization_s >= UTILIZATION_EVERY_S:
            device.utilization_s = now_s
            reading["process_utilization"] = self._process_utilization(device)
        return reading

    def _used_and_free(self, device: Device) -> tuple[int, int]:
        if device.integrated:
            total, available = self._host_memory()
            return total - available, available
        memory = self._memory(device)
        if device.total is None:
            self._new_child = "a GPU tells its memory that did not at the start"
        used = memory.used - device.reserved if device.v1_memory else memory.used
        return max(0, used), memory.free

    def _note_failure(self, reading: dict[str, Any], failure: Failed) -> None:
        reading |= {"code": failure.code, "reason": f"the driver says: {failure.text}"}
        if failure.code in NEW_CHILD_CODES:
            self._new_child = failure.text
        reading["fault"] = {
            GPU_IS_LOST: "lost",
            RESET_REQUIRED: "reset",
            NOT_SUPPORTED: "unsupported",
            FUNCTION_NOT_FOUND: "unsupported",
        }.get(failure.code, "unread")

    def _read_use(self, device: Device, reading: dict[str, Any], busy: bool) -> None:
        rates = self._lib.ask("nvmlDeviceGetUtilizationRates", device.handle)
        if rates is not None and rates.gpu <= 100:
            reading["utilization"] = rates.gpu
        if busy:
            milliwatts = self._lib.ask("nvmlDeviceGetPowerUsage", device.handle)
            if milliwatts is not None and milliwatts <= POWER_MW_MAX:
                reading["power_w"] = milliwatts / 1000

    @staticmethod
    def _list_is_due(
        device: Device, used: int | None, now_s: float, busy: bool, fresh: bool
    ) -> bool:
        """Lists are dear, and jobs wait on the same lock: where our jobs are or memory moved."""
        if fresh or device.listed_s == 0.0:
            return True
        age_s = now_s - device.listed_s
        moved = abs((used or 0) - (device.listed_used or 0)) >= MOVED_BYTES
        # A hair early rather than a whole sweep late.
        return age_s >= (LIST_BUSY_S if busy or moved else LIST_IDLE_S) - 0.05

    def _list_processes(
        self, device: Device, reading: dict[str, Any], used: int | None, now_s: float
    ) -> None:
        device.listed_s, device.listed_used = now_s, used
        try:
            kinds = self._rows(device, now_s)
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

    def _rows(self, device: Device, now_s: float) -> dict[int, tuple[int | None, set[str]]]:
        """Processes by pid. One that computes and draws is in two lists and has one memory."""
        found: dict[int, tuple[int | None, set[str]]] = {}
        _merge(found, "C", self._listed(device, _COMPUTE))
        if device.has_graphics or now_s - device.graphics_s >= LIST_GRAPHICS_S:
            device.graphics_s = now_s
            rows = self._listed_or_none(device, _GRAPHICS)
            device.has_graphics = bool(rows)
            _merge(found, "G", rows)
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

    def _process_utilization(self, device: Device) -> dict[str, int]:
        """Percent by pid since the last question, without strangers, old and absurd rows."""
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

    # --- health -------------------------------------------------------------------------------

    def _checks(self, device: Device) -> dict[str, Any]:
        """Recovery action, row remapping, ECC, compute mode, drain: what the driver will tell."""
        owner = device.parent or device
        values = self._fields(owner.handle)
        checks: dict[str, Any] = {
            "recovery_action": values.get(_RECOVERY_FIELD),
            "uncorrected_errors": values.get(_ECC_FIELD),
        }
        pending, failed = values.get(_PENDING_FIELD), values.get(_FAILED_FIELD)
        if pending is None or failed is None:
            rows = self._lib.ask("nvmlDeviceGetRemappedRows", owner.handle)
            pending, failed = (rows[2], rows[3]) if rows is not None else (None, None)
        if checks["uncorrected_errors"] is None:
            checks["uncorrected_errors"] = self._lib.ask(
                "nvmlDeviceGetTotalEccErrors", owner.handle, _UNCORRECTED, _VOLATILE
            )
        checks["remap_pending"] = None if pending is None else bool(pending)
        checks["remap_failed"] = None if failed is None else bool(failed)
        checks["compute_mode"] = self._lib.ask("nvmlDeviceGetComputeMode", owner.handle)
        if owner.pci is not None:
            drained = self._lib.ask("nvmlDeviceQueryDrainState", owner.pci)
            checks["drained"] = None if drained is None else bool(drained)
        return checks

    def _fields(self, handle: Any) -> dict[int, int]:
        """The field values that the driver has, by id, in one call."""
        wanted = [_ECC_FIELD, _PENDING_FIELD, _FAILED_FIELD, _RECOVERY_FIELD]
        values = self._lib.ask("nvmlDeviceGetFieldValues", handle, wanted)
        if values is None:
            return {}
        return {
            int(value.fieldId): int(value.value.uiVal)
            for value in values
            if value.nvmlReturn == SUCCESS
        }

    # --- events -------------------------------------------------------------------------------

    def _open_events(self) -> None:
        """Register; a GPU that has no events is not sick for that."""
        self._events = self._lib.ask("nvmlEventSetCreate")
        if self._events is None:
            return
        for handle in {id(d.parent or d): (d.parent or d).handle for d in self._devices}.values():
            types = self._lib.ask("nvmlDeviceGetSupportedEventTypes", handle) or 0
            wanted = types & (_XID | _MIG_CHANGED | _RECOVERY | _UNAVAILABLE)
            if wanted:
                self._lib.ask("nvmlDeviceRegisterEvents", handle, wanted, self._events)

    def _take_events(self) -> list[list[Any]]:
        """What was reported since the last sweep. Never waits: it is this one thread that calls."""
        taken: list[list[Any]] = []
        while self._events is not None and len(taken) < DRIVER_EVENTS_MAX:
            try:
                data = self._lib.call("nvmlEventSetWait", self._events, 0)
            except Failed as failure:
                if failure.code != TIMEOUT:
                    self._open_events()  # all GPUs are suspect: the set is made anew, then asked
                    taken += [[device.uuid, "suspect", 0] for device in self._devices]
                break
            self._take_event(data, taken)
        return taken

    def _take_event(self, data: Any, taken: list[list[Any]]) -> None:
        if data.eventType & _MIG_CHANGED:
            self._new_child = "the slices of a GPU have changed"
        uuid = self._lib.ask("nvmlDeviceGetUUID", data.device)
        for device in self._devices:
            owner = device.parent or device
            if uuid in (owner.uuid, device.uuid):
                is_xid = bool(data.eventType & _XID)
                kind = "fault" if is_xid else "suspect"
                taken.append([device.uuid, kind, int(data.eventData) if is_xid else 0])

    # --- inventory changes --------------------------------------------------------------------

    def _recount(self, now_s: float) -> None:
        """A GPU that was plugged or drained: this process would go on seeing the old ones.

        Some drivers tell it, too; and one that could not be opened at the start may be well now.
        """
        if now_s - self._recounted_s < self._recount_every_s:
            return
        self._recounted_s = now_s
        count = self._count_in_proc()
        if count is not None and count != self._counted:
            self._new_child = f"the driver has {count} GPUs now; it had {self._counted}"
        told = self._lib.ask("nvmlDeviceGetCount")
        if told is not None and told != self._count:
            self._new_child = f"the driver counts {told} GPUs now; it counted {self._count}"
        for index in self._left_out:
            if self._can_open(index):
                self._new_child = f"GPU {index} can be opened now"

    def _can_open(self, index: int) -> bool:
        handle = self._lib.ask("nvmlDeviceGetHandleByIndex", index)
        return handle is not None and bool(self._lib.ask("nvmlDeviceGetUUID", handle))

    def _count_in_proc(self) -> int | None:
        try:
            return len(os.listdir(self._proc / "driver/nvidia/gpus"))
        except OSError:
            return None

    def _in_pid_namespace(self) -> bool:
        """The first PID namespace has a fixed number; the driver knows no other."""
        try:
            return os.readlink("/proc/self/ns/pid") != "pid:[4026531836]"
        except OSError:
            return False

    # --- accounts -----------------------------------------------------------------------------

    def accounts(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the driver kept of these processes: peak, average use, start."""
        found: dict[str, dict[str, list[Any]]] = {}
        by_uuid = {device.uuid: device for device in self._devices}
        for uuid, pids in request["pids"].items():
            device = by_uuid.get(uuid)
            if device is None or device.parent is not None:
                continue  # slices keep no accounts
            self._lib.gpu = device.index
            found[uuid] = {}
            for pid in pids:
                try:
                    stats = self._lib.call("nvmlDeviceGetAccountingStats", device.handle, pid)
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


# --- pure parts ---------------------------------------------------------------------------------


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


def _text(value: Any) -> str | None:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def down_text(failure: Failed) -> str:
    """Why there is no driver, and what helps."""
    cures = {
        LIBRARY_NOT_FOUND: "the NVIDIA driver library (libnvidia-ml.so.1) is not installed here. "
        "Install the driver, or try the scheduler without GPUs: gpuschedd --simulate 4x24G",
        DRIVER_NOT_LOADED: "the NVIDIA kernel module is not loaded; `modprobe nvidia` loads it, "
        "and gpuschedd --simulate 4x24G works without",
        LIB_RM_MISMATCH: "the driver's packages were upgraded under the running kernel module "
        "(driver/library version mismatch); running jobs go on, new ones start after a reboot",
        NO_PERMISSION: "this user may not use the NVIDIA driver (see the modes of /dev/nvidia*)",
        UNINITIALIZED: "the NVIDIA driver could not be initialised",
    }
    return cures.get(failure.code, f"the NVIDIA driver cannot be opened: {failure.text}")
