"""What every test may ask for, and which tests run where."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import logs
from tests.support.daemon import SOAK, DaemonProcess, daemon_in

# Thousands of processes are started: each would compile all that it reads. In the environment for
# them, in `sys` for the tests themselves, which are rewritten by pytest.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
sys.dont_write_bytecode = False

# By default an example may take 200 ms: on a busy host one does that only had to wait for its turn.
# `make test` tries the same examples each time, so that what turns red is the change's doing;
# `make soak` looks for new ones.
settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not SOAK,
)
settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say why a test cannot run here, instead of letting it fail."""
    for item in items:
        if item.get_closest_marker("root") and os.getuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root"))
        if item.get_closest_marker("soak") and not SOAK:
            item.add_marker(pytest.mark.skip(reason="long figures: make soak"))
        tool = item.get_closest_marker("tool")
        if tool is not None and shutil.which(tool.args[0]) is None:
            item.add_marker(pytest.mark.skip(reason=f"needs {tool.args[0]}"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before its fixtures start anything: daemons of earlier tests are not this one's."""
    logs.forget_those_that_are_over()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the daemons said beside what the test expected of them."""
    report = yield
    if report.failed:
        report.sections.extend(logs.sections())
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how to have this order again: with -q, nobody else does."""
    seed = terminalreporter.config.getoption("randomly_seed", None)
    if seed is not None:
        terminalreporter.write_line(f"order of the tests: --randomly-seed={seed}")


@pytest.fixture(scope="session")
def is_soak() -> bool:
    """True under `make soak`: the whole figures instead of a tenth."""
    return SOAK


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a job's output goes by default: two tests at a time would write into one file."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon with four simulated GPUs of 24 GiB and a grace of 1 s."""
    with daemon_in(tmp_path, "4x24G", "--set", "scheduling.kill_grace=1.0") as started:
        yield started
