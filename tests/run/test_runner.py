"""An attempt on a full disk, or whose launch fails: no start is blocked, nothing is forgotten."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gpusched_client.terms import JobId
from gpuschedd.core.attempt import AttemptReport, Cancel, Claim, ExitRecord, Observation, Orders
from gpuschedd.gpu.attribution import JobKey
from gpuschedd.run import launches
from gpuschedd.run import runner as runner_module
from gpuschedd.run.job_dir import JobDir
from gpuschedd.run.launchers.direct import Bounds, DirectLauncher, LaunchFailed
from gpuschedd.run.runner import Runner
from gpuschedd.supervisor.procfs import boot_id, process_stat
from gpuschedd.supervisor.records import open_directory, publish

KEY: JobKey = (JobId(7), 1)
ORDERS = Orders(time_limit_s=60.0, cancel=None, signals=())
EXIT = ExitRecord(0, None, "exit", None, None, None, None, 1.0, 1.0, "boot", 1.0, 0.0, 0.0, 0, None)


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
        self.reports: list[AttemptReport] = []
        self._reported, self._failed = asyncio.Event(), asyncio.Event()
        monkeypatch.setattr(launches, "ROOM_PAUSE_S", 0.005)
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

    def take(self, report: AttemptReport) -> None:
        self.reports.append(report)
        self._reported.set()
        if report.launch_error is not None:
            self._failed.set()

    async def report(self) -> AttemptReport:
        """The first one."""
        await asyncio.wait_for(self._reported.wait(), 30)
        return self.reports[0]

    async def failure(self) -> AttemptReport:
        """The last one, of a launch that failed."""
        await asyncio.wait_for(self._failed.wait(), 30)
        return self.reports[-1]

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
    _claim_alive(trial.place)

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


def test_a_cancel_is_published_when_it_is_answered_though_the_job_has_not_started(
    trial: Trial,
) -> None:
    """A supervisor has the claim: it cannot be fenced, and would begin if the daemon died now."""
    trial.is_full = False
    _claim_alive(trial.place)
    cancelled = Orders(time_limit_s=60.0, cancel=Cancel("alice", 1.0, "typo"))

    async def story(runner: Runner) -> None:
        runner._track(KEY, os.getuid())
        runner.fence(KEY, cancelled)
        await runner.delivered([KEY])
        assert JobDir.open(trial.place, *KEY).orders() == cancelled

    trial.run(StubLauncher(), story)


@pytest.mark.parametrize(
    ("error", "is_host_s"),
    [
        (RuntimeError("can't start new thread"), True),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.EMFILE, "Too many open files"), True),
        (OSError(errno.ENFILE, "Too many open files in system"), True),
        (MemoryError(), True),
        (RuntimeError("a bug"), False),
        (OSError(errno.EPERM, "Operation not permitted"), False),
    ],
)
def test_a_launch_that_breaks_is_reported_by_whose_fault_it_is(
    trial: Trial, error: Exception, is_host_s: bool
) -> None:
    """Whatever was raised: nobody else would look. A host that is short of things counts none."""
    trial.is_full = False

    async def story(runner: Runner) -> None:
        runner.launch(KEY, os.getuid(), no_plan)
        report = await trial.report()
        assert report.launch_error == f"{type(error).__name__}: {error}"
        assert report.deferred is is_host_s

    trial.run(StubLauncher(error), story)


@pytest.mark.parametrize("lacked", [True, False])
def test_a_supervisor_that_lacked_its_files_is_the_host_s_fault(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, lacked: bool
) -> None:
    """It was started and did not come: fenced either way, and only else counted."""
    trial.is_full = False
    launcher = StubLauncher()
    monkeypatch.setattr(launcher, "launch", lambda *_: None)
    monkeypatch.setattr(launcher, "lacked_program", lambda *_: lacked)
    monkeypatch.setattr(launches, "LAUNCH_TIMEOUT_S", 0.01)

    async def story(runner: Runner) -> None:
        runner.launch(KEY, os.getuid(), no_plan)
        report = await trial.failure()
        assert report.deferred is lacked
        assert str(report.launch_error).startswith("no supervisor within")
        assert report.seen is not None
        assert report.seen.claim is not None

    trial.run(launcher, story)


def _claim_alive(place: Path) -> None:
    """A directory that this very process claims as its supervisor."""
    (place / "7.1").mkdir()
    own = process_stat(os.getpid())
    assert own is not None
    claim = Claim("supervisor", boot_id(), os.getpid(), own.start_ticks)
    directory = open_directory(str(place / "7.1"))
    publish(directory, "claim", asdict(claim))
    os.close(directory)


def test_a_look_in_which_anything_goes_wrong_is_taken_again(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would look: the end would be found at the next start of the daemon."""
    trial.is_full = False
    _claim_alive(trial.place)
    real = JobDir.observe
    troubles: list[Exception] = [
        *(OSError(number, os.strerror(number)) for number in (errno.EMFILE, errno.ENOMEM)),
        RuntimeError("can't start new thread"),
        MemoryError(),
    ]

    def observe(job_dir: JobDir) -> Observation:
        if troubles:
            raise troubles.pop()
        return real(job_dir)

    async def story(runner: Runner) -> None:
        await runner.recover(KEY, os.getuid(), ORDERS, ran=True)
        monkeypatch.setattr(JobDir, "observe", observe)
        runner.look(KEY)
        seen = (await trial.report()).seen
        assert seen is not None
        assert seen.supervisor_alive

    trial.run(StubLauncher(), story)


