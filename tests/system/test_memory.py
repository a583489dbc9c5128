"""The allocator's heaps, counted in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gpuschedd.system.memory import HEAPS

THREADS = 2 * HEAPS
# Each thread gets its heap with its first allocation, and they are all there at once.
PROGRAM = f"""
import ctypes, sys, threading
from gpuschedd.system.memory import bound_heaps
if sys.argv[2:]:
    bound_heaps()
libc, all_there = ctypes.CDLL(None), threading.Barrier({THREADS} + 1)
libc.fopen.restype = libc.malloc.restype = ctypes.c_void_p
def allocate():
    libc.malloc(5_000)
    all_there.wait()
for _ in range({THREADS}):
    threading.Thread(target=allocate).start()
all_there.wait()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


def _heaps(place: Path, *bounded: str) -> int:
    found = place / "found.xml"
    subprocess.run([sys.executable, "-c", PROGRAM, str(found), *bounded], check=True)
    return found.read_text().count("<heap nr=")


def test_threads_share_a_few_heaps(tmp_path: Path) -> None:
    """Which else are as many as the threads and the first."""
    assert _heaps(tmp_path, "bounded") == HEAPS
    assert _heaps(tmp_path) > HEAPS
