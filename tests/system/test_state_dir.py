"""Directories that are made: whoever may go in also gets there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuschedd.system.state_dir import make_directory


@pytest.fixture(autouse=True)
def _daemon_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize("mode", [0o755, 0o711, 0o700])
def test_those_above_let_through_whom_it_lets_in(tmp_path: Path, mode: int) -> None:
    """And let nobody write beside it."""
    made = tmp_path / "a" / "b" / "c"
    make_directory(made, mode)
    assert mode_of(made) == mode_of(made.parent) == mode_of(made.parent.parent) == mode


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    """An administrator's choice is not ours to widen."""
    tmp_path.chmod(0o750)
    make_directory(tmp_path, 0o755)
    assert mode_of(tmp_path) == 0o750
