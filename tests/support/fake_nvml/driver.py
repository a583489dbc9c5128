"""The stand-in driver from a test's side: builds the library, writes the state it shows.

A state file has one fact a line: `gpu INDEX KEY VALUE`, `proc GPU KIND PID BYTES [GI CI]` (bytes
-1: the driver gives none), `mig GPU SLOT UUID GI CI TOTAL NAME`, `account GPU PID MAX START_US
RUNNING UTIL TIME_MS`, `sample GPU PID AT_US SM`, `event NUMBER GPU TYPE DATA`, `p2p A B STATUS`,
`level A B LEVEL`, and what the calls suffer: `error FUNCTION GPU|* CODE [TIMES]`, `delay .. MS`,
`hang ..`, `crash ..`, `exit .. STATUS`, `grow .. 0 TIMES` (the list outgrows its size call); a call
about a pair suffers for either. `*` as FUNCTION is every call about that GPU. `hidden 1` lists no
process, though their memory is in use. Jobs claim memory through `claim.py`, as processes do on a
driver.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import subprocess
from pathlib import Path

from gpusched_client.terms import GpuUuid

SOURCE = Path(__file__).with_name("nvml.c")
CUDA_SOURCE = Path(__file__).with_name("cuda.c")
LIBRARY = "libnvidia-ml.so.1"
CUDA_LIBRARY = "libcuda.so.1"
MIB = 2**20
GIB = 2**30

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 3, 4, 6
DRIVER_NOT_LOADED, GPU_IS_LOST, LIB_RM_MISMATCH, UNKNOWN = 9, 15, 18, 999
XID, MIG_CHANGED = 0x8, 0x100


def build(directory: Path, *flags: str) -> Path:
    """Compile the library into directory; its path."""
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / LIBRARY
    command = ["gcc", "-shared", "-fPIC", "-O1", *flags, f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([*command, "-o", str(target), str(SOURCE), "-lpthread"], check=True)
    return target


def build_cuda(directory: Path, *flags: str) -> Path:
    """Compile CUDA's driver library into directory; its path."""
    target = directory / CUDA_LIBRARY
    command = ["gcc", "-shared", "-fPIC", "-O1", *flags, "-o", str(target), str(CUDA_SOURCE)]
    subprocess.run(command, check=True)
    return target


def uuid_of(index: int) -> GpuUuid:
    """A UUID whose last digits are the index."""
    return GpuUuid(f"GPU-fa1e0000-1111-4222-8333-{index:012d}")


class FakeDriver:
    """One directory with a state; every change is visible at the library's next call."""

    def __init__(self, place: Path, library: Path, gpus: int = 1, total: int = 48 * GIB) -> None:
        self.place = place
        self.library = library
        (place / "claims").mkdir(parents=True, exist_ok=True)
        os.chmod(place, 0o755)
        os.chmod(place / "claims", 0o1777)
        (place / "calls").write_bytes(bytes(8))
        self.facts: dict[str, str] = {"driver": "570.86.10"}
        self.gpus: dict[int, dict[str, object]] = {}
        self.lines: list[str] = []
        self._numbers = itertools.count(1)
        for index in range(gpus):
            self.gpus[index] = {
                "uuid": uuid_of(index),
                "name": "NVIDIA Fake 48G",
                "pci": f"00000000:{0x10 + index:02X}:00.0",
                "minor": index,
                "total": total,
                "power_mw": 100_000,
                "temperature": 40,
                "persistence": 1,
                "mig": -1,
                "cpus": "f",
            }
        self.write()

    # --- changing it --------------------------------------------------------------------------

    def gpu(self, index: int, **values: object) -> None:
        """Set values of one GPU."""
        self.gpus.setdefault(index, {}).update(values)
        self.write()

    def drop_gpu(self, index: int) -> None:
        """The GPU falls off the bus."""
        self.gpus.pop(index)
        self.write()

    def add(self, *lines: str) -> None:
        """Append facts."""
        self.lines += lines
        self.write()

    def remove(self, *beginnings: str) -> None:
        """Take facts back that begin so."""
        self.lines = [line for line in self.lines if not line.startswith(beginnings)]
        self.write()

    def set(self, **facts: object) -> None:
        """Facts about the driver as a whole: driver, init, wide_rows."""
        self.facts |= {name: str(value) for name, value in facts.items()}
        self.write()

    def process(self, gpu: int, pid: int, used: int, kind: str = "C", *instance: int) -> None:
        """A process on a GPU; used -1: the driver gives no figure."""
        self.remove(f"proc {gpu} {kind} {pid} ")
        self.add(" ".join(map(str, ("proc", gpu, kind, pid, used, *instance))))

    def event(self, gpu: int, kind: int, data: int = 0) -> None:
        """An event that waits for those who registered before."""
        self.add(f"event {next(self._numbers)} {gpu} {kind} {data}")

    def write(self) -> None:
        """Publish the state at once."""
        rows = [f"{name} {value}" for name, value in self.facts.items()]
        for index, values in self.gpus.items():
            for key, value in values.items():
                for one in value if isinstance(value, list) else [value]:
                    rows.append(f"gpu {index} {key} {one}")
        text = "\n".join([*rows, *self.lines]) + "\n"
        temporary = self.place / "state.tmp"
        temporary.write_bytes(text.encode("utf-8", "surrogateescape"))
        os.replace(temporary, self.place / "state")

    # --- looking at it ------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process find this driver."""
        return {"LD_LIBRARY_PATH": str(self.library.parent), "FAKE_NVML_DIR": str(self.place)}

    def calls(self) -> int:
        """Driver calls so far, over all processes."""
        with (self.place / "calls").open("rb") as file:
            page = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
            (count,) = struct.unpack("<Q", page[:8])
            page.close()
        return int(count)
