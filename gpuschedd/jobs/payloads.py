"""What jobs run, for their launches: in the database, and of those that start at once in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from gpusched_client.terms import JobId
from gpuschedd.jobs.batch import Batch
from gpuschedd.store.records import Payload
from gpuschedd.store.writer import Store

PAYLOADS_MAX = 8  # their launches are about to ask for them; one is 1 MiB at most

InDatabase = Callable[[Callable[[Store], Any]], Awaitable[Any]]


class LaunchPayloads:
    """Gives each launch its payload."""

    def __init__(self, in_database: InDatabase) -> None:
        self._in_database = in_database
        self._kept: OrderedDict[JobId, Payload] = OrderedDict()

    def keep(self, batch: Batch) -> None:
        """Those of the jobs that a written batch has both added and placed."""
        for job_id, payload in batch.payloads.items():
            job = batch.job(job_id)
            if job is not None and job.holds_gpus:
                self._kept[job_id] = payload
        while len(self._kept) > PAYLOADS_MAX:
            self._kept.popitem(last=False)

    async def take(self, job_id: JobId) -> Payload:
        """What a job runs and in which environment; it is not kept any longer."""
        kept = self._kept.pop(job_id, None)
        if kept is not None:
            return kept
        found: Payload = await self._in_database(lambda store: store.payload(job_id))
        return found
