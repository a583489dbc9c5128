"""Between two looks: what a launch sees that they did not, and what a stop keeps of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gpusched_client.terms import GpuUuid, JobId, JobState
from gpuschedd.gpu.attribution import ForeignProcess
from gpuschedd.jobs.waiting import waiting_reason
from tests.sim.watched import GIB, STRANGER, OtherPeople, WatchedHost

EVERY_S = 0.5  # as the daemon looks by default


@pytest.fixture
def on_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int, Callable[[WatchedHost], Awaitable[None]]], None]:
    """Plays a test on a host with so many GPUs of 48 GiB."""

    def play(gpus: int, script: Callable[[WatchedHost], Awaitable[None]]) -> None:
        async def live() -> None:
            host = WatchedHost(tmp_path, gpus, monkeypatch)
            await host.look()
            try:
                await script(host)
            finally:
                await host.controller.stop()
                host.controller.close()

        asyncio.run(live())

    return play


OnHost = Callable[[int, Callable[[WatchedHost], Awaitable[None]]], None]


def gone(pid: int) -> ForeignProcess:
    """A process of which nothing can be read any more."""
    return ForeignProcess(pid, None, "", "")


def why(host: WatchedHost, job_id: int) -> str:
    """Its code and its words."""
    job = next(job for job in host.controller.state.jobs.values() if job.job_id == job_id)
    reason = waiting_reason(host.controller.state, job, host.controller.clock.now_s())
    return f"{reason.code.value}: {reason.text}"


def test_the_first_job_of_a_host_at_rest_is_placed_by_a_new_look(on_host: OnHost) -> None:
    """The last one knew nothing of what is on GPU 0; no launch is spent to find out."""

    async def script(host: WatchedHost) -> None:
        looking = asyncio.ensure_future(host.monitor.run())
        while not host.monitor._rests:
            await asyncio.sleep(0)
        host.source.foreign[0] = 40 * GIB
        host.source.answers.clear()
        host.monitor.wake()
        job_id = await host.submit()
        assert host.job(job_id).state is JobState.PENDING
        host.source.answers.set()
        while not host.controller._knows_gpus:
            await asyncio.sleep(0)
        await host.settle()
        job = host.job(job_id)
        assert (job.state, job.attempt) == (JobState.RUNNING, 1)
        assert [grant.uuid for grant in job.grants] == ["GPU-1"]
        looking.cancel()

    on_host(2, script)


def test_a_host_rests_only_while_nothing_runs_waits_or_watches(on_host: OnHost) -> None:
    async def script(host: WatchedHost) -> None:
        monitor = host.monitor
        assert monitor._nobody_cares()
        monitor.is_watched = lambda: True
        assert not monitor._nobody_cares()
        monitor.is_watched = lambda: False
        host.world.clock.now += EVERY_S
        monitor._free.job_ended((JobId(9), 1), [GpuUuid("GPU-0")], host.world.clock.now)
        assert not monitor._nobody_cares(), "a GPU needs a look that is newer than its job's end"
        await host.look()
        assert monitor._nobody_cares()
        await host.submit(gpus=1)
        assert not monitor._nobody_cares()

    on_host(1, script)


@pytest.mark.parametrize("vram_bytes", [None, 24 * GIB])
def test_no_job_starts_beside_what_came_between_two_looks(
    on_host: OnHost, vram_bytes: int | None
) -> None:
    """The last one is 0.4 s old, and showed an idle GPU; the job waits, and is told for whom."""

    async def script(host: WatchedHost) -> None:
        await host.look_for(2.0, EVERY_S)
        host.world.clock.now += 0.4
        host.source.foreign[0] = 40 * GIB
        job_id = await host.submit(vram_bytes=vram_bytes)
        assert host.job(job_id).state is JobState.PENDING
        assert job_id not in host.world.ran
        text = why(host, job_id)
        assert text.startswith("LaunchBackoff: GPU 0 ")
        assert f"pid {STRANGER} of bob (python) with 40 GiB" in text
        host.source.foreign.clear()
        await host.look_for(6.0, EVERY_S)
        assert host.job(job_id).state is JobState.RUNNING

    on_host(1, script)


def test_a_job_goes_to_another_gpu_than_one_that_was_taken_between_two_looks(
    on_host: OnHost,
) -> None:
    """It was placed on GPU 0; where it starts is GPU 1."""

    async def script(host: WatchedHost) -> None:
        await host.look_for(2.0, EVERY_S)
        host.world.clock.now += 0.4
        host.source.foreign[0] = 40 * GIB
        job_id = await host.submit()
        assert host.job(job_id).attempt == 2
        await host.look_for(6.0, EVERY_S)
        job = host.job(job_id)
        assert job.state is JobState.RUNNING
        assert [grant.uuid for grant in job.grants] == ["GPU-1"]

    on_host(2, script)


def test_a_last_look_counts_for_a_tenth_of_a_second(on_host: OnHost) -> None:
    """Launches of one moment on one GPU share it; later ones look anew."""

    async def script(host: WatchedHost) -> None:
        before, looks = host.source.looks, []
        for _ in range(4):
            await host.submit(vram_bytes=5 * GIB)
            looks.append(host.source.looks - before)
            host.world.clock.now += 0.09
        assert looks == [1, 1, 2, 2]

    on_host(1, script)


def test_a_launch_that_comes_while_another_looks_for_long_has_a_look_of_its_own(
    on_host: OnHost,
) -> None:
    """At the same GPU: the look under way began too early for it, and the next one is its own."""

    async def script(host: WatchedHost) -> None:
        job = host.job(await host.submit(vram_bytes=5 * GIB))
        host.world.clock.now += 1.0
        before = host.source.looks
        host.source.answers.clear()
        checks = {asyncio.ensure_future(host.monitor.preflight(job))}
        while host.source.looks == before:
            await asyncio.sleep(0)
        host.world.clock.now += 1.0
        checks.add(asyncio.ensure_future(host.monitor.preflight(job)))
        await asyncio.sleep(0)
        host.source.answers.set()
        done, _ = await asyncio.wait(checks, timeout=30.0)
        assert [check.result() for check in done] == [None, None]
        assert host.source.looks - before == 2

    on_host(1, script)


def test_who_may_have_caused_a_death_is_told_by_its_own_name(on_host: OnHost) -> None:
    """Not the job's owner: pid, user and amount, for half a minute after it was seen."""

    async def script(host: WatchedHost) -> None:
        job = host.job(await host.submit())
        host.source.foreign[0] = 40 * GIB
        await host.look()
        host.source.foreign.clear()
        evidence = await host.monitor.evidence(job, failed=False, main_pid=None)
        whose = f"pid {STRANGER} of bob (python) with 40 GiB"
        assert evidence.stranger == f"GPU 0 was in use by {whose} as well"
        await host.look_for(31.0, EVERY_S)
        evidence = await host.monitor.evidence(job, failed=False, main_pid=None)
        assert evidence.stranger is None

    on_host(1, script)


