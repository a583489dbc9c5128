"""How good the expectations were since the daemon began: of each user, and of all.

For people who judge them; nothing is decided by it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from gpuschedd.core.model import Start

ERRORS_KEPT = 100  # of the last runs of one user
ERRORS_KEPT_OF_ALL = 1_000
USERS_MAX = 10_000


@dataclass(slots=True)
class Tally:
    """`errors`: |took - expected| / the longer of both, in 0..1, of the last runs that count."""

    errors: deque[float]
    by_guess: int = 0  # starts that a guess allowed
    heads: int = 0  # starts of jobs that were head before
    late_heads: int = 0  # of these, later than first expected

    @property
    def median_error(self) -> float | None:
        """None: nothing has run yet."""
        return median(self.errors) if self.errors else None

    def note_start(self, start: Start, now_s: float) -> None:
        """A start that is durable."""
        self.by_guess += start.guessed
        if start.first_head is not None:
            self.heads += 1
            self.late_heads += now_s > start.first_head.expected_at_s


@dataclass(slots=True)
class Expectations:
    """The tallies."""

    total: Tally = field(default_factory=lambda: Tally(deque(maxlen=ERRORS_KEPT_OF_ALL)))
    _of: dict[int, Tally] = field(default_factory=dict)

    def of(self, uid: int) -> Tally:
        """One user's."""
        return self._of.get(uid) or Tally(deque())

    def started(self, start: Start, now_s: float) -> None:
        """A job was placed."""
        self.total.note_start(start, now_s)
        self._own(start.uid).note_start(start, now_s)

    def ended(self, uid: int, took_s: float, expected_s: float) -> None:
        """A run that counts took so long."""
        error = abs(took_s - expected_s) / max(took_s, expected_s)
        self.total.errors.append(error)
        self._own(uid).errors.append(error)

    def _own(self, uid: int) -> Tally:
        tally = self._of.pop(uid, None) or Tally(deque(maxlen=ERRORS_KEPT))
        self._of[uid] = tally  # who was busy last stays longest
        if len(self._of) > USERS_MAX:
            del self._of[next(iter(self._of))]
        return tally
