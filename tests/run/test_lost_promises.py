"""What is told of a start that was promised and is promised no more."""

from __future__ import annotations

import getpass
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpusched_client import Client, JobView
from tests.support.daemon import DaemonProcess, daemon_in, until

ME = getpass.getuser()


def _limit(daemon: DaemonProcess, max_gpus: int) -> None:
    (daemon.place / "config.toml").write_text(f"[limits]\nmax_gpus = {max_gpus}\n")


def _until_it_runs(client: Client, job_id: int) -> None:
    until(lambda: client.job(job_id).state == "RUNNING", "it runs")


def _promised(client: Client) -> JobView:
    """A 4-GPU job behind one that runs on two."""
    busy = client.submit(["sleep", "600"], gpus=2, time_limit="1h", output="/dev/null")
    _until_it_runs(client, busy.id)
    head = client.submit(["sleep", "600"], gpus=4, time_limit="1h", output="/dev/null")
    until(lambda: client.job(head.id).promised_start_s, "the promise")
    return client.job(head.id)


def _promises_of(daemon: DaemonProcess) -> list[tuple[str, str | None]]:
    with closing(sqlite3.connect(daemon.state_dir / "gpuschedd.sqlite3")) as db:
        return db.execute("SELECT outcome, exception FROM promises_v").fetchall()


def _reason_is(client: Client, job: JobView, code: str) -> bool:
    reason = client.job(job.id).reason
    return reason is not None and reason.code == code


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """With four GPUs, and a limit that leaves all of them."""
    (tmp_path / "config.toml").write_text("[limits]\nmax_gpus = 8\n")
    with daemon_in(tmp_path) as daemon:
        yield daemon


def test_a_lost_promise_is_told_with_its_cause(daemon: DaemonProcess) -> None:
    """It is no start any more, takes nothing of a limit, and the GPU goes before the limit."""
    with daemon.client() as client:
        promised = _promised(client)
        client.drain(3, "fan")
        until(lambda: client.job(promised.id).lost_start_s, "the loss")
        lost = client.job(promised.id)
        assert lost.promised_start_s is None
        assert lost.lost_start_s == pytest.approx(promised.promised_start_s, abs=0.01)
        assert lost.lost_promise_cause == f"GPU 3 drained (fan, by {ME})"
        assert _reason_is(client, lost, "GpuUnavailable")
        shown = daemon.run("gq", str(promised.id)).stdout
        assert f"was lost: GPU 3 drained (fan, by {ME})" in shown
        assert "Start:        by " not in shown


def test_a_reload_that_leaves_no_room_ends_the_promise_and_says_so(daemon: DaemonProcess) -> None:
    """In the answer, in the job's history, and in its reason; a limit that leaves room does not."""
    with daemon.client() as client:
        promised = _promised(client)
        _limit(daemon, 6)
        assert daemon.run("gctl", "reload").stdout == "changed limits.max_gpus\n"
        assert client.job(promised.id).promised_start_s is not None
        _limit(daemon, 3)
        assert daemon.run("gctl", "reload").stdout == (
            f"changed limits.max_gpus\nthe promised start of job {promised.id} is lost (config)\n"
        )
        job = client.job(promised.id)
        assert job.promised_start_s is None
        assert job.lost_promise_cause == "the configuration that was read again leaves it no room"
        until(lambda: _reason_is(client, job, "UserLimit"), "the limit")
        assert client.stats()["promises_lost_by_config"] == 1


@pytest.mark.parametrize(
    ("lines", "key", "cause"),
    [
        ("gpus = [0, 1, 2]", "gpus", "leaves it no room"),
        ('[scheduling]\nbackfill = "off"', "scheduling.backfill", "no start is promised"),
        ("[scheduling]\npromise_within = 0", "scheduling.promise_within", "no start is promised"),
        ('[jobs]\nusers = ["nobody"]', "jobs.users", "leaves it no room"),
    ],
)
def test_a_reload_names_the_promise_that_it_ends_whichever_key_it_is(
    tmp_path: Path, lines: str, key: str, cause: str
) -> None:
    """GPUs that are taken away, a mode in which nothing is promised, a user who is barred."""
    with daemon_in(tmp_path) as daemon, daemon.client() as client:
        promised = _promised(client)
        (daemon.place / "config.toml").write_text(f"{lines}\n")
        assert daemon.run("gctl", "reload").stdout == (
            f"changed {key}\nthe promised start of job {promised.id} is lost (config)\n"
        )
        job = client.job(promised.id)
        assert job.promised_start_s is None
        assert cause in (job.lost_promise_cause or "")
        assert client.stats()["promises_lost_by_config"] == 1


def test_a_reload_names_the_promise_that_it_moves(tmp_path: Path) -> None:
    """10 GiB beside the second job until now; with a margin of 8 GiB only after it, 1 h later."""
    with daemon_in(tmp_path, "1x24G") as daemon, daemon.client() as client:
        place: dict[str, Any] = {"vram": "8G", "output": "/dev/null"}
        for limit in ("1h", "2h"):
            busy = client.submit(["sleep", "600"], time_limit=limit, **place)
            _until_it_runs(client, busy.id)
        head = client.submit(["sleep", "600"], **{**place, "vram": "10G"}, time_limit="1h")
        until(lambda: client.job(head.id).promised_start_s, "the promise")
        by_s = client.job(head.id).promised_start_s
        (daemon.place / "config.toml").write_text('[sharing]\nmargin = "8G"\n')
        assert daemon.run("gctl", "reload").stdout == (
            "changed sharing.margin\n"
            f"the promised start of job {head.id} is 60 min later (config)\n"
        )
        assert client.job(head.id).promised_start_s == pytest.approx(by_s, abs=0.01)
        assert _promises_of(daemon) == [("open", "config")]
        (daemon.place / "config.toml").write_text("")
        assert daemon.run("gctl", "reload").stdout == "changed sharing.margin\n"
        until(lambda: _promises_of(daemon) == [("open", None)], "it is on time again")


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ('[scheduling]\nkill_grace = "10min"', "scheduling.kill_grace"),
        ("[scheduling]\nmax_time_limit = 30", "scheduling.max_time_limit"),
        ('[scheduling]\nbackfill = "before-reservation"', "scheduling.backfill"),
        ("[scheduling]\nage_jobs_per_user = 0", "scheduling.age_jobs_per_user"),
    ],
)
def test_a_reload_that_leaves_the_promise_alone_says_nothing_of_it(
    tmp_path: Path, lines: str, key: str
) -> None:
    """What runs keeps what it was started with, and the holder what it was admitted with."""
    with daemon_in(tmp_path) as daemon, daemon.client() as client:
        promised = _promised(client)
        (daemon.place / "config.toml").write_text(f"{lines}\n")
        assert daemon.run("gctl", "reload").stdout == f"changed {key}\n"
        by_s = client.job(promised.id).promised_start_s
        assert by_s == pytest.approx(promised.promised_start_s, abs=0.01)


def test_a_start_with_another_configuration_ends_the_promise_that_it_leaves_no_room(
    daemon: DaemonProcess,
) -> None:
    """As a reload does."""
    with daemon.client() as client:
        promised = _promised(client)
    daemon.stop()
    _limit(daemon, 3)
    daemon.start()
    with daemon.client() as client:
        until(lambda: client.job(promised.id).lost_start_s, "the loss")
        assert client.stats()["promises_lost_by_config"] == 1
