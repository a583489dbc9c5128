"""Declared against actual: what each job used of each GPU, and the verdict at its end.

Pure bookkeeping: samples in, figures out. A figure that nobody measured is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpusched_client.terms import GpuUuid, JobState
from gpuschedd.gpu.attribution import JobKey
from gpuschedd.gpu.source import DriverAccounts, GpuReading, ProcessPeak
from gpuschedd.store.records import GpuUse

STEP_S_MAX = 30.0  # a longer gap between two samples is not counted as observed
ACCOUNT_EARLY_S = 1.0  # the driver's clock against ours
AT_LEAST = "at-least"  # a peak's source: beside memory that no process owns
SAVE_BYTES = 64 * 2**20  # a peak that grew by so much is worth a row
SAVE_EVERY_S = 60.0
NEXT_FACTOR = 1.05  # what to declare next time, over the upper bound of the peak


@dataclass(slots=True)
class _Meter:
    """Sums of one attempt on one GPU."""

    before_bytes: int | None = None  # in use when it was placed
    alone: bool = True  # never with another job, nor foreign processes, on this GPU
    sampled: int | None = None
    charged: bool = False  # the peak has memory that no process owns
    hides: bool = False  # it may have used more than anybody could tell
    device_most: int | None = None
    used_s: float = 0.0
    busy_s: float = 0.0
    power_s: float = 0.0
    energy_j: float = 0.0
    observed_s: float = 0.0
    pids: set[int] = field(default_factory=set)
    earlier: GpuUse | None = None  # from before a restart
    saved: GpuUse | None = None
    saved_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One attempt on one GPU in one sample. `used_bytes` None: on the GPU, amount unknown."""

    used_bytes: int | None
    charged: bool
    pids: tuple[int, ...]
    jobs_on_gpu: int
    foreign_on_gpu: bool
    hides: bool = False  # memory of nobody came beside it: it may use more than anybody can tell


