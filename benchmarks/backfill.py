"""Strict order against EASY: 400 jobs of 5 users on 8 GPUs, and what backfill is worth.

Usage: python benchmarks/backfill.py [--svg FILE] [--seed N]. Prints a table, waits per job size,
the upper bound of utilisation, the spread over 10 seeds and a plot of GPU occupancy for both.
Deterministic to the last digit.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from gpuschedd.core.model import Backfill, Order, Policy
from gpuschedd.replay.engine import Ran, Replay, Replayed
from gpuschedd.replay.stats import Figures, Waits, figures
from gpuschedd.replay.workload import TraceJob, equal_gpus

GPUS = 8
JOBS = 400
USERS = 5
SEED = 1
SEEDS = 10
ARRIVAL_S = 360.0
SIZES = (1, 2, 4, 8)
COUNTS = (240, 100, 52, 8)  # 60/25/13/2 %
PLOT_COLUMNS = 72
BLOCKS = " ▁▂▃▄▅▆▇█"


def workload(seed: int) -> tuple[TraceJob, ...]:
    """Sizes 60/25/13/2 %, 0.5 to 4 h, one arrival per 6 minutes on average, limits rounded up."""
    rng = random.Random(seed)
    sizes = [size for size, count in zip(SIZES, COUNTS, strict=True) for _ in range(count)]
    rng.shuffle(sizes)
    jobs, at_s = [], 0.0
    for number, size in enumerate(sizes):
        at_s += float(round(rng.expovariate(1 / ARRIVAL_S)))
        run_s = float(rng.randrange(1800, 14401))
        # People round up, so jobs mostly end early: to the next half hour.
        limit_s = math.ceil(run_s / 1800) * 1800.0
        jobs.append(
            TraceJob(
                name=str(number + 1),
                user=f"user{rng.randrange(USERS)}",
                submit_s=at_s,
                gpus=size,
                run_s=run_s,
                limit_s=limit_s,
            )
        )
    return tuple(jobs)


def replayed(seed: int, backfill: Backfill) -> Replayed:
    """One run under the default policy but for the backfill."""
    policy = Policy(
        order=Order.PRIORITY, backfill=backfill, kill_grace_s=0.0, launch_allowance_s=0.0
    )
    return Replay(workload(seed), equal_gpus(GPUS), policy).run()


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


def change(before: float, after: float) -> str:
    """In percent."""
    return f"{100 * (after - before) / before:+.1f} %" if before else "-"


ROWS: tuple[tuple[str, Callable[[Figures], float], str], ...] = (
    ("utilisation (%)", lambda f: 100 * f.utilisation, "9.2f"),
    ("makespan (h)", lambda f: f.makespan_s / 3600, "9.2f"),
    ("mean wait (min)", lambda f: f.waits.mean_s / 60, "9.1f"),
    ("median wait (min)", lambda f: f.waits.median_s / 60, "9.1f"),
    ("p95 wait (min)", lambda f: f.waits.p95_s / 60, "9.1f"),
    ("longest wait (min)", lambda f: f.waits.max_s / 60, "9.1f"),
    ("bounded slowdown", lambda f: f.bounded_slowdown, "9.2f"),
)


def table(strict: Figures, easy: Figures) -> list[str]:
    """Strict, EASY and the change."""
    lines = [f"{'':22}{'strict':>9}{'EASY':>11}{'change':>12}"]
    for name, value, form in ROWS:
        before, after = value(strict), value(easy)
        lines.append(f"{name:22}{before:{form}}  {after:{form}}{change(before, after):>12}")
    return lines


def by_size(strict: Figures, easy: Figures) -> list[str]:
    """Mean and longest wait of each size: a policy that starves 8-GPU jobs has the best mean."""
    head = f"{'waits (min)':14}{'jobs':>6}{'mean strict':>14}{'mean EASY':>12}"
    lines = [head + f"{'max strict':>13}{'max EASY':>11}"]
    for size in strict.by_size:
        one, other = strict.by_size[size], easy.by_size[size]
        lines.append(_size_row(f"{size} GPU{'s' if size > 1 else ''}", one, other))
    lines.append(_size_row("all", strict.waits, easy.waits))
    return lines


def _size_row(name: str, strict: Waits, easy: Waits) -> str:
    return (
        f"{name:14}{strict.jobs:>6}{strict.mean_s / 60:>14.1f}{easy.mean_s / 60:>12.1f}"
        f"{strict.max_s / 60:>13.1f}{easy.max_s / 60:>11.1f}"
    )


def spread() -> list[str]:
    """Least, mean and most over the seeds."""
    pairs = [
        tuple(figures(replayed(seed, mode), GPUS) for mode in (Backfill.OFF, Backfill.EASY))
        for seed in range(1, SEEDS + 1)
    ]
    lines = [
        f"{f'over {SEEDS} seeds':22}{'strict: least':>14}{'mean':>9}{'most':>9}"
        f"{'EASY: least':>14}{'mean':>9}{'most':>9}"
    ]
    for name, value, _form in ROWS:
        row = f"{name:22}"
        for side in (0, 1):
            found = [value(pair[side]) for pair in pairs]
            row += f"{min(found):>14.1f}{math.fsum(found) / SEEDS:>9.1f}{max(found):>9.1f}"
        lines.append(row)
    better = sum(pair[1].waits.mean_s < pair[0].waits.mean_s for pair in pairs)
    lines.append(f"EASY has the lower mean wait in {better} of {SEEDS} seeds")
    return lines


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


def report(seed: int, svg: Path | None) -> list[str]:
    """Everything that is printed."""
    jobs = workload(seed)
    strict_run, easy_run = replayed(seed, Backfill.OFF), replayed(seed, Backfill.EASY)
    strict, easy = figures(strict_run, GPUS), figures(easy_run, GPUS)
    until_s = max(strict.makespan_s, easy.makespan_s) + jobs[0].submit_s
    if svg is not None:
        svg.write_text(svg_plot(strict_run, easy_run, until_s), encoding="utf-8")
    return [
        f"{JOBS} jobs, {USERS} users, {GPUS} GPUs, seed {seed}",
        "",
        *table(strict, easy),
        f"{'upper bound of utilisation':34}{100 * bound(jobs):.2f} %",
        f"promises under EASY: {easy.promises_kept} kept, {easy.promises_broken} broken",
        "",
        *by_size(strict, easy),
        "",
        *spread(),
        "",
        f"GPUs in use over {until_s / 3600:.1f} h (full block = {GPUS})",
        text_plot("strict", strict_run.ran, until_s),
        text_plot("EASY", easy_run.ran, until_s),
    ]


def main() -> None:
    """Parse and print."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--seed", type=int, default=SEED)
    options.add_argument("--svg", type=Path, help="write the plot of both schedules as SVG")
    asked = options.parse_args()
    print("\n".join(report(asked.seed, asked.svg)))


if __name__ == "__main__":
    main()
