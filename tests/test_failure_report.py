"""A test that fails shows the log of the daemon it was about."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TESTS = """
from pathlib import Path

import pytest

from tests.support.daemon import daemon_in


def test_before(tmp_path: Path) -> None:
    with daemon_in(tmp_path, "1x8G") as daemon, daemon.client() as client:
        assert client.drain(0, "said before").state == "drained"


def test_that_fails(tmp_path: Path) -> None:
    with daemon_in(tmp_path, "1x8G") as daemon, daemon.client() as client:
        assert client.drain(0, "said meanwhile").state == "on fire"


def test_after() -> None:
    assert False, "it has no daemon"
"""


def _report(place: Path) -> str:
    """What pytest says of the tests above, as `make test` runs them: in a process beside it."""
    (place / "test_three.py").write_text(TESTS)
    (place / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.conftest", "-n", "1"),
            *("-p", "no:randomly", "test_three.py"),  # in this order: one log before the other
        ],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    return done.stdout


def test_the_log_of_its_own_daemon_is_shown_and_no_other(tmp_path: Path) -> None:
    """Also from a worker of pytest-xdist, and not below a test that passed or had no daemon."""
    report = _report(tmp_path)
    _, of_this, of_the_next = report.split("\n____")
    assert "log of the daemon in" in of_this
    assert "gpu_drained" in of_this
    assert "said meanwhile" in of_this.split("log of the daemon in")[1]
    assert "log of the daemon in" not in of_the_next
    assert "said before" not in report
