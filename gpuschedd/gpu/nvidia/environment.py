"""How a job is told its GPUs: CUDA's variables, and those of tools around it."""

from __future__ import annotations

from collections.abc import Sequence

from gpuschedd.gpu.source import GrantedGpu

#: They would point a job at other GPUs than its own, other makers' included.
DROPPED = frozenset(
    {
        b"CUDA_VISIBLE_DEVICES",
        b"CUDA_DEVICE_ORDER",
        b"NVIDIA_VISIBLE_DEVICES",
        b"GPU_DEVICE_ORDINAL",
        b"ROCR_VISIBLE_DEVICES",
        b"HIP_VISIBLE_DEVICES",
        b"ZE_AFFINITY_MASK",
    }
)


def variables(policy: str, gpus: Sequence[GrantedGpu], *, is_filtered: bool) -> dict[str, str]:
    """For a job that holds these; `policy` is the configuration's visible_devices."""
    has_slices = any(gpu.info is not None and gpu.info.parent_uuid for gpu in gpus)
    named = [(str(gpu.uuid), gpu.info.ordinal if gpu.info else None) for gpu in gpus]
    visible = visible_devices(policy, named, has_slices=has_slices, is_filtered=is_filtered)
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(visible),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus) or "void",
    }


def visible_devices(
    policy: str, gpus: Sequence[tuple[str, int | None]], *, has_slices: bool, is_filtered: bool
) -> list[str]:
    """How CUDA is told its GPUs, each given as (UUID, number or None where that is not certain).

    `auto`: many programs take numbers only. Behind a device filter the driver numbers what it may
    open from 0; without one the numbers are those of all GPUs, in PCI order. Slices have no number
    at all, and a wrong one is somebody else's GPU.
    """
    uuids = [uuid for uuid, _ in gpus]
    if has_slices or policy == "uuid":
        return uuids
    if is_filtered and policy == "auto":
        return [str(number) for number in range(len(gpus))]
    if any(number is None for _, number in gpus):
        return uuids
    return [str(number) for _, number in gpus]
