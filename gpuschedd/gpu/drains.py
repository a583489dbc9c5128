"""Drains: an admin's word about a GPU holds whatever name the GPU has, had or will have.

A GPU that the driver does not open is drained by a stand-in; one in MIG mode is seen in its slices,
and what it is cut into may change. Owns which records the word goes to, and what is found drained
by another record than its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from gpusched_client.terms import UNKNOWN_MODEL, GpuUuid
from gpuschedd.gpu.simulated.source import UUID_PREFIX as SIMULATED_PREFIX
from gpuschedd.gpu.source import (
    FIRST_SLICE_INDEX,
    UNOPENED_PREFIX,
    Sample,
    display_order,
    parent_index,
    stand_in_uuid,
)
from gpuschedd.jobs.batch import Batch
from gpuschedd.jobs.state import State
from gpuschedd.store.records import GpuRow


def set_drained(batch: Batch, uuids: Collection[GpuUuid], why: str | None) -> None:
    """Drain these GPUs, for `why`, or (None) put them back, healthy: by all their records."""
    for uuid in uuids:
        _set_row(batch, uuid, why)
    hidden = _slices_on_record(batch.state, uuids) | _parents_alike(batch, is_drained=bool(why))
    for uuid in hidden.difference(uuids):
        _set_row(batch, uuid, why)


def _set_row(batch: Batch, uuid: GpuUuid, why: str | None) -> None:
    row = batch.gpu_row(uuid) or _row_of_parent(batch, uuid)
    row = replace(row, drained=why)
    batch.gpu_rows[uuid] = row if why else replace(row, sick=None, sick_until_reboot=False)


def _slices_on_record(state: State, uuids: Collection[GpuUuid]) -> set[GpuUuid]:
    """Of whole GPUs: what each was cut into before, and may be again."""
    if any(uuid.startswith(SIMULATED_PREFIX) for uuid in uuids):
        return set()  # never in slices, and its index may be a slice's
    whole = {gpu.index for gpu in state.gpus if gpu.uuid in uuids and not gpu.index_is_past}
    return {
        row.uuid
        for row in state.gpu_rows.values()
        if row.gpu_index >= FIRST_SLICE_INDEX
        and parent_index(row.gpu_index) in whole
        and not row.uuid.startswith(SIMULATED_PREFIX)
    }


def _parents_alike(batch: Batch, *, is_drained: bool) -> set[GpuUuid]:
    """GPUs whose slices are all drained now, or none of them: so is the GPU.

    What it is cut into may change, and it stays as an admin left it.
    """
    of_parent: dict[GpuUuid, set[bool]] = {}
    for gpu in batch.state.gpus:
        row = batch.gpu_row(gpu.uuid)
        if gpu.parent_uuid is not None and row is not None:
            of_parent.setdefault(gpu.parent_uuid, set()).add(row.drained is not None)
    found = {uuid for uuid, states in of_parent.items() if states == {is_drained}}
    return {uuid for uuid in found if is_drained or batch.gpu_row(uuid) is not None}


def _row_of_parent(batch: Batch, uuid: GpuUuid) -> GpuRow:
    """Of a GPU that nobody has seen but in slices; the others that are shown have a row."""
    part = next(gpu for gpu in batch.state.gpus if gpu.parent_uuid == uuid)
    index = parent_index(part.index)
    return GpuRow(uuid, index, part.minor, UNKNOWN_MODEL, None, 0, batch.wall_s)


def heirs(sample: Sample, rows: Mapping[GpuUuid, GpuRow]) -> dict[GpuUuid, GpuUuid]:
    """What is here -> the record by which it was drained: its stand-in's, or the whole GPU's."""
    here = {reading.uuid for reading in sample.readings}
    found = {}
    for info in sample.inventory:
        before = [stand_in_uuid(display_order(info)[0])] if info.uuid in here else []
        if info.parent_uuid is not None and info.uuid not in rows:
            before.append(info.parent_uuid)
        for uuid in before:
            if uuid != info.uuid and uuid in rows and rows[uuid].drained is not None:
                found[info.uuid] = uuid
    return found


def drained(sample: Sample, rows: Mapping[GpuUuid, GpuRow]) -> dict[GpuUuid, str]:
    """Those that an admin has drained, each with the reason."""
    own = {uuid: row.drained for uuid, row in rows.items() if row.drained is not None}
    return {uuid: own[before] for uuid, before in heirs(sample, rows).items()} | own


def stand_ins_of(rows: Iterable[GpuRow]) -> set[GpuUuid]:
    """The names that GPUs on record had before they were opened."""
    indices = (row.gpu_index for row in rows if not is_stand_in(row))
    return {
        stand_in_uuid(parent_index(index) if index >= FIRST_SLICE_INDEX else index)
        for index in indices
    }


def is_stand_in(row: GpuRow) -> bool:
    """Whether the GPU was never opened."""
    return row.uuid.startswith(UNOPENED_PREFIX)
