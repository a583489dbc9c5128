"""Which make of GPUs this daemon drives. Another one is a folder beside these and a line here."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from gpuschedd.config.keys import Config
from gpuschedd.gpu.nvidia.vendor import Nvidia
from gpuschedd.gpu.simulated.vendor import Simulated
from gpuschedd.gpu.source import Vendor

log = logging.getLogger(__name__)


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[int | str, ...]:
    """What CUDA_VISIBLE_DEVICES of the daemon's own environment leaves it; () where it is not set.

    As CUDA reads it: up to the first entry that is no GPU; where none is left, no GPU is.
    """
    told = environment.get("CUDA_VISIBLE_DEVICES")
    if told is None:
        return ()
    found: list[int | str] = []
    for word in map(str.strip, told.split(",")):
        if word.isdecimal():
            found.append(int(word))
        elif word.startswith(("GPU-", "MIG-")):
            found.append(word)
        else:
            break
    return tuple(found) or ("none",)


def with_visible_gpus(config: Config) -> Config:
    """In user mode, where the configuration names none: a simulated host has GPUs of its own."""
    if config.gpus or config.simulate:
        return config
    return replace(config, gpus=visible_gpus())


def vendor_of(config: Callable[[], Config], state_dir: Path, *, is_system: bool) -> Vendor:
    """By the configuration at the start."""
    nvidia = Nvidia(config)
    told = () if is_system or config().simulate else visible_gpus()
    if told and config().gpus == told:
        names = ", ".join(map(str, told))
        log.warning("gpus_by_environment text=CUDA_VISIBLE_DEVICES is taken as gpus: %s", names)
    if host := config().simulate:
        return Simulated(nvidia, host, state_dir, is_shared=is_system)
    return nvidia
