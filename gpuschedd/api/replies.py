"""The bytes of a reply. A list of more than a message may hold is answered with fewer rows."""

from __future__ import annotations

from dataclasses import replace

from gpusched_client.errors import TooLarge
from gpusched_client.wire import framing
from gpusched_client.wire.job_messages import JobsResult, QueueResult, WaitResult
from gpusched_client.wire.message import Response

REASON = "a response holds no more bytes; ask for the rest by page"


def encode(msgid: int, response: Response) -> bytes:
    """Raises TooLarge for what is no list."""
    while True:
        try:
            return framing.encode_response(msgid, response.to_wire())
        except TooLarge:
            fewer = _fewer(response)
            if fewer is None:
                raise
            response = fewer


def _fewer(response: Response) -> Response | None:
    """Half of the rows, so that the pages before or behind follow on; None: nothing can go."""
    half = len(getattr(response, "jobs", ())) // 2
    if half == 0:
        return None
    if isinstance(response, JobsResult):  # newest last: `before_id` goes on from the first
        return replace(response, jobs=response.jobs[-half:], cut=REASON)
    if isinstance(response, WaitResult) and response.jobs[0].command is not None:
        # One row for each that was waited for; their words can be asked for.
        bare = [replace(view, command=None, argv=None, cwd=None) for view in response.jobs]
        return replace(response, jobs=tuple(bare))
    if isinstance(response, QueueResult):  # `after` goes on from the last
        return replace(response, jobs=response.jobs[:half], cut=REASON)
    return None
