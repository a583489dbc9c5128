"""The logs of daemons that a test has started: shown with its report where it fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

SHOWN_LINES = 80


class Logged(Protocol):
    """Something that writes a log while a test runs."""

    @property
    def log_name(self) -> str:
        """Whose log it is."""

    def log_text(self) -> str:
        """All of it. May raise: what it ran on may be gone."""

    def is_over(self) -> bool:
        """Whether it writes no more, so that a later test has nothing to do with it."""


_kept: list[Logged] = []


def keep(logged: Logged) -> None:
    """Show its log if the test that runs now fails, or a later one while it goes on."""
    if logged not in _kept:
        _kept.append(logged)


def forget_those_that_are_over() -> None:
    """Another test begins: leave it those that still run, such as a daemon of the whole module."""
    _kept[:] = [logged for logged in _kept if not logged.is_over()]


def sections() -> Iterator[tuple[str, str]]:
    """The end of each log below a title, for a report."""
    for logged in _kept:
        try:
            lines = logged.log_text().splitlines()
        except Exception as error:  # a report that fails would hide why the test did
            lines = [f"cannot be read: {error!r}"]
        yield f"log of {logged.log_name}", "\n".join(lines[-SHOWN_LINES:])
