"""`gpuschedd selftest` as it is typed: simulated GPUs, usage, who may be whom, no daemon."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.client.fake_server import HELLO, FakeServer, Refusal
from tests.selftest.conftest import IMPATIENT
from tests.support.daemon import BIN, DaemonProcess, daemon_in

ALICE_UID = 65_000


def typed(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "gpuschedd"), *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_on_simulated_gpus_what_needs_no_card_runs_for_real(daemon: DaemonProcess) -> None:
    done = daemon.run("gpuschedd", "selftest", "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    results = {
        (row["check"], row["gpu"]): (row["result"], row["reason"]) for row in value["checks"]
    }
    for check in ("inventory", "sandbox", "peak", "index and UUID", "MIG slices"):
        assert results[check, None] == ("skipped", "simulated GPUs")
    for gpu in range(4):
        assert results["own process", gpu][0] == "ok"
    assert results["foreign process", 0][0] == "ok"
    assert results["out of memory", None] == ("ok", "job 6 asked for 25 GiB")
    assert value["result"] == "ok"
    assert value["daemon"]["gpu_source"] == "simulated"
    assert {"version", "driver", "kernel", "python", "gpus", "took_s"} <= value.keys()


def test_the_table_has_a_line_for_each_check(tmp_path: Path) -> None:
    with daemon_in(tmp_path, "1x24G", "--set", "scheduling.kill_grace=1.0") as daemon:
        done = daemon.run("gpuschedd", "selftest")
    head, columns, *rows = done.stdout.splitlines()
    assert head.startswith("gpuschedd 0.1.0 (user, direct, simulated), ")
    assert columns.split() == ["CHECK", "GPU", "RESULT", "REASON"]
    assert rows[2].split()[:4] == ["own", "process", "0", "ok"]
    assert len(rows) == 9


def test_a_daemon_that_runs_nothing_fails(tmp_path: Path) -> None:
    """Its jobs only hold their GPUs: no program of ours says a word."""
    with daemon_in(tmp_path, "1x24G", "--no-exec", "--set", "scheduling.kill_grace=1.0") as daemon:
        done = daemon.run(sys.executable, "-c", IMPATIENT, "selftest", "--json")
    assert done.returncode == 1
    failed = {
        row["check"] for row in json.loads(done.stdout)["checks"] if row["result"] == "failed"
    }
    assert failed == {"own process", "foreign process", "out of memory"}


def test_jobs_that_a_limit_refuses_are_skipped_with_its_words(tmp_path: Path) -> None:
    """Two jobs at once are one too many; one is not."""
    with daemon_in(tmp_path, "2x24G", "--set", "limits.queued_jobs_all=1") as daemon:
        done = daemon.run("gpuschedd", "selftest", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["check"]: row for row in json.loads(done.stdout)["checks"]}
    assert rows["own process"]["result"] == "skipped"
    assert "limit" in rows["own process"]["reason"]
    assert rows["out of memory"]["result"] == "ok"


def test_without_a_daemon_the_status_is_69(tmp_path: Path) -> None:
    done = typed("selftest", GPUSCHED_SOCKET=str(tmp_path / "none"))
    assert done.returncode == 69
    assert "no gpuschedd is reachable" in done.stderr
    assert done.stdout == ""


def test_a_users_daemon_is_not_the_systems(daemon: DaemonProcess) -> None:
    own = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    done = daemon.run("gpuschedd", "selftest", "--system", "--as", own)
    assert done.returncode == 69
    assert "leave --system out" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("selftest", "--system"), "--system needs --as USER"),
        (("--system", "selftest"), "--system needs --as USER"),
        (("selftest", "--as", "nobody-of-this-name"), "no such user"),
    ],
)
def test_whom_the_jobs_run_as_is_asked_for(words: tuple[str, ...], said: str) -> None:
    done = typed(*words)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_user_whose_jobs_are_not_taken_is_usage_and_no_failed_check(tmp_path: Path) -> None:
    """As root is where a service takes people's jobs alone: said with whom to give instead."""

    def refuse(request: dict[str, Any]) -> None:
        assert request["dry_run"]
        raise Refusal("denied", "jobs of root (uid 0, below UID_MIN) are not taken here")

    own = pwd.getpwuid(os.getuid()).pw_name
    hello = {**HELLO, "mode": "system", "uid": os.getuid(), "user": own}
    socket = tmp_path / "s.sock"
    server = FakeServer(socket, {"hello": lambda _: hello, "submit": refuse})
    done = typed("selftest", "--system", "--as", own, GPUSCHED_SOCKET=str(socket))
    server.close()
    assert (done.returncode, done.stdout) == (2, "")
    assert "jobs of root (uid 0, below UID_MIN) are not taken here" in done.stderr
    assert "give --system --as with the name of a person" in done.stderr


@pytest.mark.root
def test_root_alone_can_be_another_user_and_only_with_the_systems_daemon(
    tmp_path: Path,
) -> None:
    done = typed("selftest", "--as", "nobody", GPUSCHED_SOCKET=str(tmp_path / "none"))
    assert done.returncode == 2
    assert "give --system" in done.stderr
    words = [
        "setpriv",
        f"--reuid={ALICE_UID}",
        "--clear-groups",
        str(BIN / "gpuschedd"),
        "selftest",
    ]
    refused = subprocess.run(
        [*words, "--as", "nobody"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert f"uid {ALICE_UID} can only be itself" in refused.stderr


def test_a_daemon_that_goes_away_in_between_is_said_to(daemon: DaemonProcess) -> None:
    """Its jobs end by themselves; nothing of ours waits for them for ever."""
    words = [sys.executable, "-c", IMPATIENT, "selftest"]
    environment = {**os.environ, "GPUSCHED_SOCKET": str(daemon.socket)}
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as test:
        assert test.stderr is not None
        assert "jobs of" in test.stderr.readline()
        daemon.kill()
        assert test.wait(100) == 69
        assert "no gpuschedd is reachable" in test.stderr.read()
