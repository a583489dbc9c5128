"""Fixtures of the client's tests: a fake daemon, a fixed time, golden files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.fake_server import FakeServer, Handler

GOLDEN_DIR = Path(__file__).parent.parent / "golden"
NOW_S = 1_767_204_900.0  # 2025-12-31 18:15:00 UTC


@pytest.fixture
def serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[dict[str, Handler]], FakeServer]]:
    """Starts a fake daemon that clients find."""
    servers: list[FakeServer] = []

    def start(handlers: dict[str, Handler]) -> FakeServer:
        path = tmp_path / "fake.sock"
        monkeypatch.setenv("GPUSCHED_SOCKET", str(path))
        servers.append(FakeServer(path, handlers))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def midnight(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """The new year of 2026 in Nepal, wherever the tests run: no time of UTC's looks right there."""
    monkeypatch.setenv("TZ", "<+0545>-5:45")
    time.tzset()
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    yield NOW_S
    monkeypatch.undo()
    time.tzset()


class Outcome:
    """What a command did: status, stdout, stderr."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def text(self) -> str:
        """All of it, as a golden file keeps it."""
        return f"{self.out}--- stderr\n{self.err}--- status {self.status}\n"


@pytest.fixture
def run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Outcome]:
    """Runs a command in this process."""
    monkeypatch.setenv("COLUMNS", "80")

    def run_command(command: Any, *words: str) -> Outcome:
        status = command.main(list(words), standalone_mode=False)
        captured = capfd.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run_command


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compares a text with its golden file; GPUSCHED_UPDATE_GOLDEN=1 writes the file instead."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN_DIR / f"{name}.txt"
        if os.environ.get("GPUSCHED_UPDATE_GOLDEN") == "1":
            path.write_text(text)
        assert path.exists(), f"{path} is missing; GPUSCHED_UPDATE_GOLDEN=1 writes it"
        assert text == path.read_text()

    return compare
