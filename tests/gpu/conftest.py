"""The stand-in driver for every test here, and a source that looks through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuschedd.config.keys import Nvml
from gpuschedd.gpu.nvidia import source as nvml
from gpuschedd.gpu.nvidia.source import NvmlGpus
from tests.support.daemon import DaemonProcess, clean_up
from tests.support.fake_nvml.driver import FakeDriver, build
from tests.support.gpus import Judge, Source


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled once a session."""
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as an old driver has it."""
    return build(tmp_path_factory.mktemp("nvml-old"), "-DOLD_DRIVER")


@pytest.fixture
def driver(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """One GPU of 48 GiB, found by every process that the test starts."""
    made = FakeDriver(tmp_path / "driver", library)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def gpus(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Source]]:
    """Opens sources over the driver, with short pauses; fields of the settings by name."""
    assert driver.place.exists()
    monkeypatch.setattr(nvml, "INIT_EVERY_S", 0.0)
    monkeypatch.setattr(nvml, "BACKOFF_MIN_S", 0.05)
    monkeypatch.setattr(nvml, "ABSENT_RETRY_S", 0.0)
    with ExitStack() as stack:

        def open_source(
            proc: Path = Path("/proc"), recount_every_s: float = 60.0, **settings: Any
        ) -> Source:
            chosen = replace(Nvml(), **settings)
            made = NvmlGpus(lambda: chosen, proc=proc, recount_every_s=recount_every_s)
            return stack.enter_context(Source(made))

        yield open_source


@pytest.fixture
def judge() -> Judge:
    """A ledger that knows no job yet."""
    return Judge()


@pytest.fixture
def daemon_over(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons without --simulate over a driver; options as on the command line."""
    started: list[DaemonProcess] = []

    def start(driver: FakeDriver, *options: str, wrapper: Sequence[str] = ()) -> DaemonProcess:
        place = tmp_path / f"daemon{len(started)}"
        daemon = DaemonProcess(place, wrapper=wrapper, environment=driver.environment)
        daemon.options = ["--set", "scheduling.kill_grace=1.0", *options]
        started.append(daemon)
        return daemon.start()

    yield start
    for daemon in started:
        clean_up(daemon)
