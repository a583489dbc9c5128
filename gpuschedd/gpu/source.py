"""The seam to a make of GPUs: samples, a job's variables and device nodes, health. Types only.

`nvidia` and `simulated` stand behind it; nothing above knows which. Unknown is None with a reason
beside it, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gpusched_client.terms import UNKNOWN_MODEL, GpuUuid

#: What is wrong with one GPU in one sweep: gone from the bus, not answering as it should, in need
#: of a reset, or without a memory figure for good.
Fault = Literal["lost", "unread", "reset", "unsupported"]

FIRST_SLICE_INDEX = 100
UNOPENED_PREFIX = "unopened-"


class GpuSourceDown(Exception):
    """No GPU facts can be had now; the text says why and what helps.

    `is_absent`: nothing on this host could ever give any, as it is installed now.
    """

    def __init__(self, text: str, *, is_absent: bool = False) -> None:
        super().__init__(text)
        self.is_absent = is_absent


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """Identity of one GPU: what does not change while the driver stays loaded.

    `coherent`: its memory is a node of the host's, so the page cache may sit there.
    `integrated`: it shares the host's memory.
    """

    uuid: GpuUuid
    index: int  # the driver's order, for display; slices: FIRST_SLICE_INDEX * (parent + 1) + slot
    minor: int | None  # of /dev/nvidiaN; None where the driver gives none
    model: str
    total_bytes: int | None
    reserved_bytes: int = 0  # the driver's own, never handed out
    pci: str | None = None
    shareable: bool = True  # False in exclusive-process mode
    parent_uuid: GpuUuid | None = None  # of a slice
    gpu_instance: int | None = None  # of a slice
    compute_instance: int | None = None
    island: int | None = None  # GPUs with the same number are connected by NVLink
    joined: tuple[GpuUuid, ...] = ()  # by NVLink, also with those of another island
    links: tuple[tuple[GpuUuid, int], ...] = ()  # score to each peer, larger is better
    cpus: tuple[int, ...] = ()
    numa: int | None = None
    integrated: bool = False
    coherent: bool = False
    index_is_past: bool = False  # it is missing, and another GPU has its index now
    ordinal: int | None = None  # by which programs count it, while that is certain
    blocked: str | None = None  # why nothing may be placed here, e.g. compute mode prohibited
    device_nodes: tuple[str, ...] = ()  # what a device filter must let through for it

    @property
    def is_hosts(self) -> bool:
        """Its memory is the host's as well: what is in use there need not be a GPU's doing."""
        return self.coherent or self.integrated


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process with memory on a GPU. The start time guards against a reused pid.

    `start_ticks` None: the driver lists it, but there is no such process by now.
    """

    pid: int
    start_ticks: int | None
    used_bytes: int | None
    graphics_only: bool = False
    infrastructure: bool = False  # the MPS server: it works for others


@dataclass(frozen=True, slots=True)
class HealthChecks:
    """What the driver says of a GPU's health; None: it does not say."""

    recovery_action: int | None = None  # field 230; 0: none is needed
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    uncorrected_errors: int | None = None  # volatile: since the driver was loaded
    compute_mode: int | None = None
    drained: bool | None = None
    slowdown: int | None = None  # why it runs below its clocks, in the vendor's bits


