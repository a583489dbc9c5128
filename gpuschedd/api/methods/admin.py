"""The daemon itself: health, counters, reload, backup."""

from __future__ import annotations

from typing import Any

from gpusched_client.wire.admin_messages import (
    BackupRequest,
    ReloadRequest,
    ReloadResult,
    StatsRequest,
    StatsResult,
    StatusRequest,
)
from gpusched_client.wire.message import Response
from gpuschedd.api.methods.reading import read
from gpuschedd.api.registry import Call, handles
from gpuschedd.core.model import GpuState


@handles(StatsRequest)
async def stats(call: Call, _request: StatsRequest) -> Response:
    states, promises = await read(
        call, lambda history: (history.state_counts(), history.promise_outcomes())
    )
    state = call.state
    counters: dict[str, Any] = dict(call.controller.counters)
    counters |= {f"jobs_{name.lower()}": count for name, count in states.items()}
    counters |= {f"promises_{name}": count for name, count in promises.items()}
    counters |= {
        "starts_by_guess": state.expectations.total.by_guess,
        "heads_started": state.expectations.total.heads,
        "heads_later_than_expected": state.expectations.total.late_heads,
        "expected_run_median_error": state.expectations.total.median_error,
        "pass_seconds_last": call.controller.pass_s_last,
        "watchers": call.services.subscriptions.watching,
        "gpus": len(state.gpus),
        "gpus_ok": sum(gpu.state is GpuState.OK for gpu in state.gpus),
        "gpus_stale": call.services.gpu_readings.is_stale,
        "gpu_problem": call.services.gpu_readings.trouble or "",
        "storage_problem": state.storage_blocked or "",
    }
    return StatsResult(counters=counters)


@handles(ReloadRequest)
async def reload(call: Call, _request: ReloadRequest) -> Response:
    changed, broken = await call.services.reload()
    call.services.auth.record_done(call.caller, "reload", ", ".join(changed))
    return ReloadResult(changed=changed, broken=broken)


@handles(StatusRequest)
async def status(call: Call, _request: StatusRequest) -> Response:
    return await call.services.health.take(for_admin=call.caller.is_admin)


@handles(BackupRequest)
async def backup(call: Call, request: BackupRequest) -> Response:
    result = await call.services.backups.answer(request, call.connection.on_close)
    if request.backup_id is None:
        call.services.auth.record_done(call.caller, "backup", f"{result.size_bytes} bytes")
    return result
