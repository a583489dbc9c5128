"""The supervisor under strace: windows that are too short to hit, and what it must not touch."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpuschedd
from gpuschedd.core.attempt import Orders
from gpuschedd.core.recovery import Recovery, facts_of, recover
from gpuschedd.run.job_dir import JobDir
from gpuschedd.run.launchers.direct import DirectLauncher
from gpuschedd.supervisor.procfs import children_of
from tests.support.jobs import Host
from tests.support.traces import joined_calls

pytestmark = [
    pytest.mark.tool("strace"),
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace"),
]


# The memory of a supervisor is closed to its own user, and with it the paths in its calls.
needs_paths = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to read the paths in calls")


@pytest.fixture
def host() -> Iterator[Host]:
    with Host() as made:
        yield made


def traced(host: Host, *options: str) -> Path:
    """From now on the host's supervisors run under strace with these options; its log."""
    log = host.root / "trace"
    strace = f"exec strace -f -qq -s 512 -o {log} {' '.join(options)} {sys.executable}"
    wrapper = host.root / "python"
    wrapper.write_text(f'#!/bin/sh\n{strace} "$@"\n')
    wrapper.chmod(0o755)
    host.launcher = DirectLauncher(python=str(wrapper))
    return log


DELAY_S = 3.0  # long enough for an order to be given in it


def hold_up(host: Host, call: str, path: str | Path, delay_s: float) -> Path:
    """From now on this call on this path takes so long; the log."""
    inject = f"inject={call}:delay_enter={int(delay_s * 1e6)}:when=1"
    return traced(host, "-P", str(path), "-e", f"trace={call}", "-e", inject)


def begin(host: Host, *argv: str) -> JobDir:
    """As Host.start, not waiting for the launcher: strace holds it until the job has ended."""
    job = JobDir.create(host.jobs_root, host.spec(*argv))
    threading.Thread(target=host.launcher.launch, args=(job,), daemon=True).start()
    return job


@pytest.mark.root
@needs_paths
def test_nothing_is_imported_once_the_claim_is_taken(host: Host) -> None:
    log = traced(host, "-e", "trace=openat,open,linkat,execve")
    job = host.start(b"arg", script=b"#!/bin/sh\necho CUDA out of memory; exit 1\n")
    assert host.wait_exit(job).oom == "cuda"
    calls = joined_calls(log)
    linked = next(index for index, call in enumerate(calls) if "linkat(" in call)
    stdlib, ours = os.path.dirname(os.__file__), os.path.dirname(gpuschedd.__file__)
    places = (f'"{stdlib}', f'"{ours}')
    before = [call for call in calls[:linked] if any(place in call for place in places)]
    after = [call for call in calls[linked:] if any(place in call for place in (*places, ".so"))]
    # Only the interpreter of the script loads anything, after its own execve.
    executed = next(index for index, call in enumerate(calls) if 'execve("/bin/sh"' in call)
    assert before
    assert [call for call in after if calls.index(call) < executed or ".so" not in call] == []


@pytest.mark.root
@needs_paths
def test_a_cancel_in_the_set_up_runs_nothing_of_the_user_s(host: Host) -> None:
    hold_up(host, "chdir", host.work, DELAY_S)
    job = begin(host, "touch", "ran")
    claim = host.wait(job.claim)
    host.wait(lambda: children_of(claim.pid) or None)
    assert job.started() is None
    host.cancel(job)
    end = host.wait_exit(job)
    assert (end.code, end.signal, end.cause, end.cancel_by) == (None, None, "cancelled", "0")
    assert job.started() is None
    assert not (host.work / "ran").exists()


@pytest.mark.root
@needs_paths
def test_a_cancel_between_started_and_the_exec_is_a_cancel(host: Host) -> None:
    hold_up(host, "execve", "/bin/sh", DELAY_S)
    job = begin(host, "/bin/sh", "-c", "touch ran")
    host.wait(job.started)
    host.cancel(job)
    end = host.wait_exit(job)
    assert end.cause == "cancelled"
    assert not (host.work / "ran").exists()


