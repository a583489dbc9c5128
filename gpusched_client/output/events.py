"""What happened to a job, as sentences. Pure: the way in which times are shown is an argument."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gpusched_client.output.why import gpus_text, rule_text
from gpusched_client.terms import EventKind
from gpusched_client.units import bytes_text, duration_about

if TYPE_CHECKING:
    from gpusched_client.wire.job_messages import JobEvent

Facts = Mapping[str, Any]
Clock = Callable[[float], str]


def sentence(event: JobEvent, clock: Clock) -> str:
    """One event of a job's history; of a kind that a newer daemon has, its name and its facts."""
    told = _SENTENCES.get(event.kind)
    if told is None or event.data is None:
        return f"{event.kind.replace('_', ' ')}  {event.text}".rstrip()
    return told(event.data, clock)


def _submitted(facts: Facts, _clock: Clock) -> str:
    number = facts.get("gpus")
    asked = "" if number is None else f": {_gpu_count(number)}"
    vram = _size(facts, "vram_bytes")
    return f"submitted{asked}{f', {vram} each' if vram else ''}"


def _gpu_count(number: Any) -> str:
    return "no GPU" if number == 0 else f"{number} GPU{'' if number == 1 else 's'}"


def _size(facts: Facts, name: str) -> str:
    size = facts.get(name)
    return bytes_text(size) if isinstance(size, int) else ""


def _because(facts: Facts, *names: str) -> str:
    """What is known of why, behind a colon."""
    known = [str(facts[name]) for name in names if facts.get(name)]
    return f": {', '.join(known)}" if known else ""


def _by(facts: Facts) -> str:
    return f" by {facts['by']}" if facts.get("by") else ""


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _placed(facts: Facts, clock: Clock) -> str:
    why = rule_text(facts, clock)
    return f"placed {gpus_text(facts.get('gpus'))}" + (f": {why}" if why else "")


def _released(facts: Facts, _clock: Clock) -> str:
    place = facts.get("place")
    return f"goes on: {place} is there again" if place else f"released{_by(facts)}"


def _promised(facts: Facts, clock: Clock) -> str:
    at_s = facts.get("start_by_s")
    return f"start promised by {clock(at_s)}" if isinstance(at_s, (int, float)) else "promised"


def _promise_ended(facts: Facts, _clock: Clock) -> str:
    why = str(facts.get("why") or facts.get("exception") or "").replace("_", " ")
    return f"the promise was {facts.get('outcome', 'ended')}{f': {why}' if why else ''}"


def _near_limit(facts: Facts, _clock: Clock) -> str:
    used = facts.get("used")
    part = f"{100 * used:.0f} %" if isinstance(used, (int, float)) else "most"
    limit = str(facts.get("limit", ""))
    seconds = limit.removesuffix(" s")
    shown = duration_about(float(seconds)) if seconds.isdecimal() else limit
    return f"{part} of its time limit of {shown} is used"


def _over_declaration(facts: Facts, _clock: Clock) -> str:
    held, declared = _size(facts, "held_bytes"), _size(facts, "declared_bytes")
    return f"holds {held} of a GPU now (its use and a buffer) and had declared {declared}"


def _signalled(facts: Facts, _clock: Clock) -> str:
    number = facts.get("signal")
    try:
        name = signal.Signals(int(number or 0)).name
    except (TypeError, ValueError):
        name = f"signal {number}"
    return f"{name} sent{_by(facts)}"


def _retried(facts: Facts, _clock: Clock) -> str:
    now = "whole GPUs" if facts.get("whole") else _size(facts, "vram_bytes")
    before, peak = _size(facts, "before_bytes"), _size(facts, "peak_bytes")
    with_ = f" with {now}{f' instead of {before}' if before else ''}" if now else ""
    return (
        f"out of GPU memory{f' at {peak}' if peak else ''}; retry {facts.get('retry')} of "
        f"{facts.get('retries')}{with_}"
    )


def _ended(facts: Facts, _clock: Clock) -> str:
    code, number = facts.get("code"), facts.get("signal")
    how = [str(facts["state"])] if facts.get("state") else []
    if number:
        how.append(_signalled(facts, _clock).split()[0])
    elif code is not None:
        how.append(f"exit code {code}")
    if facts.get("detail"):
        how.append(str(facts["detail"]))
    return f"ended{_by(facts)}" + (f": {', '.join(how)}" if how else "")


_SENTENCES: Mapping[str, Callable[[Facts, Clock], str]] = {
    EventKind.JOB_SUBMITTED: _submitted,
    EventKind.JOB_HELD: lambda facts, _: f"held{_by(facts)}{_because(facts, 'reason')}",
    EventKind.JOB_RELEASED: _released,
    EventKind.JOB_UPDATED: lambda facts, _: (
        f"changed{_by(facts)}: {_listed(facts.get('changed', ''))}"
    ),
    EventKind.START_PROMISED: _promised,
    EventKind.PROMISE_ENDED: _promise_ended,
    EventKind.JOB_PLACED: _placed,
    EventKind.JOB_STARTED: lambda _facts, _: "started",
    EventKind.JOB_NEAR_LIMIT: _near_limit,
    EventKind.JOB_OVER_DECLARATION: _over_declaration,
    EventKind.JOB_STUCK: lambda _facts, _: "does not end, though it was told to",
    EventKind.CANCEL_REQUESTED: lambda facts, _: (
        f"cancel requested{_by(facts)}{_because(facts, 'reason')}"
    ),
    EventKind.SIGNAL_REQUESTED: _signalled,
    EventKind.JOB_COMPLETING: lambda _facts, _: "its main process ended",
    EventKind.JOB_REQUEUED: lambda facts, _: f"queued again{_because(facts, 'error')}",
    EventKind.JOB_RETRIED: _retried,
    EventKind.JOB_ENDED: _ended,
}
