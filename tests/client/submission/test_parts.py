"""Jobs of a submission in as few messages as hold them."""

from __future__ import annotations

from typing import Any

import pytest

from gpusched_client.submission.parts import parts_of
from gpusched_client.wire import framing
from gpusched_client.wire.limits import (
    CPU_NUMBERS_MAX,
    PAYLOAD_BYTES_MAX,
    SUBMIT_JOBS_MAX,
    SUBMIT_PAYLOAD_BYTES_MAX,
)
from gpusched_client.wire.submit_messages import JobRequest, SubmitRequest

ENVIRONMENT = {b"A%d" % number: b"x" * 60 for number in range(50)}


def job(**fields: Any) -> JobRequest:
    """One that shares directory and environment with all others."""
    return JobRequest(cwd=b"/home/alice/experiment", environment=ENVIRONMENT, **fields)


SMALL = [
    job(argv=(b"python", b"%d" % n), vram_bytes=2**34 + n, time_limit_s=60 + n)
    for n in range(SUBMIT_JOBS_MAX)
]
LARGE = [job(script=b"#!/bin/sh\n#%d" % n + b"x" * 200_000) for n in range(20)]
LONG = [job(argv=(b"true",), affinity=tuple(range(n, n + CPU_NUMBERS_MAX))) for n in range(40)]
DEEP = [
    job(argv=(b"%d" % n,), affinity=(n % 64,), rlimits={"nofile": (n, n)})
    for n in range(SUBMIT_JOBS_MAX)
]
HEAVY = [
    JobRequest(cwd=b"/", environment={b"A": b"x" * 100_000}, argv=(b"%d" % n,))
    for n in range(SUBMIT_PAYLOAD_BYTES_MAX // 100_000 + 1)
]


def test_ten_thousand_small_jobs_are_one_message() -> None:
    assert [len(part) for part in parts_of(SMALL)] == [10_000]


@pytest.mark.parametrize(
    "jobs",
    [[*SMALL, *SMALL, SMALL[0]], LARGE, LONG, DEEP, HEAVY, [*LARGE, *SMALL]],
    ids=["number", "bytes", "items", "containers", "payload", "mixed"],
)
def test_each_part_is_a_message_that_the_daemon_takes(jobs: list[JobRequest]) -> None:
    parts = list(parts_of(jobs))
    assert len(parts) > 1
    assert [job for part in parts for job in part] == jobs
    for part in parts:
        assert _received(SubmitRequest(tuple(part), "k/1")) == tuple(part)


def _received(request: SubmitRequest) -> tuple[JobRequest, ...]:
    data = framing.encode_request(1, request.method, request.to_wire())
    (frame,) = framing.Decoder(framing.REQUEST_LIMITS).feed(data)
    assert isinstance(frame, framing.RequestFrame), frame
    return SubmitRequest.from_wire(frame.params).jobs


def test_the_same_jobs_are_parted_in_the_same_way() -> None:
    jobs = [*LARGE, *SMALL]
    assert list(map(len, parts_of(jobs))) == list(map(len, parts_of(list(jobs))))


def test_a_job_that_no_message_holds_is_a_part_of_its_own() -> None:
    """So that what refuses it names it, and not its neighbours."""
    too_large = job(script=b"#!" + b"x" * (PAYLOAD_BYTES_MAX + 2**20))
    assert [len(part) for part in parts_of([SMALL[0], too_large, SMALL[1]])] == [1, 1, 1]
