"""Admission: what could never run is refused at the door, with the numbers and the cure.

Owns feasibility against the largest inventory ever seen. Knows no queue and nothing that runs now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from gpusched_client.errors import Infeasible, Invalid
from gpusched_client.terms import UNKNOWN_MODEL
from gpusched_client.units import bytes_apart, bytes_text
from gpuschedd.core.links import largest_set
from gpuschedd.core.model import (
    AdmittedRequest,
    CardKind,
    Gpu,
    GpuState,
    Inventory,
    Policy,
    Request,
    Topology,
)
from gpuschedd.core.reasons import plural
from gpuschedd.core.timeline import model_matches

GPUS_MAX = 4096  # of one job, unless the host has more

_KindKey = tuple[str, int, int, bool]


def seen(inventory: Inventory, gpus: Iterable[Gpu]) -> Inventory:
    """The largest inventory ever seen, these GPUs included. GPUs in any state count: they exist."""
    gpus = tuple(gpus)
    counts: Counter[_KindKey] = Counter()
    of_kind: dict[_KindKey, list[Gpu]] = {}
    for gpu in gpus:
        key = (gpu.model, gpu.total_bytes, gpu.capacity_bytes, gpu.is_slice)
        counts[key] += 1
        of_kind.setdefault(key, []).append(gpu)
    largest = {key: largest_set(alike) for key, alike in of_kind.items()}
    for kind in inventory.kinds:
        key = (kind.model, kind.total_bytes, kind.capacity_bytes, kind.is_slice)
        counts[key] = max(counts[key], kind.count)
        largest[key] = max(largest.get(key, 0), kind.largest_island)
    return Inventory(
        tuple(
            CardKind(*key[:3], counts[key], largest.get(key, 0), is_slice=key[3])
            for key in sorted(counts)
        ),
        here(inventory, gpus).models_here,
    )


def here(inventory: Inventory, gpus: Iterable[Gpu]) -> Inventory:
    """The same, with these as the GPUs that the host has now; with none, the last ones stay."""
    models = {
        gpu.model for gpu in gpus if gpu.state is not GpuState.LOST and gpu.model != UNKNOWN_MODEL
    }
    return replace(inventory, models_here=tuple(sorted(models)) or inventory.models_here)


def admit(request: Request, inventory: Inventory, policy: Policy) -> AdmittedRequest:
    """The request as it will be placed. Raises Invalid or Infeasible.

    With no inventory yet everything well-formed is accepted and waits. Whose limit may be how long
    is not judged here.
    """
    _check_form(request, inventory)
    if request.gpus == 0 or not inventory.kinds:
        return AdmittedRequest(request)
    kinds = _of_model(request, inventory)
    if request.vram_bytes is None:
        _check_count(request, [kind for kind in kinds if kind.total_bytes >= request.card_bytes])
        return AdmittedRequest(request)
    return _admit_shared(request, request.vram_bytes, kinds, policy)


def _check_form(request: Request, inventory: Inventory) -> None:
    most = max(GPUS_MAX, sum(kind.count for kind in inventory.kinds))
    if not 0 <= request.gpus <= most:
        raise Invalid(f"{request.gpus} GPUs; it must be 0 to {most}.", {"path": "gpus"})
    vram = request.vram_bytes
    if vram is not None and vram <= 0:
        raise Invalid(
            f"vram of {vram} bytes; it must be above 0. Leave --vram out for whole GPUs.",
            {"path": "vram_bytes"},
        )
    if vram is not None and request.gpus == 0:
        raise Invalid("--vram needs at least one GPU.", {"path": "vram_bytes"})
    limit_s = request.time_limit_s
    if limit_s is not None and not 0 < limit_s < float("inf"):
        raise Invalid(
            f"a time limit of {limit_s} s; it must be above 0. Use unlimited for none.",
            {"path": "time_limit_s"},
        )


def _of_model(request: Request, inventory: Inventory) -> list[CardKind]:
    wanted = request.gpu_model
    if wanted is None:
        return list(inventory.kinds)
    kinds = [kind for kind in inventory.kinds if model_matches(wanted, kind.model)]
    if not kinds:
        models = ", ".join(inventory.models_here)
        option = "--mig" if wanted.startswith("MIG ") else "--gpu-model"
        raise Infeasible(
            f'asks model "{wanted}"; this host has {models}. Change {option}.',
            {"gpu_model": wanted, "models": models},
        )
    return kinds


def _check_count(request: Request, kinds: list[CardKind]) -> None:
    """Enough GPUs among these kinds, and joined by NVLink where that is asked."""
    slices = sum(kind.count for kind in kinds if kind.is_slice)
    if request.gpus > 1:
        kinds = [kind for kind in kinds if not kind.is_slice]
    count = sum(kind.count for kind in kinds)
    what = "" if request.gpu_model is None else f" of model {request.gpu_model}"
    if slices and count < request.gpus and (not count or request.gpus <= count + slices):
        raise Infeasible(
            f"asks {plural(request.gpus, 'GPU')}; this host has {plural(count, 'whole GPU')} and "
            f"{plural(slices, 'MIG slice')}{what}, and one process can use one slice only. "
            "Submit a job for each slice.",
            {"gpus": request.gpus, "gpus_here": count, "slices_here": slices},
        )
    if request.gpus > count:
        raise Infeasible(
            f"asks {plural(request.gpus, 'GPU')}; this host has {count}{what}. Lower --gpus.",
            {"gpus": request.gpus, "gpus_here": count},
        )
    island = max((kind.largest_island for kind in kinds), default=0)
    if request.topology is Topology.NVLINK and request.gpus > max(1, island):
        most = f"the largest such set here has {island}" if island > 1 else "none are so here"
        raise Infeasible(
            f"asks {request.gpus} GPUs joined by NVLink; {most}. "
            f"{'Lower --gpus or leave' if island > 1 else 'Leave'} --topology out.",
            {"gpus": request.gpus, "nvlink_gpus": island},
        )


def _admit_shared(
    request: Request, vram: int, kinds: list[CardKind], policy: Policy
) -> AdmittedRequest:
    """Shared where enough cards have room for it and the margin; else whole cards of that size."""
    roomy = [kind for kind in kinds if vram + policy.margin_bytes <= kind.capacity_bytes]
    if roomy and sum(kind.count for kind in roomy) >= request.gpus:
        _check_count(request, roomy)
        return AdmittedRequest(request)
    large = [kind for kind in kinds if vram <= kind.capacity_bytes]
    most = max(kind.capacity_bytes for kind in kinds)
    if most <= 0:
        raise Infeasible(
            "asks an amount of memory; the driver does not say how much the GPUs here have. "
            "Leave --vram out for a whole GPU.",
            {"vram_bytes": vram},
        )
    if not large:
        is_reserved = any(kind.capacity_bytes < kind.total_bytes for kind in kinds)
        beside = " beside what is the driver's" if is_reserved else ""
        raise Infeasible(
            f"asks {bytes_apart(vram, most)} on one GPU; the largest here has "
            f"{bytes_apart(most, vram)}{beside}. Lower --vram.",
            {"vram_bytes": vram, "largest_bytes": most},
        )
    if sum(kind.count for kind in large) < request.gpus:
        count = sum(kind.count for kind in large)
        raise Infeasible(
            f"asks {request.gpus} GPUs with {bytes_text(vram)} each; this host has {count} of that "
            "size. Lower --gpus or --vram.",
            {"gpus": request.gpus, "gpus_here": count, "vram_bytes": vram},
        )
    whole = replace(request, vram_bytes=None, card_bytes=vram)
    _check_count(whole, large)
    return AdmittedRequest(
        whole,
        f"{bytes_text(vram)} leaves no room for the margin of {bytes_text(policy.margin_bytes)} "
        f"on a shared GPU: the job takes {plural(request.gpus, 'whole GPU')}",
    )
