"""`gpuschedd selftest --system` in a booted systemd: as a user, with a filter that holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.box import BIN
from tests.support.host import NODES, Host

pytestmark = [pytest.mark.root, pytest.mark.systemd]


@pytest.fixture
def gpu_nodes(host: Host) -> Iterator[list[str]]:
    """Device nodes for the four simulated GPUs; those that can be opened here."""
    for minor, (major, number) in NODES.items():
        host.box.run("mknod", "-m", "666", f"/dev/nvidia{minor}", "c", str(major), str(number))
    look = "for n in 0 1 2 3; do (exec 2>/dev/null; : < /dev/nvidia$n) && echo $n; done; true"
    yield host.box.sh(look, user="alice").split()
    host.box.sh("rm -f /dev/nvidia*")


def selftest(host: Host, *words: str, user: str | None = None) -> tuple[int, dict[str, Any], str]:
    """Exit status, JSON value, stderr."""
    command = (str(BIN / "gpuschedd"), "selftest", "--json", *words)
    done = host.box.run(*command, user=user, check=False, timeout_s=290)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def test_root_tries_the_systems_daemon_as_a_user(host: Host, gpu_nodes: list[str]) -> None:
    """Jobs, files and the foreign process are alice's, and all of it is gone afterwards."""
    status, value, said = selftest(host, "--system", "--as", "alice")
    assert status == 0, (value, said)
    rows = {(row["check"], row["gpu"]): row for row in value["checks"]}
    assert value["daemon"]["mode"] == "system"
    assert [rows["own process", gpu]["result"] for gpu in range(4)] == ["ok"] * 4
    assert " of alice: " in rows["foreign process", 0]["reason"]
    assert rows["out of memory", None]["result"] == "ok"
    with host.client("alice") as client:
        jobs = client.jobs(name="selftest").jobs
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


def test_where_nothing_can_be_opened_by_a_filter_it_is_skipped(host: Host) -> None:
    status, value, _ = selftest(host, "--system", "--as", "bob", user="bob")
    assert status == 0
    (reason,) = {row["reason"] for row in value["checks"] if row["check"] == "device filter"}
    assert reason == "no /dev/nvidia* here"
