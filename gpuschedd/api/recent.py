"""Jobs that ended lately, in memory, so that no list reads the database for them.

What is not here, after a restart or behind very many ends, is read there.
"""

from __future__ import annotations

from collections import OrderedDict

from gpusched_client.terms import JobId
from gpuschedd.core.job import Job
from gpuschedd.jobs.controller import Committed

ENDS_KEPT_S = 600.0  # what `gq` shows without being asked
ENDS_KEPT_MAX = 2_000


class RecentEnds:
    """The last ends, oldest first."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[JobId, Job] = OrderedDict()

    @property
    def jobs(self) -> OrderedDict[JobId, Job]:
        """Final jobs, as committed."""
        return self._jobs

    def after_commit(self, committed: Committed) -> None:
        """Hear of a committed batch."""
        ended = [change.after for change in committed.changes if change.after.is_final]
        for job in ended:
            self._jobs[job.job_id] = job
        if ended:
            self._forget((ended[-1].ended_at_s or 0.0) - ENDS_KEPT_S)

    def _forget(self, before_s: float) -> None:
        while self._jobs:
            oldest = next(iter(self._jobs.values()))
            if len(self._jobs) <= ENDS_KEPT_MAX and (oldest.ended_at_s or 0.0) >= before_s:
                return
            self._jobs.popitem(last=False)
