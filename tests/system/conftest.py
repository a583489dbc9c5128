"""One box for all tests of the system service: booted once, its jobs ended after each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import logs
from tests.support.box import booted_box, why_not
from tests.support.host import Host


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A booted box with the service installed and running."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    wheels: Path = tmp_path_factory.mktemp("wheels")
    with booted_box() as box:
        yield Host(box).set_up(wheels)


@pytest.fixture
def host(installed: Host) -> Iterator[Host]:
    """The box with its service up and the plain configuration; afterwards no job is left."""
    logs.keep(installed)
    yield installed
    installed.box.run("systemctl", "reset-failed")
    installed.box.run("systemctl", "start", "gpuschedd.socket", "gpuschedd.service")
    installed.reconfigure("")
    installed.end_all()
