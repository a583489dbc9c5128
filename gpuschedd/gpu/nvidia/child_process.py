"""The process in which the driver lives, from outside: its pipes, its pace, its end."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpuschedd.gpu.nvidia.child import FRAME_BYTES_MAX, LENGTH, PROCESS_NAME, frame
from gpuschedd.gpu.nvidia.library import PAGE, PAGE_BYTES
from gpuschedd.supervisor.procfs import process_stat

LOOKS = 8  # at what the driver does, in the time that a GPU may take


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a request may be about one GPU, however many there are.

    `counts_rest`: the same for what is about none of them.
    """

    gpu_s: float
    counts_rest: bool


class Doing(NamedTuple):
    """The call under way: the GPU's index (-1: none), its peer's, the part it is for, its name."""

    gpu: int
    peer: int
    part: str
    function: str

    @property
    def where(self) -> str:
        """ " in nvmlX on GPU 1", for a sentence; empty between two calls."""
        if not self.function:
            return ""
        on = f" on GPU {self.gpu}" if self.gpu >= 0 else ""
        return f" in {self.function}{on}" + (f" with GPU {self.peer}" if self.peer >= 0 else "")


class Stuck(TimeoutError):
    """One GPU blocks the driver (otherwise all are slow)."""


class ChildDown(Exception):
    """The child ended, or was ended because it did not answer."""


class Child:
    """One child process and its two pipes. One request is under way at a time."""

    def __init__(self) -> None:
        self._page_fd = os.memfd_create("gpuschedd-nvml", os.MFD_CLOEXEC)
        os.ftruncate(self._page_fd, PAGE_BYTES)
        self._page = mmap.mmap(self._page_fd, PAGE_BYTES)
        PAGE.pack_into(self._page, 0, 0, -1, -1, b"", b"")  # no call about any GPU yet
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

    def doing(self) -> Doing:
        """The call under way."""
        _, gpu, peer, part, name = PAGE.unpack_from(self._page, 0)
        words = (word.rstrip(b"\0").decode("ascii", "replace") for word in (part, name))
        return Doing(gpu, peer, *words)

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
                asking.exception()  # also where nobody waits for it

    async def _keep_pace(self, asking: asyncio.Future[dict[str, Any]], pace: Pace) -> None:
        """Return when it is done; raise Stuck where it stays with one GPU for too long."""
        about, since_s = self.doing()[:3], time.monotonic()
        while not asking.done():
            await asyncio.wait({asking}, timeout=pace.gpu_s / LOOKS)
            now_s, before = time.monotonic(), about
            about = gpu, _, part = self.doing()[:3]
            if about != before or (gpu < 0 and not part and not pace.counts_rest):
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
        where = self.doing().where
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


def hanging_orphan(proc: Path = Path("/proc")) -> int | None:
    """A driver process of an earlier daemon that hangs in the kernel: in D, and an orphan."""
    for name in os.listdir(proc):
        if not name.isdecimal():
            continue
        try:
            if Path(proc, name, "comm").read_bytes().strip() != PROCESS_NAME:
                continue
            found = process_stat(int(name), proc)
            if Path(proc, name).stat().st_uid != os.getuid():
                continue
        except OSError:
            continue
        if found is not None and found.state == "D" and found.parent == 1:
            return int(name)
    return None