@dataclass(frozen=True, slots=True)
class GpuModes:
    """Whom the driver lets onto a GPU, looked at before a launch. None: it does not say."""

    compute_mode: int | None = None
    drained: bool | None = None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU in one sweep.

    `processes` may be of an earlier sweep: then `listed_boottime_s` is when that was taken, and
    `listed_used_bytes` what was in use at that time.
    """

    uuid: GpuUuid
    used_bytes: int | None  # without the driver's reserve
    free_bytes: int | None
    utilization: float | None = None  # percent
    processes: tuple[GpuProcess, ...] | None = None  # None: not answered
    listed_used_bytes: int | None = None
    listed_boottime_s: float | None = None
    power_w: float | None = None
    process_utilization: Mapping[int, float] = field(default_factory=dict)  # percent by pid
    fault: Fault | None = None
    reason: str | None = None  # of the fault, or why a figure is None
    checks: HealthChecks | None = None  # None: not asked in this sweep
    modes: GpuModes | None = None  # None: not asked in this sweep


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """Something that the driver reported: a "fault" with its number, or "suspect" (look again)."""

    uuid: GpuUuid
    kind: Literal["fault", "suspect"]
    number: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One sweep over all GPUs. A failed sweep gives none: the last one is kept, marked stale."""

    taken_boottime_s: float
    inventory: tuple[GpuInfo, ...]
    readings: tuple[GpuReading, ...]
    events: tuple[GpuEvent, ...] = ()
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()  # of the warnings: what needs a person
    unopened: tuple[tuple[GpuInfo, GpuReading], ...] = ()  # counted by the driver, never opened
    cost_s: float = 0.0  # spent in the driver
    calls: int = 0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What the daemon needs of the next sweep."""

    busy_uuids: frozenset[GpuUuid] = field(default_factory=frozenset)  # our jobs are there
    fresh_uuids: frozenset[GpuUuid] = field(default_factory=frozenset)  # list processes, now
    launch_uuids: frozenset[GpuUuid] = field(default_factory=frozenset)  # the same, and modes
    health: bool = False  # ask for the health checks, now


@dataclass(frozen=True, slots=True)
class ProcessPeak:
    """What the driver kept of one process on one GPU."""

    peak_bytes: int | None
    utilization: float | None  # percent, average over its life
    started_at_s: float  # Unix time


DriverAccounts = Mapping[GpuUuid, Mapping[int, ProcessPeak]]


class GpuSource(Protocol):
    """A source of samples. `sample` may take long or fail; it never blocks the loop."""

    @property
    def name(self) -> str:
        """For people: what the samples come from."""

    @property
    def is_simulated(self) -> bool:
        """True where no driver is behind it."""

    async def sample(self, want: SampleRequest) -> Sample:
        """One sweep. Raises GpuSourceDown."""

    async def accounts(self, pids: Mapping[GpuUuid, Iterable[int]]) -> DriverAccounts:
        """What the driver kept of these processes; empty where it keeps nothing."""

    async def release(self) -> None:
        """Release the driver, so that an admin may partition or reset a GPU."""

    async def close(self) -> None:
        """End what was started."""


@dataclass(frozen=True, slots=True)
class Illness:
    """Why a GPU takes no new jobs. `until_reboot`: no check makes it well again."""

    reason: str
    until_reboot: bool = False


class HealthRules(Protocol):
    """What a vendor's reports mean for a GPU's fitness."""

    def fault_text(self, number: int) -> str:
        """A reported fault in words."""

    def of_fault(self, number: int) -> Illness | None:
        """What a reported fault does to the GPU; None: it is written down only."""

    def of_uncorrected_errors(self) -> Illness | None:
        """What new uncorrectable memory errors do to it."""

    def slowdown_text(self, reasons: int) -> str | None:
        """Why it is slowed down, in words; None: by nothing that people should look at."""

    def action_text(self, action: int) -> str:
        """What the driver asks for, in words."""


@dataclass(frozen=True, slots=True)
class GrantedGpu:
    """One GPU of a job: its display index, -1 where unknown, and what the last inventory says."""

    uuid: GpuUuid
    index: int
    info: GpuInfo | None


@dataclass(frozen=True, slots=True)
class DeviceAccess:
    """The device nodes that a job may open, as DeviceAllow= takes them.

    `allowed` None: no filter is possible here, for the reason in `why_open`.
    """

    allowed: tuple[str, ...] | None
    why_open: str = ""


class DeviceMissing(Exception):
    """A granted GPU has no device node: PID 1 would skip it in silence."""


class Vendor(Protocol):
    """One make of GPUs: a source of samples, and all that a job's launch needs to know of it."""

    @property
    def dropped_variables(self) -> frozenset[bytes]:
        """Names in a submitter's environment that would point a job at other GPUs than its own."""

    @property
    def oom_patterns(self) -> tuple[str, ...]:
        """Regular expressions, in lower case, for what programs print when VRAM is exhausted."""

    def open(self) -> GpuSource:
        """The source of samples. Called once."""

    def health_rules(self) -> HealthRules:
        """By the configuration as it is now."""

    def variables(self, gpus: Sequence[GrantedGpu], *, is_filtered: bool) -> dict[str, str]:
        """What tells a job its GPUs, in the order given; `is_filtered`: it can open no others."""

    def can_filter(self, gpus: Sequence[GrantedGpu]) -> bool:
        """Whether device access to these can be told from access to others."""

    def device_access(self, gpus: Sequence[GrantedGpu]) -> DeviceAccess:
        """For a job that holds exactly these. Blocks. Raises OSError or DeviceMissing."""


def select_gpus(inventory: Iterable[GpuInfo], wanted: tuple[int | str, ...]) -> tuple[GpuInfo, ...]:
    """The GPUs that the configuration names by index, UUID or unique UUID prefix; () means all.

    A slice is named also by its GPU.
    """
    gpus = tuple(inventory)
    if not wanted:
        return gpus
    return tuple(gpu for gpu in gpus if any(_is_named(gpu, name) for name in wanted))


def display_order(gpu: GpuInfo) -> tuple[int, int]:
    """Sorts GPUs as people count them: the driver's order, slices where their GPU would be."""
    if gpu.parent_uuid is None:
        return gpu.index, 0
    return parent_index(gpu.index), gpu.index


def parent_index(slice_index: int) -> int:
    """The index of the GPU that a slice is part of."""
    return slice_index // FIRST_SLICE_INDEX - 1


def unknown_names(inventory: Iterable[GpuInfo], wanted: tuple[int | str, ...]) -> tuple[str, ...]:
    """Configured names that match no GPU here: a typo, or one that is gone."""
    gpus = tuple(inventory)
    return tuple(str(name) for name in wanted if not any(_is_named(gpu, name) for gpu in gpus))


def _is_named(gpu: GpuInfo, name: int | str) -> bool:
    index = display_order(gpu)[0]  # of a slice: its GPU's
    if str(name) in (str(gpu.index), str(index)):
        return True
    uuids = (gpu.uuid, gpu.parent_uuid or "")
    return isinstance(name, str) and len(name) >= 8 and any(u.startswith(name) for u in uuids)


def stand_in_uuid(index: int) -> GpuUuid:
    """What stands for the UUID of a GPU that was never opened, so that it can be drained."""
    return GpuUuid(f"{UNOPENED_PREFIX}{index}")


def unopened(index: int, fault: Fault, reason: str) -> tuple[GpuInfo, GpuReading]:
    """A GPU that the driver counts and does not open: its index, and why."""
    uuid = stand_in_uuid(index)
    reading = GpuReading(uuid, None, None, fault=fault, reason=reason)
    return GpuInfo(uuid, index, None, UNKNOWN_MODEL, None), reading


class UsedGpu:
    """The last reading of one GPU: bytes in use and percent busy, None where unknown."""

    __slots__ = ("used_bytes", "utilization")

    def __init__(self, used_bytes: int | None, utilization: float | None) -> None:
        self.used_bytes = used_bytes
        self.utilization = utilization
