"""What the host itself says (nvidia-smi, /proc), and the one process beside the scheduler.

The self-test's only owner of subprocesses.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpusched_client import paths
from gpusched_client.terms import Mode
from gpusched_client.wire.admin_messages import StatusResult

NVIDIA_SMI = "nvidia-smi"
SMI_DEADLINE_S = 30.0
SMI_FIELDS = "index,uuid,name,memory.total,accounting.mode,mig.mode.current,driver_version"
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
STRANGER_END_S = 5.0
#: Both the jobs and the stranger run it.
PROGRAM = (sys.executable, "-I", "-m", "gpuschedd.selftest.hold")


@dataclass(frozen=True, slots=True)
class ListedGpu:
    """One GPU as nvidia-smi lists it; None is not told."""

    index: int
    uuid: str
    name: str
    total_mib: int | None
    accounting: bool | None
    is_sliced: bool
    driver: str


@dataclass(frozen=True, slots=True)
class Listing:
    """nvidia-smi's GPUs and UUIDs of slices; `absent` and `trouble` say why there are none."""

    gpus: tuple[ListedGpu, ...] = ()
    slices: tuple[str, ...] = ()
    absent: str = ""
    trouble: str = ""

    def accounting(self, uuid: str) -> bool | None:
        """Whether the driver keeps accounts on this GPU; None: unknown."""
        return next((gpu.accounting for gpu in self.gpus if gpu.uuid == uuid), None)


class SmiFailed(Exception):
    """nvidia-smi is there and does not answer."""


def listing() -> Listing:
    """What nvidia-smi lists."""
    program = shutil.which(NVIDIA_SMI)
    if program is None:
        return Listing(absent="no nvidia-smi here")
    try:
        rows = _said([program, f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"])
        slices = re.findall(r"UUID: (MIG-[^)\s]+)", _said([program, "-L"]))
        return Listing(tuple(map(listed_gpu, rows.splitlines())), tuple(slices))
    except SmiFailed as error:
        return Listing(trouble=str(error))


def listed_gpu(row: str) -> ListedGpu:
    """One line of its answer. Raises SmiFailed."""
    cells = [cell.strip() for cell in row.split(", ")]
    if len(cells) < len(SMI_FIELDS.split(",")) or not cells[0].isdecimal():
        raise SmiFailed(f"{NVIDIA_SMI} answered {row!r}")
    # A name may hold a comma; nothing else can.
    index, uuid, *name, total, accounting, mig, driver = cells
    return ListedGpu(
        index=int(index),
        uuid=uuid,
        name=", ".join(name),
        total_mib=int(total) if total.isdecimal() else None,
        accounting={"Enabled": True, "Disabled": False}.get(accounting),
        is_sliced=mig == "Enabled",
        driver=driver,
    )


def _said(words: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SMI_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SmiFailed(f"{NVIDIA_SMI} did not answer in {SMI_DEADLINE_S:g} s") from error
    except OSError as error:
        raise SmiFailed(f"{NVIDIA_SMI}: {error.strerror}") from error
    if done.returncode != 0:
        words = (done.stdout + done.stderr).split()
        raise SmiFailed(f"{NVIDIA_SMI} ended with status {done.returncode}: {' '.join(words)}")
    return done.stdout


def driver_version(found: Listing) -> str | None:
    """Of NVIDIA's driver; None where there is none."""
    if found.gpus:
        return found.gpus[0].driver
    try:
        match = re.search(r"\d+\.\d+(?:\.\d+)*", DRIVER_VERSION.read_text(errors="replace"))
    except OSError:
        return None
    return match[0] if match else None


def why_some_are_left_out(status: StatusResult, proc: Path = Path("/proc")) -> str:
    """What tells the daemon to leave GPUs alone; empty: nothing that can be seen from here."""
    words = _parts(proc / str(status.pid) / "cmdline")
    if any(word == "--gpus" or word.startswith(("--gpus=", "gpus=")) for word in words):
        return "the daemon's command line"
    named = [words[place + 1] for place, word in enumerate(words[:-1]) if word == "--config"]
    config = Path(named[0] if named else paths.config_path(status.mode == Mode.SYSTEM))
    try:
        if tomllib.loads(config.read_text()).get("gpus"):
            return f"`gpus` in {config}"
    except (OSError, ValueError):
        pass
    environment = _parts(proc / str(status.pid) / "environ")
    if status.mode == Mode.USER and any(w.startswith("CUDA_VISIBLE_DEVICES=") for w in environment):
        return "CUDA_VISIBLE_DEVICES of the daemon"
    return ""


def _parts(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


class Stranger:
    """A process of this user's on a GPU that belongs to no job."""

    def __init__(self, options: Sequence[str], uuid: str, claims: str | None) -> None:
        own = {name: word for name, word in os.environ.items() if not name.startswith("GPUSCHED_")}
        more: Mapping[str, str] = {} if claims is None else {"GPUSCHED_SIM_DIR": claims}
        self._process = subprocess.Popen(
            [*PROGRAM, *options],
            env={**own, "CUDA_VISIBLE_DEVICES": uuid, **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            start_new_session=True,  # a Ctrl-C is ours to pass on
        )
        self.pid = self._process.pid

    def is_over(self) -> bool:
        """Whether it has ended by itself."""
        return self._process.poll() is not None

    def end(self) -> str:
        """End it and return what it said."""
        if not self.is_over():
            self._process.send_signal(signal.SIGUSR1)
        try:
            said, _ = self._process.communicate(timeout=STRANGER_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            said, _ = self._process.communicate()
        return said.decode(errors="replace")
