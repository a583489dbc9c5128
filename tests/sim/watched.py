"""The same host with the real monitor over GPUs that a test plays: its looks, by the same clock.

A launch looks at its GPUs as a real one does; jobs run until the test ends them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpusched_client.terms import GpuUuid, JobId
from gpusched_client.wire.submit_messages import JobRequest, SubmitRequest
from gpuschedd.config.keys import Nvml
from gpuschedd.core.attempt import AttemptReport, StartedRecord
from gpuschedd.core.job import Job
from gpuschedd.gpu import (
    free_memory,
    health_watch,
    inventory,
    job_use,
    lasting,
    monitor,
    strangers,
)
from gpuschedd.gpu.attribution import Attribution, ForeignProcess, JobKey
from gpuschedd.gpu.monitor import GpuMonitor
from gpuschedd.gpu.nvidia.health_rules import XidRules
from gpuschedd.gpu.source import (
    DriverAccounts,
    GpuInfo,
    GpuProcess,
    GpuReading,
    Sample,
    SampleRequest,
)
from gpuschedd.jobs import submit as jobs_submit
from gpuschedd.run.launchers.direct import LaunchDeferred
from gpuschedd.store.records import Loaded
from tests.sim.harness import Attempt, Host, PlayedRunner, VirtualClock

GIB = 2**30
CARD = 48 * GIB
STRANGER = 4_100_000  # a pid above all that are given out
CLOCKED = (free_memory, health_watch, inventory, job_use, lasting, monitor, strangers)


class PlayedGpus:
    """A GpuSource: what is on the GPUs, and what they draw, is what the test says."""

    name = "played"
    is_simulated = False

    def __init__(self, clock: VirtualClock, gpus: int) -> None:
        self._clock = clock
        self.looks = 0
        self.power_w = 0.0
        self.look_takes_s = 0.0
        self.answers = asyncio.Event()  # a look waits for it
        self.answers.set()
        self.foreign: dict[int, int] = {}  # by index: bytes of one process
        self.inventory = tuple(
            GpuInfo(GpuUuid(f"GPU-{index}"), index, index, "Card", CARD) for index in range(gpus)
        )

    async def sample(self, want: SampleRequest) -> Sample:
        """As it is at this moment."""
        del want
        self.looks += 1
        readings = tuple(map(self._reading, self.inventory))
        taken_s = self._clock.now
        await self.answers.wait()
        self._clock.now += self.look_takes_s
        return Sample(taken_s, self.inventory, readings)

    def _reading(self, info: GpuInfo) -> GpuReading:
        used = self.foreign.get(info.index, 0)
        processes = (GpuProcess(STRANGER + info.index, 1, used),) if used else ()
        return GpuReading(
            info.uuid,
            used,
            CARD - used,
            utilization=0.0,
            processes=processes,
            listed_used_bytes=used,
            power_w=self.power_w,
        )

    async def accounts(self, pids: Mapping[GpuUuid, Iterable[int]]) -> DriverAccounts:
        """None are kept."""
        del pids
        return {}

    async def release(self) -> None:
        """There is nothing to release."""

    async def close(self) -> None:
        """Nothing was started."""


class OtherPeople(Attribution):
    """What is on the GPUs is bob's."""

    def describe(self, process: GpuProcess) -> ForeignProcess:
        return ForeignProcess(process.pid, 1002, "bob", "python")


class LookingRunner(PlayedRunner):
    """A launch begins with the last look; what passes it runs until the test ends it."""

    host: WatchedHost

    def launch(self, key: JobKey, uid: int, spec: object) -> None:
        del uid, spec
        self.host.launching.add(asyncio.ensure_future(self._launch(key)))

    async def _launch(self, key: JobKey) -> None:
        attempt = self.world.attempts.setdefault(key, Attempt())
        job = self.host.controller.state.jobs[key[0]]
        try:
            await self.host.dispatcher._look_again(job)
        except LaunchDeferred as failure:
            attempt.claim = self._claim("daemon")
            seen, text = attempt.seen(), str(failure)
            self.report(AttemptReport(*key, seen, launch_error=text, deferred=True))
            return
        self.world.clock.now += self.host.launch_takes_s
        now = self.world.clock.now
        attempt.claim = self._claim("supervisor")
        attempt.started = StartedRecord(2, 2, 2, self.world.clock.wall_s(), now, "boot")
        self.look(key)


class WatchedHost(Host):
    """One daemon whose monitor looks when the test says so, and before each launch."""

    def __init__(self, place: Path, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launching: set[asyncio.Future[None]] = set()
        self.launch_takes_s = 0.0  # after its last look
        self._count = gpus
        self._monkeypatch = monkeypatch
        self.source: PlayedGpus
        super().__init__(place, seed=1, gpus=0)

    def start(self) -> None:
        if not isinstance(self.runner, LookingRunner):
            self.runner = LookingRunner(self)
            self.source = PlayedGpus(self.world.clock, self._count)
            for module in CLOCKED:
                self._monkeypatch.setattr(module, "boottime_s", self.world.clock.boottime_s)
        super().start()

    def watch(self, loaded: Loaded) -> Any:
        source: Any = self.source
        self.monitor = GpuMonitor(
            source,
            lambda: XidRules(Nvml().quarantine_xids, Nvml().reboot_xids),
            self.controller,
            OtherPeople(dict),
            same_boot=True,
            uses_before=loaded.gpu_uses,
        )
        return self.monitor

    async def look(self) -> None:
        """The regular look, now."""
        assert await self.monitor._sweep()
        await self.settle()

    async def look_for(self, seconds: float, every_s: float = 0.5) -> None:
        """Regular looks for so long."""
        for _ in range(round(seconds / every_s)):
            self.world.clock.now += every_s
            self.controller.request_pass()
            await self.look()

    async def settle(self) -> None:
        await super().settle()
        while self.launching:
            launching, self.launching = self.launching, set()
            await asyncio.gather(*launching)
            await super().settle()

    async def submit(self, gpus: int = 1, vram_bytes: int | None = None) -> JobId:
        """A job of the first user's; its id."""
        request = JobRequest(
            argv=(b"true",), cwd=b"/", environment={}, gpus=gpus, vram_bytes=vram_bytes
        )
        answer = await self.ask(
            lambda batch: jobs_submit.submit(
                batch, self.caller(1001), SubmitRequest(jobs=(request,)), None
            )
        )
        job_id: JobId = answer.job_ids[0]
        return job_id

    async def end(self, job_id: JobId) -> None:
        """Its main process ends; others of it may still be there."""
        self.runner._end((job_id, self.job(job_id).attempt), "exit")
        await self.settle()

    def job(self, job_id: JobId) -> Job:
        """As it is now."""
        return self.controller.state.jobs[job_id]
