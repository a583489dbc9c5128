"""Processes that stay behind, fork away or ignore signals: none outlives its job."""

from __future__ import annotations

import sys

import pytest

from tests.support.jobs import LEADERLESS, Host, is_alive

REFORKER = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork(): os._exit(0) if os.environ.get("LEAVE") else signal.pause()
os.setsid()
if os.fork(): os._exit(0)
print("up", flush=True)
while True:
    time.sleep(0.01)
    if os.fork(): os._exit(0)
    os.setsid()
"""


@pytest.mark.parametrize("environment", [(), ((b"LEAVE", b"1"),)])
def test_a_reforking_daemon_is_gone_after_the_grace(
    host: Host, environment: tuple[tuple[bytes, bytes], ...]
) -> None:
    argv = (sys.executable, "-I", "-S", "-c", REFORKER)
    job = host.start(*argv, kill_grace_s=0.5, environment=environment)
    host.wait_output(job, b"up")
    host.cancel(job)
    host.wait_exit(job)
    assert host.marked(job) == ()


@pytest.mark.parametrize("place", ["main", "behind"])
def test_a_process_without_its_first_thread_is_ended_like_any(host: Host, place: str) -> None:
    argv = (sys.executable, "-I", "-S", "-c", LEADERLESS, place)
    job = host.start(*argv, kill_grace_s=0.2)
    host.wait_output(job, b"\n")
    host.cancel(job)
    host.wait_exit(job)
    assert not is_alive(int(host.output(job).split()[1]))


def test_a_server_left_behind_is_stopped_with_its_grace(host: Host) -> None:
    server = "trap 'sleep 0.4; echo bye; exit 0' TERM; echo serving; while :; do sleep 0.05; done"
    line = f'setsid sh -c "{server}" & while ! grep -q serving out.*; do :; done; exit 0'
    job = host.sh(line, kill_grace_s=60.0)
    ended = host.wait(job.ended)
    assert (ended.code, ended.cause) == (0, "exit")
    assert job.exit() is None
    end = host.wait_exit(job)
    assert (end.code, end.at_s) == (0, ended.at_s)
    assert end.finished_at_s - end.at_s >= 0.4
    assert b"bye" in host.output(job)


def test_the_rest_is_killed_after_the_grace(host: Host) -> None:
    job = host.sh(
        "(trap '' TERM; echo up; sleep 60) & while ! grep -q up out.*; do :; done; exit 3",
        kill_grace_s=0.3,
    )
    end = host.wait_exit(job)
    assert end.code == 3
    assert end.finished_at_s - end.at_s >= 0.3
    assert host.marked(job) == ()


RACE_TOLERANCE_S = 10.0  # between the last look at the orders and the reap, on a busy host
