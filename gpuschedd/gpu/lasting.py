"""Memory that nobody will ever give back, and jobs whose processes nobody can match: for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpusched_client.terms import GpuUuid
from gpusched_client.units import MIB, bytes_text
from gpuschedd.gpu.facts import Count
from gpuschedd.gpu.source import GpuInfo
from gpuschedd.system.clock import boottime_s

PERSON_AFTER_S = 60.0  # until then a driver may still take it back
LEAK_BYTES = 1024 * MIB  # that no process owns: a driver's own wobble is less


class LastingMemory:
    """What of it there is now, and since when."""

    def __init__(self, threshold_bytes: Callable[[], int]) -> None:
        """`threshold_bytes`: less than that is in nobody's way."""
        self._threshold_bytes = threshold_bytes
        self._since_s: dict[GpuUuid, float] = {}  # boot time

    def problems(
        self, info: GpuInfo, count: Count, *, is_held: bool, lag_s: float
    ) -> Iterator[str]:
        """In words, with the cure. `lag_s`: so long it is still an ended job's, and about to go."""
        given = count.given if not count.own else 0
        given += sum(foreign.given for foreign in count.foreign if foreign.is_alien)
        if is_held and given >= max(MIB, self._threshold_bytes()):
            yield (
                f"processes cannot be matched with jobs on GPU {info.index}: {bytes_text(given)} "
                "there count as the jobs' own; if gpuschedd runs in a container, start it with the "
                "host's process ids (docker run --pid=host)"
            )
        gone = [f for f in count.foreign if f.process.start_ticks is None and not f.given]
        lost = sum(foreign.peak for foreign in gone)
        names = ", ".join(f"pid {foreign.process.pid}" for foreign in gone)
        whose = f"held by {names}, which is gone"
        unknown = any(foreign.size_is_unknown for foreign in count.foreign)
        if not gone and not is_held and not unknown and count.ownerless >= LEAK_BYTES:
            lost, whose = count.ownerless, "held by no process"
        is_lasting = lost >= max(MIB, self._threshold_bytes())
        if not is_lasting or lag_s > 0:
            self._since_s.pop(info.uuid, None)
            return
        since_s = self._since_s.setdefault(info.uuid, boottime_s())
        if boottime_s() - since_s >= PERSON_AFTER_S:
            yield (
                f"{bytes_text(lost)} on GPU {info.index} are {whose}; `fuser -v /dev/nvidia*` "
                "tells who still has it open, else `gctl gpus release` and `nvidia-smi --gpu-reset "
                f"-i {info.index}`, or a reboot, gives them back"
            )
