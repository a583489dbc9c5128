"""What the commands say of a real daemon's answers, word by word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import DaemonProcess, daemon_in


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    place: Path = tmp_path_factory.mktemp("words")
    with daemon_in(place, "2x24G") as running:
        yield running


def test_a_held_job_says_once_that_it_is_held(daemon: DaemonProcess) -> None:
    daemon.run("gsub", "--hold", "-g", "0", "-o", "/dev/null", "true")
    assert "Waits for:    Held by its owner\n" in daemon.run("gq", "@").stdout
    assert daemon.run("gctl", "top", "@").stdout.endswith(": first of all, by nice -1000\n")


def test_a_gpu_that_is_not_there_is_named_with_those_that_are(daemon: DaemonProcess) -> None:
    said = daemon.run("gctl", "drain", "9")
    assert said.returncode == 67
    assert said.stderr.startswith("gctl: no GPU is named '9'; known: 0 (GPU-")
