"""Why a pending job waits: a gate of its own, one of the whole host, or what the last pass says."""

from __future__ import annotations

from dataclasses import replace

from gpusched_client.terms import PendingReason
from gpuschedd.core.job import Job
from gpuschedd.core.model import Reason
from gpuschedd.core.plan import reason_of
from gpuschedd.jobs.gates import blocked_by
from gpuschedd.jobs.state import State


def host_blocked_by(state: State) -> Reason | None:
    """Why nothing starts on this host for now, while queues and ages go on; None: things do."""
    if state.storage_blocked is not None:
        text = f"the state directory cannot be written: {state.storage_blocked}"
        return Reason(PendingReason.STORAGE, text)
    if state.host_closed is not None:
        text = f"the host is closed to users: {state.host_closed}"
        return Reason(PendingReason.HOST_CLOSED, text)
    return None


def waiting_reason(state: State, job: Job, now_s: float) -> Reason:
    """Why a pending job waits, with numbers: a gate, the host, or what the last pass says."""
    gate = blocked_by(job, now_s) or host_blocked_by(state)
    if gate is not None:
        return gate
    if state.plan is None or job.job_id not in state.queues:
        return Reason(PendingReason.NONE, "not looked at yet")
    reason = reason_of(state.plan, job.job_id)
    if reason.code is PendingReason.NO_GPUS and state.gpu_problem is not None:
        return replace(reason, text=f"{reason.text}: {state.gpu_problem}")
    return reason
