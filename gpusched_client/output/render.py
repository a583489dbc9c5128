"""Responses as people and programs read them: tables, one job in full, JSON, sentences.

Pure: the time, the terminal's width and who asks are arguments; nothing is printed here. What
comes from other users is escaped, so that no name can drive a terminal.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gpusched_client.terms import JobState, fill_pattern, printable
from gpusched_client.units import (
    bytes_short,
    bytes_text,
    duration_text,
    format_duration,
)
from gpusched_client.wire.admin_messages import StatusResult, UsageView
from gpusched_client.wire.gpu_messages import GpuView
from gpusched_client.wire.job_messages import GpuUseView, JobView, Outcome
from gpusched_client.wire.limits import limit_from_wire
from gpusched_client.wire.message import Message
from gpusched_client.wire.submit_messages import JobRequest

_NONE = "-"
_LAST_COLUMN_CHARS_MIN = 12
_NAME_CHARS_MIN = 8

EXIT_TIMEOUT, EXIT_CANCELLED, EXIT_UNKNOWN = 124, 143, 70


# ------------------------------------------------------------------------------------- texts


def time_text(at_s: float, now_s: float) -> str:
    """Local time: "14:20" today, "Dec 03 14:20" in this year, else with the year."""
    then, now = time.localtime(at_s), time.localtime(now_s)
    if then[:3] == now[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%b %d %H:%M" if then[0] == now[0] else "%Y-%m-%d %H:%M", then)


def iso_time(at_s: float) -> str:
    """ISO 8601 in UTC, to the millisecond where there is a fraction."""
    whole, thousandths = divmod(round(at_s * 1000), 1000)
    fraction = f".{thousandths:03}" if thousandths else ""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + fraction + "Z"


def start_text(job: JobView, now_s: float) -> str:
    """When it started; before that `by 14:20` (promised) or `expected 14:20`."""
    if job.started_at_s is not None:
        return time_text(job.started_at_s, now_s)
    if job.promised_start_s is not None:
        return f"by {time_text(job.promised_start_s, now_s)}"
    if job.expected_start_s is not None:
        return f"expected {time_text(job.expected_start_s, now_s)}"
    return _NONE


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
    return "whole" if job.gpus else _NONE


def exit_text(job: JobView) -> str:
    """`code:signal` as Slurm shows it, `-` where nothing ran, `?` where the end is not known."""
    if job.exit_code is None and job.exit_signal is None:
        return _NONE if job.started_at_s is None else "?"
    return f"{job.exit_code or 0}:{job.exit_signal or 0}"


def gpu_or_reason(job: JobView) -> str:
    """GPU numbers while it holds some, why it waits before, how it ended after."""
    if job.state is JobState.PENDING:
        return _reason_text(job) or _NONE
    if job.state.is_live:
        return ",".join(map(str, job.gpu_indices or ())) or _NONE
    return _ending_text(job)


def _reason_text(job: JobView) -> str:
    if job.reason is None:
        return ""
    code, text = str(job.reason.code), job.reason.text
    if text.lower().startswith(code.lower()):  # "held by its owner" says it already
        return printable(code + text[len(code) :])
    return printable(f"{code}: {text}" if text else code)


def _ending_text(job: JobView) -> str:
    code = exit_text(job)
    text = job.state.lower() if code in ("?", _NONE) else f"exit {code}"
    detail = job.cause_detail or (job.reason.text if job.reason else "")
    if not detail and job.cause not in (None, "exit", job.state.lower()):
        detail = str(job.cause).replace("_", " ")
    if detail.startswith(text):
        return printable(detail)
    return f"{text} ({printable(detail)})" if detail else text


def exit_status(job: JobView) -> int:
    """What a command that waited for the job ends with; 0 for COMPLETED only."""
    if job.state is JobState.COMPLETED:
        return 0
    if job.state is JobState.TIMEOUT:
        return EXIT_TIMEOUT
    if job.state is JobState.CANCELLED:
        return EXIT_CANCELLED
    if job.state in (JobState.FAILED, JobState.OUT_OF_MEMORY):
        if job.exit_signal:
            return 128 + job.exit_signal
        return job.exit_code or EXIT_UNKNOWN
    return EXIT_UNKNOWN


def refusal_text(outcome: Outcome) -> str:
    """Why one job was left as it is; names the job once."""
    text = outcome.text or str(outcome.code)
    named = re.search(rf"\bjob {outcome.job_id}\b", text) is not None
    return text if named else f"job {outcome.job_id}: {text}"


def status_word(job: JobView) -> str:
    """One of the three words that workflow managers ask for."""
    if job.state.is_live:
        return "running"
    return "success" if job.state is JobState.COMPLETED else "failed"


def understood(request: JobRequest, time_limit_s: int | None) -> str:
    """What a submission asks for, in words: "2 GPUs, 18 GiB each, limit 30 min"."""
    parts = [f"{request.gpus or 'no'} GPU{'' if request.gpus == 1 else 's'}"]
    if request.gpus == 0:
        parts = ["no GPU"]
    if request.vram_bytes is not None:
        parts.append(bytes_text(request.vram_bytes) + (" each" if request.gpus > 1 else ""))
    if request.gpu_model is not None:
        parts.append(f"model {printable(request.gpu_model)}")
    if request.exclusive:
        parts.append("exclusive")
    if request.topology is not None:
        parts.append(f"connected by {request.topology}")
    if request.memory_bytes is not None:
        parts.append(f"{bytes_text(request.memory_bytes)} of host memory")
    if request.cpus is not None:
        parts.append(f"{request.cpus} CPU{'' if request.cpus == 1 else 's'}")
    parts.append(_limit_words(request.time_limit_s, time_limit_s))
    if request.retries:
        parts.append(f"up to {request.retries} {'retry' if request.retries == 1 else 'retries'}")
    if request.hold:
        parts.append("held")
    return ", ".join(parts)


def _limit_words(asked_s: int | None, given_s: int | None) -> str:
    if given_s is None:
        given_s = asked_s
    if given_s is None:
        return "default limit"
    limit_s = limit_from_wire(given_s)
    if limit_s is None:
        return "no limit"
    words = f"limit {duration_text(limit_s)}"
    return words if asked_s is not None else f"{words} (default), stopped after that"


# ------------------------------------------------------------------------------------ tables


@dataclass(frozen=True, slots=True)
class View:
    """Who looks, when, and how wide the terminal is (None: a file or a pipe, never cut)."""

    now_s: float
    uid: int
    width: int | None = None


def _user_text(job: JobView, view: View) -> str:
    user = printable(job.user) if job.user is not None else str(job.uid or _NONE)
    return f"{user}*" if job.uid == view.uid else user


def _start_of(at_s: float | None, view: View) -> str:
    return _NONE if at_s is None else time_text(at_s, view.now_s)


COLUMNS: dict[str, Callable[[JobView, View], str]] = {
    "JOBID": lambda job, _: str(job.job_id),
    "NAME": lambda job, _: printable(job.name or _NONE),
    "USER": _user_text,
    "ST": lambda job, _: job.state.short,
    "ELAPSED": lambda job, view: elapsed_text(job, view.now_s),
    "LIMIT": lambda job, _: (
        _NONE if job.time_limit_s is None else format_duration(limit_from_wire(job.time_limit_s))
    ),
    "GPUS": lambda job, _: str(job.gpus),
    "VRAM": lambda job, _: vram_text(job),
    "START": lambda job, view: start_text(job, view.now_s),
    "GPU/REASON": lambda job, _: gpu_or_reason(job),
    "STATE": lambda job, _: job.state.value,
    "UID": lambda job, _: _NONE if job.uid is None else str(job.uid),
    "EXIT": lambda job, _: _NONE if job.state.is_live else exit_text(job),
    "CAUSE": lambda job, _: printable(job.cause or _NONE),
    "REASON": lambda job, _: _reason_text(job) or _NONE,
    "GPUIDS": lambda job, _: ",".join(map(str, job.gpu_indices or ())) or _NONE,
    "UUIDS": lambda job, _: printable(",".join(job.gpu_uuids or ())) or _NONE,
    "MODEL": lambda job, _: printable(job.gpu_model or _NONE),
    "NICE": lambda job, _: _NONE if job.nice is None else str(job.nice),
    "PRIORITY": lambda job, _: _NONE if job.priority is None else f"{job.priority:.1f}",
    "ATTEMPT": lambda job, _: _NONE if job.attempt is None else str(job.attempt),
    "SUBMITTED": lambda job, view: _start_of(job.submitted_at_s, view),
    "ENDED": lambda job, view: _start_of(job.ended_at_s, view),
    "COMMAND": lambda job, _: printable(job.command or _NONE),
    "DIRECTORY": lambda job, _: printable(job.cwd or _NONE),
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
        if view.width is None or max(map(_places, text.splitlines())) <= view.width:
            break
        shown.remove(least)
        text = _jobs_table(jobs, view, shown)
    return text


def _jobs_table(jobs: Iterable[JobView], view: View, columns: Sequence[str]) -> str:
    rows = [[COLUMNS[column](job, view) for column in columns] for job in jobs]
    return table(columns, rows, view.width, _RIGHT)


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    right: frozenset[str] = frozenset(),
) -> str:
    """Aligned columns; where `width` is given, the last column and the names are cut to fit."""
    lines = [list(headings), *map(list, rows)]
    widths = [max(map(_places, column)) for column in zip(*lines, strict=True)]
    gap = "  " if width is None else _fit(widths, headings, width)
    text_lines = []
    for line in lines:
        cells = [
            _cell(cell, widths[index], headings[index] in right) for index, cell in enumerate(line)
        ]
        text_lines.append(gap.join(cells).rstrip() + "\n")
    return "".join(text_lines)


def _fit(widths: list[int], headings: Sequence[str], width: int) -> str:
    """Shrink the widths towards `width` and give the gap: the last column first, then names."""
    gap = "  "
    left = width - sum(widths[:-1]) - len(gap) * (len(widths) - 1)
    if left < min(widths[-1], _LAST_COLUMN_CHARS_MIN):
        gap = " "
        left += len(widths) - 1
    missing = min(widths[-1], _LAST_COLUMN_CHARS_MIN) - left
    if missing > 0 and "NAME" in headings[:-1]:
        index = headings.index("NAME")
        taken = min(missing, max(0, widths[index] - _NAME_CHARS_MIN))
        widths[index] -= taken
        left += taken
    widths[-1] = min(widths[-1], max(left, _LAST_COLUMN_CHARS_MIN))
    return gap


def _cell(text: str, width: int, is_right: bool) -> str:
    places = _places(text)
    if places > width:
        while places > width - 3:
            places, text = places - _places(text[-1]), text[:-1]
        text, places = text + "...", places + 3
    padding = " " * (width - places)
    return padding + text if is_right else text + padding


def _places(text: str) -> int:
    """Columns of a terminal that the text takes: CJK characters two, combining ones none."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF")
        for char in text
    )


