"""What a job finds around it: its environment and the names of its output files. Pure text work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpusched_client import simulation as simclaims

#: Names that would point a job at other GPUs than its own, or pass for ours.
_DROPPED = frozenset(
    {
        b"CUDA_VISIBLE_DEVICES",
        b"CUDA_DEVICE_ORDER",
        b"NVIDIA_VISIBLE_DEVICES",
        b"GPU_DEVICE_ORDINAL",
        b"ROCR_VISIBLE_DEVICES",
        b"HIP_VISIBLE_DEVICES",
        b"ZE_AFFINITY_MASK",
        b"NOTIFY_SOCKET",
        b"LISTEN_FDS",
        b"LISTEN_PID",
        b"LISTEN_FDNAMES",
        b"INVOCATION_ID",
        b"JOURNAL_STREAM",
    }
)
_OURS = b"GPUSCHED_"
_KEPT_OURS = frozenset({b"GPUSCHED_SOCKET"})  # so that a job can submit to the same daemon
DEFAULT_OUTPUT = b"gsub-%j.out"


@dataclass(frozen=True, slots=True)
class Given:
    """What a job was given, as far as its environment tells."""

    job_id: int
    attempt: int
    instance: str
    name: str
    user: str
    submit_dir: bytes
    gpu_uuids: Sequence[str]
    gpu_indices: Sequence[int]
    vram_bytes: int | None  # per GPU; None: whole
    visible_devices: Sequence[str]
    cpu_affinity: str = ""  # the CPUs near its GPUs, as "0-7,64-71"; empty where unknown
    sim_dir: str | None = None


def environment_of(
    submitted: Mapping[bytes, bytes] | Sequence[tuple[bytes, bytes]], given: Given
) -> tuple[tuple[bytes, bytes], ...]:
    """The submitter's environment without what names GPUs, and ours on top."""
    pairs = submitted.items() if isinstance(submitted, Mapping) else submitted
    kept = {
        name: value
        for name, value in pairs
        if name not in _DROPPED and (not name.startswith(_OURS) or name in _KEPT_OURS)
    }
    ours = {
        "CUDA_VISIBLE_DEVICES": ",".join(given.visible_devices),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_VISIBLE_DEVICES": ",".join(given.gpu_uuids) or "void",
        "GPUSCHED_JOB_ID": str(given.job_id),
        "GPUSCHED_ATTEMPT": str(given.attempt),
        "GPUSCHED_INSTANCE": given.instance,
        "GPUSCHED_JOB_NAME": given.name,
        "GPUSCHED_GPU_UUIDS": ",".join(given.gpu_uuids),
        "GPUSCHED_GPU_INDICES": ",".join(map(str, given.gpu_indices)),
        "GPUSCHED_CPU_AFFINITY": given.cpu_affinity,
        "GPUSCHED_VRAM_BYTES": str(given.vram_bytes) if given.vram_bytes is not None else "",
    }
    if given.sim_dir is not None:
        ours[simclaims.ENVIRONMENT_NAME] = given.sim_dir
    kept |= {name.encode(): value.encode() for name, value in ours.items()}
    kept[b"GPUSCHED_SUBMIT_DIR"] = given.submit_dir
    return tuple(kept.items())


def cpu_list(cpus: Iterable[int]) -> str:
    """ "0-7,64-71", as taskset and numactl take it."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def visible_devices(
    policy: str, gpus: Sequence[tuple[str, int]], *, has_slices: bool, is_filtered: bool
) -> list[str]:
    """How CUDA is told its GPUs, each given as (UUID, index).

    `auto`: many programs take numbers only. Behind a device filter the driver numbers what it may
    open from 0; without one the numbers are NVML's, in PCI order. Slices have no number at all.
    """
    if has_slices or policy == "uuid":
        return [uuid for uuid, _ in gpus]
    if is_filtered and policy == "auto":
        return [str(number) for number in range(len(gpus))]
    return [str(index) for _, index in gpus]


def expand(pattern: bytes, given: Given) -> bytes:
    """%j %A job id, %a array index (0: there are no arrays), %x name, %u user, %% a percent sign.

    Other letters stay as they are, as in Slurm.
    """
    values = {
        ord("j"): str(given.job_id).encode(),
        ord("A"): str(given.job_id).encode(),
        ord("a"): b"0",
        ord("x"): given.name.replace("/", "_").encode(),  # a part of a file's name, not of a path
        ord("u"): given.user.encode(),
        ord("%"): b"%",
    }
    out, position = bytearray(), 0
    while position < len(pattern):
        value = values.get(pattern[position + 1]) if _is_mark(pattern, position) else None
        if value is None:
            out.append(pattern[position])
            position += 1
        else:
            out += value
            position += 2
    return bytes(out)


def _is_mark(pattern: bytes, position: int) -> bool:
    return pattern[position : position + 1] == b"%" and position + 1 < len(pattern)
