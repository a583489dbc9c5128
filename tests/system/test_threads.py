"""Pools that go on while no thread can be made."""

from __future__ import annotations

import threading

import pytest

from gpuschedd.system.threads import started_pool


def test_a_pool_takes_work_while_no_thread_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its threads are there before the first piece of work."""
    pool = started_pool(3, "trial")

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    meet = threading.Barrier(3)
    met = [pool.submit(meet.wait, 30) for _ in range(3)]
    assert sorted(each.result(30) for each in met) == [0, 1, 2]
    pool.shutdown()
