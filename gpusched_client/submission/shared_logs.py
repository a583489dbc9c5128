"""Which of a user's live jobs write to the same file: the second start empties the first's log.

Jobs are asked for only where a file's name is the same for every job.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
from typing import TYPE_CHECKING

from gpusched_client.terms import fill_pattern, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpusched_client.wire.job_messages import JobView
    from gpusched_client.wire.submit_messages import JobRequest

_BY_ID = rb"(?<!%)(?:%%)*%\d*[jJA]"


def shared_logs(
    request: JobRequest, jobs_of: Callable[[int], Iterable[JobView]]
) -> tuple[str, ...]:
    """A warning where a live job of the same user has a file of this one's as its log.

    `jobs_of` gives all about the live jobs of a uid, newest first.
    """
    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    patterns = {request.output, request.error} - {None}
    own = {
        path: pattern
        for pattern in patterns
        if pattern is not None and not re.search(_BY_ID, pattern)
        for path in [_path(pattern, request.cwd, 0, request.name or "job", user)]
        if _is_emptied(path)
    }
    if not own:
        return ()
    for job in jobs_of(uid):
        for path in _paths_of(job):
            if path in own:
                return (
                    f"{printable(own[path])} is the log of job {job.job_id} as well "
                    f"({job.state.lower()}): the later start empties it; put %j into the name",
                )
    return ()


def _paths_of(job: JobView) -> list[bytes]:
    name, user = job.name or "", job.user or ""
    patterns = [pattern for pattern in (job.output, job.error) if pattern]
    return [_path(pattern, job.cwd or b"/", job.job_id, name, user) for pattern in patterns]


def _path(pattern: bytes, cwd: bytes, job_id: int, name: str, user: str) -> bytes:
    host = os.uname().nodename
    filled = fill_pattern(pattern, job_id=job_id, name=name, user=user, host=host)
    return os.path.realpath(os.path.join(cwd, filled))


def _is_emptied(path: bytes) -> bool:
    """Whether a job's start empties it: a file, or what will be one."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return True
