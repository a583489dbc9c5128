"""Long messages, clients that read nothing, and crowds: order stays, and memory comes back."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgpack

from tests.api.test_server import JOB, call, raw
from tests.support.daemon import DaemonProcess, daemon_in, until

HELD = {**JOB, "hold": True}


def replies_of(connected: socket.socket, count: int) -> dict[int, Any]:
    """So many replies, by msgid."""
    unpacker, found = msgpack.Unpacker(), dict[int, Any]()
    while len(found) < count:
        data = connected.recv(1 << 20)
        assert data, "the connection was closed"
        unpacker.feed(data)
        found |= {message[1]: message for message in unpacker}
    return found


def test_what_follows_a_long_request_does_not_overtake_it(daemon: DaemonProcess) -> None:
    """A thousand jobs are read beside the loop; the cancel behind them finds them all."""
    with raw(daemon) as connected:
        for message in (
            [0, 1, "submit", [{"jobs": [HELD] * 1_000}]],
            [0, 2, "cancel", [{"job_ids": [1, 1_000, 1_001]}]],
            [0, 3, "submit", [{"jobs": [HELD]}]],
            [0, 4, "jobs", [{}]],
        ):
            connected.sendall(msgpack.packb(message))
        found = replies_of(connected, 4)
    assert found[1][3]["job_ids"][-1] == 1_000
    assert [entry["code"] for entry in found[2][3]["outcomes"]] == [None, None, "not_found"]
    assert found[3][3]["job_ids"] == [1_001]


def test_a_long_request_that_is_wrong_is_told_like_a_short_one(daemon: DaemonProcess) -> None:
    with raw(daemon) as connected:
        jobs = [HELD] * 499 + [{**HELD, "gpus": -1}]
        *_, error, _ = call(connected, 0, 1, "submit", [{"jobs": jobs}])
        assert (error["code"], error["data"]["path"]) == ("invalid", "jobs[499].gpus")
        *_, error, _ = call(connected, 0, 2, "hello", [])
        assert error is None


def test_who_reads_nothing_is_asked_nothing_more_and_loses_no_reply(daemon: DaemonProcess) -> None:
    """Its requests wait until it has read; then every one is answered."""
    with daemon.client() as client:
        client.submit_many(client_requests(300))
    with raw(daemon) as connected:
        for msgid in range(60):
            connected.sendall(msgpack.packb([0, msgid, "jobs", [{"limit": 300}]]))
        with daemon.client() as other:
            assert other.hello().protocol == 1
        found = replies_of(connected, 60)
    assert all(len(found[msgid][3]["jobs"]) == 300 for msgid in range(60))


def client_requests(count: int) -> list[Any]:
    from gpusched_client.submission.request import job_request

    return [job_request(["true"], cwd="/", environment={}, hold=True)] * count


def resident_kib(daemon: DaemonProcess) -> int:
    assert daemon.process is not None
    lines = Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def test_memory_that_a_crowd_had_is_given_back(tmp_path: Path) -> None:
    """What is left is less than a third of what it took."""
    limit = "limits.connections=1000"
    with daemon_in(tmp_path, "1x24G", "--set", limit) as daemon:
        before = resident_kib(daemon)
        crowd = []
        for _ in range(800):
            connected = socket.socket(socket.AF_UNIX)
            connected.connect(str(daemon.socket))
            call(connected, 0, 1, "jobs", [{}])
            crowd.append(connected)
        grown = resident_kib(daemon) - before
        assert grown > 10_000
        for connected in crowd:
            connected.close()
        until(lambda: resident_kib(daemon) - before < grown / 3, "it is given back")
