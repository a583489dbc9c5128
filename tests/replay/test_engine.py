"""The engine of a replay: what it keeps from pass to pass changes no plan."""

from __future__ import annotations

from random import Random

import pytest

from gpuschedd.core.model import GIB, Order, Plan, Policy, Snapshot
from gpuschedd.core.plan import plan
from gpuschedd.core.timeline import Host
from gpuschedd.replay import engine
from gpuschedd.replay.engine import Replay
from gpuschedd.replay.workload import TraceJob, equal_gpus


def some_jobs(seed: int) -> list[TraceJob]:
    """Whole and shared ones, of three users, some of them without limit."""
    rng, at_s, jobs = Random(seed), 0.0, list[TraceJob]()
    for number in range(120):
        at_s += rng.choice([0.0, 1.0, 60.0])
        run_s = rng.choice([0.0, 10.0, 300.0, 2000.0]) * rng.random()
        vram = rng.choice([None, None, rng.randrange(1, 60) * GIB])
        limit_s = rng.choice([None, run_s, 3 * run_s])
        user, gpus = f"u{rng.randrange(3)}", rng.choice([1, 1, 2, 4])
        jobs.append(TraceJob(str(number), user, at_s, gpus, run_s, limit_s, vram))
    return jobs


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("allowance_s", [0.0, 5.0])
def test_each_plan_is_the_one_that_the_snapshot_alone_gives(
    monkeypatch: pytest.MonkeyPatch, order: Order, allowance_s: float
) -> None:
    passes, starts = [0], [0]

    def checked(seen: Snapshot, policy: Policy, explain: int, host: Host) -> Plan:
        anew = plan(seen, policy, explain=explain)
        made = plan(seen, policy, explain=explain, host=host)
        assert made == anew
        passes[0] += 1
        starts[0] += len(made.starts)
        return made

    monkeypatch.setattr(engine, "plan", checked)
    policy = Policy(order=order, launch_allowance_s=allowance_s)
    done = Replay(some_jobs(1), equal_gpus(4), policy).run()
    assert (passes[0], starts[0]) == (done.passes, 120)
