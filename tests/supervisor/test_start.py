"""The supervisor as a process of its own: how it is started, what it shows, when it ends."""

from __future__ import annotations

import os
import select
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpuschedd.run.job_dir import JobDir
from gpuschedd.run.launchers.direct import DirectLauncher
from tests.support.jobs import DEADLINE_S, Host, bare, is_alive, supervise


def test_in_the_foreground_it_ends_with_the_job(host: Host) -> None:
    """As PID 1 starts it: no fork of its own, nothing said, status 0 whatever the job's is."""
    job = JobDir.create(host.jobs_root, host.spec("sh", "-c", "exit 9", launch="pid1"))
    done = supervise(job.path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert host.wait_exit(job).code == 9


def test_nothing_of_the_user_s_shows_on_the_supervisor(host: Host) -> None:
    job = host.start("sleep", "60", environment=((b"TOKEN", b"s3cr3t"),))
    host.wait(job.started)
    claim = job.claim()
    assert claim is not None
    place = Path(f"/proc/{claim.pid}")
    assert (place / "cmdline").read_bytes().split(b"\0")[-2] == os.fsencode(job.path)
    assert b"s3cr3t" not in (place / "environ").read_bytes()
    assert os.getsid(claim.pid) == claim.pid
    assert stat.S_IMODE(job.path.stat().st_mode) == 0o700


@pytest.mark.tool("setpriv")
def test_a_user_s_own_supervisor_hides_from_nobody_who_is_that_user(tmp_path: Path) -> None:
    """Where /proc is mounted with hidepid=2, its daemon would take it for dead, and run twice."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {" ".join(bare())} {sys.executable} "$@"\n')
    python.chmod(0o755)
    with Host(DirectLauncher(str(python))) as host:
        claim = host.start("sleep", "60").claim()
        assert claim is not None
        look = [*bare(), "cat", f"/proc/{claim.pid}/environ"]
        assert subprocess.run(look, capture_output=True).returncode == 0


def test_an_idle_supervisor_uses_no_time(host: Host) -> None:
    job = host.start("sleep", "60", time_limit_s=50)
    host.wait(job.started)
    claim = job.claim()
    assert claim is not None

    def slept_through() -> bool | None:
        before = _switches(claim.pid)
        assert host.wait_exit(host.start("sleep", "0.5")).code == 0
        return _switches(claim.pid) == before or None

    # Soon nothing of the start is left to do; a poll every 100 ms would be five each time.
    assert host.wait(slept_through)
    assert is_alive(claim.pid)


def _switches(pid: int) -> int:
    """How often it has gone to sleep."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))


def test_a_supervisor_whose_directory_was_removed_ends_with_its_job(host: Host) -> None:
    """Nobody will ever read what it could write: it does not try for ever."""
    go = host.work / "go"
    job = host.sh(f"until [ -e {go} ]; do sleep 0.05; done")
    host.wait(job.started)
    claim = job.claim()
    assert claim is not None
    pidfd = host.launcher.attach(claim)
    assert pidfd is not None
    shutil.rmtree(job.path)
    go.touch()
    assert select.select([pidfd], [], [], DEADLINE_S)[0]
    os.close(pidfd)
