"""The forker: made once, replaceable at any moment, and never the end of a supervisor."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuschedd.run.job_dir import JobDir
from gpuschedd.run.launchers import forking
from gpuschedd.run.launchers.direct import SUPERVISOR, LaunchDeferred, LaunchFailed
from gpuschedd.run.launchers.forking import ForkingLauncher
from gpuschedd.supervisor.procfs import children_of, process_stat
from tests.support.jobs import DEADLINE_S, Host, is_alive

ROOT = Path(SUPERVISOR).parents[2]


@pytest.fixture
def host() -> Iterator[Host]:
    with Host(ForkingLauncher()) as made:
        yield made
        made.launcher.close()


@pytest.fixture
def copied(tmp_path: Path) -> Iterator[tuple[Host, Path]]:
    """A host whose supervisor is a copy, and the folder of it."""
    folder = tmp_path / "gpuschedd" / "supervisor"
    shutil.copytree(Path(SUPERVISOR).parent, folder)
    (folder.parent / "__init__.py").touch()
    with Host(ForkingLauncher(program=str(folder / "__main__.py"))) as made:
        yield made, folder
        made.launcher.close()


def supervisor_of(host: Host, job: JobDir) -> int:
    return host.wait(job.claim).pid


def parent_of(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


def forker_of(host: Host, *argv: str) -> int:
    """The parent of a supervisor that runs."""
    return parent_of(supervisor_of(host, host.start(*(argv or ("sleep", "600")))))


def kill(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([pidfd], [], [], DEADLINE_S)
    os.close(pidfd)


def test_one_forker_makes_all_supervisors(host: Host) -> None:
    first = forker_of(host)
    assert first in children_of(os.getpid())
    assert forker_of(host) == first
    assert forker_of(host, "sleep", "601") == first


def test_a_forked_supervisor_shares_nothing_with_the_forker(host: Host) -> None:
    """Neither its session, which may be ended, nor the socket that the daemon alone writes to."""
    pid = supervisor_of(host, host.start("sleep", "600"))
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
    held = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    assert os.readlink(f"/proc/{parent_of(pid)}/fd/0") not in held


def test_the_process_table_tells_supervisors_apart(host: Host) -> None:
    job = host.start("sleep", "600")
    shown = Path(f"/proc/{supervisor_of(host, job)}/cmdline").read_bytes().rstrip(b"\0")
    assert shown.startswith(b"gpuschedd supervisor /")
    assert f"gpuschedd supervisor {job.path}".encode().startswith(shown)
    assert Path(f"/proc/{forker_of(host)}/cmdline").read_bytes().endswith(b"--forker\0")


def test_the_forker_keeps_no_dead_supervisors(host: Host) -> None:
    job = host.start("true")
    pid = supervisor_of(host, job)
    host.wait_exit(job)
    host.wait(lambda: True if process_stat(pid) is None else None)


def test_a_supervisor_outlives_the_forker_and_the_next_launch_has_a_new_one(host: Host) -> None:
    os.mkfifo(host.work / "fifo")
    job = host.sh("read x < fifo; exit 7")
    host.wait(job.started)
    killed = parent_of(supervisor_of(host, job))
    kill(killed)
    assert host.run("true").code == 0
    assert forker_of(host) != killed
    (host.work / "fifo").write_text("go\n")
    assert host.wait_exit(job).code == 7


def test_a_forker_that_hangs_is_replaced_and_costs_no_job(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch goes the longer way, and what the forker was sent runs nothing."""
    forker = forker_of(host)
    os.kill(forker, signal.SIGSTOP)
    monkeypatch.setattr(forking, "LAUNCH_DEADLINE_S", 0.2)
    job = host.sh("echo ran >> ran")
    monkeypatch.undo()
    assert host.wait_exit(job).code == 0
    assert (host.work / "ran").read_text() == "ran\n"
    assert not is_alive(forker)
    assert is_alive(forker_of(host))


def test_the_forker_ends_with_its_daemon_and_the_job_does_not(host: Host) -> None:
    job = JobDir.create(host.jobs_root, host.spec("sleep", "600"))
    code = (
        "import sys; from pathlib import Path; from gpuschedd.run.job_dir import JobDir; "
        "from gpuschedd.run.launchers.forking import ForkingLauncher\n"
        "launcher = ForkingLauncher(); launcher.launch(JobDir(Path(sys.argv[1])))\n"
        "print('launched', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(job.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"launched\n"
        pid = supervisor_of(host, job)
        pidfd = os.pidfd_open(parent_of(pid))
        daemon.kill()
    assert select.select([pidfd], [], [], DEADLINE_S)[0] == [pidfd]
    os.close(pidfd)
    assert is_alive(pid)


def test_a_forker_is_of_the_files_that_are_there(copied: tuple[Host, Path]) -> None:
    host, folder = copied
    before = forker_of(host)
    (folder / "life.py").touch()
    after = forker_of(host)
    assert after != before
    assert not is_alive(before)
    assert forker_of(host) == after


def test_files_that_are_not_whole_make_the_launch_wait(copied: tuple[Host, Path]) -> None:
    host, folder = copied
    (folder / "life.py").rename(folder / "away")
    job = JobDir.create(host.jobs_root, host.spec("true"))
    with pytest.raises(LaunchDeferred, match="not whole"):
        host.launcher.launch(job)
    (folder / "away").rename(folder / "life.py")
    host.launcher.launch(job)
    assert host.wait_exit(job).code == 0


def test_a_warm_forker_is_there_before_the_first_launch(host: Host) -> None:
    before = children_of(os.getpid())
    host.launcher.warm_up()
    [forker] = set(children_of(os.getpid())) - set(before)
    assert forker_of(host) == forker


def test_nothing_of_the_daemon_reaches_a_job(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor, no variable; and the standard input is empty."""
    monkeypatch.setenv("SECRET_OF_THE_DAEMON", "1")
    line = "ls /proc/self/fd | wc -l; env | grep -c SECRET; wc -c"
    job = host.sh(line)
    host.wait_exit(job)
    assert host.output(job).split() == [b"4", b"0", b"0"]  # 0 to 2 and that of the listing
    environment = Path(f"/proc/{forker_of(host)}/environ").read_bytes()
    assert b"SECRET" not in environment


def test_a_place_that_is_no_job_directory_is_refused_in_words(host: Host) -> None:
    with pytest.raises(LaunchFailed, match=r"there is no .*/9\.1"):
        host.launcher.launch(JobDir.open(host.jobs_root, 9, 1))
