"""Which GPUs are left out because they hang the driver, and when they are tried again.

A circuit breaker for each GPU by the driver's index: two failures in a row open it; after a
cool-down, twice as long each time, it is half open and has one try. What a GPU can be used without
has breakers of its own.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpusched_client.terms import GpuUuid

FAILURES_MAX = 2  # then the GPU is left out
COOL_DOWN_MIN_S, COOL_DOWN_MAX_S = 60.0, 3600.0


@dataclass(slots=True)
class CircuitBreaker:
    """How often one GPU hung a sweep, and until when it is left out."""

    failures: int = 0
    cool_down_s: float = COOL_DOWN_MIN_S
    open_until_s: float | None = None
    function: str = ""  # of the driver, in which it hung last

    def half_open(self) -> None:
        """It is asked again, and has one try."""
        if self.open_until_s is not None:
            self.open_until_s = None
            self.failures = FAILURES_MAX - 1


class CircuitBreakers:
    """Those of all GPUs."""

    def __init__(self) -> None:
        self._breakers: dict[int, CircuitBreaker] = {}

    def fail(self, index: int, function: str) -> bool:
        """A GPU hung or crashed the child. True: it is left out from now on."""
        breaker = self._breakers.setdefault(index, CircuitBreaker())
        breaker.failures += 1
        breaker.function = function
        if breaker.failures < FAILURES_MAX:
            return False
        breaker.open_until_s = time.monotonic() + breaker.cool_down_s
        breaker.cool_down_s = min(COOL_DOWN_MAX_S, 2 * breaker.cool_down_s)
        return True

    def open_indices(self) -> frozenset[int]:
        """Those that are left out."""
        breakers = self._breakers.items()
        return frozenset(index for index, each in breakers if each.open_until_s is not None)

    def cooled_down(self) -> set[int]:
        """Those that have been left out for long enough."""
        now_s = time.monotonic()
        return {
            index
            for index, breaker in self._breakers.items()
            if breaker.open_until_s is not None and now_s >= breaker.open_until_s
        }

    def left_out(self, known: Mapping[int, frozenset[GpuUuid]]) -> frozenset[GpuUuid]:
        """GPUs and slices that are left out now; those that have cooled down get their try."""
        for index in self.cooled_down():
            self._breakers[index].half_open()
        return frozenset(
            uuid for index in self.open_indices() for uuid in known.get(index, frozenset())
        )

    def half_open_all(self) -> None:
        """The indices are others' now."""
        for breaker in self._breakers.values():
            breaker.half_open()

    def answered(self) -> None:
        """What they were asked went well: failures are forgotten."""
        for breaker in self._breakers.values():
            if breaker.open_until_s is None:
                breaker.failures = 0

    def silent(self) -> dict[int, str]:
        """Who is left out, and in what it hung."""
        breakers = self._breakers.items()
        return {i: breaker.function for i, breaker in breakers if breaker.open_until_s is not None}

    def clear(self) -> None:
        """People look after what hangs: all are asked again after that."""
        self._breakers.clear()


_LOSES = {
    "topology": "its links are not known, so it counts as badly connected",
    "events": "its Xids are not seen",
    "recount": "that it is well again is not seen",
    "accounts": "its peaks are sampled",
}
_ALL_LOSE = {
    "events": "the driver's events hang or crash it ({}): no Xid is seen, GPUs are judged by their "
    "health checks alone",
    "recount": "the driver hangs when it counts its GPUs ({}): a new one is not seen",
}


class PartBreakers:
    """Parts of the driver that hang or crash it, for one GPU or (-1) for all."""

    def __init__(self) -> None:
        self._parts: defaultdict[str, CircuitBreakers] = defaultdict(CircuitBreakers)

    def fail(self, part: str, indices: Iterable[int], function: str) -> bool:
        """Both of a pair are to blame. True: the part is left out for one of them from now on."""
        opened = [self._parts[part].fail(index, function) for index in indices]
        return any(opened)

    def left_out(self) -> dict[str, list[int]]:
        """By part, for a child that is started now: those that have cooled down get their try."""
        for breakers in self._parts.values():
            breakers.left_out({})
        return {part: sorted(each.open_indices()) for part, each in self._parts.items()}

    def answered(self, parts: Iterable[str]) -> None:
        """These went well: their failures are forgotten."""
        for part in parts:
            self._parts[part].answered()

    def warnings(self) -> tuple[str, ...]:
        """What is not known for that."""
        texts = []
        for part, breakers in self._parts.items():
            for index, function in sorted(breakers.silent().items()):
                if index < 0:
                    texts.append(_ALL_LOSE[part].format(function))
                else:
                    texts.append(f"GPU {index} hangs the driver ({function}): {_LOSES[part]}")
        return tuple(texts)

    def has_cooled_down(self, part: str) -> bool:
        """Whether a new child would ask for that part again."""
        return bool(self._parts[part].cooled_down())

    def half_open_all(self) -> None:
        """The indices are others' now."""
        for breakers in self._parts.values():
            breakers.half_open_all()

    def clear(self) -> None:
        """People have looked after it."""
        self._parts.clear()
