"""Words of one line: times, where a job runs or why it waits, how it ended.

Pure: the time is an argument. What comes from other users is escaped, so that it cannot drive a
terminal.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gpusched_client.terms import JobState, PendingReason, printable
from gpusched_client.units import bytes_short, format_duration

if TYPE_CHECKING:
    from gpusched_client.wire.job_messages import JobView, Reason

NONE = "-"


def time_text(at_s: float, now_s: float, *, exact: bool = False) -> str:
    """Local time: "14:20" today, "Dec 03 14:20" in this year, else with the year.

    `exact` is to the second, which a table has no room for.
    """
    then, now = time.localtime(at_s), time.localtime(now_s)
    clock = "%H:%M:%S" if exact else "%H:%M"
    if then[:3] == now[:3]:
        return time.strftime(clock, then)
    day = "%b %d" if then[0] == now[0] else "%Y-%m-%d"
    return time.strftime(f"{day} {clock}", then)


def start_text(job: JobView, now_s: float, *, exact: bool = False) -> str:
    """When it started; before that `by 14:20` (promised) or `expected 14:20`."""
    if job.started_at_s is not None:
        return time_text(job.started_at_s, now_s, exact=exact)
    if job.promised_start_s is not None:
        return f"by {time_text(job.promised_start_s, now_s, exact=exact)}"
    if job.expected_start_s is not None:
        return f"expected {time_text(job.expected_start_s, now_s, exact=exact)}"
    return NONE


def elapsed_text(job: JobView, now_s: float) -> str:
    """Time since the start, up to the end where there is one."""
    if job.started_at_s is None:
        return "0:00"
    ended_at_s = now_s if job.ended_at_s is None else job.ended_at_s
    return format_duration(max(0.0, ended_at_s - job.started_at_s))


def vram_text(job: JobView) -> str:
    """Declared VRAM of each GPU, or that it takes whole ones."""
    if job.vram_bytes is not None:
        return bytes_short(job.vram_bytes)
    return "whole" if job.gpus else NONE


def exit_text(job: JobView) -> str:
    """`code:signal` as Slurm shows it, `-` where nothing ran, `?` where the end is not known."""
    if job.exit_code is None and job.exit_signal is None:
        return NONE if job.started_at_s is None else "?"
    return f"{job.exit_code or 0}:{job.exit_signal or 0}"


def gpu_or_reason(job: JobView, now_s: float) -> str:
    """GPU numbers while it holds some, why it waits before, how it ended after."""
    if job.state is JobState.PENDING:
        return reason_text(job, now_s) or NONE
    if job.state.is_live:
        return ",".join(map(str, job.gpu_indices or ())) or NONE
    return _ending_text(job)


def reason_text(job: JobView, now_s: float) -> str:
    """Why it waits; "" where nothing is known. Without a planned end, also the expected start."""
    if job.reason is None:
        return ""
    told, numbers = _told(job.reason), job.reason.numbers or {}
    expected_at_s = numbers.get("expected_at_s")
    if job.reason.code == PendingReason.UNLIMITED_JOB and isinstance(expected_at_s, (int, float)):
        return f"{told}; expected {time_text(expected_at_s, now_s)}"
    since_s, ended_s = (numbers.get(f"{name}_at_s") for name in ("head_since", "patience_ended"))
    if isinstance(since_s, (int, float)) and isinstance(ended_s, (int, float)):
        since, ended = (time_text(at_s, now_s) for at_s in (since_s, ended_s))
        return f"{told} (first since {since}, patient until {ended})"
    return told


def _told(reason: Reason) -> str:
    code, text = str(reason.code), reason.text
    if text.lower().startswith(code.lower()):  # "held by its owner" says it already
        return printable(code + text[len(code) :])
    return printable(f"{code}: {text}" if text else code)


def _ending_text(job: JobView) -> str:
    code = exit_text(job)
    text = job.state.lower() if code in ("?", NONE) else f"exit {code}"
    detail = job.cause_detail or (job.reason.text if job.reason else "")
    if not detail and job.cause not in (None, "exit", job.state.lower()):
        detail = str(job.cause).replace("_", " ")
    if detail.startswith(text):
        return printable(detail)
    return f"{text} ({printable(detail)})" if detail else text


def status_word(job: JobView) -> str:
    """One of the three words that workflow managers ask for."""
    if job.state.is_live:
        return "running"
    return "success" if job.state is JobState.COMPLETED else "failed"
