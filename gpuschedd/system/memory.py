"""Memory that a crowd has left behind, given back to the host.

The allocator keeps what was freed for the next time; after thousands of connections there is none.
"""

from __future__ import annotations

import ctypes
import gc


def give_back() -> None:
    """Blocks; the interpreter's lock is free meanwhile but for the collection of young cycles."""
    gc.collect(1)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
