"""Taking the claim of an attempt, so that nothing of it can start later. Blocks."""

from __future__ import annotations

import logging
from pathlib import Path

from gpuschedd.core.attempt import Observation
from gpuschedd.core.recovery import Recovery
from gpuschedd.gpu.attribution import JobKey
from gpuschedd.run.job_dir import JobDir, JobDirCorrupt, JobDirError
from gpuschedd.run.tracking import Tracked

log = logging.getLogger(__name__)

_TO_FENCE = frozenset({Recovery.REQUEUE_AFTER_FENCE, Recovery.CANCEL_AFTER_FENCE})


class NoRoom(Exception):
    """The host does not take the claim for now, so nobody can say whether the attempt may run."""


def fence_once(jobs_root: Path, key: JobKey) -> Observation | None:
    """Take the claim if it is free; what stands afterwards. None: not even that is possible.

    Raises NoRoom.
    """
    job_dir = JobDir.open(jobs_root, *key)
    try:
        job_dir.fence()
        return job_dir.observe()
    except (OSError, JobDirError) as error:
        log.warning("fence_failed job=%d attempt=%d error=%s", *key, error)
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise NoRoom(str(error)) from error
        return None


def observe_fenced(jobs_root: Path, tracked: Tracked) -> Observation | None:
    """A look, and another after the claim was taken where the first one asks for that."""
    job_dir = JobDir.open(jobs_root, *tracked.key)
    try:
        seen = job_dir.observe()
    except JobDirCorrupt:
        return None
    except OSError as error:
        raise NoRoom(str(error)) from error
    if tracked.verdict(seen) in _TO_FENCE:
        return fence_once(jobs_root, tracked.key)
    return seen


def remove_unstarted(jobs_root: Path, key: JobKey) -> None:
    """The launching process ended without a claim: nobody will look for the directory."""
    try:
        JobDir.open(jobs_root, *key).remove()
    except (OSError, JobDirError) as error:
        log.warning("job_dir_left job=%d attempt=%d error=%s", *key, error)