def test_orders_wake_the_supervisor_though_no_descriptor_was_left(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orders that nobody is told of are obeyed by nobody."""
    trial.is_full = False
    _claim_alive(trial.place)
    launcher = StubLauncher()
    attaching = iter([True, True, False])
    real = launcher.attach
    woken = asyncio.Event()
    monkeypatch.setattr(launcher, "wake", lambda _: woken.set())

    def attach(claim: Claim) -> int | None:
        if next(attaching, False):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(claim)

    monkeypatch.setattr(launcher, "attach", attach)

    async def story(runner: Runner) -> None:
        runner._track(KEY, os.getuid())
        runner.order(KEY, ORDERS)
        await asyncio.wait_for(woken.wait(), 30)

    trial.run(launcher, story)


def test_a_fence_that_finds_no_descriptor_is_tried_again(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that timed out may still claim: without the fence the job could run twice."""
    trial.is_full = False
    real, tries = JobDir.fence, iter([errno.EMFILE, errno.EACCES, 0])

    def fence(job_dir: JobDir) -> Claim:
        if (number := next(tries)) != 0:
            raise OSError(number, os.strerror(number))
        return real(job_dir)

    monkeypatch.setattr(JobDir, "fence", fence)

    async def story(runner: Runner) -> None:
        runner.launch(KEY, os.getuid(), no_plan)
        report = await trial.report()
        assert report.seen is not None
        assert report.seen.claim is not None

    trial.run(StubLauncher(LaunchFailed("no answer")), story)


def test_what_a_damaged_claim_hides_is_ended_before_its_gpus_are_free(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start goes on, and the end is said when no process is left."""
    (trial.place / "7.1").mkdir()
    (trial.place / "7.1" / "claim").write_bytes(bytes(60))
    launcher = StubLauncher()
    left = iter([(11, 12), (12,), ()])
    monkeypatch.setattr(launcher, "kill_leftovers", lambda *_: next(left))

    async def story(runner: Runner) -> None:
        await runner.recover(KEY, os.getuid(), ORDERS, ran=True)
        report = await trial.report()
        assert report.seen is None
        assert "claim cannot be understood" in str(report.detail)
        assert list(left) == []

    trial.run(launcher, story)


def test_a_launch_of_which_nothing_was_heard_is_fenced_by_the_slow_clock(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own time-out may have got lost with whatever failed; no job is CONFIGURING for ever."""
    trial.is_full = False
    (trial.place / "7.1").mkdir()
    monkeypatch.setattr(launches, "LAUNCH_TIMEOUT_S", 0.0)

    async def story(runner: Runner) -> None:
        runner._track(KEY, os.getuid())
        assert runner.look_again(KEY)
        assert not runner.look_again((JobId(8), 1))
        report = await trial.failure()
        assert report.seen is not None
        assert report.seen.claim is not None
        assert report.seen.claim.by == "daemon"

    trial.run(StubLauncher(), story)


def test_a_supervisor_that_hangs_in_its_set_up_is_ended_by_the_slow_clock(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own deadline cannot help where it is the supervisor that does not run."""
    trial.is_full = False
    _claim_alive(trial.place)
    launcher = StubLauncher()
    stopped = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    monkeypatch.setattr(launcher, "stop", lambda _: loops[0].call_soon_threadsafe(stopped.set))
    monkeypatch.setattr(runner_module, "SETUP_STUCK_S", 0.0)

    async def story(runner: Runner) -> None:
        loops.append(asyncio.get_running_loop())
        await runner.recover(KEY, os.getuid(), ORDERS, ran=False)
        assert runner.look_again(KEY)
        await asyncio.wait_for(stopped.wait(), 30)

    trial.run(launcher, story)


def test_a_supervisor_whose_directory_was_taken_away_is_ended_all_the_same(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can read no orders there; who it is was known before."""
    trial.is_full = False
    _claim_alive(trial.place)
    launcher = StubLauncher()
    stopped: asyncio.Queue[Claim] = asyncio.Queue()
    loops: list[asyncio.AbstractEventLoop] = []

    def stop(claim: Claim) -> None:
        loops[0].call_soon_threadsafe(stopped.put_nowait, claim)

    monkeypatch.setattr(launcher, "stop", stop)

    async def story(runner: Runner) -> None:
        loops.append(asyncio.get_running_loop())
        await runner.recover(KEY, os.getuid(), ORDERS, ran=True)
        (trial.place / "7.1").rename(trial.place / "moved")
        (trial.place / "7.1").symlink_to(trial.place / "moved")
        runner.order(KEY, ORDERS)
        await runner.delivered([KEY])
        runner.stop_disobedient(KEY)
        assert (await asyncio.wait_for(stopped.get(), 30)).pid == os.getpid()

    trial.run(launcher, story)


def test_the_first_hint_waits_for_the_next_one(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is over at once is read once."""
    _claim_alive(trial.place)
    monkeypatch.setattr(runner_module, "HINT_PAUSE_S", 600.0)

    async def story(runner: Runner) -> None:
        runner._track(KEY, os.getuid())
        runner.hint(KEY)
        assert not runner._attempts[KEY].looking
        runner.hint(KEY)
        assert runner._attempts[KEY].looking
        assert (await trial.report()).seen is not None

    trial.run(StubLauncher(), story)


def test_a_hint_that_stays_alone_is_followed(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    _claim_alive(trial.place)
    monkeypatch.setattr(runner_module, "HINT_PAUSE_S", 0.001)

    async def story(runner: Runner) -> None:
        runner._track(KEY, os.getuid())
        runner.hint(KEY)
        assert (await trial.report()).seen is not None

    trial.run(StubLauncher(), story)


def test_after_an_exit_record_only_the_slow_clock_looks_again(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing more to see; but what was reported may not have arrived."""
    claim = Claim("supervisor", boot_id(), os.getpid(), 1)
    looks = 0

    def observe(_: JobDir) -> Observation:
        nonlocal looks
        looks += 1
        return Observation(claim, True, None, EXIT, EXIT)

    monkeypatch.setattr(JobDir, "observe", observe)

    async def story(runner: Runner) -> None:
        runner._track(KEY, os.getuid())
        runner.look(KEY)
        await trial.report()
        runner.hint(KEY)
        runner.hint(KEY)
        runner.look(KEY)
        assert not runner._attempts[KEY].looking
        assert runner.look_again(KEY)
        assert runner._attempts[KEY].looking
        while looks < 2:
            await asyncio.sleep(0.005)

    trial.run(StubLauncher(), story)
