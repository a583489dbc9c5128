"""An attempt on a full disk, or whose launch fails: no start is blocked, nothing is forgotten."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gpusched_client.terms import JobId
from gpuschedd import runner as runner_module
from gpuschedd import supervisor
from gpuschedd.job_dir import Claim, JobDir, Orders
from gpuschedd.launcher import Bounds, DirectLauncher, LaunchFailed
from gpuschedd.runner import Key, Runner, Sighting

KEY: Key = (JobId(7), 1)
ORDERS = Orders(time_limit_s=60.0, cancel=None, signals=())


class StubLauncher(DirectLauncher):
    """Fails as it is told; a claim of this process's own counts as alive."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error

    def launch(self, job_dir: JobDir, bounds: Bounds = Bounds()) -> None:  # noqa: B008
        del job_dir, bounds
        assert self.error is not None
        raise self.error

    def wake(self, pidfd: int) -> None:
        del pidfd


class Trial:
    """A Runner over a directory of its own, on a disk that is full at first."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = place
        self.is_full = True
        self.tries = 0
        self.reports: list[Sighting] = []
        self._reported = asyncio.Event()
        monkeypatch.setattr(runner_module, "ROOM_PAUSE_S", 0.005)
        self._make_fickle(monkeypatch, "fence")
        self._make_fickle(monkeypatch, "write_orders")
        monkeypatch.setattr(JobDir, "create", lambda *_: JobDir.open(place, *KEY))

    def _make_fickle(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real: Callable[..., object] = getattr(JobDir, name)

        def fickle(job_dir: JobDir, *words: object) -> object:
            self.tries += 1
            if self.is_full and (name != "fence" or job_dir.claim() is None):
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(job_dir, *words)

        monkeypatch.setattr(JobDir, name, fickle)

    def take(self, sighting: Sighting) -> None:
        self.reports.append(sighting)
        self._reported.set()

    async def report(self) -> Sighting:
        """The first one."""
        await asyncio.wait_for(self._reported.wait(), 30)
        return self.reports[0]

    async def tried(self, times: int) -> None:
        while self.tries < times:
            await asyncio.sleep(0.005)

    def run(
        self, launcher: StubLauncher, story: Callable[[Runner], Coroutine[Any, Any, None]]
    ) -> None:
        async def live() -> None:
            runner = Runner(launcher, self.place, "here", self.take)
            try:
                await asyncio.wait_for(story(runner), 30)
            finally:
                await runner.close()

        asyncio.run(live())


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    return Trial(tmp_path, monkeypatch)


async def no_plan() -> Any:
    return (None, Bounds())


def test_an_unclaimed_attempt_is_found_when_the_disk_has_room_again(trial: Trial) -> None:
    """The start goes on without it; its end is known once the claim can be taken."""

    async def story(runner: Runner) -> None:
        await runner.recover(KEY, os.getuid(), ORDERS, ran=False)
        await trial.tried(3)
        assert trial.reports == []
        trial.is_full = False
        seen = (await trial.report()).seen
        assert seen is not None
        assert seen.claim is not None
        assert seen.claim.by == "daemon"

    trial.run(StubLauncher(), story)


def test_orders_that_find_no_room_do_not_hold_up_the_start(trial: Trial) -> None:
    """A live supervisor is adopted at once; its orders are written when they can be."""
    (trial.place / "7.1").mkdir()
    own = supervisor.process_stat(os.getpid())
    assert own is not None
    claim = Claim("supervisor", supervisor.boot_id(), os.getpid(), own.start_ticks)
    record = {"by": claim.by, "boot_id": claim.boot_id, "pid": claim.pid}
    directory = supervisor.open_directory(str(trial.place / "7.1"))
    supervisor.publish(directory, "claim", record | {"start_ticks": claim.start_ticks})
    os.close(directory)

    async def story(runner: Runner) -> None:
        await runner.recover(KEY, os.getuid(), ORDERS, ran=True)
        assert os.getpid() in runner.supervisors()
        await trial.tried(3)
        trial.is_full = False
        await trial.report()
        assert JobDir.open(trial.place, *KEY).orders() == ORDERS

    trial.run(StubLauncher(), story)


def test_a_failed_launch_is_fenced_before_anything_is_said_of_it(trial: Trial) -> None:
    """While the disk refuses the claim, the attempt might still start: it must not run again."""

    async def story(runner: Runner) -> None:
        runner.launch(KEY, os.getuid(), no_plan)
        await trial.tried(3)
        assert trial.reports == []
        trial.is_full = False
        report = await trial.report()
        assert report.launch_error == "no claim"
        assert report.seen is not None
        assert report.seen.claim is not None

    trial.run(StubLauncher(LaunchFailed("no claim")), story)


def test_a_launch_that_breaks_counts_as_a_failed_one(trial: Trial) -> None:
    """Whatever was raised: nobody else would look at the attempt again."""
    trial.is_full = False

    async def story(runner: Runner) -> None:
        runner.launch(KEY, os.getuid(), no_plan)
        report = await trial.report()
        assert report.launch_error == "RuntimeError: can't start new thread"

    trial.run(StubLauncher(RuntimeError("can't start new thread")), story)