class UseMeter:
    """The meters of all attempts that hold GPUs."""

    def __init__(self) -> None:
        self._meters: dict[JobKey, dict[GpuUuid, _Meter]] = {}
        self._last_s: float | None = None

    def begin(self, key: JobKey, uuids: Iterable[GpuUuid], used: Mapping[GpuUuid, int]) -> None:
        """A job was placed; `used`: bytes in use on its GPUs just now."""
        meters = self._meters.setdefault(key, {})
        for uuid in uuids:
            meters.setdefault(uuid, _Meter(before_bytes=used.get(uuid)))

    def begin_anew(self, key: JobKey, reading: GpuReading) -> None:
        """A placed job, nothing of which is on that GPU yet: what is in use now is not its."""
        meter = self._meters.get(key, {}).get(reading.uuid)
        if meter is not None and meter.earlier is None and reading.used_bytes is not None:
            meter.before_bytes, meter.device_most = reading.used_bytes, None

    def resume(self, uses: Iterable[GpuUse]) -> None:
        """Figures from before a restart of the daemon."""
        for use in uses:
            meters = self._meters.setdefault((use.job_id, use.attempt), {})  # type: ignore[arg-type]
            hides = use.peak_source == AT_LEAST
            meters[use.gpu_uuid] = _Meter(earlier=use, alone=False, hides=hides)

    def step(self, taken_s: float) -> float:
        """Seconds that the sample at taken_s stands for."""
        last_s, self._last_s = self._last_s, taken_s
        if last_s is None or taken_s <= last_s:
            return 0.0
        return min(STEP_S_MAX, taken_s - last_s)

    def add(
        self,
        key: JobKey,
        reading: GpuReading,
        seen: Seen,
        step_s: float,
        *,
        listed: bool = True,
        whole: bool = False,
    ) -> None:
        """One attempt on one GPU in one sample. `whole`: what the GPU does is its doing."""
        meter = self._meters.setdefault(key, {}).setdefault(reading.uuid, _Meter())
        meter.observed_s += step_s
        meter.pids.update(seen.pids)
        if seen.jobs_on_gpu > 1 or seen.foreign_on_gpu:
            meter.alone = False
        if listed and seen.used_bytes and seen.used_bytes > (meter.sampled or 0):
            meter.sampled, meter.charged = seen.used_bytes, seen.charged
        if reading.used_bytes is not None:
            meter.device_most = max(meter.device_most or 0, reading.used_bytes)
        meter.hides = meter.hides or seen.hides
        percent = _utilization(reading, seen, whole=whole)
        if percent is not None:
            meter.used_s += step_s
            meter.busy_s += step_s * percent / 100
        sharers = 1 if whole else seen.jobs_on_gpu
        if reading.power_w is not None and sharers:
            meter.power_s += step_s
            meter.energy_j += step_s * reading.power_w / sharers

    def add_absent(self, key: JobKey, reading: GpuReading, step_s: float, *, whole: bool) -> None:
        """A job that runs, and none of whose processes is on its GPU: the waste that labs look for.

        Of a whole GPU it is what the GPU does and draws; of a shared one nothing.
        """
        if not whole and reading.processes is None:
            return  # nobody can say whether it is there
        meter = self._meters.setdefault(key, {}).setdefault(reading.uuid, _Meter())
        meter.observed_s += step_s
        percent = reading.utilization if whole else 0.0
        if percent is not None:
            meter.used_s += step_s
            meter.busy_s += step_s * percent / 100
        if whole and reading.power_w is not None:
            meter.power_s += step_s
            meter.energy_j += step_s * reading.power_w

    def pids(self, key: JobKey) -> dict[GpuUuid, set[int]]:
        """The pids that were seen on each GPU."""
        return {uuid: set(meter.pids) for uuid, meter in self._meters.get(key, {}).items()}

    def uses(
        self, key: JobKey, accounts: DriverAccounts | None = None, since_s: float | None = None
    ) -> tuple[GpuUse, ...]:
        """The figures so far. `since_s`: accounts of processes that began earlier are not its."""
        return tuple(
            _use(key, uuid, meter, _accepted((accounts or {}).get(uuid), since_s))
            for uuid, meter in self._meters.get(key, {}).items()
        )

    def all_uses(self) -> list[GpuUse]:
        """All that was observed so far, before the daemon ends."""
        return [
            _use(key, uuid, meter, [])
            for key, meters in self._meters.items()
            for uuid, meter in meters.items()
            if meter.observed_s > 0
        ]

    def to_save(self, now_s: float) -> list[GpuUse]:
        """Figures that should survive a crash: those that moved."""
        found = []
        for key, meters in self._meters.items():
            for uuid, meter in meters.items():
                use = _use(key, uuid, meter, [])
                saved = meter.saved
                grown = (use.peak_bytes or 0) - ((saved.peak_bytes or 0) if saved else 0)
                if grown < SAVE_BYTES and now_s - meter.saved_s < SAVE_EVERY_S:
                    continue
                if use != saved and (meter.observed_s > 0 or grown > 0):
                    meter.saved, meter.saved_s = use, now_s
                    found.append(use)
        return found

    def forget(self, key: JobKey) -> None:
        """Its figures are on record."""
        self._meters.pop(key, None)


def _utilization(reading: GpuReading, seen: Seen, *, whole: bool) -> float | None:
    """Of its processes where the driver tells them apart, of the device where it is alone."""
    known = reading.process_utilization
    own = [known[pid] for pid in seen.pids if pid in known]
    if whole and not own:
        return reading.utilization
    if seen.jobs_on_gpu == 1 and not seen.foreign_on_gpu:
        return reading.utilization
    return min(100.0, sum(own)) if own else None


