"""`gpuschedd selftest --system` in a booted systemd: as a user, with a filter that holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.box import BIN
from tests.support.daemon import until
from tests.support.fake_nvml.driver import DRIVER_NOT_LOADED, FakeDriver, build, build_cuda
from tests.support.host import CONFIG, NODES, Host

pytestmark = [pytest.mark.root, pytest.mark.systemd]


@pytest.fixture
def gpu_nodes(host: Host) -> Iterator[list[str]]:
    """Device nodes for the four simulated GPUs; those that can be opened here."""
    for minor, (major, number) in NODES.items():
        host.box.run("mknod", "-m", "666", f"/dev/nvidia{minor}", "c", str(major), str(number))
    look = "for n in 0 1 2 3; do (exec 2>/dev/null; : < /dev/nvidia$n) && echo $n; done; true"
    yield host.box.sh(look, user="alice").split()
    host.box.sh("rm -f /dev/nvidia*")


DRIVER = "/opt/driver"
DROP_IN = "/etc/systemd/system/gpuschedd.service.d/driver.conf"


@pytest.fixture
def driver(host: Host) -> Iterator[FakeDriver]:
    """The service over the stand-in drivers instead of simulated GPUs: two cards with accounts."""
    place = host.box.disk(DRIVER)
    library = build(place)
    build_cuda(place, f'-DPLACE="{DRIVER}"')
    made = FakeDriver(place, library, gpus=2)
    for index in (0, 1):
        made.gpu(index, accounting=1)
    host.box.disk("/etc/ld.so.conf.d/driver.conf").write_text(f"{DRIVER}\n")
    host.box.run("ldconfig")
    drop_in = host.box.disk(DROP_IN)
    drop_in.parent.mkdir(exist_ok=True)
    drop_in.write_text(f"[Service]\nEnvironment=FAKE_NVML_DIR={DRIVER}\n")
    host.box.disk(CONFIG).write_text('[scheduling]\nkill_grace = "1s"\n')
    host.systemctl("daemon-reload")
    host.systemctl("restart", "gpuschedd")
    yield made
    shutil.rmtree(drop_in.parent)
    host.box.run("rm", "-r", "/etc/ld.so.conf.d/driver.conf", DRIVER)
    host.box.run("ldconfig")
    host.configure("")
    host.systemctl("daemon-reload")
    host.systemctl("restart", "gpuschedd")


def selftest(host: Host, *words: str, user: str | None = None) -> tuple[int, dict[str, Any], str]:
    """Exit status, JSON value, stderr."""
    command = (str(BIN / "gpuschedd"), "selftest", "--json", *words)
    done = host.box.run(*command, user=user, check=False, timeout_s=290)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def test_root_tries_the_systems_daemon_as_a_user(host: Host, gpu_nodes: list[str]) -> None:
    """Jobs, files and the foreign process are alice's, and all of it is gone afterwards."""
    with host.client("alice") as client:
        before = {job.id for job in client.jobs(name="selftest").jobs}  # of other tests
    status, value, said = selftest(host, "--system", "--as", "alice")
    assert status == 0, (value, said)
    rows = {(row["check"], row["gpu"]): row for row in value["checks"]}
    assert value["daemon"]["mode"] == "system"
    assert [rows["own process", gpu]["result"] for gpu in range(4)] == ["ok"] * 4
    assert " of alice: " in rows["foreign process", 0]["reason"]
    assert rows["out of memory", None]["result"] == "ok"
    with host.client("alice") as client:
        jobs = [job for job in client.jobs(name="selftest").jobs if job.id not in before]
        assert {job.user for job in jobs} == {"alice"}
        assert all(job.state.is_final for job in jobs)
    assert host.box.sh("ls -d /tmp/gpuschedd-selftest-* 2>/dev/null; true") == ""
    if len(gpu_nodes) < len(NODES):
        pytest.skip(f"of the nodes that stand in for GPUs only {gpu_nodes} can be opened here")
    reasons = [rows["device filter", gpu]["reason"] for gpu in range(4)]
    assert reasons == [f"/dev/nvidia{gpu} alone, of 4" for gpu in range(4)]


