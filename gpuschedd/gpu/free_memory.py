"""From what is seen on the GPUs to what may be placed on them.

Per GPU the larger of promised and seen counts: foreign processes at their buffered peak until they
exit, memory that no process owns, jobs at what they hold. Turns a sample into the core's Gpu facts.
Reads nothing: who a process belongs to and what it is called is handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpusched_client.terms import GpuUuid, JobId
from gpusched_client.units import MIB
from gpuschedd.config.keys import Sharing
from gpuschedd.config.values import ProcessRule
from gpuschedd.core.model import Gpu
from gpuschedd.gpu.attribution import ForeignProcess, JobKey
from gpuschedd.gpu.metering import Seen
from gpuschedd.gpu.service_state import GpuConditions, identity_of, with_state
from gpuschedd.gpu.source import GpuInfo, GpuProcess, GpuReading, Sample
from gpuschedd.jobs.state import State
from gpuschedd.system.clock import boottime_s

STEP_BYTES = 16 * MIB  # ownerless memory wobbles: counted in such steps, rounded up
RELEASE_LAG_S = 30.0  # ownerless memory is the last job's for so long after its end
FOREIGN_NAMED_MAX = 3
DISPLAY_COMMANDS = frozenset({"Xorg", "X", "Xwayland", "gnome-shell", "kwin_x11", "kwin_wayland"})
DISPLAY_USERS = frozenset({"root", "gdm", "sddm", "lightdm"})

OwnerOf = Callable[[GpuProcess], JobKey | None]
DescribeForeign = Callable[[GpuProcess], ForeignProcess]
ProcessKey = tuple[GpuUuid, int, int | None]


@dataclass(frozen=True, slots=True)
class Holding:
    """What one attempt holds on one GPU."""

    key: JobKey
    held_bytes: int


Holdings = Mapping[GpuUuid, Sequence[Holding]]


def holdings_of(state: State) -> dict[GpuUuid, list[Holding]]:
    """What our jobs hold on each GPU, as of the last commit."""
    found: dict[GpuUuid, list[Holding]] = {}
    for job_id in state.holding:
        job = state.jobs[job_id]
        for grant in job.grants:
            holding = Holding((job_id, job.attempt), grant.held_bytes)
            found.setdefault(grant.uuid, []).append(holding)
    return found


@dataclass(frozen=True, slots=True)
class Violation:
    """A job's process on a GPU that was not granted to the job."""

    key: JobKey
    pid: int
    uuid: GpuUuid


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One sample's outcome."""

    gpus: tuple[Gpu, ...]
    seen: Mapping[tuple[JobKey, GpuUuid], Seen] = field(default_factory=dict)
    peaks: Mapping[tuple[JobKey, GpuUuid], int] = field(default_factory=dict)
    violations: tuple[Violation, ...] = ()
    leftovers: tuple[Violation, ...] = ()  # of attempts that are over
    listed: frozenset[GpuUuid] = frozenset()  # whose processes this sample tells


@dataclass(slots=True)
class _Foreign:
    """A process that is not at home on this GPU."""

    process: GpuProcess
    who: ForeignProcess
    peak: int
    note: str | None = None  # instead of its name: a job's process out of place
    is_quiet: bool = False  # does not break idleness

    def key(self, uuid: GpuUuid) -> ProcessKey:
        """The process on this GPU."""
        return uuid, self.process.pid, self.process.start_ticks

    @property
    def has_name(self) -> bool:
        """A process that a line of the configuration could mean."""
        return not self.is_quiet and self.note is None and self.who.uid is not None


@dataclass(slots=True)
class _Count:
    """One GPU in the making."""

    own: dict[JobKey, list[GpuProcess]] = field(default_factory=dict)
    foreign: list[_Foreign] = field(default_factory=list)
    ownerless: int = 0
    charged: int = 0  # of it: to the only job


