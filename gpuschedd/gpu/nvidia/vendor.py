"""NVIDIA behind the vendor's seam."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuschedd.config.keys import Config
from gpuschedd.gpu.nvidia import device_nodes, environment
from gpuschedd.gpu.nvidia.health_rules import XidRules
from gpuschedd.gpu.nvidia.oom import OOM_PATTERNS
from gpuschedd.gpu.source import DeviceAccess, GpuSource, GrantedGpu, HealthRules


class Nvidia:
    """Satisfies source.Vendor."""

    dropped_variables = environment.DROPPED
    oom_patterns = OOM_PATTERNS

    def __init__(self, config: Callable[[], Config]) -> None:
        """`config`: as it is now; it may be read again while the daemon runs."""
        self._config = config

    def open(self) -> GpuSource:
        """NVML in a child process."""
        from gpuschedd.gpu.nvidia.source import NvmlGpus  # a simulated host needs no pynvml

        return NvmlGpus(lambda: self._config().nvml)

    def health_rules(self) -> HealthRules:
        """By the Xids that the configuration lists."""
        nvml = self._config().nvml
        return XidRules(nvml.quarantine_xids, nvml.reboot_xids)

    def variables(self, gpus: Sequence[GrantedGpu], *, is_filtered: bool) -> dict[str, str]:
        """CUDA's."""
        return environment.variables(self._config().visible_devices, gpus, is_filtered=is_filtered)

    def can_filter(self, gpus: Sequence[GrantedGpu]) -> bool:
        """Where the driver has nodes, and says which is whose."""
        numbered = all(gpu.info is not None and gpu.info.minor is not None for gpu in gpus)
        return bool(device_nodes.gpu_nodes()) and numbered

    def device_access(self, gpus: Sequence[GrantedGpu]) -> DeviceAccess:
        """The nodes of these GPUs and slices, and what every job may open."""
        infos = [gpu.info for gpu in gpus]
        minors = [info.minor if info is not None else None for info in infos]
        rights = [
            node
            for info in infos
            if info is not None and info.parent_uuid is not None
            for node in info.device_nodes
            if node.startswith(device_nodes.CAPABILITY_NODES)
        ]
        allowed = device_nodes.allowed(minors, rights)
        why = "no minor of a GPU is known" if None in minors else "no /dev/nvidia* here"
        return DeviceAccess(allowed, "" if allowed is not None else why)
