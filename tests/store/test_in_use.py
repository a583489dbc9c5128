"""The mark beside a database in use, when somebody else has a hand in its directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuschedd.store.in_use import MARK_NAME, Mark, read_mark
from tests.store.test_damage import WAL
from tests.support.daemon import DaemonProcess, clean_up, until


@pytest.mark.parametrize("another", [None, b"something else\n"])
def test_a_mark_that_is_not_ours_any_more_is_made_again_at_a_look(
    tmp_path: Path, another: bytes | None
) -> None:
    """With the number that was reached, and the commits after it reach the new one."""
    path, mark = tmp_path / MARK_NAME, Mark(tmp_path, 3)
    mark.reach(4)
    path.unlink()
    if another is not None:
        path.write_bytes(another)
    mark.look()
    assert read_mark(tmp_path) == 4
    mark.reach(5)
    assert read_mark(tmp_path) == 5
    made = path.stat().st_ino
    mark.look()
    assert path.stat().st_ino == made
    mark.close(complete=False)


def test_a_mark_finds_no_room_at_a_look_and_is_made_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk ends nothing, and what it left half made is in nobody's way."""
    path, mark = tmp_path / MARK_NAME, Mark(tmp_path, 3)
    path.unlink()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        mark.look()
    assert not path.exists()
    mark.reach(4)
    mark.look()
    assert read_mark(tmp_path) == 4
    mark.close(complete=False)


def test_a_mark_whose_place_cannot_be_had_says_so_and_waits_for_it(tmp_path: Path) -> None:
    path, mark = tmp_path / MARK_NAME, Mark(tmp_path, 3)
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        mark.look()
    path.rmdir()
    mark.look()
    assert read_mark(tmp_path) == 3
    mark.close(complete=False)


@pytest.mark.parametrize("name", [MARK_NAME, f"{MARK_NAME}.tmp"])
def test_a_fifo_in_the_place_of_a_mark_is_not_waited_for(tmp_path: Path, name: str) -> None:
    """It says nothing, and gives way."""
    os.mkfifo(tmp_path / name)
    assert read_mark(tmp_path) is None
    mark = Mark(tmp_path, 3)
    assert read_mark(tmp_path) == 3
    mark.close(complete=True)


def test_marks_that_were_removed_under_a_daemon_are_made_again_and_find_a_lost_log(
    tmp_path: Path,
) -> None:
    """A cleaner took them, then the host went down and its log was lost: that is seen."""
    daemon = DaemonProcess(tmp_path, "1x1G").start()
    names = [daemon.state_dir / name for name in (MARK_NAME, "gpuschedd.instance")]
    try:
        with daemon.client() as client:
            client.submit(["true"], hold=True)
            before = names[1].read_bytes()
            for name in names:
                name.unlink()
            until(lambda: all(name.exists() for name in names), "they are made again")
            assert names[1].read_bytes() == before
        daemon.kill()
        wal = (daemon.state_dir / WAL).rename(tmp_path / "wal")
        assert daemon.spawn().wait(30) == 78
        assert "lacks the last" in daemon.log_tail()
        wal.rename(daemon.state_dir / WAL)
    finally:
        clean_up(daemon)
