"""The allocator: how much of what was freed it keeps for the next time.

After thousands of connections, or a start, there is none. And by default it makes a heap of its own
for every thread, of which none uses what another has freed: in a long run each grows to its peak.
"""

from __future__ import annotations

import ctypes
import gc

HEAPS = 2  # the interpreter's lock lets one thread allocate at a time, SQLite's calls aside
_M_ARENA_MAX = -8  # of malloc.h


def bound_heaps() -> None:
    """Let threads share HEAPS heaps. To be called before there is any thread."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, HEAPS)


def give_back() -> None:
    """Blocks; the interpreter's lock is free meanwhile but for the collection of young cycles."""
    gc.collect(1)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
