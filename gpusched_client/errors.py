"""One tree of errors: wire code, exit status, and whose fault. Knows no transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class GpuschedError(Exception):
    """Base of every error this project raises on purpose.

    `code` is the wire's code, `exit_status` what a command ends with; `data` holds the numbers.
    """

    code: ClassVar[str] = "internal"
    exit_status: ClassVar[int] = 70

    def __init__(self, message: str, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.data: dict[str, Any] = dict(data or {})


class Invalid(GpuschedError):
    """The request is malformed; `data["path"]` names the field."""

    code, exit_status = "invalid", 2


class Infeasible(GpuschedError):
    """The request is well-formed but could never be met on this host."""

    code, exit_status = "infeasible", 65


class TooLarge(GpuschedError):
    """A message or a part of it is over its limit."""

    code, exit_status = "too_large", 65


class Conflict(GpuschedError):
    """The request contradicts the present state."""

    code, exit_status = "conflict", 65


class NotFound(GpuschedError):
    """No such job, GPU or method."""

    code, exit_status = "not_found", 67


class Unavailable(GpuschedError):
    """The daemon cannot be reached, or is about to stop."""

    code, exit_status = "unavailable", 69


class Internal(GpuschedError):
    """A bug of ours."""

    code, exit_status = "internal", 70


class StorageError(GpuschedError):
    """The daemon's state directory cannot be written; nothing was changed."""

    code, exit_status = "storage", 74


class LimitReached(GpuschedError):
    """A limit on what one user may have is reached; try again later."""

    code, exit_status = "limit", 75


class Denied(GpuschedError):
    """The kernel says who you are, and you may not."""

    code, exit_status = "denied", 77


class StillRunning(GpuschedError, TimeoutError):
    """`Client.wait` waited as long as it was told to. Never on the wire."""

    code, exit_status = "limit", 75


class PartlySubmitted(GpuschedError):
    """Of jobs that are more than one message holds, the first parts are submitted: `job_ids`.

    The same call with this `submission_id` submits the others, and gives the ids of all. Its cause
    says why they are not. Never on the wire.
    """

    code, exit_status = "limit", 75

    def __init__(
        self, job_ids: Sequence[int], jobs: int, submission_id: str, why: GpuschedError
    ) -> None:
        super().__init__(
            f"{len(job_ids)} of {jobs} jobs are submitted, {job_ids[0]} to {job_ids[-1]}; not the "
            f"others: {why.message} The same call again with submission_id={submission_id!r} "
            "submits them.",
            {**why.data, "job_ids": list(job_ids), "submission_id": submission_id},
        )
        self.job_ids, self.submission_id = tuple(job_ids), submission_id


BY_CODE: dict[str, type[GpuschedError]] = {
    kind.code: kind
    for kind in (
        Invalid,
        Infeasible,
        TooLarge,
        Conflict,
        NotFound,
        Unavailable,
        Internal,
        StorageError,
        LimitReached,
        Denied,
    )
}


def from_wire(code: str, message: str, data: Mapping[str, Any] | None) -> GpuschedError:
    """The error a response carries; an unknown code (a newer daemon) becomes Internal."""
    return BY_CODE.get(code, Internal)(message, data)
