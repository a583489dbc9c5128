"""One attempt under its supervisor: what the job gets, how it ends, what is written down."""

from __future__ import annotations

import errno
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpuschedd import supervisor
from gpuschedd.core.attempt import Cancel, Orders
from gpuschedd.run.job_dir import JobDir
from gpuschedd.run.launchers.direct import DirectLauncher
from tests.support.jobs import DEADLINE_S, LEADERLESS, Host, is_alive

AS_ROOT = os.geteuid() == 0
ODD_WORDS = (b"", b"--", b"-x", b"a b", b"line\nline", b"\xff\xfe\x80", b"'\"$HOME", b"caf\xc3\xa9")


@pytest.fixture
def host() -> Iterator[Host]:
    with Host() as made:
        yield made


# --- what the job gets --------------------------------------------------------------------------


def test_argv_arrives_byte_for_byte(host: Host) -> None:
    job = host.start("/bin/cat", "/proc/self/cmdline", "/dev/null")
    script = host.start("/bin/sh", "-c", "cat /proc/$$/cmdline; exit 0", *ODD_WORDS)
    host.wait_exit(job)
    host.wait_exit(script)
    assert host.output(job) == b"/bin/cat\0/proc/self/cmdline\0/dev/null\0"
    assert host.output(script).split(b"\0")[3:-1] == list(ODD_WORDS)


def test_the_environment_is_the_spec_s_and_the_marks_and_nothing_else(host: Host) -> None:
    pairs = tuple((b"K%d" % index, word) for index, word in enumerate(ODD_WORDS))
    job = host.start("/bin/cat", "/proc/self/environ", environment=pairs)
    host.wait_exit(job)
    assert host.output(job).split(b"\0")[:-1] == [
        *(key + b"=" + value for key, value in pairs),
        b"GPUSCHED_JOB_ID=%d" % job.job_id,
        b"GPUSCHED_ATTEMPT=1",
        b"GPUSCHED_INSTANCE=" + host.root.name.encode(),
    ]


def test_no_descriptor_but_three_reaches_the_job(host: Host) -> None:
    job = host.start("ls", "-l", "/proc/self/fd")
    host.wait_exit(job)
    found = re.findall(r"(\d+) -> (.*)", host.output(job).decode())
    out = str(host.work / f"out.{job.job_id}")
    # ls itself has the directory open.
    assert [row for row in found if not row[1].startswith("/proc/")] == [
        ("0", "/dev/null"),
        ("1", out),
        ("2", out),
    ]


def test_session_umask_directory_and_signals_are_as_a_login_would_have_them(host: Host) -> None:
    line = "umask; pwd; ps -o sid= -p $$; echo $$; grep -E 'Sig(Blk|Ign)' /proc/self/status"
    job = host.sh(line, umask=0o027)
    host.wait_exit(job)
    umask, place, session, pid, *masks = host.output(job).decode().split()
    assert (umask, place) == ("0027", str(host.work))
    assert session == pid
    assert masks[:3] == ["SigBlk:", "0" * 16, "SigIgn:"]
    # 32 and 33 belong to the C library: no program can set them, and make leaves 32 ignored.
    assert int(masks[3], 16) & ~(0b11 << 31) == 0


def test_limits_are_lowered_and_never_raised(host: Host) -> None:
    rlimits = (("RLIMIT_NOFILE", 50, 60), ("RLIMIT_CORE", 0, 0), ("RLIMIT_STACK", -1, -1))
    job = host.sh("ulimit -Sn; ulimit -Hn; ulimit -c", rlimits=rlimits)
    host.wait_exit(job)
    assert host.output(job).split() == [b"50", b"60", b"0"]


def test_a_script_runs_under_its_interpreter_and_is_gone_afterwards(host: Host) -> None:
    script = b"#!/bin/sh -e\nstat -c '%a %U' \"$0\"\nprintf '%s|' \"$@\"\n"
    job = host.start(b"a b", b"", script=script)
    assert host.wait_exit(job).code == 0
    host.wait_dead(job)
    owner = job.path.owner()
    assert host.output(job) == f"400 {owner}\na b||".encode()
    assert list(host.scripts_dir.iterdir()) == []


def test_a_script_without_a_first_line_is_for_sh(host: Host) -> None:
    job = host.start(script=b"echo from $0; exit 4\n")
    assert host.wait_exit(job).code == 4
    assert b"from " + os.fsencode(host.scripts_dir) in host.output(job)


