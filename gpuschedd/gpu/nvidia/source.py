"""NVIDIA GPUs as a GpuSource: drives the child process that alone touches the driver.

A driver that hangs, crashes or sits in the kernel for ever costs that child and nothing else: each
request has a deadline, a child that passes it is killed, and the next one starts after a back-off.
While a killed child does not die no second one is started. The call that hung names its GPU; a GPU
that did it twice is left out for a while, so that the others go on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpusched_client.terms import GpuUuid
from gpuschedd.config.keys import Nvml
from gpuschedd.gpu.nvidia.child import FRAME_BYTES_MAX, LENGTH, PROCESS_NAME, frame
from gpuschedd.gpu.nvidia.library import PAGE, PAGE_BYTES
from gpuschedd.gpu.source import (
    Accounts,
    GpuEvent,
    GpuInfo,
    GpuProcess,
    GpuReading,
    GpuSourceDown,
    HealthChecks,
    ProcessPeak,
    Sample,
    Want,
    place,
)
from gpuschedd.system.clock import boottime_s, wall_s, wall_text

log = logging.getLogger(__name__)

BACKOFF_MIN_S, BACKOFF_MAX_S = 1.0, 60.0
ABSENT_RETRY_S = 30.0  # no driver: it may be installed or loaded later
INIT_EVERY_S = 5.0  # at most one start of the driver in this time
DEATH_S = 1.0  # a killed child that lives longer hangs in the kernel
LAST_BREATH_S = 0.1  # for another look at such a one
STRIKES_MAX = 2  # then the GPU is left out
PAROLE_MIN_S, PAROLE_MAX_S = 60.0, 3600.0  # until it is asked again
ACCOUNTS_DEADLINE_S = 2.0
RELEASE_S = 2.0  # an admin who takes the driver away waits no longer for an answer of it
LIST_FAILURES_MAX = 3  # in a row: so long the last list of a GPU's processes stands
LOOKS = 8  # at what the driver does, in the time that a GPU may take
SLOW_SWEEP = 4.0  # times the deadline of one GPU: a sweep may take so long where all are slow
RECOUNT_EVERY_S = 10.0  # GPUs, by /proc and by the driver: another number needs a new child


@dataclass(slots=True)
class _Strikes:
    """How often one GPU hung a sweep, and since when it is left out."""

    count: int = 0
    parole_s: float = PAROLE_MIN_S
    out_until_s: float | None = None
    function: str = ""

    def put_on_trial(self) -> None:
        """It is asked again, and has one try."""
        if self.out_until_s is not None:
            self.out_until_s = None
            self.count = STRIKES_MAX - 1


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a request may be about one GPU, however many there are.

    `counts_rest`: the same for what is about none of them.
    """

    gpu_s: float
    counts_rest: bool


class Stuck(TimeoutError):
    """It is one GPU that keeps the driver; else all are slow."""


class ChildDown(Exception):
    """The child ended, or was ended because it did not answer."""


