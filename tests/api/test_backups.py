"""The copy of the database that a client reads: whole, one at a time, and gone with its reader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusched_client.errors import Conflict
from gpusched_client.wire.admin_messages import BackupRequest
from gpuschedd.api import backups
from gpuschedd.api.backups import Backups
from gpuschedd.store.database import DATABASE_NAME, copy_database
from gpuschedd.store.writer import Store


def test_a_copy_whose_reader_left_while_it_was_made_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the environments of waiting jobs, and each one takes the room of a database."""
    Store.open(tmp_path).close()
    real, may_copy = copy_database, threading.Event()

    def slow(source: Path, target: Path) -> None:
        may_copy.wait(30)
        real(source, target)

    monkeypatch.setattr(backups, "copy_database", slow)

    async def story() -> None:
        backups = Backups(tmp_path / DATABASE_NAME)
        closed: list[Callable[[], None]] = []
        asking = asyncio.ensure_future(backups.answer(BackupRequest(), closed.append))
        await asyncio.sleep(0)
        for callback in closed:
            callback()
        asking.cancel()
        await asyncio.wait({asking})
        with pytest.raises(Conflict):  # the thread is at it still
            await backups.answer(BackupRequest(), closed.append)
        may_copy.set()
        while backups._making:
            await asyncio.sleep(0.005)
        assert list((tmp_path / "backup").iterdir()) == []
        piece = await backups.answer(BackupRequest(), closed.append)
        assert piece.data.startswith(b"SQLite format 3")

    asyncio.run(story())