def test_a_user_can_be_only_itself_and_root_needs_to_be_told_whom(host: Host) -> None:
    status, value, said = selftest(host, "--system", "--as", "bob", user="alice")
    assert (status, value) == (2, {})
    assert "can only be itself" in said
    status, value, said = selftest(host)
    assert (status, value) == (2, {})
    assert "give --system --as USER" in said


def test_root_itself_is_nobody_whose_jobs_are_taken(host: Host) -> None:
    """Said at once, with what to give instead: no check has failed."""
    status, value, said = selftest(host, "--system", "--as", "root")
    assert (status, value) == (2, {})
    assert "jobs of root (uid 0, below UID_MIN) are not taken here" in said
    assert "give --system --as with the name of a person" in said


def test_where_nothing_can_be_opened_by_a_filter_it_is_skipped(host: Host) -> None:
    status, value, _ = selftest(host, "--system", "--as", "bob", user="bob")
    assert status == 0
    (reason,) = {row["reason"] for row in value["checks"] if row["check"] == "device filter"}
    assert reason == "no /dev/nvidia* here"


def test_over_a_driver_the_unit_reads_its_gpus_and_jobs_have_them(
    host: Host, driver: FakeDriver, gpu_nodes: list[str]
) -> None:
    """Everything at once: the sandbox, PID 1, a user, and what CUDA says in the jobs."""
    del driver
    status, value, said = selftest(host, "--system", "--as", "alice")
    rows = {(row["check"], row["gpu"]): row for row in value["checks"]}
    shown = {key: (row["result"], row["reason"]) for key, row in rows.items()}
    assert status == 0, (shown, said)
    assert shown["sandbox", None] == ("ok", "the unit reads its GPUs (2)")
    for check in ("own process", "peak", "index and UUID"):
        assert [shown[check, gpu][0] for gpu in (0, 1)] == ["ok", "ok"], shown
    assert shown["foreign process", 0][0] == "ok"
    assert shown["out of memory", None][0] == "ok"
    if len(gpu_nodes) == len(NODES):
        assert shown["device filter", 1] == ("ok", "/dev/nvidia1 alone, of 4")


def test_a_unit_that_cannot_read_its_gpus_fails(host: Host, driver: FakeDriver) -> None:
    driver.set(init=DRIVER_NOT_LOADED)
    host.systemctl("restart", "gpuschedd")

    def problem() -> str | None:
        with host.client() as client:
            return client.gpus_result().problem

    until(problem, "the daemon has looked")
    status, value, _ = selftest(host, "--system", "--as", "alice")
    assert status == 1
    (row,) = [row for row in value["checks"] if row["check"] == "sandbox"]
    assert row["result"] == "failed"
    assert "the NVIDIA kernel module is not loaded" in row["reason"]
    others = {row["result"] for row in value["checks"]} - {"failed"}
    assert others == {"skipped"}


def test_a_filter_that_somebody_opened_fails(host: Host, gpu_nodes: list[str]) -> None:
    """A drop-in for all units of jobs, as an administrator may leave one behind."""
    if len(gpu_nodes) < len(NODES):
        pytest.skip(f"of the nodes that stand in for GPUs only {gpu_nodes} can be opened here")
    drop_in = host.box.disk("/etc/systemd/system/gpusched-job-.service.d/open.conf")
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nDevicePolicy=auto\nDeviceAllow=\n")
    host.systemctl("daemon-reload")
    status, value, _ = selftest(host, "--system", "--as", "alice")
    shutil.rmtree(drop_in.parent)
    host.systemctl("daemon-reload")
    assert status == 1
    reasons = [row["reason"] for row in value["checks"] if row["result"] == "failed"]
    assert len(reasons) == 4
    assert "could open /dev/nvidia1, /dev/nvidia2, /dev/nvidia3, not granted" in reasons[0]
