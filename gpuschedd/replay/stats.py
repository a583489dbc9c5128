"""Figures of a replay: utilisation, waits, slowdown, promises. Pure; prints nothing."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from gpuschedd.core.model import PromiseOutcome
from gpuschedd.replay.engine import Ran, Replayed

SLOWDOWN_FLOOR_S = 10.0  # shorter jobs would dominate the mean


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits of a group of jobs, in seconds. p95: the smallest wait not exceeded by 95 % of them."""

    jobs: int
    mean_s: float
    median_s: float
    p95_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """All of one replay. `utilisation` = work / (GPUs x makespan)."""

    jobs: int
    left_out: int
    passes: int
    gpus: int
    utilisation: float
    makespan_s: float
    waits: Waits
    bounded_slowdown: float
    by_size: dict[int, Waits]
    by_user: dict[str, Waits]
    promises_kept: int
    promises_broken: int
    broken_by: dict[str, int]

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return asdict(self)


def figures(replayed: Replayed, gpus: int) -> Figures:
    """Of everything that ran. A workload without a job has zeros."""
    ran = [one for one in replayed.ran if one is not None]
    first_s = min((one.job.submit_s for one in ran), default=0.0)
    makespan_s = max((one.end_s for one in ran), default=0.0) - first_s
    work = math.fsum(one.job.gpus * (one.end_s - one.start_s) for one in ran)
    by_size: dict[int, list[Ran]] = defaultdict(list)
    by_user: dict[str, list[Ran]] = defaultdict(list)
    for one in ran:
        by_size[one.job.gpus].append(one)
        by_user[one.job.user].append(one)
    broken = [end for end in replayed.promises if end.outcome in _BROKEN]
    causes = Counter(end.exception.value for end in broken if end.exception is not None)
    return Figures(
        jobs=len(ran),
        left_out=replayed.left_out,
        passes=replayed.passes,
        gpus=gpus,
        utilisation=work / (gpus * makespan_s) if makespan_s > 0 else 0.0,
        makespan_s=makespan_s,
        waits=waits_of(ran),
        bounded_slowdown=_mean([_slowdown(one) for one in ran]),
        by_size={size: waits_of(by_size[size]) for size in sorted(by_size)},
        by_user={user: waits_of(by_user[user]) for user in sorted(by_user)},
        promises_kept=sum(end.outcome is PromiseOutcome.KEPT for end in replayed.promises),
        promises_broken=len(broken),
        broken_by=dict(sorted(causes.items())),
    )


_BROKEN = (PromiseOutcome.BROKEN, PromiseOutcome.LOST)


def waits_of(ran: Iterable[Ran]) -> Waits:
    """The waits of these jobs."""
    waits = sorted(one.start_s - one.job.submit_s for one in ran)
    if not waits:
        return Waits(0, 0.0, 0.0, 0.0, 0.0)
    return Waits(
        jobs=len(waits),
        mean_s=_mean(waits),
        median_s=_median(waits),
        p95_s=waits[math.ceil(0.95 * len(waits)) - 1],
        max_s=waits[-1],
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def _slowdown(one: Ran) -> float:
    run_s = one.end_s - one.start_s
    wait_s = one.start_s - one.job.submit_s
    return max(1.0, (wait_s + run_s) / max(run_s, SLOWDOWN_FLOOR_S))