def test_both_streams_share_a_file_or_have_their_own(host: Host) -> None:
    both = host.sh("echo out; echo err >&2")
    apart = host.sh("echo out; echo err >&2", error=b"err")
    host.wait_exit(both)
    host.wait_exit(apart)
    assert host.output(both) == b"out\nerr\n"
    assert host.output(apart) == b"out\n"
    assert (host.work / "err").read_bytes() == b"err\n"


def test_the_first_attempt_truncates_and_later_ones_append(host: Host) -> None:
    (host.work / "log").write_text("old")
    host.wait_exit(host.sh("echo one", output=b"log"))
    host.wait_exit(host.sh("echo two", output=b"log", attempt=2))
    assert (host.work / "log").read_text() == "one\ntwo\n"


def test_a_symlink_and_a_fifo_with_a_reader_are_good_logs(host: Host) -> None:
    (host.work / "link").symlink_to("target")
    host.wait_exit(host.sh("echo linked", output=b"link"))
    os.mkfifo(host.work / "fifo")
    with open(os.open(host.work / "fifo", os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        host.wait_exit(host.sh("echo piped", output=b"fifo"))
        assert reader.read() == b"piped\n"
    assert (host.work / "target").read_text() == "linked\n"


# --- how it ends --------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_the_exit_code_is_recorded(host: Host, code: int) -> None:
    before_s = time.time()
    end = host.wait_exit(host.sh(f"exit {code}"))
    assert (end.code, end.signal, end.cause, end.reason) == (code, None, "exit", None)
    assert before_s <= end.at_s <= end.finished_at_s <= time.time()


def test_a_signal_is_recorded(host: Host) -> None:
    end = host.wait_exit(host.sh("kill -SEGV $$"))
    assert (end.code, end.signal, end.cause) == (None, signal.SIGSEGV, "signal")


def test_used_time_and_memory_are_recorded(host: Host) -> None:
    line = "import time\nx = bytearray(80 * 2**20)\nwhile time.process_time() < 0.2: pass"
    end = host.run(sys.executable, "-S", "-c", line)
    assert 0.15 < end.cpu_user_s + end.cpu_system_s < 5
    assert 80 * 2**20 < end.max_rss_bytes < 300 * 2**20


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["no-such-command"], 127, "command not found: no-such-command"),
        ([""], 127, "command not found"),
        (["/nowhere/x"], 127, "command not found: /nowhere/x"),
        (["/etc/passwd"], 126, "Permission denied"),
        (["/etc"], 126, "/etc"),
        (["true", "x" * 200_000], 126, "Argument list too long"),
    ],
)
def test_a_command_that_cannot_run_ends_as_in_a_shell(
    host: Host, argv: list[str], code: int, words: str
) -> None:
    end = host.run(*argv)
    assert (end.code, end.cause) == (code, "exit")
    assert words in str(end.reason)


def test_a_closed_directory_in_path_is_no_command_that_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where PATH was root's: a command that is nowhere is not found; a closed path is closed."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)

    def execve(path: bytes, *_: object) -> None:
        if path.startswith(bytes(closed)):
            raise PermissionError(errno.EACCES, "Permission denied")
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(supervisor.os, "execve", execve)
    environment = {b"PATH": bytes(closed) + b":/bin"}
    with pytest.raises(supervisor.ExecFailed, match="command not found: no-such") as failed:
        supervisor.execute([b"no-such"], environment)
    assert failed.value.code == 127
    with pytest.raises(supervisor.ExecFailed, match="Permission denied") as failed:
        supervisor.execute([bytes(closed) + b"/sh"], environment)
    assert failed.value.code == 126


def test_files_without_a_usable_first_line(host: Host) -> None:
    for name, content in (("plain", b"exit 5\n"), ("binary", b"\x7fXX\0"), ("lost", b"#!/no/sh\n")):
        (host.work / name).write_bytes(content)
        (host.work / name).chmod(0o755)
    assert host.run("./plain").code == 5
    assert host.run("./binary").code == 126
    assert "interpreter does not exist" in str(host.run("./lost").reason)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output": b"fifo"}, "a FIFO that nobody reads"),
        ({"output": b"no/such/x"}, "directory no/such does not exist"),
        ({"output": b"/"}, "Is a directory"),
        ({"output": b"/dev/full"}, "No space left"),
        ({"error": b"fifo"}, "error fifo: a FIFO that nobody reads"),
        ({"cwd": b"/no/such"}, "directory /no/such: No such file"),
        ({"cwd": b"/dev/null"}, "Not a directory"),
        ({"output": b"a\0b"}, "null character"),
    ],
)
def test_a_failed_set_up_says_why(host: Host, changes: dict[str, bytes], words: str) -> None:
    os.mkfifo(host.work / "fifo")
    job = host.sh("echo ran > ran", **changes)
    end = host.wait_exit(job)
    assert (end.code, end.signal, end.cause) == (None, None, "setup")
    assert words in str(end.reason)
    assert job.started() is None
    assert not (host.work / "ran").exists()


