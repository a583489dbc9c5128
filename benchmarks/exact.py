"""What backfill is worth where each job runs for exactly its estimate: strict order against EASY.

Used by `backfill.py --exact`. The original design published such figures of jobs of its own;
beside each stands ours over a few seeds, and whether it lies within what other jobs alone change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.report import Figure, Report, number
from gpuschedd.core.model import Backfill, Order, Policy
from gpuschedd.replay.engine import Replay, Replayed
from gpuschedd.replay.stats import Figures, figures
from gpuschedd.replay.workload import TraceJob, equal_gpus


class Played(NamedTuple):
    """One replay and its figures."""

    done: Replayed
    found: Figures

    @property
    def utilisation(self) -> float:
        """Work over GPUs and makespan, in percent."""
        return 100 * self.found.utilisation

    @property
    def until_last_start(self) -> float:
        """The same, but only while somebody waited: without the end, when GPUs run empty."""
        ran = [one for one in self.done.ran if one is not None]
        first_s, last_s = min(r.job.submit_s for r in ran), max(r.start_s for r in ran)
        work = sum(r.job.gpus * (min(r.end_s, last_s) - r.start_s) for r in ran)
        return 100 * work / (self.found.gpus * (last_s - first_s))


Pairs = Sequence[tuple[Played, Played]]  # strict order and EASY, of each seed
UTILISATION = {"strict order": 89.5, "EASY": 99.5}  # published, in percent
CHANGES: Mapping[str, tuple[float, Callable[[Figures], float]]] = {  # published, in percent
    "makespan": (-10.1, lambda found: found.makespan_s),
    "mean wait": (-19.8, lambda found: found.waits.mean_s),
    "median wait": (-18.1, lambda found: found.waits.median_s),
    "95th percentile of the waits": (-12.9, lambda found: found.waits.p95_s),
}
REST = (
    "; what is left are GPUs that stay empty for the first of the order, as nothing that waits "
    "fits in and ends in time: a matter of the jobs, and those of the original are unknown"
)


def exact(jobs: Sequence[TraceJob]) -> tuple[TraceJob, ...]:
    """The same, each with its run time as its limit."""
    return tuple(replace(job, limit_s=job.run_s) for job in jobs)


def pairs_of(workloads: Sequence[tuple[TraceJob, ...]], gpus: int, policy: Policy) -> Pairs:
    """Every workload in strict order and with EASY."""

    def played(jobs: tuple[TraceJob, ...], backfill: Backfill) -> Played:
        done = Replay(jobs, equal_gpus(gpus), replace(policy, backfill=backfill)).run()
        return Played(done, figures(done, gpus))

    return [(played(jobs, Backfill.OFF), played(jobs, Backfill.EASY)) for jobs in workloads]


def compare(
    report: Report, workloads: Sequence[Sequence[TraceJob]], gpus: int, policy: Policy
) -> None:
    """By fair-share beside what was published; first come, first served beside both."""
    drawn = [exact(jobs) for jobs in workloads]
    pairs = pairs_of(drawn, gpus, policy)
    for (way, published), found in zip(UTILISATION.items(), zip(*pairs, strict=True), strict=True):
        figure = report.figure(f"utilisation, {way}", "%", [one.utilisation for one in found])
        until = [one.until_last_start for one in found]
        rest = report.figure(f"utilisation until the last start, {way}", "%", until)
        end = f"at the end GPUs run empty, until the last start it is {number(rest.median)} %"
        report.note(beside(figure, published, end + REST))
    _changes(report, "EASY against strict order", pairs)
    by_arrival = pairs_of(drawn, gpus, replace(policy, order=Order.FCFS))
    for name, (_published, part) in CHANGES.items():
        report.figure(f"{name}, first come, first served", "%", changed(by_arrival, part))


def _changes(report: Report, what: str, pairs: Pairs) -> None:
    for name, (published, part) in CHANGES.items():
        figure = report.figure(f"{name}, {what}", "%", changed(pairs, part))
        report.note(beside(figure, published, "other jobs alone do not explain it"))


def changed(pairs: Pairs, part: Callable[[Figures], float]) -> list[float]:
    """By EASY, in percent, of each seed."""
    return [100 * (part(b.found) - part(a.found)) / part(a.found) for a, b in pairs]


def beside(figure: Figure, published: float, reason: str) -> str:
    """A published figure, and why ours is another one."""
    least, most = min(figure.values), max(figure.values)
    within = least <= published <= most
    why = "within what other jobs alone change, seed by seed" if within else reason
    return f"{figure.name}: {number(figure.median)} %, the original design {published:g} %: {why}"
