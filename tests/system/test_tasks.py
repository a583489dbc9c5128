"""Work that goes on for the daemon's life."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gpuschedd.system.tasks import kept_up


def test_work_that_breaks_begins_again_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Until it comes to its end by itself."""
    begun = 0

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise ValueError(f"time {begun}")

    with caplog.at_level(logging.ERROR):
        asyncio.run(kept_up(work, pause_s=0.0))
    assert begun == 3
    assert [record.message.split(" ")[0] for record in caplog.records] == ["work_failed"] * 2


def test_work_that_is_given_up_stays_so() -> None:
    async def play() -> bool:
        task = asyncio.ensure_future(kept_up(lambda: asyncio.sleep(600)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    assert asyncio.run(play())