def gpus_table(gpus: Iterable[GpuView], width: int | None = None) -> str:
    """One line a GPU: what is used, promised and foreign; `?` where it cannot be read."""
    headings = ("GPU", "MODEL", "STATE", "TOTAL", "USED", "PROMISED", "FOREIGN", "UTIL", "JOBS")
    rows = [[*_gpu_cells(gpu), printable(gpu.reason or "")] for gpu in gpus]
    if not any(row[-1] for row in rows):
        rows = [row[:-1] for row in rows]
    else:
        headings = (*headings, "REASON")  # type: ignore[assignment]  # one column more
    right = frozenset({"GPU", "TOTAL", "USED", "PROMISED", "FOREIGN", "UTIL"})
    return table(headings, rows, width, right)


def _gpu_cells(gpu: GpuView) -> list[str]:
    def size(value: int | None) -> str:
        return "?" if value is None else bytes_short(value) if value else "0"

    state = printable(gpu.state) + (" (stale)" if gpu.stale else "")
    used = "?" if gpu.utilization is None else f"{gpu.utilization:.0f}%"
    jobs = ",".join(map(str, gpu.jobs)) or _NONE
    sizes = map(size, (gpu.total_bytes, gpu.used_bytes, gpu.promised_bytes, gpu.foreign_bytes))
    return [str(gpu.index), printable(gpu.model or "?"), state, *sizes, used, jobs]