class Child:
    """One child process and its two pipes. One request is under way at a time."""

    def __init__(self) -> None:
        self._page_fd = os.memfd_create("gpuschedd-nvml", os.MFD_CLOEXEC)
        os.ftruncate(self._page_fd, PAGE_BYTES)
        self._page = mmap.mmap(self._page_fd, PAGE_BYTES)
        PAGE.pack_into(self._page, 0, 0, -1, b"")  # no call about any GPU yet
        # Not from a thread: PDEATHSIG follows the thread that forks.
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "gpuschedd.gpu.nvidia.child"),
                *(str(os.getpid()), str(self._page_fd)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._page_fd,),
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._to, self._from = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        self._pending = bytearray()

    def doing(self) -> tuple[int, str]:
        """The GPU's index (-1: none) and the driver function of the call under way."""
        _, gpu, name = PAGE.unpack_from(self._page, 0)
        return gpu, name.rstrip(b"\0").decode("ascii", "replace")

    async def ask(
        self, request: dict[str, Any], deadline_s: float, pace: Pace | None = None
    ) -> dict[str, Any]:
        """The reply. Raises TimeoutError, Stuck by the pace, or ChildDown where the child ended."""
        asking = asyncio.ensure_future(self._converse(request))
        try:
            async with asyncio.timeout(deadline_s):
                if pace is not None:
                    await self._keep_pace(asking, pace)
                return await asking
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait({asking})
            if not asking.cancelled():
                asking.exception()  # also where nobody waits for it any more

    async def _keep_pace(self, asking: asyncio.Future[dict[str, Any]], pace: Pace) -> None:
        """Return when it is done; raise Stuck where it stays with one GPU for too long."""
        gpu, since_s = self.doing()[0], time.monotonic()
        while not asking.done():
            await asyncio.wait({asking}, timeout=pace.gpu_s / LOOKS)
            now_s, before = time.monotonic(), gpu
            gpu = self.doing()[0]
            if gpu != before or (gpu < 0 and not pace.counts_rest):
                since_s = now_s
            elif now_s - since_s >= pace.gpu_s and not asking.done():
                raise Stuck

    async def _converse(self, request: dict[str, Any]) -> dict[str, Any]:
        await self._write(frame(request))
        (length,) = LENGTH.unpack(await self._read(LENGTH.size))
        if length > FRAME_BYTES_MAX:
            raise ChildDown(f"it sent a frame of {length} bytes")
        reply: dict[str, Any] = json.loads(await self._read(length))
        return reply

    async def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._to, view) :]
            except BlockingIOError:
                await _ready(self._to, write=True)
            except BrokenPipeError as error:
                raise ChildDown(self._how_it_ended()) from error

    async def _read(self, length: int) -> bytes:
        while len(self._pending) < length:
            try:
                part = os.read(self._from, 2**16)
            except BlockingIOError:
                await _ready(self._from)
                continue
            if not part:
                raise ChildDown(self._how_it_ended())
            self._pending += part
        data = bytes(self._pending[:length])
        del self._pending[:length]
        return data

    def _how_it_ended(self) -> str:
        gpu, name = self.doing()
        where = f" in {name}" if name else ""
        where += f" on GPU {gpu}" if gpu >= 0 else ""
        try:
            status = self.process.wait(0.1)
        except subprocess.TimeoutExpired:
            return f"the driver's process closed its pipe{where}"
        if status < 0:
            return f"the driver's process was ended by {signal.Signals(-status).name}{where}"
        return f"the driver's process ended with status {status}{where}"

    def kill(self) -> None:
        """KILL; a process in the kernel may not die of it."""
        if self.process.poll() is None:
            self.process.kill()

    async def gone(self, within_s: float) -> bool:
        """Whether the process is dead, waiting at most so long."""
        if self.process.poll() is not None:
            return True
        pidfd = os.pidfd_open(self.process.pid)
        try:
            async with asyncio.timeout(within_s):
                await _ready(pidfd)
        except TimeoutError:
            pass
        finally:
            os.close(pidfd)
        return self.process.poll() is not None

    def close(self) -> None:
        """Close our ends: a child that serves shuts the driver down and ends. May be repeated."""
        if self._page.closed:
            return
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self._page.close()
        os.close(self._page_fd)


