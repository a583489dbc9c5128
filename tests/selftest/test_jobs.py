"""How long a self-test takes at most, whatever its jobs do: by a virtual clock."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusched_client.errors import StillRunning
from gpusched_client.terms import JobState
from gpusched_client.wire.admin_messages import StatusResult
from gpusched_client.wire.gpu_messages import GpusResult, GpuView
from gpusched_client.wire.job_messages import JobView, Reason
from gpusched_client.wire.submit_messages import JobRequest
from gpuschedd.selftest import jobs, rounds
from gpuschedd.selftest.findings import Check, Finding
from gpuschedd.selftest.host import Listing
from gpuschedd.selftest.jobs import Bench, Patience
from gpuschedd.selftest.rounds import SelfTest, Tried

GIB = 2**30
FIVE_MINUTES_S = 300.0
CALL_S = 0.05  # each question to the daemon
STATUS = StatusResult(
    *("0.1.0", "user", "direct", 1, 0.0, "NVML", 4, 4, "/x/gpuschedd.sqlite3", 0, 0, 1)
)


@dataclass
class Clock:
    """Passes while the self-test sleeps, and while the daemon is asked."""

    now_s: float = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Endless:
    """A daemon whose jobs never end, whatever they are told."""

    def __init__(self, clock: Clock, *, state: JobState, speaks: bool) -> None:
        self._clock = clock
        self._state = state
        self._speaks = speaks
        self.requests: list[JobRequest] = []
        self.cancelled: set[int] = set()

    def status(self) -> StatusResult:
        self._clock.sleep(CALL_S)
        return STATUS

    def gpus(self) -> tuple[GpuView, ...]:
        self._clock.sleep(CALL_S)
        return tuple(
            GpuView(uuid=f"GPU-{index}", index=index, total_bytes=24 * GIB, state="ok")
            for index in range(4)
        )

    def gpus_result(self) -> GpusResult:
        return GpusResult(self.gpus())

    def submit_many(self, requests: Sequence[JobRequest]) -> list[Any]:
        self._clock.sleep(CALL_S)
        first = len(self.requests) + 1
        self.requests += requests
        ids = range(first, first + len(requests))
        for job_id, request in zip(ids, requests, strict=True):
            output = Path(os.fsdecode(request.output or b"").replace("%j", str(job_id)))
            if self._speaks:
                output.write_text(json.dumps({"pid": job_id, "uuids": []}) + "\n")
        return [SimpleNamespace(id=job_id) for job_id in ids]

    def job(self, job_id: int) -> JobView:
        self._clock.sleep(CALL_S)
        if self._state is JobState.PENDING:
            return JobView(job_id, self._state, reason=Reason("LaunchBackoff", "no pids"))
        return JobView(job_id, self._state, gpu_uuids=(f"GPU-{(job_id - 1) % 4}",))

    def jobs(self, ids: Iterable[int]) -> Any:
        return SimpleNamespace(jobs=tuple(self.job(job_id) for job_id in ids))

    def cancel(self, ids: Iterable[int], **how: object) -> None:
        self._clock.sleep(CALL_S)
        self.cancelled |= set() if "signal" in how else set(ids)

    def wait(self, ids: Iterable[int], *, timeout_s: float) -> None:
        del ids
        self._clock.sleep(timeout_s)
        raise StillRunning("they are not final")


class Beside:
    """The process beside the scheduler; nobody sees it."""

    pid = 77

    def __init__(self, *_: object) -> None:
        pass

    def is_over(self) -> bool:
        return False

    def end(self) -> str:
        return '{"pid": 77}\n'


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    numbers = {name: getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")}
    unheard = SimpleNamespace(signal=lambda *_: None, SIG_IGN=signal.SIG_IGN, **numbers)
    monkeypatch.setattr(jobs, "signal", unheard)
    monkeypatch.setattr(
        jobs, "time", SimpleNamespace(monotonic=lambda: made.now_s, sleep=made.sleep)
    )
    monkeypatch.setattr(rounds, "Stranger", Beside)
    monkeypatch.delenv("GPUSCHED_JOB_ID", raising=False)
    return made


def tried(daemon: Endless) -> list[Finding]:
    """A whole self-test over it, its end included."""
    client: Any = daemon
    patience = Patience()
    bench = Bench(client, patience, is_simulated=False)
    try:
        listing = Listing(absent="no nvidia-smi here")
        return SelfTest(Tried.ask(client), listing, bench, patience, lambda _: None).run()
    finally:
        bench.close()


def failed(findings: Iterable[Finding]) -> set[Check]:
    return {finding.check for finding in findings if finding.result == "failed"}


@pytest.mark.parametrize(
    ("state", "speaks"),
    [
        (JobState.RUNNING, True),
        (JobState.COMPLETING, True),
        (JobState.RUNNING, False),
        (JobState.CONFIGURING, False),
        (JobState.PENDING, False),
    ],
)
def test_jobs_that_never_end_fail_and_cost_less_than_five_minutes(
    clock: Clock, state: JobState, speaks: bool
) -> None:
    """With all that is done after them; none is left without its cancel."""
    daemon = Endless(clock, state=state, speaks=speaks)
    findings = tried(daemon)
    assert clock.now_s <= FIVE_MINUTES_S
    assert jobs.ALL_S + jobs.END_S < FIVE_MINUTES_S  # whatever else they may do
    assert {Check.OWN, Check.FOREIGN, Check.OOM} <= failed(findings)
    assert daemon.cancelled == set(range(1, len(daemon.requests) + 1))


def test_what_no_time_is_left_for_fails_and_begins_nothing(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All the time that there is bounds each wait, and the rounds that would follow."""
    monkeypatch.setattr(jobs, "ALL_S", 20.0)
    daemon = Endless(clock, state=JobState.RUNNING, speaks=True)
    findings = tried(daemon)
    assert clock.now_s <= 20.0 + jobs.END_S + 5.0  # the last: questions that were under way
    assert len(daemon.requests) == 4
    reasons = {finding.check: finding.reason for finding in findings}
    assert reasons[Check.OWN] == "job 4 was told to end, then cancelled, and is RUNNING"
    assert reasons[Check.FOREIGN] == reasons[Check.OOM]
    assert "no time was left for it" in reasons[Check.OOM]
    assert {Check.OWN, Check.FOREIGN, Check.OOM} <= failed(findings)


def test_jobs_are_small_and_short(clock: Clock) -> None:
    """1 GiB for 20 s on each idle GPU; the one for the process beside takes nothing itself."""
    daemon = Endless(clock, state=JobState.RUNNING, speaks=True)
    tried(daemon)
    asked = [tuple(request.argv or ())[-4:] for request in daemon.requests]
    gib = (b"--bytes", b"%d" % GIB, b"--seconds", b"20.0")
    assert asked == [
        *[gib] * 4,
        (b"--bytes", b"0", b"--seconds", b"20.0"),
        (b"--bytes", b"%d" % (25 * GIB), b"--seconds", b"0.0"),
    ]
    assert {(request.gpus, request.time_limit_s) for request in daemon.requests} == {(1, 90)}
