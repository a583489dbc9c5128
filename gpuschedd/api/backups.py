"""Copies of the database for `gctl backup`: made by the daemon, read by the client in pieces.

The daemon opens no path of the client's: the copy lies in the state directory until it was read to
its end, its connection is gone, or the daemon starts again. One copy at a time.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpusched_client.errors import Conflict, Invalid, NotFound, StorageError
from gpusched_client.wire.admin_messages import BackupRequest, BackupResult
from gpusched_client.wire.limits import BACKUP_PIECE_BYTES
from gpuschedd.store.database import StoreFull, copy_database

DIR_NAME = "backup"


@dataclass(frozen=True, slots=True)
class _Copy:
    backup_id: str
    path: Path
    size_bytes: int


class Backups:
    """The one copy that is being read, if any."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._directory = database.parent / DIR_NAME
        self._copy: _Copy | None = None
        self._making = False
        shutil.rmtree(self._directory, ignore_errors=True)  # of a life before

    async def answer(
        self, request: BackupRequest, on_close: Callable[[Callable[[], None]], None]
    ) -> BackupResult:
        """A piece of the copy; `on_close` tells when its reader is gone."""
        if request.backup_id is None and request.offset:
            raise Invalid(
                f"offset: {request.offset} of no copy; begin without it, or give the backup_id"
            )
        if request.backup_id is None:
            copy = await self._begin(on_close)
        elif self._copy is None or self._copy.backup_id != request.backup_id:
            raise NotFound("that copy is gone; begin again")
        else:
            copy = self._copy
        if request.offset > copy.size_bytes:
            raise Invalid(
                f"offset: {request.offset} lies behind the copy's end; it has {copy.size_bytes} "
                "bytes, so read from 0 to that"
            )
        data = await asyncio.to_thread(_read, copy.path, request.offset)
        if request.offset + len(data) >= copy.size_bytes:
            self._drop(copy.backup_id)
        return BackupResult(
            backup_id=copy.backup_id, size_bytes=copy.size_bytes, offset=request.offset, data=data
        )

    async def _begin(self, on_close: Callable[[Callable[[], None]], None]) -> _Copy:
        if self._making or self._copy is not None:
            raise Conflict("another backup is under way; try again when it is through")
        self._making = True
        backup_id = uuid.uuid4().hex
        is_gone = asyncio.Event()  # the reader, while the copy was made
        on_close(is_gone.set)
        on_close(lambda: self._drop(backup_id))
        making = asyncio.ensure_future(self._made(backup_id, is_gone))
        making.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # or nobody does
        return await asyncio.shield(making)

    async def _made(self, backup_id: str, is_gone: asyncio.Event) -> _Copy:
        """The copy, for its reader. A thread cannot be stopped, so this outlives its reader."""
        path = self._directory / backup_id
        try:
            made = _Copy(backup_id, path, await asyncio.to_thread(self._make, path))
        finally:
            self._making = False
        if is_gone.is_set():
            path.unlink(missing_ok=True)
        else:
            self._copy = made
        return made

    def _make(self, path: Path) -> int:
        """The copy's size. Blocks; the database goes on being written meanwhile."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        try:
            copy_database(self._database, path)
        except (StoreFull, OSError) as error:
            path.unlink(missing_ok=True)
            raise StorageError(f"no copy can be made beside the database: {error}") from error
        return path.stat().st_size

    def _drop(self, backup_id: str) -> None:
        if self._copy is not None and self._copy.backup_id == backup_id:
            self._copy.path.unlink(missing_ok=True)
            self._copy = None


def _read(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), BACKUP_PIECE_BYTES, offset)
