"""Why a job was placed before others, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gpusched_client.output.table import table
from gpusched_client.terms import printable

if TYPE_CHECKING:
    from gpusched_client.wire.job_messages import WhyResult

Facts = Mapping[str, Any]
Clock = Callable[[float], str]


def why_text(why: WhyResult, clock: Clock) -> str:
    """When, where and by which rule; how it stood in the order; who stood there with it."""
    where = gpus_text(why.gpu_indices)
    lines = [
        f"Job {why.job_id} was placed {where} at {clock(why.placed_at_s)}.",
    ]
    if rule := rule_text(why.to_wire(), clock):
        lines.append(f"Rule: {rule}.")
    if why.put_first_by is not None:
        lines.append(f"It was put first by {printable(why.put_first_by)}.")
    elif why.nice:
        lines.append(f"Its nice value was {why.nice}.")
    if why.rank is not None and why.first:
        lines.append(f"It was number {why.rank} in the order of that moment, which began with:")
        headings = ("PLACE", "JOBID", "PRIORITY")
        rows = [
            [str(place), f"{each.job_id}", f"{each.priority:.1f}"]
            for place, each in enumerate(why.first, start=1)
        ]
        lines.append(table(headings, rows, None, frozenset(headings)).rstrip("\n"))
    return "".join([f"{line}\n" for line in lines])


def gpus_text(indices: Any) -> str:
    """ "on GPU 0, 3"; "without a GPU"."""
    return f"on GPU {', '.join(map(str, indices))}" if indices else "without a GPU"


def rule_text(facts: Facts, clock: Clock) -> str:
    """Why it could start while others waited; "" of a rule that a newer daemon has."""
    told = _RULES.get(str(facts.get("rule")))
    return "" if told is None else told(facts, clock)


def _first(facts: Facts, _clock: Clock) -> str:
    passed = []
    if over := facts.get("over_limits"):
        passed.append(f"{over} before it {_are(over)} over the limits of their users")
    if without := facts.get("without_end"):
        passed.append(f"{without} before it {_need(without)} what no job's end brings")
    if passed:
        return f"first in order of those that could start ({', '.join(passed)})"
    rank = facts.get("rank")
    is_first = not isinstance(rank, int) or rank == 1
    return "first in order" if is_first else "next in order: all before it started, too"


def _are(count: int) -> str:
    return "was" if count == 1 else "were"


def _need(count: int) -> str:
    return "needs" if count == 1 else "need"


def _head(facts: Facts, clock: Clock) -> str:
    """ "job 5's start at 01:31"."""
    at_s = facts.get("head_start_s")
    word = "expected start" if facts.get("guessed") else "start"
    when = f" at {clock(at_s)}" if isinstance(at_s, (int, float)) else ""
    return f"job {facts.get('head')}'s {word}{when}"


def _gap(facts: Facts, clock: Clock) -> str:
    ends = "it was expected to end" if facts.get("guessed") else "its limit ends it"
    return f"in the gap before {_head(facts, clock)}: {ends} by then"


def _spare(facts: Facts, clock: Clock) -> str:
    return f"on GPUs to spare beside {_head(facts, clock)}"


_RULES: Mapping[str, Callable[[Facts, Clock], str]] = {
    "promised": lambda _facts, _clock: "its start was promised",
    "first": _first,
    "gap": _gap,
    "spare": _spare,
    "slot": lambda _facts, _clock: "a slot for jobs without GPUs was free",
}
