"""What the commands say of a real daemon's answers, word by word."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuschedd.run.job_dir import JobDir
from gpuschedd.system import install
from tests.support.daemon import DaemonProcess, daemon_in, until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    place: Path = tmp_path_factory.mktemp("words")
    with daemon_in(place, "2x24G") as running:
        yield running


def test_a_held_job_says_once_that_it_is_held(daemon: DaemonProcess) -> None:
    daemon.run("gsub", "--hold", "-g", "0", "-o", "/dev/null", "true")
    assert "Waits for:    Held by its owner\n" in daemon.run("gq", "@").stdout
    assert daemon.run("gctl", "top", "@").stdout.endswith(": first of all, by nice -1000\n")


def test_a_job_tells_where_its_words_are(daemon: DaemonProcess) -> None:
    place = daemon.work_dir
    daemon.run("gsub", "-g", "0", "--wait", "true")
    job_id = daemon.run("gq", "@", "-o", "JOBID").stdout.split()[1]
    assert f"Output:       {place}/gsub-{job_id}.out\n" in daemon.run("gq", "@").stdout
    assert (place / f"gsub-{job_id}.out").exists()
    pattern = "%x-%j%A_%a%%%N%u.out"
    daemon.run("gsub", "-g", "0", "--wait", "-J", "a/b", "-o", pattern, "-e", "/dev/null", "true")
    (line,) = [text for text in daemon.run("gq", "@").stdout.splitlines() if "Output:" in text]
    assert Path(line.split(maxsplit=1)[1]).is_relative_to(place)
    assert Path(line.split(maxsplit=1)[1]).name.startswith(f"a_b-{int(job_id) + 1}")
    assert Path(line.split(maxsplit=1)[1]).exists()


def test_a_dry_run_names_the_gpus(daemon: DaemonProcess) -> None:
    assert daemon.run("gsub", "--dry-run", "true").stdout.endswith("start now on GPU 0\n")
    both = daemon.run("gsub", "--dry-run", "-g", "2", "true").stdout
    assert both.endswith("start now on GPUs 0, 1\n")
    held = daemon.run("gsub", "--dry-run", "--hold", "true").stdout
    assert held.endswith("Would wait: held by its owner\n")


def test_a_job_that_is_stopped_from_outside_says_so(daemon: DaemonProcess) -> None:
    daemon.run("gsub", "-g", "0", "-o", "/dev/null", "sleep", "60")
    with daemon.client() as client:
        (job,) = client.jobs(states=["live"], name="sleep").jobs
        until(lambda: client.job(job.job_id).state == "RUNNING", "it runs")
        claim = JobDir(daemon.state_dir / "jobs" / f"{job.job_id}.1").claim()
        assert claim is not None
        os.kill(claim.pid, signal.SIGTERM)
        ended = client.wait(job.job_id)
    said = "stopped from outside: its supervisor got SIGTERM"
    assert (ended.state, ended.cause_detail) == ("CANCELLED", said)


def test_an_image_is_told_how_it_enables_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "check_venv", lambda: None)
    said = CliRunner().invoke(install.cli, ["--prefix", str(tmp_path)])
    last = said.output.splitlines()[-1]
    assert last == f"next: systemctl --root={tmp_path} enable gpuschedd.socket gpuschedd.service"


def test_a_gpu_that_is_not_there_is_named_with_those_that_are(daemon: DaemonProcess) -> None:
    said = daemon.run("gctl", "drain", "9")
    assert said.returncode == 67
    told, refused = said.stderr.splitlines()
    assert told == "gctl: your own daemon answered; its GPUs are simulated"
    assert refused.startswith("gctl: no GPU is named '9'; known: 0 (GPU-")


def test_who_asks_more_than_the_own_limit_is_told_at_once(tmp_path: Path) -> None:
    with daemon_in(tmp_path, "4x24G", "--set", "limits.max_gpus=2") as limited:
        within = limited.run("gsub", "-g", "2", "-o", "/dev/null", "sleep", "60")
        said = limited.run("gsub", "-g", "3", "true")
        assert (within.returncode, said.returncode) == (0, 0)
        assert "your limit" not in within.stderr
        assert (
            "gsub: asks 3 GPUs; your limit is 2: it waits until an admin raises that. "
            "Lower --gpus to have it run.\n"
        ) in said.stderr
        assert (
            "UserLimit: needs 3 GPUs; its user's limit is 2: it waits until an admin raises that\n"
            in limited.run("gq", "@").stdout
        )


def test_what_runs_took_is_told_at_submit_in_the_job_and_in_the_sums(tmp_path: Path) -> None:
    """From the end of a run to every place where it shows."""
    with daemon_in(tmp_path, "1x24G") as daemon:
        nothing_ran = daemon.run("gsub", "--wait", "-o", "/dev/null", "true").stderr
        assert "no limit: others' waits cannot be planned around it" in nothing_ran
        again = daemon.run("gsub", "--hold", "-o", "/dev/null", "true").stderr
        assert "gsub: true took 0 s; --time 5m gets a promised start\n" in again
        shown = daemon.run("gq", "2").stdout
        assert "Expected:     to run 1 s (last run of true); no limit\n" in shown
        longer = daemon.run("gsub", "--hold", "-t", "1m", "--estimate", "2h", "true")
        assert "limit 1 min, will probably reach it (estimate 2 h)" in longer.stdout
        shown = daemon.run("gq", "3").stdout
        assert "Expected:     to run 1 min (its limit, shorter than its estimate)\n" in shown
        headings, sums = daemon.run("gq", "--usage").stdout.splitlines()
        assert headings.split()[-3:] == ["ERROR", "GUESSED", "LATE"]
        assert sums.split()[-3:] == ["100%", "0", "0/0"]  # it was expected to run for a day
        assert "Rule: first in order.\n" in daemon.run("gq", "--why", "1").stdout
        with daemon.client() as client:
            stats = client.stats()
        assert 0.99 < stats["expected_run_median_error"] < 1.0