def usage_table(users: Iterable[UsageView], width: int | None = None) -> str:
    """One line a user: decayed GPU hours, shares, F, and what runs and waits."""
    headings = ("USER", "GPU-HOURS", "SHARES", "F", "RUNNING", "GPUS", "PENDING")

    def cells(user: UsageView) -> list[str]:
        numbers = (user.running_jobs, user.running_gpus, user.pending_jobs)
        return [
            printable(user.user),
            f"{user.usage_gpu_s / 3600:.2f}",
            _NONE if user.shares is None else f"{user.shares:g}",
            _NONE if user.factor is None else f"{user.factor:.3f}",
            *[_NONE if number is None else f"{round(number, 2):g}" for number in numbers],
        ]

    return table(headings, [cells(user) for user in users], width, frozenset(headings[1:]))


# -------------------------------------------------------------------------------- one job


def job_detail(job: JobView, view: View) -> str:
    """Everything about one job, one fact a line, unknown ones left out."""
    facts = [
        ("Job", f"{job.job_id}  {printable(job.name or '')}".rstrip()),
        ("User", _user_text(job, view)),
        ("State", job.state.value),
        *_waiting_facts(job, view),
        *_request_facts(job),
        *_run_facts(job, view),
        *_place_facts(job),
    ]
    text = "".join([_fact_line(name, value) for name, value in facts if value])
    for heading, lines in (
        ("What would help", job.explanations or ()),
        ("History", [_event_line(event, view) for event in job.events or ()]),
    ):
        if lines:
            text += f"{heading}:\n" + "".join([f"  {printable(line)}\n" for line in lines])
    return text