def test_a_process_that_was_gone_before_its_owner_was_seen_is_nobody_to_blame(
    on_host: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the job's own, which has just died."""

    async def script(host: WatchedHost) -> None:
        job = host.job(await host.submit())
        host.source.foreign[0] = 40 * GIB
        await host.look()
        evidence = await host.monitor.evidence(job, failed=False, main_pid=None)
        assert evidence.stranger is None

    monkeypatch.setattr(OtherPeople, "describe", lambda _self, process: gone(process.pid))
    on_host(1, script)


def test_energy_since_the_last_commit_survives_a_stop(on_host: OnHost) -> None:
    """To the last look before it; a kill loses what came since the figures were saved."""

    async def script(host: WatchedHost) -> None:
        host.source.power_w = 100.0
        job_id = await host.submit()
        await host.look_for(70.0, EVERY_S)
        saved = {use.energy_j for use in host.store.load().gpu_uses}
        await host.look_for(20.0, EVERY_S)
        (use,) = host.monitor.uses_now(host.job(job_id))
        assert use.energy_j == 100.0 * 90.0
        assert {use.energy_j for use in host.store.load().gpu_uses} == saved
        saving = asyncio.ensure_future(host.monitor.use.save())
        while not saving.done():
            await asyncio.sleep(0)
            await host.settle()
        host.world.clock.now += 600.0  # while no daemon looks
        await host.restart()
        (after,) = host.monitor.uses_now(host.job(job_id))
        assert (after.energy_j, after.observed_s) == (9_000.0, 90.0)
        await host.look()
        await host.look_for(10.0, EVERY_S)
        (after,) = host.monitor.uses_now(host.job(job_id))
        assert (after.energy_j, after.observed_s) == (10_000.0, 100.0)

    on_host(1, script)


def test_a_job_is_seen_for_no_longer_than_it_ran(on_host: OnHost) -> None:
    """Not from the look before its start, nor on to the look after its end, nor to its answer."""

    async def script(host: WatchedHost) -> None:
        host.source.power_w = 100.0
        await host.look_for(2.0, EVERY_S)
        host.launch_takes_s = 0.4
        job_id = await host.submit()
        host.world.clock.now += 0.1
        host.source.look_takes_s = 0.2
        await host.look()
        host.source.look_takes_s = 0.0
        (use,) = host.monitor.uses_now(host.job(job_id))
        assert use.observed_s == pytest.approx(0.1)
        assert use.energy_j == pytest.approx(10.0)
        await host.look_for(2.0, EVERY_S)
        host.world.clock.now += 0.3
        await host.end(job_id)
        host.world.clock.now += 0.2
        assert host.job(job_id).state is JobState.COMPLETING
        await host.look()
        (use,) = host.monitor.uses_now(host.job(job_id))
        assert use.observed_s == pytest.approx(2.6)
        assert use.energy_j == pytest.approx(260.0)

    on_host(1, script)
