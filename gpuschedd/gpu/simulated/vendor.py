"""Simulated GPUs behind the vendor's seam: they stand for NVIDIA's, so jobs are told the same."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gpusched_client.simulation import DIRECTORY_NAME, ENVIRONMENT_NAME, SYSTEM_DIR
from gpuschedd.gpu.nvidia.vendor import Nvidia
from gpuschedd.gpu.simulated.source import SimulatedGpus
from gpuschedd.gpu.source import DeviceAccess, GpuSource, GrantedGpu, HealthRules


class Simulated:
    """Satisfies source.Vendor."""

    def __init__(self, stands_for: Nvidia, host: str, state_dir: Path, *, is_shared: bool) -> None:
        """`is_shared`: any local user's jobs claim memory here (system mode)."""
        self._stands_for = stands_for
        self._host = host
        self._claims_dir = SYSTEM_DIR if is_shared else state_dir / DIRECTORY_NAME
        self._is_shared = is_shared
        self.dropped_variables = stands_for.dropped_variables
        self.oom_patterns = stands_for.oom_patterns

    def open(self) -> GpuSource:
        """The claims directory."""
        return SimulatedGpus(self._host, self._claims_dir, shared=self._is_shared)

    def health_rules(self) -> HealthRules:
        """Theirs; nothing is reported of a simulated card."""
        return self._stands_for.health_rules()

    def variables(self, gpus: Sequence[GrantedGpu], *, is_filtered: bool) -> dict[str, str]:
        """Theirs, and where to claim memory. A number would be that of a real GPU."""
        found = self._stands_for.variables(gpus, is_filtered=is_filtered)
        named = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus)}
        return found | named | {ENVIRONMENT_NAME: os.fspath(self._claims_dir)}

    def can_filter(self, gpus: Sequence[GrantedGpu]) -> bool:
        """As far as the host has nodes of the same numbers."""
        return self._stands_for.can_filter(gpus)

    def device_access(self, gpus: Sequence[GrantedGpu]) -> DeviceAccess:
        """By the nodes of the same numbers, where the host has any."""
        return self._stands_for.device_access(gpus)
