"""What the driver is asked, inside the child process: identity once, a sweep each time.

Every driver call goes through Library. Raw facts go out, as JSON-ready maps; what they mean for
placement is judged in the daemon. Must not import pynvml, nor decide whether a GPU is healthy.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from gpuschedd.gpu.nvidia import topology
from gpuschedd.gpu.nvidia.accounts import accounts_of
from gpuschedd.gpu.nvidia.checks import checks_of, modes_of
from gpuschedd.gpu.nvidia.device import GARBAGE, Device, MemoryReader, Restart
from gpuschedd.gpu.nvidia.events import Events
from gpuschedd.gpu.nvidia.identity import Identification
from gpuschedd.gpu.nvidia.library import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    LIB_RM_MISMATCH,
    LIBRARY_NOT_FOUND,
    NEW_CHILD_CODES,
    NO_PERMISSION,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    UNINITIALIZED,
    UNKNOWN,
    Failed,
    Library,
)
from gpuschedd.gpu.nvidia.processes import ProcessLists

SHUTDOWNS_MAX = 100  # an unbalanced init is undone so often
POWER_MW_MAX = 10_000_000
UTILIZATION_EVERY_S = 2.0
DRIVER_GPUS_MAX = 1_024  # on one host; a driver that counts more counts wrong


class Driver:
    """The opened driver. One method per request; `handle` chooses."""

    def __init__(self, library: Library) -> None:
        self._lib = library
        self._restart = Restart()
        self._memory = MemoryReader(library, self._restart)
        self._found = Identification(library, self._memory)
        self._events = Events(library, self._restart)
        self._processes = ProcessLists(library)
        self._recounted_s = 0.0
        self._recount_every_s = 0.0
        self._counted = 0
        self._skip_recounts: frozenset[int] = frozenset()
        self._skip_accounts: frozenset[int] = frozenset()
        self._count = 0  # of GPUs, by the driver, when it was opened

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request's reply."""
        calls, busy_s = self._lib.calls, self._lib.busy_s
        match request["op"]:
            case "open":
                reply = self.open(request)
            case "sweep":
                reply = self.sweep(request)
            case "accounts":
                kept = [d for d in self._found.devices if d.index not in self._skip_accounts]
                reply = accounts_of(self._lib, kept, request)
            case other:
                raise ValueError(f"unknown request {other}")
        self._lib.forget_page()
        reply["calls"] = self._lib.calls - calls
        reply["cost_s"] = self._lib.busy_s - busy_s
        return reply

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Initialise once and enumerate; `down` with a reason where that fails."""
        self._memory.proc = Path(request.get("proc", "/proc"))
        self._recount_every_s = request["recount_every_s"]
        self._lib.skip = frozenset(request.get("skip_calls", ()))
        parts = {name: frozenset(found) for name, found in request.get("skip_parts", {}).items()}
        unlinked = parts.get("topology", frozenset())
        self._skip_recounts = parts.get("recount", frozenset())
        self._skip_accounts = parts.get("accounts", frozenset())
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
        self._count = count
        self._found = Identification(self._lib, self._memory)
        inventory = []
        for index in range(count):
            if index not in request.get("skip_indices", ()):
                inventory += self._found.open_gpu(index, request, warnings)
        self._lib.gpu = -1
        self._counted = self._count_in_proc() or 0
        self._recounted_s = time.monotonic()
        self._events.open(self._found.devices, parts.get("events", frozenset()))
        linked = [d for d in self._found.devices if d.parent is None and d.index not in unlinked]
        topology.add_nearness(self._lib, linked, inventory)
        topology.add_links(self._lib, linked, inventory)
        if self._in_pid_namespace():
            warnings.append(
                "the daemon runs in a PID namespace: the driver's pids are the host's, so GPU "
                "memory cannot be attributed to jobs"
            )
        version = self._lib.ask("nvmlSystemGetDriverVersion")
        return {
            "driver": str(version),
            "count": max(count, self._counted),
            "inventory": inventory,
            "left_out": [
                {"index": index, **why}
                for index, why in (self._found.left_out | self._found.nameless).items()
            ],
            "warnings": warnings,
        }

    def shut_down(self) -> None:
        """Undo every init: one too many would make the next a no-op with the old list of GPUs."""
        self._events.forget()
        for _ in range(SHUTDOWNS_MAX):
            try:
                self._lib.call("nvmlShutdown")
            except Failed:
                return

    def sweep(self, request: dict[str, Any]) -> dict[str, Any]:
        """Every GPU once; what fails on one leaves the others alone."""
        now_s = time.monotonic()
        self._restart.reason = None
        busy, fresh = set(request.get("busy", ())), set(request.get("fresh", ()))
        skip, launch = set(request.get("skip", ())), set(request.get("launch", ()))
        fresh |= launch
        events = self._events.take()
        health = request.get("health", False) or bool(events)
        readings = []
        for device in self._found.devices:
            if device.uuid in skip:
                continue
            self._lib.gpu = device.index
            is_busy = device.uuid in busy
            reading = self._read(device, now_s, is_busy, device.uuid in fresh)
            if health and "fault" not in reading:
                reading["checks"] = checks_of(self._lib, device)
            if device.uuid in launch and "fault" not in reading:
                reading["modes"] = modes_of(self._lib, device)
            readings.append(reading)
        self._lib.gpu = -1
        codes = {reading.get("code") for reading in readings}
        if readings and codes == {UNKNOWN}:
            self._restart.ask("every GPU answers with an unknown error")
        parts = ["events", *(["recount"] if self._recount(now_s) else [])]
        reason = self._restart.reason
        return {"readings": readings, "events": events, "new_child": reason, "parts": parts}

    def _read(self, device: Device, now_s: float, busy: bool, fresh: bool) -> dict[str, Any]:
        """Memory, use, power, and the processes where that is due."""
        reading: dict[str, Any] = {"uuid": device.uuid}
        used: int | None = None
        free: int | None = None
        try:
            used, free = self._memory.used_and_free(device)
        except Failed as failure:
            self._note_failure(reading, failure)
            if reading["fault"] != "unsupported":
                return reading
        reading |= {"used": used, "free": free}
        if device.parent is None:
            self._read_use(device, reading, busy)
        if self._processes.is_due(device, used, now_s, busy, fresh):
            self._processes.read(device, reading, used, now_s)
        if busy and device.parent is None and now_s - device.utilization_s >= UTILIZATION_EVERY_S:
            device.utilization_s = now_s
            reading["process_utilization"] = self._processes.utilization(device)
        return reading

    def _note_failure(self, reading: dict[str, Any], failure: Failed) -> None:
        reading |= {"code": failure.code, "reason": f"the driver says: {failure.text}"}
        if failure.code in NEW_CHILD_CODES:
            self._restart.ask(failure.text)
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

    def _recount(self, now_s: float) -> bool:
        """A GPU that was plugged or drained: this process would go on seeing the old ones.

        Some drivers tell it, too; and one that could not be opened at the start may be well now.
        False: it was not due.
        """
        if now_s - self._recounted_s < self._recount_every_s:
            return False
        self._recounted_s = now_s
        count = self._count_in_proc()
        if count is not None and count != self._counted:
            self._restart.ask(f"the driver has {count} GPUs now; it had {self._counted}")
        with self._lib.part("recount"):
            skips = -1 in self._skip_recounts
            told = None if skips else self._lib.ask("nvmlDeviceGetCount")
        if told is not None and told != self._count:
            self._restart.ask(f"the driver counts {told} GPUs now; it counted {self._count}")
        for index in self._found.left_out.keys() - self._skip_recounts:
            if self._can_open(index):
                self._restart.ask(f"GPU {index} can be opened now")
        return True

    def _can_open(self, index: int) -> bool:
        with self._lib.part("recount", index):
            handle = self._lib.ask("nvmlDeviceGetHandleByIndex", index)
            return handle is not None and bool(self._lib.ask("nvmlDeviceGetUUID", handle))

    def _count_in_proc(self) -> int | None:
        try:
            return len(os.listdir(self._memory.proc / "driver/nvidia/gpus"))
        except OSError:
            return None

    def _in_pid_namespace(self) -> bool:
        """The first PID namespace has a fixed number; the driver knows no other."""
        try:
            return os.readlink("/proc/self/ns/pid") != "pid:[4026531836]"
        except OSError:
            return False


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
