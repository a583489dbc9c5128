"""Whose the memory of a GPU is: our jobs', a stranger's, or nobody's.

Remembers what a single sample does not show: the peaks of foreign processes, what was nobody's
before our jobs came, what came while these held more than they showed. What follows for placement
is `free_memory`'s. Reads nothing: who a process belongs to and what it is called is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpusched_client.terms import GpuUuid
from gpuschedd.config.keys import Sharing
from gpuschedd.gpu.attribution import ForeignProcess, JobKey
from gpuschedd.gpu.facts import Count
from gpuschedd.gpu.foreign import Foreign, ProcessKey, is_quiet
from gpuschedd.gpu.holdings import Holding
from gpuschedd.gpu.source import GpuInfo, GpuProcess, GpuReading

OwnerOf = Callable[[GpuProcess], JobKey | None]
DescribeForeign = Callable[[GpuProcess], ForeignProcess]


class Ownership:
    """Of all GPUs, over time. One instance lives as long as the daemon."""

    def __init__(
        self,
        sharing: Callable[[], Sharing],
        owner_of: OwnerOf,
        describe: DescribeForeign,
        desktop_uid: int | None,
    ) -> None:
        self._sharing = sharing
        self._owner_of = owner_of
        self._describe = describe
        self._desktop_uid = desktop_uid
        self._foreign_peaks: dict[ProcessKey, int] = {}
        self._empty_ownerless: dict[GpuUuid, int] = {}  # while no job was there
        self._seen_empty: set[GpuUuid] = set()
        self._may_be_ours: dict[ProcessKey, bool] = {}  # came while our jobs held more than shown
        self._has_sizes: set[GpuUuid] = set()  # the driver tells what a process holds

    def count(
        self, info: GpuInfo, reading: GpuReading, held: Sequence[Holding], live: set[JobKey]
    ) -> Count:
        """The processes by whom they belong to, and the memory of nobody."""
        count = Count()
        at_home = {holding.key for holding in held}
        for process in reading.processes or ():
            key = self._owner_of(process)
            if key in at_home:
                assert key is not None
                count.own.setdefault(key, []).append(process)
            else:
                count.foreign.append(self._foreign(info, process, key, live))
            if process.used_bytes is not None:
                self._has_sizes.add(info.uuid)
        count.ownerless = _ownerless(info, reading)
        self._charge(info, count, held)
        self._give(info, count, held)
        return count

    def forget(self, seen: set[ProcessKey], listed: set[GpuUuid]) -> None:
        """A foreign peak lasts until its process has left its GPU's list."""
        gone = [key for key in self._foreign_peaks if key not in seen and key[0] in listed]
        for key in gone:
            del self._foreign_peaks[key]
            self._may_be_ours.pop(key, None)

    def tells_sizes(self, uuid: GpuUuid) -> bool:
        """Whether the driver has ever said there what a process holds."""
        return uuid in self._has_sizes

    def foreign_peaks(self, uuid: GpuUuid) -> list[int]:
        """Of the foreign processes that were there when they were listed last."""
        return [peak for key, peak in self._foreign_peaks.items() if key[0] == uuid]

    def _foreign(
        self, info: GpuInfo, process: GpuProcess, key: JobKey | None, live: set[JobKey]
    ) -> Foreign:
        process_key = (info.uuid, process.pid, process.start_ticks)
        peak = max(process.used_bytes or 0, self._foreign_peaks.get(process_key, 0))
        self._foreign_peaks[process_key] = peak
        who = self._describe(process)
        note = None
        if key is not None:
            of_job = f"pid {process.pid} of job {key[0]}"
            note = f"{of_job}, not granted to it" if key in live else f"{of_job}, left behind"
        quiet = is_quiet(process, who, peak, self._sharing(), self._desktop_uid)
        return Foreign(process, who, peak, note, quiet)

    def _charge(self, info: GpuInfo, count: Count, held: Sequence[Holding]) -> None:
        """Ownerless memory that came with the only job is that job's; not what came before it."""
        if not count.own and not any(holding.runs for holding in held):
            self._empty_ownerless[info.uuid] = count.ownerless
            self._seen_empty.add(info.uuid)
            return
        # What an earlier job left behind may have gone since.
        before = min(count.ownerless, self._empty_ownerless.get(info.uuid, count.ownerless))
        self._empty_ownerless[info.uuid] = before
        if len(held) == 1 and len(count.own) == 1 and not count.foreign:
            count.charged = max(0, count.ownerless - before)
            count.ownerless -= count.charged

    def _give(self, info: GpuInfo, count: Count, held: Sequence[Holding]) -> None:
        """What came while our jobs hold more than they show is theirs first; beyond that foreign.

        In a container the driver's pids say nothing, and a job's own container is not its child.
        """
        unshown = sum(
            max(0, holding.held_bytes - explained_by(holding, count))
            for holding in held
            if holding.may_hide
        )
        uids = {holding.uid for holding in held}
        for foreign in count.foreign:
            is_match = foreign.note is None and (foreign.is_alien or foreign.who.uid in uids)
            self._may_be_ours.setdefault(foreign.key(info.uuid), is_match and unshown > 0)
        if held:
            before = self._empty_ownerless[info.uuid] if info.uuid in self._seen_empty else 0
            count.hidden = max(0, count.ownerless - before)
        count.given = min(unshown, count.hidden)
        left = unshown - count.given
        for foreign in count.foreign:
            if self._may_be_ours[foreign.key(info.uuid)]:
                foreign.given = min(left, foreign.peak)
                left -= foreign.given


def _ownerless(info: GpuInfo, reading: GpuReading) -> int:
    """Managed memory, leaks, dead processes; not what the host has on memory of both."""
    if reading.processes is None or reading.listed_used_bytes is None or info.is_hosts:
        return 0
    listed = sum(process.used_bytes or 0 for process in reading.processes)
    return max(0, reading.listed_used_bytes - listed)


def explained_by(holding: Holding, count: Count) -> int:
    """How much of what is in use a job's own processes stand for; no more than it holds."""
    processes = count.own.get(holding.key, [])
    sizes = [process.used_bytes for process in processes]
    if None in sizes:
        return holding.held_bytes  # it is there, and nobody can say with how much
    used = sum(size for size in sizes if size is not None)
    return min(holding.held_bytes, used + (count.charged if processes else 0))
