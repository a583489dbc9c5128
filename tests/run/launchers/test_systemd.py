"""Launch through PID 1, by a stand-in for systemd-run: what is asked, what its answers mean."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpusched_client.terms import Launch
from gpuschedd.gpu.source import DeviceAccess
from gpuschedd.run.job_dir import JobDir
from gpuschedd.run.launchers import systemd as systemd_launcher
from gpuschedd.run.launchers.direct import Bounds, LaunchDeferred, Launcher, LaunchFailed
from gpuschedd.run.launchers.systemd import SystemdLauncher
from gpuschedd.system import capabilities
from gpuschedd.system import state_dir as places


class StandIn:
    """A systemd-run that writes down its words and does what it is told."""

    def __init__(self, place: Path) -> None:
        self.program = place / "systemd-run"
        self.words = place / "words"
        self.job = JobDir(place / "jobs" / "7.2")
        self.answer("exit 0")

    def answer(self, line: str) -> None:
        """What it does after it has written down what it was asked."""
        self.program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {self.words}\n{line}\n')
        self.program.chmod(0o755)

    def launcher(self) -> SystemdLauncher:
        return SystemdLauncher(python="/venv/python", run=str(self.program))

    def asked(self) -> list[str]:
        """Its words."""
        return self.words.read_text().splitlines()


@pytest.fixture
def run(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


def test_it_is_a_launcher(run: StandIn) -> None:
    launcher: Launcher = run.launcher()
    assert launcher is not None


def test_the_line_holds_the_attempt_and_its_bounds_and_nothing_else(run: StandIn) -> None:
    bounds = Bounds(memory_bytes=2**30, cpus=1.5, tasks_max=99, grace_s=2.5)
    run.launcher().launch(run.job, bounds)
    asked = run.asked()
    assert "--unit=gpusched-job-7-2" in asked
    assert "--slice=gpusched.slice" in asked
    assert {"--quiet", "--collect", "--no-ask-password"} <= set(asked)
    properties = {asked[index + 1] for index, word in enumerate(asked) if word == "-p"}
    assert properties == {
        *("Type=exec", "KillMode=mixed", "TimeoutStopSec=33", "OOMPolicy=continue", "UMask=0077"),
        *(f"MemoryMax={2**30}", "CPUQuota=150%", "TasksMax=99"),
    }
    *_, python, isolated, no_site, script, place = asked
    assert (python, isolated, no_site) == ("/venv/python", "-I", "-S")
    assert script.endswith("supervisor.py")
    assert place == str(run.job.path)


def test_devices_are_closed_but_for_those_given(run: StandIn) -> None:
    cap = "/dev/nvidia-caps/nvidia-cap21"
    access = DeviceAccess(("/dev/nvidia3 rw", f"{cap} rw"))
    run.launcher().launch(run.job, Bounds(devices=access))
    assert f"DeviceAllow={cap} rw" in run.asked()
    assert "DevicePolicy=closed" in run.asked()
    assert "DeviceAllow=/dev/nvidia3 rw" in run.asked()


def test_a_host_without_a_filter_is_told_once_in_the_log(
    run: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = run.launcher()
    for _ in range(2):
        launcher.launch(run.job, Bounds(devices=DeviceAccess(None, "no /dev/nvidia* here")))
    assert not [word for word in run.asked() if word.startswith("Device")]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no /dev/nvidia* here" in caplog.text


def test_a_refusal_is_a_failed_launch_with_its_words(run: StandIn) -> None:
    run.answer("echo Unit gpusched-job-7-2.service already exists. >&2; exit 1")
    with pytest.raises(LaunchFailed, match="already exists") as caught:
        run.launcher().launch(run.job)
    assert not isinstance(caught.value, LaunchDeferred)


def test_a_silent_pid_1_is_the_host_s_fault(run: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd_launcher, "PID1_DEADLINE_S", 0.2)
    run.answer("exec sleep 3600")
    with pytest.raises(LaunchDeferred, match="did not answer"):
        run.launcher().launch(run.job)


def test_without_systemd_run_the_launch_fails_by_name(run: StandIn) -> None:
    run.program.unlink()
    with pytest.raises(LaunchFailed, match=r"cannot start .*systemd-run"):
        run.launcher().launch(run.job)


def test_nothing_is_left_of_a_unit_that_is_not_there(run: StandIn) -> None:
    assert run.launcher().leftovers(7, 2, "instance", os.getuid(), None) == ()


@pytest.mark.parametrize(
    ("root", "group", "is_found"),
    [
        ("", "/gpusched.slice/gpusched-job-7-2.service", True),
        ("", "/gpusched.slice/gpusched-job-7-2.service/below", True),
        ("", "/gpusched.slice/gpusched-job-7-21.service", False),
        ("", "/user.slice/user@1001.service/gpusched.slice/gpusched-job-7-2.service", False),
        ("/machine", "/machine/gpusched.slice/gpusched-job-7-2.service", True),
        ("/machine", "/machine/user.slice/gpusched.slice/gpusched-job-7-2.service", False),
    ],
)
@pytest.mark.parametrize("tree", ["0::", "1:name=systemd:"])
def test_only_pid_1_s_own_unit_holds_leftovers(
    run: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tree: str,
    root: str,
    group: str,
    is_found: bool,
) -> None:
    for pid, place in ((1, f"{root}/init.scope"), (os.getpid(), group)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(f"4:memory:/elsewhere\n{tree}{place}\n")
    monkeypatch.setattr(systemd_launcher, "PROC", tmp_path)
    found = run.launcher().leftovers(7, 2, "instance", os.getuid(), None)
    assert found == ((os.getpid(),) if is_found else ())


def test_a_daemon_that_cannot_see_the_processes_of_others_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take every supervisor for dead."""
    monkeypatch.setattr(capabilities, "SYSTEMD", tmp_path)
    monkeypatch.setattr(capabilities, "INIT", tmp_path)
    capabilities.check_launch(Launch.PID1, is_system=True, state_dir=tmp_path)
    monkeypatch.setattr(capabilities, "INIT", tmp_path / "none")
    with pytest.raises(places.Unusable, match="hidepid"):
        capabilities.check_launch(Launch.PID1, is_system=True, state_dir=tmp_path)