async def _ready(fd: int, *, write: bool = False) -> None:
    """Wait until the descriptor can be read (or written)."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    add, remove = (
        (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
    )
    add(fd, set_ready)
    try:
        await ready
    finally:
        remove(fd)


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
        self._undead: Child | None = None  # killed and not dead
        self._dies_until_s = 0.0  # before that it may still be about to
        self._lock = asyncio.Lock()
        self._inventory: tuple[GpuInfo, ...] = ()
        self._warnings: tuple[str, ...] = ()
        self._lists: dict[GpuUuid, tuple[tuple[GpuProcess, ...] | None, int | None]] = {}
        self._list_failures: dict[GpuUuid, int] = {}  # in a row
        self._strikes: dict[int, _Strikes] = {}
        self._known: dict[int, frozenset[GpuUuid]] = {}  # GPU or slices, by the driver's index
        self._skipped: frozenset[int] = frozenset()  # indices that the child did not open
        self._left_out: frozenset[GpuUuid] = frozenset()
        self._shut: dict[GpuUuid, GpuReading] = {}  # could not be opened, with the reason
        self._failures = 0
        self._not_before_s = 0.0
        self._opened_s = -INIT_EVERY_S
        self._down_since_s: float | None = None
        self._down_text = ""
        self.driver = ""

    # --- GpuSource ----------------------------------------------------------------------------

    async def sample(self, want: Want) -> Sample:
        """One sweep by the child, started where there is none. Raises GpuSourceDown."""
        async with self._lock:
            await self._let_parolees_in()
            taken_s = boottime_s()
            child = await self._ready_child()
            deadline_s = self._settings().sweep_deadline_s
            reply = await self._ask(
                child, self._sweep_request(want), SLOW_SWEEP * deadline_s, Pace(deadline_s, True)
            )
            self._failures = 0
            self._down_since_s = None
            sample = self._sample_of(taken_s, reply)
            if reply["new_child"] is not None:
                log.info("driver_reopened reason=%s", reply["new_child"])
                await self._end_child()
            return sample

    async def accounts(self, pids: Mapping[GpuUuid, Iterable[int]]) -> Accounts:
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
            self._strikes.clear()  # people look after what hangs: it is asked again after that
            self._let_out()
        finally:
            self._lock.release()

    async def close(self) -> None:
        """End the child; nothing waits for one that hangs."""
        await self._end_child()
        if self._undead is not None:
            self._undead.close()
            self._undead = None

    # --- the child ----------------------------------------------------------------------------

    async def _let_parolees_in(self) -> None:
        """Ask GPUs again whose time is over; one that was not opened takes a new child."""
        over = self._on_parole()
        if over:
            self._let_out()
        if over & self._skipped:
            self._skipped = frozenset()
            await self._end_child()

    async def _ready_child(self) -> Child:
        """The child with an opened driver. Raises GpuSourceDown while there can be none."""
        if self._child is not None:
            return self._child
        now_s = time.monotonic()
        if self._undead is not None:
            await self._bury_undead()
        if now_s < self._not_before_s:
            raise GpuSourceDown(self._down_text)
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
        self._let_out()
        skipped = frozenset(i for i, each in self._strikes.items() if each.out_until_s is not None)
        request = {
            "op": "open",
            "proc": str(self._proc),
            "recount_every_s": self._recount_every_s,
            "accounting": settings.accounting,
            "skip_calls": settings.skip_calls,
            "integrated_models": settings.integrated_models,
            "skip_indices": sorted(skipped),
        }
        # A GPU may take seconds to wake, but one that has just hung a sweep gets no more than that.
        gpu_s = settings.sweep_deadline_s if self._failures else settings.open_deadline_s / 4
        reply = await self._ask(child, request, settings.open_deadline_s, Pace(gpu_s, False))
        if "down" in reply:
            await self._end_child()
            self._hold_off(reply["down"], ABSENT_RETRY_S)
            raise GpuSourceDown(reply["down"])
        self.driver = reply["driver"]
        opened = tuple(_info(entry) for entry in reply["inventory"])
        await self._take_numbers(opened, skipped, reply["left_out"])
        kept = tuple(g for g in self._inventory if g.uuid in self._left_out | self._shut.keys())
        self._inventory = tuple(sorted((*opened, *kept), key=place))
        strange = [i for i in sorted(skipped) if i not in self._known]
        hangs = [f"GPU {i} is left out, it hangs the driver at the start" for i in strange]
        self._warnings = (*reply["warnings"], *hangs)
        self._lists.clear()
        self._list_failures.clear()
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
            index = place(gpu)[0]
            numbered[index] = numbered.get(index, frozenset()) | {gpu.uuid}
        before = {uuid: index for index, uuids in self._known.items() for uuid in uuids}
        moved = any(
            before.get(uuid, index) != index for index, uuids in numbered.items() for uuid in uuids
        )
        if moved:
            self._known = {}
            for strikes in self._strikes.values():
                strikes.put_on_trial()
            self._let_out()
        if moved and skipped:
            await self._end_child()
            raise GpuSourceDown("the driver counts its GPUs anew; they are opened once more")
        self._shut = self._shut_of(left_out, {gpu.uuid for gpu in opened})
        absent = skipped | {entry["index"] for entry in left_out}
        self._known = {i: uuids for i, uuids in self._known.items() if i in absent} | numbered
        self._skipped = skipped

    def _shut_of(
        self, entries: Iterable[Mapping[str, Any]], opened: set[GpuUuid]
    ) -> dict[GpuUuid, GpuReading]:
        """What to say of the GPUs that were there and could not be opened this time."""
        found = {}
        for entry in entries:
            for uuid in self._known.get(entry["index"], frozenset()) - opened:
                text = f"it cannot be opened; the driver says: {entry['reason']}"
                found[uuid] = GpuReading(uuid, None, None, fault=entry["fault"], reason=text)
        return found

    async def _ask(
        self,
        child: Child,
        request: dict[str, Any],
        deadline_s: float,
        pace: Pace | None = None,
    ) -> Any:
        """A reply in time; else the child is ended, and the GPU that it hung on gets a strike."""
        try:
            return await child.ask(request, deadline_s, pace)
        except TimeoutError as error:
            gpu, name = child.doing()
            where = f" in {name}" if name else ""
            where += f" on GPU {gpu}" if gpu >= 0 else ""
            within_s = pace.gpu_s if pace and isinstance(error, Stuck) else deadline_s
            text = f"the driver did not answer within {within_s:g} s{where}"
            if pace and not isinstance(error, Stuck):
                gpu = -1  # it is no one GPU's fault
        except ChildDown as down:
            gpu, name = child.doing()
            text = str(down)
        except ValueError as error:
            gpu, name = -1, ""
            text = f"the driver's process gave an answer that is none: {error}"
        except asyncio.CancelledError:
            child.kill()  # its reply would be taken for that of the next request
            self._child, self._undead = None, child
            self._dies_until_s = time.monotonic() + DEATH_S
            raise
        self._strike(gpu, name)
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
            self._undead = child

    async def _end_child(self) -> None:
        """Let it shut the driver down in good order; KILL after a second."""
        child, self._child = self._child, None
        if child is None:
            return
        child.close()
        if not await child.gone(DEATH_S):
            child.kill()
            if not await child.gone(DEATH_S):
                self._undead = child

    async def _bury_undead(self) -> None:
        """No second child beside one that hangs in the kernel: it would hang too."""
        assert self._undead is not None
        left_s = self._dies_until_s - time.monotonic()
        if not await self._undead.gone(max(LAST_BREATH_S, left_s)):
            pid = self._undead.process.pid
            self._hold_off(
                f"the driver hangs: its process {pid} cannot be ended; only a reboot may help",
                BACKOFF_MIN_S,
            )
            raise GpuSourceDown(self._down_text)
        self._undead.close()
        self._undead = None

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

    def _strike(self, index: int, function: str) -> None:
        """A GPU that hung or crashed the child; twice in a row, and it is left out."""
        if index < 0:
            return
        strikes = self._strikes.setdefault(index, _Strikes())
        strikes.count += 1
        strikes.function = function
        if strikes.count >= STRIKES_MAX:
            strikes.out_until_s = time.monotonic() + strikes.parole_s
            strikes.parole_s = min(PAROLE_MAX_S, 2 * strikes.parole_s)
            self._failures = 0
        self._let_out()

    def _let_out(self) -> None:
        """Who is left out now; one whose time is over is asked again, and has one try."""
        now_s = time.monotonic()
        out: set[GpuUuid] = set()
        for index, strikes in self._strikes.items():
            if strikes.out_until_s is None:
                continue
            if now_s < strikes.out_until_s:
                out |= self._known.get(index, frozenset())
            else:
                strikes.put_on_trial()
        self._left_out = frozenset(out)

    def _on_parole(self) -> set[int]:
        """Indices of GPUs that have been left out for long enough."""
        now_s = time.monotonic()
        return {
            index
            for index, strikes in self._strikes.items()
            if strikes.out_until_s is not None and now_s >= strikes.out_until_s
        }

    # --- requests and replies -----------------------------------------------------------------

    def _sweep_request(self, want: Want) -> dict[str, Any]:
        return {
            "op": "sweep",
            "busy": sorted(want.busy_uuids),
            "fresh": sorted(want.fresh_uuids),
            "health": want.health,
            "skip": sorted(self._left_out),
        }

    def _sample_of(self, taken_s: float, reply: dict[str, Any]) -> Sample:
        readings = [self._reading(entry) for entry in reply["readings"]]
        readings += self._shut.values()
        for index, strikes in self._strikes.items():
            if strikes.out_until_s is None:
                strikes.count = 0
                continue
            known = self._known.get(index, frozenset())
            readings += [_silent(uuid, strikes.function) for uuid in sorted(known)]
        return Sample(
            taken_boottime_s=taken_s,
            inventory=self._inventory,
            readings=tuple(readings),
            events=tuple(GpuEvent(GpuUuid(u), kind, n) for u, kind, n in reply["events"]),
            warnings=self._warnings,
            cost_s=reply["cost_s"],
            calls=reply["calls"],
        )

    def _reading(self, entry: dict[str, Any]) -> GpuReading:
        uuid = GpuUuid(entry["uuid"])
        if "processes" in entry:
            rows = tuple(GpuProcess(*row) for row in entry["processes"])
            self._lists[uuid] = (rows, entry.get("listed_used"))
            self._list_failures.pop(uuid, None)
        elif "list_reason" in entry:
            failures = self._list_failures[uuid] = self._list_failures.get(uuid, 0) + 1
            if failures > LIST_FAILURES_MAX:
                self._lists.pop(uuid, None)
        processes, listed_used = self._lists.get(uuid, (None, None))
        checks = entry.get("checks")
        return GpuReading(
            uuid=uuid,
            used_bytes=entry.get("used"),
            free_bytes=entry.get("free"),
            utilization=entry.get("utilization"),
            processes=processes,
            listed_used_bytes=listed_used,
            power_w=entry.get("power_w"),
            process_utilization={
                int(pid): float(percent)
                for pid, percent in entry.get("process_utilization", {}).items()
            },
            fault=entry.get("fault"),
            reason=entry.get("reason") or entry.get("list_reason"),
            checks=None if checks is None else HealthChecks(**checks),
        )


def _silent(uuid: GpuUuid, function: str) -> GpuReading:
    text = f"it hangs the driver ({function}) and is not asked for now"
    return GpuReading(uuid, None, None, fault="unread", reason=text)


def _info(entry: dict[str, Any]) -> GpuInfo:
    names = set(GpuInfo.__dataclass_fields__)
    values = {name: value for name, value in entry.items() if name in names}
    for name in ("cpus", "device_nodes"):
        values[name] = tuple(values.get(name, ()))
    values["links"] = tuple((GpuUuid(peer), score) for peer, score in values.get("links", ()))
    return replace(GpuInfo(**values), uuid=GpuUuid(entry["uuid"]))


def hanging_orphan(proc: Path = Path("/proc")) -> int | None:
    """A driver process of an earlier daemon that hangs in the kernel: in D, and nobody's child."""
    for entry in os.scandir(proc):
        if not entry.name.isdecimal():
            continue
        try:
            if Path(entry, "comm").read_bytes().strip() != PROCESS_NAME:
                continue
            content = Path(entry, "stat").read_bytes()
            if os.stat(entry.path).st_uid != os.getuid():
                continue
        except OSError:
            continue
        fields = content[content.rindex(b")") + 2 :].split()
        if fields[0] == b"D" and int(fields[1]) == 1:
            return int(entry.name)
    return None


__all__ = ["Child", "NvmlGpus", "hanging_orphan"]