def test_the_time_limit_ends_a_job_also_one_that_then_exits_0(host: Host) -> None:
    job = host.start("sleep", "600", time_limit_s=0.3)
    end, started = host.wait_exit(job), job.started()
    assert started is not None
    assert end.cause == "time_limit"
    assert end.boottime_s - started.boottime_s >= 0.3
    job = host.sh("trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done", kill_grace_s=60.0)
    host.wait_output(job, b"up")
    host.order(job, Orders(time_limit_s=0.01))
    end = host.wait_exit(job)
    assert (end.code, end.cause) == (0, "time_limit")


def test_a_raised_limit_holds_from_the_start_of_the_job(host: Host) -> None:
    job = host.start("sleep", "600", time_limit_s=2.0)
    started = host.wait(job.started)
    host.order(job, Orders(time_limit_s=2.5))
    end = host.wait_exit(job)
    assert end.cause == "time_limit"
    assert end.boottime_s - started.boottime_s >= 2.5


def test_a_lifted_limit_ends_nothing(host: Host) -> None:
    job = host.start("sleep", "2.5", time_limit_s=2.0)
    host.wait(job.started)
    host.order(job, Orders(time_limit_s=float("inf")))
    assert host.wait_exit(job).cause == "exit"


def test_a_cancel_is_recorded_with_its_author(host: Host) -> None:
    job = host.start("sleep", "60")
    host.wait(job.started)
    host.order(job, Orders(cancel=Cancel("alice", 123.0, "changed my mind")))
    end = host.wait_exit(job)
    assert (end.signal, end.cause) == (signal.SIGTERM, "cancelled")
    assert (end.cancel_by, end.cancel_at_s) == ("alice", 123.0)
    assert end.cancel_reason == "changed my mind"


def test_a_cancel_before_the_fork_runs_nothing(host: Host) -> None:
    job = JobDir.create(host.jobs_root, host.spec("touch", "ran"))
    job.write_orders(Orders(cancel=Cancel("0", time.time())))
    host.launcher.launch(job)
    end = host.wait_exit(job)
    assert (end.code, end.signal, end.cause) == (None, None, "cancelled")
    assert job.started() is None
    assert not (host.work / "ran").exists()


def test_the_first_cause_wins(host: Host) -> None:
    line = "trap 'echo term' TERM; echo up; while :; do sleep 0.05; done"
    job = host.sh(line, kill_grace_s=3.0)
    host.wait_output(job, b"up")
    host.order(job, Orders(time_limit_s=0.01))
    host.wait_output(job, b"term")
    host.cancel(job)
    end = host.wait_exit(job)
    assert (end.cause, end.signal, end.cancel_by) == ("time_limit", signal.SIGKILL, None)


def test_a_stopped_job_is_ended_too(host: Host) -> None:
    job = host.sh("kill -STOP $$; sleep 600", kill_grace_s=600.0)
    pid = host.wait(job.started).pid
    host.wait(lambda: True if _state_of(pid) == "T" else None)
    host.cancel(job)
    assert host.wait_exit(job).cause == "cancelled"


def _state_of(pid: int) -> str:
    found = supervisor.process_stat(pid)
    return found.state if found else ""


def test_term_to_the_supervisor_stops_the_job(host: Host) -> None:
    job = host.start("sleep", "60")
    host.wait(job.started)
    claim = job.claim()
    assert claim is not None
    os.kill(claim.pid, signal.SIGTERM)
    assert host.wait_exit(job).cause == "stopped"


def test_numbered_signals_arrive_once_each(host: Host) -> None:
    line = "trap 'echo usr1' USR1; trap 'echo usr2; exit 0' USR2; echo up; "
    job = host.sh(line + "while :; do sleep 0.02; done")
    host.wait_output(job, b"up")
    host.order(job, Orders(signals=((1, signal.SIGUSR1),)))
    host.wait_output(job, b"usr1")
    host.order(job, Orders(signals=((1, signal.SIGUSR1), (2, signal.SIGUSR2))))
    host.wait_exit(job)
    # The sleep below the shell dies of each, which is all the shell says besides.
    lines = host.output(job).split()
    assert lines.count(b"usr1") == 1
    assert lines.count(b"usr2") == 1


