"""What became of many jobs: a line for each of few, ranges of many. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpusched_client.wire.job_messages import Outcome

RANGES_MAX = 30  # in one list; more of them say nothing to anybody


def done_text(outcome: Outcome) -> str:
    """What was done to one job."""
    return f"job {outcome.job_id}: {outcome.text or 'done'}"


def refusal_text(outcome: Outcome) -> str:
    """Why one job was left as it is; names the job once."""
    text = outcome.text or str(outcome.code)
    named = re.search(rf"\bjob {outcome.job_id}\b", text) is not None
    return text if named else f"job {outcome.job_id}: {text}"


def summary(outcomes: Iterable[Outcome]) -> str:
    """What became of which: "cancelled 499: 35-99, 201-634; ended before: 100-200"."""
    groups: dict[str, list[int]] = {}
    for outcome in outcomes:
        groups.setdefault(_kind(outcome), []).append(outcome.job_id)
    return "; ".join(
        f"{kind}{f' {len(ids)}' if kind == 'cancelled' else ''}: {ranges_text(ids)}"
        for kind, ids in groups.items()
    )


def _kind(outcome: Outcome) -> str:
    """What happened, without what differs from job to job."""
    if outcome.code == "not_found":
        return "no such job"
    text = outcome.text or outcome.code or "done"
    if re.fullmatch(r"was \w+ already", text):
        return "ended before"
    return re.sub(rf"\bjob {outcome.job_id}\b", "job", text).removeprefix("job: ")


def ranges_text(ids: Sequence[int]) -> str:
    """Ids in order, neighbours as ranges: "35-99, 201"."""
    ranges: list[list[int]] = []
    for job_id in sorted(set(ids)):
        if ranges and job_id == ranges[-1][1] + 1:
            ranges[-1][1] = job_id
        else:
            ranges.append([job_id, job_id])
    words = [str(low) if low == high else f"{low}-{high}" for low, high in ranges[:RANGES_MAX]]
    left = sum(high - low + 1 for low, high in ranges[RANGES_MAX:])
    return ", ".join(words) + (f" and {left} more" if left else "")
