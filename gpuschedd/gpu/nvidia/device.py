"""One GPU or slice as the driver hands it out, and how much memory it has and uses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpusched_client.units import MIB
from gpuschedd.gpu.nvidia.library import (
    ARGUMENT_VERSION_MISMATCH,
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    Failed,
    Library,
)

MEMORY_BYTES_MAX = 2**50
RESERVED_BYTES_MAX = 1024 * MIB  # more in use on an idle GPU cannot be an old driver's reserve
GARBAGE = -1  # not one of the driver's codes: it answers, and the answer makes no sense
COMPUTE_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetComputeRunningProcesses_v2",
)
#: The driver has no version 2 of what is asked, in the words of different releases.
_NO_SUCH_FORM = (
    FUNCTION_NOT_FOUND,
    NOT_SUPPORTED,
    ARGUMENT_VERSION_MISMATCH,
    INVALID_ARGUMENT,
)


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
    has_hosts_memory: bool = False  # and the driver has no figure of it
    gi: int | None = None
    v1_memory: bool = False
    listed_s: float = 0.0
    listed_used: int | None = None
    has_graphics: bool = True
    graphics_s: float = 0.0
    ownerless: int = 0  # bytes in use of no process, when graphics were listed
    has_server: bool = False
    utilization_since_us: int = 0
    utilization_s: float = 0.0
    listed_pids: frozenset[int] = field(default_factory=frozenset)


class Restart:
    """Whether a new child process should open the driver again, and why: the last word counts."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def ask(self, reason: str) -> None:
        """This process cannot go on seeing the truth."""
        self.reason = reason


class MemoryReader:
    """Total, reserve, use: what each form of the driver's answer means."""

    def __init__(self, library: Library, restart: Restart) -> None:
        self._lib = library
        self._restart = restart
        self.proc = Path("/proc")

    def measure(self, device: Device, model: str, integrated: Iterable[str]) -> None:
        """Total and reserve. Parts that share the host's memory have the host's figures.

        On some set-ups the driver has a figure for these, too: what the host uses is in that.
        """
        device.integrated = any(word.casefold() in model.casefold() for word in integrated)
        try:
            memory = self._memory(device)
        except Failed as failure:
            is_told = failure.code not in (NOT_SUPPORTED, FUNCTION_NOT_FOUND)
            device.has_hosts_memory = device.integrated and not is_told
            if device.has_hosts_memory:
                device.total = self._host_memory()[0]
            return
        device.total, device.reserved = memory.total, getattr(memory, "reserved", 0)
        if device.v1_memory:
            self._find_reserve(device, memory.used)

    def _find_reserve(self, device: Device, used: int) -> None:
        """An old driver counts its reserve as used: on an idle GPU that is what is in use."""
        try:
            rows = self._lib.newest(COMPUTE_LISTS, device.handle)
        except Failed:
            return
        if not rows and used <= RESERVED_BYTES_MAX:
            device.reserved = used

    def used_and_free(self, device: Device) -> tuple[int, int]:
        """Bytes in use without the reserve, and free. Raises Failed."""
        if device.has_hosts_memory:
            total, available = self._host_memory()
            return total - available, available
        memory = self._memory(device)
        if device.total is None:
            self._restart.ask("a GPU tells its memory that did not at the start")
        used = memory.used - device.reserved if device.v1_memory else memory.used
        return max(0, used), memory.free

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
        for line in (self.proc / "meminfo").read_text().splitlines():
            key, _, rest = line.partition(":")
            if key in ("MemTotal", "MemAvailable"):
                values[key] = int(rest.split()[0]) * 1024
        return values["MemTotal"], values["MemAvailable"]


def minor_of(library: Library, proc: Path, device: Device) -> int | None:
    """N of /dev/nvidiaN: the kernel module tells it too, where the library does not."""
    told = library.ask("nvmlDeviceGetMinorNumber", device.handle)
    if told is not None:
        return int(told)
    bus_id = (text_of(getattr(device.pci, "busId", None)) or "").lower()
    for name in (bus_id, bus_id[4:]):  # the library writes four digits more
        try:
            text = (proc / "driver/nvidia/gpus" / name / "information").read_text()
        except OSError:
            continue
        found = re.search(r"^Device Minor:\s*(\d+)$", text, re.MULTILINE)
        return int(found[1]) if found else None
    return None


def text_of(value: Any) -> str | None:
    """A text of the driver's, which is bytes in some versions of its binding."""
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value
