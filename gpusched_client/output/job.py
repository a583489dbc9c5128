"""Jobs as people read them: a table of many, one in full.

Pure: the time, the terminal's width and who asks are arguments; nothing is printed here. What
comes from other users is escaped, so that no name can drive a terminal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gpusched_client.output.table import places, table
from gpusched_client.output.text import (
    NONE,
    elapsed_text,
    exit_text,
    gpu_or_reason,
    reason_text,
    start_text,
    time_text,
    vram_text,
)
from gpusched_client.terms import JobState, fill_pattern, printable
from gpusched_client.units import bytes_text, duration_about, format_duration
from gpusched_client.wire.job_options import asked_facts
from gpusched_client.wire.limits import UNLIMITED_S, limit_from_wire

if TYPE_CHECKING:
    from gpusched_client.wire.job_messages import GpuUseView, JobEvent, JobView


class View(NamedTuple):
    """Who is looking, when, how wide the terminal is (None: a file or a pipe, never cut), where."""

    now_s: float
    uid: int
    width: int | None = None
    host: str = ""


def _user_text(job: JobView, view: View) -> str:
    user = printable(job.user) if job.user is not None else str(job.uid or NONE)
    return f"{user}*" if job.uid == view.uid else user


def _start_of(at_s: float | None, view: View) -> str:
    return NONE if at_s is None else time_text(at_s, view.now_s)


COLUMNS: dict[str, Callable[[JobView, View], str]] = {
    "JOBID": lambda job, _: str(job.job_id),
    "NAME": lambda job, _: printable(job.name or NONE),
    "USER": _user_text,
    "ST": lambda job, _: job.state.short,
    "ELAPSED": lambda job, view: elapsed_text(job, view.now_s),
    "LIMIT": lambda job, _: (
        NONE if job.time_limit_s is None else format_duration(limit_from_wire(job.time_limit_s))
    ),
    "GPUS": lambda job, _: str(job.gpus),
    "VRAM": lambda job, _: vram_text(job),
    "START": lambda job, view: start_text(job, view.now_s),
    "GPU/REASON": lambda job, view: gpu_or_reason(job, view.now_s),
    "STATE": lambda job, _: job.state.value,
    "UID": lambda job, _: NONE if job.uid is None else str(job.uid),
    "EXIT": lambda job, _: NONE if job.state.is_live else exit_text(job),
    "CAUSE": lambda job, _: printable(job.cause or NONE),
    "REASON": lambda job, view: reason_text(job, view.now_s) or NONE,
    "GPUIDS": lambda job, _: ",".join(map(str, job.gpu_indices or ())) or NONE,
    "UUIDS": lambda job, _: printable(",".join(job.gpu_uuids or ())) or NONE,
    "MODEL": lambda job, _: printable(job.gpu_model or NONE),
    "NICE": lambda job, _: str(job.nice),
    "PRIORITY": lambda job, _: NONE if job.priority is None else f"{job.priority:.1f}",
    "ATTEMPT": lambda job, _: NONE if job.attempt is None else str(job.attempt),
    "SUBMITTED": lambda job, view: _start_of(job.submitted_at_s, view),
    "ENDED": lambda job, view: _start_of(job.ended_at_s, view),
    "COMMAND": lambda job, _: printable(job.command or NONE),
    "DIRECTORY": lambda job, _: printable(job.cwd or NONE),
}
DEFAULT_COLUMNS = (
    ("JOBID", "NAME", "USER", "ST", "ELAPSED", "LIMIT", "GPUS", "VRAM", "START", "GPU/REASON")
)  # fmt: skip
_LEFT_OUT_FIRST = ("LIMIT", "VRAM", "ELAPSED", "GPUS")
_RIGHT = frozenset({"JOBID", "ELAPSED", "LIMIT", "GPUS", "VRAM", "UID", "NICE", "PRIORITY"})


def jobs_table(
    jobs: Iterable[JobView], view: View, columns: Sequence[str] = DEFAULT_COLUMNS
) -> str:
    """One line a job below a line of headings; on a narrow terminal without the least of them."""
    jobs, shown = tuple(jobs), list(columns)
    text = _jobs_table(jobs, view, shown)
    for least in _LEFT_OUT_FIRST if columns == DEFAULT_COLUMNS else ():
        if view.width is None or max(map(places, text.splitlines())) <= view.width:
            break
        shown.remove(least)
        text = _jobs_table(jobs, view, shown)
    return text


def _jobs_table(jobs: Iterable[JobView], view: View, columns: Sequence[str]) -> str:
    rows = [[COLUMNS[column](job, view) for column in columns] for job in jobs]
    return table(columns, rows, view.width, _RIGHT)


# -------------------------------------------------------------------------------- one job


def job_detail(job: JobView, view: View) -> str:
    """Everything about one job, one fact a line, unknown ones left out."""
    facts = [
        ("Job", f"{job.job_id}  {printable(job.name or '')}".rstrip()),
        ("User", _user_text(job, view)),
        ("State", job.state.value),
        *_waiting_facts(job, view),
        *asked_facts(job),
        *_run_facts(job, view),
        *_place_facts(job, view),
    ]
    text = "".join([_fact_line(name, printable(value)) for name, value in facts if value])
    for heading, lines in (
        ("What would help", job.explanations or ()),
        ("History", [_event_line(event, view) for event in job.events or ()]),
    ):
        if lines:
            text += f"{heading}:\n" + "".join([f"  {printable(line)}\n" for line in lines])
    return text


def _fact_line(name: str, value: str) -> str:
    return f"{name + ':' if name else '':<14}{value}\n"


def _event_line(event: JobEvent, view: View) -> str:
    from gpusched_client.output.events import sentence  # lists need none

    clock = partial(time_text, now_s=view.now_s, exact=True)
    return f"{clock(event.at_s)}  {sentence(event, clock)}"


def _waiting_facts(job: JobView, view: View) -> list[tuple[str, str]]:
    if job.state is not JobState.PENDING:
        return [("Expected", _length_text(job))] if job.state.is_live else []
    start = start_text(job, view.now_s, exact=True)
    return [
        ("Waits for", reason_text(job, view.now_s)),
        ("Start", "" if start == NONE else start),
        ("Promise", _lost_promise_text(job, view)),
        ("Expected", _length_text(job)),
        ("Head", _head_text(job, view)),
        ("Position", "" if job.queue_position is None else str(job.queue_position)),
        ("Priority", _priority_text(job)),
    ]


def _length_text(job: JobView) -> str:
    """ "to run 2.1 h (last two runs of train.py)"; with a limit alone there is nothing to say."""
    if job.expected_run_s is None:
        return ""
    if job.state is not JobState.PENDING:
        is_more = job.expected_run_s != job.time_limit_s
        return f"to run {duration_about(job.expected_run_s)}, as it started" if is_more else ""
    if job.expected_by is None:
        return ""
    limit = "; no limit" if job.time_limit_s == UNLIMITED_S else ""
    return printable(f"to run {duration_about(job.expected_run_s)} ({job.expected_by}){limit}")


def _head_text(job: JobView, view: View) -> str:
    """ "first at 14:02:11, expected then to start at 16:20:00"; what patience does for it."""
    if job.head_at_s is None or job.head_expected_start_s is None:
        return ""
    at = partial(time_text, now_s=view.now_s, exact=True)
    text = (
        f"first at {at(job.head_at_s)}, expected then to start at {at(job.head_expected_start_s)}"
    )
    if job.patience_ends_at_s is None:
        return text
    over = job.patience_ends_at_s <= view.now_s
    since = "" if over else f"from {at(job.patience_ends_at_s)} on "
    return f"{text}; {since}nothing behind it starts on the GPUs it is to get"


def _lost_promise_text(job: JobView, view: View) -> str:
    if job.lost_start_s is None:
        return ""
    cause = (job.lost_promise_cause or "").replace("_", " ")
    return printable(f"of {time_text(job.lost_start_s, view.now_s, exact=True)} was lost: {cause}")


def _priority_text(job: JobView) -> str:
    if job.priority is None:
        return ""
    parts = [f"{name} {_number(part)}" for name, part in (job.priority_parts or {}).items()]
    return f"{job.priority:.1f}" + (f" = {', '.join(parts)}" if parts else "")


def _number(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else printable(str(value))


def _run_facts(job: JobView, view: View) -> list[tuple[str, str]]:
    def at(moment_s: float | None) -> str:
        return "" if moment_s is None else time_text(moment_s, view.now_s, exact=True)

    cpu = ""
    if job.cpu_user_s is not None and job.cpu_system_s is not None:
        cpu = f"{job.cpu_user_s:.1f} s user, {job.cpu_system_s:.1f} s system"
    return [
        ("Submitted", at(job.submitted_at_s)),
        ("Started", at(job.started_at_s)),
        ("Ended", at(job.ended_at_s)),
        ("Elapsed", "" if job.started_at_s is None else elapsed_text(job, view.now_s)),
        ("On GPUs", ",".join(map(str, job.gpu_indices or ()))),
        ("GPU UUIDs", printable(", ".join(job.gpu_uuids or ()))),
        ("Attempt", str(job.attempt) if job.attempt and job.attempt > 1 else ""),
        ("Exit", "" if job.state.is_live else exit_text(job)),
        ("Cause", _cause_text(job)),
        ("CPU time", cpu),
        ("Peak memory", "" if job.max_rss_bytes is None else bytes_text(job.max_rss_bytes)),
        *_gpu_facts(job, view),
    ]


UNSEEN_S_MAX, UNSEEN_SHARE_MAX = 10.0, 0.05  # between samples, and at both ends

_SOURCES = {
    "driver": "by the driver",
    "sampled": "sampled",
    "device": "by difference on the device",
    "at-least": "at least: memory that no process owns was beside it",
}


def _gpu_facts(job: JobView, view: View) -> list[tuple[str, str]]:
    """Declared against actual; one line a GPU where there are several."""
    busy, joules, gpu_s = job.gpu_utilization, job.energy_j, job.gpu_seconds
    uses = job.gpu_uses or ()
    part = _observed_part(job, view.now_s)
    return [
        ("Peak VRAM", _peak_text(job)),
        ("Verdict", _verdict_text(job)),
        ("GPU busy", "" if busy is None else f"{busy:.0f} % on average{part}"),
        ("GPU time", "" if gpu_s is None else f"{format_duration(round(gpu_s))} of one GPU"),
        ("Energy", "" if joules is None else f"{joules / 3600:.2f} Wh{part}"),
        *[("", _use_text(use)) for use in uses if len(uses) > 1],
    ]


def _observed_part(job: JobView, now_s: float) -> str:
    """Which part of its run, so far, the figures are of, where nobody looked for a while."""
    seen_s, start_s, end_s = job.gpu_observed_s, job.started_at_s, job.ended_at_s
    if seen_s is None or start_s is None:
        return ""
    ran_s = (now_s if end_s is None else end_s) - start_s
    if ran_s - seen_s <= max(UNSEEN_S_MAX, UNSEEN_SHARE_MAX * ran_s):
        return ""
    seen, ran = format_duration(round(seen_s)), format_duration(round(ran_s))
    return f" (seen for {seen} of {ran})"


def _peak_text(job: JobView) -> str:
    if job.vram_peak_bytes is None:
        return "n/a" if job.gpu_uses else ""
    source = _SOURCES.get(job.vram_peak_source or "", "")
    return bytes_text(job.vram_peak_bytes) + (f" ({source})" if source else "")


def _verdict_text(job: JobView) -> str:
    better = "" if job.vram_next_bytes is None else bytes_text(job.vram_next_bytes)
    return {
        "within": "the declaration was right",
        "under-declared": f"under-declared: raise --vram to {better}",
        "over-declared": f"over-declared: --vram {better} would free room for others",
        "unattributed": "no GPU memory was seen of it",
    }.get(job.vram_verdict or "", "")


def _use_text(use: GpuUseView) -> str:
    peak = "n/a" if use.peak_bytes is None else bytes_text(use.peak_bytes)
    busy = "" if use.utilization is None else f", {use.utilization:.0f} % busy"
    joules = "" if use.energy_j is None else f", {use.energy_j / 3600:.2f} Wh"
    return f"GPU {NONE if use.gpu_index is None else use.gpu_index}: peak {peak}{busy}{joules}"


def _cause_text(job: JobView) -> str:
    cause = (job.cause or "").replace("_", " ")
    return printable(f"{cause}: {job.cause_detail}" if job.cause_detail else cause)


def _place_facts(job: JobView, view: View) -> list[tuple[str, str]]:
    label, command = "Command", job.command
    if job.argv is not None:
        import shlex

        label = "Command" if job.script_bytes is None else "Arguments"
        command = shlex.join([os.fsdecode(word) for word in job.argv])
    return [
        (label, printable(command or "")),
        ("Script", "" if job.script_bytes is None else f"{job.script_bytes} bytes"),
        ("Directory", printable(job.cwd or "")),
        ("Output", printable(_file_of(job, job.output, view))),
        ("Error", printable(_file_of(job, job.error, view))),
    ]


def _file_of(job: JobView, pattern: bytes | None, view: View) -> bytes:
    """Where its output goes: the pattern filled in as the daemon does, in the job's directory."""
    name, user = job.name or "", job.user or ""
    filled = fill_pattern(pattern or b"", job_id=job.job_id, name=name, user=user, host=view.host)
    return os.path.join(job.cwd or b"", filled) if filled else b""
