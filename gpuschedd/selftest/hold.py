"""The GPU program of the self-test: takes memory, says what it sees, holds it, frees it.

Runs as a job, and once beside the scheduler, as `python -I -m gpuschedd.selftest.hold`. Its first
line of output is its report, one JSON object. Needs the standard library and NVIDIA's driver alone;
on simulated GPUs it claims memory as `gpusched-simjob` does.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import re
import select
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpusched_client import simulation

CUDA_LIBRARY = "libcuda.so.1"
CUDA_OUT_OF_MEMORY, CUDA_STUB_LIBRARY = 2, 34
OUT_OF_MEMORY_WORDS = "CUDA error: out of memory"  # as a program of CUDA's ends
NODES_PLACE = Path("/dev")


class NoDriver(Exception):
    """There is no driver of CUDA's here."""


class OutOfMemory(Exception):
    """It does not fit on the card."""


class CudaFailed(Exception):
    """A call of CUDA's failed otherwise."""


class CudaMemory:
    """Memory on every GPU that CUDA shows this process, through the driver's library."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(CUDA_LIBRARY)
        except OSError as error:
            raise NoDriver(f"no CUDA driver: {error}") from error
        self._call("cuInit", 0)
        self._held: list[tuple[ctypes.c_void_p, ctypes.c_uint64]] = []

    def take(self, size: int) -> dict[str, Any]:
        """Allocate size bytes on each GPU; what CUDA says of them."""
        version, count = ctypes.c_int(), ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        self._call("cuDeviceGetCount", ctypes.byref(count))
        devices = [self._device(ordinal) for ordinal in range(count.value)]
        uuids = [self._uuid(device) for device in devices]
        for device in devices:
            context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
            self._call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
            self._held.append((context, pointer))
        return {"cuda": version.value, "uuids": uuids}

    def free(self) -> None:
        """Give all of it back."""
        for context, pointer in self._held:
            self._call("cuCtxSetCurrent", context)
            self._call("cuMemFree_v2", pointer)
            self._call("cuCtxDestroy_v2", context)

    def _device(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device

    def _uuid(self, device: ctypes.c_int) -> str:
        """Of a slice its own, from the second version of the call on."""
        found = (ctypes.c_ubyte * 16)()
        name = "cuDeviceGetUuid_v2"
        if not hasattr(self._library, name):
            name = "cuDeviceGetUuid"
        self._call(name, ctypes.byref(found), device)
        return str(uuid.UUID(bytes=bytes(found)))

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            code = getattr(self._library, name)(*arguments)
        except AttributeError as error:
            raise NoDriver(f"no CUDA driver: {CUDA_LIBRARY} has no {name}") from error
        if code == CUDA_OUT_OF_MEMORY:
            raise OutOfMemory
        if code == CUDA_STUB_LIBRARY:
            raise NoDriver(f"no CUDA driver: {CUDA_LIBRARY} is the toolkit's stub")
        if code:
            raise CudaFailed(f"{name} failed with error {code} of CUDA's")


class SimulatedMemory:
    """A claim on simulated GPUs."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids = uuids
        self._place = Path(os.environ[simulation.ENVIRONMENT_NAME])

    def take(self, size: int) -> dict[str, Any]:
        """Claim size bytes on each."""
        totals = simulation.read_totals(self._place)
        claims = list(simulation.read_claims(self._place))
        for gpu in self._uuids:
            if size + sum(claim.gpus.get(gpu, 0) for claim in claims) > totals.get(gpu, 2**62):
                raise OutOfMemory
        simulation.write_claim(self._place, dict.fromkeys(self._uuids, size))
        return {}

    def free(self) -> None:
        """The claim goes with this process; until then it is empty."""
        simulation.write_claim(self._place, {})


def nodes_opened(dev: Path = NODES_PLACE) -> dict[str, str]:
    """Each GPU's device node, and what came of opening it: "" or the name of the error."""
    found = {}
    for name in sorted(os.listdir(dev)):
        if not re.fullmatch(r"nvidia\d+", name):
            continue
        try:
            os.close(os.open(dev / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            found[name] = errno.errorcode.get(error.errno or 0, str(error.errno))
        else:
            found[name] = ""
    return found


def _woken_by(*numbers: signal.Signals) -> int:
    """A descriptor that can be read once one of these signals has come."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return reader


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpuschedd.selftest.hold", description=__doc__)
    parser.add_argument("--bytes", type=int, default=0, help="on each GPU; 0 leaves CUDA alone")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long; USR1 ends it")
    parser.add_argument("--simulated", action="store_true", help="claim on simulated GPUs")
    parser.add_argument("--uuids", help="the simulated GPUs, by commas; default: the job's")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 where the memory could not be had."""
    options = _options(words)
    wake = _woken_by(signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    granted = os.environ.get("GPUSCHED_GPU_UUIDS", "")
    report: dict[str, Any] = {
        "pid": os.getpid(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "granted": granted,
        "claims": os.environ.get(simulation.ENVIRONMENT_NAME),
        "allocated": options.bytes,
        "nodes": nodes_opened(),
    }
    memory: CudaMemory | SimulatedMemory | None = None
    status = 0
    try:
        if options.bytes and options.simulated:
            memory = SimulatedMemory((options.uuids or granted).split(","))
        elif options.bytes:
            memory = CudaMemory()
        if memory is not None:
            report |= memory.take(options.bytes)
    except NoDriver as error:
        report["no_driver"] = str(error)
    except OutOfMemory:
        report["error"], status = OUT_OF_MEMORY_WORDS, 1
    except CudaFailed as error:
        report["error"], status = str(error), 1
    print(json.dumps(report), flush=True)
    if status:
        print(report["error"], file=sys.stderr, flush=True)
    elif "no_driver" not in report:
        select.select([wake], [], [], options.seconds)
        if memory is not None:
            memory.free()
    return status


if __name__ == "__main__":
    sys.exit(main())
