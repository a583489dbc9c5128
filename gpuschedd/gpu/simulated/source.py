"""Simulated GPUs: cards whose memory is what live `gpusched-simjob` processes claim."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from gpusched_client import simulation as simclaims
from gpusched_client.errors import Invalid
from gpusched_client.terms import GpuUuid
from gpuschedd.core.hostspec import SIMULATED_GPUS_MAX, HostCard, parse_host
from gpuschedd.gpu.source import (
    DriverAccounts,
    GpuInfo,
    GpuProcess,
    GpuReading,
    Sample,
    SampleRequest,
)
from gpuschedd.system.clock import boottime_s
from gpuschedd.system.state_dir import Unusable, make_directory

log = logging.getLogger(__name__)

UUID_PREFIX = "GPU-51300000-"


def simulated_inventory(host: str) -> tuple[GpuInfo, ...]:
    """ "4x24G" or "2x80G+2x24G" as an inventory. Raises Invalid."""
    cards = parse_host(host, gpus_max=SIMULATED_GPUS_MAX)
    return tuple(_simulated(index, card) for index, card in enumerate(cards))


def _simulated(index: int, card: HostCard) -> GpuInfo:
    # No driver knows such a UUID: a program that looks for it finds no GPU, and no real one.
    return GpuInfo(
        uuid=GpuUuid(f"{UUID_PREFIX}0000-4000-8000-{index:012d}"),
        index=index,
        minor=index,
        model=f"Simulated {card.size}",
        total_bytes=card.total_bytes,
    )


class SimulatedGpus:
    """A GpuSource over a claims directory."""

    name = "simulated"
    is_simulated = True

    def __init__(self, host: str, claims_dir: Path, *, shared: bool) -> None:
        """`shared`: any local user's jobs claim here (system mode), so the directory is sticky."""
        self.inventory = simulated_inventory(host)
        self.claims_dir = claims_dir
        self._shared = shared
        self._make_claims_dir()
        self._beside = os.stat(self.claims_dir.parent)

    def _make_claims_dir(self) -> None:
        """Raises Unusable, Invalid or OSError."""
        if not self._shared:
            make_directory(self.claims_dir.parent, 0o700)
        try:
            self.claims_dir.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError as error:
            raise Unusable(f"{self.claims_dir} is not a directory; remove it") from error
        _require_ours(self.claims_dir)
        sizes: dict[str, int] = {gpu.uuid: gpu.total_bytes or 0 for gpu in self.inventory}
        simclaims.write_host(self.claims_dir, sizes)
        # Last: the name above is ours by then.
        os.chmod(self.claims_dir, 0o1777 if self._shared else 0o700)

    def _keep_claims_dir(self) -> None:
        """Make it again where it was removed; what cannot be made now is at the next sweep.

        Not in another directory that took the place of ours: nothing there belongs to us.
        """
        if self.claims_dir.exists():
            return
        with contextlib.suppress(Unusable, Invalid, OSError):
            if os.path.samestat(os.stat(self.claims_dir.parent), self._beside):
                self._make_claims_dir()
                log.warning("claims_made_again path=%s text=it was removed", self.claims_dir)

    async def sample(self, want: SampleRequest) -> Sample:
        """Read the claims, off the loop."""
        del want  # a simulated sweep is cheap: it always reads everything
        return await asyncio.to_thread(self.read)

    def read(self) -> Sample:
        """One sweep. Blocks for as long as listing a directory does."""
        self._keep_claims_dir()
        processes: dict[str, list[GpuProcess]] = {gpu.uuid: [] for gpu in self.inventory}
        for claim in simclaims.read_claims(self.claims_dir):
            for uuid, size in claim.gpus.items():
                if uuid in processes:
                    processes[uuid].append(GpuProcess(claim.pid, claim.start_ticks, size))
        return Sample(
            taken_boottime_s=boottime_s(),
            inventory=self.inventory,
            readings=tuple(_reading(gpu, processes[gpu.uuid]) for gpu in self.inventory),
        )

    async def accounts(self, pids: Mapping[GpuUuid, Iterable[int]]) -> DriverAccounts:
        """A claims directory remembers nobody."""
        del pids
        return {}

    async def release(self) -> None:
        """There is nothing to release."""

    async def close(self) -> None:
        """Nothing was started."""


def _require_ours(directory: Path) -> None:
    """Raises Invalid: beside it others may have made one of the same name."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise Invalid(
            f"{directory} belongs to uid {found.st_uid}, not to the daemon; remove it, "
            "and start it again"
        )


def _reading(gpu: GpuInfo, processes: list[GpuProcess]) -> GpuReading:
    used = sum(process.used_bytes or 0 for process in processes)
    total = gpu.total_bytes or 0
    return GpuReading(
        uuid=gpu.uuid,
        used_bytes=used,
        free_bytes=max(0, total - used),
        utilization=90.0 if processes else 0.0,
        processes=tuple(processes),
        listed_used_bytes=used,
    )