def test_no_exec_holds_until_its_limit(host: Host) -> None:
    job = host.start(no_exec=True, time_limit_s=0.3)
    end, started = host.wait_exit(job), job.started()
    assert started is not None
    assert (end.code, end.cause) == (0, "exit")
    assert end.boottime_s - started.boottime_s >= 0.3


def test_no_exec_without_a_limit_holds_until_a_cancel(host: Host) -> None:
    job = host.start(no_exec=True)
    host.wait(job.started)
    host.cancel(job)
    end = host.wait_exit(job)
    assert (end.code, end.cause) == (None, "cancelled")


@pytest.mark.tool("setpriv")
def test_a_user_s_own_supervisor_hides_from_nobody_who_is_that_user(tmp_path: Path) -> None:
    """Where /proc is mounted with hidepid=2, its daemon would take it for dead, and run twice."""
    bare = "setpriv --inh-caps=-all --bounding-set=-all" if AS_ROOT else ""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {bare} {sys.executable} "$@"\n')
    python.chmod(0o755)
    with Host(DirectLauncher(str(python))) as host:
        claim = host.start("sleep", "60").claim()
        assert claim is not None
        look = [*bare.split(), "cat", f"/proc/{claim.pid}/environ"]
        assert subprocess.run(look, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "orders",
    [
        {"time_limit_s": 0.1, "cancel": {}, "signals": []},
        {"time_limit_s": 0.1, "cancel": {"by": "0"}, "signals": []},
        {"time_limit_s": 0.1, "cancel": 7, "signals": []},
        {"time_limit_s": 0.1, "cancel": None, "signals": [[1]]},
        {"time_limit_s": 0.1},
    ],
)
def test_orders_that_make_no_sense_change_nothing(host: Host, orders: dict[str, object]) -> None:
    """Another version of the daemon may have written them; the next ones are obeyed."""
    job = host.start("sleep", "60")
    host.wait(job.started)
    directory = supervisor.open_directory(str(job.path))
    supervisor.publish(directory, supervisor.ORDERS, orders)
    os.close(directory)
    claim = job.claim()
    assert claim is not None
    pidfd = host.launcher.attach(claim)
    assert pidfd is not None
    host.launcher.wake(pidfd)
    os.close(pidfd)
    log = job.path / supervisor.LOG
    host.wait(lambda: True if b"orders not understood" in log.read_bytes() else None)
    host.cancel(job)
    assert host.wait_exit(job).cause == "cancelled"


# --- processes that stay ------------------------------------------------------------------------

REFORKER = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork(): os._exit(0) if os.environ.get("LEAVE") else signal.pause()
os.setsid()
if os.fork(): os._exit(0)
print("up", flush=True)
while True:
    time.sleep(0.01)
    if os.fork(): os._exit(0)
    os.setsid()
