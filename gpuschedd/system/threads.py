"""Pools whose threads exist from the start, so that work goes on while no thread can be made.

A fork bomb of a user's, or a task limit, may keep new threads away for minutes. A pool that grows
on demand then refuses work with RuntimeError, even while its other threads have nothing to do.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool of so many threads, all of them running. Raises RuntimeError where they cannot be."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    all_there = threading.Event()
    try:
        # A pool makes a thread for each piece of work that finds no idle one.
        waiting = [pool.submit(all_there.wait) for _ in range(threads)]
    finally:
        all_there.set()
    for each in waiting:
        each.result()
    return pool
