"""What was in use before our jobs came: no job's doing, and where no size is told, the desktop's.

Bookkeeping over the looks at each GPU; how long memory may still be an ended job's is handed in.
"""

from __future__ import annotations

from gpusched_client.terms import GpuUuid


class Baseline:
    """Of all GPUs, over time. One instance lives as long as the daemon."""

    def __init__(self) -> None:
        self._in_use: dict[GpuUuid, int] = {}  # before our first job
        self._least: dict[GpuUuid, int] = {}  # in use since a start beside jobs
        self._had_jobs: set[GpuUuid] = set()
        self._empty: dict[GpuUuid, int] = {}  # nobody's at the last look without a job
        self._nobodys: dict[GpuUuid, int] = {}  # the same before the job that ended last

    def job_ended(self, uuid: GpuUuid) -> None:
        """What was nobody's before it is none of its leavings."""
        self._had_jobs.add(uuid)
        self._nobodys[uuid] = self._empty.get(uuid, 0)

    def look(self, uuid: GpuUuid, used: int, nobodys: int, *, is_held: bool, lag_s: float) -> None:
        """One look. `lag_s`: so long memory of nobody may still be an ended job's.

        A daemon that starts beside a job has seen no GPU without one. It takes what is left once
        the job and what it leaves behind are gone, and no more than was ever in use since then: a
        stranger that came meanwhile is on top of that.
        """
        if uuid not in self._in_use:
            self._least[uuid] = min(used, self._least.get(uuid, used))
        if not is_held and uuid not in self._had_jobs:
            self._in_use[uuid] = used
        elif not is_held and lag_s <= 0 and uuid not in self._in_use:
            self._in_use[uuid] = self._least[uuid]
        if not is_held:
            self._nobodys[uuid] = min(nobodys, self._nobodys.get(uuid, 0))
            most = self._empty.get(uuid, 0) if lag_s > 0 else nobodys
            self._empty[uuid] = min(nobodys, most)

    def in_use(self, uuid: GpuUuid) -> int:
        """Bytes in use before our first job; 0 while nobody knows."""
        return self._in_use.get(uuid, 0)

    def nobodys(self, uuid: GpuUuid) -> int:
        """Of the bytes that are nobody's now, those that were before the job that ended last."""
        return self._nobodys.get(uuid, 0)
