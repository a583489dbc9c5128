"""Failures: what could not start in this pass, so that what asks as much is not tried again.

Within a pass starts only add load: what failed fails for the rest of it, and so does every larger
request of its class. That is why a long queue costs little.
"""

from __future__ import annotations

from gpuschedd.core.horizon import UNBOUNDED_GPUS
from gpuschedd.core.timeline import Need

# What a failed request did not manage: to sit anywhere now; to sit there past the hold. Who fails
# at the first fails at the second.
NOW, PAST_HOLD = 0, 1


class Failures:
    """Shapes that failed in this pass: a larger request of the same class fails with them."""

    def __init__(self) -> None:
        self._exact: set[tuple[Need, int]] = set()
        self._classes: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        # Per level the fewest whole GPUs that failed with no further wish: the more fail with them.
        self.whole_gpus = [UNBOUNDED_GPUS] * (PAST_HOLD + 1)

    def covers(self, need: Need, level: int) -> bool:
        """True if the request is known to fail."""
        if (need, level) in self._exact:
            return True
        known = self._classes.get((*need[1:2], *need[3:], level))
        if known is not None:
            gpus, size = need.gpus, need.bytes
            for failed_gpus, failed_bytes in known:
                if failed_gpus <= gpus and failed_bytes <= size:
                    self._exact.add((need, level))
                    return True
        return False

    def add(self, need: Need, level: int) -> None:
        """Remember a failure at this level and those above."""
        gpus, size = need.gpus, need.bytes
        for above in range(level, PAST_HOLD + 1):
            self._exact.add((need, above))
            key = (*need[1:2], *need[3:], above)
            known = self._classes.get(key, [])
            if need.whole and need.model is None and not need.card_bytes and not need.nvlink:
                self.whole_gpus[above] = min(self.whole_gpus[above], gpus)
            self._classes[key] = [pair for pair in known if pair[0] < gpus or pair[1] < size] + [
                (gpus, size)
            ]
