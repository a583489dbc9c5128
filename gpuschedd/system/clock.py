"""Time: the only module that asks what time it is.

Scheduler time is CLOCK_BOOTTIME plus an offset kept in the database. It never steps with the wall
clock, and goes on across reboots; ages, begin times, usage decay and promises live in it. Wall
time is for display and records only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

BOOT_GAP_MAX_S = 7 * 86_400.0  # a longer absence is not believed: the wall clock may be wrong
_BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """What the daemon may ask of time; tests give a virtual one."""

    def boottime_s(self) -> float:
        """Seconds since boot, suspend included."""

    def wall_s(self) -> float:
        """Unix time; may step in both directions."""

    def boot_id(self) -> str:
        """The kernel's id of this boot."""


def boottime_s() -> float:
    """CLOCK_BOOTTIME in seconds: since boot, suspend included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wall_s() -> float:
    """Unix time in seconds, for records and for what others stamp with it."""
    return time.time()


def wall_text(at_s: float) -> str:
    """The local time of day, for reasons that people read."""
    return time.strftime("%H:%M:%S", time.localtime(at_s))


class SystemClock:
    """The host's clocks."""

    def boottime_s(self) -> float:
        """CLOCK_BOOTTIME in seconds."""
        return boottime_s()

    def wall_s(self) -> float:
        """Unix time in seconds."""
        return wall_s()

    def boot_id(self) -> str:
        """The kernel's random id of this boot."""
        return _BOOT_ID_PATH.read_text().strip()


@dataclass(frozen=True, slots=True)
class ClockMark:
    """One committed reading: enough to go on after a restart or a reboot."""

    boot_id: str
    offset_s: float  # scheduler time minus CLOCK_BOOTTIME, in this boot
    scheduler_s: float
    wall_s: float


class SchedulerClock:
    """Scheduler time: never goes back, never jumps by more than BOOT_GAP_MAX_S."""

    def __init__(self, clock: Clock, mark: ClockMark | None) -> None:
        self._clock = clock
        self._boot_id = clock.boot_id()
        self._offset_s = _offset_after(clock, self._boot_id, mark)
        self._mark = mark

    def went_down_s(self, boot_id: str) -> tuple[float, float] | None:
        """Between which Unix times the host went down that had that boot id; None: it did not.

        From the last reading that was committed in that boot to the begin of this one.
        """
        if boot_id == self._boot_id:
            return None
        up_s = self._clock.wall_s() - self._clock.boottime_s()
        was_last = self._mark is not None and self._mark.boot_id == boot_id
        last_s = self._mark.wall_s if self._mark is not None and was_last else up_s
        return min(last_s, up_s), up_s

    def now_s(self) -> float:
        """Scheduler time in seconds."""
        return self._clock.boottime_s() + self._offset_s

    def wall_s(self) -> float:
        """Unix time in seconds, for records."""
        return self._clock.wall_s()

    def mark(self) -> ClockMark:
        """The reading that each batch commits."""
        now_s = self.now_s()
        return ClockMark(self._boot_id, self._offset_s, now_s, self._clock.wall_s())

    def to_wall_s(self, scheduler_s: float) -> float:
        """Unix time that stands at scheduler_s if the wall clock does not step."""
        return self._clock.wall_s() + (scheduler_s - self.now_s())

    def from_boottime_s(self, boottime_s: float, boot_id: str, wall_s: float) -> float:
        """Scheduler time of a reading that another process took, in this boot or an earlier one.

        Of an earlier boot only the wall reading is left; it is clamped to the past.
        """
        if boot_id == self._boot_id:
            return min(boottime_s + self._offset_s, self.now_s())
        return self.from_wall_s(wall_s)

    def from_wall_s(self, wall_s: float) -> float:
        """Scheduler time of a past wall reading, as far as the wall clock can be believed."""
        now_s = self.now_s()
        age_s = min(max(self._clock.wall_s() - wall_s, 0.0), BOOT_GAP_MAX_S)
        return now_s - age_s


def _offset_after(clock: Clock, boot_id: str, mark: ClockMark | None) -> float:
    """The offset that continues from the last committed reading."""
    if mark is None:
        return 0.0
    if mark.boot_id == boot_id:
        return mark.offset_s
    gap_s = min(max(clock.wall_s() - mark.wall_s, 0.0), BOOT_GAP_MAX_S)
    return mark.scheduler_s + gap_s - clock.boottime_s()
