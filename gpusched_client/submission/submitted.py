"""What Client.submit gives back. Apart from the request, since gsub needs no dataclass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """What a submission gives back: the id, the limit it got, and what people should know."""

    id: int
    time_limit_s: int | None = None
    warnings: tuple[str, ...] = ()
