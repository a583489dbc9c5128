"""What an attempt is given: the spec for its supervisor, and the bounds of its unit.

Made for each attempt, out of the job, its request, the GPUs it was granted, and the host.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpusched_client.terms import GpuUuid, Launch, Mode, fill_pattern
from gpuschedd.core.job import Job
from gpuschedd.gpu.source import DeviceAccess, GpuInfo, GrantedGpu, Vendor
from gpuschedd.jobs.state import State
from gpuschedd.run.job_dir import Spec
from gpuschedd.run.launchers.direct import Bounds
from gpuschedd.store.records import Payload

#: Names that would pass for ours, or let a job speak to PID 1 in its unit's name.
_DROPPED = frozenset(
    {
        *(b"NOTIFY_SOCKET", b"LISTEN_FDS", b"LISTEN_PID", b"LISTEN_FDNAMES"),
        *(b"INVOCATION_ID", b"JOURNAL_STREAM"),
    }
)
_OURS = b"GPUSCHED_"
_KEPT_OURS = frozenset({b"GPUSCHED_SOCKET"})  # so that a job can submit to the same daemon
DEFAULT_OUTPUT = b"gsub-%j.out"


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """Where and how this daemon's jobs run."""

    state_dir: Path
    instance: str
    is_system: bool
    launch: Launch
    exec_jobs: bool

    @property
    def jobs_root(self) -> Path:
        """Parent of the job directories."""
        return self.state_dir / "jobs"

    @property
    def scripts_dir(self) -> Path:
        """Where submitted scripts lie while their attempt lives."""
        return self.state_dir / "scripts"

    @property
    def hint_socket(self) -> Path:
        """Where supervisors send their hints."""
        return self.state_dir / "hint.sock"


class SpecMaker:
    """Makes specs and bounds."""

    def __init__(self, state: State, context: LaunchContext, vendor: Vendor) -> None:
        self._state = state
        self._context = context
        self._vendor = vendor

    def granted(self, job: Job, known: Mapping[GpuUuid, GpuInfo]) -> list[GrantedGpu]:
        """The job's GPUs in the order of their indices. `known`: every GPU seen in this run."""
        indices = self._state.gpu_index_of()
        gpus = [
            GrantedGpu(grant.uuid, indices.get(grant.uuid, -1), known.get(grant.uuid))
            for grant in job.grants
        ]
        return sorted(gpus, key=lambda gpu: gpu.index)

    def device_access(self, gpus: Sequence[GrantedGpu]) -> DeviceAccess:
        """What the unit may open. Blocks. Raises OSError or DeviceMissing."""
        return self._vendor.device_access(gpus)

    def bounds(self, job: Job, access: DeviceAccess) -> Bounds:
        """What the attempt's unit is held to."""
        return Bounds(
            devices=access,
            memory_bytes=job.memory_bytes,
            cpus=job.cpus,
            tasks_max=self._state.config.jobs.max_processes,
            grace_s=self._grace_s(job),
        )

    def spec(self, job: Job, payload: Payload, gpus: Sequence[GrantedGpu]) -> Spec:
        """The whole of what the supervisor is told."""
        context, config = self._context, self._state.config
        cpus = near_cpus(gpus)
        return Spec(
            job_id=job.job_id,
            attempt=job.attempt,
            instance=context.instance,
            mode=Mode.SYSTEM.value if context.is_system else Mode.USER.value,
            launch=context.launch.value,
            user=job.user,
            uid=job.uid,
            name=job.name,
            argv=payload.argv,
            script=payload.script,
            cwd=payload.cwd,
            environment=self._environment(job, payload, gpus, cpus),
            umask=payload.umask,
            rlimits=payload.rlimits,
            output=_log_path(payload.output or DEFAULT_OUTPUT, job),
            error=None if payload.error is None else _log_path(payload.error, job),
            time_limit_s=job.request.time_limit_s,
            kill_grace_s=self._grace_s(job),
            hint_socket=os.fspath(context.hint_socket),
            scripts_dir=os.fspath(context.scripts_dir),
            allow_system_uid=config.jobs.system_users,
            no_exec=not context.exec_jobs,
            cpu_set=_cpu_set(cpus if config.bind_cpus else (), payload.affinity),
            oom_patterns=self._vendor.oom_patterns,
            checked=payload.checked,
            niceness=payload.niceness,
        )

    def _grace_s(self, job: Job) -> float:
        """As decided with the attempt; a probe is none, and has today's."""
        decided_s = job.decided_grace_s
        return self._state.policy.kill_grace_s if decided_s is None else decided_s

    def _environment(
        self,
        job: Job,
        payload: Payload,
        gpus: Sequence[GrantedGpu],
        cpus: Sequence[int],
    ) -> tuple[tuple[bytes, bytes], ...]:
        """The submitter's environment without what names GPUs, and ours on top."""
        dropped = _DROPPED | self._vendor.dropped_variables
        kept = {
            name: value
            for name, value in payload.environment
            if name not in dropped and (not name.startswith(_OURS) or name in _KEPT_OURS)
        }
        is_filtered = self._context.launch is Launch.PID1 and self._vendor.can_filter(gpus)
        vram_bytes = job.request.vram_bytes
        ours = {
            "GPUSCHED_JOB_ID": str(job.job_id),
            "GPUSCHED_ATTEMPT": str(job.attempt),
            "GPUSCHED_INSTANCE": self._context.instance,
            "GPUSCHED_JOB_NAME": job.name,
            "GPUSCHED_GPU_UUIDS": ",".join(gpu.uuid for gpu in gpus),
            "GPUSCHED_GPU_INDICES": ",".join(str(gpu.index) for gpu in gpus),
            "GPUSCHED_CPU_AFFINITY": cpu_list(cpus),
            "GPUSCHED_VRAM_BYTES": str(vram_bytes) if vram_bytes is not None else "",
        }
        ours |= self._vendor.variables(gpus, is_filtered=is_filtered)
        kept |= {name.encode(): value.encode() for name, value in ours.items()}
        kept[b"GPUSCHED_SUBMIT_DIR"] = payload.cwd
        if payload.script_path is not None:
            kept[b"GPUSCHED_SCRIPT"] = payload.script_path
        return tuple(kept.items())


def _cpu_set(near: Sequence[int], asked: Sequence[int]) -> tuple[int, ...]:
    """CPUs that are both near the GPUs and the submitter's; the latter where none is both."""
    if not near or not asked:
        return tuple(near or asked)
    return tuple(sorted(set(near) & set(asked))) or tuple(asked)


def near_cpus(gpus: Sequence[GrantedGpu]) -> tuple[int, ...]:
    """The CPUs near all of these GPUs; those near any where they have none in common."""
    near = [set(gpu.info.cpus) for gpu in gpus if gpu.info is not None]
    if not near or not all(near):
        return ()
    return tuple(sorted(set.intersection(*near) or set.union(*near)))


def cpu_list(cpus: Iterable[int]) -> str:
    """ "0-7,64-71", as taskset and numactl take it."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _log_path(pattern: bytes, job: Job) -> bytes:
    host = os.uname().nodename
    return fill_pattern(pattern, job_id=job.job_id, name=job.name, user=job.user, host=host)
