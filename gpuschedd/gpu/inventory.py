"""The host's GPUs over time: which are ours, which are missing, and their rows in the database."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from gpusched_client.terms import EventKind, GpuUuid
from gpuschedd.core.model import Gpu, GpuState
from gpuschedd.gpu import drains
from gpuschedd.gpu.facts import GpuFacts
from gpuschedd.gpu.holdings import Holdings
from gpuschedd.gpu.simulated.source import UUID_PREFIX as SIMULATED_PREFIX
from gpuschedd.gpu.source import (
    FIRST_SLICE_INDEX,
    UNOPENED_PREFIX,
    GpuInfo,
    Sample,
    display_order,
    parent_index,
    select_gpus,
    unknown_names,
)
from gpuschedd.jobs.batch import Batch
from gpuschedd.jobs.controller import Controller
from gpuschedd.store.records import GpuRow
from gpuschedd.system.clock import boottime_s

NO_GPU_TEXT = "the driver finds no GPU here; it is asked again each half minute"
LOST_AFTER_S = 60.0  # of a GPU that the driver no longer lists


class HostInventory:
    """Every GPU seen in this run, those that are gone included."""

    def __init__(self, controller: Controller, *, is_simulated: bool) -> None:
        self._controller = controller
        self._is_simulated = is_simulated
        self.info: dict[GpuUuid, GpuInfo] = {}
        self.misnamed: str | None = None  # why none of the host's GPUs is ours
        self._missing_since_s: dict[GpuUuid, float] = {}
        self._told_rows: dict[GpuUuid, GpuRow] = {}
        self._told_heirs: frozenset[GpuUuid] = frozenset()

    def unknown_names_in(self, sample: Sample) -> tuple[str, ...]:
        """Configured GPU names that match no GPU on this host."""
        wanted = self._controller.state.config.gpus
        here = self._with_unopened(sample).inventory
        names = unknown_names(here, wanted)
        present = ", ".join(str(gpu.index) for gpu in sorted(here, key=display_order)) or "none"
        text = f"gpus names {', '.join(names)}: no such GPU here (present: {present})"
        if not here:
            text = NO_GPU_TEXT
        is_none = not select_gpus(here, wanted) and (names or text is NO_GPU_TEXT)
        self.misnamed = text if is_none else None
        self._controller.set_gpu_problem(self.misnamed)
        return (text,) if names or is_none else ()

    def narrow(self, sample: Sample, held: Holdings) -> Sample:
        """The sample of our GPUs alone, with those that are missing still in its inventory."""
        sample = self._with_unopened(sample)
        wanted = select_gpus(sample.inventory, self._controller.state.config.gpus)
        wanted += self._left_out_but_held(sample.inventory, wanted, held)
        uuids = {info.uuid for info in wanted}
        readings = tuple(r for r in sample.readings if r.uuid in uuids)
        sample = replace(sample, inventory=wanted, readings=readings)
        now_s = boottime_s()
        for reading in readings:
            self._missing_since_s.pop(reading.uuid, None)
        self.info |= self._on_record() | {info.uuid: info for info in wanted}
        for uuid in self.info.keys() - {reading.uuid for reading in readings}:
            self._missing_since_s.setdefault(uuid, now_s)
        gone = [info for uuid, info in self.info.items() if uuid not in uuids]
        gone = [info for info in gone if not self._is_replaced(info, wanted, held)]
        taken = {info.index for info in wanted}
        gone = [replace(info, index_is_past=info.index in taken) for info in gone]
        shown = tuple(sorted((*wanted, *gone), key=display_order))
        return replace(sample, inventory=shown)

    def _with_unopened(self, sample: Sample) -> Sample:
        """GPUs that could not be opened are those on record that had their indices."""
        present = {info.uuid for info in sample.inventory}
        infos, readings = [*sample.inventory], [*sample.readings]
        for info, reading in sample.unopened:
            rows = [
                row
                for row in self._controller.state.gpu_rows.values()
                if row.gpu_index == info.index
                and row.uuid not in present
                and not row.uuid.startswith((UNOPENED_PREFIX, SIMULATED_PREFIX))
            ]
            known = _info_of(rows[0]) if len(rows) == 1 else info
            infos.append(known)
            readings.append(replace(reading, uuid=known.uuid))
        return replace(sample, inventory=tuple(infos), readings=tuple(readings), unopened=())

    def _on_record(self) -> dict[GpuUuid, GpuInfo]:
        """GPUs of earlier runs that nobody has taken apart since: where are they?"""
        state = self._controller.state
        known = {info.index for info in self.info.values()}
        rows = [] if self._is_simulated else state.gpu_rows.values()
        found = [
            _info_of(row)
            for row in rows
            if row.uuid not in self.info
            and not row.uuid.startswith((UNOPENED_PREFIX, SIMULATED_PREFIX))
            and not (row.gpu_index >= FIRST_SLICE_INDEX and parent_index(row.gpu_index) in known)
        ]
        return {info.uuid: info for info in select_gpus(found, state.config.gpus)}

    def _left_out_but_held(
        self, inventory: Iterable[GpuInfo], wanted: Iterable[GpuInfo], held: Holdings
    ) -> tuple[GpuInfo, ...]:
        """GPUs that the configuration no longer names, as far as jobs still run there."""
        chosen = {info.uuid for info in wanted}
        kept = []
        for info in inventory:
            if info.uuid in chosen:
                continue
            if info.uuid in held:
                kept.append(replace(info, blocked="the configuration leaves it out (gpus)"))
            else:
                self.info.pop(info.uuid, None)
                self._missing_since_s.pop(info.uuid, None)
        return tuple(kept)

    def _is_replaced(self, info: GpuInfo, wanted: Iterable[GpuInfo], held: Holdings) -> bool:
        """A GPU whose slices are here now, or a slice that was taken apart, is not missing."""
        present = {gpu.uuid for gpu in wanted}
        parents = {gpu.parent_uuid for gpu in wanted}
        replaced = info.uuid in parents or info.parent_uuid in present | parents - {None}
        if info.index >= FIRST_SLICE_INDEX and info.parent_uuid is None:  # a slice on record
            indices = {display_order(gpu)[0] for gpu in wanted}
            replaced = parent_index(info.index) in indices
        replaced = replaced or info.uuid.startswith(UNOPENED_PREFIX)
        holds = info.uuid in held
        if replaced and not holds:
            self.info.pop(info.uuid, None)
            self._missing_since_s.pop(info.uuid, None)
        return replaced and not holds

    def lost(self) -> dict[GpuUuid, str]:
        """Those that the driver has not listed for long, each with that reason."""
        now_s = boottime_s()
        return {
            uuid: "the driver no longer lists it"
            for uuid, since_s in self._missing_since_s.items()
            if now_s - since_s >= LOST_AFTER_S
        }

    def from_records(self, text: str, *, is_simulated: bool) -> tuple[Gpu, ...]:
        """Before a sample: GPUs that were here before, out of service for the reason in `text`."""
        rows = [
            row
            for row in self._controller.state.gpu_rows.values()
            if row.uuid.startswith(SIMULATED_PREFIX) == is_simulated
        ]
        gone = drains.stand_ins_of(rows)
        rows = [row for row in rows if row.uuid not in gone]
        return tuple(
            Gpu(
                uuid=row.uuid,
                index=row.gpu_index,
                model=row.model,
                total_bytes=row.total_bytes or 0,
                reserved_bytes=row.reserved_bytes,
                minor=row.minor,
                state=GpuState.UNREAD,
                state_text=text,
            )
            for row in sorted(rows, key=lambda row: row.gpu_index)
        )

    def keep(self, sample: Sample, facts: GpuFacts) -> None:
        """Record GPUs that are new, or changed, or were drained by another name."""
        state = self._controller.state
        wall_s = self._controller.clock.wall_s()
        heirs = drains.heirs(sample, state.gpu_rows)
        untold = heirs.keys() - self._told_heirs
        self._told_heirs = frozenset(heirs)
        new: list[GpuRow] = []
        for info in sample.inventory:
            row = GpuRow(
                uuid=info.uuid,
                gpu_index=info.index,
                minor=info.minor,
                model=info.model,
                total_bytes=info.total_bytes,
                reserved_bytes=info.reserved_bytes,
                seen_at_s=wall_s,
            )
            # What was told may not be durable yet: a full disk keeps it waiting.
            known = self._told_rows.get(info.uuid) or state.gpu_rows.get(info.uuid)
            if known is None or _identity(known) != _identity(row) or info.uuid in untold:
                self._told_rows[info.uuid] = row
                new.append(row)
        if new:
            self._controller.post(lambda batch: _keep_rows(batch, new, heirs, facts.gpus))


def _info_of(row: GpuRow) -> GpuInfo:
    """What the record says of a GPU."""
    return GpuInfo(
        uuid=row.uuid,
        index=row.gpu_index,
        minor=row.minor,
        model=row.model,
        total_bytes=row.total_bytes,
        reserved_bytes=row.reserved_bytes,
    )


def _identity(row: GpuRow) -> tuple[object, ...]:
    """What of a row the driver says; a change of it is worth another row."""
    return row.gpu_index, row.minor, row.model, row.total_bytes, row.reserved_bytes


def _keep_rows(
    batch: Batch,
    rows: Collection[GpuRow],
    heirs: Mapping[GpuUuid, GpuUuid],
    gpus: tuple[Gpu, ...],
) -> None:
    batch.gpus_seen = gpus
    for row in rows:
        known = batch.gpu_row(row.uuid)
        if known is not None:
            row = replace(
                row,
                drained=known.drained,
                sick=known.sick,
                sick_until_reboot=known.sick_until_reboot,
            )
        before = batch.gpu_row(heirs[row.uuid]) if row.uuid in heirs else None
        if before is not None and row.drained is None:
            row = replace(row, drained=before.drained)
        batch.gpu_rows[row.uuid] = row
        batch.emit(EventKind.GPU_SEEN, gpu=str(row.uuid), index=row.gpu_index, model=row.model)
    # Opened, it is put back by its own name alone.
    for uuid in {heirs[row.uuid] for row in rows if row.uuid in heirs}:
        before = batch.gpu_row(uuid)
        if before is not None and drains.is_stand_in(before):
            batch.gpu_rows[uuid] = replace(before, drained=None)
