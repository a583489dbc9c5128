"""GPUs under the hardened unit: a stand-in driver's, and those that the configuration drops."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import until
from tests.support.fake_nvml.driver import LIBRARY, FakeDriver, build
from tests.support.host import CONFIG, Host

pytestmark = [pytest.mark.root, pytest.mark.systemd]


def test_gpus_that_vanish_from_the_configuration_let_jobs_wait_and_run_on(host: Host) -> None:
    running = host.sh("alice", "while [ ! -e go ]; do sleep 0.05; done; exit 5", gpus=4)
    host.until_state(running, "RUNNING")
    waiting = host.submit("bob", "true", gpus=4)
    host.reconfigure("gpus = [0, 1]")

    def reason() -> str | None:
        found = host.job(waiting).reason
        return found.text if found is not None and found.code == "GpuUnavailable" else None

    until(reason, "the waiting job names the GPUs that it lacks")
    host.systemctl("restart", "gpuschedd.service")
    assert host.job(running).state == "RUNNING"
    until(reason, "the same after a restart")
    host.box.run("touch", "/home/alice/go")
    assert host.wait(running).exit_code == 5
    host.box.run("rm", "/home/alice/go")
    assert host.job(waiting).state == "PENDING"
    host.reconfigure("")
    assert host.wait(waiting).exit_code == 0


@pytest.fixture
def driver(host: Host, tmp_path: Path) -> Iterator[FakeDriver]:
    """The daemon on a stand-in for NVIDIA's library, in the place of the real one."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc to build the stand-in driver")
    place = host.box.disk("/var/fake-nvml")
    found = FakeDriver(place, build(tmp_path), gpus=2)
    libraries = host.box.disk("/usr/lib") / f"{os.uname().machine}-linux-gnu"
    shutil.copy(found.library, libraries / LIBRARY)
    override = host.box.disk("/etc/systemd/system/gpuschedd.service.d")
    override.mkdir()
    (override / "fake.conf").write_text("[Service]\nEnvironment=FAKE_NVML_DIR=/var/fake-nvml\n")
    host.box.disk(CONFIG).write_text("")
    host.systemctl("daemon-reload")
    host.systemctl("restart", "gpuschedd.service")
    yield found
    shutil.rmtree(override)
    (libraries / LIBRARY).unlink()
    shutil.rmtree(place)
    host.configure("")
    host.systemctl("daemon-reload")
    host.systemctl("restart", "gpuschedd.service")


def test_the_driver_is_asked_from_within_the_sandbox(host: Host, driver: FakeDriver) -> None:
    del driver
    gpus = until(lambda: host.admin(lambda client: client.gpus()), "the driver has answered")
    assert [(gpu.index, gpu.model, gpu.state) for gpu in gpus] == [
        (0, "NVIDIA Fake 48G", "ok"),
        (1, "NVIDIA Fake 48G", "ok"),
    ]
    output = host.run_as("alice", "echo $CUDA_VISIBLE_DEVICES", gpus=2)
    assert output.strip() in ("0,1", ",".join(gpu.uuid for gpu in gpus))
    assert "NVML" in host.box.run("gctl", "status", check=False).stdout
