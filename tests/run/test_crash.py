"""kill -9 of the daemon at random moments: nothing acknowledged is lost, nothing runs twice."""

from __future__ import annotations

import os
import random
import re
import signal
import sqlite3
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

import pytest

from gpusched_client import Client
from gpusched_client.errors import Unavailable
from gpusched_client.terms import JobState
from gpusched_client.wire.job_messages import JobView
from gpuschedd.supervisor.procfs import boot_id, children_of
from tests.support.daemon import DaemonProcess, clean_up, until

SUBMISSIONS_PER_S = 20


class Submitter(threading.Thread):
    """Submits at a steady rate and tries again with the same id until it is acknowledged."""

    def __init__(self, daemon: DaemonProcess, record: Path) -> None:
        super().__init__(daemon=True)
        self._daemon = daemon
        self._record = record
        self.acknowledged: dict[int, int] = {}  # job id -> the code it must end with
        self.failure: BaseException | None = None
        self.stopping = threading.Event()

    def run(self) -> None:
        try:
            self._submit_until_stopped()
        except BaseException as error:
            self.failure = error

    def _submit_until_stopped(self) -> None:
        with Client(self._daemon.socket, reconnect_s=30.0) as client:
            number = 0
            while not self.stopping.wait(1 / SUBMISSIONS_PER_S):
                code = number % 8
                line = f"echo $GPUSCHED_JOB_ID.$GPUSCHED_ATTEMPT >> {self._record}; exit {code}"
                job = client.submit(
                    shell=line, gpus=0, cwd=self._daemon.work_dir, output="/dev/null"
                )
                self.acknowledged[job.id] = code
                number += 1


def _expect_truth(daemon: DaemonProcess, acknowledged: dict[int, int], record: Path) -> None:
    """Every acknowledged job ran once and ended with its own code."""
    with daemon.client() as client:
        ids = sorted(acknowledged)
        jobs: dict[int, JobView] = {}
        for start in range(0, len(ids), 500):
            part = ids[start : start + 500]
            client.wait(part, timeout_s=120)
            jobs |= {job.job_id: job for job in client.jobs(ids=part).jobs}
    assert sorted(jobs) == ids
    wrong = {
        job_id: (str(jobs[job_id].state), jobs[job_id].exit_code, jobs[job_id].cause_detail)
        for job_id, code in acknowledged.items()
        if jobs[job_id].exit_code != code
    }
    assert wrong == {}
    starts = Counter(line.split(".")[0] for line in record.read_text().split())
    assert [job_id for job_id, count in starts.items() if count != 1] == []
    assert {int(job_id) for job_id in starts} >= set(ids)


def _kill_forker(daemon: DaemonProcess) -> int:
    """How many there were: none while a daemon that was just started makes its own."""
    assert daemon.process is not None
    killed = 0
    for pid in children_of(daemon.process.pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"\0--forker\0"):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    return killed


def test_killed_at_random_no_acknowledged_job_is_lost_or_runs_twice(
    tmp_path: Path, is_soak: bool
) -> None:
    """12 kills (500 in soak) under 20 submissions a second: of the daemon, its forker, of both."""
    kills = 500 if is_soak else 12
    print(f"{kills} kills of 500")
    daemon = DaemonProcess(tmp_path, "4x24G", "--set", "scheduling.max_cpu_jobs=8").start()
    record = tmp_path / "record"
    record.touch()
    submitter = Submitter(daemon, record)
    submitter.start()
    random_ = random.Random(7)
    slowest_s, killed = 0.0, 0
    try:
        for turn in range(kills):
            submitter.stopping.wait(random_.uniform(0.1, 1.0))
            if turn % 3:
                killed += _kill_forker(daemon)
            if turn % 3 == 1:
                continue
            daemon.kill()
            began_s = time.monotonic()
            daemon.start()
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        submitter.stopping.set()
        submitter.join(60)
        assert submitter.failure is None
        assert not submitter.is_alive()
        assert submitter.acknowledged
        assert killed >= kills // 3
        _expect_truth(daemon, submitter.acknowledged, record)
        told = f"{len(submitter.acknowledged)} jobs; {killed} forkers killed"
        print(f"{told}; slowest return {slowest_s:.2f} s")
    finally:
        submitter.stopping.set()
        clean_up(daemon)


def test_ends_while_the_daemon_is_down_keep_their_codes_and_times(tmp_path: Path) -> None:
    """Eight jobs end with 0..7 while nobody looks; the books have the truth afterwards."""
    daemon = DaemonProcess(tmp_path, "8x24G").start()
    go, gone = tmp_path / "go", tmp_path / "gone"
    gone.mkdir()
    try:
        with daemon.client() as client:
            ids = [
                client.submit(
                    shell=f"until [ -e {go} ]; do sleep 0.05; done; : > {gone}/{code}; exit {code}",
                    cwd=daemon.work_dir,
                ).id
                for code in range(8)
            ]
            until(
                lambda: all(j.state is JobState.RUNNING for j in client.jobs(ids=ids).jobs),
                "all eight run",
            )
        daemon.kill()
        go.touch()
        until(lambda: len(list(gone.iterdir())) == 8, "all eight are about to end")
        until(
            lambda: len(list((daemon.state_dir / "jobs").glob("*/exit"))) == 8, "their exit records"
        )
        down_until_s = time.time()
        daemon.start()
        with daemon.client() as client:
            client.wait(ids, timeout_s=30)
            jobs = client.jobs(ids=ids).jobs
        assert [job.exit_code for job in jobs] == list(range(8))
        assert all(job.ended_at_s is not None and job.ended_at_s <= down_until_s for job in jobs)
    finally:
        clean_up(daemon)


