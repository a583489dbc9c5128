"""What is told of a start that was promised and is promised no more."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched_client import Client, JobView
from tests.support.daemon import DaemonProcess, daemon_in, until

ME = getpass.getuser()


def _limit(daemon: DaemonProcess, max_gpus: int) -> None:
    (daemon.place / "config.toml").write_text(f"[limits]\nmax_gpus = {max_gpus}\n")


def _promised(client: Client) -> JobView:
    """A 4-GPU job behind one that runs on two."""
    busy = client.submit(["sleep", "600"], gpus=2, time_limit="1h", output="/dev/null")
    until(lambda: client.job(busy.id).state == "RUNNING", "it runs")
    head = client.submit(["sleep", "600"], gpus=4, time_limit="1h", output="/dev/null")
    until(lambda: client.job(head.id).promised_start_s, "the promise")
    return client.job(head.id)


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
        until(lambda: client.job(promised.id).lost_promise_s, "the loss")
        lost = client.job(promised.id)
        assert lost.promised_start_s is None
        assert lost.lost_promise_s == pytest.approx(promised.promised_start_s, abs=0.01)
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
