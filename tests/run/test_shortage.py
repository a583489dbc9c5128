"""kill -9 while processes, threads and descriptors are short: nothing lost, twice or for ever."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched_client import Client
from gpusched_client.terms import JobState
from gpuschedd.supervisor.procfs import children_of
from tests.support.daemon import DaemonProcess, clean_up, until

PIDS = Path("/sys/fs/cgroup/pids")
UNITED = Path("/sys/fs/cgroup")
AT_ONCE = 6  # jobs; with their supervisors twice as many processes


def _parent_group() -> Path:
    return PIDS if PIDS.is_dir() else UNITED


@contextlib.contextmanager
def pids_group() -> Iterator[Path]:
    """A cgroup whose number of processes can be limited."""
    group = _parent_group() / f"gpuschedd-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs a cgroup to limit processes in: {error}")
    try:
        if not (group / "pids.max").exists():
            pytest.skip("needs the pids controller")
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), "all of its processes have ended")
        group.rmdir()


class Shortage(threading.Thread):
    """Takes processes, threads and descriptors away from the daemon, and gives them back."""

    def __init__(self, daemon: DaemonProcess, group: Path, random_: random.Random) -> None:
        super().__init__(daemon=True)
        self._daemon, self._group, self._random = daemon, group, random_
        self.stopping = threading.Event()
        self.times: Counter[str] = Counter()

    def run(self) -> None:
        while not self.stopping.wait(self._random.uniform(0.05, 0.4)):
            kind = self._random.choice(["pids", "descriptors", "both"])
            self.times[kind] += 1
            if kind != "descriptors":
                current = int((self._group / "pids.current").read_text())
                (self._group / "pids.max").write_text(str(current + self._random.randint(0, 3)))
            if kind != "pids":
                self._limit_descriptors(self._random.randint(0, 6))
            self.stopping.wait(self._random.uniform(0.05, 1.0))
            self.lift()

    def end(self) -> None:
        """For good."""
        self.stopping.set()
        if self.is_alive():
            self.join()
        self.lift()

    def lift(self) -> None:
        """Let it have what it asks for."""
        (self._group / "pids.max").write_text("max")
        self._limit_descriptors(None)

    def _limit_descriptors(self, more: int | None) -> None:
        process = self._daemon.process
        if process is None or process.poll() is not None:
            return
        with contextlib.suppress(OSError):
            soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            held = len(os.listdir(f"/proc/{process.pid}/fd"))
            soft = hard if more is None else held + more
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (soft, hard))


class Jobs:
    """Submits, and keeps what was acknowledged, with the code that each job must end with."""

    def __init__(self, daemon: DaemonProcess, record: Path) -> None:
        self._daemon, self._record = daemon, record
        self.codes: dict[int, int] = {}

    def submit(self, count: int) -> None:
        """Those that are refused for want of something are tried again with the same id."""
        with Client(self._daemon.socket, reconnect_s=60.0) as client:
            for _ in range(count):
                code = len(self.codes) % 8
                line = f"echo $GPUSCHED_JOB_ID >> {self._record}; exit {code}"
                job = client.submit(
                    shell=line, gpus=0, cwd=self._daemon.work_dir, output="/dev/null"
                )
                self.codes[job.id] = code


def _kill_a_supervisor(daemon: DaemonProcess, random_: random.Random) -> bool:
    """One of the daemon's children, if there is any now."""
    assert daemon.process is not None
    children = children_of(daemon.process.pid)
    if not children:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(random_.choice(children), signal.SIGKILL)
    return True


def _start(daemon: DaemonProcess, shortage: Shortage) -> None:
    """Also where it cannot start for want of threads: as the service manager would."""
    try:
        daemon.start()
    except AssertionError:
        assert daemon.process is not None
        assert daemon.process.poll() not in (None, 0, 78), daemon.log_tail()
        shortage.end()
        daemon.start()


@pytest.mark.root
def test_killed_at_random_with_everything_short_no_job_is_lost_twice_or_for_ever(
    tmp_path: Path, is_soak: bool
) -> None:
    """4 kills (300 in soak) of the daemon, and of supervisors, whose jobs may end as NODE_FAIL."""
    kills = 300 if is_soak else 4
    random_ = random.Random(11)
    record = tmp_path / "record"
    record.touch()
    with pids_group() as group:
        enter = ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
        options = ("--set", f"scheduling.max_cpu_jobs={AT_ONCE}")
        daemon = DaemonProcess(tmp_path, "4x24G", *options, wrapper=enter).start()
        jobs = Jobs(daemon, record)
        shortage = Shortage(daemon, group, random_)
        victims = 0
        times: Counter[str] = Counter()
        try:
            for number in range(kills):
                shortage = Shortage(daemon, group, random_)
                submitting = threading.Thread(target=jobs.submit, args=(6,))
                submitting.start()
                shortage.start()
                shortage.stopping.wait(random_.uniform(0.1, 1.5))
                if number % 4 == 3:
                    victims += _kill_a_supervisor(daemon, random_)
                else:
                    daemon.kill()
                    _start(daemon, shortage)
                shortage.end()
                times += shortage.times
                submitting.join(90)
                assert not submitting.is_alive()
            _expect_truth(daemon, jobs.codes, record, victims)
            print(f"{len(jobs.codes)} jobs, {kills} kills, {dict(times)} shortages")
        finally:
            shortage.end()
            clean_up(daemon)


def _expect_truth(daemon: DaemonProcess, codes: dict[int, int], record: Path, victims: int) -> None:
    """Each ended with its own code and ran once, but for at most so many of an unknown end."""
    ids = sorted(codes)
    with daemon.client() as client:
        ended = []
        for start in range(0, len(ids), 500):
            ended += list(client.wait(ids[start : start + 500], timeout_s=240))
    unknown = [job.id for job in ended if job.state is JobState.NODE_FAIL]
    wrong = {
        job.id: (str(job.state), job.exit_code, job.cause_detail)
        for job in ended
        if job.exit_code != codes[job.id] and job.id not in unknown
    }
    assert wrong == {}
    assert len(unknown) <= victims
    starts = Counter(int(line) for line in record.read_text().split())
    assert [job_id for job_id, count in starts.items() if count > 1] == []
    assert set(ids) - set(starts) <= set(unknown)