def _promises(daemon: DaemonProcess) -> list[tuple[int, float, str | None]]:
    """All promises in the books: job, by when, outcome."""
    with closing(sqlite3.connect(daemon.state_dir / "gpuschedd.sqlite3")) as books:
        rows = books.execute("SELECT job_id, start_by_s, outcome FROM promise ORDER BY job_id")
        return rows.fetchall()


def test_a_power_cut_is_told_as_one(tmp_path: Path) -> None:
    """A supervisor of another boot did not end by itself: the host went down, at about a time."""
    daemon = DaemonProcess(tmp_path, "1x24G").start()
    try:
        with daemon.client() as client:
            line = "echo $PPID > ppid.part; mv ppid.part ppid; exec sleep 600"
            job = client.submit(shell=line, gpus=1, cwd=daemon.work_dir, output="/dev/null")
            until(lambda: client.job(job.id).state is JobState.RUNNING, "it runs")
            until((daemon.work_dir / "ppid").exists, "who its supervisor is")
        supervisor = int((daemon.work_dir / "ppid").read_text())
        daemon.kill()
        os.kill(supervisor, signal.SIGKILL)
        for path in (daemon.state_dir / "jobs").glob("*/claim"):
            path.write_text(path.read_text().replace(boot_id(), "of-another-boot"))
        daemon.start()
        with daemon.client() as client:
            ended = client.wait(job.id, timeout_s=30)
        assert (ended.state, ended.cause) == (JobState.NODE_FAIL, "node_fail")
        up_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        told = re.fullmatch(r"the host went down at about (.*)", str(ended.cause_detail))
        assert told is not None
        told_s = time.mktime(time.strptime(told[1], "%Y-%m-%d %H:%M"))
        assert abs(told_s - up_s) <= 120
    finally:
        clean_up(daemon)


def test_what_a_kill_left_of_an_ended_job_is_removed_at_the_start(tmp_path: Path) -> None:
    """Killed between the commit of the end and the removal: the spec holds the environment."""
    daemon = DaemonProcess(tmp_path, "1x24G").start()
    with daemon.client() as client:
        ended = client.submit(["true"], cwd=daemon.work_dir)
        client.wait(ended.id, timeout_s=30)
        running = client.submit(["sleep", "600"], cwd=daemon.work_dir)
        until(lambda: client.job(running.id).state is JobState.RUNNING, "it runs")
    daemon.kill()
    left = daemon.state_dir / "jobs" / f"{ended.id}.1"
    left.mkdir(exist_ok=True)
    (left / "spec").write_bytes(b"SECRET=1")
    daemon.start()
    assert [path.name for path in left.parent.iterdir()] == [f"{running.id}.1"]
    with daemon.client() as client:
        client.cancel(running.id)
        assert client.wait(running.id, timeout_s=30).state is JobState.CANCELLED
    daemon.stop()


def test_a_promise_outlives_kill_9(tmp_path: Path) -> None:
    """No pass ends it while the new daemon has not yet looked at the GPUs; it is told once."""
    daemon = DaemonProcess(tmp_path, "2x24G").start()
    try:
        with daemon.client() as client:
            sleep = ["sleep", "600"]
            busy = client.submit(sleep, gpus=2, time_limit="30m", cwd=daemon.work_dir).id
            until(lambda: client.job(busy).state is JobState.RUNNING, "it runs")
            head = client.submit(["true"], gpus=2, time_limit="5m", cwd=daemon.work_dir).id
            until(lambda: client.job(head).promised_start_s, "the promise")
        before = _promises(daemon)
        daemon.kill()
        daemon.start()
        with daemon.client() as client:
            until(lambda: client.job(head).promised_start_s, "the promise again")
            kinds = [event.kind for event in client.job(head).events or ()]
        assert kinds.count("start_promised") == 1
        assert "promise_ended" not in kinds
        assert _promises(daemon) == before
    finally:
        clean_up(daemon)


def test_a_second_daemon_on_the_same_state_exits_75_and_touches_nothing(
    daemon: DaemonProcess,
) -> None:
    """The lock is held for life."""
    second = DaemonProcess(daemon.place, "1x1G")
    assert second.spawn().wait(30) == 75
    with daemon.client() as client:
        assert len(client.gpus()) == 4


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    """After kill -9 the socket file is still there; the next daemon takes its place."""
    daemon = DaemonProcess(tmp_path).start()
    daemon.kill()
    assert daemon.socket.exists()
    daemon.start()
    assert daemon.stop() == 0


def test_unavailable_says_how_to_start_one(tmp_path: Path) -> None:
    """No daemon: the error names the cure."""
    with pytest.raises(Unavailable, match="gpuschedd"):
        Client(tmp_path / "none.sock").hello()
