"""An upgrade under a running daemon: what it takes away and gives back costs no job anything."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched_client.terms import JobState, PendingReason
from gpusched_client.wire.job_messages import Reason
from gpuschedd.run.launchers.direct import SUPERVISOR
from tests.support.daemon import DaemonProcess, clean_up, until

ROOT = Path(SUPERVISOR).parents[2]


@pytest.fixture
def copied(tmp_path: Path) -> Iterator[tuple[DaemonProcess, Path]]:
    """A daemon that runs from a copy of the sources, and the copy's supervisor."""
    for name in ("gpuschedd", "gpusched_client"):
        shutil.copytree(ROOT / name, tmp_path / "copy" / name)
    environment = {"PYTHONPATH": str(tmp_path / "copy")}
    daemon = DaemonProcess(tmp_path / "daemon", environment=environment).start()
    try:
        yield daemon, tmp_path / "copy" / Path(SUPERVISOR).relative_to(ROOT)
    finally:
        clean_up(daemon)


@pytest.mark.parametrize("name", ["__main__.py", "life.py"])
def test_a_supervisor_that_is_taken_away_makes_the_job_wait(
    copied: tuple[DaemonProcess, Path], name: str
) -> None:
    """It is no failure of the job's, and the job runs once the files are back."""
    daemon, program = copied
    path, away = program.with_name(name), program.with_name("away")
    path.rename(away)
    with daemon.client() as client:
        job_id = client.submit(["true"], cwd="/tmp", output="/dev/null").id

        def put_off() -> Reason | None:
            reason = client.job(job_id).reason
            waits = reason is not None and reason.code == PendingReason.LAUNCH_BACKOFF
            return reason if waits else None

        reason = until(put_off, "the launch is put off")
        assert reason.numbers is not None
        assert reason.numbers["failures"] == 0
        assert reason.text.startswith("the host could not start it")
        status = daemon.run("gctl", "status")
        assert status.returncode == 1
        problem = f"jobs that cannot be started for now, and are tried again: {job_id}: "
        assert f"PROBLEM: {problem}" in status.stdout
        away.rename(path)
        assert client.wait(job_id, timeout_s=60).state is JobState.COMPLETED
        assert daemon.run("gctl", "status").returncode == 0
