"""The GPUs: their state, and what administrators do to them."""

from __future__ import annotations

from gpusched_client.errors import NotFound
from gpusched_client.terms import EventKind, GpuUuid
from gpusched_client.wire.gpu_messages import (
    DrainRequest,
    DrainResult,
    GpusReleaseRequest,
    GpusRequest,
    GpusResult,
    GpusResumeRequest,
    GpuView,
    ResumeRequest,
    ResumeResult,
)
from gpusched_client.wire.message import Response
from gpuschedd.api.methods.reading import gpu_views
from gpuschedd.api.registry import Call, handles
from gpuschedd.core.model import Gpu
from gpuschedd.gpu import drains
from gpuschedd.gpu.source import FIRST_SLICE_INDEX, parent_index
from gpuschedd.jobs.batch import Batch
from gpuschedd.store.records import AuditRow


@handles(GpusRequest)
async def gpus(call: Call, _request: GpusRequest) -> Response:
    return GpusResult(gpus=tuple(gpu_views(call)), problem=call.services.gpu_readings.trouble)


@handles(DrainRequest)
async def drain(call: Call, request: DrainRequest) -> Response:
    views = await _set_drained(call, request.gpu, request.reason, "drain")
    return DrainResult(gpu=views[0], gpus=views)


@handles(ResumeRequest)
async def resume(call: Call, request: ResumeRequest) -> Response:
    views = await _set_drained(call, request.gpu, None, "resume")
    return ResumeResult(gpu=views[0], gpus=views)


@handles(GpusReleaseRequest)
async def gpus_release(call: Call, request: GpusReleaseRequest) -> Response:
    """No client of the driver is ours until gpus_resume: its GPUs can be reconfigured."""
    await _emit_gpus(call, "gpus_release", EventKind.GPUS_RELEASED, request.reason)
    await call.services.gpu_control.release(request.reason or "no reason is given")
    return GpusResult(gpus=tuple(gpu_views(call)))


@handles(GpusResumeRequest)
async def gpus_resume(call: Call, _request: GpusResumeRequest) -> Response:
    await _emit_gpus(call, "gpus_resume", EventKind.GPUS_REOPENED, None)
    await call.services.gpu_control.resume()
    return GpusResult(gpus=tuple(gpu_views(call)), problem=call.services.gpu_readings.trouble)


async def _emit_gpus(call: Call, method: str, kind: EventKind, reason: str | None) -> None:
    def act(batch: Batch) -> None:
        batch.emit(kind, None, by=call.caller.user, reason=reason)
        batch.audits.append(
            AuditRow(batch.wall_s, call.caller.uid, call.caller.pid, method, "done", reason or "")
        )

    await call.controller.call(act)


async def _set_drained(
    call: Call, name: str, reason: str | None, method: str
) -> tuple[GpuView, ...]:
    uuids = _gpus_named(call, name)
    by = f"by {call.caller.user}"
    why = f"{reason}, {by}" if reason else by

    def act(batch: Batch) -> None:
        drains.set_drained(batch, uuids, None if reason is None else why)
        for uuid in uuids:
            batch.emit(
                EventKind.GPU_RESUMED if reason is None else EventKind.GPU_DRAINED,
                gpu=str(uuid),
                reason=reason,
                by=call.caller.user,
            )
            batch.audits.append(
                AuditRow(batch.wall_s, call.caller.uid, call.caller.pid, method, "done", str(uuid))
            )

    await call.controller.call(act)
    for uuid in uuids if reason is None else ():
        call.services.gpu_control.acknowledge(uuid)
    call.services.gpu_control.refresh()
    return tuple(view for view in gpu_views(call) if view.uuid in uuids)


def _gpus_named(call: Call, name: str) -> tuple[GpuUuid, ...]:
    """The GPU of that name; of one in MIG mode, which is none itself, all its slices."""
    gpus = call.state.gpus
    found: list[tuple[GpuUuid, ...]]
    found = [(gpu.uuid,) for gpu in gpus if gpu.label == name or _begins(gpu.uuid, name)]
    parents = {gpu.parent_uuid for gpu in gpus if _begins(gpu.parent_uuid, name)}
    found += [tuple(gpu.uuid for gpu in gpus if gpu.parent_uuid == each) for each in parents]
    slices = tuple(gpu.uuid for gpu in gpus if _parent_label(gpu) == name)
    if slices and not found:
        return slices
    if len(found) != 1:
        known = ", ".join(f"{gpu.label} ({gpu.uuid})" for gpu in gpus[:16]) or "none"
        matching = f"{len(found)} GPUs are" if found else "no GPU is"
        raise NotFound(f"{matching} named {name!r}; known: {known}")
    return found[0]


def _begins(uuid: GpuUuid | None, name: str) -> bool:
    return uuid is not None and (uuid == name or (len(name) >= 8 and uuid.startswith(name)))


def _parent_label(gpu: Gpu) -> str | None:
    """The index of a slice's GPU; also where a record is all that is known of the slice."""
    return str(parent_index(gpu.index)) if gpu.is_slice or gpu.index >= FIRST_SLICE_INDEX else None
