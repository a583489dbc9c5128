"""Places that a job needs and that are away for a while: it waits, and nothing is counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpusched_client import Client
from gpusched_client.submission.request import job_request
from gpusched_client.terms import JobState
from tests.support.daemon import DaemonProcess, daemon_in, until

AWAY = "Environment"


def reason_of(client: Client, job_id: int) -> str | None:
    reason = client.job(job_id).reason
    return None if reason is None else reason.code


def test_jobs_wait_for_a_directory_that_is_away_and_one_probe_looks_for_all(
    daemon: DaemonProcess,
) -> None:
    """A server that hiccups fails nobody: the same attempt, no GPU held, all of them done after."""
    place, away = daemon.work_dir / "data", daemon.work_dir / "away"
    place.mkdir()
    with daemon.client() as client:
        blocker = client.submit(["sleep", "600"], gpus=4, output="/dev/null")
        jobs = [
            client.submit(["true"], cwd=place, gpus=1, output="/dev/null").id for _ in range(20)
        ]
        until(lambda: client.job(blocker.id).state is JobState.RUNNING, "the GPUs are taken")
        place.rename(away)
        client.cancel([blocker.id])
        until(lambda: all(reason_of(client, job) == AWAY for job in jobs), "all of them wait")
        waiting = client.job(jobs[-1])
        assert (waiting.state, waiting.attempt) == (JobState.PENDING, 1)
        assert waiting.reason is not None
        assert f"directory {place}: No such file or directory (ENOENT)" in waiting.reason.text
        assert all(gpu.jobs == () for gpu in client.gpus())
        away.rename(place)
        ended = client.wait(jobs, timeout_s=60)
        assert {(job.state, job.attempt) for job in ended} == {(JobState.COMPLETED, 1)}
    probes = [line for line in daemon.log.read_text().splitlines() if " probe " in line]
    assert 1 <= len(probes) <= 2


def test_a_wait_outlives_the_daemon(daemon: DaemonProcess) -> None:
    """Its owner after a restart is the same record."""
    place = daemon.work_dir / "data"
    place.mkdir()
    with daemon.client() as client:
        job = client.submit(["true"], cwd=place, output="/dev/null", hold=True)
        place.rmdir()
        client.update([job.id], hold=False)
        until(lambda: reason_of(client, job.id) == AWAY, "it waits")
    daemon.kill()
    daemon.start()
    with daemon.client() as client:
        assert reason_of(client, job.id) == AWAY
        place.mkdir()
        assert client.wait(job.id, timeout_s=60).state is JobState.COMPLETED


@pytest.mark.parametrize("patience", ["0s", "1s"])
def test_patience_ends_in_a_failure_that_names_the_place(tmp_path: Path, patience: str) -> None:
    """At once, or after the first probe that comes too late."""
    options = ("--set", f"jobs.environment_patience={patience}")
    with daemon_in(tmp_path, "1x24G", *options) as daemon, daemon.client() as client:
        place = daemon.work_dir / "nowhere"
        job = client.submit(["true"], cwd=place, output="/dev/null")
        ended = client.wait(job.id, timeout_s=60)
        assert (ended.state, ended.cause) == (JobState.FAILED, "setup")
        assert f"directory {place}: No such file" in str(ended.cause_detail)


def test_a_command_that_was_there_at_submit_is_waited_for(daemon: DaemonProcess) -> None:
    """One that never was is what it always was: code 127."""
    tool = daemon.work_dir / "tool"
    with daemon.client() as client:
        never = client.submit([str(tool)], output="/dev/null")
        assert client.wait(never.id, timeout_s=30).exit_code == 127
        seen = job_request([str(tool)], output="/dev/null")
        seen = type(seen).from_wire({**seen.to_wire(), "checked": True}, "job")
        (job,) = client.submit_many([seen])
        until(lambda: reason_of(client, job.id) == AWAY, "it waits")
        tool.write_text("#!/bin/sh\nexit 3\n")
        tool.chmod(0o755)
        assert client.wait(job.id, timeout_s=60).exit_code == 3


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("by_env", [False, True])
def test_an_interpreter_that_is_away_at_the_start_is_waited_for(
    daemon: DaemonProcess, is_captured: bool, by_env: bool
) -> None:
    """It was there at submit; the script runs when it is back, as the same attempt."""
    tools = daemon.work_dir / "tools"
    tools.mkdir()
    (tools / "mysh").symlink_to("/bin/sh")
    script = daemon.work_dir / "script"
    script.write_text(f"#!{'/usr/bin/env mysh' if by_env else tools / 'mysh'}\nexit 3\n")
    script.chmod(0o755)
    words = "--script script" if is_captured else "./script"
    with daemon.client() as client:
        said = daemon.run_shell(f"PATH={tools}:$PATH gsub --hold --parsable -o /dev/null {words}")
        assert said.returncode == 0, said.stderr
        job_id = int(said.stdout)
        tools.rename(daemon.work_dir / "away")
        client.update([job_id], hold=False)
        until(lambda: reason_of(client, job_id) == AWAY, "it waits")
        waiting = client.job(job_id)
        name = "mysh" if by_env else f"{tools}/mysh"
        kind = "command" if is_captured and not by_env else "interpreter"
        assert (waiting.state, waiting.attempt) == (JobState.PENDING, 1)
        assert waiting.reason is not None
        assert f"{kind} {name}: not found (ENOENT)" in waiting.reason.text
        (daemon.work_dir / "away").rename(tools)
        ended = client.wait(job_id, timeout_s=60)
        assert (ended.exit_code, ended.attempt) == (3, 1)


def test_a_cancel_ends_the_wait(daemon: DaemonProcess) -> None:
    """As it ends any other."""
    with daemon.client() as client:
        job = client.submit(["true"], cwd=daemon.work_dir / "nowhere", output="/dev/null")
        until(lambda: reason_of(client, job.id) == AWAY, "it waits")
        client.cancel([job.id])
        assert client.wait(job.id, timeout_s=30).state is JobState.CANCELLED
        assert os.listdir(daemon.state_dir / "jobs") == []