def _accepted(rows: Mapping[int, ProcessPeak] | None, since_s: float | None) -> list[ProcessPeak]:
    """The driver's accounts that can be the job's: pids are used again."""
    if not rows:
        return []
    earliest_s = 0.0 if since_s is None else since_s - ACCOUNT_EARLY_S
    known = [row for row in rows.values() if row.peak_bytes is not None]
    return [row for row in known if row.started_at_s >= earliest_s]


def _use(key: JobKey, uuid: GpuUuid, meter: _Meter, accounts: list[ProcessPeak]) -> GpuUse:
    """Peak: the driver's where it keeps one, else sampled, else the device's difference."""
    peaks = [row.peak_bytes for row in accounts if row.peak_bytes is not None]
    earlier = meter.earlier
    sampled = _largest(meter.sampled, earlier.peak_bytes if earlier else None)
    source, peak = ("sampled", sampled) if sampled is not None else ("none", None)
    if source == "sampled" and meter.charged:
        source = "device"
    if peaks:
        source, peak = "driver", max(max(peaks), sampled or 0)
    elif peak is None and meter.alone and meter.before_bytes is not None:
        grown = (meter.device_most or 0) - meter.before_bytes
        source, peak = ("device", grown) if grown > 0 else ("none", None)
    elif earlier is not None and sampled == earlier.peak_bytes and sampled is not None:
        source = earlier.peak_source
    upper = None if peak is None else max(peak, sum(peaks))
    if meter.hides and peak is not None:
        source = AT_LEAST
    return GpuUse(
        job_id=key[0],
        attempt=key[1],
        gpu_uuid=uuid,
        peak_bytes=peak,
        peak_upper_bytes=_largest(upper, earlier.peak_upper_bytes if earlier else None),
        peak_source=source,
        utilization=_average(meter, accounts),
        energy_j=_energy(meter),
        observed_s=meter.observed_s + (earlier.observed_s if earlier else 0.0),
    )


def _average(meter: _Meter, accounts: list[ProcessPeak]) -> float | None:
    earlier = meter.earlier
    busy_s, used_s = meter.busy_s, meter.used_s
    if earlier is not None and earlier.utilization is not None:
        busy_s += earlier.observed_s * earlier.utilization / 100
        used_s += earlier.observed_s
    if used_s > 0:
        return round(100 * busy_s / used_s, 1)
    known = [row.utilization for row in accounts if row.utilization is not None]
    return known[0] if len(known) == 1 else None


def _energy(meter: _Meter) -> float | None:
    before_j = meter.earlier.energy_j if meter.earlier else None
    if meter.power_s <= 0:
        return before_j
    return round(meter.energy_j + (before_j or 0.0), 1)


def _largest(*values: int | None) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


# --- verdict ------------------------------------------------------------------------------------


def verdict(
    declared_bytes: int | None,
    peak_bytes: int | None,
    state: JobState,
    tolerance: float,
    *,
    is_at_least: bool = False,
) -> str | None:
    """ "within", "under-declared", "over-declared", "unattributed"; None: nothing to judge.

    A job that failed or was ended early need not have reached its peak: only too much counts then.
    So it is where the peak is but a lower bound (`is_at_least`).
    """
    if declared_bytes is None:
        return None
    ran_through = state in (JobState.COMPLETED, JobState.TIMEOUT)
    if peak_bytes is None:
        return "unattributed" if ran_through else None
    if peak_bytes > declared_bytes * (1 + tolerance):
        return "under-declared"
    if not ran_through or is_at_least:
        return None
    return "over-declared" if peak_bytes < declared_bytes * (1 - tolerance) else "within"


def next_vram_bytes(uses: Iterable[GpuUse]) -> int | None:
    """What to declare next time; None where nobody knows."""
    uses = tuple(uses)
    if any(use.peak_source == AT_LEAST for use in uses):
        return None
    upper = _largest(*(use.peak_upper_bytes for use in uses))
    return None if upper is None else int(upper * NEXT_FACTOR)
