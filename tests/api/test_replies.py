"""A list that has more bytes than a message may hold comes with fewer rows, and says so."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from gpusched_client.errors import TooLarge
from gpusched_client.terms import JobState
from gpusched_client.wire.framing import RESPONSE_LIMITS
from gpusched_client.wire.gpu_messages import GpusResult
from gpusched_client.wire.job_messages import JobsResult, JobView, QueueResult, WaitResult
from gpuschedd.api import replies

LONG = tuple(
    JobView(
        job_id=job_id,
        state=JobState.PENDING,
        cwd=b"/" + b"d" * 4_000,
        argv=(b"a" * 6_000,),
        command="a" * 300,
    )
    for job_id in range(1, 1_001)
)


def rows(data: bytes) -> tuple[list[int], dict[str, Any]]:
    """The ids in a reply, and the reply."""
    assert len(data) <= RESPONSE_LIMITS.message_bytes
    result = msgpack.unpackb(data)[3]
    return [job["job_id"] for job in result["jobs"]], result


def test_a_page_keeps_its_newest_so_that_the_page_before_follows_on() -> None:
    ids, result = rows(replies.encode(1, JobsResult(jobs=LONG, total=5_000)))
    assert ids == list(range(501, 1_001))
    assert result["total"] == 5_000
    assert "by page" in result["cut"]


def test_a_page_of_the_queue_keeps_its_first() -> None:
    ids, result = rows(replies.encode(1, QueueResult(jobs=LONG, total=5_000)))
    assert ids == list(range(1, 501))
    assert "by page" in result["cut"]


def test_a_wait_has_a_row_for_each_job_and_fewer_words() -> None:
    ids, result = rows(replies.encode(1, WaitResult(jobs=LONG)))
    assert ids == list(range(1, 1_001))
    assert result["jobs"][0]["argv"] is None


def test_what_fits_is_not_cut() -> None:
    ids, result = rows(replies.encode(1, JobsResult(jobs=LONG[:9], total=9)))
    assert ids == list(range(1, 10))
    assert "cut" not in result


def test_what_is_no_list_is_too_large() -> None:
    with pytest.raises(TooLarge):
        replies.encode(1, GpusResult(gpus=(), problem="x" * 9 * 2**20))
