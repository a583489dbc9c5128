"""How often the GPUs are looked at."""

from __future__ import annotations

from gpuschedd.gpu.cadence import INTERVAL_FACTOR_MAX, REST_PAUSE_S, Cadence

EVERY_S = 0.5


def test_at_rest_ten_seconds_pass_between_two_looks() -> None:
    cadence = Cadence()
    assert cadence.pause_s(EVERY_S, rests=False) == EVERY_S
    assert cadence.pause_s(EVERY_S, rests=True) == 10.0
    assert cadence.pause_s(60.0, rests=True) == 60.0


def test_a_dear_driver_is_looked_at_less_often_and_a_cheap_one_as_before() -> None:
    cadence = Cadence()
    for _ in range(10):
        cadence.keep_cheap(EVERY_S, cost_s=10.0, took_s=10.0)
    assert cadence.pause_s(EVERY_S, rests=False) == EVERY_S * INTERVAL_FACTOR_MAX
    assert cadence.pause_s(EVERY_S, rests=True) == REST_PAUSE_S
    for _ in range(10):
        cadence.keep_cheap(EVERY_S, cost_s=0.0, took_s=0.0)
    assert cadence.pause_s(EVERY_S, rests=False) == EVERY_S
