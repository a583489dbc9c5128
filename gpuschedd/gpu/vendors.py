"""Which make of GPUs this daemon drives. Another one is a folder beside these and a line here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gpuschedd.config.keys import Config
from gpuschedd.gpu.nvidia.vendor import Nvidia
from gpuschedd.gpu.simulated.vendor import Simulated
from gpuschedd.gpu.source import Vendor


def vendor_of(config: Callable[[], Config], state_dir: Path, *, is_system: bool) -> Vendor:
    """By the configuration at the start."""
    nvidia = Nvidia(config)
    if host := config().simulate:
        return Simulated(nvidia, host, state_dir, is_shared=is_system)
    return nvidia
