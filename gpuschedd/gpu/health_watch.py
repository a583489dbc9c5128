"""Health over time: when it is checked, what is kept, and which fault may have ended a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from gpusched_client.terms import EventKind, GpuUuid
from gpuschedd.core.job import Job
from gpuschedd.gpu.health import HealthBook, HealthChange
from gpuschedd.gpu.source import (
    GpuEvent,
    GpuInfo,
    GpuModes,
    GpuReading,
    HealthChecks,
    HealthRules,
    Illness,
    Sample,
)
from gpuschedd.jobs.batch import Batch
from gpuschedd.jobs.controller import Controller
from gpuschedd.system.clock import boottime_s

SICK_CHECK_S = 5.0  # between two health checks while a GPU is sick
FAULTS_KEPT_MAX = 1_000
FAULT_BLAME_S = 30.0  # a fault so long before a job's end may be its cause


@dataclass(frozen=True, slots=True)
class GpuFault:
    """A fault that the driver reported of one GPU, for the cause of a death."""

    uuid: GpuUuid
    number: int
    at_s: float


class HealthWatch:
    """Health and faults of all GPUs."""

    def __init__(
        self, rules: Callable[[], HealthRules], controller: Controller, *, same_boot: bool
    ) -> None:
        """`same_boot`: the GPUs that were sick when the daemon ended still are."""
        self._rules = rules
        self._controller = controller
        ill = self._ill_before()
        self._remembered = controller.state.health
        self._book = HealthBook(rules(), ill if same_boot else {}, self._remembered)
        if ill and not same_boot:
            self._controller.post(partial(_all_well, tuple(ill)))
        self._checked_s = 0.0
        self._wants_checks = False
        self._checks: dict[GpuUuid, GpuReading] = {}
        self._modes: dict[GpuUuid, GpuModes] = {}  # looked at since
        self._faults: list[GpuFault] = []

    def reconfigure(self) -> None:
        """The configuration was read again."""
        self._book.rules = self._rules()

    def acknowledge(self, uuid: GpuUuid) -> None:
        """An admin puts a sick GPU back into service."""
        self._book.acknowledge(uuid)
        self._keep_remembered()

    def is_check_due(self, every_s: float) -> bool:
        """Whether the next sample should ask for the checks; more often while a GPU is sick."""
        if self._book.is_anyone_ill:
            every_s = min(every_s, SICK_CHECK_S)
        return self._wants_checks or boottime_s() - self._checked_s >= every_s

    def check_soon(self) -> None:
        """People had the driver to themselves: the next sample asks for the checks."""
        self._wants_checks = True

    def sick(self, info: Mapping[GpuUuid, GpuInfo]) -> dict[GpuUuid, str]:
        """Why each of these GPUs takes no new jobs."""
        found = {uuid: self._book.illness(uuid) for uuid in info}
        return {uuid: illness.reason for uuid, illness in found.items() if illness is not None}

    def warnings(self, info: Mapping[GpuUuid, GpuInfo]) -> dict[GpuUuid, str]:
        """What is worth knowing of those in service."""
        found = {uuid: self._book.warning(uuid) for uuid in info}
        return {uuid: warning for uuid, warning in found.items() if warning is not None}

    def fault_of(self, job: Job, info: Mapping[GpuUuid, GpuInfo]) -> str | None:
        """The fault that may have ended a job: on one of its GPUs, in its last half minute."""
        begun_s = max(self._controller.clock.wall_s() - FAULT_BLAME_S, job.started_at_s or 0.0)
        uuids = {grant.uuid for grant in job.grants}
        for fault in reversed(self._faults):
            if fault.uuid in uuids and begun_s <= fault.at_s:
                index = info[fault.uuid].index if fault.uuid in info else "?"
                return f"{self._book.rules.fault_text(fault.number)} on GPU {index}"
        return None

    def with_checks(self, sample: Sample) -> Sample:
        """Checks are asked for now and then; what they said last still stands."""
        return replace(sample, readings=tuple(map(self._with_checks, sample.readings)))

    def _with_checks(self, reading: GpuReading) -> GpuReading:
        if reading.checks is not None:
            self._checks[reading.uuid] = reading
            self._modes.pop(reading.uuid, None)
            return reading
        if reading.modes is not None:
            self._modes[reading.uuid] = reading.modes
        last, modes = self._checks.get(reading.uuid), self._modes.get(reading.uuid)
        checks = last.checks if last is not None else None
        if modes is not None:  # newer
            checks = replace(
                checks or HealthChecks(), compute_mode=modes.compute_mode, drained=modes.drained
            )
        return replace(reading, checks=checks)

    def take(self, sample: Sample, info: Mapping[GpuUuid, GpuInfo]) -> None:
        """Judge a sample of `with_checks`, and record what it changes."""
        asked = [r for r in sample.readings if self._checks.get(r.uuid) is r]
        if asked:
            self._checked_s = boottime_s()
        self._wants_checks = bool(sample.events)
        judged = replace(
            sample,
            readings=tuple(r if r in asked else replace(r, checks=None) for r in sample.readings),
        )
        changes = self._book.take(judged)
        if sample.events:
            self._emit_faults(sample.events, info)
        if changes:
            self._emit_changes(changes)
        self._keep_remembered()

    def _emit_faults(self, events: tuple[GpuEvent, ...], info: Mapping[GpuUuid, GpuInfo]) -> None:
        wall_s = self._controller.clock.wall_s()
        faults = [event for event in events if event.kind == "fault"]
        self._faults += [GpuFault(event.uuid, event.number, wall_s) for event in faults]
        del self._faults[:-FAULTS_KEPT_MAX]
        for event in faults:
            index = info[event.uuid].index if event.uuid in info else None
            text = self._book.rules.fault_text(event.number)
            facts = {"gpu": str(event.uuid), "index": index, "xid": event.number, "text": text}
            self._controller.post(partial(_emit, EventKind.GPU_XID, facts))

    def _keep_remembered(self) -> None:
        """Record, where it changed, what an admin overruled and which errors were counted."""
        remembered = self._book.remembered()
        if remembered == self._remembered:
            return
        self._remembered = remembered

        def keep(batch: Batch) -> None:
            batch.health = remembered

        self._controller.post(keep)

    def _emit_changes(self, changes: list[HealthChange]) -> None:
        """On record: a restart of the daemon makes no GPU well."""

        def emit(batch: Batch) -> None:
            for change in changes:
                row = batch.gpu_row(change.uuid)
                reason = change.illness.reason if change.illness else None
                if row is not None:
                    until = bool(change.illness and change.illness.until_reboot)
                    batch.gpu_rows[change.uuid] = replace(row, sick=reason, sick_until_reboot=until)
                kind = EventKind.GPU_SICK if reason else EventKind.GPU_RECOVERED
                index = row.gpu_index if row else None
                batch.emit(kind, gpu=str(change.uuid), index=index, reason=reason)

        self._controller.post(emit)

    def _ill_before(self) -> dict[GpuUuid, Illness]:
        return {
            uuid: Illness(row.sick, row.sick_until_reboot)
            for uuid, row in self._controller.state.gpu_rows.items()
            if row.sick is not None
        }


def _all_well(uuids: tuple[GpuUuid, ...], batch: Batch) -> None:
    """A reboot has reset every GPU; what is still wrong with one will show."""
    for uuid in uuids:
        row = batch.gpu_row(uuid)
        if row is not None:
            batch.gpu_rows[uuid] = replace(row, sick=None, sick_until_reboot=False)


def _emit(kind: EventKind, facts: Mapping[str, object], batch: Batch) -> None:
    batch.emit(kind, None, **facts)
