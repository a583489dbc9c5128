"""How long one pass takes: against the length of the queue, and on a large host.

Usage: python benchmarks/plan.py [--json]. Times are the best of several runs.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from gpusched_client.terms import GpuUuid, JobId
from gpuschedd.core.fairshare import Accounts
from gpuschedd.core.model import (
    GIB,
    Gpu,
    Grant,
    Policy,
    Request,
    RunningJob,
    Snapshot,
    Waiting,
)
from gpuschedd.core.plan import plan
from gpuschedd.core.queues import Queues
from gpuschedd.core.snapshot import build_snapshot

SEED = 20
USERS = 200
NOW_S = 1_000_000.0
POLICY = Policy()


def best_of(times: int, action: Callable[[], object]) -> float:
    """Seconds of the fastest run."""
    fastest = float("inf")
    for _ in range(times):
        before = time.perf_counter()
        action()
        fastest = min(fastest, time.perf_counter() - before)
    return fastest


def gpus(count: int) -> tuple[Gpu, ...]:
    """Equal cards."""
    return tuple(Gpu(GpuUuid(f"G{n:05d}"), n, "sim", 80 * GIB) for n in range(count))


def full_host(cards: tuple[Gpu, ...], per_gpu: int) -> list[RunningJob]:
    """Every GPU taken: by one whole-GPU job, or by that many shared ones."""
    jobs = []
    for number in range(len(cards) * per_gpu):
        card = cards[number // per_gpu]
        held = card.total_bytes // per_gpu
        request = Request(1, None if per_gpu == 1 else held - POLICY.margin_bytes, time_limit_s=9e4)
        jobs.append(
            RunningJob(
                job_id=JobId(10_000_000 + number),
                uid=number % USERS,
                user=f"u{number % USERS}",
                request=request,
                grants=(Grant(card.uuid, held, held),),
                whole=per_gpu == 1,
                exclusive=False,
                decided_at_s=NOW_S - 10 * (number % 1000),
                started_at_s=NOW_S - 10 * (number % 1000),
                time_limit_s=9e4,
                decided_limit_s=9e4,
            )
        )
    return jobs


def shapes(count: int, rng: random.Random) -> list[Request]:
    """Requests of distinct shape: some whole, most shared, limits of all lengths."""
    made = []
    for number in range(count):
        limit_s = float(rng.randrange(600, 90_000))
        if number % 5 == 0 and number < 40:
            made.append(Request(gpus=number // 5 + 1, time_limit_s=limit_s))
        else:
            size = GIB + number * 700_000 % (70 * GIB)
            made.append(Request(number % 8 + 1, size, time_limit_s=limit_s))
    return made


def snapshot_of(queued: int, distinct: int, cards: tuple[Gpu, ...], per_gpu: int = 1) -> Snapshot:
    """A full host and a queue of that many jobs of all users."""
    rng = random.Random(SEED)
    asked = shapes(distinct, rng)
    queues = Queues(POLICY)
    for number in range(queued):
        uid = number % USERS
        queues.insert(
            Waiting(JobId(number + 1), uid, f"u{uid}", asked[number % distinct], float(number)),
            float(number),
        )
    accounts = Accounts(POLICY)
    for uid in range(USERS):
        accounts.set_rate(uid, JobId(uid), rng.random(), NOW_S - 1e5)
    return build_snapshot(
        now_s=NOW_S,
        gpus=cards,
        running=full_host(cards, per_gpu),
        queues=queues.view(),
        accounts=accounts,
    )


def pass_s(snapshot: Snapshot, times: int = 7) -> float:
    """Seconds of one pass."""
    plan(snapshot, POLICY)
    return best_of(times, lambda: plan(snapshot, POLICY))


def measured() -> dict[str, float]:
    """All figures, in seconds or as ratios."""
    eight = gpus(8)
    short = pass_s(snapshot_of(1_000, 50, eight))
    long = pass_s(snapshot_of(100_000, 50, eight))
    distinct = pass_s(snapshot_of(100_000, 100_000, eight))
    one_free = snapshot_of(100_000, 100_000, eight)
    one_free = replace(one_free, running=one_free.running[1:])
    partly = pass_s(one_free, times=3)
    rng = random.Random(SEED)
    floats = [rng.random() for _ in range(100_000)]
    sort = best_of(7, lambda: sorted(floats))
    large = pass_s(snapshot_of(1_000, 50, gpus(1_000), per_gpu=10), times=3)
    return {
        "pass_1000_queued_s": short,
        "pass_100000_queued_s": long,
        "ratio_100000_to_1000": long / short,
        "pass_100000_distinct_s": distinct,
        "pass_100000_distinct_one_gpu_free_s": partly,
        "sorted_100000_floats_s": sort,
        "ratio_distinct_to_sorted": distinct / sort,
        "ratio_distinct_one_gpu_free_to_sorted": partly / sort,
        "pass_1000_gpus_10000_running_s": large,
    }


def main() -> None:
    """Print the figures and whether they hold."""
    figures = measured()
    if "--json" in sys.argv[1:]:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        print(
            f"{name:42} {value * 1e3:10.3f} ms"
            if name.endswith("_s")
            else f"{name:42} {value:10.2f}"
        )


if __name__ == "__main__":
    main()
