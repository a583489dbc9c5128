"""What rows that are read together have in common, kept once: a long queue is to fit in memory."""

from __future__ import annotations

from typing import Any

from gpuschedd.core.model import Request


class CommonValues:
    """Equal values as one object, for as long as one reading takes."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._numbers: dict[float, float] = {}
        #: By the values of their columns.
        self.requests: dict[tuple[Any, ...], Request] = {}

    def text(self, text: str) -> str:
        """A name, a command: many jobs have the same."""
        return self._texts.setdefault(text, text)

    def number(self, number: float) -> float:
        """A time: those that were submitted together have the same."""
        return self._numbers.setdefault(number, number)
