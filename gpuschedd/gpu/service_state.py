"""Whether a GPU is in service: an admin's word, the driver's, its health. Unknown is not free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpusched_client.terms import GpuUuid
from gpuschedd.core.model import Gpu, GpuState
from gpuschedd.gpu.source import GpuInfo, GpuReading

_COMPUTE_PROHIBITED, _EXCLUSIVE_PROCESS = 2, 3


@dataclass(frozen=True, slots=True)
class GpuConditions:
    """What is known beside the sample: who is drained, sick or missing, and why."""

    drained: Mapping[GpuUuid, str] = field(default_factory=dict)
    sick: Mapping[GpuUuid, str] = field(default_factory=dict)
    warnings: Mapping[GpuUuid, str] = field(default_factory=dict)
    lost: Mapping[GpuUuid, str] = field(default_factory=dict)
    unread: str | None = None  # why nothing at all is known of any GPU


def with_state(
    gpu: Gpu, info: GpuInfo, reading: GpuReading | None, conditions: GpuConditions
) -> Gpu:
    """The GPU with its state and the words for it; an admin's drain wins."""
    state, text = _state(info, reading, conditions)
    if state is GpuState.OK:
        own = "" if gpu.shareable else "its compute mode allows one process only"
        text = conditions.warnings.get(info.uuid, own)
        return gpu if text == gpu.state_text else replace(gpu, state_text=text)
    return replace(gpu, state=state, state_text=text)


def _state(
    info: GpuInfo, reading: GpuReading | None, conditions: GpuConditions
) -> tuple[GpuState, str]:
    uuid = info.uuid
    for state, texts in (
        (GpuState.DRAINED, conditions.drained),
        (GpuState.LOST, conditions.lost),
        (GpuState.SICK, conditions.sick),
    ):
        if uuid in texts:
            return state, texts[uuid]
    if conditions.unread is not None:
        return GpuState.UNREAD, conditions.unread
    blocked = _blocked(info, reading)
    if blocked is not None:
        return GpuState.UNREAD, blocked
    if reading is None:
        return GpuState.UNREAD, "the driver did not mention it in the last sweep"
    if reading.fault == "lost":
        return GpuState.LOST, reading.reason or "lost"
    if reading.fault == "reset":
        return GpuState.SICK, reading.reason or "it needs a reset"
    if reading.fault == "unread":
        return GpuState.UNREAD, reading.reason or "its memory cannot be read"
    return GpuState.OK, ""


def _blocked(info: GpuInfo, reading: GpuReading | None) -> str | None:
    """Why nothing may be placed: as it was at the start, or as the last checks say."""
    checks = reading.checks if reading is not None else None
    if checks is not None and checks.drained:
        return "the driver drains it (nvidia-smi drain)"
    if checks is not None and checks.compute_mode is not None:
        if checks.compute_mode == _COMPUTE_PROHIBITED:
            return "its compute mode is prohibited"
        return info.blocked if info.blocked and "compute mode" not in info.blocked else None
    return info.blocked


def identity_of(info: GpuInfo, reading: GpuReading | None) -> Gpu:
    """What of a GPU does not depend on who is on it."""
    checks = reading.checks if reading is not None else None
    shareable = info.shareable
    if checks is not None and checks.compute_mode is not None:
        shareable = checks.compute_mode != _EXCLUSIVE_PROCESS
    return Gpu(
        uuid=info.uuid,
        index=info.index,
        model=info.model,
        total_bytes=info.total_bytes or 0,
        reserved_bytes=info.reserved_bytes,
        minor=info.minor,
        shareable=shareable,
        island=info.island,
        links=info.links,
        joined=info.joined,
        is_slice=info.parent_uuid is not None,
        parent_uuid=info.parent_uuid,
        index_is_past=info.index_is_past,
    )
