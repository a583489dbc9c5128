"""The launcher: who wins the claim, who is found again, and that no stranger is ever signalled."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from gpuschedd.core.attempt import Claim, StartedRecord
from gpuschedd.run.job_dir import JobDir
from gpuschedd.run.launchers.direct import DirectLauncher, Launcher, LaunchFailed, LaunchStorage
from gpuschedd.run.launchers.forking import ForkingLauncher
from gpuschedd.supervisor.procfs import boot_id, children_of, descendants, process_stat
from tests.support.jobs import DEADLINE_S, LEADERLESS, Host, is_alive

AS_ROOT = os.geteuid() == 0


LAUNCHERS = {"executed": DirectLauncher, "forked": ForkingLauncher}


@pytest.fixture(params=LAUNCHERS)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    with Host(LAUNCHERS[request.param]()) as made:
        yield made
        made.launcher.close()


def claim_of(job: JobDir) -> Claim:
    claim = job.claim()
    assert claim is not None
    return claim


def kill_supervisor(host: Host, job: JobDir) -> None:
    os.kill(claim_of(job).pid, signal.SIGKILL)
    host.wait_dead(job)


def kill_leftovers(host: Host, job: JobDir) -> tuple[int, ...]:
    return host.launcher.kill_leftovers(
        job.job_id, job.attempt, host.root.name, os.geteuid(), job.started()
    )


@pytest.mark.parametrize("kind", LAUNCHERS.values())
def test_both_are_launchers(kind: type[DirectLauncher]) -> None:
    launcher: Launcher = kind()
    assert launcher is not None


def test_launch_returns_with_the_claim_taken_and_no_child_left(host: Host) -> None:
    job = host.start("sleep", "60")
    assert claim_of(job).by == "supervisor"
    assert job.observe().supervisor_alive
    children = children_of(os.getpid())
    assert claim_of(job).pid not in children


def test_of_two_launches_one_runs_the_job_and_the_other_fails(host: Host) -> None:
    job = JobDir.create(host.jobs_root, host.spec("sh", "-c", "echo ran >> ran"))

    def launch(_: int) -> str:
        try:
            host.launcher.launch(job)
        except LaunchFailed as failure:
            return str(failure)
        return "launched"

    with ThreadPoolExecutor(3) as threads:
        results = sorted(threads.map(launch, range(3)))
    assert results[1:] != results[:2]
    assert results.count("launched") == 1
    assert all("the claim is taken" in text for text in results if text != "launched")
    assert host.wait_exit(job).code == 0
    assert (host.work / "ran").read_text() == "ran\n"


def test_a_fence_against_a_launch_has_exactly_one_winner(host: Host) -> None:
    def launch(job: JobDir) -> bool:
        try:
            host.launcher.launch(job)
        except LaunchFailed:
            return False
        return True

    with ThreadPoolExecutor(1) as threads:
        for turn in range(15):
            job = JobDir.create(host.jobs_root, host.spec("true"))
            launched = threads.submit(launch, job)
            select.select([], [], [], 0.002 * turn)
            fenced = job.fence().by == "daemon"
            assert launched.result() is not fenced
            assert (job.started() is None) or not fenced


def test_a_fenced_attempt_runs_nothing(host: Host) -> None:
    job = JobDir.create(host.jobs_root, host.spec("touch", "ran"))
    job.fence()
    with pytest.raises(LaunchFailed, match="the claim is taken"):
        host.launcher.launch(job)
    left = {path.name for path in job.path.iterdir()}
    assert left == {"claim", "spec", "supervisor.log"}


def test_a_launch_without_a_spec_says_so(host: Host) -> None:
    with pytest.raises(LaunchFailed, match="there is no"):
        host.launcher.launch(JobDir.open(host.jobs_root, 9, 1))


@pytest.mark.parametrize("kind", LAUNCHERS.values())
def test_a_launch_that_cannot_start_a_process_says_so(kind: type[DirectLauncher]) -> None:
    with Host() as host:
        job = JobDir.create(host.jobs_root, host.spec("true"))
        with pytest.raises(LaunchFailed, match="cannot start /no/python"):
            kind(python="/no/python").launch(job)


def test_attach_gives_a_pidfd_that_tells_the_end(host: Host) -> None:
    os.mkfifo(host.work / "fifo")
    job = host.sh("read x < fifo")
    pidfd = host.launcher.attach(claim_of(job))
    assert pidfd is not None
    assert select.select([pidfd], [], [], 0) == ([], [], [])
    host.wait(job.started)
    (host.work / "fifo").write_text("go\n")
    assert select.select([pidfd], [], [], DEADLINE_S)[0] == [pidfd]
    host.launcher.wake(pidfd)
    os.close(pidfd)
    assert host.launcher.attach(claim_of(job)) is None
    assert job.exit() is not None


def test_attach_never_takes_a_stranger_for_the_supervisor(host: Host) -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        found = process_stat(stranger.pid)
        assert found is not None
        own = Claim("supervisor", boot_id(), stranger.pid, found.start_ticks)
        assert host.launcher.attach(replace(own, start_ticks=found.start_ticks + 1)) is None
        assert host.launcher.attach(replace(own, boot_id="before")) is None
        assert host.launcher.attach(replace(own, by="daemon")) is None
        host.launcher.stop(replace(own, start_ticks=found.start_ticks + 1))
        assert stranger.poll() is None
        stranger.kill()


def test_a_killed_supervisor_takes_its_main_process_along(host: Host) -> None:
    job = host.start("sleep", "60")
    pid = host.wait(job.started).pid
    pidfd = os.pidfd_open(pid)
    kill_supervisor(host, job)
    assert select.select([pidfd], [], [], DEADLINE_S)[0] == [pidfd]
    os.close(pidfd)
    seen = job.observe()
    assert not seen.supervisor_alive
    assert (seen.ended, seen.exit) == (None, None)


def test_leftovers_are_found_by_environment_or_session_and_killed(host: Host) -> None:
    line = (
        "setsid sh -c 'trap \"\" TERM; echo a; sleep 61' & "
        "env -i sh -c 'echo b; sleep 62' & "
        "while [ $(wc -l < out.*) -lt 2 ]; do :; done; echo c; sleep 63"
    )
    job = host.sh(line)
    host.wait_output(job, b"c")
    kill_supervisor(host, job)
    # One of the two shells may not have forked its sleep yet.
    left = host.wait(lambda: found if len(found := host.marked(job)) >= 3 else None)
    assert kill_leftovers(host, job) == ()
    assert host.marked(job) == ()
    assert not any(is_alive(pid) for pid in left)


def test_leftovers_without_their_first_thread_are_killed(host: Host) -> None:
    argv = (sys.executable, "-I", "-S", "-c", LEADERLESS, "behind")
    job = host.start("/bin/sh", "-c", '"$@"; sleep 600', "sh", *argv)
    host.wait_output(job, b"\n")
    pid = int(host.output(job).split()[1])
    kill_supervisor(host, job)
    assert is_alive(pid)
    assert kill_leftovers(host, job) == ()
    assert not is_alive(pid)


def test_leftovers_of_one_attempt_are_no_others(host: Host) -> None:
    job = host.start("sleep", "60", attempt=2)
    host.wait(job.started)
    args = (os.geteuid(), None)
    find = host.launcher.leftovers
    host.wait(lambda: find(job.job_id, 2, host.root.name, *args) or None)
    assert find(job.job_id, 1, host.root.name, *args) == ()
    assert find(job.job_id + 1, 2, host.root.name, *args) == ()
    assert find(job.job_id, 2, "another state directory", *args) == ()
    assert find(job.job_id, 2, host.root.name, os.geteuid() + 1, None) == ()


def test_a_stranger_in_a_session_of_the_recorded_number_is_left_alone(host: Host) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as stranger:
        found = process_stat(stranger.pid)
        assert found is not None
        ticks, boot = found.start_ticks, boot_id()
        started = StartedRecord(stranger.pid, ticks, stranger.pid, 0.0, 0.0, boot)
        find = host.launcher.leftovers
        args = (1, 1, "instance", os.geteuid())
        assert find(*args, started) == (stranger.pid,)
        assert find(*args, replace(started, start_ticks=ticks - 1)) == ()
        assert find(*args, replace(started, boot_id="before")) == ()
        assert host.launcher.kill_leftovers(*args, replace(started, start_ticks=1)) == ()
        assert stranger.poll() is None
        stranger.kill()


def test_descendants_are_found_with_and_without_the_kernel_s_lists(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = host.sh("sh -c 'sleep 60; true' & setsid sh -c 'sleep 60; true' & echo up; wait")
    host.wait_output(job, b"up")
    root = claim_of(job).pid
    host.wait(lambda: True if len(descendants(root)) == 5 else None)
    listed = descendants(root)
    monkeypatch.setattr(os.path, "exists", lambda _: False)
    assert set(descendants(root)) == set(listed)


def test_stop_ends_a_supervisor_that_does_not_obey(host: Host) -> None:
    job = host.start("sleep", "60")
    claim = claim_of(job)
    os.kill(claim.pid, signal.SIGSTOP)
    host.launcher.stop(claim)
    host.wait_dead(job)
    assert kill_leftovers(host, job) == ()


def test_a_supervisor_survives_its_launcher(host: Host) -> None:
    spec = host.spec("sh", "-c", "read x < fifo; exit 5")
    os.mkfifo(host.work / "fifo")
    job = JobDir.create(host.jobs_root, spec)
    kind = type(host.launcher)
    code = (
        "import sys; from pathlib import Path; from gpuschedd.run.job_dir import JobDir; "
        f"from {kind.__module__} import {kind.__name__} as Kind; import os, signal; "
        "Kind().launch(JobDir(Path(sys.argv[1]))); os.kill(0, signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(job.path)], start_new_session=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    host.wait(job.started)
    (host.work / "fifo").write_text("go\n")
    before_s = time.time()
    assert host.wait_exit(job).code == 5
    assert host.wait_exit(job).at_s >= before_s - 1


@pytest.mark.root
@pytest.mark.skipif(not AS_ROOT, reason="needs root to mount a small file system")
def test_a_full_disk_refuses_the_launch_as_storage_and_keeps_the_ends_of_running_jobs(
    host: Host,
) -> None:
    with host.small_disk():
        os.mkfifo(host.work / "fifo")
        running = host.sh("read x < fifo; exit 6", output=b"/dev/null")
        host.wait(running.started)
        waiting = JobDir.create(host.jobs_root, host.spec("touch", "ran"))
        host.fill_disk()
        with pytest.raises(LaunchStorage, match="No space left"):
            host.launcher.launch(waiting)
        assert waiting.claim() is None
        (host.work / "fifo").write_text("go\n")
        assert host.wait_exit(running).code == 6
        (host.jobs_root / "fill").unlink()
        host.launcher.launch(waiting)
        assert host.wait_exit(waiting).code == 0
