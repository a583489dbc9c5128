"""What backfill is worth, with and without limits: 400 jobs of 5 users on 8 GPUs.

Usage: python benchmarks/backfill.py [--base BASE] [--seed N] [--svg FILE] [--write], or --exact,
which asks instead what is won where each job runs for exactly its estimate. BASE (default c9823d2,
which planned by limits alone) is a revision of this clone or a directory: the same jobs go through
its `gpuschedd.replay` in the same run. Two workloads, two loads, limits of nobody, of half and of
all jobs; prints waits over ten seeds, who gets how much of the GPUs, one seed with strict order
against EASY and a plot of the GPUs in use. Deterministic to the last digit. Status 1: a bar is
missed. Without BASE that comparison is left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gpuschedd
from benchmarks import exact
from benchmarks.report import ROOT, Report
from benchmarks.trees import BASE, NoTree, tree_of
from gpuschedd.core.model import Backfill, Policy
from gpuschedd.replay.engine import Ran, Replay, Replayed
from gpuschedd.replay.stats import Figures, figures
from gpuschedd.replay.workload import TraceJob, equal_gpus

GPUS = 8
USERS = 5
SEED = 1
SEEDS = range(1, 11)
EXACT_SEEDS = 5
SIZES = (1, 2, 4, 8)
COUNTS = (240, 100, 52, 8)  # 60/25/13/2 %
BUSY_S, CALM_S = 360.0, 2200.0  # between two arrivals, on average: a load of 5 and of 0.8
HALF_HOUR_S, HOUR_S = 1800.0, 3600.0
THIRDS = ((0.25, 0.79), (0.79, 2.52), (2.52, 8.0))  # h, of the same width by their logarithm
PLOT_COLUMNS = 72
BLOCKS = " ▁▂▃▄▅▆▇█"


# --- the workloads ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job(TraceJob):
    """One that may have no limit and has a command, in a tree too that knows neither."""

    command: str = ""

    @property
    def lasts_s(self) -> float:
        """A job ends after its run time or at its limit."""
        return self.run_s if self.limit_s is None else min(self.run_s, self.limit_s)


class Drawn(NamedTuple):
    """What somebody runs, and the limit it would have."""

    user: int
    command: str
    run_s: float
    limit_s: float


def unlike(rng: random.Random) -> Iterator[Drawn]:
    """0.5 to 4 h, no job like another; people round up, so most end early: to the next half hour.

    Nothing tells them apart: history is that of the user alone.
    """
    while True:
        run_s = float(rng.randrange(1800, 14401))
        yield Drawn(rng.randrange(USERS), "", run_s, _rounded_up(run_s))


def repeated(rng: random.Random) -> Iterator[Drawn]:
    """Each user runs a short, a middle and a long command again and again, each time about as long.

    Typical are 0.25 to 8 h, evenly by their logarithm, with a spread of a fifth; the limit is twice
    that of the command.
    """
    typical_s = [
        [HOUR_S * math.exp(rng.uniform(math.log(least), math.log(most))) for least, most in THIRDS]
        for _ in range(USERS)
    ]
    while True:
        user, which = rng.randrange(USERS), rng.randrange(len(THIRDS))
        usual_s = typical_s[user][which]
        run_s = float(round(usual_s * rng.lognormvariate(0.0, 0.2)))
        yield Drawn(user, f"command{which}", run_s, _rounded_up(2 * usual_s))


def _rounded_up(length_s: float) -> float:
    return math.ceil(length_s / HALF_HOUR_S) * HALF_HOUR_S


def arrivals(rng: random.Random, mean_s: float) -> Iterator[tuple[float, int]]:
    """When each job comes, and how many GPUs it asks."""
    sizes = [size for size, count in zip(SIZES, COUNTS, strict=True) for _ in range(count)]
    rng.shuffle(sizes)
    at_s = 0.0
    for size in sizes:
        at_s += float(round(rng.expovariate(1 / mean_s)))
        yield at_s, size


WORKLOADS = {"unlike": unlike, "repeated": repeated}
LIMITED = {"nobody": 0.0, "half": 0.5, "all": 1.0}  # so many of the jobs have limits


class Case(NamedTuple):
    """One kind of workload: which, who has limits, and how long between two arrivals."""

    workload: str
    limits: str
    arrival_s: float

    def jobs(self, seed: int) -> tuple[Job, ...]:
        """The jobs by arrival: the same whoever has limits."""
        rng, chance = random.Random(seed), random.Random(seed + 1000)
        drawn = WORKLOADS[self.workload](rng)
        return tuple(
            Job(
                name=str(number),
                user=f"user{what.user}",
                submit_s=at_s,
                gpus=size,
                run_s=what.run_s,
                limit_s=what.limit_s if chance.random() < LIMITED[self.limits] else None,
                command=what.command,
            )
            for number, ((at_s, size), what) in enumerate(
                zip(arrivals(rng, self.arrival_s), drawn, strict=False), start=1
            )
        )


# --- replays over all seeds, in this tree or another --------------------------------------------


class Way(NamedTuple):
    """A way to plan: changes of the policy; `in_base`: by the tree to compare with."""

    name: str
    policy: Mapping[str, Any]
    in_base: bool = False


BEFORE = Way("BASE", {}, in_base=True)
EASY = Way("EASY", {})
UNLEARNED = Way("EASY, nothing learned", {"learn_lengths": False})
STRICT = Way("strict order", {"backfill": "off"})
NONE_PAST = Way("before-reservation", {"backfill": "before-reservation"})
WAYS = {
    "nobody": (BEFORE, UNLEARNED, EASY),
    "half": (BEFORE, UNLEARNED, EASY),
    "all": (STRICT, NONE_PAST, BEFORE, EASY),  # with limits there is nothing to guess
}
DETAIL = Case("unlike", "all", BUSY_S)


@dataclass(frozen=True)
class Row:
    """Waits in seconds: means over the seeds, of the longest wait too. `sizes`: GPUs -> those."""

    tree: str
    mean_s: float
    p95_s: float
    sizes: dict[str, tuple[float, float]]  # mean and longest
    kept: int
    broken: int
    means_s: list[float]  # of each seed

    @property
    def longest_8_s(self) -> float:
        """The longest wait of a job that asks all GPUs."""
        return self.sizes["8"][1]


def policy_of(changes: Mapping[str, Any]) -> Policy:
    """The default but for these, without what a launch and a kill take."""
    changes = dict(changes)
    if "backfill" in changes:
        changes["backfill"] = Backfill(changes["backfill"])
    return Policy(kill_grace_s=0.0, launch_allowance_s=0.0, **changes)


def replayed(case: Case, seed: int, way: Way) -> Replayed:
    """One run by this tree."""
    return Replay(case.jobs(seed), equal_gpus(GPUS), policy_of(way.policy)).run()


def row_here(case: Case, way: Way) -> Row:
    """All seeds by this tree."""
    found = [figures(replayed(case, seed, way), GPUS) for seed in SEEDS]
    return Row(
        tree=str(Path(gpuschedd.__file__).resolve().parent.parent),
        mean_s=_mean([each.waits.mean_s for each in found]),
        p95_s=_mean([each.waits.p95_s for each in found]),
        sizes={
            str(size): (
                _mean([each.by_size[size].mean_s for each in found]),
                _mean([each.by_size[size].max_s for each in found]),
            )
            for size in SIZES
        },
        kept=sum(each.promises_kept for each in found),
        broken=sum(each.promises_broken for each in found),
        means_s=[each.waits.mean_s for each in found],
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def row_in(tree: Path, case: Case, way: Way) -> Row:
    """All seeds by that tree, in a process of its own."""
    asked = json.dumps([case, way])
    done = subprocess.run(
        [sys.executable, __file__, "--row", asked],
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        check=True,
    )
    row = Row(**json.loads(done.stdout))
    assert row.tree == str(tree.resolve()), f"{row.tree} was measured instead of {tree}"
    return row


Rows = dict[tuple[Case, str], Row]


def measured(base: Path | None) -> Rows:
    """Every case in every way; as many at a time as there are cores. Without a base not its own."""
    cases = [Case(w, who, a) for w in WORKLOADS for a in (BUSY_S, CALM_S) for who in LIMITED]
    trees = {False: ROOT} if base is None else {False: ROOT, True: base}
    asked = [(case, way) for case in cases for way in WAYS[case.limits] if way.in_base in trees]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = pool.map(lambda one: row_in(trees[one[1].in_base], *one), asked)
        return {(case, way.name): row for (case, way), row in zip(asked, rows, strict=True)}


# --- what has to hold ---------------------------------------------------------------------------


class Bar(NamedTuple):
    """EASY against the base, where nobody, half or all have limits: at most this change."""

    limits: str
    arrival_s: float
    what: str
    at_most: float  # in percent


MEAN, LONGEST_8 = "mean wait", "longest wait of 8-GPU jobs"
BARS = (
    Bar("nobody", BUSY_S, LONGEST_8, -20),
    Bar("nobody", BUSY_S, MEAN, +20),
    Bar("nobody", CALM_S, LONGEST_8, -60),
    Bar("nobody", CALM_S, MEAN, -35),
    Bar("half", BUSY_S, LONGEST_8, -20),
    Bar("half", BUSY_S, MEAN, +8),
    Bar("half", CALM_S, LONGEST_8, -20),
    Bar("half", CALM_S, MEAN, +8),
    Bar("all", BUSY_S, LONGEST_8, +3),
    Bar("all", BUSY_S, MEAN, +3),
    Bar("all", CALM_S, LONGEST_8, +3),
    Bar("all", CALM_S, MEAN, +3),
)


@dataclass(frozen=True)
class Contest:
    """Two users whose queues never run dry: who gets how much of the GPUs."""

    shares: tuple[float, float]
    lengths_h: tuple[tuple[float, float], tuple[float, float]]  # of each one's jobs, from and to
    limited: bool
    jobs: tuple[int, int]

    @property
    def fair(self) -> float:
        """The part that the first should get."""
        return self.shares[0] / sum(self.shares)

    def part(self) -> float:
        """The part that the first gets, while both have jobs waiting; the first fifth is left."""
        policy, shares = policy_of({}), {str(user): self.shares[user] for user in (0, 1)}
        done = Replay(self._queues(), equal_gpus(GPUS), policy, shares).run()
        ran = [one for one in done.ran if one is not None]
        until_s = min(max(one.start_s for one in ran if one.job.user == user) for user in shares)
        got = dict.fromkeys(shares, 0.0)
        for one in ran:
            inside_s = min(one.end_s, until_s) - max(one.start_s, until_s / 5)
            got[one.job.user] += one.job.gpus * max(0.0, inside_s)
        return got["0"] / math.fsum(got.values())

    def _queues(self) -> list[Job]:
        rng = random.Random(SEED)
        return [
            Job(
                name=f"{user}-{number}",
                user=str(user),
                submit_s=0.0,
                gpus=1,
                run_s=(run_s := float(round(HOUR_S * rng.uniform(*self.lengths_h[user])))),
                limit_s=_rounded_up(run_s) if self.limited else None,
            )
            for user in (0, 1)
            for number in range(self.jobs[user])
        ]


SHORT_H, LONG_H = (0.25, 0.75), (6.0, 10.0)
CONTESTS = {
    "shares 3:1": Contest((3, 1), ((1, 1.1), (1, 1.1)), True, (1200, 400)),
    "shares 3:1, no limits": Contest((3, 1), ((1, 1.1), (1, 1.1)), False, (1200, 400)),
    "short against long jobs": Contest((1, 1), (SHORT_H, LONG_H), True, (1600, 100)),
    "the same, no limits": Contest((1, 1), (SHORT_H, LONG_H), False, (1600, 100)),
}
POINTS_OFF_MAX = 0.05


def change(before: float, after: float) -> float:
    """In percent."""
    return 100 * (after - before) / before


def judged(rows: Rows) -> Iterator[tuple[str, str, str, bool]]:
    """What, its figure, its bar, whether it holds."""
    for bar in BARS:
        case = Case("unlike", bar.limits, bar.arrival_s)
        if (case, BEFORE.name) not in rows:
            continue
        pair = [rows[case, way.name] for way in (BEFORE, EASY)]
        before, after = (row.mean_s if bar.what == MEAN else row.longest_8_s for row in pair)
        found = change(before, after)
        what = f"{bar.limits} limited, {bar.arrival_s:g} s: {bar.what}"
        yield what, f"{found:+.1f} %", f"at most {bar.at_most:+g} %", found <= bar.at_most
    broken = sum(row.broken for (_case, way), row in rows.items() if way != BEFORE.name)
    yield "promises broken", str(broken), "0", broken == 0
    for name, contest in CONTESTS.items():
        part = contest.part()
        holds = abs(part - contest.fair) <= POINTS_OFF_MAX
        yield f"{name}: the first gets", f"{part:.1%}", f"{contest.fair:.0%} +- 5 points", holds


# --- text ---------------------------------------------------------------------------------------


def waits_table(rows: Rows, base: str) -> Iterator[str]:
    """Hours: a block for each case, a line for each way."""
    sizes = "".join(f"{f'{size}-GPU':>9}{'longest':>9}" for size in SIZES)
    head = f"{'waits (h)':30}{'mean':>8}{'p95':>8}{sizes}{'kept':>8}{'broken':>8}"
    before: Case | None = None
    for (case, way), row in rows.items():
        if case != before:
            yield ""
            if before is None or before.workload != case.workload:
                yield from (f"Jobs {case.workload}, over {len(SEEDS)} seeds", "", head)
            yield f"{case.limits} limited, every {case.arrival_s:g} s"
        before = case
        waits = "".join(
            f"{mean_s / HOUR_S:9.1f}{most_s / HOUR_S:9.1f}" for mean_s, most_s in row.sizes.values()
        )
        means = f"{row.mean_s / HOUR_S:8.2f}{row.p95_s / HOUR_S:8.1f}"
        yield f"  {base if way == BEFORE.name else way:28}{means}{waits}{row.kept:8}{row.broken:8}"


FIGURES: tuple[tuple[str, Callable[[Figures], float], str], ...] = (
    ("utilisation (%)", lambda f: 100 * f.utilisation, "9.2f"),
    ("makespan (h)", lambda f: f.makespan_s / HOUR_S, "9.2f"),
    ("mean wait (h)", lambda f: f.waits.mean_s / HOUR_S, "9.2f"),
    ("median wait (h)", lambda f: f.waits.median_s / HOUR_S, "9.2f"),
    ("p95 wait (h)", lambda f: f.waits.p95_s / HOUR_S, "9.2f"),
    ("longest wait (h)", lambda f: f.waits.max_s / HOUR_S, "9.2f"),
    ("longest, 8 GPUs (h)", lambda f: f.by_size[8].max_s / HOUR_S, "9.2f"),
    ("bounded slowdown", lambda f: f.bounded_slowdown, "9.2f"),
)


def detail_table(strict: Figures, easy: Figures) -> Iterator[str]:
    """One seed: strict order, EASY and the change."""
    yield f"{'':22}{'strict':>9}{'EASY':>11}{'change':>12}"
    for name, value, form in FIGURES:
        before, after = value(strict), value(easy)
        yield f"{name:22}{before:{form}}  {after:{form}}{change(before, after):>+10.1f} %"


def bound(jobs: Sequence[TraceJob]) -> float:
    """No schedule uses more: work / (GPUs x the shortest possible makespan).

    That is at least the time to do all work that arrives after any instant, on all GPUs, and at
    least the end of each job if it started on arrival.
    """
    first_s = jobs[0].submit_s
    shortest_s = max(job.submit_s + job.run_s for job in jobs) - first_s
    left = 0.0
    for job in reversed(jobs):
        left += job.gpus * job.run_s
        shortest_s = max(shortest_s, job.submit_s - first_s + left / GPUS)
    return left / (GPUS * shortest_s)


def occupancy(ran: Sequence[Ran | None], until_s: float, columns: int) -> list[float]:
    """Mean GPUs in use in each of so many equal spans of time."""
    width_s = until_s / columns
    used = [0.0] * columns
    for one in ran:
        if one is None:
            continue
        for column in range(int(one.start_s / width_s), columns):
            left_s, right_s = column * width_s, (column + 1) * width_s
            if left_s >= one.end_s:
                break
            used[column] += one.job.gpus * (min(right_s, one.end_s) - max(left_s, one.start_s))
    return [amount / width_s for amount in used]


def text_plot(name: str, ran: Sequence[Ran | None], until_s: float) -> str:
    """One line of blocks, full height = all GPUs."""
    levels = occupancy(ran, until_s, PLOT_COLUMNS)
    top = len(BLOCKS) - 1
    return f"{name:8}|" + "".join(BLOCKS[round(level / GPUS * top)] for level in levels) + "|"


def svg_plot(strict: Replayed, easy: Replayed, until_s: float) -> str:
    """Both schedules as GPUs x time, one box per job and GPU, coloured by job size."""
    wide, high, lane = 1200, 2 * GPUS * 16 + 90, 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    scale = (wide - 20) / until_s
    for row, (name, done) in enumerate((("strict order", strict), ("EASY backfill", easy))):
        top = 24 + row * (GPUS * lane + 34)
        parts.append(f'<text x="10" y="{top - 6}">{name}: GPUs 0 to 7 over time</text>')
        parts.append(
            f'<rect x="10" y="{top}" width="{wide - 20}" height="{GPUS * lane}" fill="#eee"/>'
        )
        for one in done.ran:
            parts += _boxes(one, top, lane, scale) if one is not None else []
    for at, size in enumerate(SIZES):
        parts.append(
            f'<rect x="{10 + at * 80}" y="{high - 22}" width="12" height="12" '
            f'fill="{COLOURS[size]}"/><text x="{26 + at * 80}" y="{high - 12}">{size} GPU</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


COLOURS = {1: "#4c78a8", 2: "#72b7b2", 4: "#f2a33c", 8: "#d1495b"}


def _boxes(one: Ran, top: int, lane: int, scale: float) -> list[str]:
    left, wide = 10 + one.start_s * scale, (one.end_s - one.start_s) * scale
    colour = COLOURS[one.job.gpus]
    return [
        f'<rect x="{left:.2f}" y="{top + gpu * lane}" width="{wide:.2f}" height="{lane - 1}" '
        f'fill="{colour}" stroke="white" stroke-width="0.4"/>'
        for gpu in one.gpus
    ]


def detail(seed: int, svg: Path | None) -> Iterator[str]:
    """One seed where all have limits."""
    jobs = DETAIL.jobs(seed)
    strict_run, easy_run = replayed(DETAIL, seed, STRICT), replayed(DETAIL, seed, EASY)
    strict, easy = figures(strict_run, GPUS), figures(easy_run, GPUS)
    until_s = max(strict.makespan_s, easy.makespan_s) + jobs[0].submit_s
    if svg is not None:
        svg.write_text(svg_plot(strict_run, easy_run, until_s), encoding="utf-8")
    yield f"seed {seed}, {DETAIL.limits} limited, every {DETAIL.arrival_s:g} s"
    yield from detail_table(strict, easy)
    yield f"{'upper bound of utilisation':34}{100 * bound(jobs):.2f} %"
    yield f"promises under EASY: {easy.promises_kept} kept, {easy.promises_broken} broken"
    yield f"GPUs in use over {until_s / HOUR_S:.1f} h (full block = {GPUS})"
    yield text_plot("strict", strict_run.ran, until_s)
    yield text_plot("EASY", easy_run.ran, until_s)


def report(base: str, seed: int, svg: Path | None) -> tuple[list[str], bool]:
    """All lines; True if each bar is met."""
    lines: list[str] = []
    with ExitStack() as stack:
        try:
            rows = measured(stack.enter_context(tree_of(base)))
        except NoTree as error:
            lines.append(f"no comparison: {error}")
            rows = measured(None)
    lines += [*waits_table(rows, base), ""]
    strict, easy = (rows[DETAIL, way.name].means_s for way in (STRICT, EASY))
    better = sum(one > other for one, other in zip(strict, easy, strict=True))
    lines += [f"EASY has the lower mean wait in {better} of {len(SEEDS)} seeds", ""]
    lines.append(f"{'EASY against ' + base:60}{'found':>10}  bar")
    met = True
    for what, found, bar, holds in judged(rows):
        met = met and holds
        lines.append(f"{what:60}{found:>10}  {bar:18}{'ok' if holds else 'missed'}")
    return [*lines, "", *detail(seed, svg)], met


def report_exact(*, write: bool) -> None:
    """What is won where estimates are exact, over the first few seeds."""
    found = Report("backfill", "Every job runs for exactly its estimate.", option="--exact")
    workloads = [DETAIL.jobs(seed) for seed in SEEDS[:EXACT_SEEDS]]
    exact.compare(found, workloads, GPUS, policy_of({}))
    found.finish(write=write)


def main() -> None:
    """Parse and print; the other processes of a run measure one row each."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--base", default=BASE, help="revision or directory to compare with")
    options.add_argument("--seed", type=int, default=SEED, help="of the one in detail")
    options.add_argument("--svg", type=Path, help="write its plot of both schedules as SVG")
    options.add_argument("--exact", action="store_true", help="jobs as long as their estimates")
    options.add_argument("--write", action="store_true", help="rewrite the section of README.md")
    options.add_argument("--row", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.row is not None:
        case, way = json.loads(asked.row)
        print(json.dumps(asdict(row_here(Case(*case), Way(*way)))))
    elif asked.exact:
        report_exact(write=asked.write)
    else:
        found = Report("backfill", "400 jobs of 5 users on 8 GPUs, with and without limits.")
        lines, met = report(asked.base, asked.seed, asked.svg)
        found.block(lines)
        found.finish(write=asked.write)
        sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
