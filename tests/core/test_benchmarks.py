"""The benchmarks keep what they claim: determinism, the gain of EASY, the cost of a pass."""

from __future__ import annotations

from benchmarks.backfill import GPUS, bound, replayed, text_plot, workload
from benchmarks.plan import best_of, gpus, pass_s, snapshot_of
from gpuschedd.core.model import Backfill
from gpuschedd.replay.stats import figures


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


def test_pass_does_not_cost_more_with_a_hundred_times_the_queue() -> None:
    short = pass_s(snapshot_of(1_000, 50, gpus(8)))
    assert pass_s(snapshot_of(100_000, 50, gpus(8))) <= 3 * short


def test_pass_over_all_distinct_shapes_is_under_ten_sorts() -> None:
    floats = [float(hash((7, number))) for number in range(100_000)]
    sort_s = best_of(3, lambda: sorted(floats))
    assert pass_s(snapshot_of(100_000, 100_000, gpus(8)), times=3) < 10 * sort_s