def _fact_line(name: str, value: str) -> str:
    return f"{name + ':' if name else '':<14}{value}\n"


def _event_line(event: Any, view: View) -> str:
    return f"{time_text(event.at_s, view.now_s)}  {event.kind}  {event.text}".rstrip()


def _waiting_facts(job: JobView, view: View) -> list[tuple[str, str]]:
    if job.state is not JobState.PENDING:
        return []
    start = start_text(job, view.now_s)
    return [
        ("Waits for", _reason_text(job)),
        ("Start", "" if start == _NONE else start),
        ("Position", "" if job.queue_position is None else str(job.queue_position)),
        ("Priority", _priority_text(job)),
    ]


def _priority_text(job: JobView) -> str:
    if job.priority is None:
        return ""
    parts = [f"{name} {_number(part)}" for name, part in (job.priority_parts or {}).items()]
    return f"{job.priority:.1f}" + (f" = {', '.join(parts)}" if parts else "")


def _number(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else printable(str(value))


def _request_facts(job: JobView) -> list[tuple[str, str]]:
    vram = "" if job.vram_bytes is None else f", {bytes_text(job.vram_bytes)} each"
    whole = ", whole" if job.gpus and job.vram_bytes is None else ""
    limit = ""
    if job.time_limit_s is not None:
        limit = duration_text(limit_from_wire(job.time_limit_s))
    return [
        ("GPUs", f"{job.gpus}{vram}{whole}"),
        ("Model", printable(job.gpu_model or "")),
        ("Exclusive", "yes" if job.exclusive else ""),
        ("Topology", printable(job.topology or "")),
        ("Host memory", "" if job.memory_bytes is None else bytes_text(job.memory_bytes)),
        ("CPUs", str(job.cpus or "")),
        ("Time limit", limit),
        ("Nice", str(job.nice) if job.nice else ""),
        ("Held", "yes" if job.hold else ""),
        ("Retries", str(job.retries) if job.retries else ""),
    ]


def _run_facts(job: JobView, view: View) -> list[tuple[str, str]]:
    def at(moment_s: float | None) -> str:
        return "" if moment_s is None else time_text(moment_s, view.now_s)

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
        *_gpu_facts(job),
    ]


_SOURCES = {
    "driver": "by the driver",
    "sampled": "sampled",
    "device": "by difference on the device",
}


def _gpu_facts(job: JobView) -> list[tuple[str, str]]:
    """Declared against actual; one line a GPU where there are several."""
    busy, joules, gpu_s = job.gpu_utilization, job.energy_j, job.gpu_seconds
    uses = job.gpu_uses or ()
    return [
        ("Peak VRAM", _peak_text(job)),
        ("Verdict", _verdict_text(job)),
        ("GPU busy", "" if busy is None else f"{busy:.0f} % on average"),
        ("GPU time", "" if gpu_s is None else f"{format_duration(round(gpu_s))} of one GPU"),
        ("Energy", "" if joules is None else f"{joules / 3600:.2f} Wh"),
        *[("", _use_text(use)) for use in uses if len(uses) > 1],
    ]


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
    return f"GPU {_NONE if use.gpu_index is None else use.gpu_index}: peak {peak}{busy}{joules}"


