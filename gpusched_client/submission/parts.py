"""Into how many messages the jobs of a submission have to be parted. Knows no connection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgpack

from gpusched_client.wire.framing import REQUEST_LIMITS
from gpusched_client.wire.limits import SUBMIT_JOBS_MAX, SUBMIT_PAYLOAD_BYTES_MAX
from gpusched_client.wire.submit_messages import JobRequest, common_and_own

_AROUND = 1024  # bytes, more than the envelope has and the fields beside the jobs; also of the rest


def parts_of(jobs: Sequence[JobRequest]) -> Iterator[Sequence[JobRequest]]:
    """The jobs in order, as many at a time as one message may have: of the same the same.

    What all of them share is counted once for each part; those of one part may share more.
    """
    common, own = common_and_own(jobs)
    limits = (REQUEST_LIMITS.message_bytes, REQUEST_LIMITS.containers, REQUEST_LIMITS.items)
    shared = zip(limits, _cost_of(common), strict=True)
    room = [
        SUBMIT_JOBS_MAX,
        SUBMIT_PAYLOAD_BYTES_MAX,
        *(most - cost - _AROUND for most, cost in shared),
    ]
    begin, left = 0, room
    for number, (job, fields) in enumerate(zip(jobs, own, strict=True)):
        costs = (1, job.payload_bytes, *_cost_of(fields))
        left = [have - cost for have, cost in zip(left, costs, strict=True)]
        if min(left) < 0 and number > begin:
            yield jobs[begin:number]
            begin = number
            left = [have - cost for have, cost in zip(room, costs, strict=True)]
    yield jobs[begin:]


def _cost_of(fields: dict[str, Any]) -> tuple[int, int, int]:
    """The bytes, containers and items of a map on the wire."""
    return len(msgpack.packb(fields, use_bin_type=True)), *_count(fields)


def _count(container: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> tuple[int, int]:
    """Arrays and maps, itself among them, and what is in all of them."""
    containers, items = 1, len(container)
    for value in container.values() if isinstance(container, dict) else container:
        if isinstance(value, dict | list | tuple):
            inner = _count(value)
            containers, items = containers + inner[0], items + inner[1]
    return containers, items
