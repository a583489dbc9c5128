"""Where CUDA's count of the GPUs is NVML's: only there may a job be told numbers. Pure.

With CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA numbers the GPUs that it can open by their place on the bus,
and skips one that is lost or drained: from there on each number is another GPU's. Unknown is a
difference too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from gpuschedd.gpu.nvidia.mig import MIG_WITHOUT_SLICES
from gpuschedd.gpu.source import GpuInfo, GpuReading


def numbered(
    inventory: Iterable[GpuInfo],
    readings: Iterable[GpuReading],
    drained: Collection[str],
    count: int,
) -> tuple[tuple[GpuInfo, ...], str | None]:
    """The GPUs with the numbers that CUDA has for them, or without any and why not.

    `count`: of the GPUs that the host has, by the driver or the kernel, whichever says more.
    """
    gpus = tuple(inventory)
    why = _difference(gpus, {reading.uuid: reading for reading in readings}, drained, count)
    if why is not None:
        return gpus, f"CUDA may count the GPUs otherwise than nvidia-smi ({why}): jobs get UUIDs"
    return tuple(replace(gpu, ordinal=gpu.index) for gpu in gpus), None


def _difference(
    gpus: tuple[GpuInfo, ...],
    readings: dict[str, GpuReading],
    drained: Collection[str],
    count: int,
) -> str | None:
    if any(gpu.parent_uuid is not None or gpu.blocked == MIG_WITHOUT_SLICES for gpu in gpus):
        return "some are in MIG mode"
    present = {gpu.index for gpu in gpus}
    missing = sorted(set(range(count)) - present)
    if missing or len(gpus) != count:
        return f"GPU {missing[0] if missing else count} is not there"
    for gpu in gpus:
        reading = readings.get(gpu.uuid)
        if reading is None or reading.fault not in (None, "unsupported"):
            return f"GPU {gpu.index} does not answer"
        if gpu.uuid in drained:
            return f"GPU {gpu.index} is drained"
    places = [gpu.pci for gpu in sorted(gpus, key=lambda gpu: gpu.index)]
    known = [place.casefold() for place in places if place is not None]
    if len(gpus) > 1 and (len(known) < len(gpus) or known != sorted(known)):
        return "the driver's order is not that of the bus"
    return None
