"""How jobs end, through the whole way: daemon, supervisor, real processes, the books."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpusched_client.terms import JobId, JobState
from gpuschedd.gpu.attribution import JobKey
from gpuschedd.gpu.source import DeviceAccess, DeviceMissing
from gpuschedd.jobs.batch import Batch
from gpuschedd.run import dispatcher as dispatcher_module
from gpuschedd.run.dispatcher import Dispatcher, keep_time
from gpuschedd.run.launchers.direct import LaunchDeferred
from gpuschedd.run.launchers.systemd import SystemdLauncher
from gpuschedd.store.records import Changes
from tests.jobs.test_gates import WAITING
from tests.support.daemon import DaemonProcess, clean_up, daemon_in, until

RESPAWNER = r"""
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork():
    time.sleep(600)
os.setsid()
if os.fork():
    os._exit(0)
while True:
    if os.fork():
        time.sleep(0.01)
        os._exit(0)
    os.setsid()
"""


def test_a_job_that_flees_and_ignores_term_is_gone_after_its_grace(
    daemon: DaemonProcess,
) -> None:
    """Double fork, setsid, TERM ignored, a new process every 10 ms; its GPU is free only then."""
    script = daemon.work_dir / "flee.py"
    script.write_text(RESPAWNER)
    with daemon.client() as client:
        job = client.submit(["/usr/bin/python3", str(script)], gpus=4, time_limit="1h")
        until(lambda: client.job(job.id).state is JobState.RUNNING, "it runs")
        after = client.submit(["true"], gpus=4, time_limit="1m")
        client.cancel([job.id])
        ended = client.wait(job.id, timeout_s=30)
        assert ended.state is JobState.CANCELLED
        assert _processes_of(str(script)) == []
        assert client.wait(after.id, timeout_s=30).state is JobState.COMPLETED


def _processes_of(mark: str) -> list[int]:
    """Pids whose command line has mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if mark.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_what_a_job_leaves_behind_is_ended_and_its_own_end_stands(tmp_path: Path) -> None:
    """Exit 0 with a server left in the background: COMPLETED at its own time, GPU freed after."""
    grace_s = 5.0  # in it the daemon hears of the end
    options = ("--set", f"scheduling.kill_grace={grace_s}")
    with daemon_in(tmp_path, "4x24G", *options) as daemon, daemon.client() as client:
        job = client.submit(shell="trap '' TERM; setsid sleep 300 & sleep 0.1; exit 0", gpus=4)
        waiting = client.submit(["true"], gpus=4)
        ended = client.wait(job.id, timeout_s=30)
        assert (ended.state, ended.exit_code) == (JobState.COMPLETED, 0)
        assert "job_completing" in [event.kind for event in client.job(job.id).events or ()]
        started = client.wait(waiting.id, timeout_s=30)
        assert ended.ended_at_s is not None
        assert started.started_at_s is not None
        assert started.started_at_s >= ended.ended_at_s + grace_s - 0.1


def test_a_time_limit_ends_the_job_as_timeout(daemon: DaemonProcess) -> None:
    """Also when it then exits 0."""
    with daemon.client() as client:
        job = client.submit(shell="trap 'exit 0' TERM; sleep 60 & wait", time_limit=1)
        ended = client.wait(job.id, timeout_s=30)
        assert (ended.state, ended.cause) == (JobState.TIMEOUT, "time_limit")


