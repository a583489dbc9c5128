"""What our jobs hold on each GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpusched_client.terms import GpuUuid, JobState
from gpuschedd.gpu.attribution import JobKey
from gpuschedd.jobs.state import State


@dataclass(frozen=True, slots=True)
class Holding:
    """What one attempt holds on one GPU."""

    key: JobKey
    held_bytes: int
    uid: int = -1
    may_hide: bool = True  # it runs and shares the GPU: what nobody can match may be its


Holdings = Mapping[GpuUuid, Sequence[Holding]]


def holdings_of(state: State) -> dict[GpuUuid, list[Holding]]:
    """What our jobs hold on each GPU, as of the last commit."""
    found: dict[GpuUuid, list[Holding]] = {}
    for job_id in state.holding:
        job = state.jobs[job_id]
        for grant in job.grants:
            may_hide = not job.whole and job.state is not JobState.CONFIGURING
            holding = Holding((job_id, job.attempt), grant.held_bytes, job.uid, may_hide)
            found.setdefault(grant.uuid, []).append(holding)
    return found
