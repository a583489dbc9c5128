"""How often the GPUs are looked at: less where the driver is dear, and rarely where nobody cares.

Owns the pause between two looks, and no clock.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

COST_SHARE = 0.05  # of the time, at most, in the driver
INTERVAL_FACTOR_MAX = 16
REST_PAUSE_S = 10.0  # the least pause while nothing runs, waits or watches


class Cadence:
    """The pause before the next look. `interval_s` is the configured one, which may change."""

    def __init__(self) -> None:
        self._factor = 1

    def pause_s(self, interval_s: float, *, rests: bool) -> float:
        """Before the next look."""
        return max(interval_s * self._factor, REST_PAUSE_S if rests else 0.0)

    def keep_cheap(self, interval_s: float, cost_s: float, took_s: float) -> None:
        """Jobs wait on the driver's lock while it answers us: look less often when that is dear."""
        share = cost_s / max(interval_s * self._factor + took_s, 1e-3)
        if share > COST_SHARE and self._factor < INTERVAL_FACTOR_MAX:
            self._factor *= 2
            log.info("gpu_sweeps_slowed interval=%.1f share=%.3f", interval_s * self._factor, share)
        elif share < COST_SHARE / 4 and self._factor > 1:
            self._factor //= 2
