"""What strace wrote, one whole call a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def joined_calls(log: Path) -> list[str]:
    """`PID call(...) = result`, one a line, also where calls of several processes overlapped.

    Which do is up to the scheduler. One that never returned stays as it began, at the end.
    """
    return list(_joined(log))


def _joined(log: Path) -> Iterator[str]:
    begun: dict[str, str] = {}
    with log.open(errors="replace") as lines:
        for line in lines:
            pid, call = line.rstrip("\n").split(None, 1)
            if call.endswith("<unfinished ...>"):
                begun[pid] = call.removesuffix("<unfinished ...>")
            elif call.startswith("<... "):
                yield f"{pid} {begun.pop(pid, '').rstrip()}{call.split('resumed>', 1)[-1]}"
            else:
                yield f"{pid} {call}"
    yield from (f"{pid} {call}" for pid, call in begun.items())
