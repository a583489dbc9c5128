"""A GpuSource in a test's hands, and the ledger's judgement of what it shows."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpusched_client.terms import GpuUuid, JobId
from gpuschedd.config.keys import Nvml, Sharing
from gpuschedd.core.model import Gpu
from gpuschedd.gpu.attribution import ForeignProcess, JobKey
from gpuschedd.gpu.facts import GpuFacts
from gpuschedd.gpu.free_memory import FreeMemory
from gpuschedd.gpu.health import HealthBook
from gpuschedd.gpu.holdings import Holding
from gpuschedd.gpu.nvidia.health_rules import XidRules
from gpuschedd.gpu.service_state import GpuConditions
from gpuschedd.gpu.source import (
    DriverAccounts,
    GpuInfo,
    GpuProcess,
    GpuReading,
    GpuSource,
    Sample,
    SampleRequest,
)

MIB = 2**20
GIB = 2**30


class Source:
    """A source with its own event loop; leaves nothing running."""

    def __init__(self, source: GpuSource) -> None:
        self.source: Any = source
        self._runner = asyncio.Runner()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self.source.close())
        self._runner.close()

    def run(self, work: Any) -> Any:
        """Run a coroutine to its end."""
        return self._runner.run(work)

    def sample(self, want: SampleRequest | None = None, **wanted: Any) -> Sample:
        """One sweep; `wanted` are fields of SampleRequest."""
        found: Sample = self.run(self.source.sample(want or SampleRequest(**wanted)))
        return found

    def accounts(self, pids: Mapping[GpuUuid, Iterable[int]]) -> DriverAccounts:
        """What the driver kept."""
        found: DriverAccounts = self.run(self.source.accounts(pids))
        return found

    def info(self, index: int = 0) -> GpuInfo:
        """The identity of one GPU."""
        return next(gpu for gpu in self.sample().inventory if gpu.index == index)

    def reading(self, index: int = 0, **wanted: Any) -> GpuReading:
        """One GPU in a new sweep that lists processes."""
        inventory = {gpu.index: gpu.uuid for gpu in self.sample().inventory}
        uuid = inventory[index]
        sample = self.sample(fresh_uuids=frozenset({uuid}), **wanted)
        return next(reading for reading in sample.readings if reading.uuid == uuid)


class Judge:
    """The ledger over samples; `owners` says which pid is whose."""

    def __init__(self, sharing: Sharing | None = None, **names: Callable[..., Any]) -> None:
        self.owners: dict[int, JobKey] = {}
        self.strangers: dict[int, ForeignProcess] = {}
        self.health = HealthBook(XidRules(Nvml().quarantine_xids, Nvml().reboot_xids))
        self.ledger = FreeMemory(
            sharing or Sharing(),
            lambda process: self.owners.get(process.pid),
            self._stranger,
        )
        del names

    def _stranger(self, process: GpuProcess) -> ForeignProcess:
        default = ForeignProcess(process.pid, 1001, "bob", "python")
        return self.strangers.get(process.pid, default)

    def facts(
        self,
        sample: Sample,
        holdings: Mapping[GpuUuid, Sequence[Holding]] | None = None,
        **standing: Any,
    ) -> GpuFacts:
        """The facts of one sample, health included."""
        self.health.take(sample)
        sick = {}
        for info in sample.inventory:
            illness = self.health.illness(info.uuid)
            if illness is not None:
                sick[info.uuid] = illness.reason
        return self.ledger.take(
            sample, holdings or {}, GpuConditions(sick=sick, **standing), 1000.0
        )

    def gpu(self, sample: Sample, index: int = 0, **others: Any) -> Gpu:
        """One GPU's facts."""
        facts = self.facts(sample, **others)
        return next(gpu for gpu in facts.gpus if gpu.index == index)


def key(job_id: int, attempt: int = 1) -> JobKey:
    """An attempt."""
    return JobId(job_id), attempt


def held(job_id: int, size: int) -> Holding:
    """What a job holds on a GPU."""
    return Holding(key(job_id), size)


def headroom(gpu: Gpu, *held_bytes: int) -> int:
    """What a shared job could get beside these."""
    return gpu.capacity_bytes - gpu.foreign_bytes - sum(held_bytes)


def leaks(pid: int) -> tuple[int, int]:
    """Open descriptors and resident bytes of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return len(os.listdir(f"/proc/{pid}/fd")), int(resident.split()[1]) * 1024
