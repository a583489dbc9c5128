"""The timers of probes: one look for each time that is on record."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from gpusched_client.terms import JobId
from gpuschedd.core.attempt import AttemptReport
from gpuschedd.core.job import EnvironmentWait
from gpuschedd.run.probes import PROBE_ATTEMPT, Prober
from tests.jobs.test_gates import WAITING


class Played:
    """What a prober sees of the daemon: jobs that wait, a clock, and what it asks for."""

    def __init__(self, next_try_s: float) -> None:
        self.wait_until(next_try_s)
        self.launched: list[tuple[int, int]] = []
        self.posted: list[Any] = []
        self.clock = SimpleNamespace(now_s=lambda: 100.0)

    def wait_until(self, next_try_s: float) -> None:
        """The job's record, as of the last commit."""
        wait = EnvironmentWait("directory /data", "away", 90.0, next_try_s)
        job = replace(WAITING, job_id=JobId(1), environment=wait)
        self.state = SimpleNamespace(awaiting={job.job_id}, jobs={job.job_id: job})

    def post(self, change: Any) -> None:
        """A change that is not on record yet."""
        self.posted.append(change)

    def launch(self, key: tuple[int, int], _uid: int, _make: Any) -> None:
        """A probe begins."""
        self.launched.append(key)

    def forget(self, _key: tuple[int, int]) -> None:
        """A probe's directory goes."""


def test_no_second_look_before_the_first_is_on_record() -> None:
    """A disk that is full keeps it waiting, and probes would follow one another without end."""

    async def play() -> None:
        daemon = Played(next_try_s=99.0)
        prober = Prober(cast(Any, daemon), cast(Any, daemon), cast(Any, None))
        prober.follow()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert daemon.launched == [(1, PROBE_ATTEMPT)]
        report = AttemptReport(JobId(1), PROBE_ATTEMPT, seen=None, launch_error="no", place="x")
        assert prober.takes(report)
        assert len(daemon.posted) == 1
        for _ in range(10):
            prober.follow()
            await asyncio.sleep(0)
        assert len(daemon.launched) == 1
        daemon.wait_until(next_try_s=115.0)  # committed
        prober.follow()
        daemon.wait_until(next_try_s=100.0)  # and due again
        prober.follow()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(daemon.launched) == 2
        prober.follow()

    asyncio.run(play())
