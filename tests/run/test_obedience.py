"""Supervisors that do not do what is due: found by the job's record, woken, then stopped."""

from __future__ import annotations

import asyncio
import getpass
import json
import math
import os
import shutil
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from gpusched_client.terms import JobId, JobState
from gpuschedd.core.job import CancelOrder, Job
from gpuschedd.core.model import Request
from gpuschedd.gpu.attribution import JobKey
from gpuschedd.run import obedience
from gpuschedd.run.obedience import GIVE_UP_S, STOP_AFTER_S, WAKE_AFTER_S, Obedience, due_of
from gpuschedd.system.clock import SchedulerClock, SystemClock
from tests.sim.harness import VirtualClock
from tests.support.daemon import DaemonProcess, daemon_in, until

GRACE_S = 10.0


def job_that_runs(limit_s: float | None) -> Job:
    """Started at 100 s."""
    return Job(
        job_id=JobId(7),
        uid=1000,
        user="alice",
        name="j",
        request=Request(gpus=1, time_limit_s=limit_s),
        submitted_at_s=0.0,
        submitted_sched_s=0.0,
        state=JobState.RUNNING,
        started_at_s=100.0,
        started_sched_s=100.0,
        decided_grace_s=GRACE_S,
    )


@pytest.mark.parametrize(
    ("job", "cancel_known_s", "ends_s"),
    [
        (job_that_runs(None), math.inf, math.inf),
        (job_that_runs(50.0), math.inf, 150.0),
        (job_that_runs(None), 120.0, 120.0),
        (job_that_runs(50.0), 120.0, 120.0),
        (job_that_runs(50.0), 170.0, 150.0),
    ],
)
def test_a_supervisor_is_woken_and_then_stopped_after_what_comes_first(
    job: Job, cancel_known_s: float, ends_s: float
) -> None:
    """Its time limit or its cancel, each with the grace."""
    due = due_of(job, cancel_known_s)
    assert due.wake_s == ends_s + GRACE_S + WAKE_AFTER_S
    assert due.stop_s == ends_s + GRACE_S + STOP_AFTER_S


def test_one_whose_processes_no_signal_ends_is_given_longer() -> None:
    """It is not the supervisor that disobeys there; but nothing stays for ever."""
    job = replace(job_that_runs(50.0), state=JobState.COMPLETING, main_ended_sched_s=130.0)
    due = due_of(job, math.inf)
    assert due.wake_s == 130.0 + GRACE_S + WAKE_AFTER_S
    assert due.stop_s == 130.0 + GRACE_S + GIVE_UP_S


def test_the_grace_that_counts_is_the_one_that_the_supervisor_was_given() -> None:
    """After a reload to 1 s a job that uses the 60 s of its decision is not stopped in them."""
    due = due_of(replace(job_that_runs(50.0), decided_grace_s=60.0), math.inf)
    assert due.wake_s == 150.0 + 60.0 + WAKE_AFTER_S
    assert due.stop_s == 150.0 + 60.0 + STOP_AFTER_S


class Reached:
    """Supervisors that note what reached them."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.stopped = asyncio.Event()

    def wake(self, key: JobKey) -> None:
        del key
        self.said.append("wake")

    def stop_disobedient(self, key: JobKey) -> None:
        del key
        self.said.append("stop")
        self.stopped.set()


def test_what_was_due_before_the_daemon_started_is_seen_to_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cancel from before counts from the start; a limit that is long over acts at once."""
    monkeypatch.setattr(obedience, "WAKE_AFTER_S", 0.0)
    monkeypatch.setattr(obedience, "STOP_AFTER_S", 0.0)

    async def story() -> list[str]:
        reached = Reached()
        clock = SchedulerClock(SystemClock(), None)
        watched = Obedience(reached, clock)
        now = replace(job_that_runs(None), decided_grace_s=0.0)
        watched.follow(replace(now, cancel=CancelOrder(1000, "alice", 1.0)))
        await asyncio.wait_for(reached.stopped.wait(), 30)
        watched.drop(JobId(7))
        overdue = replace(job_that_runs(1.0), started_sched_s=clock.now_s() - 3600.0)
        watched.follow(overdue)
        reached.stopped.clear()
        await asyncio.wait_for(reached.stopped.wait(), 30)
        watched.drop(JobId(7))
        return reached.said

    assert asyncio.run(story()) == ["wake", "stop", "wake", "stop"]


