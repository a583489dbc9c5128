"""One user against all: what bob waits for while alice does what she can.

Boots a systemd of its own (root), installs the service in it and measures bob's connect, submit,
list and cancel: alone, beside alice's queued jobs, and beside all of ATTACKS at once, each in a
process of its own that tries again without pause. Prints medians and 99th percentiles, the daemon's
memory and restarts, and how bob's job came to its GPU. The bar: 250 ms at the 99th percentile,
400 MB, no restart.

    python -m benchmarks.many_users [--json FILE] [--rounds N] [--only ATTACK,..] [--crowded]
        [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack

from benchmarks.report import Report
from tests.support.box import booted_box, why_not
from tests.support.host import SOCKET, USERS, Host, request_of

QUEUED, CONNECTIONS, STALLED = 8_800, 5_000, 64
PAGE, ROWS = 1_000, 20
WATCHERS, BATCH = 100, 1_000
PIPELINED = 16
LARGE_BYTES = 700_000
SUB_UID, SUB_UIDS = 200_000, 16
ATTACK_NICE = 10
CROWDED_POLICY = os.SCHED_RR | os.SCHED_RESET_ON_FORK
SHORT = ("/bin/sh", "-c", "sleep 2")
P99_MS_MAX, RSS_MB_MAX = 250.0, 400.0

Times = dict[str, list[float]]


def _measure(host: Host, rounds: int) -> Times:
    """Bob's calls; a new connection each round."""
    times: Times = {}
    held = request_of("bob", "true", hold=True)

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began_s = time.perf_counter()
        found = call()
        times.setdefault(name, []).append(time.perf_counter() - began_s)
        return found

    for _ in range(rounds):
        began_s = time.perf_counter()
        with host.client("bob") as client:
            client.hello()
            times.setdefault("connect", []).append(time.perf_counter() - began_s)
            job_id = timed("submit", lambda: client.submit_many([held])[0].id)
            timed("list", lambda: client.jobs(users=["bob"], limit=ROWS))
            timed("queue", lambda: client.queue(limit=ROWS))
            timed("cancel", lambda: client.cancel(job_id))  # noqa: B023
    return times


# --- alice ----------------------------------------------------------------------------------------


def queue_up(host: Host, jobs: int = QUEUED) -> None:
    """As many jobs of alice's as she may have; the GPUs run them two seconds each."""
    request = request_of("alice", *SHORT, gpus=1)
    with host.client("alice") as client:
        for begin in range(0, jobs, PAGE):
            client.submit_many([request] * min(PAGE, jobs - begin))


class Raw:
    """A connection of alice's that asks anew whenever it was closed."""

    def __init__(self, directory: int) -> None:
        self.directory = directory
        self._connected = self._connect()
        self._unpacker = msgpack.Unpacker()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(5)
        with contextlib.suppress(OSError):
            connection.connect(f"/proc/self/fd/{self.directory}/{SOCKET.name}")
        return connection

    def ask(self, method: str, *many: dict[str, Any]) -> list[Any]:
        """The results of several requests sent at once; None for an error. [] where it was cut."""
        data = b"".join(msgpack.packb([0, at, method, [each]]) for at, each in enumerate(many))
        results: list[Any] = []
        try:
            self._connected.sendall(data)
            while len(results) < len(many):
                received = self._connected.recv(1 << 20)
                if not received:
                    raise ConnectionResetError
                self._unpacker.feed(received)
                results += [message[3] for message in self._unpacker if message[0] == 1]
        except OSError:
            self._connected.close()
            time.sleep(0.05)
            self._connected, self._unpacker = self._connect(), msgpack.Unpacker()
            return []
        return results

    def watch(self) -> socket.socket:
        """Ask for events; what comes is the caller's to read or not."""
        with contextlib.suppress(OSError):
            self._connected.sendall(msgpack.packb([0, 0, "watch", [{"since": 0}]]))
        return self._connected


JOB = {"argv": ["true"], "cwd": "/", "environment": {}, "gpus": 1, "output": "/dev/null"}


def _own_ids(raw: Raw, state: str) -> list[int]:
    found = raw.ask("jobs", {"users": ["alice"], "states": [state], "limit": PAGE})
    return [job["job_id"] for job in found[0]["jobs"]] if found and found[0] else []


def _connections(directory: int) -> None:
    """More than she may have; those that are refused are tried again."""
    held = [_connect_now(directory) for _ in range(CONNECTIONS)]
    while True:
        for place, connection in enumerate(held):
            if _is_closed(connection):
                connection.close()
                held[place] = _connect_now(directory)


