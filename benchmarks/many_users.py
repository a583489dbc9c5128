"""One user against all: what bob waits for while alice floods the daemon.

Boots a systemd of its own (root), installs the service in it and measures bob's calls on a warm
client twice in the same run: alone, and beside alice's 10,000 queued jobs, 5,000 connections (those
that are refused are tried again without pause) and 100 readers that ask for long replies and read
none of them. Prints medians, 99th percentiles and ratios, and how bob's job came to its GPU.

    python -m benchmarks.many_users [--json] [--rounds N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack

from gpusched_client import Client
from tests.support.box import booted_box, why_not
from tests.support.host import SOCKET, USERS, Host, request_of

QUEUED, CONNECTIONS, STALLED = 10_000, 5_000, 100
PAGE, ROWS = 1_000, 20
RATIO_MAX = 10.0
SHORT = ("/bin/sh", "-c", "sleep 2")

Times = dict[str, list[float]]


def _calls(client: Client) -> dict[str, Callable[[], object]]:
    """What bob does: look, ask about himself, submit and take back."""
    held = request_of("bob", "true", hold=True)

    def submit_and_cancel() -> None:
        job_id = client.submit_many([held])[0].id
        client.cancel(job_id)

    return {
        "hello": client.hello,
        "jobs": lambda: client.jobs(users=["bob"], limit=ROWS),
        "queue": lambda: client.queue(limit=ROWS),
        "gpus": client.gpus,
        "submit+cancel": submit_and_cancel,
    }


def _measure(host: Host, rounds: int) -> Times:
    times: Times = {}
    with host.client("bob") as client:
        calls = _calls(client)
        for call in calls.values():
            call()
        for _ in range(rounds):
            for name, call in calls.items():
                began_s = time.perf_counter()
                call()
                times.setdefault(name, []).append(time.perf_counter() - began_s)
    return times


# --- alice ----------------------------------------------------------------------------------------


def queue_up(host: Host, jobs: int = QUEUED) -> None:
    """As many jobs of alice's as she may have; the GPUs run them two seconds each."""
    request = request_of("alice", *SHORT, gpus=1)
    with host.client("alice") as client:
        for _ in range(jobs // PAGE):
            client.submit_many([request] * PAGE)


def _connect(directory: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        connection.connect(f"/proc/self/fd/{directory}/{SOCKET.name}")
    return connection


def _flood(host: Host, connections: int, stalled_readers: int) -> None:
    """In a child: hold what is accepted, try again what is not."""
    directory = os.open(host.box.inside(SOCKET.parent), os.O_PATH | os.O_DIRECTORY)
    os.seteuid(USERS["alice"])
    ask = msgpack.packb([0, 1, "jobs", [{"limit": PAGE}]])
    stalled = [_connect(directory) for _ in range(stalled_readers)]
    held = [_connect(directory) for _ in range(connections - stalled_readers)]
    while True:
        for connection in stalled:
            with contextlib.suppress(OSError):
                connection.send(ask)
        for place, connection in enumerate(held):
            if _is_closed(connection):
                connection.close()
                held[place] = _connect(directory)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def flood(
    host: Host, connections: int = CONNECTIONS, stalled_readers: int = STALLED
) -> Iterator[None]:
    """Alice's, in a process of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            _flood(host, connections, stalled_readers)
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# --- the run --------------------------------------------------------------------------------------


def turn_of_bob(host: Host) -> dict[str, float | int]:
    """A job of bob's among alice's: its place in the queue, and when it has run."""
    with host.client("bob") as client:
        submitted_s = time.monotonic()
        job_id = client.submit_many([request_of("bob", "true", gpus=1)])[0].id
        places = {job.job_id: place for place, job in enumerate(client.queue(limit=PAGE).jobs)}
        if job_id not in places:  # its turn has come already, or it is behind a page of hers
            assert client.job(job_id).state != "PENDING", f"not among the first {PAGE}"
        position = places.get(job_id, 0)
        ended = client.wait(job_id, timeout_s=120)
    assert ended.exit_code == 0
    return {"position": position, "seconds": time.monotonic() - submitted_s}


def run(rounds: int) -> dict[str, object]:
    """The whole run in a box of its own."""
    with tempfile.TemporaryDirectory() as wheels, booted_box() as box:
        host = Host(box).set_up(Path(wheels))
        for _ in range(ROWS):  # so that the same calls show as many rows without her
            host.submit("bob", "true", hold=True)
        alone = _measure(host, rounds)
        queue_up(host)
        queued = _measure(host, rounds)
        with flood(host):
            time.sleep(2.0)  # until all of her connections have been tried
            beside = _measure(host, rounds)
            turn = turn_of_bob(host)
    return {
        "alone": _summary(alone),
        "queued": _summary(queued),
        "beside": _summary(beside),
        "ratio": {
            name: statistics.median(beside[name]) / statistics.median(alone[name]) for name in alone
        },
        "bobs_job": turn,
    }


def _summary(times: Times) -> dict[str, dict[str, float]]:
    """Milliseconds."""
    return {
        name: {
            "p50_ms": 1e3 * statistics.median(values),
            "p99_ms": 1e3 * statistics.quantiles(values, n=100)[98],
            "max_ms": 1e3 * max(values),
        }
        for name, values in times.items()
    }


def main() -> int:
    """Print the figures; the status says whether bob was slowed beyond the promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    found = run(options.rounds)
    print(json.dumps(found, indent=2))
    ratios = found["ratio"]
    assert isinstance(ratios, dict)
    return int(max(ratios.values()) > RATIO_MAX)


if __name__ == "__main__":
    sys.exit(main())