"""


@pytest.mark.parametrize("environment", [(), ((b"LEAVE", b"1"),)])
def test_a_reforking_daemon_is_gone_after_the_grace(
    host: Host, environment: tuple[tuple[bytes, bytes], ...]
) -> None:
    argv = (sys.executable, "-I", "-S", "-c", REFORKER)
    job = host.start(*argv, kill_grace_s=0.5, environment=environment)
    host.wait_output(job, b"up")
    host.cancel(job)
    host.wait_exit(job)
    assert host.marked(job) == ()


@pytest.mark.parametrize("place", ["main", "behind"])
def test_a_process_without_its_first_thread_is_ended_like_any(host: Host, place: str) -> None:
    argv = (sys.executable, "-I", "-S", "-c", LEADERLESS, place)
    job = host.start(*argv, kill_grace_s=0.2)
    host.wait_output(job, b"\n")
    host.cancel(job)
    host.wait_exit(job)
    assert not is_alive(int(host.output(job).split()[1]))


def test_a_server_left_behind_is_stopped_with_its_grace(host: Host) -> None:
    server = "trap 'sleep 0.4; echo bye; exit 0' TERM; echo serving; while :; do sleep 0.05; done"
    line = f'setsid sh -c "{server}" & while ! grep -q serving out.*; do :; done; exit 0'
    job = host.sh(line, kill_grace_s=60.0)
    ended = host.wait(job.ended)
    assert (ended.code, ended.cause) == (0, "exit")
    assert job.exit() is None
    end = host.wait_exit(job)
    assert (end.code, end.at_s) == (0, ended.at_s)
    assert end.finished_at_s - end.at_s >= 0.4
    assert b"bye" in host.output(job)


def test_the_rest_is_killed_after_the_grace(host: Host) -> None:
    job = host.sh(
        "(trap '' TERM; echo up; sleep 60) & while ! grep -q up out.*; do :; done; exit 3",
        kill_grace_s=0.3,
    )
    end = host.wait_exit(job)
    assert end.code == 3
    assert end.finished_at_s - end.at_s >= 0.3
    assert host.marked(job) == ()


RACE_TOLERANCE_S = 10.0  # between the last look at the orders and the reap, on a busy host


def _race_once(host: Host, await_start: bool) -> str:
    """Cancel a job that ends by itself at once; the cause, checked against the order's time."""
    job = host.start("true")
    if await_start:
        host.wait(job.started)
    from_s = time.time()
    host.cancel(job)
    to_s = time.time()
    end, ended = host.wait_exit(job), job.ended()
    assert ended is not None
    assert (end.cause, end.at_s, end.code) == (ended.cause, ended.at_s, ended.code)
    assert (end.cause == "cancelled") == (end.cancel_by is not None)
    if end.cause == "cancelled":
        assert end.at_s > from_s, "the order came after the reap"
    else:
        assert end.cause == "exit"
        assert end.at_s < to_s + RACE_TOLERANCE_S, "the order came before the reap"
    return end.cause


def _race(turns: range) -> list[str]:
    with Host() as host:
        return [_race_once(host, await_start=turn % 3 != 0) for turn in turns]


def test_a_cancel_in_the_very_moment_of_a_clean_exit_gives_one_true_record() -> None:
    with ThreadPoolExecutor(2) as threads:
        causes = [cause for found in threads.map(_race, [range(100)] * 2) for cause in found]
    assert len(causes) == 200
    assert set(causes) == {"cancelled", "exit"}


# --- the spec -----------------------------------------------------------------------------------


def _supervise(path: Path) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-I", "-S", supervisor.__file__, os.fspath(path)]
    return subprocess.run(command, capture_output=True, timeout=60, check=False)


def test_without_a_spec_nothing_runs(host: Host) -> None:
    job = JobDir.create(host.jobs_root, host.spec("touch", "ran"))
    (job.path / "spec").unlink()
    assert _supervise(job.path).returncode == supervisor.EXIT_NO_SPEC
    assert _supervise(host.jobs_root / "9.9").returncode == supervisor.EXIT_NO_SPEC
    assert job.claim() is None


@pytest.mark.parametrize("mode", [0o640, 0o644, 0o400, 0o666])
def test_a_spec_that_others_could_touch_is_refused(host: Host, mode: int) -> None:
    job = JobDir.create(host.jobs_root, host.spec("touch", "ran"))
    (job.path / "spec").chmod(mode)
    done = _supervise(job.path)
    assert done.returncode == supervisor.EXIT_SPEC_REFUSED
    assert b"the spec has mode" in done.stderr
    assert job.claim() is None


def test_a_directory_that_others_could_touch_is_refused(host: Host) -> None:
    job = JobDir.create(host.jobs_root, host.spec("touch", "ran"))
    job.path.chmod(0o755)
    assert _supervise(job.path).returncode == supervisor.EXIT_SPEC_REFUSED


@pytest.mark.root
@pytest.mark.skipif(not AS_ROOT, reason="needs root to give a file away")
def test_a_spec_of_somebody_else_is_refused(host: Host) -> None:
    job = JobDir.create(host.jobs_root, host.spec("touch", "ran"))
    os.chown(job.path / "spec", 12345, 12345)
    done = _supervise(job.path)
    assert done.returncode == supervisor.EXIT_SPEC_REFUSED
    assert b"belongs to uid 12345" in done.stderr


