"""What others may take without delaying the head job."""

from __future__ import annotations

import pytest

from gpuschedd.core.reservation import Hold, shadow
from gpuschedd.core.timeline import Host
from tests.support.core_builders import EXACT, gpus, running, snapshot_of, waiting


@pytest.mark.parametrize("asked", range(3, 9))
@pytest.mark.parametrize("busy", range(1, 8))
def test_the_room_for_whole_jobs_is_the_largest_number_that_would_be_selected(
    asked: int, busy: int
) -> None:
    """8 GPUs, so many of them taken, half until 100 s, half until 200 s; the head asks so many."""
    jobs = [running(n + 1, [n], limit_s=100.0 * (1 + n % 2)) for n in range(busy)]
    host = Host(snapshot_of(gpus(8), jobs), EXACT)
    head = waiting(20, asked)
    need = host.need(head.request, head.uid)
    found = shadow(host, need)
    assert found is not None
    hold = Hold(host, head, need, found)
    idle = host.idle()
    needs = [host.need(waiting(30, count).request, 2) for count in range(1, 9)]
    allowed = [one.gpus for one in needs if hold.could_select(one, idle)]
    assert allowed == list(range(1, hold.room_beside(idle) + 1))
