"""Is a GPU fit for new jobs, and when is a sick one well again?

Pure: samples in, judgements out. What a vendor's reports mean is in its rules; it knows no driver
and no job, and an admin's word wins over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpusched_client.terms import GpuUuid
from gpuschedd.gpu.source import GpuReading, HealthChecks, HealthRules, Illness, Sample
from gpuschedd.store.records import Remembered

GOOD_CHECKS = 3  # in a row, before a sick GPU takes jobs again


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
    warning: str | None = None
    acknowledged: set[str] = field(default_factory=set)  # conditions that an admin has overruled


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
            record.acknowledged, record.errors_seen = set(memory.pardoned), memory.errors_seen
        for uuid, illness in (ill or {}).items():
            self._record(uuid).illness = illness

    def take(self, sample: Sample) -> list[HealthChange]:
        """Judge a sample's events and checks."""
        before = {uuid: record.illness for uuid, record in self._records.items()}
        for event in sample.events:
            if event.kind == "fault":
                self._fall_ill(self._record(event.uuid), self.rules.of_fault(event.number))
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

    def warning(self, uuid: GpuUuid) -> str | None:
        """What is worth knowing of a GPU in service."""
        record = self._records.get(uuid)
        return record.warning if record else None

    @property
    def is_anyone_ill(self) -> bool:
        """True while checks should come more often."""
        return any(record.illness is not None for record in self._records.values())

    def acknowledge(self, uuid: GpuUuid) -> None:
        """An admin puts the GPU back: what is wrong with it now no longer counts."""
        record = self._record(uuid)
        record.illness = None
        record.acknowledged |= {"action", "remap"}

    def remembered(self) -> dict[GpuUuid, Remembered]:
        """What to give the next HealthBook; GPUs of which there is nothing to say are missing."""
        return {
            uuid: Remembered(tuple(sorted(record.acknowledged)), record.errors_seen)
            for uuid, record in sorted(self._records.items())
            if record.acknowledged or record.errors_seen
        }

    # --- judgements ---------------------------------------------------------------------------

    def _record(self, uuid: GpuUuid) -> _Record:
        return self._records.setdefault(uuid, _Record())

    def _fall_ill(self, record: _Record, illness: Illness | None) -> None:
        if illness is None:
            return
        record.good_checks = 0
        if record.illness is None or not record.illness.until_reboot:
            record.illness = illness

    def _take_reading(self, reading: GpuReading) -> None:
        if reading.fault == "reset":
            text = f"it needs a reset ({reading.reason})"
            self._fall_ill(self._record(reading.uuid), Illness(text))
        elif reading.fault is not None and reading.fault != "unsupported":
            self._record(reading.uuid).good_checks = 0
        if reading.checks is not None:
            self._take_checks(self._record(reading.uuid), reading.checks)

    def _take_checks(self, record: _Record, checks: HealthChecks) -> None:
        texts = [
            "a row remap is pending: reset it when convenient" if checks.remap_pending else None,
            self.rules.slowdown_text(checks.slowdown or 0),
        ]
        record.warning = "; ".join(text for text in texts if text) or None
        found = self._conditions(record, checks)
        record.acknowledged &= found.keys()
        for name, illness in found.items():
            if name not in record.acknowledged:
                self._fall_ill(record, illness)
                return
        self._count_good(record, checks)

    def _conditions(self, record: _Record, checks: HealthChecks) -> dict[str, Illness]:
        """What is wrong at the moment, by name."""
        found: dict[str, Illness] = {}
        action = checks.recovery_action
        if action:
            what = self.rules.action_text(action)
            found["action"] = Illness(f"the driver asks for a {what}")
        if checks.remap_failed:
            found["remap"] = Illness("a row remap failed: the card should be replaced")
        errors = checks.uncorrected_errors
        if errors is not None:
            if errors > record.errors_seen:
                self._fall_ill(record, self.rules.of_uncorrected_errors())
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
