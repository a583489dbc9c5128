"""Answers on demand: expected starts and what would start now."""

from __future__ import annotations

import pytest

from gpusched_client.errors import NotFound
from gpusched_client.terms import JobId
from gpusched_client.units import MIB, parse_bytes, parse_duration
from gpuschedd.core.forecast import counterfactuals, expected_starts, raise_limit_allowed
from gpuschedd.core.model import GIB, GpuState
from tests.support.core_builders import EXACT, MARGIN, gpu, gpus, running, snapshot_of, waiting


def test_expected_starts_follow_the_planned_ends() -> None:
    queue = [waiting(2, 4, limit_s=100.0), waiting(3, 4, limit_s=50.0, uid=2), waiting(4, 4, uid=3)]
    seen = snapshot_of(gpus(4), [running(1, [0, 1], limit_s=600.0)], queue)
    starts = {start.job_id: start.start_s for start in expected_starts(seen, EXACT)}
    assert starts == {2: 600.0, 3: 700.0, 4: 750.0}


def test_expected_starts_know_backfill() -> None:
    queue = [waiting(2, 4), waiting(3, 1, limit_s=600.0, uid=2)]
    seen = snapshot_of(gpus(4), [running(1, [0, 1], limit_s=600.0)], queue)
    starts = {start.job_id: start.start_s for start in expected_starts(seen, EXACT)}
    assert starts == {2: 600.0, 3: 0.0}


def test_job_of_unknown_shadow_time_has_no_expected_start() -> None:
    cards = (gpu(0), gpu(1, state=GpuState.SICK))
    seen = snapshot_of(cards, [], [waiting(2, 2)])
    assert [start.start_s for start in expected_starts(seen, EXACT)] == [None]


def test_expected_starts_are_bounded() -> None:
    queue = [waiting(n, 1, uid=n % 3) for n in range(2, 60)]
    seen = snapshot_of(gpus(1), [running(1, [0])], queue)
    assert len(expected_starts(seen, EXACT, first=10)) == 10


def test_it_would_start_with_fewer_gpus_or_a_shorter_limit() -> None:
    """3 GPUs are free; the head waits for 4 until 600."""
    busy = [running(1, [0], limit_s=600.0)]
    queue = [waiting(2, 4), waiting(3, 3, limit_s=900.0, uid=2)]
    found = counterfactuals(snapshot_of(gpus(4), busy, queue), EXACT, JobId(3))
    assert [answer.text for answer in found] == ["with --time 10m or less"]
    assert found[0].request.time_limit_s == 600.0
    alone = counterfactuals(snapshot_of(gpus(4), busy, queue[:1]), EXACT, JobId(2))
    assert [answer.text for answer in alone] == ["with 3 GPUs"]


def test_it_would_start_with_less_memory() -> None:
    busy = [running(1, [0], limit_s=600.0, vram=60 * GIB)]
    queue = [waiting(2, 1, vram=40 * GIB)]
    found = counterfactuals(snapshot_of(gpus(1), busy, queue), EXACT, JobId(2))
    assert [answer.text for answer in found] == ["with --vram 19G or less"]


@pytest.mark.parametrize(
    ("limit_s", "advised"),
    [(599.0, "9m"), (119.0, "119s"), (8160.0, "2h16m"), (9000.0, "2h30m")],
)
def test_advice_on_the_limit_is_never_more_than_what_would_start(
    limit_s: float, advised: str
) -> None:
    """Rounded down, and written as --time reads it."""
    busy = [running(1, [0], limit_s=limit_s)]
    queue = [waiting(2, 4), waiting(3, 3, limit_s=36000.0, uid=2)]
    (found,) = counterfactuals(snapshot_of(gpus(4), busy, queue), EXACT, JobId(3))
    assert found.text == f"with --time {advised} or less"
    limit_there_s = found.request.time_limit_s
    assert limit_there_s is not None
    assert limit_there_s == parse_duration(advised)
    assert limit_there_s <= limit_s


@pytest.mark.parametrize(
    ("free_mib", "advised"), [(19 * 1024 + 500, "19G"), (20 * 1024 - 1, "19.5G"), (700, "700M")]
)
def test_advice_on_memory_is_never_more_than_what_would_start(free_mib: int, advised: str) -> None:
    """Rounded down; what is free is counted beside both margins."""
    busy = [running(1, [0], limit_s=600.0, vram=80 * GIB - 2 * MARGIN - free_mib * MIB)]
    queue = [waiting(2, 1, vram=40 * GIB)]
    (found,) = counterfactuals(snapshot_of(gpus(1), busy, queue), EXACT, JobId(2))
    assert found.text == f"with --vram {advised} or less"
    assert found.request.vram_bytes == parse_bytes(advised)


def test_job_that_starts_now_needs_no_other_request() -> None:
    assert counterfactuals(snapshot_of(gpus(1), [], [waiting(2, 1)]), EXACT, JobId(2)) == ()


def test_unknown_jobs_are_not_found() -> None:
    seen = snapshot_of(gpus(1))
    with pytest.raises(NotFound):
        counterfactuals(seen, EXACT, JobId(7))
    with pytest.raises(NotFound):
        raise_limit_allowed(seen, EXACT, JobId(7), 10.0)