@pytest.mark.root
@needs_paths
def test_a_signal_ordered_before_the_exec_waits_for_it(host: Host) -> None:
    log = hold_up(host, "execve", "/bin/sleep", DELAY_S)
    job = begin(host, "/bin/sleep", "600")
    started = host.wait(job.started)
    host.order(job, Orders(signals=((1, signal.SIGUSR1),)))
    end = host.wait_exit(job)
    # The sleep dies of it, and not the child before it became the sleep.
    assert (end.signal, end.cause) == (signal.SIGUSR1, "signal")
    (call,) = [call for call in joined_calls(log) if call.startswith(f"{started.pid} execve")]
    assert re.search(r"= 0\b", call)


POINTS = [
    (call, when)
    for call, whens in {
        "fsync": range(1, 9),
        "rename": range(1, 4),
        "linkat": range(1, 2),
        "pwrite64": range(1, 9),
        "sendto": range(1, 5),
        "clone": range(1, 3),
        "write": range(1, 4),
    }.items()
    for when in whens
]


@pytest.mark.parametrize(("call", "when"), POINTS)
def test_a_supervisor_killed_at_any_point_leaves_a_state_with_one_meaning(
    host: Host, call: str, when: int
) -> None:
    """Killed at the N-th call: what it leaves says truly whether the job ran, and how it ended."""
    names = {"rename": "rename,renameat,renameat2", "clone": "clone,clone3,fork,vfork"}
    calls = names.get(call, call)
    traced(host, "-e", f"trace={calls}", "-e", f"inject={calls}:signal=KILL:when={when}")
    job = JobDir.create(host.jobs_root, host.spec("sh", "-c", "echo ran >> ran; exit 3"))
    try:
        host.launcher.launch(job)
    except Exception as error:
        print(f"launch: {error}")
    _wait_quiet(host, job)
    ran = (host.work / "ran").exists()
    answer = _recovered(host, job)
    print(f"{call} {when}: ran={ran} {answer}")
    ended, end = job.ended(), job.exit()
    assert not ran or answer not in (Recovery.REQUEUE, Recovery.REQUEUE_AFTER_FENCE)
    assert ended is None or ended.code in (3, None)
    assert ended is None or ended.code == 3 or not ran
    assert end is None or end.code == ended.code if ended else end is None


def test_a_host_without_descriptors_for_the_child_is_waited_for(host: Host) -> None:
    """After the claim: the attempt ends as one whose place is away, and counts for none."""
    inject = "inject=pipe,pipe2:error=EMFILE:when=2+"  # the first is of the start
    traced(host, "-e", "trace=pipe,pipe2", "-e", inject)
    job = JobDir.create(host.jobs_root, host.spec("sh", "-c", "echo ran >> ran"))
    host.launcher.launch(job)
    _wait_quiet(host, job)
    assert not (host.work / "ran").exists()
    end = job.exit()
    assert end is not None
    assert (end.cause, end.place) == ("environment", "the host")
    assert "EMFILE" in str(end.reason)


AWAY = {"ESTALE": "Stale file handle", "ETIMEDOUT": "Connection timed out"}


@pytest.mark.root
@needs_paths
@pytest.mark.parametrize(("error", "words"), AWAY.items())
def test_a_directory_whose_server_does_not_answer_is_waited_for(
    host: Host, error: str, words: str
) -> None:
    """As one that is not there: nothing ran, and the place is told with what the system said."""
    inject = f"inject=chdir:error={error}"
    traced(host, "-P", str(host.work), "-e", "trace=chdir", "-e", inject)
    job = host.start("touch", "ran")
    end = host.wait_exit(job)
    assert (end.cause, end.place) == ("environment", f"directory {host.work}")
    assert end.reason == f"directory {host.work}: {words} ({error})"
    assert job.started() is None
    assert not (host.work / "ran").exists()


