"""What a job used: utilisation and energy from its start to its end, and what a peak is worth."""

from __future__ import annotations

import pytest

from gpusched_client.terms import GpuUuid, JobState
from gpuschedd.gpu.metering import Seen, UseMeter, next_vram_bytes, verdict
from gpuschedd.gpu.source import GpuProcess, GpuReading, ProcessPeak
from tests.support.gpus import GIB, MIB, key

UUID = GpuUuid("GPU-1")


def reading(utilization: float = 0.0, power_w: float = 50.0, *pids: int) -> GpuReading:
    """A GPU that is so busy, with these processes."""
    processes = tuple(GpuProcess(pid, 1, GIB) for pid in pids)
    return GpuReading(
        UUID, GIB, 47 * GIB, utilization=utilization, power_w=power_w, processes=processes
    )


def seen(used: int | None = GIB, *, hides: bool = False) -> Seen:
    """A job's one process, alone."""
    return Seen(used, False, (7,), 1, False, hides)


def test_a_whole_gpu_asleep_is_zero_percent_and_draws_power() -> None:
    """None of the job's processes is there: that is the waste, and not "n/a"."""
    meter = UseMeter()
    meter.add_absent(key(1), reading(), 10.0, whole=True)
    (use,) = meter.uses(key(1))
    assert (use.utilization, use.energy_j, use.observed_s) == (0.0, 500.0, 10.0)
    assert (use.peak_bytes, use.peak_source) == (None, "none")


def test_a_whole_gpu_counts_from_start_to_end() -> None:
    """Half of the time with a busy process, half without one."""
    meter = UseMeter()
    meter.add(key(1), reading(80.0, 300.0, 7), seen(), 10.0, whole=True)
    meter.add_absent(key(1), reading(), 10.0, whole=True)
    (use,) = meter.uses(key(1))
    assert (use.utilization, use.energy_j) == (40.0, 3500.0)


def test_of_a_shared_gpu_a_job_that_is_not_there_does_nothing() -> None:
    """What the GPU does meanwhile is its neighbours' doing; unlisted, nobody knows."""
    meter = UseMeter()
    meter.add(key(1), reading(80.0, 300.0, 7), seen(), 10.0)
    meter.add_absent(key(1), reading(100.0, 300.0, 9), 10.0, whole=False)
    (use,) = meter.uses(key(1))
    assert (use.utilization, use.energy_j) == (40.0, 3000.0)
    blind = GpuReading(UUID, GIB, GIB, utilization=50.0, power_w=100.0)
    meter.add_absent(key(1), blind, 10.0, whole=False)
    assert meter.uses(key(1)) == (use,)


def test_what_is_in_use_until_a_job_is_there_is_not_its_by_difference() -> None:
    """It came, or went, between the decision and the start."""
    meter = UseMeter()
    for used in (0, 9 * GIB, 2 * GIB):
        before = GpuReading(UUID, used, 48 * GIB - used)
        meter.begin(key(1), [UUID], {UUID: used})
        meter.add(key(1), before, seen(None), 1.0)
        meter.begin_anew(key(1), before)
    meter.add(key(1), GpuReading(UUID, 5 * GIB, 43 * GIB), seen(None), 1.0)
    (use,) = meter.uses(key(1))
    assert (use.peak_bytes, use.peak_source) == (3 * GIB, "device")


def test_a_peak_beside_memory_of_nobody_is_a_lower_bound_without_a_verdict() -> None:
    """1000 MiB by the driver, 9000 in truth: to ask for 1.03 GiB would end in "out of memory"."""
    meter = UseMeter()
    meter.add(key(1), reading(0.0, 50.0, 7), seen(1000 * MIB, hides=True), 1.0)
    rows = {UUID: {7: ProcessPeak(1000 * MIB, None, 100.0)}}
    uses = meter.uses(key(1), rows, 100.0)
    assert (uses[0].peak_bytes, uses[0].peak_source) == (1000 * MIB, "at-least")
    assert next_vram_bytes(uses) is None
    restarted = UseMeter()
    restarted.resume(uses)
    assert restarted.uses(key(1))[0].peak_source == "at-least"


@pytest.mark.parametrize(
    ("declared", "told"), [(10 * GIB, None), (1000 * MIB, None), (500 * MIB, "under-declared")]
)
def test_a_lower_bound_judges_only_what_is_above_the_declaration(
    declared: int, told: str | None
) -> None:
    """More than declared is more than declared, however much it was."""
    judged = verdict(declared, 1000 * MIB, JobState.COMPLETED, 0.1, is_at_least=True)
    assert judged == told


def test_energy_goes_on_after_a_restart() -> None:
    """What was saved at the stop is added to."""
    meter = UseMeter()
    meter.add_absent(key(1), reading(), 10.0, whole=True)
    restarted = UseMeter()
    restarted.resume(meter.all_uses())
    restarted.add_absent(key(1), reading(), 10.0, whole=True)
    (use,) = restarted.uses(key(1))
    assert (use.energy_j, use.observed_s, use.utilization) == (1000.0, 20.0, 0.0)
