"""Each outcome of the table of recovery, carried out by the real runner over real directories."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gpusched_client.terms import JobId
from gpuschedd.core.attempt import AttemptReport, Cancel, Claim, EndedRecord, Orders, StartedRecord
from gpuschedd.core.recovery import Facts, Recovery, facts_reported, recover
from gpuschedd.gpu.attribution import JobKey
from gpuschedd.run import runner as runner_module
from gpuschedd.run import tracking
from gpuschedd.run.job_dir import JobDir
from gpuschedd.run.launchers.direct import DirectLauncher
from gpuschedd.run.runner import Runner
from gpuschedd.supervisor.procfs import boot_id, process_stat
from gpuschedd.supervisor.records import open_directory, publish

KEY: JobKey = (JobId(7), 1)
INSTANCE = "0123456789abcdef"
LIMIT = Orders(time_limit_s=60.0)
CANCEL = Orders(time_limit_s=60.0, cancel=Cancel("alice", 1.0))
GONE = 2**22 - 1  # a pid that nobody has, above what these hosts give


def _publish(jobs: Path, name: str, record: dict[str, Any]) -> None:
    directory = open_directory(str(jobs / "7.1"))
    publish(directory, name, record)
    os.close(directory)


def claimed(jobs: Path, pid: int = GONE) -> None:
    """By a supervisor: one that is dead, unless a live pid is given."""
    (jobs / "7.1").mkdir(mode=0o700)
    stat = process_stat(pid)
    ticks = stat.start_ticks if stat is not None else 1
    _publish(jobs, "claim", asdict(Claim("supervisor", boot_id(), pid, ticks)))


def started(jobs: Path) -> None:
    record = StartedRecord(GONE, 1, GONE, 1.0, 1.0, boot_id())
    _publish(jobs, "started", asdict(record))


def ended(jobs: Path, **more: Any) -> None:
    """`ended`, or `exit` where more than that is known."""
    boot = boot_id()
    record = asdict(EndedRecord(3, None, "exit", None, None, None, None, 2.0, 2.0, boot))
    _publish(jobs, "exit" if more else "ended", record | more)


def unclaimed(jobs: Path) -> None:
    (jobs / "7.1").mkdir(mode=0o700)


def dead_before_the_gate(jobs: Path) -> None:
    claimed(jobs)


def alive(jobs: Path) -> None:
    claimed(jobs, os.getpid())


def dead_after_the_exit_record(jobs: Path) -> None:
    claimed(jobs)
    started(jobs)
    ended(jobs)
    used = {"cpu_user_s": 0.1, "cpu_system_s": 0.1, "max_rss_bytes": 1}
    ended(jobs, finished_at_s=3.0, oom=None, **used)


def dead_after_the_end(jobs: Path) -> None:
    claimed(jobs)
    started(jobs)
    ended(jobs)


def dead_while_it_ran(jobs: Path) -> None:
    claimed(jobs)
    started(jobs)


class StillLauncher(DirectLauncher):
    """The supervisor that is found alive may be this very process."""

    def wake(self, pidfd: int) -> None:
        del pidfd


def reports(jobs: Path, orders: Orders, *, ran: bool, count: int = 1) -> list[AttemptReport]:
    """What the runner says of the attempt that it finds at its start."""
    found: list[AttemptReport] = []

    async def story() -> None:
        enough = asyncio.Event()

        def take(report: AttemptReport) -> None:
            found.append(report)
            if len(found) >= count:
                enough.set()

        runner = Runner(StillLauncher(), jobs, INSTANCE, take)
        try:
            await runner.recover(KEY, os.getuid(), orders, ran=ran)
            await asyncio.wait_for(enough.wait(), 60)
        finally:
            await runner.close()

    asyncio.run(story())
    return found


def outcome(report: AttemptReport, orders: Orders, *, ran: bool) -> Recovery:
    """The verdict that the controller reads in it."""
    cancelled = orders.cancel is not None
    return recover(facts_reported(report, ran=ran, cancel_requested=cancelled))


@pytest.mark.parametrize(
    ("found", "orders", "ran", "verdict"),
    [
        (dead_before_the_gate, LIMIT, False, Recovery.REQUEUE),
        (dead_before_the_gate, CANCEL, False, Recovery.CANCELLED),
        (alive, LIMIT, True, Recovery.ADOPT),
        (dead_after_the_exit_record, LIMIT, True, Recovery.FINAL_FROM_EXIT),
        (dead_after_the_end, CANCEL, True, Recovery.FINAL_FROM_ENDED),
        (dead_while_it_ran, LIMIT, True, Recovery.NODE_FAIL),
        (dead_before_the_gate, LIMIT, True, Recovery.NODE_FAIL),
    ],
)
def test_what_the_directory_shows_is_reported(
    tmp_path: Path, found: Callable[[Path], None], orders: Orders, ran: bool, verdict: Recovery
) -> None:
    found(tmp_path)
    (report,) = reports(tmp_path, orders, ran=ran)
    assert outcome(report, orders, ran=ran) is verdict


@pytest.mark.parametrize(
    ("orders", "asked", "verdict"),
    [
        (LIMIT, Recovery.REQUEUE_AFTER_FENCE, Recovery.REQUEUE),
        (CANCEL, Recovery.CANCEL_AFTER_FENCE, Recovery.CANCELLED),
    ],
)
def test_a_free_attempt_is_fenced_before_it_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    orders: Orders,
    asked: Recovery,
    verdict: Recovery,
) -> None:
    """The table asks for the fence; with the claim taken it says what becomes of the job."""
    unclaimed(tmp_path)
    verdicts: list[Recovery] = []

    def recorded(facts: Facts) -> Recovery:
        verdicts.append(recover(facts))
        return verdicts[-1]

    monkeypatch.setattr(tracking, "recover", recorded)
    (report,) = reports(tmp_path, orders, ran=False)
    claim = JobDir.open(tmp_path, *KEY).claim()
    assert claim is not None
    assert claim.by == "daemon"
    assert verdicts == [asked, verdict]
    assert outcome(report, orders, ran=False) is verdict


@pytest.fixture
def left_behind() -> Iterator[subprocess.Popen[bytes]]:
    """A process with the marks of the attempt that does not heed TERM."""
    marks = {"GPUSCHED_JOB_ID": "7", "GPUSCHED_ATTEMPT": "1", "GPUSCHED_INSTANCE": INSTANCE}
    words = "import signal, sys; signal.signal(15, signal.SIG_IGN); print('up', flush=True); "
    process = subprocess.Popen(
        [sys.executable, "-c", words + "sys.stdin.read()"],
        env=marks,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("found", [dead_while_it_ran, dead_after_the_end, unclaimed])
def test_what_is_left_is_ended_before_the_end_is_reported(
    tmp_path: Path, left_behind: subprocess.Popen[bytes], found: Callable[[Path], None]
) -> None:
    """WAIT_FOR_PROCESSES: the GPUs are free when no process is left, whatever the records say."""
    found(tmp_path)
    report = reports(tmp_path, LIMIT, ran=True)[-1]
    assert left_behind.wait(60) == -signal.SIGKILL
    assert not report.processes_left
    verdict = outcome(report, LIMIT, ran=True)
    expected = Recovery.FINAL_FROM_ENDED if found is dead_after_the_end else Recovery.NODE_FAIL
    assert verdict is expected


def test_processes_that_do_not_end_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round is reported as one that waits; the end comes with the last process."""
    dead_while_it_ran(tmp_path)
    left = iter([(11, 12), (12,), ()])
    monkeypatch.setattr(DirectLauncher, "kill_leftovers", lambda *_: next(left))
    monkeypatch.setattr(runner_module, "LEFTOVER_PAUSE_S", 0.005)
    found = reports(tmp_path, LIMIT, ran=True, count=3)
    assert [outcome(report, LIMIT, ran=True) for report in found] == [
        Recovery.WAIT_FOR_PROCESSES,
        Recovery.WAIT_FOR_PROCESSES,
        Recovery.NODE_FAIL,
    ]