@pytest.mark.parametrize("uid", ["missing", "", None, "0", 0.0, True, -1, 2**32 - 1, 10**6 + 7])
def test_a_spec_without_a_proper_uid_is_refused(host: Host, uid: object) -> None:
    spec = host.spec("touch", "ran")
    job = JobDir.create(host.jobs_root, spec)
    record = spec.to_record()
    record["uid"] = uid
    if uid == "missing":
        del record["uid"]
    (job.path / "spec").write_bytes(supervisor.encode(record))
    assert _supervise(job.path).returncode == supervisor.EXIT_SPEC_REFUSED


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b'{"version": 2}', b'{"version": true}', b"{}", b"\xff", b'{"version": 1}'],
)
def test_a_spec_that_is_not_understood_is_refused(host: Host, content: bytes) -> None:
    job = JobDir.create(host.jobs_root, host.spec("touch", "ran"))
    (job.path / "spec").write_bytes(content)
    assert _supervise(job.path).returncode == supervisor.EXIT_SPEC_REFUSED
    assert job.claim() is None


def test_a_spec_in_another_attempt_s_directory_is_refused(host: Host) -> None:
    job = JobDir.create(host.jobs_root, host.spec("touch", "ran"))
    moved = host.jobs_root / "77.1"
    job.path.rename(moved)
    assert _supervise(moved).returncode == supervisor.EXIT_SPEC_REFUSED


# --- out of memory ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
        b"RuntimeError: CUDA error: out of memory",
        b"CUDA runtime error (2): out of memory",
        b"CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
        b"XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.",
        b"cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 8 bytes",
        b"cudaMalloc failed: out of memory",
        b"CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        b"cudaErrorMemoryAllocation: out of memory",
        b"HIP out of memory. Tried to allocate 2.00 GiB",
        b"OOM when allocating tensor with shape[9] on /device:GPU:0 by allocator GPU_0_bfc",
        b"RuntimeError: CUDA driver error: out of memory",
        b"Last error: Cuda failure 2 'out of memory'",
        b"pycuda._driver.MemoryError: cuMemAlloc failed: out of memory",
        b"mxnet.base.MXNetError: cudaMalloc retry failed: out of memory",
        b"allocating 3072.00 MiB on device 0: hipMalloc failed: out of memory",
        b"ROCm error: out of memory",
        b"MemoryError: std::bad_alloc: out_of_memory: CUDA error at: /rmm/include",
        b"RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        b"RESOURCE_EXHAUSTED: Attempting to allocate 3.2G. That was not possible.",
        b"RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB on device ordinal 0",
        b"RESOURCE_EXHAUSTED: Allocator (GPU_0_bfc) ran out of memory trying to allocate 2GiB",
        b"ResourceExhaustedError: Out of memory error on GPU 0. Cannot allocate 2.0GB",
    ],
)
def test_a_gpu_out_of_memory_is_recognised(line: bytes) -> None:
    assert supervisor.shows_cuda_oom(b"x\n" + line + b"\n")


@pytest.mark.parametrize(
    "line",
    [
        b"grpc: RESOURCE_EXHAUSTED: quota exceeded for project",
        b"OOM when allocating tensor with shape[9] on /device:CPU:0 by allocator cpu",
        b"MemoryError: out of memory",
        b"W Allocator (GPU_0_bfc) ran out of memory trying to allocate 2GiB. This is no failure",
        b"triton: out of resource: shared memory, Required: 131072",
        b"429 RESOURCE_EXHAUSTED: Quota exceeded for quota metric",
        b"",
    ],
)
def test_other_failures_are_no_gpu_out_of_memory(line: bytes) -> None:
    assert not supervisor.shows_cuda_oom(line)


def test_only_a_failed_job_s_own_output_tells_of_memory(host: Host) -> None:
    say = "echo CUDA out of memory"
    assert host.wait_exit(host.sh(f"{say}; exit 1", output=b"log")).oom == "cuda"
    assert host.wait_exit(host.sh("exit 1", output=b"log", attempt=2)).oom is None
    assert host.wait_exit(host.sh(f"{say}; exit 0")).oom is None
    assert host.wait_exit(host.sh(f"{say} >&2; exit 1", error=b"err")).oom == "cuda"
    assert host.wait_exit(host.sh(f"{say}; exit 1", output=b"/dev/null")).oom == "unknown"
    assert (
        host.wait_exit(
            host.sh(f"{say}; rm $LOG; exit 1", output=b"gone", environment=((b"LOG", b"gone"),))
        ).oom
        == "unknown"
    )


# --- the supervisor as a process ----------------------------------------------------------------


def test_in_the_foreground_it_ends_with_the_job(host: Host) -> None:
    """As PID 1 starts it: no fork of its own, nothing said, status 0 whatever the job's is."""
    job = JobDir.create(host.jobs_root, host.spec("sh", "-c", "exit 9", launch="pid1"))
    done = _supervise(job.path)
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
