"""Processes that are not at home on a GPU: who is quiet, how they are named, what would allow them.

Pure: what a process is called is handed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpusched_client.terms import GpuUuid
from gpusched_client.units import GIB, MIB, bytes_text
from gpuschedd.config.keys import Sharing
from gpuschedd.config.values import ProcessRule
from gpuschedd.gpu.attribution import ForeignProcess
from gpuschedd.gpu.source import GpuProcess

STEP_BYTES = 16 * MIB  # ownerless memory wobbles: counted in such steps, rounded up
FOREIGN_NAMED_MAX = 3
ADVISED_BYTES_MAX = GIB  # to start beside more than that would end in "out of memory"
DISPLAY_COMMANDS = frozenset({"Xorg", "X", "Xwayland", "gnome-shell", "kwin_x11", "kwin_wayland"})
DISPLAY_USERS = frozenset({"root", "gdm", "sddm", "lightdm"})

ProcessKey = tuple[GpuUuid, int, int | None]


@dataclass(slots=True)
class Foreign:
    """A process that is not at home on this GPU."""

    process: GpuProcess
    who: ForeignProcess
    peak: int
    note: str | None = None  # instead of its name: a job's process out of place
    is_quiet: bool = False  # does not break idleness
    given: int = 0  # of its peak: counted as our jobs', whose processes cannot be matched

    def key(self, uuid: GpuUuid) -> ProcessKey:
        """The process on this GPU."""
        return uuid, self.process.pid, self.process.start_ticks

    @property
    def has_name(self) -> bool:
        """A process that a line of the configuration could mean."""
        return self.note is None and self.who.uid is not None

    @property
    def size_is_unknown(self) -> bool:
        """The driver lists it and does not tell how much it holds."""
        return self.process.used_bytes is None

    @property
    def is_alien(self) -> bool:
        """Its pid says nothing here: it is gone, or of another PID namespace."""
        return self.process.start_ticks is None or self.who.is_contained

    @property
    def was_gone(self) -> bool:
        """It lived when it was listed and no longer when its owner was looked for."""
        return self.note is None and self.who.uid is None and self.process.start_ticks is not None

    @property
    def text(self) -> str:
        """ "pid 42 of bob (python) with 3 GiB"."""
        size = "an unknown amount" if self.size_is_unknown and not self.peak else None
        given = " (counted as a job's)" if self.given else ""
        return f"{self.note or self.who.text} with {size or bytes_text(self.peak)}{given}"


def is_quiet(
    process: GpuProcess, who: ForeignProcess, peak: int, sharing: Sharing, desktop_uid: int | None
) -> bool:
    """Displays, the MPS server, and what the configuration names: idle in spite of them.

    `desktop_uid`: whose programs that only draw are a desktop, too.
    """
    if process.infrastructure:
        return True
    if process.graphics_only:
        is_display = who.command in DISPLAY_COMMANDS or who.user in DISPLAY_USERS
        if is_display or (desktop_uid is not None and who.uid == desktop_uid):
            return True
    return any(is_ignored(rule, who, peak) for rule in sharing.ignore_processes)


def is_ignored(rule: ProcessRule, who: ForeignProcess, peak: int) -> bool:
    """Whether the configuration means this process."""
    return (
        (rule.name is None or rule.name == who.command)
        and (rule.uid is None or rule.uid == who.uid)
        and (rule.below_bytes is None or peak < rule.below_bytes)
    )


def texts_of(ranked: Sequence[Foreign]) -> list[str]:
    """The first few by name, and how many more."""
    parts = [foreign.text for foreign in ranked[:FOREIGN_NAMED_MAX]]
    if len(ranked) > FOREIGN_NAMED_MAX:
        parts.append(f"{len(ranked) - FOREIGN_NAMED_MAX} more processes")
    return parts


class Told(NamedTuple):
    """Of what is foreign on a GPU: for everybody, what would let jobs beside it, for admins."""

    text: str
    hint: str = ""
    detail: str = ""


def told_of(
    found: Sequence[Foreign],
    rest: Iterable[str],
    closed: str = "",
    hint: str = "",
    *,
    hides_owners: bool,
) -> Told:
    """Who is in the way, by name; where owners are hidden, for admins alone."""
    rest = tuple(rest)
    named = ", ".join((*texts_of(found), *rest)) + closed
    if not hides_owners:
        return Told(named, hint)
    unnamed = ", ".join((*texts_of_nobody(found), *rest)) + closed
    return Told(unnamed, detail="; ".join(filter(None, (named, hint))))


def largest_first(foreigners: Iterable[Foreign]) -> list[Foreign]:
    """By what they hold."""
    return sorted(foreigners, key=lambda foreign: -foreign.peak)


def texts_of_nobody(foreigners: Sequence[Foreign]) -> list[str]:
    """How many and how much, where nobody may hear whose they are."""
    if not foreigners:
        return []
    count, held = len(foreigners), sum(foreign.peak for foreign in foreigners)
    what = "a process" if count == 1 else f"{count} processes"
    return [f"{what} outside the scheduler with {bytes_text(held)}"]


def keepers_of_exclusive(foreigners: Iterable[Foreign]) -> list[Foreign]:
    """Who keeps others from a GPU that allows one process: all that compute, however little.

    Beside the MPS server its clients are no obstacle: it is the one process.
    """
    found = tuple(foreigners)
    if any(foreign.process.infrastructure for foreign in found):
        return []
    return [foreign for foreign in found if not foreign.process.graphics_only]


def ignore_hint(loud: Sequence[Foreign]) -> str:
    """The line that would allow them; none where it would not help, or end in "out of memory"."""
    if not loud or not all(foreign.has_name for foreign in loud):
        return ""
    if sum(foreign.peak for foreign in loud) > ADVISED_BYTES_MAX:
        return ""
    rules = [f'"name={foreign.who.command},uid={foreign.who.uid}"' for foreign in loud]
    listed = ", ".join(dict.fromkeys(rules))
    return f"sharing.ignore_processes = [{listed}] would let whole jobs beside it"


def threshold_hint(loud_bytes: int, threshold_bytes: int) -> str:
    """The key that memory without an owner is measured by, and the value that would be enough."""
    known = f"sharing.idle_threshold is {threshold_bytes // MIB}M"
    if loud_bytes > ADVISED_BYTES_MAX:
        return known
    enough = (loud_bytes // STEP_BYTES + 1) * STEP_BYTES
    return f'{known}; with "{enough // MIB}M" whole jobs may start beside it'
