"""Once more with more memory: as long as there is more to be had."""

from __future__ import annotations

from gpusched_client.terms import JobId
from gpuschedd.core.admission import seen
from gpuschedd.core.job import Job
from gpuschedd.core.model import Inventory, Policy, Request
from gpuschedd.core.retry import next_request
from tests.support.core_builders import gpu

GIB = 2**30
HOST = seen(Inventory(), [gpu(0, total_bytes=24 * GIB), gpu(1, total_bytes=80 * GIB)])


def job(request: Request) -> Job:
    """One with retries left."""
    return Job(JobId(1), 1000, "alice", "train", request, 0.0, 0.0, retries=3)


def test_what_had_the_largest_card_for_itself_is_not_tried_again() -> None:
    """It would repeat unchanged."""
    whole = job(Request(card_bytes=70 * GIB))
    assert next_request(whole, 79 * GIB, HOST, Policy(), 80 * GIB) is None
    assert next_request(job(Request()), None, HOST, Policy(), 80 * GIB) is None


def test_what_had_a_smaller_card_moves_to_a_larger_one() -> None:
    """Also where nobody knows its peak."""
    after = next_request(job(Request()), None, HOST, Policy(), 24 * GIB)
    assert after is not None
    assert 24 * GIB < after.card_bytes <= 80 * GIB


def test_a_share_that_grows_out_of_the_largest_card_becomes_a_whole_one_once() -> None:
    """And ends after that."""
    first = next_request(job(Request(vram_bytes=70 * GIB)), None, HOST, Policy(), 80 * GIB)
    assert first is not None
    assert (first.vram_bytes, first.card_bytes) == (None, 80 * GIB)
    assert next_request(job(first), 80 * GIB, HOST, Policy(), 80 * GIB) is None
