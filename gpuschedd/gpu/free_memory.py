"""From what is seen on the GPUs to what may be placed on them.

Per GPU the larger of promised and seen counts: foreign processes at their buffered peak until they
exit, memory that no process owns, jobs at what they hold. Turns a sample into the core's Gpu facts.
Whose what is in use is says `ownership`. Reads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from gpusched_client.terms import GpuUuid, JobId
from gpusched_client.units import MIB, bytes_text
from gpuschedd.config.keys import Sharing
from gpuschedd.core.model import Gpu
from gpuschedd.gpu.attribution import JobKey
from gpuschedd.gpu.baseline import Baseline
from gpuschedd.gpu.facts import Count, GpuFacts, Violation
from gpuschedd.gpu.foreign import (
    STEP_BYTES,
    Foreign,
    Told,
    ignore_hint,
    keepers_of_exclusive,
    largest_first,
    threshold_hint,
    told_of,
)
from gpuschedd.gpu.holdings import Holding, Holdings
from gpuschedd.gpu.lasting import LastingMemory
from gpuschedd.gpu.metering import Seen
from gpuschedd.gpu.ownership import DescribeForeign, OwnerOf, Ownership, explained_by
from gpuschedd.gpu.service_state import GpuConditions, identity_of, with_state
from gpuschedd.gpu.source import GpuInfo, GpuReading, Sample
from gpuschedd.system.clock import boottime_s

RELEASE_LAG_S = 30.0  # ownerless memory is the last job's for so long after its end
HIDDEN_BYTES = 64 * MIB  # ownerless, beside a job: it may be the job's
BASELINE_SHARE_MAX = 0.25  # of a card: a desktop before our first job takes no more


class FreeMemory:
    """The memory of what was seen. One instance lives as long as the daemon."""

    def __init__(
        self,
        sharing: Sharing,
        owner_of: OwnerOf,
        describe: DescribeForeign,
        desktop_uid: int | None = None,
    ) -> None:
        """`desktop_uid`: whose programs that only draw keep no job away."""
        self.sharing = sharing
        self.hides_owners = False  # from all but admins: the host is private
        self._lasting = LastingMemory(lambda: self.sharing.idle_threshold_bytes)
        self._owner_of = owner_of
        self._ownership = Ownership(lambda: self.sharing, owner_of, describe, desktop_uid)
        self._foreign_since_s: dict[GpuUuid, float] = {}
        self._own_peaks: dict[tuple[JobKey, GpuUuid], int] = {}
        self._ended: dict[GpuUuid, tuple[float, JobId]] = {}  # boot time, last job
        self._last: dict[GpuUuid, Gpu] = {}  # use and foreign use by the last sample that counts
        self._release_ends_s: dict[GpuUuid, float] = {}
        self._held_up: set[GpuUuid] = set()  # foreign use was there before the last job ended
        self._baseline = Baseline()

    def job_ended(self, key: JobKey, uuids: Iterable[GpuUuid], at_s: float) -> None:
        """Samples taken before at_s (boot time) say nothing more about these GPUs."""
        for uuid in uuids:
            self._ended[uuid] = (at_s, key[0])
            self._baseline.job_ended(uuid)
            self._release_ends_s.pop(uuid, None)
            if uuid in self._foreign_since_s:
                self._held_up.add(uuid)
            self._own_peaks.pop((key, uuid), None)

    def outdated(self, sample: Sample | None) -> frozenset[GpuUuid]:
        """GPUs on which a job has ended since the sample was taken, or listed their processes."""
        readings = {} if sample is None else {each.uuid: each for each in sample.readings}
        return frozenset(
            uuid
            for uuid in self._ended
            if sample is None or self._is_outdated(uuid, sample, readings.get(uuid))
        )

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
        problems: list[str] = []
        strangers: dict[GpuUuid, str] = {}
        for info in sample.inventory:
            reading = readings.get(info.uuid)
            gpu = identity_of(info, reading)
            held = holdings.get(info.uuid, ())
            before = self._last.get(info.uuid)
            is_outdated = self._is_outdated(info.uuid, sample, reading)
            if before is not None and is_outdated:
                # Its processes may be those of the job that has ended: what was known before stays.
                gpu = replace(before, index=gpu.index, index_is_past=gpu.index_is_past)
            elif reading is not None and reading.fault in (None, "unsupported"):
                count = self._ownership.count(info, reading, held, live)
                seen_keys |= {foreign.key(info.uuid) for foreign in count.foreign}
                self._see(info, reading, count, held, seen)
                lag_s = self._release_lag_s(info.uuid)
                problems += self._lasting.problems(info, count, is_held=bool(held), lag_s=lag_s)
                loud = [each for each in count.foreign if not each.is_quiet and not each.given]
                # The job's own process, as it ends, may be gone before anybody sees whose it is.
                known = [each for each in loud if not each.was_gone]
                if held and known:
                    told = told_of(largest_first(known), (), hides_owners=self.hides_owners)
                    strangers[info.uuid] = told.text
                if reading.processes is not None:
                    listed.add(info.uuid)
                    self._find_strays(info.uuid, count, live, out_of_place, left)
                if reading.fault is None:
                    gpu = self._with_use(gpu, info, reading, count, held, now_s)
                    self._last[info.uuid] = gpu
                else:
                    gpu = self._without_memory(gpu, info, reading, count)
            if gpu.fresh is is_outdated:
                gpu = replace(gpu, fresh=not is_outdated)
            gpus.append(with_state(gpu, info, reading, conditions))
        self._ownership.forget(seen_keys, listed)
        for own, entry in seen.items():
            self._own_peaks[own] = max(entry.used_bytes or 0, self._own_peaks.get(own, 0))
        return GpuFacts(
            gpus=tuple(gpus),
            seen=seen,
            peaks=dict(self._own_peaks),
            violations=tuple(out_of_place),
            leftovers=tuple(left),
            listed=frozenset(listed),
            problems=tuple(problems),
            strangers=strangers,
        )

    def _is_outdated(self, uuid: GpuUuid, sample: Sample, reading: GpuReading | None) -> bool:
        """A job has ended on the GPU since what is said of that was seen: it may be the job's."""
        ended_s, _ = self._ended.get(uuid, (0.0, None))
        seen_s = sample.taken_boottime_s
        if reading is not None and reading.listed_boottime_s is not None:
            seen_s = min(seen_s, reading.listed_boottime_s)
        return seen_s < ended_s

    def _see(
        self,
        info: GpuInfo,
        reading: GpuReading,
        count: Count,
        held: Sequence[Holding],
        seen: dict[tuple[JobKey, GpuUuid], Seen],
    ) -> None:
        """What each of our jobs uses here; the only one is here also where nobody can be listed."""
        if reading.processes is None and len(held) == 1:
            remembered = bool(self._ownership.foreign_peaks(info.uuid))
            seen[held[0].key, info.uuid] = Seen(None, False, (), 1, remembered)
        noisy = any(not foreign.is_quiet for foreign in count.foreign)
        hides = count.hidden >= HIDDEN_BYTES or any(foreign.given for foreign in count.foreign)
        for key, processes in count.own.items():
            sizes = [process.used_bytes for process in processes if process.used_bytes is not None]
            used = sum(sizes) + count.charged if len(sizes) == len(processes) else None
            if used is None and count.charged:
                used = sum(sizes) + count.charged  # by difference: nobody else is here
            pids = tuple(process.pid for process in processes)
            seen[key, info.uuid] = Seen(used, count.charged > 0, pids, len(count.own), noisy, hides)

    def _find_strays(
        self,
        uuid: GpuUuid,
        count: Count,
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
        count: Count,
        held: Sequence[Holding],
        now_s: float,
    ) -> Gpu:
        """Foreign bytes: buffered peaks, what nobody owns, and what nobody has explained yet."""
        if reading.used_bytes is None:
            return gpu
        buffer = 1 + self.sharing.spike_buffer
        peaks = sum(math.ceil((each.peak - each.given) * buffer) for each in count.foreign)
        if reading.processes is None:
            # While no list tells who is still there: no more than is in use.
            remembered = self._ownership.foreign_peaks(info.uuid)
            most = _in_steps(reading.used_bytes)
            peaks = min(most, sum(math.ceil(peak * buffer) for peak in remembered))
        known = peaks + _in_steps(count.ownerless - count.given)
        unexplained = 0
        if not info.coherent:
            explained = self._explained(reading, held, count)
            unexplained = _in_steps(reading.used_bytes - explained - known)
        foreign_bytes = known + unexplained
        loud = [each for each in count.foreign if not each.is_quiet]
        nobodys = 0 if info.is_hosts else count.ownerless + unexplained
        lag_s = self._release_lag_s(info.uuid)
        used = reading.used_bytes
        self._baseline.look(info.uuid, used, nobodys, is_held=bool(held), lag_s=lag_s)
        is_left = info.is_hosts or nobodys > self._baseline.nobodys(info.uuid)
        nobodys = max(0, nobodys - self._idle_use(info, reading, loud))
        is_idle = self._is_idle(info, loud, nobodys)
        hint, closed = "", ""
        keepers = [] if gpu.shareable else keepers_of_exclusive(count.foreign)
        if keepers:
            is_idle, foreign_bytes = False, gpu.capacity_bytes
            closed = "; its compute mode allows one process only, so it is in use"
        leaves_by_s = None
        if foreign_bytes and is_left and not count.foreign:
            leaves_by_s = self._leaves_by_s(info.uuid, now_s)
        if not is_idle and not keepers and leaves_by_s is None:
            hint = self._hint(loud, nobodys)
        told = self._told(info, count, unexplained, keepers, closed, hint)
        threshold = self.sharing.idle_threshold_bytes
        is_foreign = bool(keepers) or foreign_bytes > threshold
        return replace(
            gpu,
            foreign_bytes=foreign_bytes,
            foreign_since_s=self._since_s(gpu.uuid, count, is_foreign, now_s),
            foreign_text=told.text,
            foreign_hint=told.hint,
            foreign_detail=told.detail,
            whole_idle=is_idle,
            leaves_by_s=leaves_by_s,
        )

    def _is_idle(self, info: GpuInfo, loud: Sequence[Foreign], nobodys: int) -> bool:
        """May a job have the whole of it beside these?"""
        if info.is_hosts and any(f.size_is_unknown for f in loud if not f.process.graphics_only):
            return False
        total = sum(foreign.peak for foreign in loud) + nobodys
        return total == 0 or total < self.sharing.idle_threshold_bytes

    def _idle_use(self, info: GpuInfo, reading: GpuReading, loud: Sequence[Foreign]) -> int:
        """In use before our first job, where no process tells its size: the desktop's, on WSL."""
        uuid = info.uuid
        tells = self._ownership.tells_sizes(uuid) or reading.processes == ()
        if tells or any(not foreign.process.graphics_only for foreign in loud):
            return 0
        most = int(BASELINE_SHARE_MAX * (info.total_bytes or 0))
        known = self._baseline.in_use(uuid)
        return known if known <= most else 0

    def _hint(self, loud: Sequence[Foreign], nobodys: int) -> str:
        """What setting would let whole jobs beside it."""
        named = [foreign for foreign in loud if foreign.peak]
        if named and nobodys < self.sharing.idle_threshold_bytes:
            return ignore_hint(named)
        total = sum(foreign.peak for foreign in loud) + nobodys
        return threshold_hint(total, self.sharing.idle_threshold_bytes)

    def _leaves_by_s(self, uuid: GpuUuid, now_s: float) -> float | None:
        """When memory that an ended job leaves behind should be gone; None: it was to be by now."""
        end_s = self._release_end_s(uuid, now_s)
        return end_s if end_s > now_s else None

    def _release_end_s(self, uuid: GpuUuid, now_s: float) -> float:
        """Until when ownerless memory is the last job's, in scheduler time; the same each time."""
        if uuid in self._held_up:
            return now_s
        return self._release_ends_s.setdefault(uuid, now_s + max(0.0, self._release_lag_s(uuid)))

    def _release_lag_s(self, uuid: GpuUuid) -> float:
        """How long ownerless memory still counts as that of the GPU's last job."""
        at_s, _ = self._ended.get(uuid, (-math.inf, None))
        return at_s + RELEASE_LAG_S - boottime_s()

    def _since_s(self, uuid: GpuUuid, count: Count, is_foreign: bool, now_s: float) -> float | None:
        """Since when it is foreign use: what an ended job leaves behind is none at first."""
        if not is_foreign:
            self._foreign_since_s.pop(uuid, None)
            self._held_up.discard(uuid)
            return None
        is_left = not any(foreign.size_is_unknown for foreign in count.foreign)
        from_s = max(now_s, self._release_end_s(uuid, now_s)) if is_left else now_s
        return self._foreign_since_s.setdefault(uuid, from_s)

    def _explained(self, reading: GpuReading, held: Sequence[Holding], count: Count) -> int:
        """How much of what is in use our jobs stand for: no more than they hold together.

        What was allocated since the processes were listed may be theirs as far as they hold more.
        """
        most = sum(holding.held_bytes for holding in held)
        if reading.processes is None:
            return most
        listed = sum(explained_by(holding, count) for holding in held)
        since = 0
        if reading.used_bytes is not None and reading.listed_used_bytes is not None:
            since = max(0, reading.used_bytes - reading.listed_used_bytes)
        given = count.given + sum(foreign.given for foreign in count.foreign)
        return min(most, listed + given + since)

    def _without_memory(
        self,
        gpu: Gpu,
        info: GpuInfo,
        reading: GpuReading,
        count: Count,
    ) -> Gpu:
        """No figure, for good: whole jobs only, and those only beside nobody else."""
        idle = reading.processes is not None and all(foreign.is_quiet for foreign in count.foreign)
        text = "its memory cannot be read, so it is given whole only"
        told = Told(text)
        if not idle:
            told = self._told(info, count, 0)
            told = told._replace(text=told.text or "its processes cannot be listed")
        return replace(
            gpu,
            foreign_bytes=gpu.capacity_bytes,
            foreign_since_s=None,
            foreign_text=told.text,
            foreign_detail=told.detail,
            whole_idle=idle,
        )

    def _told(
        self,
        info: GpuInfo,
        count: Count,
        unexplained: int,
        keepers: Sequence[Foreign] = (),
        closed: str = "",
        hint: str = "",
    ) -> Told:
        """Who is in the way, for everybody; on a private host by name for admins alone."""
        found = largest_first(keepers or count.foreign)
        rest = [] if keepers else self._rest(info, count, unexplained)
        return told_of(found, rest, closed, hint, hides_owners=self.hides_owners)

    def _rest(self, info: GpuInfo, count: Count, unexplained: int) -> list[str]:
        """What is no process's."""
        parts = []
        if info.is_hosts:
            if unexplained >= MIB:
                parts.append(f"{bytes_text(unexplained)} of the host, whose memory it shares")
            return parts
        ownerless = count.ownerless - count.given + unexplained
        before = min(ownerless, self._baseline.nobodys(info.uuid))
        if any(foreign.size_is_unknown for foreign in count.foreign):
            before = 0  # probably theirs, all of it
        if ownerless - before >= MIB:
            since = ownerless - before
            parts.append(f"{bytes_text(since)} {self._ownerless_words(info.uuid, count)}")
        if before >= MIB:
            parts.append(f"{bytes_text(before)} that no process owns")
        return parts

    def _ownerless_words(self, uuid: GpuUuid, count: Count) -> str:
        unknown = [foreign for foreign in count.foreign if foreign.size_is_unknown]
        if unknown:
            others = "its" if len(unknown) == 1 else "theirs"
            return f"that no process owns, probably {others}"
        at_s, job_id = self._ended.get(uuid, (None, None))
        if at_s is None:
            return "that no process owns"
        if self._release_lag_s(uuid) > 0 and uuid not in self._held_up:
            return f"that job {job_id} leaves behind"
        return f"that no process owns (job {job_id} was the last here)"


def _in_steps(size: int) -> int:
    return max(0, math.ceil(size / STEP_BYTES) * STEP_BYTES)