def test_a_cancel_at_the_very_end_gives_one_state_that_fits_the_order(
    daemon: DaemonProcess, is_soak: bool
) -> None:
    """200 times (1,000 in soak): CANCELLED if and only if the order came before the reap."""
    rounds = 1_000 if is_soak else 200
    print(f"{rounds} rounds of 1000")
    seen: dict[str, int] = {}
    with daemon.client() as client:
        for _ in range(rounds // 20):
            jobs = [
                client.submit(["sleep", f"0.{place:02d}"], gpus=0, output="/dev/null").id
                for place in range(20)
            ]
            outcomes = {o.job_id: o for job_id in jobs for o in client.cancel([job_id])}
            for ended in client.wait(jobs, timeout_s=60):
                seen[str(ended.state)] = seen.get(str(ended.state), 0) + 1
                if ended.state is JobState.COMPLETED:
                    assert ended.exit_code == 0
                    assert ended.cause == "exit"
                else:
                    assert ended.state is JobState.CANCELLED
                    assert ended.cause == "cancelled"
                if "already" in outcomes[ended.job_id].text:
                    assert ended.state is JobState.COMPLETED
    print(seen)
    assert sum(seen.values()) == rounds


def test_a_killed_supervisor_is_node_fail_and_leaves_no_process(daemon: DaemonProcess) -> None:
    """kill -9 of the supervisor: the job's processes are ended, the GPU is free only after them."""
    with daemon.client() as client:
        mark = str(daemon.work_dir / "orphan-mark")
        line = f"setsid sh -c 'trap \"\" TERM; : {mark}; while :; do sleep 1; done' & sleep 300"
        job = client.submit(shell=line, gpus=4)
        until(lambda: client.job(job.id).state is JobState.RUNNING, "it runs")
        until(lambda: len(_processes_of(mark)) >= 2, "its background process runs")
        claim = daemon.state_dir / "jobs" / f"{job.id}.1" / "claim"
        os.kill(json.loads(claim.read_text())["pid"], signal.SIGKILL)
        ended = client.wait(job.id, timeout_s=30)
        assert ended.state is JobState.NODE_FAIL
        assert ended.exit_code is None
        assert _processes_of(mark) == []


@pytest.mark.parametrize("act", ["cancel", "signal", "limit"])
def test_an_order_is_answered_when_its_supervisor_can_read_it(
    daemon: DaemonProcess, act: str
) -> None:
    """A daemon that is killed right after the answer has not kept anything to itself."""
    with daemon.client() as client:
        line = "trap '' TERM USR1; while :; do sleep 0.1; done"
        job = client.submit(shell=line, time_limit="1h", output="/dev/null")
        until(lambda: client.job(job.id).state is JobState.RUNNING, "it runs")
        if act == "cancel":
            client.cancel([job.id])
        elif act == "signal":
            client.cancel([job.id], signal=signal.SIGUSR1)
        else:
            client.update([job.id], time_limit="2h")
        orders = json.loads((daemon.state_dir / "jobs" / f"{job.id}.1" / "orders").read_text())
        assert (orders["cancel"] is not None) is (act == "cancel")
        assert orders["signals"] == ([[1, signal.SIGUSR1]] if act == "signal" else [])
        assert orders["time_limit_s"] == (7200.0 if act == "limit" else 3600.0)
        client.cancel([job.id])


@pytest.mark.parametrize("window", ["pending", "configuring", "running"])
def test_a_cancel_in_each_window_of_the_start_is_cancelled(
    daemon: DaemonProcess, window: str
) -> None:
    """Before the pass, during the launch, and after the start."""
    with daemon.client() as client:
        if window == "pending":
            client.submit(["sleep", "60"], gpus=4)
        job = client.submit(["sleep", "60"], gpus=4, output="/dev/null")
        if window == "running":
            until(lambda: client.job(job.id).state is JobState.RUNNING, "it runs")
        client.cancel([job.id])
        assert client.wait(job.id, timeout_s=30).state is JobState.CANCELLED


def test_output_that_cannot_be_opened_fails_with_the_reason(tmp_path: Path) -> None:
    """A missing directory, and a FIFO that nobody reads: nothing waits for a reader."""
    options = ("--set", "jobs.environment_patience=0")
    with daemon_in(tmp_path, "4x24G", *options) as daemon, daemon.client() as client:
        fifo = daemon.work_dir / "fifo"
        os.mkfifo(fifo)
        missing = client.submit(["true"], output="no/such/dir/out", cwd=daemon.work_dir)
        unread = client.submit(["true"], output=str(fifo), cwd=daemon.work_dir)
        for job, word in ((missing, "no/such/dir"), (unread, "a FIFO that nobody reads")):
            ended = client.wait(job.id, timeout_s=30)
            assert ended.state is JobState.FAILED
            assert ended.cause == "setup"
            assert word in (ended.cause_detail or "")


def test_an_end_tells_what_its_owner_may_not_know(daemon: DaemonProcess) -> None:
    """Processes that were left behind; memory that ran out, and whether that was the end."""
    lines = {
        "nohup sleep 600 > /dev/null & exit 0": (
            ("COMPLETED", "exit"),
            "1 process still ran when the main process ended, and was ended; use wait",
        ),
        "sleep 600 & sleep 600 & exit 3": (
            ("FAILED", "exit"),
            "2 processes still ran when the main process ended, and were ended; use wait",
        ),
        "echo CUDA out of memory, halved; echo ValueError: x; exit 1": (
            ("FAILED", "exit"),
            "its output shows a CUDA OOM, and another error later",
        ),
        "echo CUDA out of memory; exit 1": (
            ("OUT_OF_MEMORY", "cuda_oom"),
            "its output shows a CUDA OOM",
        ),
        "exit 0": (("COMPLETED", "exit"), None),
    }
    with daemon.client() as client:
        jobs = [client.submit(shell=line, gpus=0, cwd=daemon.work_dir) for line in lines]
        ended = client.wait([job.id for job in jobs], timeout_s=30)
    told = [((str(job.state), job.cause), job.cause_detail) for job in ended]
    assert told == list(lines.values())


def test_commands_that_are_not_there_or_not_executable_have_shells_codes(
    daemon: DaemonProcess,
) -> None:
    """127 and 126."""
    plain = daemon.work_dir / "plain"
    plain.write_text("not a program")
    with daemon.client() as client:
        absent = client.submit(["no-such-command-here"], cwd=daemon.work_dir)
        dull = client.submit([str(plain)], cwd=daemon.work_dir)
        assert client.wait(absent.id, timeout_s=30).exit_code == 127
        assert client.wait(dull.id, timeout_s=30).exit_code == 126


def test_arguments_and_environment_arrive_byte_for_byte(daemon: DaemonProcess) -> None:
    """Invalid UTF-8, newlines, empty strings, leading dashes."""
    words = [b"", b"-n", b"--", b"a\nb", b"\xff\xfe", b"%j", b"$HOME", b"  "]
    dump = "import os,sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:]))"
    dump += "+ b'\\1' + os.environb[b'ODD'])"
    with daemon.client() as client:
        job = client.submit(
            [b"/usr/bin/python3", b"-c", dump.encode(), *words],
            environment={b"ODD": b"\xff=\n\x80", b"PATH": b"/usr/bin:/bin"},
            cwd=daemon.work_dir,
            output="bytes",
        )
        assert client.wait(job.id, timeout_s=30).state is JobState.COMPLETED
    said = (daemon.work_dir / "bytes").read_bytes()
    assert said == b"\0".join(words) + b"\1" + b"\xff=\n\x80"


def test_no_exec_holds_the_gpu_for_the_limit_and_runs_nothing(tmp_path: Path) -> None:
    """For demonstrations and load tests."""
    daemon = DaemonProcess(tmp_path, "1x24G", "--no-exec")
    daemon.start()
    mark = tmp_path / "ran"
    with daemon.client() as client:
        job = client.submit(["touch", str(mark)], time_limit=1)
        client.wait(job.id, timeout_s=30)
    daemon.stop()
    assert not mark.exists()


def test_a_job_is_warned_of_once_when_nine_tenths_of_its_limit_have_passed(
    tmp_path: Path,
) -> None:
    """An event for watchers, a line in the log. The job does not heed the TERM at its limit."""
    go = tmp_path / "go"
    line = f"trap '' TERM; until [ -e {go} ]; do sleep 0.05; done"
    with daemon_in(tmp_path, "1x24G") as daemon, daemon.client() as client:
        job = client.submit(shell=line, time_limit=2, output="/dev/null")

        def warnings() -> int:
            events = client.job(job.id).events or ()
            return [event.kind for event in events].count("job_near_limit")

        until(warnings, "the warning")
        go.touch()
        client.wait(job.id, timeout_s=30)
        assert warnings() == 1
        assert f"job_near_limit job={job.id}" in daemon.log.read_text()


def test_a_state_directory_may_have_a_longer_path_than_a_socket(tmp_path: Path) -> None:
    """Its jobs are seen to start, which nothing but a hint tells."""
    place = tmp_path / ("long" * 30)
    daemon = DaemonProcess(place, "1x24G")
    daemon.socket = tmp_path / "s.sock"
    daemon.start()
    with daemon.client() as client:
        job = client.submit(["sleep", "600"], cwd=daemon.work_dir)
        until(lambda: client.job(job.id).state is JobState.RUNNING, "it is seen to run")
        client.cancel(job.id)
        assert client.wait(job.id, timeout_s=30).state is JobState.CANCELLED
    daemon.stop()


def test_a_filter_that_cannot_be_made_is_the_host_s_fault() -> None:
    """/dev that cannot be read for a moment costs the job no attempt."""

    def unreadable(_gpus: object) -> DeviceAccess:
        raise OSError(5, "Input/output error", "/dev")

    dispatcher: Any = SimpleNamespace(
        _runner=SimpleNamespace(launcher=SystemdLauncher()),
        _specs=SimpleNamespace(device_access=unreadable),
    )
    with pytest.raises(LaunchDeferred, match="no device filter"):
        asyncio.run(Dispatcher._device_access(dispatcher, []))


def test_a_gpu_without_its_device_node_defers_the_launch_with_the_cure() -> None:
    """PID 1 would pass the missing node over, and the job would see no GPU. The host lacks it, so
    no attempt of the job's is counted.
    """

    def missing(_gpus: object) -> DeviceAccess:
        raise DeviceMissing("/dev/nvidia3 does not exist; `nvidia-smi` makes it")

    dispatcher: Any = SimpleNamespace(
        _runner=SimpleNamespace(launcher=SystemdLauncher()),
        _specs=SimpleNamespace(device_access=missing),
    )
    with pytest.raises(LaunchDeferred, match="/dev/nvidia3 does not exist"):
        asyncio.run(Dispatcher._device_access(dispatcher, []))


def test_the_time_alone_is_worth_a_commit_while_something_runs() -> None:
    """A power cut of a quiet host is known to have come after it."""
    assert Changes().is_empty
    assert not Changes(keeps_time=True).is_empty
    parent = Batch(cast(Any, SimpleNamespace(next_job_id=1)), 0.0, 0.0)
    child = parent.child()
    keep_time(child)
    parent.absorb(child)
    changes = Changes()
    parent.into(changes)
    assert not changes.is_empty


class Watched:
    """A runner that tracks some attempts, and notes what is asked of it."""

    def __init__(self, *tracked: JobKey) -> None:
        self.tracked = set(tracked)
        self.asked: asyncio.Queue[tuple[str, JobKey]] = asyncio.Queue()

    def report_to(self, _report: object) -> None:
        """Nothing is reported."""

    def look_again(self, key: JobKey) -> bool:
        """A look of the slow clock."""
        if key not in self.tracked:
            return False
        self.asked.put_nowait(("look", key))
        return True

    async def recover(self, key: JobKey, _uid: int, _orders: object, *, ran: bool) -> None:
        """As at a start."""
        assert ran
        self.tracked.add(key)
        self.asked.put_nowait(("recover", key))


def test_the_slow_clock_looks_at_every_attempt_and_finds_those_that_nobody_tracks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Again and again, and only at what holds something. Each time the clock is committed."""
    monkeypatch.setattr(dispatcher_module, "LOOK_EVERY_S", 0.001)
    lost, tracked = (
        replace(WAITING, job_id=JobId(number), state=JobState.RUNNING) for number in (1, 2)
    )
    posted: list[object] = []
    controller: Any = SimpleNamespace(
        clock=None,
        on_commit=[],
        post=posted.append,
        state=SimpleNamespace(jobs={job.job_id: job for job in (lost, tracked, WAITING)}),
    )
    lost_key, tracked_key = ((job.job_id, job.attempt) for job in (lost, tracked))
    runner = Watched(tracked_key)
    unasked: Any = None
    dispatcher = Dispatcher(controller, cast(Any, runner), unasked, unasked, unasked, unasked)

    async def story() -> list[tuple[str, JobKey]]:
        looking = asyncio.ensure_future(dispatcher.look_regularly())
        try:
            return [await asyncio.wait_for(runner.asked.get(), 30) for _ in range(6)]
        finally:
            looking.cancel()

    again = [("look", lost_key), ("look", tracked_key)]
    assert asyncio.run(story()) == [
        ("recover", lost_key),
        ("look", tracked_key),
        *again,
        *again,
    ]
    assert len(posted) >= 3
    assert set(posted) == {keep_time}


#: A daemon that hears no supervisor, and whose first look at an attempt comes to nothing.
DEAF = """
import sys
from gpuschedd.run import dispatcher, hints, launches, runner
hints.HintSocket._read = lambda self: self._socket.recv(hints.HINT_BYTES_MAX) and None
launches.EARLY_LOOKS_S, dispatcher.LOOK_EVERY_S = {early}, {every}
first, look = set(), runner.Runner.look
def later(self, key):
    if key in first:
        look(self, key)
    first.add(key)
runner.Runner.look = later
sys.argv = ["gpuschedd", *sys.argv[4:]]
import gpuschedd.cli
gpuschedd.cli.cli()
"""


@pytest.mark.parametrize(
    ("early", "every"),
    [("launches.EARLY_LOOKS_S", "1e6"), ("()", "0.1")],
    ids=["soon after the launch", "by the slow clock"],
)
def test_a_job_is_seen_to_run_though_every_hint_is_lost(
    tmp_path: Path, early: str, every: str
) -> None:
    """By the looks after a launch, or by the slow clock alone; no look at the GPUs is due."""
    deaf = DEAF.format(early=early, every=every)
    daemon = DaemonProcess(
        tmp_path, "1x24G", "--set", "gpu_sample_interval=60", wrapper=(sys.executable, "-c", deaf)
    )
    try:
        with daemon.start().client() as client:
            job = client.submit(["sleep", "600"], output="/dev/null")
            until(lambda: client.job(job.id).state is JobState.RUNNING, "it is seen to run", 20)
            client.cancel(job.id)
            assert client.wait(job.id, timeout_s=30).state is JobState.CANCELLED
    finally:
        clean_up(daemon)
