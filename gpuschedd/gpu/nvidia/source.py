"""NVIDIA GPUs as a GpuSource: drives the child process that alone touches the driver.

A driver that hangs, crashes or sits in the kernel for ever costs that child and nothing else: each
request has a deadline, a child that passes it is killed, and the next one starts after a back-off.
While a killed child does not die no second one is started. The call that hung names its GPU; a GPU
that did it twice is left out for a while, so that the others go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gpusched_client.terms import GpuUuid
from gpuschedd.config.keys import Nvml
from gpuschedd.gpu.nvidia.child_process import (
    Child,
    ChildDown,
    Doing,
    Pace,
    Stuck,
    hanging_orphan,
)
from gpuschedd.gpu.nvidia.circuit_breaker import CircuitBreakers, PartBreakers
from gpuschedd.gpu.nvidia.counting import numbered
from gpuschedd.gpu.nvidia.library import LIBRARY_NOT_FOUND
from gpuschedd.gpu.nvidia.replies import Readings, info_of, silent_reading, silent_text
from gpuschedd.gpu.source import (
    DriverAccounts,
    GpuEvent,
    GpuInfo,
    GpuReading,
    GpuSourceDown,
    ProcessPeak,
    Sample,
    SampleRequest,
    display_order,
    unopened,
)
from gpuschedd.system.clock import boottime_s, wall_s, wall_text

log = logging.getLogger(__name__)

BACKOFF_MIN_S, BACKOFF_MAX_S = 1.0, 60.0
ABSENT_RETRY_S = 30.0  # no driver, or no GPU: it may be there later
INIT_EVERY_S = 5.0  # at most one start of the driver in this time
DEATH_S = 1.0  # a killed child that lives longer hangs in the kernel
REAP_AGAIN_S = 0.1  # for another look at such a one
ACCOUNTS_DEADLINE_S = 2.0
RELEASE_S = 2.0  # an admin who takes the driver away waits no longer for an answer of it
SLOW_SWEEP = 4.0  # times the deadline of one GPU: a sweep may take so long where all are slow
RECOUNT_EVERY_S = 10.0  # GPUs, by /proc and by the driver: another number needs a new child


class NvmlGpus:
    """The GpuSource of a host with NVIDIA's driver, or of one that may get it."""

    name = "NVML"
    is_simulated = False

    def __init__(
        self,
        settings: Callable[[], Nvml] = Nvml,
        proc: Path = Path("/proc"),
        spawn: Callable[[], Child] = Child,
        recount_every_s: float = RECOUNT_EVERY_S,
    ) -> None:
        """`settings` is asked at each start of the driver; `proc` is where its files are read."""
        self._recount_every_s = recount_every_s
        self._settings = settings
        self._proc = proc
        self._spawn = spawn
        self._child: Child | None = None
        self._unkillable: Child | None = None  # killed and not dead
        self._dies_until_s = 0.0  # before that it may still be about to
        self._lock = asyncio.Lock()
        self._inventory: tuple[GpuInfo, ...] = ()
        self._count = 0  # of the GPUs that the host has, also of those that cannot be opened
        self._drained: set[GpuUuid] = set()  # by the driver, at the last health check
        self._warnings: tuple[str, ...] = ()
        self._readings = Readings()
        self._breakers = CircuitBreakers()
        self._parts = PartBreakers()
        self._known: dict[int, frozenset[GpuUuid]] = {}  # GPU or slices, by the driver's index
        self._skipped: frozenset[int] = frozenset()  # indices that the child did not open
        self._left_out: frozenset[GpuUuid] = frozenset()
        self._unopened: list[tuple[GpuInfo, GpuReading]] = []  # the same, and never seen before
        self._shut: dict[GpuUuid, GpuReading] = {}  # could not be opened, with the reason
        self._failures = 0
        self._not_before_s = 0.0
        self._opened_s = -INIT_EVERY_S
        self._down_since_s: float | None = None
        self._down_text = ""
        self._is_absent = False  # the library is not installed
        self.driver = ""

    # --- GpuSource ----------------------------------------------------------------------------

    async def sample(self, want: SampleRequest) -> Sample:
        """One sweep by the child, started where there is none. Raises GpuSourceDown."""
        async with self._lock:
            await self._retry_cooled_down()
            taken_s = boottime_s()
            child = await self._ready_child()
            deadline_s = self._settings().sweep_deadline_s
            reply = await self._ask(
                child, self._sweep_request(want), SLOW_SWEEP * deadline_s, Pace(deadline_s, True)
            )
            self._failures = 0
            self._down_since_s = None
            self._breakers.answered()
            self._parts.answered(reply["parts"])
            sample = self._sample_of(taken_s, reply)
            if reply["new_child"] is not None:
                log.info("driver_reopened reason=%s", reply["new_child"])
                await self._end_child()
            elif not self._count and time.monotonic() - self._opened_s >= ABSENT_RETRY_S:
                await self._end_child()  # there may be GPUs now, and in a container nobody tells
            return sample

    async def accounts(self, pids: Mapping[GpuUuid, Iterable[int]]) -> DriverAccounts:
        """Kept by the driver until 128 later processes ended; nothing where it does not answer."""
        async with self._lock:
            if self._child is None or not self._settings().accounting:
                return {}
            wanted = {
                uuid: sorted(of_gpu) for uuid, of_gpu in pids.items() if uuid not in self._left_out
            }
            try:
                reply = await self._ask(
                    self._child, {"op": "accounts", "pids": wanted}, ACCOUNTS_DEADLINE_S
                )
            except GpuSourceDown:
                return {}
            self._parts.answered(["accounts"])
        return {
            GpuUuid(uuid): {int(pid): ProcessPeak(*row) for pid, row in rows.items()}
            for uuid, rows in reply["accounts"].items()
        }

    async def release(self) -> None:
        """End the child: with it the last client of the driver that is ours.

        An answer that is late is not waited for: it is the driver that hangs which people reset.
        """
        try:
            async with asyncio.timeout(RELEASE_S):
                await self._lock.acquire()
        except TimeoutError:
            if self._child is not None:
                self._child.kill()
            await self._lock.acquire()
        try:
            await self._end_child()
            self._not_before_s, self._opened_s = 0.0, -INIT_EVERY_S
            self._breakers.clear()
            self._parts.clear()
            self._leave_out()
        finally:
            self._lock.release()

    async def close(self) -> None:
        """End the child; nothing waits for one that hangs."""
        await self._end_child()
        if self._unkillable is not None:
            self._unkillable.close()
            self._unkillable = None

    # --- the child ----------------------------------------------------------------------------

    async def _retry_cooled_down(self) -> None:
        """Ask GPUs again whose time is over; one that was not opened takes a new child."""
        over = self._breakers.cooled_down()
        if over:
            self._leave_out()
        if over & self._skipped or self._parts.has_cooled_down("events"):
            self._skipped = frozenset()
            await self._end_child()

    async def _ready_child(self) -> Child:
        """The child with an opened driver. Raises GpuSourceDown while there can be none."""
        if self._child is not None:
            return self._child
        now_s = time.monotonic()
        if self._unkillable is not None:
            await self._reap_unkillable()
        if now_s < self._not_before_s:
            raise GpuSourceDown(self._down_text, is_absent=self._is_absent)
        wait_s = self._opened_s + INIT_EVERY_S - now_s
        if wait_s > 0 and self._failures == 0:
            await asyncio.sleep(wait_s)
        self._refuse_orphan()
        self._opened_s = time.monotonic()
        try:
            self._child = self._spawn()
        except OSError as error:
            self._hold_off(f"no process can be started for the driver: {error}", BACKOFF_MAX_S)
            raise GpuSourceDown(self._down_text) from error
        await self._open(self._child)
        return self._child

    async def _open(self, child: Child) -> None:
        settings = self._settings()
        self._leave_out()
        skipped = self._breakers.open_indices()
        request = {
            "op": "open",
            "proc": str(self._proc),
            "recount_every_s": self._recount_every_s,
            "accounting": settings.accounting,
            "skip_calls": settings.skip_calls,
            "integrated_models": settings.integrated_models,
            "skip_indices": sorted(skipped),
            "skip_parts": self._parts.left_out(),
        }
        # A GPU may take seconds to wake, but one that has just hung a sweep gets no more than that.
        gpu_s = settings.sweep_deadline_s if self._failures else settings.open_deadline_s / 4
        reply = await self._ask(child, request, settings.open_deadline_s, Pace(gpu_s, False))
        if "down" in reply:
            await self._end_child()
            self._hold_off(reply["down"], ABSENT_RETRY_S)
            self._is_absent = reply["code"] == LIBRARY_NOT_FOUND
            raise GpuSourceDown(self._down_text, is_absent=self._is_absent)
        self._is_absent = False
        self.driver, self._count = reply["driver"], reply["count"]
        self._parts.answered(["topology"])
        opened = tuple(info_of(entry) for entry in reply["inventory"])
        await self._take_numbers(opened, skipped, reply["left_out"])
        kept = tuple(g for g in self._inventory if g.uuid in self._left_out | self._shut.keys())
        self._inventory = tuple(sorted((*opened, *kept), key=display_order))
        strange = [i for i in sorted(skipped) if i not in self._known]
        hangs = [f"GPU {i} is left out, it hangs the driver at the start" for i in strange]
        self._warnings = (*reply["warnings"], *hangs, *self._parts.warnings())
        self._readings.clear()
        log.info(
            "driver_opened version=%s gpus=%d seconds=%.2f",
            self.driver,
            len(self._inventory),
            time.monotonic() - self._opened_s,
        )

    async def _take_numbers(
        self,
        opened: tuple[GpuInfo, ...],
        skipped: frozenset[int],
        left_out: Iterable[Mapping[str, Any]],
    ) -> None:
        """Who has which index now. Raises GpuSourceDown where a wrong one may have been skipped."""
        numbered: dict[int, frozenset[GpuUuid]] = {}
        for gpu in opened:
            index = display_order(gpu)[0]
            numbered[index] = numbered.get(index, frozenset()) | {gpu.uuid}
        before = {uuid: index for index, uuids in self._known.items() for uuid in uuids}
        moved = any(
            before.get(uuid, index) != index for index, uuids in numbered.items() for uuid in uuids
        )
        if moved:
            self._known = {}
            self._breakers.half_open_all()
            self._parts.half_open_all()
            self._leave_out()
        if moved and skipped:
            await self._end_child()
            raise GpuSourceDown("the driver has renumbered its GPUs; they are opened once more")
        self._shut = self._shut_of(left_out, {gpu.uuid for gpu in opened})
        absent = skipped | {entry["index"] for entry in left_out}
        self._known = {i: uuids for i, uuids in self._known.items() if i in absent} | numbered
        self._skipped = skipped

    def _shut_of(
        self, entries: Iterable[Mapping[str, Any]], opened: set[GpuUuid]
    ) -> dict[GpuUuid, GpuReading]:
        """What to say of the GPUs that were there and could not be opened this time."""
        found = {}
        self._unopened.clear()
        for entry in entries:
            text = f"it cannot be opened; the driver says: {entry['reason']}"
            known = self._known.get(entry["index"], frozenset()) - opened
            for uuid in known:
                found[uuid] = GpuReading(uuid, None, None, fault=entry["fault"], reason=text)
            if not known:
                self._unopened.append(unopened(entry["index"], entry["fault"], text))
        return found

    async def _ask(
        self,
        child: Child,
        request: dict[str, Any],
        deadline_s: float,
        pace: Pace | None = None,
    ) -> Any:
        """A reply in time; else the child is ended, and the GPU that it hung on is blamed."""
        doing: Doing | None = None
        try:
            return await child.ask(request, deadline_s, pace)
        except TimeoutError as error:
            doing = child.doing()
            within_s = pace.gpu_s if pace and isinstance(error, Stuck) else deadline_s
            text = f"the driver did not answer within {within_s:g} s{doing.where}"
            if pace and not isinstance(error, Stuck) and not doing.part:
                doing = None  # no single GPU is to blame
        except ChildDown as down:
            doing, text = child.doing(), str(down)
        except ValueError as error:
            doing = None
            text = f"the driver's process gave an answer that is not one: {error}"
        except asyncio.CancelledError:
            child.kill()  # its reply would be taken for that of the next request
            self._child, self._unkillable = None, child
            self._dies_until_s = time.monotonic() + DEATH_S
            raise
        if doing is not None:
            self._blame(doing)
        self._failures += 1
        await self._kill_child()
        self._hold_off(text, min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** (self._failures - 1)))
        log.warning("driver_failed error=%s", self._down_text)
        raise GpuSourceDown(self._down_text)

    def _hold_off(self, text: str, pause_s: float) -> None:
        """Say since when, and try again after a pause."""
        if self._down_since_s is None:
            self._down_since_s = wall_s()
        since = wall_text(self._down_since_s)
        self._down_text = f"{text}; no answer since {since}"
        self._not_before_s = time.monotonic() + pause_s

    async def _kill_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        if await child.gone(DEATH_S):
            child.close()
        else:
            self._unkillable = child

    async def _end_child(self) -> None:
        """Let it shut the driver down in good order; KILL after a second."""
        child, self._child = self._child, None
        if child is None:
            return
        child.close()
        if not await child.gone(DEATH_S):
            child.kill()
            if not await child.gone(DEATH_S):
                self._unkillable = child

    async def _reap_unkillable(self) -> None:
        """No second child beside one that hangs in the kernel: it would hang too."""
        assert self._unkillable is not None
        left_s = self._dies_until_s - time.monotonic()
        if not await self._unkillable.gone(max(REAP_AGAIN_S, left_s)):
            pid = self._unkillable.process.pid
            self._hold_off(
                f"the driver hangs: its process {pid} cannot be ended; only a reboot may help",
                BACKOFF_MIN_S,
            )
            raise GpuSourceDown(self._down_text)
        self._unkillable.close()
        self._unkillable = None

    def _refuse_orphan(self) -> None:
        """The same for one that an earlier daemon left hanging."""
        pid = hanging_orphan(self._proc)
        if pid is not None:
            self._hold_off(
                f"the driver hangs: process {pid} of an earlier daemon cannot be ended; only a "
                "reboot may help",
                ABSENT_RETRY_S,
            )
            raise GpuSourceDown(self._down_text)

    # --- GPUs that hang -----------------------------------------------------------------------

    def _blame(self, doing: Doing) -> None:
        """A GPU, or where that is for a part that it can be used without, that part of it."""
        gpus = {index for index in (doing.gpu, doing.peer) if index >= 0}
        if doing.part:
            is_left_out = self._parts.fail(doing.part, gpus or {-1}, doing.function)
        else:
            is_left_out = bool(gpus) and self._breakers.fail(doing.gpu, doing.function)
        if is_left_out:
            self._failures = 0
        self._leave_out()

    def _leave_out(self) -> None:
        self._left_out = self._breakers.left_out(self._known)

    # --- requests and replies -----------------------------------------------------------------

    def _sweep_request(self, want: SampleRequest) -> dict[str, Any]:
        return {
            "op": "sweep",
            "busy": sorted(want.busy_uuids),
            "fresh": sorted(want.fresh_uuids),
            "launch": sorted(want.launch_uuids),
            "health": want.health,
            "skip": sorted(self._left_out),
        }

    def _sample_of(self, taken_s: float, reply: dict[str, Any]) -> Sample:
        readings = [self._readings.reading_of(entry, taken_s) for entry in reply["readings"]]
        readings += self._shut.values()
        never_opened = list(self._unopened)
        for index, function in self._breakers.silent().items():
            known = self._known.get(index, frozenset())
            readings += [silent_reading(uuid, function) for uuid in sorted(known)]
            if not known:
                never_opened.append(unopened(index, "unread", silent_text(function)))
        for reading in readings:
            told = reading.modes or reading.checks
            if told is not None:
                (self._drained.add if told.drained else self._drained.discard)(reading.uuid)
        inventory, difference = numbered(self._inventory, readings, self._drained, self._count)
        return Sample(
            taken_boottime_s=taken_s,
            inventory=inventory,
            readings=tuple(readings),
            events=tuple(GpuEvent(GpuUuid(u), kind, n) for u, kind, n in reply["events"]),
            warnings=self._warnings if difference is None else (*self._warnings, difference),
            problems=self._parts.warnings(),
            unopened=tuple(never_opened),
            cost_s=reply["cost_s"],
            calls=reply["calls"],
        )
