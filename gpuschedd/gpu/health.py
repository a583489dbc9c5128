"""Is a GPU fit for new jobs? Xids, recovery action, row remapping, ECC: what each means, and when a
sick GPU is well again.

Pure: samples in, judgements out. It knows no driver and no job; an admin's word wins over it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpusched_client.terms import GpuUuid
from gpuschedd.gpu.source import GpuReading, HealthChecks, Sample
from gpuschedd.store.records import Remembered

GOOD_CHECKS = 3  # in a row, before a sick GPU takes jobs again
DOUBLE_BIT_XID = 48  # new uncorrectable errors count as this one

#: NVIDIA's catalog of Xids in the words of a reason; the numbers alone tell nobody anything.
XID_TEXTS: Mapping[int, str] = {
    13: "graphics engine exception",
    31: "memory page fault of a job",
    32: "corrupted push buffer",
    43: "a job's channel was stopped",
    45: "a job's channels were torn down",
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    63: "row remapping recorded",
    64: "row remapping failed",
    68: "video processor exception",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "GPU fell off the bus",
    92: "many single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP processor timeout",
    120: "GSP processor error",
    136: "link training failed",
    140: "unrecovered ECC error",
    143: "initialisation failure",
    154: "recovery action changed",
    156: "resource retirement",
    158: "timeout of the GPU's memory system",
}
_ACTIONS = {
    1: "reset of the GPU",
    2: "reboot of the host",
    3: "drain of its NVLink peers",
    4: "drain and reset",
    5: "recovery of the IMEX domain",
    6: "reset of the bus",
    7: "reboot of the host",
}


@dataclass(frozen=True, slots=True)
class HealthRules:
    """Which Xids put a GPU out of service. Those that are in no list are written down only."""

    quarantine: frozenset[int]
    reboot: frozenset[int]


@dataclass(frozen=True, slots=True)
class Illness:
    """Why a GPU takes no new jobs. `until_reboot`: no check makes it well again."""

    reason: str
    until_reboot: bool = False


@dataclass(frozen=True, slots=True)
class HealthChange:
    """A GPU that fell ill or recovered (None)."""

    uuid: GpuUuid
    illness: Illness | None


@dataclass(slots=True)
class _Record:
    illness: Illness | None = None
    good_checks: int = 0
    errors_seen: int = 0
    badge: str | None = None
    pardoned: set[str] = field(default_factory=set)  # conditions that an admin has overruled


class HealthBook:
    """What is known of every GPU's health. One instance lives as long as the daemon."""

    def __init__(
        self,
        rules: HealthRules,
        ill: Mapping[GpuUuid, Illness] | None = None,
        remembered: Mapping[GpuUuid, Remembered] | None = None,
    ) -> None:
        """`ill`: as it was before a restart of the daemon within the same boot."""
        self.rules = rules
        self._records: dict[GpuUuid, _Record] = {}
        for uuid, memory in (remembered or {}).items():
            record = self._record(uuid)
            record.pardoned, record.errors_seen = set(memory.pardoned), memory.errors_seen
        for uuid, illness in (ill or {}).items():
            self._record(uuid).illness = illness

    def take(self, sample: Sample) -> list[HealthChange]:
        """Judge a sample's events and checks."""
        before = {uuid: record.illness for uuid, record in self._records.items()}
        for event in sample.events:
            if event.kind == "xid":
                self._take_xid(event.uuid, event.number)
        for reading in sample.readings:
            self._take_reading(reading)
        return [
            HealthChange(uuid, record.illness)
            for uuid, record in self._records.items()
            if record.illness != before.get(uuid)
        ]

    def illness(self, uuid: GpuUuid) -> Illness | None:
        """Why it takes no new jobs; None: it is well."""
        record = self._records.get(uuid)
        return record.illness if record else None

    def badge(self, uuid: GpuUuid) -> str | None:
        """What is worth knowing of a GPU in service."""
        record = self._records.get(uuid)
        return record.badge if record else None

    @property
    def is_anyone_ill(self) -> bool:
        """True while checks should come more often."""
        return any(record.illness is not None for record in self._records.values())

    def pardon(self, uuid: GpuUuid) -> None:
        """An admin puts the GPU back: what is wrong with it now does not count any more."""
        record = self._record(uuid)
        record.illness = None
        record.pardoned |= {"action", "remap"}

    def remembered(self) -> dict[GpuUuid, Remembered]:
        """What to give the next HealthBook; GPUs of which there is nothing to say are missing."""
        return {
            uuid: Remembered(tuple(sorted(record.pardoned)), record.errors_seen)
            for uuid, record in sorted(self._records.items())
            if record.pardoned or record.errors_seen
        }

    # --- judgements ---------------------------------------------------------------------------

    def _record(self, uuid: GpuUuid) -> _Record:
        return self._records.setdefault(uuid, _Record())

    def _fall_ill(self, record: _Record, illness: Illness) -> None:
        record.good_checks = 0
        if record.illness is None or not record.illness.until_reboot:
            record.illness = illness

    def _take_xid(self, uuid: GpuUuid, number: int) -> None:
        text = xid_text(number)
        if number in self.rules.reboot:
            illness = Illness(f"{text}: out of service until a reboot", until_reboot=True)
        elif number in self.rules.quarantine:
            illness = Illness(f"{text}: out of service until it is reset")
        else:
            return
        self._fall_ill(self._record(uuid), illness)

    def _take_reading(self, reading: GpuReading) -> None:
        if reading.fault == "reset":
            text = f"it needs a reset ({reading.reason})"
            self._fall_ill(self._record(reading.uuid), Illness(text))
        elif reading.fault is not None and reading.fault != "unsupported":
            self._record(reading.uuid).good_checks = 0
        if reading.checks is not None:
            self._take_checks(self._record(reading.uuid), reading.uuid, reading.checks)

    def _take_checks(self, record: _Record, uuid: GpuUuid, checks: HealthChecks) -> None:
        record.badge = (
            "a row remap is pending: reset it when convenient" if checks.remap_pending else None
        )
        found = self._conditions(record, uuid, checks)
        record.pardoned &= found.keys()
        for name, illness in found.items():
            if name not in record.pardoned:
                self._fall_ill(record, illness)
                return
        self._count_good(record, checks)

    def _conditions(
        self, record: _Record, uuid: GpuUuid, checks: HealthChecks
    ) -> dict[str, Illness]:
        """What is wrong at the moment, by name."""
        found: dict[str, Illness] = {}
        action = checks.recovery_action
        if action:
            what = _ACTIONS.get(action, f"action {action}")
            found["action"] = Illness(f"the driver asks for a {what}")
        if checks.remap_failed:
            found["remap"] = Illness("a row remap failed: the card should be replaced")
        errors = checks.uncorrected_errors
        if errors is not None:
            if errors > record.errors_seen:
                self._take_xid(uuid, DOUBLE_BIT_XID)
            record.errors_seen = errors
        return found

    @staticmethod
    def _count_good(record: _Record, checks: HealthChecks) -> None:
        """Well again after some good checks; a driver that tells no action leaves it to people."""
        if record.illness is None or record.illness.until_reboot:
            return
        if checks.recovery_action is None:
            return
        record.good_checks += 1
        if record.good_checks >= GOOD_CHECKS:
            record.illness = None


def xid_text(number: int) -> str:
    """ "Xid 79 (GPU fell off the bus)"."""
    known = XID_TEXTS.get(number)
    return f"Xid {number} ({known})" if known else f"Xid {number}"


def rules_of(quarantine: Iterable[int], reboot: Iterable[int]) -> HealthRules:
    """Rules out of the configuration's lists."""
    return HealthRules(frozenset(quarantine), frozenset(reboot))
