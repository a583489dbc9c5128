"""How long one pass takes: against the length of the queue, and on a large host.

Usage: python benchmarks/plan.py [--json]. Each kind of queue once with 1,000 and once with 100,000
jobs of 200 users; a pass must cost no more for the longer one. Times are the best of several runs.
`tests/core/test_benchmarks.py` counts the work instead, which is the same on any host.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

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
    Topology,
    UserLimit,
    Waiting,
)
from gpuschedd.core.plan import plan
from gpuschedd.core.queues import Queues
from gpuschedd.core.snapshot import build_snapshot

SEED = 20
USERS = 200
NOW_S = 1_000_000.0
LIMIT_S = 9e4  # of the jobs that run
POLICY = Policy()
SHORT, LONG = 1_000, 100_000
FIRST_ID = JobId(20_000_000)
# Of each user, since both have no divisor in common with USERS. A list keeps up to 32.
FEW_SHAPES, MANY_SHAPES = 3, 31


def best_of(times: int, action: Callable[[], object]) -> float:
    """Seconds of the fastest run."""
    fastest = float("inf")
    for _ in range(times):
        before = time.perf_counter()
        action()
        fastest = min(fastest, time.perf_counter() - before)
    return fastest


def gpus(count: int, models: Sequence[str] = ("sim",)) -> tuple[Gpu, ...]:
    """Cards of these models, as many of each."""
    return tuple(
        Gpu(GpuUuid(f"G{n:05d}"), n, models[n * len(models) // count], 80 * GIB)
        for n in range(count)
    )


def full_host(
    cards: tuple[Gpu, ...], per_gpu: int = 1, limit_s: float | None = LIMIT_S
) -> list[RunningJob]:
    """Every GPU taken: by one whole-GPU job, or by that many shared ones."""
    jobs = []
    for number in range(len(cards) * per_gpu):
        card = cards[number // per_gpu]
        held = card.total_bytes // per_gpu
        vram = None if per_gpu == 1 else held - POLICY.margin_bytes
        since_s = NOW_S - 10 * (number % 1000)
        jobs.append(
            RunningJob(
                job_id=JobId(10_000_000 + number),
                uid=number % USERS,
                user=f"u{number % USERS}",
                request=Request(1, vram, time_limit_s=limit_s),
                grants=(Grant(card.uuid, held, held),),
                whole=per_gpu == 1,
                exclusive=False,
                decided_at_s=since_s,
                started_at_s=since_s,
                time_limit_s=limit_s,
                decided_limit_s=limit_s,
            )
        )
    return jobs


def mixed(count: int) -> list[Request]:
    """Requests of distinct shape: some whole, most shared, limits of all lengths."""
    rng = random.Random(SEED)
    made = []
    for number in range(count):
        limit_s = float(rng.randrange(600, 90_000))
        if number % 5 == 0 and number < 40:
            made.append(Request(gpus=number // 5 + 1, time_limit_s=limit_s))
        else:
            size = GIB + number * 700_000 % (70 * GIB)
            made.append(Request(number % 8 + 1, size, time_limit_s=limit_s))
    return made


def too_long(asked: Request, count: int) -> list[Request]:
    """As asked, with so many limits, all past the end of what runs."""
    return [replace(asked, time_limit_s=LIMIT_S + 600.0 * (n + 1)) for n in range(count)]


def too_long_and_unlike(asked: Request, count: int) -> list[Request]:
    """Each of a size of its own as well, in no order."""
    sizes = [10 * GIB + n * 600_000 for n in range(count)]
    random.Random(SEED).shuffle(sizes)
    made = too_long(asked, count)
    return [replace(one, vram_bytes=size) for one, size in zip(made, sizes, strict=True)]


def snapshot_of(
    queued: int,
    shapes: Sequence[Request],
    cards: tuple[Gpu, ...],
    running: Sequence[RunningJob],
    first: Request | None = None,
    commands: int = 1,
    limit: UserLimit | None = None,
) -> Snapshot:
    """A queue of that many jobs of all users, who ask these shapes and run these commands in turn.

    `first`: what the first in the queue asks, a job of one who has used nothing yet. `limit`: that
    of all others.
    """
    queues = Queues(POLICY)
    if first is not None:
        queues.insert(Waiting(FIRST_ID, USERS, "first", first, 0.0), 0.0)
    for number in range(queued):
        uid, asked = number % USERS, shapes[number % len(shapes)]
        key = f"train{number % commands}.py"
        waiting = Waiting(JobId(number + 1), uid, f"u{uid}", asked, float(number), length_key=key)
        queues.insert(waiting, float(number))
    rng = random.Random(SEED)
    accounts = Accounts(POLICY)
    for uid in range(USERS):
        accounts.set_rate(uid, JobId(uid), rng.random(), NOW_S - 1e5)
    return build_snapshot(
        now_s=NOW_S,
        gpus=cards,
        running=running,
        queues=queues.view(),
        accounts=accounts,
        limits={} if limit is None else dict.fromkeys(range(USERS), limit),
    )


def on_full_host(queued: int, shapes: Sequence[Request]) -> Snapshot:
    """Nothing is free."""
    cards = gpus(8)
    return snapshot_of(queued, shapes, cards, full_host(cards))


def on_reserved_gpu(queued: int, shapes: Sequence[Request], commands: int = 1) -> Snapshot:
    """One GPU is idle, and kept for a job that asks all."""
    cards = gpus(8)
    first = Request(8, time_limit_s=LIMIT_S)
    return snapshot_of(queued, shapes, cards, full_host(cards)[1:], first, commands)


def on_guessed_gpu(queued: int, shapes: Sequence[Request]) -> Snapshot:
    """The same without any limit: kept by expected ends."""
    cards = gpus(8)
    return snapshot_of(queued, shapes, cards, full_host(cards, limit_s=None)[1:], Request(8))


def beside_another_model(queued: int, shapes: Sequence[Request]) -> Snapshot:
    """The GPUs of one model are idle, all want one of the other."""
    cards = gpus(8, ("idle", "wanted"))
    first = Request(4, gpu_model="wanted", time_limit_s=LIMIT_S)
    return snapshot_of(queued, shapes, cards, full_host(cards)[4:], first)


def over_limit(limit: UserLimit, queued: int, shapes: Sequence[Request]) -> Snapshot:
    """One GPU is idle and would do for all, whose limits leave them no room."""
    cards = gpus(8)
    first = Request(8, time_limit_s=LIMIT_S)
    return snapshot_of(queued, shapes, cards, full_host(cards)[1:], first, limit=limit)


def between_islands(queued: int, shapes: Sequence[Request]) -> Snapshot:
    """Four GPUs are idle, no two of them joined by NVLink."""
    cards = tuple(replace(card, island=card.index // 2) for card in gpus(8))
    first = Request(8, time_limit_s=LIMIT_S)
    return snapshot_of(queued, shapes, cards, full_host(cards)[::2], first)


WHOLE, SHARED = Request(1), Request(1, 10 * GIB)
LINKED = Request(2, 10 * GIB, topology=Topology.NVLINK)
WANTED, WANTED_SHARED = Request(1, gpu_model="wanted"), Request(1, 10 * GIB, gpu_model="wanted")


@dataclass(frozen=True)
class Case:
    """A kind of queue on a kind of host; `shapes`: so many are asked."""

    host: Callable[[int, Sequence[Request]], Snapshot]
    asked: Callable[[int], list[Request]]
    shapes: int = FEW_SHAPES

    def snapshot(self, queued: int) -> Snapshot:
        """With that many waiting jobs."""
        return self.host(queued, self.asked(self.shapes))


CASES = {
    "full host": Case(on_full_host, mixed),
    "full host, no two alike": Case(on_full_host, mixed, LONG),
    "reserved GPU, whole jobs": Case(on_reserved_gpu, partial(too_long, WHOLE)),
    "reserved GPU, shared jobs": Case(on_reserved_gpu, partial(too_long, SHARED)),
    "reserved GPU, many commands": Case(
        partial(on_reserved_gpu, commands=LONG), partial(too_long, WHOLE)
    ),
    "reserved GPU, no limits": Case(on_guessed_gpu, lambda _count: [WHOLE]),
    "another model, whole jobs": Case(beside_another_model, partial(too_long, WANTED)),
    "another model, shared jobs": Case(beside_another_model, partial(too_long, WANTED_SHARED)),
    "reserved, whole, many shapes": Case(on_reserved_gpu, partial(too_long, WHOLE), MANY_SHAPES),
    "reserved, shared, many shapes": Case(on_reserved_gpu, partial(too_long, SHARED), MANY_SHAPES),
    "reserved, shared, no two alike": Case(
        on_reserved_gpu, partial(too_long_and_unlike, SHARED), LONG
    ),
    "another model, no two alike": Case(
        beside_another_model, partial(too_long_and_unlike, WANTED_SHARED), LONG
    ),
    "NVLink, no two alike": Case(between_islands, partial(too_long_and_unlike, LINKED), LONG),
    "max_jobs, no two alike": Case(
        partial(over_limit, UserLimit(max_jobs=0)), partial(too_long_and_unlike, SHARED), LONG
    ),
    "max_gpus, no two alike": Case(
        partial(over_limit, UserLimit(max_gpus=0)), partial(too_long_and_unlike, SHARED), LONG
    ),
}


def pass_s(snapshot: Snapshot, times: int = 7) -> float:
    """Seconds of one pass."""
    plan(snapshot, POLICY)
    return best_of(times, lambda: plan(snapshot, POLICY))


def measured() -> dict[str, dict[str, float]]:
    """A row for each case, in seconds and as ratios."""
    rows = {}
    for name, case in CASES.items():
        short_s, long_s = (pass_s(case.snapshot(queued)) for queued in (SHORT, LONG))
        rows[name] = {"short_s": short_s, "long_s": long_s, "ratio": long_s / short_s}
    return rows


def other_figures() -> dict[str, float]:
    """What a pass is compared with, and one on a large host."""
    rng = random.Random(SEED)
    floats = [rng.random() for _ in range(LONG)]
    cards = gpus(1_000)
    large = snapshot_of(SHORT, mixed(FEW_SHAPES), cards, full_host(cards, per_gpu=10))
    return {
        "sorted_100000_floats_s": best_of(7, lambda: sorted(floats)),
        "pass_1000_gpus_10000_running_s": pass_s(large, times=3),
    }


def main() -> None:
    """Print the figures."""
    rows, others = measured(), other_figures()
    if "--json" in sys.argv[1:]:
        print(json.dumps({"passes": rows, **others}, indent=2))
        return
    print(f"{'a pass (ms)':32}{f'{SHORT:,} queued':>16}{f'{LONG:,} queued':>16}{'ratio':>10}")
    for name, row in rows.items():
        short_ms, long_ms = 1e3 * row["short_s"], 1e3 * row["long_s"]
        print(f"{name:32}{short_ms:>16.2f}{long_ms:>16.2f}{row['ratio']:>10.2f}")
    for name, value in others.items():
        print(f"{name:32}{1e3 * value:>16.2f}")


if __name__ == "__main__":
    main()