def _cause_text(job: JobView) -> str:
    cause = (job.cause or "").replace("_", " ")
    return printable(f"{cause}: {job.cause_detail}" if job.cause_detail else cause)


def _place_facts(job: JobView) -> list[tuple[str, str]]:
    label, command = "Command", job.command
    if job.argv is not None:
        import shlex

        label = "Command" if job.script_bytes is None else "Arguments"
        command = shlex.join([os.fsdecode(word) for word in job.argv])
    return [
        (label, printable(command or "")),
        ("Script", "" if job.script_bytes is None else f"{job.script_bytes} bytes"),
        ("Directory", printable(job.cwd or "")),
        ("Output", printable(_file_of(job, job.output))),
        ("Error", printable(_file_of(job, job.error))),
    ]


def _file_of(job: JobView, pattern: bytes | None) -> bytes:
    """Where its words go: the pattern filled in as the daemon does it, in the job's directory."""
    name, user = job.name or "", job.user or ""
    filled = fill_pattern(pattern or b"", job_id=job.job_id, name=name, user=user)
    return os.path.join(job.cwd or b"", filled) if filled else b""


# -------------------------------------------------------------------------------- the daemon


def status_text(status: StatusResult, now_s: float, width: int | None = None) -> str:
    """The daemon's health, one fact a line; what needs a person comes last."""
    facts = [
        ("Daemon", f"gpuschedd {status.version}, pid {status.pid}, {status.mode} mode"),
        ("Up since", time_text(status.started_at_s, now_s)),
        ("Jobs start", "through PID 1" if status.launch == "pid1" else "directly"),
        ("GPUs", f"{status.gpus_ok} of {status.gpus} in service ({status.gpu_source})"),
        ("Last sample", _ago(status.sample_age_s)),
        ("Database", f"{status.database}, {_size_or_unknown(status.database_bytes)}"),
        ("Disk free", _size_or_unknown(status.disk_free_bytes)),
        ("Jobs", f"{status.running_jobs} running, {status.pending_jobs} queued"),
        ("Connections", str(status.connections)),
        ("Last pass", "?" if status.pass_s is None else f"{1000 * status.pass_s:.1f} ms"),
    ]
    lines = [f"{name + ':':<13}{printable(value)}" for name, value in facts]
    if status.last_errors:
        lines.append("Last errors in the log:")
        lines += [
            f"  {time_text(error.at_s, now_s)}  {printable(error.text)}"
            for error in status.last_errors[-10:]
        ]
    lines += [f"PROBLEM: {printable(problem)}" for problem in status.problems]
    lines += [] if status.problems else ["All is well."]
    return "".join([_cut(line, width) + "\n" for line in lines])


def _ago(age_s: float | None) -> str:
    return "none yet" if age_s is None else f"{age_s:.1f} s ago"


def _size_or_unknown(size: int | None) -> str:
    return "size unknown" if size is None else bytes_text(size)


def _cut(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else line[: width - 3] + "..."


# -------------------------------------------------------------------------------------- JSON


def json_text(value: object) -> str:
    """One JSON value and a newline. ASCII, so that no byte of a command line can spoil it."""
    return json.dumps(json_value(value), allow_nan=False) + "\n"


def json_value(value: object) -> Any:
    """Messages as objects: times ISO 8601 under the names without _s, byte strings as text."""
    if isinstance(value, Message):
        return json_value(value.to_wire())
    if isinstance(value, Mapping):
        return dict([_json_item(name, item) for name, item in value.items()])
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, bytes):
        return os.fsdecode(value)
    return value.value if isinstance(value, Enum) else value


def _json_item(name: Any, item: object) -> tuple[str, Any]:
    name = os.fsdecode(name) if isinstance(name, bytes) else str(name)
    if name == "at_s" or name.endswith(("_at_s", "_start_s")):
        is_time = isinstance(item, (int, float))
        return name.removesuffix("_s"), iso_time(item) if is_time else None  # type: ignore[arg-type]
    return name, json_value(item)