@pytest.mark.root
@needs_paths
@pytest.mark.parametrize(("error", "words"), AWAY.items())
@pytest.mark.parametrize(
    ("call", "name", "place"),
    [
        ("newfstatat", "tool", "command {work}/tool"),
        ("openat", "tool", "command {work}/tool"),
        ("newfstatat", "sh", "interpreter {work}/sh"),
        ("openat", "out", "output {work}/out"),
    ],
)
def test_a_file_whose_server_does_not_answer_is_waited_for(
    host: Host, call: str, name: str, place: str, error: str, words: str
) -> None:
    """The command, its first line, its interpreter, its output."""
    tool, shell = host.work / "tool", host.work / "sh"
    shell.symlink_to("/bin/sh")
    tool.write_text(f"#!{shell}\ntouch ran\n")
    tool.chmod(0o755)
    inject = f"inject={call}:error={error}"
    traced(host, "-P", str(host.work / name), "-e", f"trace={call}", "-e", inject)
    job = host.start(str(tool), output=os.fsencode(host.work / "out"))
    end = host.wait_exit(job)
    place = place.format(work=host.work)
    assert (end.cause, end.place) == ("environment", place)
    assert end.reason == f"{place}: {words} ({error})"
    assert not (host.work / "ran").exists()


def _wait_quiet(host: Host, job: JobDir) -> None:
    """Until the supervisor is dead, or the attempt was never claimed."""
    if job.claim() is not None:
        host.wait_dead(job)
    job.fence()
    host.wait(lambda: None if job.observe().supervisor_alive else True)
    host.wait(lambda: True if host.marked(job) == () else None)


def _recovered(host: Host, job: JobDir) -> Recovery:
    seen = job.observe()
    assert seen.claim is not None
    left = bool(host.marked(job))
    return recover(facts_of(seen, ran=False, cancel_requested=False, processes_left=left))


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_ends_are_written_when_the_disk_takes_them_again(host: Host, error: str) -> None:
    """The first two fsyncs after the gate fail: held and tried again, `ended` before `exit`."""
    traced(host, "-e", "trace=fsync", "-e", f"inject=fsync:error={error}:when=6..7")
    job = host.sh("exit 3")
    end, ended = host.wait_exit(job), job.ended()
    assert ended is not None
    assert (end.code, ended.code) == (3, 3)
    assert end.at_s == ended.at_s <= end.finished_at_s


@pytest.mark.parametrize("when", [3, 4])  # the directory itself, the record
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_a_start_that_cannot_be_written_is_no_start(host: Host, error: str, when: int) -> None:
    traced(host, "-e", "trace=fsync", "-e", f"inject=fsync:error={error}:when={when}")
    job = host.sh("touch ran")
    host.wait_dead(job)
    assert (job.started(), job.ended(), job.exit()) == (None, None, None)
    assert _recovered(host, job) is Recovery.REQUEUE
    assert not (host.work / "ran").exists()


@pytest.mark.root
@needs_paths
def test_no_path_of_the_user_s_is_touched_before_the_fork(host: Host) -> None:
    log = traced(host, "-e", "trace=file", "-y")
    job = host.sh("true")
    host.wait_exit(job)
    host.wait_dead(job)
    lines = [
        line for line in joined_calls(log) if str(host.work) in line or f"out.{job.job_id}" in line
    ]
    touching = {re.split(r"\D", line, maxsplit=1)[0] for line in lines}
    started = job.started()
    assert started is not None
    assert touching == {str(started.pid)}


@pytest.mark.root
@needs_paths
def test_a_set_up_that_hangs_is_ended_at_its_deadline(host: Host) -> None:
    """With a deadline of 2 s for 30, and a directory that takes twice that to enter."""
    root = os.fspath(Path(gpuschedd.__file__).parent.parent)
    short = (
        f"import sys; sys.path.append('{root}'); "
        "from gpuschedd.supervisor import life, start; "
        "life.SETUP_DEADLINE_S = 2.0; sys.exit(start.main(sys.argv[2:]))"
    )
    inject = f"-P {host.work} -e trace=chdir -e inject=chdir:delay_enter=4000000:when=1"
    wrapper = host.root / "python"
    wrapper.write_text(
        "#!/bin/sh\nshift 2; "
        f'exec strace -f -qq -o /dev/null {inject} {sys.executable} -I -S -c "{short}" "$@"\n'
    )
    wrapper.chmod(0o755)
    host.launcher = DirectLauncher(python=str(wrapper))
    job = begin(host, "touch", "ran")
    end = host.wait_exit(job)
    assert (end.code, end.signal, end.cause) == (None, None, "environment")
    assert str(end.reason) == f"directory {host.work}: no answer within 2 s"
    assert job.started() is None
