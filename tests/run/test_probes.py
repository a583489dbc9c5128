"""Probes: one look for each time that is on record, and what it says of whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpusched_client.terms import JobId, JobState
from gpuschedd.config.keys import Config
from gpuschedd.core import fairshare
from gpuschedd.core.attempt import AttemptReport, EndedRecord, Observation
from gpuschedd.core.job import EnvironmentWait, Job
from gpuschedd.core.queues import Queues
from gpuschedd.jobs.batch import Batch, apply
from gpuschedd.jobs.environments import JOBS_PER_BATCH
from gpuschedd.jobs.state import State, policy_of
from gpuschedd.run.probes import PROBE_ATTEMPT, PROBES_MAX, PROBES_PER_UID_MAX, Prober
from tests.jobs.test_gates import WAITING

NOW_S = 100.0
PLACE = "directory /data"


class Played:
    """A daemon's state and clock; commits are made when the test says so."""

    def __init__(self, *jobs: Job) -> None:
        config = Config()
        policy = policy_of(config)
        self.state = State(config, policy, Queues(policy), fairshare.Accounts(policy), 10_000)
        for job in jobs:
            self.state.jobs[job.job_id] = job
            self.state.index(job)
        self.launched: list[int] = []
        self.posted: list[Callable[[Batch], object]] = []
        self.now_s = NOW_S
        self.clock = SimpleNamespace(now_s=lambda: self.now_s)
        self.prober = Prober(cast(Any, self), cast(Any, self), cast(Any, None))

    def post(self, change: Callable[[Batch], object]) -> None:
        """The daemon's own command."""
        self.posted.append(change)

    def launch(self, key: tuple[int, int], _uid: int, _make: Any) -> None:
        """A probe begins."""
        assert key[1] == PROBE_ATTEMPT
        self.launched.append(key[0])

    def forget(self, _key: tuple[int, int]) -> None:
        """A probe's directory goes."""

    def commit(self) -> int:
        """Judge and commit what was posted; how many jobs that changed."""
        batch = Batch(self.state, self.now_s, 1e9)
        commands, self.posted = self.posted, []
        for command in commands:
            command(batch)
        changed = len(batch.changed_jobs())
        apply(self.state, batch)
        self.prober.follow()
        return changed

    async def look(self) -> list[int]:
        """Let the timer fire; the probes that began."""
        before = len(self.launched)
        self.prober.follow()
        for _ in range(3):
            await asyncio.sleep(0)
        return self.launched[before:]

    def report(self, job_id: int, **facts: Any) -> None:
        """A probe has come to its end."""
        report = AttemptReport(JobId(job_id), PROBE_ATTEMPT, **{"seen": None, **facts})
        assert self.prober.takes(report)


def waiting(job_id: int, place: str = PLACE, uid: int = 1000, since_s: float = 90.0) -> Job:
    """A job that waits for a place, due for a look."""
    wait = EnvironmentWait(place, f"{place}: away", since_s, 99.0)
    return replace(WAITING, job_id=JobId(job_id), uid=uid, environment=wait)


def ended(cause: str, place: str | None = None) -> Observation:
    """What a probe's record says."""
    end = EndedRecord(0, None, cause, place, None, None, None, 1.0, 1.0, "boot", place=place)
    return Observation(None, False, None, end, None)


def play(scene: Callable[[], Any]) -> None:
    """In an event loop."""
    asyncio.run(scene())


def test_no_second_look_before_the_first_is_on_record() -> None:
    """A disk that is full keeps it waiting, and probes would follow one another without end."""

    async def scene() -> None:
        daemon = Played(waiting(1))
        assert await daemon.look() == [1]
        daemon.report(1, seen=ended("environment", PLACE))
        assert len(daemon.posted) == 1
        for _ in range(10):
            assert await daemon.look() == []
        assert daemon.commit() == 1
        assert await daemon.look() == []
        daemon.now_s += 16.0
        assert await daemon.look() == [1]

    play(scene)


