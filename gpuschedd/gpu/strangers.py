"""Who else was on a job's GPUs: it may be the cause of the job's end."""

from __future__ import annotations

from collections.abc import Mapping

from gpusched_client.terms import GpuUuid
from gpuschedd.core.job import Job
from gpuschedd.gpu.facts import GpuFacts
from gpuschedd.gpu.source import GpuInfo
from gpuschedd.system.clock import boottime_s

STRANGER_BLAME_S = 30.0  # who was there so long before a job's end may be the cause of it


class Strangers:
    """Those that were last seen beside jobs, by GPU."""

    def __init__(self) -> None:
        self._seen: dict[GpuUuid, tuple[str, float]] = {}  # their words, boot time

    def take(self, facts: GpuFacts, at_s: float) -> None:
        """As a sample has them."""
        self._seen |= {uuid: (text, at_s) for uuid, text in facts.strangers.items()}

    def beside(self, job: Job, known: Mapping[GpuUuid, GpuInfo]) -> str | None:
        """By name and amount, for each of its GPUs; None: it was alone."""
        since_s = boottime_s() - STRANGER_BLAME_S
        texts = []
        for grant in job.grants:
            text, at_s = self._seen.get(grant.uuid, ("", 0.0))
            if text and at_s >= since_s:
                index = known[grant.uuid].index if grant.uuid in known else "?"
                texts.append(f"GPU {index} was in use by {text} as well")
        return "; ".join(texts) or None