def _connect_now(directory: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        connection.connect(f"/proc/self/fd/{directory}/{SOCKET.name}")
    return connection


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _stalled_readers(directory: int) -> None:
    """Long replies that nobody reads."""
    ask = msgpack.packb([0, 1, "jobs", [{"limit": PAGE}]])
    stalled = [_connect_now(directory) for _ in range(STALLED)]
    while True:
        for place, connection in enumerate(stalled):
            try:
                connection.send(ask)
            except BlockingIOError:
                continue
            except OSError:
                connection.close()
                stalled[place] = _connect_now(directory)
        time.sleep(0.001)


def _watchers(directory: int) -> None:
    """Half of them read."""
    connected = [Raw(directory).watch() for _ in range(WATCHERS)]
    for connection in connected:
        connection.setblocking(False)
    while True:
        for connection in connected[: WATCHERS // 2]:
            with contextlib.suppress(OSError):
                connection.recv(1 << 20)
        time.sleep(0.005)


def _batches(directory: int) -> None:
    """A thousand jobs, and back."""
    raw = Raw(directory)
    while True:
        for result in raw.ask("submit", {"jobs": [{**JOB, "hold": True}] * BATCH}):
            if result:
                raw.ask("cancel", {"job_ids": result["job_ids"]})


def _large_payloads(directory: int) -> None:
    """Submit and cancel with as much as a request may hold."""
    raw = Raw(directory)
    while True:
        script = b"#!/bin/sh\n#" + random.randbytes(LARGE_BYTES // 2).hex().encode()
        job = {"script": script, "cwd": "/", "environment": {}, "gpus": 0, "hold": True}
        for result in raw.ask("submit", {"jobs": [job]}):
            if result:
                raw.ask("cancel", {"job_ids": result["job_ids"]})


def _dry_runs(directory: int) -> None:
    raw = Raw(directory)
    while True:
        raw.ask("submit", *[{"jobs": [JOB] * BATCH, "dry_run": True}] * PIPELINED)


def _tops(directory: int) -> None:
    """One job after the other before all of hers."""
    raw = Raw(directory)
    while True:
        ids = _own_ids(raw, "PENDING")[-PIPELINED:]
        raw.ask("top", *({"job_id": job_id} for job_id in ids))


def _same_ids(directory: int) -> None:
    """One id a thousand times, to be changed and to be shown."""
    raw = Raw(directory)
    while True:
        for job_id in _own_ids(raw, "RUNNING")[:1]:
            raw.ask("update", {"job_ids": [job_id] * PAGE, "time_limit_s": 7_200})
            raw.ask("wait", {"job_ids": [job_id] * PAGE, "timeout_s": 0})


def _explanations(directory: int) -> None:
    """Why each of hers waits, and the end of the queue."""
    raw = Raw(directory)
    while True:
        ids = _own_ids(raw, "PENDING")[-PIPELINED:]
        raw.ask("job", *({"job_id": job_id} for job_id in ids))
        raw.ask("queue", *({"after": job_id} for job_id in ids[:4]))


def _sub_uids(directory: int) -> None:
    """As uids of /etc/subuid, which she may take on in a user namespace."""
    held: list[socket.socket] = []
    hello = msgpack.packb([0, 1, "jobs", [{"limit": ROWS}]])
    while True:
        for uid in range(SUB_UID, SUB_UID + SUB_UIDS):
            os.seteuid(0)
            os.seteuid(uid)
            held += [_connect_now(directory) for _ in range(16)]
        for connection in held:
            with contextlib.suppress(OSError):
                connection.send(hello)
        held = [connection for connection in held if not _is_closed(connection)][-PAGE:]


#: What alice does, each in a process of its own; the last one takes what connections are left.
ATTACKS: dict[str, Callable[[int], None]] = {
    "batches": _batches,
    "watchers": _watchers,
    "large": _large_payloads,
    "dry_runs": _dry_runs,
    "tops": _tops,
    "same_ids": _same_ids,
    "explanations": _explanations,
    "stalled": _stalled_readers,
    "sub_uids": _sub_uids,
    "connections": _connections,
}


def _begin(host: Host, attack: Callable[[int], None]) -> int:
    """The pid of a process that does it as alice until it is killed."""
    directory = os.open(host.box.inside(SOCKET.parent), os.O_PATH | os.O_DIRECTORY)
    pid = os.fork()
    if pid == 0:
        try:
            # It is the daemon that is measured, not who of them gets the processor.
            os.setpriority(os.PRIO_PROCESS, 0, ATTACK_NICE)
            os.seteuid(USERS["alice"])
            attack(directory)
        finally:
            os._exit(1)
    os.close(directory)
    return pid


@contextlib.contextmanager
def flood(host: Host, names: Sequence[str] = tuple(ATTACKS)) -> Iterator[None]:
    """All of these at once, while the block lasts; from one session of alice's, not bob's."""
    leader = os.fork()
    if leader == 0:
        try:
            os.setsid()
            with contextlib.suppress(OSError):  # of the session, where the kernel goes by sessions
                Path("/proc/self/autogroup").write_text(str(ATTACK_NICE))
            for name in names:
                _begin(host, ATTACKS[name])
                time.sleep(0.2)
            os.wait()
        finally:
            os._exit(1)
    try:
        time.sleep(0.2 * len(names))
        yield
        assert os.waitpid(leader, os.WNOHANG) == (0, 0), "an attack ended by itself"
    finally:
        os.killpg(leader, signal.SIGKILL)
        os.waitpid(leader, 0)


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


class Memory(threading.Thread):
    """The largest resident set of a process while it is watched, in MB."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._status = Path(f"/proc/{pid}/status")
        self._over = threading.Event()
        self.peak_mb = 0.0

    def run(self) -> None:
        """Look often."""
        while not self._over.wait(0.1):
            self.peak_mb = max(self.peak_mb, self.now_mb())

    def now_mb(self) -> float:
        """As of now; 0.0 where it is gone."""
        with contextlib.suppress(OSError):
            for line in self._status.read_text().splitlines():
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) / 1024
        return 0.0

    def stop(self) -> float:
        """What it was at most."""
        self._over.set()
        self.join()
        return self.peak_mb


def _go_before_others(pid: int) -> None:
    """The process and its threads, and this one, which is bob."""
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setscheduler(int(task), CROWDED_POLICY, os.sched_param(1))
    os.sched_setscheduler(0, CROWDED_POLICY, os.sched_param(1))


def run(rounds: int, names: Sequence[str], *, crowded: bool) -> dict[str, Any]:
    """The whole run in a box of its own."""
    with tempfile.TemporaryDirectory() as wheels, booted_box() as box:
        host = Host(box).set_up(Path(wheels))
        for _ in range(ROWS):  # so that the same calls show as many rows without her
            host.submit("bob", "true", hold=True)
        daemon = host.outer_pid(host.daemon_pid())
        if crowded:
            _go_before_others(daemon)
        memory = Memory(daemon)
        memory.start()
        began_mb = memory.now_mb()
        alone = _measure(host, rounds)
        queue_up(host)
        queued = _measure(host, rounds)
        with flood(host, names):
            time.sleep(2.0)  # until all of her connections have been tried
            beside = _measure(host, rounds)
            turn = turn_of_bob(host)
        peak_mb = memory.stop()
        time.sleep(5.0)
        left_mb = memory.now_mb()
        restarts = int(host.show("gpuschedd.service", "NRestarts"))
        log = host.journal()
    return {
        "alone": _summary(alone),
        "queued": _summary(queued),
        "beside": _summary(beside),
        "bobs_job": turn,
        "memory_mb": {"began": began_mb, "peak": peak_mb, "left": left_mb},
        "restarts": restarts,
        "bugs": log.count("Traceback"),
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


def _report(found: dict[str, Any]) -> Report:
    """The section: of each call its median and 99th percentile, which is what has a bar."""
    report = Report("many_users", "What bob's calls take: alone, beside alice's queue, beside all.")
    for name, calls in found["beside"].items():
        for when in ("alone", "queued"):
            figures = found[when][name]
            report.figure(f"{name}, {when}: median", "ms", [figures["p50_ms"]])
            report.figure(f"{name}, {when}: 99th percentile", "ms", [figures["p99_ms"]])
        report.figure(f"{name}, beside all: median", "ms", [calls["p50_ms"]])
        report.figure(
            f"{name}, beside all: 99th percentile", "ms", [calls["p99_ms"]], at_most=P99_MS_MAX
        )
    for when, memory in found["memory_mb"].items():
        most = RSS_MB_MAX if when == "peak" else None
        report.figure(f"memory of the daemon, {when}", "MB", [memory], at_most=most)
    report.figure("restarts", "restarts", [found["restarts"]], at_most=0)
    return report


def main() -> int:
    """Print the figures; the status says whether the bar holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=",".join(ATTACKS))
    parser.add_argument("--crowded", action="store_true", help="before the machine's other work")
    parser.add_argument("--write", action="store_true", help="rewrite the section of README.md")
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    found = run(options.rounds, options.only.split(","), crowded=options.crowded)
    text = json.dumps(found, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    if options.write:
        _report(found).finish(write=True)
    slowest_ms = max(calls["p99_ms"] for calls in found["beside"].values())
    is_within = slowest_ms <= P99_MS_MAX and found["memory_mb"]["peak"] <= RSS_MB_MAX
    return int(not is_within or found["restarts"] > 0)


if __name__ == "__main__":
    sys.exit(main())
