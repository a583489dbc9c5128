"""The self-test's jobs: submitted, watched through what they say, and never left behind."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeVar

from gpusched_client import Client, job_request
from gpusched_client.errors import GpuschedError
from gpusched_client.terms import JobState, PendingReason
from gpusched_client.wire.job_messages import JobView
from gpuschedd.selftest.checks import Report
from gpuschedd.selftest.host import PROGRAM

LOOK_S = 0.1
ALL_S = 250.0  # the whole self-test, but for what ends its jobs
START_S = 30.0
END_S = 30.0
JOB_LIMIT_S = 90
REPORT_BYTES_MAX = 64 * 1024
#: Why a job waits that is in nobody's way: somebody else has what it needs.
OTHERS = frozenset(
    {
        *(PendingReason.NONE, PendingReason.RESOURCES, PendingReason.PRIORITY),
        *(PendingReason.RESERVED, PendingReason.FOREIGN_USE, PendingReason.UNLIMITED_JOB),
        *(PendingReason.USER_LIMIT, PendingReason.THROTTLED, PendingReason.GPU_UNAVAILABLE),
    }
)

T = TypeVar("T")


class Stopped(Exception):
    """A signal asked the self-test to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Patience:
    """How long is left, and whether somebody wants an end. Signals count between two looks."""

    def __init__(self) -> None:
        self._end_s = time.monotonic() + ALL_S
        self._signal: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number

    @property
    def is_over(self) -> bool:
        """Whether all of it is used up: nothing more is begun."""
        return time.monotonic() >= self._end_s

    def check(self) -> None:
        """Raise Stopped where a signal came."""
        if self._signal is not None:
            raise Stopped(self._signal)

    def until(self, look: Callable[[], T | None], within_s: float) -> T | None:
        """The first true value of look, None after within_s or at the end of all patience."""
        end_s = min(time.monotonic() + within_s, self._end_s)
        while True:
            self.check()
            value = look()
            if value or time.monotonic() > end_s:
                return value or None
            time.sleep(LOOK_S)


class Bench:
    """Jobs of our program, one GPU each, and the directory where they write."""

    def __init__(self, client: Client, patience: Patience, *, is_simulated: bool) -> None:
        self._client = client
        self._patience = patience
        self._kind = ["--simulated"] if is_simulated else []
        self._place = Path(tempfile.mkdtemp(prefix="gpuschedd-selftest-"))
        self._submitted: list[int] = []

    def options(self, size: int, seconds: float) -> list[str]:
        """Of our program, wherever it runs."""
        return [*self._kind, "--bytes", str(size), "--seconds", str(seconds)]

    def submit(self, count: int, size: int, seconds: float) -> list[int]:
        """So many jobs, each with a whole GPU."""
        request = job_request(
            [*PROGRAM, *self.options(size, seconds)],
            name="selftest",
            gpus=1,
            time_limit=JOB_LIMIT_S,
            cwd=self._place,
            output=self._place / "%j.out",
        )
        self._patience.check()
        jobs = self._client.submit_many([request] * count)
        self._submitted += [job.id for job in jobs]
        return [job.id for job in jobs]

    def begun(self, ids: Sequence[int]) -> tuple[list[JobView], list[JobView]]:
        """Those that said something or ended, and, cancelled, those that did not begin in time."""

        def all_said() -> bool:
            return all(self.report(job_id).pid or self._is_over(job_id) for job_id in ids)

        self._patience.until(all_said, START_S)
        views = [self._client.job(job_id) for job_id in ids]
        waiting = [view for view in views if view.state is JobState.PENDING]
        if waiting:
            self._client.cancel([view.job_id for view in waiting], reason="self-test")
        return [view for view in views if view not in waiting], waiting

    def ended(self, job_ids: Iterable[int]) -> dict[int, JobView]:
        """Have them end now, and look at them then; cancelled where they do not obey."""
        ids = list(job_ids)
        if not ids:
            return {}
        silent = [job_id for job_id in ids if not self.report(job_id).pid]
        if silent:  # nobody in there would hear a signal
            self._client.cancel(silent, reason="self-test")
        self._client.cancel(ids, signal=int(signal.SIGUSR1))

        def are_over() -> bool:
            return all(self._is_over(job_id) for job_id in ids)

        if not self._patience.until(are_over, END_S):
            self._client.cancel(ids, reason="self-test")
            self._patience.until(are_over, END_S)
        return {job_id: self._client.job(job_id) for job_id in ids}

    def over(self, job_id: int) -> JobView:
        """A job that ends by itself, at its end or after our patience."""
        self._patience.until(lambda: self._is_over(job_id), END_S)
        return self._client.job(job_id)

    def report(self, job_id: int) -> Report:
        """What a job's program has said; empty so far."""
        try:
            with (self._place / f"{job_id}.out").open("rb") as file:
                said = file.read(REPORT_BYTES_MAX)
        except OSError:
            return Report()
        return report_in(said.decode(errors="replace"))

    def _is_over(self, job_id: int) -> bool:
        (view,) = self._client.jobs([job_id]).jobs
        return view.state.is_final

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        try:
            if self._submitted:
                self._client.cancel(self._submitted, reason="self-test")
                self._client.wait(self._submitted, timeout_s=END_S)
        except GpuschedError:
            pass  # a daemon that is gone: its jobs end by themselves, after their time
        finally:
            shutil.rmtree(self._place, ignore_errors=True)


def report_in(said: str) -> Report:
    """The report in a program's output."""
    for line in said.splitlines(keepends=True):
        if line.startswith("{") and line.endswith("\n"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            return Report.of(found)
    return Report()


def is_others_fault(view: JobView) -> bool:
    """Whether a job that waits does so because others have what it needs."""
    return view.reason is None or view.reason.code in OTHERS


def waits_for(view: JobView) -> str:
    """The reason of a job that did not begin."""
    reason = view.reason
    return "not started in time" if reason is None else f"{reason.code}: {reason.text}"
