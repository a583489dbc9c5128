"""kill -9 at systematic points: at the N-th write, sync, rename, link or send of one short story.

A point is (call, N): strace kills the daemon on entry of the N-th such call of any one of its
threads. Run one again alone with GPUSCHED_POINT=call:N.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from gpusched_client import Client
from gpusched_client.errors import GpuschedError
from gpusched_client.terms import JobState
from tests.support.daemon import DaemonProcess, clean_up, until

CALLS = (
    *("pwrite64", "fdatasync", "fsync", "ftruncate", "write", "sendto", "mkdir", "rmdir"),
    *("rename", "renameat", "linkat", "unlink", "unlinkat", "pidfd_send_signal"),
)
MISSES_MAX = 3  # so many points in a row that nobody reached: the story is over before them
POINTS_IN_PARALLEL = 4

#: 40 points that lie inside the story: the first few of each call, then spread out.
SOME_POINTS = tuple(
    (call, number)
    for call, numbers in {
        "pwrite64": (1, 2, 4, 7, 11, 16, 22, 29, 37, 56, 90, 140, 180, 230, 270, 310),
        "fdatasync": (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20),
        "fsync": (1, 2, 3, 4),
        "mkdir": (1, 2),
        "rmdir": (1,),
        "rename": (1,),
        "renameat": (1, 2),
        "linkat": (1,),
        "sendto": (1, 2, 3, 4, 5),
        "unlink": (1, 2, 3, 5),
    }.items()
    for number in numbers
)

T = TypeVar("T")


class Told(NamedTuple):
    """The jobs of the story."""

    finished: int
    lesson: int  # it shows how long such a job takes
    running: int  # without limit
    head: int  # waits for that one, by what it is expected to take
    cancelled: int


class Expectations(NamedTuple):
    """What is on record of them, which nothing changes once it is there."""

    of_running_s: float
    head_since_s: float
    head_expected_s: float
    lessons: tuple[tuple[Any, ...], ...]  # key, GPUs, how many seconds it took


class Story:
    """A job that finishes, one that others learn from, one without limit, a head that waits for it,
    one that is given a limit and cancelled; a daemon killed at a point.
    """

    def __init__(self, place: Path, begun: Path, call: str, number: int) -> None:
        """`begun`: a state directory with a database: the story is no first start."""
        place.mkdir()
        self.point = f"{call}:{number}"
        self.record = place / "record"
        self.record.touch()
        self.daemon = DaemonProcess(place, "2x24G", "--set", "scheduling.kill_grace=1.0")
        shutil.copytree(begun, self.daemon.state_dir, ignore=shutil.ignore_patterns("*.sock"))
        self.daemon.wrapper = [
            "strace", "-f", "-b", "execve", "-qq", "-o", "/dev/null",
            "-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={number}",
        ]  # fmt: skip

    def run(self) -> bool:
        """Tell the story to its end over the kill; True when the point was reached."""
        daemon = self.daemon
        process = daemon.spawn()
        daemon.wrapper = []
        told, kept = self._tell()
        was_killed = process.poll() is not None
        if not was_killed:
            # The point lies in the orderly stop, or nowhere.
            daemon.end_traced()
            was_killed = process.returncode not in (0, None)
            daemon.start()
        self._check(told, kept)
        clean_up(daemon)
        return was_killed

    def _tell(self) -> tuple[Told, Expectations]:
        line = f"echo $GPUSCHED_JOB_ID.$GPUSCHED_ATTEMPT >> {self.record}"
        finished = self._submit("finished", f"{line}; exit 3")
        self._retry(lambda client: client.wait(finished, timeout_s=30))
        lesson = self._submit("lesson", line)
        self._retry(lambda client: client.wait(lesson, timeout_s=30))
        running = self._submit("running", f"{line}; exec sleep 600", estimate=3600)
        self._until(lambda client: client.job(running).state is JobState.RUNNING)
        head = self._submit("head", line, gpus=2)
        self._until(lambda client: client.job(head).reason is not None and self._is_head(head))
        kept = self._expectations(running, head)
        cancelled = self._submit("cancelled", f"{line}; sleep 60", gpus=0)
        self._retry(lambda client: client.update([cancelled], time_limit="1h"))
        self._retry(lambda client: client.cancel([cancelled]))
        self._retry(lambda client: client.wait(cancelled, timeout_s=30))
        return Told(finished, lesson, running, head, cancelled), kept

    def _submit(self, name: str, line: str, gpus: int = 1, estimate: int | None = None) -> int:
        """Its submission id is its name: it is submitted once, however often that is tried."""

        def act(client: Client) -> int:
            job = client.submit(
                shell=line,
                name=name,
                gpus=gpus,
                estimate=estimate,
                cwd="/tmp",
                output="/dev/null",
                submission_id=name,
            )
            return job.id

        return self._retry(act)

    def _until(self, condition: Callable[[Client], bool]) -> None:
        until(lambda: self._retry(condition), f"{self.point}: the story goes on")

    def _rows(self, query: str, *values: int) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.daemon.state_dir / "gpuschedd.sqlite3")) as db:
            return db.execute(query, values).fetchall()

    def _is_head(self, job_id: int) -> bool:
        query = "SELECT head_since_s FROM job WHERE job_id = ?"
        return self._rows(query, job_id) != [(None,)]

    def _expectations(self, running: int, head: int) -> Expectations:
        query = "SELECT decided_expected_s FROM job WHERE job_id = ?"
        ((of_running_s,),) = self._rows(query, running)
        query = "SELECT head_since_s, head_expected_s FROM job WHERE job_id = ?"
        ((since_s, expected_s),) = self._rows(query, head)
        # The cancelled one may have shown, too, that it can run longer than expected.
        lessons = self._rows(
            "SELECT key, gpus, length_s, before_length_s FROM length WHERE key = 'lesson'"
        )
        assert [row[3] for row in lessons] == [None], f"{self.point}: one run, once"
        return Expectations(of_running_s, since_s, expected_s, tuple(row[:3] for row in lessons))

    def _retry(self, act: Callable[[Client], T]) -> T:
        """Do it on a daemon that may die at any moment; start it again when it did."""
        done: list[T] = []

        def attempt() -> bool:
            process = self.daemon.process
            assert process is not None
            if process.poll() is not None:
                self.daemon.start()
            with suppress(GpuschedError), self.daemon.client(reconnect_s=0.3) as client:
                done.append(act(client))
            return bool(done)

        until(attempt, f"{self.point}: the story goes on")
        return done[0]

    def _check(self, told: Told, kept: Expectations) -> None:
        states = (
            *(JobState.FAILED, JobState.COMPLETED, JobState.RUNNING),
            *(JobState.PENDING, JobState.CANCELLED),
        )
        with self.daemon.client() as client:
            jobs = client.jobs(ids=told).jobs
            assert jobs[4].time_limit_s == 3600, self.point
            assert tuple(job.state for job in jobs) == states, self.point
            assert [jobs[0].exit_code, jobs[1].exit_code] == [3, 0], self.point
            assert jobs[2].expected_run_s == kept.of_running_s == 3600, self.point
            assert client.jobs().total == len(told), self.point
        assert self._expectations(told.running, told.head) == kept, self.point
        assert [row[:2] for row in kept.lessons] == [("lesson", 1)], self.point
        assert kept.head_expected_s - kept.head_since_s > 3000, self.point
        runs = Counter(int(word.split(".")[0]) for word in self.record.read_text().split())
        assert [runs[job_id] for job_id in told[:3]] == [1, 1, 1], self.point
        assert (runs[told.head], runs[told.cancelled] <= 1) == (0, True), self.point


def _points(is_soak: bool) -> Iterator[list[tuple[str, int]]]:
    """Points in groups; soak goes on with each call until nobody reaches them."""
    alone = os.environ.get("GPUSCHED_POINT")
    if alone:
        call, _, number = alone.partition(":")
        yield [(call, int(number))]
    elif not is_soak:
        yield list(SOME_POINTS)
    else:
        for call in CALLS:
            yield from ([(call, number)] for number in range(1, 1_000))


@pytest.mark.tool("strace")
@pytest.mark.timeout(3600)
def test_killed_at_every_point_of_the_story_the_truth_stands(tmp_path: Path, is_soak: bool) -> None:
    """40 points here, all in soak: nothing acknowledged lost, nothing twice, codes right."""

    first = DaemonProcess(tmp_path / "first", "2x24G").start()
    assert first.stop() == 0

    def tell(point: tuple[str, int]) -> bool:
        place = tmp_path / f"{point[0]}-{point[1]}"
        return Story(place, first.state_dir, *point).run()

    reached: dict[tuple[str, int], bool] = {}
    over: set[str] = set()
    with ThreadPoolExecutor(POINTS_IN_PARALLEL) as pool:
        for group in _batched(_points(is_soak)):
            points = [point for point in group if point[0] not in over]
            reached |= dict(zip(points, pool.map(tell, points), strict=True))
            over |= {call for call in CALLS if _misses(reached, call) >= MISSES_MAX}
    count = sum(reached.values())
    missed = [f"{call}:{number}" for (call, number), hit in reached.items() if not hit]
    print(f"{count} of {len(reached)} points were reached; beyond the story: {missed}")
    assert count >= (1 if os.environ.get("GPUSCHED_POINT") else 30)


def _batched(groups: Iterator[list[tuple[str, int]]]) -> Iterator[list[tuple[str, int]]]:
    """Groups joined so that each keeps all workers busy."""
    joined: list[tuple[str, int]] = []
    for group in groups:
        joined += group
        if len(joined) >= POINTS_IN_PARALLEL:
            yield joined
            joined = []
    yield joined


def _misses(reached: dict[tuple[str, int], bool], call: str) -> int:
    """How many of a call's last points in a row nobody reached."""
    hits = [
        hit
        for (name, _), hit in sorted(reached.items(), key=lambda item: item[0][1])
        if name == call
    ]
    return next((count for count, hit in enumerate(reversed(hits)) if hit), len(hits))
