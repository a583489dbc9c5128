"""The host as people read it: its GPUs, its users' accounts, the daemon's health. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpusched_client.output.table import cut, table
from gpusched_client.output.text import NONE, time_text
from gpusched_client.terms import Launch, printable
from gpusched_client.units import bytes_short, bytes_text

if TYPE_CHECKING:
    from gpusched_client.wire.admin_messages import StatusResult, UsageView
    from gpusched_client.wire.gpu_messages import GpuView


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
    jobs = ",".join(map(str, gpu.jobs)) or NONE
    sizes = map(size, (gpu.total_bytes, gpu.used_bytes, gpu.promised_bytes, gpu.foreign_bytes))
    index = NONE if gpu.index is None else str(gpu.index)
    return [index, printable(gpu.model or "?"), state, *sizes, used, jobs]


def usage_table(users: Iterable[UsageView], width: int | None = None) -> str:
    """One line a user: decayed GPU hours, shares, F, what runs and waits, how good guesses were.

    ERROR is the median error of expected lengths, GUESSED counts the starts that they allowed,
    LATE those of heads that came later than first expected.
    """
    accounts = ("USER", "GPU-HOURS", "SHARES", "F", "RUNNING", "GPUS", "PENDING")
    headings = (*accounts, "ERROR", "GUESSED", "LATE")

    def cells(user: UsageView) -> list[str]:
        numbers = (user.running_jobs, user.running_gpus, user.pending_jobs)
        error = user.expected_run_median_error
        return [
            printable(user.user),
            f"{user.usage_gpu_s / 3600:.2f}",
            NONE if user.shares is None else f"{user.shares:g}",
            NONE if user.factor is None else f"{user.factor:.3f}",
            *[NONE if number is None else f"{round(number, 2):g}" for number in numbers],
            NONE if error is None else f"{100 * error:.0f}%",
            str(user.starts_by_guess or 0),
            f"{user.heads_later_than_expected or 0}/{user.heads_started or 0}",
        ]

    return table(headings, [cells(user) for user in users], width, frozenset(headings[1:]))


def status_text(status: StatusResult, now_s: float, width: int | None = None) -> str:
    """The daemon's health, one fact a line; what needs attention comes last."""
    facts = [
        ("Daemon", f"gpuschedd {status.version}, pid {status.pid}, {status.mode} mode"),
        ("Up since", time_text(status.started_at_s, now_s)),
        ("Jobs start", "through PID 1" if status.launch == Launch.PID1 else "directly"),
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
    return "".join([cut(line, width) + "\n" for line in lines])


def _ago(age_s: float | None) -> str:
    return "none yet" if age_s is None else f"{age_s:.1f} s ago"


def _size_or_unknown(size: int | None) -> str:
    return "size unknown" if size is None else bytes_text(size)
