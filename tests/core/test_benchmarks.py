"""The benchmarks keep what they claim: determinism, the gain of EASY, the cost of a pass."""

from __future__ import annotations

from benchmarks.backfill import GPUS, bound, replayed, text_plot, workload
from benchmarks.plan import POLICY, gpus, snapshot_of
from gpuschedd.core.model import Backfill
from gpuschedd.core.plan import plan
from gpuschedd.replay.stats import figures
from tests.support.work import bytecodes


def test_backfill_benchmark_is_deterministic_and_easy_is_better() -> None:
    strict, easy = (figures(replayed(1, mode), GPUS) for mode in (Backfill.OFF, Backfill.EASY))
    assert easy == figures(replayed(1, Backfill.EASY), GPUS)
    assert strict.utilisation < easy.utilisation <= bound(workload(1))
    assert easy.waits.mean_s < strict.waits.mean_s
    assert easy.by_size[8].max_s < strict.by_size[8].max_s
    assert easy.promises_broken == 0


def test_plot_shows_the_full_width() -> None:
    done = replayed(1, Backfill.EASY)
    assert len(text_plot("EASY", done.ran, 800_000.0)) == 8 + 74


def a_pass(queued: int, distinct: int) -> int:
    """The work of one pass over such a queue, on a full host."""
    snapshot = snapshot_of(queued, distinct, gpus(8))
    plan(snapshot, POLICY)  # the first one fills memos
    return bytecodes(lambda: plan(snapshot, POLICY))


def test_pass_costs_no_more_with_a_hundred_times_the_queue_whatever_the_shapes() -> None:
    short = a_pass(1_000, 50)
    assert short > 10_000, "it does look at jobs"
    assert a_pass(100_000, 50) <= 3 * short
    assert a_pass(100_000, 100_000) <= 3 * short
