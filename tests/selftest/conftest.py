"""A daemon over the stand-in drivers of NVML and CUDA, and the self-test typed against it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import daemon_over, driver, library
from tests.support.daemon import DaemonProcess
from tests.support.fake_nvml.driver import MIB, FakeDriver, build_cuda, uuid_of

__all__ = ["daemon_over", "driver", "library"]

NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *--query-gpu=*) cat {place}/gpus.csv;;
  -L) cat {place}/slices;;
  *) exit 2;;
esac
"""


@dataclass
class Answer:
    """What one run of the self-test said."""

    status: int
    value: dict[str, Any] = field(default_factory=dict)
    stderr: str = ""

    def result(self, check: str, gpu: int | None = None) -> tuple[str, str]:
        """The one result of a check, of the GPU given, with its reason."""
        (found,) = [
            row
            for row in self.value["checks"]
            if row["check"] == check and (gpu is None or row["gpu"] == gpu)
        ]
        return found["result"], found["reason"]

    def results(self, check: str) -> list[str]:
        """All results of a check."""
        return [row["result"] for row in self.value["checks"] if row["check"] == check]


#: As `gpuschedd ..`, and gives up sooner what does not come: a program, a sample, the daemon.
IMPATIENT = """
from gpusched_client import Client
from gpuschedd.selftest import jobs, rounds
jobs.START_S, rounds.SEEN_S, rounds.STRANGER_S = 3.0, 3.0, 3.0
Client.__init__.__kwdefaults__["reconnect_s"] = 0.5
from gpuschedd.cli import cli
cli(prog_name="gpuschedd")
"""


class Bench:
    """The host of the self-test: its stand-in drivers, its nvidia-smi, its daemon."""

    def __init__(self, driver: FakeDriver, place: Path) -> None:
        self.driver = driver
        self.place = place
        self.smi = place / "bin" / "nvidia-smi"
        self.smi.parent.mkdir(parents=True)
        self.smi.write_text(NVIDIA_SMI.format(place=place))
        self.smi.chmod(0o755)
        self.daemon: DaemonProcess | None = None

    def list_gpus(self, **changes: object) -> None:
        """Have nvidia-smi list what the driver has, `changes` by field of every GPU."""
        rows = []
        for index, gpu in self.driver.gpus.items():
            known = {
                "index": index,
                "uuid": gpu["uuid"],
                "name": gpu["name"],
                "total": int(str(gpu["total"])) // MIB,
                "accounting": "Enabled" if gpu.get("accounting") else "Disabled",
                "mig": "Enabled" if gpu.get("mig") == 1 else "[N/A]",
                "driver": self.driver.facts["driver"],
            } | changes
            rows.append(", ".join(map(str, known.values())))
        (self.place / "gpus.csv").write_text("\n".join(rows) + "\n")
        slices = [line.split()[3] for line in self.driver.lines if line.startswith("mig ")]
        (self.place / "slices").write_text("".join(f"  MIG 1g: (UUID: {u})\n" for u in slices))

    def cuda(self, *wrong: str) -> None:
        """What is wrong with CUDA from now on."""
        (self.driver.place / "cuda").write_text(" ".join(wrong))

    def selftest(self, *options: str, is_patient: bool = True) -> Answer:
        """Type it. Impatient where nothing will come of what it waits for."""
        assert self.daemon is not None
        words = ["gpuschedd"] if is_patient else [sys.executable, "-c", IMPATIENT]
        done = self.daemon.run(*words, "selftest", "--json", *options)
        value = json.loads(done.stdout) if done.stdout else {}
        return Answer(done.returncode, value, done.stderr)


@pytest.fixture(scope="session")
def cuda_library(library: Path) -> Path:
    """CUDA's, beside NVML's."""
    return build_cuda(library.parent)


@pytest.fixture
def bench(
    driver: FakeDriver,
    cuda_library: Path,
    daemon_over: Callable[..., DaemonProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Bench]:
    """Makes the host and starts its daemon: two GPUs that keep accounts, unless told otherwise."""
    assert cuda_library.exists()
    made = Bench(driver, tmp_path / "host")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PATH", str(made.smi.parent), prepend=":")
    driver.gpu(1, **{**driver.gpus[0], "uuid": uuid_of(1), "pci": "00000000:11:00.0"})
    driver.gpu(1, minor=1, accounting=1)
    driver.gpu(0, accounting=1)

    def start(*options: str, prepare: Callable[[Bench], None] | None = None) -> Bench:
        if prepare is not None:
            prepare(made)
        made.list_gpus()
        # A start of its own where the self-test reads its command line.
        made.daemon = daemon_over(driver, *options, wrapper=["env"] if options else ())
        return made

    return start