class FreeMemory:
    """The memory of what was seen. One instance lives as long as the daemon."""

    def __init__(self, sharing: Sharing, owner_of: OwnerOf, describe: DescribeForeign) -> None:
        self.sharing = sharing
        self._owner_of = owner_of
        self._describe = describe
        self._foreign_peaks: dict[ProcessKey, int] = {}
        self._foreign_since_s: dict[GpuUuid, float] = {}
        self._own_peaks: dict[tuple[JobKey, GpuUuid], int] = {}
        self._ended: dict[GpuUuid, tuple[float, JobId]] = {}  # boot time, last job
        self._last: dict[GpuUuid, Gpu] = {}  # use and foreign use by the last sample that counts
        self._release_ends_s: dict[GpuUuid, float] = {}
        self._held_up: set[GpuUuid] = set()  # foreign use was there before the last job ended
        self._empty_ownerless: dict[GpuUuid, int] = {}  # while no job was there

    def job_ended(self, key: JobKey, uuids: Iterable[GpuUuid], at_s: float) -> None:
        """Samples taken before at_s (boot time) say nothing more about these GPUs."""
        for uuid in uuids:
            self._ended[uuid] = (at_s, key[0])
            self._release_ends_s.pop(uuid, None)
            if uuid in self._foreign_since_s:
                self._held_up.add(uuid)
            self._own_peaks.pop((key, uuid), None)

    def stale_since(self, sample_s: float) -> frozenset[GpuUuid]:
        """GPUs on which a job has ended since a sample was taken."""
        return frozenset(uuid for uuid, (at_s, _) in self._ended.items() if at_s > sample_s)

    def take(
        self, sample: Sample, holdings: Holdings, conditions: GpuConditions, now_s: float
    ) -> GpuFacts:
        """The facts that this sample gives, with the peaks of earlier ones."""
        readings = {reading.uuid: reading for reading in sample.readings}
        live = {holding.key for held in holdings.values() for holding in held}
        gpus, seen_keys = [], set()
        seen: dict[tuple[JobKey, GpuUuid], Seen] = {}
        out_of_place: list[Violation] = []
        left: list[Violation] = []
        listed: set[GpuUuid] = set()
        for info in sample.inventory:
            reading = readings.get(info.uuid)
            gpu = identity_of(info, reading)
            held = holdings.get(info.uuid, ())
            before = self._last.get(info.uuid)
            if before is not None and self._is_outdated(info.uuid, sample):
                # Its processes may be those of the job that has ended: what was known before stays.
                gpu = replace(before, index=gpu.index)
            elif reading is not None and reading.fault in (None, "unsupported"):
                count = self._count(info, reading, held, live)
                seen_keys |= {foreign.key(info.uuid) for foreign in count.foreign}
                self._see(info, reading, count, held, seen)
                if reading.processes is not None:
                    listed.add(info.uuid)
                    self._find_strays(info.uuid, count, live, out_of_place, left)
                if reading.fault is None:
                    gpu = self._with_use(gpu, info, reading, count, held, now_s)
                    self._last[info.uuid] = gpu
                else:
                    gpu = self._without_memory(gpu, info, reading, count)
            gpu = replace(gpu, fresh=not self._is_outdated(info.uuid, sample))
            gpus.append(with_state(gpu, info, reading, conditions))
        self._forget_foreign(seen_keys, listed)
        for own, entry in seen.items():
            self._own_peaks[own] = max(entry.used_bytes or 0, self._own_peaks.get(own, 0))
        return GpuFacts(
            gpus=tuple(gpus),
            seen=seen,
            peaks=dict(self._own_peaks),
            violations=tuple(out_of_place),
            leftovers=tuple(left),
            listed=frozenset(listed),
        )

    def _is_outdated(self, uuid: GpuUuid, sample: Sample) -> bool:
        """A job has ended on the GPU since the sample was taken."""
        ended_s, _ = self._ended.get(uuid, (0.0, None))
        return sample.taken_boottime_s < ended_s

    def _forget_foreign(self, seen: set[ProcessKey], listed: set[GpuUuid]) -> None:
        """A foreign peak lasts until its process has left its GPU's list."""
        gone = [key for key in self._foreign_peaks if key not in seen and key[0] in listed]
        for key in gone:
            del self._foreign_peaks[key]

    # --- who is on it -------------------------------------------------------------------------

    def _count(
        self, info: GpuInfo, reading: GpuReading, held: Sequence[Holding], live: set[JobKey]
    ) -> _Count:
        """The processes by whom they belong to, and the memory of nobody."""
        count = _Count()
        at_home = {holding.key for holding in held}
        for process in reading.processes or ():
            key = self._owner_of(process)
            if key in at_home:
                assert key is not None
                count.own.setdefault(key, []).append(process)
            else:
                count.foreign.append(self._foreign(info, process, key, live))
        count.ownerless = self._ownerless(info, reading)
        self._charge(info, count, at_home)
        return count

    def _foreign(
        self, info: GpuInfo, process: GpuProcess, key: JobKey | None, live: set[JobKey]
    ) -> _Foreign:
        process_key = (info.uuid, process.pid, process.start_ticks)
        peak = max(process.used_bytes or 0, self._foreign_peaks.get(process_key, 0))
        self._foreign_peaks[process_key] = peak
        who = self._describe(process)
        note = None
        if key is not None:
            of_job = f"pid {process.pid} of job {key[0]}"
            note = f"{of_job}, not granted to it" if key in live else f"{of_job}, left behind"
        return _Foreign(process, who, peak, note, self._is_quiet(process, who, peak))

    def _is_quiet(self, process: GpuProcess, who: ForeignProcess, peak: int) -> bool:
        """Displays, the MPS server, and what the configuration names: idle in spite of them."""
        if process.infrastructure:
            return True
        is_display = who.command in DISPLAY_COMMANDS or who.user in DISPLAY_USERS
        if process.graphics_only and is_display:
            return True
        return any(is_ignored(rule, who, peak) for rule in self.sharing.ignore_processes)

    @staticmethod
    def _ownerless(info: GpuInfo, reading: GpuReading) -> int:
        """Managed memory, leaks, dead processes; on coherent memory also the page cache: not it."""
        if reading.processes is None or reading.listed_used_bytes is None or info.coherent:
            return 0
        listed = sum(process.used_bytes or 0 for process in reading.processes)
        return max(0, reading.listed_used_bytes - listed)

    def _charge(self, info: GpuInfo, count: _Count, at_home: set[JobKey]) -> None:
        """Ownerless memory that came with the only job is that job's."""
        if not at_home:
            self._empty_ownerless[info.uuid] = count.ownerless
            return
        # What an earlier job left behind may have gone since.
        before = min(count.ownerless, self._empty_ownerless.get(info.uuid, count.ownerless))
        self._empty_ownerless[info.uuid] = before
        if len(at_home) == 1 and len(count.own) == 1 and not count.foreign:
            count.charged = max(0, count.ownerless - before)
            count.ownerless -= count.charged

    def _see(
        self,
        info: GpuInfo,
        reading: GpuReading,
        count: _Count,
        held: Sequence[Holding],
        seen: dict[tuple[JobKey, GpuUuid], Seen],
    ) -> None:
        """What each of our jobs uses here; the only one is here also where nobody can be listed."""
        if reading.processes is None and len(held) == 1:
            remembered = any(uuid == info.uuid for uuid, _, _ in self._foreign_peaks)
            seen[held[0].key, info.uuid] = Seen(None, False, (), 1, remembered)
        noisy = any(not foreign.is_quiet for foreign in count.foreign)
        for key, processes in count.own.items():
            sizes = [process.used_bytes for process in processes if process.used_bytes is not None]
            used = sum(sizes) + count.charged if len(sizes) == len(processes) else None
            if used is None and count.charged:
                used = sum(sizes) + count.charged  # by difference: nobody else is here
            pids = tuple(process.pid for process in processes)
            seen[key, info.uuid] = Seen(used, count.charged > 0, pids, len(count.own), noisy)

    def _find_strays(
        self,
        uuid: GpuUuid,
        count: _Count,
        live: set[JobKey],
        out_of_place: list[Violation],
        left: list[Violation],
    ) -> None:
        for foreign in count.foreign:
            key = self._owner_of(foreign.process)
            if key is not None:
                stray = Violation(key, foreign.process.pid, uuid)
                (out_of_place if key in live else left).append(stray)

    # --- how much is left ---------------------------------------------------------------------

    def _with_use(
        self,
        gpu: Gpu,
        info: GpuInfo,
        reading: GpuReading,
        count: _Count,
        held: Sequence[Holding],
        now_s: float,
    ) -> Gpu:
        """Foreign bytes: buffered peaks, what nobody owns, and what nobody has explained yet."""
        if reading.used_bytes is None:
            return gpu
        buffer = 1 + self.sharing.spike_buffer
        peaks = sum(math.ceil(foreign.peak * buffer) for foreign in count.foreign)
        if reading.processes is None:
            peaks = self._remembered(info.uuid, reading.used_bytes, buffer)
        known = peaks + _in_steps(count.ownerless)
        unexplained = 0
        if not info.coherent:
            explained = self._explained(reading, held, count)
            unexplained = _in_steps(reading.used_bytes - explained - known)
        foreign_bytes = known + unexplained
        loud = sum(foreign.peak for foreign in count.foreign if not foreign.is_quiet)
        loud += count.ownerless + unexplained
        threshold = self.sharing.idle_threshold_bytes
        return replace(
            gpu,
            foreign_bytes=foreign_bytes,
            foreign_since_s=self._since_s(gpu.uuid, foreign_bytes > threshold, now_s),
            foreign_text=self._foreign_text(info.uuid, count, unexplained),
            whole_idle=loud == 0 or loud < threshold,
            leaves_by_s=self._leaves_by_s(info.uuid, count, foreign_bytes, now_s),
        )

    def _remembered(self, uuid: GpuUuid, used: int, buffer: float) -> int:
        """Foreign peaks while no list tells who is still there: no more than is in use."""
        peaks = [peak for key, peak in self._foreign_peaks.items() if key[0] == uuid]
        return min(_in_steps(used), sum(math.ceil(peak * buffer) for peak in peaks))

    def _leaves_by_s(
        self, uuid: GpuUuid, count: _Count, foreign_bytes: int, now_s: float
    ) -> float | None:
        """When memory that an ended job leaves behind should be gone; None: it is not only that."""
        end_s = self._release_end_s(uuid, now_s)
        return end_s if foreign_bytes and not count.foreign and end_s > now_s else None

    def _release_end_s(self, uuid: GpuUuid, now_s: float) -> float:
        """Until when ownerless memory is the last job's, in scheduler time; the same each time."""
        if uuid in self._held_up:
            return now_s
        return self._release_ends_s.setdefault(uuid, now_s + max(0.0, self._release_lag_s(uuid)))

    def _release_lag_s(self, uuid: GpuUuid) -> float:
        """How long ownerless memory still counts as that of the GPU's last job."""
        at_s, _ = self._ended.get(uuid, (-math.inf, None))
        return at_s + RELEASE_LAG_S - boottime_s()

    def _since_s(self, uuid: GpuUuid, is_foreign: bool, now_s: float) -> float | None:
        """Since when it is foreign use: what an ended job leaves behind is none at first."""
        if not is_foreign:
            self._foreign_since_s.pop(uuid, None)
            self._held_up.discard(uuid)
            return None
        return self._foreign_since_s.setdefault(uuid, max(now_s, self._release_end_s(uuid, now_s)))

    def _explained(self, reading: GpuReading, held: Sequence[Holding], count: _Count) -> int:
        """How much of what is in use our jobs stand for: no more than they hold together.

        What was allocated since the processes were listed may be theirs as far as they hold more.
        """
        most = sum(holding.held_bytes for holding in held)
        if reading.processes is None:
            return most
        listed = sum(self._explained_by(holding, count) for holding in held)
        since = 0
        if reading.used_bytes is not None and reading.listed_used_bytes is not None:
            since = max(0, reading.used_bytes - reading.listed_used_bytes)
        return min(most, listed + since)

    @staticmethod
    def _explained_by(holding: Holding, count: _Count) -> int:
        processes = count.own.get(holding.key, [])
        sizes = [process.used_bytes for process in processes]
        if None in sizes:
            return holding.held_bytes  # it is there, and nobody can say with how much
        used = sum(size for size in sizes if size is not None)
        return min(holding.held_bytes, used + (count.charged if processes else 0))

    def _without_memory(
        self,
        gpu: Gpu,
        info: GpuInfo,
        reading: GpuReading,
        count: _Count,
    ) -> Gpu:
        """No figure, for good: whole jobs only, and those only beside nobody else."""
        idle = reading.processes is not None and all(foreign.is_quiet for foreign in count.foreign)
        text = "its memory cannot be read, so it is given whole only"
        if not idle:
            names = self._foreign_text(info.uuid, count, 0)
            text = names or "its processes cannot be listed"
        return replace(
            gpu,
            foreign_bytes=gpu.capacity_bytes,
            foreign_since_s=None,
            foreign_text=text,
            whole_idle=idle,
        )

    def _foreign_text(self, uuid: GpuUuid, count: _Count, unexplained: int) -> str:
        """Who is in the way, the largest first, and the line that would allow it."""
        ranked = sorted(count.foreign, key=lambda foreign: -foreign.peak)
        parts = [
            f"{_name(foreign)} with {_size(foreign)}" for foreign in ranked[:FOREIGN_NAMED_MAX]
        ]
        if len(ranked) > FOREIGN_NAMED_MAX:
            parts.append(f"{len(ranked) - FOREIGN_NAMED_MAX} more processes")
        ownerless = count.ownerless + unexplained
        if ownerless >= MIB:
            parts.append(f"{_mib(ownerless)} {self._ownerless_words(uuid)}")
        text = ", ".join(parts)
        loud = [foreign for foreign in ranked if foreign.has_name]
        if loud:
            rule = f"name={loud[0].who.command},uid={loud[0].who.uid}"
            text += f'; sharing.ignore_processes = ["{rule}"] would let whole jobs beside it'
        return text

    def _ownerless_words(self, uuid: GpuUuid) -> str:
        at_s, job_id = self._ended.get(uuid, (None, None))
        if at_s is None:
            return "that no process owns"
        if self._release_lag_s(uuid) > 0 and uuid not in self._held_up:
            return f"that job {job_id} leaves behind"
        return f"that no process owns (job {job_id} was the last here)"


def _in_steps(size: int) -> int:
    return max(0, math.ceil(size / STEP_BYTES) * STEP_BYTES)


def _mib(size: int) -> str:
    return f"{math.ceil(size / MIB)} MiB"


def _name(foreign: _Foreign) -> str:
    return foreign.note or foreign.who.text


def _size(foreign: _Foreign) -> str:
    if foreign.process.used_bytes is None and foreign.peak == 0:
        return "an unknown amount"
    return _mib(foreign.peak)


def is_ignored(rule: ProcessRule, who: ForeignProcess, peak: int) -> bool:
    """Whether the configuration means this process."""
    return (
        (rule.name is None or rule.name == who.command)
        and (rule.uid is None or rule.uid == who.uid)
        and (rule.below_bytes is None or peak < rule.below_bytes)
    )