def test_one_that_is_late_for_long_is_woken_and_has_its_time_before_it_is_stopped() -> None:
    """The daemon was away, or the host slept: it may have been stopped by a signal meanwhile."""

    async def story() -> None:
        reached, time = Reached(), VirtualClock()
        clock = SchedulerClock(time, None)
        watched = Obedience(reached, clock)
        job = replace(job_that_runs(1.0), started_sched_s=clock.now_s() - 3600.0)
        longer = replace(job, request=replace(job.request, time_limit_s=3660.0))

        async def followed(job: Job) -> list[str]:
            watched.follow(job)
            before = len(reached.said)
            while len(reached.said) == before:
                await asyncio.sleep(0)
            return reached.said

        assert await followed(job) == ["wake"]
        time.now += STOP_AFTER_S - WAKE_AFTER_S - 0.1
        assert await followed(job) == ["wake", "wake"]
        time.now += 0.2
        assert await followed(job) == ["wake", "wake", "stop"]
        time.now += 3600.0
        assert (await followed(longer))[3:] == ["wake"]
        watched.drop(JobId(7))

    asyncio.run(asyncio.wait_for(story(), 30))


def test_a_cancel_reaches_a_supervisor_that_was_stopped_across_a_restart(
    daemon: DaemonProcess,
) -> None:
    """SIGSTOP, cancel, kill -9 of the daemon, start: the job ends, and as cancelled."""
    with daemon.client() as client:
        job = client.submit(["sleep", "600"], gpus=1)
        until(lambda: client.job(job.id).state is JobState.RUNNING, "it runs")
        supervisor = _supervisor_of(daemon.state_dir, job.id)
        os.kill(supervisor, signal.SIGSTOP)
        client.cancel([job.id])
    daemon.kill()
    with suppress(ProcessLookupError):  # the order may have come through before
        os.kill(supervisor, signal.SIGSTOP)
    daemon.start()
    with daemon.client() as client:
        assert client.wait(job.id, timeout_s=30).state is JobState.CANCELLED


def test_a_cancel_that_nobody_can_say_was_obeyed_is_node_fail_and_names_it(
    daemon: DaemonProcess,
) -> None:
    """The main process may have ended by itself before: its code is lost with the supervisor.

    The order is given in a copy of its directory, so that the supervisor never reads it.
    """
    with daemon.client() as client:
        job = client.submit(["sleep", "600"], gpus=1)
        until(lambda: client.job(job.id).state is JobState.RUNNING, "it runs")
        supervisor = _supervisor_of(daemon.state_dir, job.id)
        place = daemon.state_dir / "jobs" / f"{job.id}.1"
        copy = Path(shutil.copytree(place, daemon.place / "copy"))
        place.rename(daemon.place / "supervisor's")
        copy.rename(place)
        client.cancel([job.id], reason="typo")
        os.kill(supervisor, signal.SIGKILL)
        ended = client.wait(job.id, timeout_s=30)
        assert (ended.state, ended.exit_code) == (JobState.NODE_FAIL, None)
        assert ended.cause_detail == (
            "its supervisor ended without an exit record, when it was to be cancelled by "
            f"{getpass.getuser()}: typo"
        )


def test_a_second_cancel_reaches_a_supervisor_that_was_stopped_after_the_first(
    tmp_path: Path,
) -> None:
    """Its order is known already: that somebody asks again wakes it, long before obedience does."""
    options = ("--set", "scheduling.kill_grace=3600")
    go = tmp_path / "go"
    line = f"trap '' TERM; until [ -e {go} ]; do sleep 0.05; done"
    with daemon_in(tmp_path, "1x24G", *options) as daemon, daemon.client() as client:
        job = client.submit(shell=line, output="/dev/null")
        until(lambda: client.job(job.id).state is JobState.RUNNING, "it runs")
        supervisor = _supervisor_of(daemon.state_dir, job.id)
        try:
            client.cancel([job.id])
            _stop(supervisor)
            client.cancel([job.id])
            until(lambda: _state_of(supervisor) != "T", "it goes on", 20)
        finally:
            os.kill(supervisor, signal.SIGCONT)
            go.touch()
        assert client.wait(job.id, timeout_s=30).state is JobState.CANCELLED


def test_a_supervisor_that_was_stopped_after_its_cancel_is_woken_in_time(tmp_path: Path) -> None:
    """Nobody asks again, and its own timer of the grace cannot ring."""
    options = ("--set", "scheduling.kill_grace=2")
    with daemon_in(tmp_path, "1x24G", *options) as daemon, daemon.client() as client:
        job = client.submit(shell="trap '' TERM; while :; do sleep 0.05; done", output="/dev/null")
        until(lambda: client.job(job.id).state is JobState.RUNNING, "it runs")
        supervisor = _supervisor_of(daemon.state_dir, job.id)
        client.cancel([job.id])
        _stop(supervisor)
        assert client.wait(job.id, timeout_s=30).state is JobState.CANCELLED


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _state_of(pid) == "T", "it is stopped")


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _supervisor_of(state_dir: Path, job_id: int) -> int:
    claim = json.loads((state_dir / "jobs" / f"{job_id}.1" / "claim").read_text())
    return int(claim["pid"])
