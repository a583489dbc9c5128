"""What our jobs hold on each GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpusched_client.terms import GpuUuid, JobState
from gpuschedd.core.job import Job
from gpuschedd.gpu.attribution import JobKey
from gpuschedd.jobs.state import State


@dataclass(frozen=True, slots=True)
class Holding:
    """What one attempt holds on one GPU."""

    key: JobKey
    held_bytes: int
    uid: int = -1
    may_hide: bool = True  # it runs and shares the GPU: what nobody can match may be its
    runs: bool = True  # False: decided, and nothing of it is there yet


def may_be_there(state: State, job: Job) -> bool:
    """False for one whose launch is under way; a start that no disk took yet may be one."""
    return job.state is not JobState.CONFIGURING or state.storage_blocked is not None


Holdings = Mapping[GpuUuid, Sequence[Holding]]


def holdings_of(state: State) -> dict[GpuUuid, list[Holding]]:
    """What our jobs hold on each GPU, as of the last commit."""
    found: dict[GpuUuid, list[Holding]] = {}
    for job_id in state.holding:
        job = state.jobs[job_id]
        for grant in job.grants:
            runs = may_be_there(state, job)
            may_hide = runs and not job.whole
            holding = Holding((job_id, job.attempt), grant.held_bytes, job.uid, may_hide, runs)
            found.setdefault(grant.uuid, []).append(holding)
    return found
