"""What is kept of a job whose environment is away, under a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gpusched_client.terms import JobId, JobState, Launch, PendingReason
from gpusched_client.wire.submit_messages import JobRequest, SubmitRequest
from gpuschedd.core.job import Awaited, Job
from gpuschedd.core.queues import age_s
from gpuschedd.jobs import gates
from gpuschedd.jobs import submit as jobs_submit
from gpuschedd.jobs.environments import found_again, still_lost
from gpuschedd.run.dispatcher import Dispatcher
from gpuschedd.run.launchers.direct import DirectLauncher
from gpuschedd.run.runner import Runner
from gpuschedd.run.spec import LaunchContext
from tests.sim.harness import Host, UnseenGpus

JOB = JobRequest(argv=(b"true",), cwd=b"/", environment={}, gpus=1, time_limit_s=60)
PLACE = Awaited(1001, "account user1001")


class Silent:
    """A name service that does not answer."""

    async def look_up(self, user: str, uid: int) -> Any:
        """What is asked before each launch."""
        assert (user, uid) == ("user1001", 1001)
        raise TimeoutError


class Scene:
    """The books under a virtual clock, with the real way of a launch; nobody says who users are."""

    def __init__(self, place: Path) -> None:
        self.host = Host(place, 1, gpus=1)
        self.host.controller.on_commit.clear()  # instead of launches that are played
        self.runner = Runner(DirectLauncher(), place / "jobs", "here")
        context = LaunchContext(place, "here", True, Launch.DIRECT, True)
        unasked: Any = None
        names: Any = Silent()
        Dispatcher(self.host.controller, self.runner, context, unasked, UnseenGpus(), names)

    @property
    def job(self) -> Job:
        """The only one."""
        return self.host.controller.state.jobs[JobId(1)]

    async def submit(self) -> None:
        """It starts at once where the GPU is free."""
        wanted = SubmitRequest(jobs=(JOB,))
        caller = self.host.caller(1001)
        await self.host.ask(lambda batch: jobs_submit.submit(batch, caller, wanted, None))

    async def until_it_waits(self) -> None:
        """The launch is done in threads, beside the virtual time."""
        while self.job.environment is None:
            await asyncio.sleep(0.005)
            await self.host.settle()


def play(place: Path, story: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    """In an event loop."""

    async def live() -> None:
        scene = Scene(place)
        try:
            await asyncio.wait_for(story(scene), 30)
        finally:
            await scene.runner.close()
            await scene.host.controller.stop()
            scene.host.controller.close()

    asyncio.run(live())


def test_a_name_service_that_is_down_at_the_launch_leaves_the_job_waiting(tmp_path: Path) -> None:
    """No attempt is counted, no GPU is held, and the job is not held for anybody to release."""

    async def story(scene: Scene) -> None:
        await scene.submit()
        assert scene.job.state is JobState.CONFIGURING
        attempt = scene.job.attempt
        await scene.until_it_waits()
        job = scene.job
        assert (job.state, job.hold, job.attempt) == (JobState.PENDING, None, attempt)
        assert (job.launch_failures, job.grants) == (0, ())
        reason = gates.blocked_by(job, scene.host.controller.clock.now_s())
        assert reason is not None
        assert reason.code is PendingReason.ENVIRONMENT
        assert "account user1001: the name service does not answer" in reason.text

    play(tmp_path, story)


def test_what_is_away_is_looked_for_after_5_15_and_60_s_then_every_5_min(tmp_path: Path) -> None:
    """A server that hiccups holds nobody up for longer than that."""

    async def story(scene: Scene) -> None:
        await scene.submit()
        await scene.until_it_waits()
        clock = scene.host.controller.clock
        pauses_s = []
        for _ in range(5):
            assert scene.job.environment is not None
            pauses_s.append(scene.job.environment.next_try_s - clock.now_s())
            await scene.host.pass_time(pauses_s[-1])
            await scene.host.ask(lambda batch: still_lost(batch, PLACE, "still away"))
        assert pauses_s == pytest.approx([5.0, 15.0, 60.0, 300.0, 300.0])

    play(tmp_path, story)


def test_a_job_that_waits_for_its_environment_keeps_its_age_and_its_place(tmp_path: Path) -> None:
    """What it waited for GPUs counts when it goes on; the time that the place was away does not."""

    async def story(scene: Scene) -> None:
        host, state = scene.host, scene.host.controller.state
        host.see_gpu(0, fresh=False)
        await scene.submit()
        entered = state.queues.get(JobId(1))
        assert entered is not None
        await host.pass_time(100.0)
        assert age_s(entered, host.controller.clock.now_s()) == pytest.approx(100.0)
        host.see_gpu(0, fresh=True)
        await host.settle()
        await scene.until_it_waits()
        host.see_gpu(0, fresh=False)
        await host.pass_time(50.0)
        assert state.queues.get(JobId(1)) is None
        await host.ask(lambda batch: found_again(batch, PLACE))
        queued = state.queues.get(JobId(1))
        assert queued is not None
        assert queued.age_gained_s == pytest.approx(100.0)
        assert queued.eligible_since_s == entered.eligible_since_s

    play(tmp_path, story)
