"""One sample's outcome: what may be placed, what was seen of each job, and what is amiss. Types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpusched_client.terms import GpuUuid
from gpuschedd.core.model import Gpu
from gpuschedd.gpu.attribution import JobKey
from gpuschedd.gpu.foreign import Foreign
from gpuschedd.gpu.metering import Seen
from gpuschedd.gpu.source import GpuProcess


@dataclass(frozen=True, slots=True)
class Violation:
    """A job's process on a GPU that was not granted to the job."""

    key: JobKey
    pid: int
    uuid: GpuUuid


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One sample's outcome."""

    gpus: tuple[Gpu, ...]
    seen: Mapping[tuple[JobKey, GpuUuid], Seen] = field(default_factory=dict)
    peaks: Mapping[tuple[JobKey, GpuUuid], int] = field(default_factory=dict)
    violations: tuple[Violation, ...] = ()
    leftovers: tuple[Violation, ...] = ()  # of attempts that are over
    listed: frozenset[GpuUuid] = frozenset()  # whose processes this sample tells
    problems: tuple[str, ...] = ()  # what needs a person
    strangers: Mapping[GpuUuid, str] = field(default_factory=dict)  # beside our jobs, by name


@dataclass(slots=True)
class Count:
    """One GPU in the making."""

    own: dict[JobKey, list[GpuProcess]] = field(default_factory=dict)
    foreign: list[Foreign] = field(default_factory=list)
    ownerless: int = 0
    charged: int = 0  # of it at first: to the only job
    hidden: int = 0  # of it: came since our jobs are there
    given: int = 0  # of that: counted as our jobs', up to what they hold
