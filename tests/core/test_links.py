"""Sets joined by NVLink: cliques that may overlap, as on boards without switches."""

from __future__ import annotations

from dataclasses import replace

from gpuschedd.core.links import largest_set, linked_sets
from gpuschedd.core.model import Gpu, GpuState, Policy, Topology
from gpuschedd.core.plan import plan
from tests.support.core_builders import gpu, running, snapshot_of, uuid, waiting

#: A DGX-1: two quads of four, and each GPU is joined to its counterpart in the other one.
QUADS = ((0, 1, 2, 3), (4, 5, 6, 7))
PAIRS = ((0, 4), (1, 5), (2, 6), (3, 7))


def dgx1() -> tuple[Gpu, ...]:
    """Eight GPUs; links as the driver tells them, islands as far as they are disjoint."""

    def joined(index: int) -> tuple[int, ...]:
        groups = [group for group in (*QUADS, *PAIRS) if index in group]
        return tuple(other for group in groups for other in group if other != index)

    return tuple(
        gpu(
            index,
            island=index // 4,
            joined=tuple(uuid(peer) for peer in joined(index)),
            links=tuple((uuid(peer), 100) for peer in joined(index)),
        )
        for index in range(8)
    )


def test_the_sets_of_a_board_without_switches_overlap() -> None:
    assert linked_sets(dgx1()) == ((0, 1, 2, 3), (0, 4), (1, 5), (2, 6), (3, 7), (4, 5, 6, 7))
    assert largest_set(dgx1()) == 4
    assert linked_sets([gpu(0), gpu(1)]) == ()


def test_a_pair_across_the_quads_is_taken_where_only_that_is_free() -> None:
    """GPUs 0 and 4 are joined by two links."""
    busy = [running(n, [at], limit_s=600.0) for n, at in enumerate((1, 2, 3, 5, 6, 7), 10)]
    pending = [waiting(1, 2, topology=Topology.NVLINK)]
    made = plan(snapshot_of(dgx1(), running_jobs=busy, pending=pending), Policy())
    assert [grant.uuid for grant in made.starts[0].grants] == [uuid(0), uuid(4)]


def test_a_pair_is_taken_from_one_quad_while_both_are_free() -> None:
    """So the other one stays whole."""
    pending = [waiting(1, 2, topology=Topology.NVLINK), waiting(2, 4, topology=Topology.NVLINK)]
    made = plan(snapshot_of(dgx1(), pending=pending), Policy())
    sets = [{grant.uuid for grant in start.grants} for start in made.starts]
    quads = [{uuid(index) for index in quad} for quad in QUADS]
    assert len(sets) == 2
    assert sets[0] < quads[0]
    assert sets[1] == quads[1]


def test_a_reason_says_how_many_are_joined() -> None:
    """Two are free and not joined; what would join them is out of service."""
    busy = [running(n, [at], limit_s=600.0) for n, at in enumerate((1, 2, 3, 4, 6, 7), 10)]
    pending = [waiting(1, 2, topology=Topology.NVLINK)]
    made = plan(snapshot_of(dgx1(), running_jobs=busy, pending=pending), Policy())
    text = made.reasons[pending[0].job_id].text
    assert text.startswith("needs 2 whole GPUs joined by NVLink; ")
    assert "2 of 8 can take it now, at most 1 of them joined by NVLink" in text
    out = [
        one if one.index in (0, 5) else replace(one, state=GpuState.DRAINED, state_text="fan")
        for one in dgx1()
    ]
    made = plan(snapshot_of(out, pending=pending), Policy())
    text = made.reasons[pending[0].job_id].text
    assert "of the 2 that can ever take it at most 1 are joined pair by pair" in text
    assert "GPUs 1, 2, 3, 4, 6 and 7 drained (fan)" in text
    assert not text.endswith("on ")
