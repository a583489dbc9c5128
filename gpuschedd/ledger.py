"""From what is seen on the GPUs to what may be placed on them.

Keeps the peaks of foreign processes until they exit and the peaks of our own jobs; turns a sample
into the core's Gpu facts. Asks nobody: attribution of a pid to a job is handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from gpusched_client.terms import GpuUuid, JobId
from gpusched_client.units import bytes_text
from gpuschedd.config import Sharing
from gpuschedd.core.model import Gpu, GpuState
from gpuschedd.gpus import GpuInfo, GpuProcess, GpuReading, Sample

JobOf = Callable[[GpuProcess], JobId | None]
DescribePid = Callable[[int], str]
ProcessKey = tuple[GpuUuid, int, int | None]


@dataclass(frozen=True, slots=True)
class Facts:
    """One sample's outcome."""

    gpus: tuple[Gpu, ...]
    used_by: Mapping[tuple[JobId, GpuUuid], int]  # bytes of our jobs now
    peaks: Mapping[tuple[JobId, GpuUuid], int]  # their highest so far


class Ledger:
    """The memory of what was seen. One instance lives as long as the daemon."""

    def __init__(self, sharing: Sharing, describe: DescribePid) -> None:
        self.sharing = sharing
        self._describe = describe
        self._foreign_peaks: dict[ProcessKey, int] = {}
        self._foreign_since_s: dict[GpuUuid, float] = {}
        self._own_peaks: dict[tuple[JobId, GpuUuid], int] = {}
        self._ended_boottime_s: dict[GpuUuid, float] = {}

    def job_ended(self, uuids: Iterable[GpuUuid], boottime_s: float) -> None:
        """Samples taken before boottime_s say nothing more about these GPUs."""
        for uuid in uuids:
            self._ended_boottime_s[uuid] = boottime_s

    def forget_job(self, job_id: JobId) -> None:
        """Its peaks are in the books."""
        for key in [key for key in self._own_peaks if key[0] == job_id]:
            del self._own_peaks[key]

    def take(
        self,
        sample: Sample,
        job_of: JobOf,
        drained: Mapping[GpuUuid, str],
        now_s: float,
    ) -> Facts:
        """The facts that this sample gives, with the peaks of earlier ones."""
        readings = {reading.uuid: reading for reading in sample.readings}
        used_by: dict[tuple[JobId, GpuUuid], int] = {}
        gpus = []
        seen_keys: set[ProcessKey] = set()
        for info in sample.inventory:
            reading = readings.get(info.uuid)
            gpu = _identity(info)
            if reading is not None:
                foreign = self._attribute(info, reading, job_of, used_by, seen_keys)
                gpu = self._with_use(gpu, reading, foreign, now_s)
            gpus.append(self._with_state(gpu, info, reading, drained, sample))
        for key in [key for key in self._foreign_peaks if key not in seen_keys]:
            del self._foreign_peaks[key]
        for own, size in used_by.items():
            self._own_peaks[own] = max(size, self._own_peaks.get(own, 0))
        return Facts(tuple(gpus), used_by, dict(self._own_peaks))

    def _attribute(
        self,
        info: GpuInfo,
        reading: GpuReading,
        job_of: JobOf,
        used_by: dict[tuple[JobId, GpuUuid], int],
        seen_keys: set[ProcessKey],
    ) -> list[tuple[GpuProcess, int]]:
        """Our jobs' bytes into used_by; the foreign processes with their peaks are returned."""
        foreign: list[tuple[GpuProcess, int]] = []
        for process in reading.processes or ():
            job_id = job_of(process)
            used = process.used_bytes or 0
            if job_id is not None:
                key = (job_id, info.uuid)
                used_by[key] = used_by.get(key, 0) + used
                continue
            process_key = (info.uuid, process.pid, process.start_ticks)
            seen_keys.add(process_key)
            peak = max(used, self._foreign_peaks.get(process_key, 0))
            self._foreign_peaks[process_key] = peak
            foreign.append((process, peak))
        return foreign

    def _with_use(
        self, gpu: Gpu, reading: GpuReading, foreign: list[tuple[GpuProcess, int]], now_s: float
    ) -> Gpu:
        """Foreign bytes: buffered peaks, and what no process owns."""
        if reading.used_bytes is None:
            return gpu
        listed = sum(process.used_bytes or 0 for process in reading.processes or ())
        ownerless = max(0, reading.used_bytes - listed) if reading.processes is not None else 0
        peaks = sum(math.ceil(peak * (1 + self.sharing.spike_buffer)) for _, peak in foreign)
        foreign_bytes = peaks + ownerless
        counted = sum(peak for process, peak in foreign if not process.graphics_only) + ownerless
        whole_idle = counted <= self.sharing.idle_threshold_bytes
        if foreign_bytes == 0:
            self._foreign_since_s.pop(gpu.uuid, None)
            return gpu
        since_s = self._foreign_since_s.setdefault(gpu.uuid, now_s)
        return replace(
            gpu,
            foreign_bytes=foreign_bytes,
            foreign_since_s=since_s,
            foreign_text=self._foreign_text(foreign, ownerless),
            whole_idle=whole_idle,
        )

    def _foreign_text(self, foreign: list[tuple[GpuProcess, int]], ownerless: int) -> str:
        """Who is in the way, the largest first."""
        parts = [
            f"{self._describe(process.pid)} with {bytes_text(peak)}"
            for process, peak in sorted(foreign, key=lambda item: -item[1])[:3]
        ]
        if len(foreign) > len(parts):
            parts.append(f"{len(foreign) - len(parts)} more processes")
        if ownerless:
            parts.append(f"{bytes_text(ownerless)} that no process owns")
        return ", ".join(parts)

    def _with_state(
        self,
        gpu: Gpu,
        info: GpuInfo,
        reading: GpuReading | None,
        drained: Mapping[GpuUuid, str],
        sample: Sample,
    ) -> Gpu:
        """An admin's drain wins; unknown is not free."""
        fresh = sample.taken_boottime_s >= self._ended_boottime_s.get(info.uuid, 0.0)
        gpu = replace(gpu, fresh=fresh)
        if info.uuid in drained:
            return replace(gpu, state=GpuState.DRAINED, state_text=drained[info.uuid])
        if info.blocked is not None:
            return replace(gpu, state=GpuState.UNREAD, state_text=info.blocked)
        if reading is None or info.total_bytes is None:
            return replace(gpu, state=GpuState.UNREAD, state_text="no reading in the last sweep")
        if reading.health != "ok":
            return replace(
                gpu, state=GpuState(reading.health), state_text=reading.reason or reading.health
            )
        if reading.used_bytes is None:
            text = reading.reason or "its memory cannot be read"
            return replace(gpu, state=GpuState.UNREAD, state_text=text)
        return gpu


def _identity(info: GpuInfo) -> Gpu:
    return Gpu(
        uuid=info.uuid,
        index=info.index,
        model=info.model,
        total_bytes=info.total_bytes or 0,
        reserved_bytes=info.reserved_bytes,
        minor=info.minor,
        shareable=info.shareable,
        island=info.island,
    )
