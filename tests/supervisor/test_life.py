"""One attempt under its supervisor: how it ends, and what is written down of it."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuschedd.core.attempt import Cancel, Orders
from gpuschedd.run.job_dir import JobDir
from gpuschedd.supervisor.procfs import process_stat
from gpuschedd.supervisor.records import LOG, ORDERS, open_directory, publish
from tests.support.jobs import Host


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
    found = process_stat(pid)
    return found.state if found else ""


def test_term_to_the_supervisor_stops_the_job(host: Host) -> None:
    job = host.start("sleep", "60")
    host.wait(job.started)
    claim = job.claim()
    assert claim is not None
    os.kill(claim.pid, signal.SIGTERM)
    assert host.wait_exit(job).cause == "stopped"


@pytest.mark.parametrize(
    "signum",
    [
        *(signal.SIGHUP, signal.SIGALRM, signal.SIGPROF, signal.SIGIO, signal.SIGPWR),
        *(signal.SIGXCPU, signal.SIGRTMIN, signal.SIGRTMAX),
    ],
)
def test_a_stray_signal_to_the_supervisor_ends_nothing(host: Host, signum: int) -> None:
    """Without it nobody would know how the job ended; the job itself has all signals again."""
    os.mkfifo(host.work / "fifo")
    job = host.sh("echo up; read line < fifo; kill -PROF $$")
    host.wait_output(job, b"up")
    claim = job.claim()
    assert claim is not None
    os.kill(claim.pid, signum)
    (host.work / "fifo").write_text("go on\n")
    assert host.wait_exit(job).signal == signal.SIGPROF


def test_numbered_signals_arrive_once_each(host: Host) -> None:
    line = "trap 'echo usr1' USR1; trap 'echo usr2; exit 0' USR2; echo up; "
    job = host.sh(line + "while :; do sleep 0.02; done")
    host.wait_output(job, b"up")
    host.order(job, Orders(signals=((1, signal.SIGUSR1),)))
    host.wait_output(job, b"usr1")
    host.order(job, Orders(signals=((1, signal.SIGUSR1), (2, signal.SIGUSR2))))
    host.wait_exit(job)
    lines = host.output(job).split()
    assert lines.count(b"usr1") == 1
    assert lines.count(b"usr2") == 1


LISTENER = """
import signal, sys
signal.signal(int(sys.argv[1]), lambda *_: print("told", flush=True) or sys.exit(0))
print("up", flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    "signum", [signal.SIGUSR1, signal.SIGHUP, signal.SIGALRM, signal.SIGRTMIN + 1]
)
def test_a_signal_that_tells_something_goes_to_those_that_listen(host: Host, signum: int) -> None:
    """A shell that waits for the listener has no handler, and would die of it."""
    command = shlex.join([sys.executable, "-I", "-c", LISTENER, str(int(signum))])
    job = host.sh(f"{command}; echo shell went on; exit 3")
    host.wait_output(job, b"up")
    host.order(job, Orders(signals=((1, signum),)))
    end = host.wait_exit(job)
    assert (end.code, end.signal) == (3, None)
    assert host.output(job).splitlines() == [b"up", b"told", b"shell went on"]


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGINT, signal.SIGTERM])
def test_a_signal_nobody_listens_for_reaches_all(host: Host, signum: signal.Signals) -> None:
    job = host.sh("echo up; sleep 600 & wait")
    host.wait_output(job, b"up")
    host.order(job, Orders(signals=((1, signum),)))
    assert host.wait_exit(job).signal == signum


def test_processes_that_outlive_the_main_one_are_counted(host: Host) -> None:
    """They are ended, and the end says how many they were."""
    job = host.sh("nohup sleep 600 > /dev/null & sleep 600 & exit 0")
    assert host.wait_exit(job).left == 2
    assert host.wait_exit(host.sh("sleep 0.01 & wait; exit 0")).left == 0
    cut = host.sh("echo up; sleep 600 & wait")
    host.wait_output(cut, b"up")
    host.cancel(cut)
    assert host.wait_exit(cut).left == 0


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
    directory = open_directory(str(job.path))
    publish(directory, ORDERS, orders)
    os.close(directory)
    claim = job.claim()
    assert claim is not None
    pidfd = host.launcher.attach(claim)
    assert pidfd is not None
    host.launcher.wake(pidfd)
    os.close(pidfd)
    log = job.path / LOG
    host.wait(lambda: True if b"orders not understood" in log.read_bytes() else None)
    host.cancel(job)
    assert host.wait_exit(job).cause == "cancelled"


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
