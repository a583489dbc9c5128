"""What lists show of the requests of live jobs: read once, since a request never changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpusched_client.terms import JobId
from gpuschedd.api.limits import BRIEFS_KEPT_MAX
from gpuschedd.jobs.controller import Controller
from gpuschedd.store.history import History
from gpuschedd.store.records import Brief


class Briefs:
    """Those that were read last. Of a job that is over the database is asked: it may forget it."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._kept: dict[JobId, Brief] = {}  # in the order in which they were read

    def known(self, job_ids: Iterable[JobId]) -> dict[JobId, Brief]:
        """Those of these that need no reading. For any thread."""
        live = self._controller.state.jobs
        found = ((job_id, self._kept.get(job_id)) for job_id in job_ids if job_id in live)
        return {job_id: brief for job_id, brief in found if brief is not None}

    def read(self, history: History, job_ids: Iterable[JobId]) -> dict[JobId, Brief]:
        """Those of these that there are. For a reader thread; `keep` what it finds."""
        job_ids = tuple(job_ids)
        known = self.known(job_ids)
        missing = [job_id for job_id in job_ids if job_id not in known]
        return known | history.briefs(missing) if missing else known

    def keep(self, found: Mapping[JobId, Brief]) -> None:
        """Keep those of live jobs; the oldest go."""
        live = self._controller.state.jobs
        self._kept.update((job_id, found[job_id]) for job_id in found if job_id in live)
        while len(self._kept) > BRIEFS_KEPT_MAX:
            del self._kept[next(iter(self._kept))]