def test_many_that_wait_for_one_place_are_changed_slice_by_slice() -> None:
    """So that others' commands have their turns; one that is still away is written to one job."""

    async def scene() -> None:
        daemon = Played(*(waiting(number) for number in range(1, 2 * JOBS_PER_BATCH + 51)))
        assert await daemon.look() == [1]
        daemon.report(1, seen=ended("environment", PLACE))
        assert daemon.commit() == 1
        daemon.now_s += 16.0
        assert await daemon.look() == [1]
        daemon.report(1, seen=ended("exit"))
        assert [daemon.commit() for _ in range(4)] == [JOBS_PER_BATCH, JOBS_PER_BATCH, 50, 0]
        assert daemon.state.awaiting == {}
        assert daemon.posted == []

    play(scene)


def test_those_that_waited_too_long_fail_slice_by_slice() -> None:
    async def scene() -> None:
        late = [
            waiting(number, since_s=NOW_S - 3_601.0) for number in range(1, JOBS_PER_BATCH + 11)
        ]
        daemon = Played(*late, waiting(5_000))
        assert await daemon.look() == [1]
        daemon.report(1, seen=ended("environment", PLACE))
        assert [daemon.commit() for _ in range(4)] == [JOBS_PER_BATCH, 10, 1, 0]
        assert list(daemon.state.jobs) == [5_000]
        left = daemon.state.jobs[JobId(5_000)]
        assert left.state is JobState.PENDING
        assert left.environment is not None
        assert left.environment.next_try_s == daemon.now_s + 15.0

    play(scene)


@pytest.mark.parametrize(
    ("facts", "goes_on"),
    [
        ({"seen": ended("exit")}, True),
        ({"seen": ended("environment", PLACE)}, False),
        ({"seen": ended("environment", "command /data/run.sh")}, True),  # its own, not theirs
        ({"launch_error": "no", "place": PLACE}, False),
        ({"launch_error": "no", "place": "account alice"}, True),
        ({"launch_error": "the uid is another's now", "account_gone": True}, True),
        ({"launch_error": "no processes", "deferred": True}, False),
        ({"launch_error": "a bad unit"}, False),
    ],
)
def test_a_probe_speaks_of_the_place_that_is_awaited_alone(
    facts: dict[str, Any], goes_on: bool
) -> None:
    """What one job lacks beside it fails no neighbour; a launch says so of that job."""

    async def scene() -> None:
        daemon = Played(waiting(1), waiting(2))
        assert await daemon.look() == [1]
        daemon.report(1, **facts)
        daemon.commit()
        waits = [daemon.state.jobs[JobId(number)].environment for number in (1, 2)]
        assert [wait is None for wait in waits] == [goes_on, goes_on]
        if facts.get("launch_error") and not goes_on:
            tries = max(wait.tries for wait in waits if wait is not None)
            assert tries == (0 if facts.get("deferred") else 1)

    play(scene)


def test_one_users_dead_mount_keeps_no_other_waiting() -> None:
    """Each of his probes lasts as long as the set-up may."""

    async def scene() -> None:
        his = [waiting(number, f"directory /dead/{number}") for number in range(1, 100)]
        daemon = Played(*his, waiting(500, "directory /home/bob", uid=2000))
        began = await daemon.look()
        assert 500 in began
        assert len(began) == PROBES_PER_UID_MAX + 1 < PROBES_MAX

    play(scene)


def test_a_job_that_joins_is_looked_for_as_often_as_the_others() -> None:
    """A stream of new jobs does not make the looks begin again."""

    async def scene() -> None:
        daemon = Played(waiting(1))
        for pause_s in (15.0, 60.0, 300.0):
            assert await daemon.look() == [1]
            daemon.report(1, seen=ended("environment", PLACE))
            daemon.commit()
            known = daemon.state.jobs[JobId(1)].environment
            assert known is not None
            assert known.next_try_s == daemon.now_s + pause_s
            daemon.now_s += pause_s

    play(scene)
