"""The child process in which the driver library lives.

The driver may hang, crash or end the process that calls it: then it takes this one along and not
the daemon. It answers one request at a time, as length-prefixed JSON on its first two descriptors,
and dies with its parent. It decides nothing: it reports what the driver says, and why where it says
nothing.

    python -m gpuschedd.gpu.nvidia.child PARENT_PID PAGE_FD
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from gpuschedd.gpu.nvidia.driver import Driver
from gpuschedd.gpu.nvidia.library import PAGE_BYTES, Library

FRAME_BYTES_MAX = 16 * 2**20
LENGTH = struct.Struct(">I")
PROCESS_NAME = b"gpuschedd-nvml"  # 15 bytes at most: the kernel's comm
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


# --- frames -------------------------------------------------------------------------------------


def read_frame(stream: BinaryIO) -> Any:
    """The next message, None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    if length > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {length} bytes; the limit is {FRAME_BYTES_MAX}")
    body = stream.read(length)
    return json.loads(body) if len(body) == length else None


def frame(message: Any) -> bytes:
    """A message with its length before it."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


# --- the process --------------------------------------------------------------------------------


def tie_to_parent(parent: int) -> None:
    """Die when the parent does, also when it did already."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NAME, PROCESS_NAME, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def serve(requests: BinaryIO, replies: BinaryIO, handle: Callable[[Any], Any]) -> None:
    """Answer until the parent closes its end."""
    while True:
        request = read_frame(requests)
        if request is None:
            return
        try:
            replies.write(frame(handle(request)))
            replies.flush()
        except BrokenPipeError:
            return  # nobody waits for this answer


def main() -> None:
    """Set the process up and serve."""
    parent, page_fd = int(sys.argv[1]), int(sys.argv[2])
    tie_to_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to act on
    page = mmap.mmap(page_fd, PAGE_BYTES)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not a reply
    driver = Driver(Library(page))
    serve(os.fdopen(0, "rb"), replies, driver.handle)
    driver.shut_down()
    os._exit(0)  # no destructor of a library may run into one of the driver's threads


if __name__ == "__main__":
    main()
