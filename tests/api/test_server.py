"""The socket from outside: any MessagePack-RPC client works, and nobody can hurt the others."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from gpusched_client.wire.catalog import METHODS
from gpusched_client.wire.job_messages import Outcome, TopResult
from gpusched_client.wire.submit_messages import SubmitResult
from gpuschedd.api import methods
from gpuschedd.api.limits import LINGER_S, Connections, RequestBudget
from gpuschedd.api.registry import unhandled
from gpuschedd.api.server import Server
from tests.support.daemon import DaemonProcess, until

JOB = {"argv": ["true"], "cwd": "/", "environment": {}, "gpus": 0, "output": "/dev/null"}


@contextmanager
def raw(daemon: DaemonProcess) -> Iterator[socket.socket]:
    """A socket and nothing more."""
    with socket.socket(socket.AF_UNIX) as connected:
        connected.settimeout(90)
        connected.connect(str(daemon.socket))
        yield connected


def call(connected: socket.socket, *message: Any) -> Any:
    """Send one message, read one."""
    connected.sendall(msgpack.packb(list(message)))
    return read(connected)


def read(connected: socket.socket) -> Any:
    """The next message; None at the end of the stream."""
    unpacker = msgpack.Unpacker()
    while True:
        data = connected.recv(65536)
        if not data:
            return None
        unpacker.feed(data)
        for value in unpacker:
            return value


def test_a_throwaway_client_of_socket_and_msgpack_runs_a_job(daemon: DaemonProcess) -> None:
    """Nothing but the published protocol is needed."""
    with raw(daemon) as connected:
        kind, msgid, error, result = call(connected, 0, 7, "submit", [{"jobs": [JOB]}])
        assert (kind, msgid, error) == (1, 7, None)
        (job_id,) = result["job_ids"]
        *_, error, result = call(connected, 0, 8, "wait", [{"job_ids": [job_id]}])
        assert error is None
        assert result["jobs"][0]["state"] == "COMPLETED"
        *_, error, result = call(connected, 0, 9, "hello", [])
        assert result["uid"] == os.getuid()


def test_a_request_needs_no_more_than_a_command_and_where(daemon: DaemonProcess) -> None:
    """A client of few lines sends no environment: the job has what the daemon gives it."""
    argv = ["sh", "-c", "env | cut -d= -f1 | sort; ls / >/dev/null"]
    with raw(daemon) as connected:
        submitted = call(
            connected, 0, 1, "submit", [{"jobs": [{"argv": argv, "cwd": str(daemon.work_dir)}]}]
        )
        (job_id,) = submitted[3]["job_ids"]
        ended = call(connected, 0, 2, "wait", [{"job_ids": [job_id]}])
    assert ended[3]["jobs"][0]["exit_code"] == 0
    names = (daemon.work_dir / f"gsub-{job_id}.out").read_text().split()
    assert {"CUDA_VISIBLE_DEVICES", "GPUSCHED_JOB_ID"} <= set(names)


def test_every_method_has_a_handler() -> None:
    """What the wire declares, the daemon answers."""
    methods.load()
    assert unhandled(METHODS.values()) == []


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"gpus": True}, "jobs[0].gpus"),
        ({"gpus": -1}, "jobs[0].gpus"),
        ({"vram_bytes": 1.5}, "jobs[0].vram_bytes"),
        ({"time_limit_s": float("nan")}, "jobs[0].time_limit_s"),
        ({"uid": 0}, "jobs[0].uid"),
        ({"user": "root"}, "jobs[0].user"),
        ({"name": "a\0b"}, "jobs[0].name"),
        ({"nice": 2**63}, "jobs[0].nice"),
        ({"environment": {"A=B": "c"}}, "jobs[0].environment"),
        ({"cwd": "relative"}, "jobs[0].cwd"),
    ],
)
def test_a_bad_field_is_invalid_with_its_path(
    daemon: DaemonProcess, change: dict[str, Any], path: str
) -> None:
    """Unknown fields, wrong types, out of range: each names the field, and nothing is stored."""
    with raw(daemon) as connected:
        *_, error, result = call(connected, 0, 1, "submit", [{"jobs": [{**JOB, **change}]}])
        assert result is None
        assert error["code"] == "invalid"
        assert error["data"]["path"] == path
        *_, result = call(connected, 0, 2, "jobs", [])
        assert result["total"] == 0


@pytest.mark.parametrize("user", [20 * "9", str(2**63), 256 * "9", "\u0661", "\u00b2"])
def test_a_number_that_is_nobody_s_finds_no_job(daemon: DaemonProcess, user: str) -> None:
    """A uid has 32 bits, and the books hold no number beyond 63."""
    with raw(daemon) as connected:
        *_, error, result = call(connected, 0, 1, "jobs", [{"users": [user]}])
        assert error is None
        assert result == {"jobs": [], "total": 0}


TWICE = b"\x82" + 2 * (msgpack.packb("jobs") + msgpack.packb([JOB]))
TWICE_WITHIN = b"\x81" + msgpack.packb("jobs") + b"\x91\x82" + 2 * msgpack.packb("gpus") * 2


@pytest.mark.parametrize(
    ("params", "path"),
    [
        (b"\x91" + TWICE, ""),
        (b"\x91" + TWICE_WITHIN, "jobs[0]"),
        (msgpack.packb([msgpack.ExtType(5, b"x")]), ""),
        (msgpack.packb([{1: 2}]), ""),
        (msgpack.packb([None]), ""),
        (msgpack.packb([7]), ""),
        (msgpack.packb(["text"]), ""),
        (msgpack.packb([[JOB]]), ""),
        (msgpack.packb([{}, {}]), "params"),
        (msgpack.packb({}), "params"),
    ],
)
def test_parameters_that_are_no_sound_map_are_answered_as_invalid(
    daemon: DaemonProcess, params: bytes, path: str
) -> None:
    """The reply says so under the request's own msgid, and the connection goes on."""
    with raw(daemon) as connected:
        connected.sendall(b"\x94\x00\x05" + msgpack.packb("submit") + params)
        kind, msgid, error, _ = read(connected)
        assert (kind, msgid, error["code"], error["data"]["path"]) == (1, 5, "invalid", path)
        *_, error, _ = call(connected, 0, 6, "hello", [])
        assert error is None


def test_a_message_that_is_too_large_is_refused_and_the_daemon_goes_on(
    daemon: DaemonProcess,
) -> None:
    """2 MiB in one request."""
    with raw(daemon) as connected:
        big = {**JOB, "environment": {"A": "x" * 2_000_000}}
        *_, error, _ = call(connected, 0, 1, "submit", [{"jobs": [big]}])
        assert error["code"] == "too_large"
    with daemon.client() as client:
        client.hello()


def test_pipelined_requests_of_one_connection_take_effect_in_order(daemon: DaemonProcess) -> None:
    """Submit, cancel, submit, sent without waiting: the cancel finds the first job only."""
    with raw(daemon) as connected:
        held = {**JOB, "hold": True}
        stream = b"".join(
            msgpack.packb(message)
            for message in (
                [0, 1, "submit", [{"jobs": [held]}]],
                [0, 2, "cancel", [{"job_ids": [1, 2]}]],
                [0, 3, "submit", [{"jobs": [held]}]],
            )
        )
        connected.sendall(stream)
        replies: dict[int, Any] = {}
        unpacker = msgpack.Unpacker()
        while len(replies) < 3:
            unpacker.feed(connected.recv(65536))
            replies |= {reply[1]: reply for reply in unpacker}
        outcomes = replies[2][3]["outcomes"]
        assert [entry["code"] for entry in outcomes] == [None, "not_found"]
        assert replies[3][3]["job_ids"] == [2]


def test_a_cancel_right_behind_a_long_submission_finds_its_jobs(daemon: DaemonProcess) -> None:
    """Reading 300 jobs takes longer than reading the cancel that came with them."""
    submit = [0, 1, "submit", [{"jobs": [{**JOB, "hold": True}] * 300}]]
    with raw(daemon) as connected:
        connected.sendall(
            msgpack.packb(submit) + msgpack.packb([0, 2, "cancel", [{"job_ids": [300]}]])
        )
        connected.shutdown(socket.SHUT_WR)
        replies = all_of(connected)
    assert replies[1][3]["job_ids"] == list(range(1, 301))
    assert [entry["code"] for entry in replies[2][3]["outcomes"]] == [None]


class InOrder:
    """Writes down how many jobs each submission had, as it comes."""

    def __init__(self) -> None:
        self.came: list[int] = []

    async def handle(self, _: object, request: Any) -> SubmitResult:
        self.came.append(len(request.jobs))
        return SubmitResult(job_ids=())


@pytest.mark.parametrize("lengths", list(itertools.product((1, 300), repeat=3)))
def test_long_and_short_requests_in_one_write_come_in_order(
    tmp_path: Path, lengths: tuple[int, ...]
) -> None:
    handlers: Any = InOrder()

    async def ask() -> None:
        server = Server(handlers, Connections(9, 99), RequestBudget(1_000.0, is_shared=False))
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(tmp_path / "s"))
            server.listen(listening)
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            writer.write(
                b"".join(
                    msgpack.packb([0, n, "submit", [{"jobs": [JOB] * (length + n)}]])
                    for n, length in enumerate(lengths)
                )
            )
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 30)
            writer.close()
            await server.close()

    asyncio.run(ask())
    assert handlers.came == [length + n for n, length in enumerate(lengths)]


def all_of(connected: socket.socket) -> dict[int | None, Any]:
    """Every message up to the end of the stream, by msgid."""
    unpacker = msgpack.Unpacker()
    while data := connected.recv(65536):
        unpacker.feed(data)
    return {message[1]: message for message in unpacker}


def test_what_was_asked_before_a_broken_message_is_answered(daemon: DaemonProcess) -> None:
    """An acknowledgement is owed for a job that was taken, whatever came behind it."""
    with raw(daemon) as connected:
        held = {**JOB, "hold": True}
        connected.sendall(msgpack.packb([0, 1, "submit", [{"jobs": [held]}]]) + b"\xc1")
        replies = all_of(connected)
    assert replies[1][3]["job_ids"] == [1]
    assert replies[None][2]["code"] == "invalid"
    assert "Traceback" not in daemon.log.read_text()


class Slow:
    """Stands for handlers whose answers wait for the disk."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def handle(self, *_: object) -> SubmitResult:
        await self.may_answer.wait()
        return SubmitResult(job_ids=(7,))


def test_it_is_answered_also_where_the_disk_takes_its_time(tmp_path: Path) -> None:
    """The commit takes longer than the connection lingers for its error to be read."""
    submit = msgpack.packb([0, 1, "submit", [{"jobs": [JOB]}]])

    async def told() -> bytes:
        handlers: Any = Slow()
        budget = RequestBudget(1_000.0, is_shared=False)
        server = Server(handlers, Connections(9, 99), budget)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(tmp_path / "s"))
            server.listen(listening)
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            writer.write(submit + b"\xc1")
            said = await reader.read(65536)  # the error: from now on it lingers, or already did
            asyncio.get_running_loop().call_later(1.5 * LINGER_S, handlers.may_answer.set)
            said += await reader.read()
            writer.close()
            await server.close()
        return said

    unpacker = msgpack.Unpacker()
    unpacker.feed(asyncio.run(told()))
    replies = {message[1]: message for message in unpacker}
    assert replies[None][2]["code"] == "invalid"
    assert replies[1][3]["job_ids"] == [7]


class Finishing:
    """Writes down the methods that are taken, and those that come to their end."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.taken: list[str] = []
        self.ended: list[str] = []

    async def handle(self, _: object, request: Any) -> TopResult:
        self.taken.append(request.method)
        if request.method != "gpus":
            await self.may_end.wait()
        self.ended.append(request.method)
        return TopResult(Outcome(job_id=1))


@pytest.mark.parametrize("closes", [False, True])
def test_what_changes_something_is_done_to_its_end_when_the_client_leaves(
    tmp_path: Path, closes: bool
) -> None:
    """And so put on record, unless the server closes meanwhile; what only reads is dropped."""
    handlers: Any = Finishing()
    asked = [("top", [{"job_id": 1}]), ("job", [{"job_id": 1}]), ("gpus", [])]

    async def leave() -> None:
        server = Server(handlers, Connections(9, 99), RequestBudget(1_000.0, is_shared=False))
        with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as client:
            listening.bind(str(tmp_path / "s"))
            server.listen(listening)
            client.connect(str(tmp_path / "s"))
            client.sendall(
                b"".join(msgpack.packb([0, n, *call]) for n, call in enumerate(asked, start=1))
            )
            while handlers.ended != ["gpus"]:
                await asyncio.sleep(0)
            await asyncio.get_running_loop().run_in_executor(
                None, lambda: client.recv(1, socket.MSG_PEEK)
            )
            client.close()  # with the answer unread: a reset, not the end of what it asks
            while server.open:
                await asyncio.sleep(0)
            under_way = tuple(server.finishing)
            if closes:
                await server.close()
            handlers.may_end.set()
            await asyncio.wait(under_way)
            assert not server.finishing
            await server.close()

    asyncio.run(leave())
    assert handlers.taken == ["top", "job", "gpus"]
    assert handlers.ended == (["gpus"] if closes else ["gpus", "top"])


class Prompt:
    """Answers in the order of the turns it gets; writes down who was answered."""

    def __init__(self) -> None:
        self.answered: list[object] = []

    async def handle(self, connection: object, *_: object) -> SubmitResult:
        await asyncio.sleep(0)
        self.answered.append(connection)
        return SubmitResult(job_ids=())


class Charges(RequestBudget):
    """A budget that counts what was charged."""

    charged = 0.0

    def charge(self, uid: int, cost: float) -> None:
        self.charged += cost
        super().charge(uid, cost)


def _busy_and_other(place: Path, flood: bytes) -> tuple[Prompt, float, float]:
    """One connection sends a flood, then another asks once: the order of answers, and what was
    charged when the other was answered and in the end.
    """
    handlers: Any = Prompt()
    budget = Charges(1_000.0, is_shared=False)

    async def ask() -> float:
        server = Server(handlers, Connections(9, 99), budget)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(place / "s"))
            server.listen(listening)
            busy, to_busy = await asyncio.open_unix_connection(place / "s")
            to_busy.write(flood)
            other, to_other = await asyncio.open_unix_connection(place / "s")
            to_other.write(msgpack.packb([0, 1, "hello", []]))
            assert await other.read(65536)
            charged_then = budget.charged
            to_busy.write_eof()
            await busy.read()
            to_busy.close()
            to_other.close()
            await server.close()
        return charged_then

    charged_then = asyncio.run(ask())
    return handlers, charged_then, budget.charged


def test_a_flood_that_asks_nothing_has_its_turns_as_others_have(tmp_path: Path) -> None:
    """Notifications get no answer, so no limit on open requests holds them; they cost time."""
    _, then, at_last = _busy_and_other(tmp_path, 60_000 * msgpack.packb([2, "a", []]))
    assert then < 10_000
    assert at_last == 60_000 + 1 + 2  # notifications, the request, and two connections


def test_a_busy_connection_leaves_room_for_the_same_user_s_others(tmp_path: Path) -> None:
    """The one that has waited longest is next, not whoever asks most."""
    asked = b"".join(msgpack.packb([0, n, "hello", []]) for n in range(5_000))
    handlers, _, _ = _busy_and_other(tmp_path, asked)
    (other,) = [who for who in handlers.answered if who is not handlers.answered[0]]
    assert len(handlers.answered) == 5_001
    assert handlers.answered.index(other) < 100


def test_all_that_was_asked_before_a_half_close_is_answered(daemon: DaemonProcess) -> None:
    """More requests than are taken at once, then no more: all replies, then the end."""
    with raw(daemon) as connected:
        connected.sendall(b"".join(msgpack.packb([0, n, "hello", []]) for n in range(300)))
        connected.shutdown(socket.SHUT_WR)
        began_s = time.monotonic()
        assert all_of(connected).keys() == set(range(300))
        assert time.monotonic() - began_s < 45.0  # not by the cut of who is idle for 60 s


def test_a_retry_may_write_its_maps_in_another_order(daemon: DaemonProcess) -> None:
    """A map has no order; the values count, and which belongs to which name."""
    held = {**JOB, "hold": True}
    one, other = {"A": "1", "B": "2"}, {"B": "2", "A": "1"}
    with raw(daemon) as connected:
        answers = [
            call(connected, 0, 1, "submit", [{"submission_id": "x", "jobs": [{**held, **change}]}])
            for change in (
                {"environment": one},
                {"environment": other},
                {"environment": {"A": "2", "B": "1"}},
            )
        ]
    assert [answer[3] and answer[3]["job_ids"] for answer in answers] == [[1], [1], None]
    assert answers[2][2]["code"] == "conflict"


def test_a_page_behind_a_job_that_left_the_queue_is_refused(daemon: DaemonProcess) -> None:
    """An empty page would read as the end of the queue."""
    with raw(daemon) as connected:
        call(connected, 0, 1, "submit", [{"jobs": [{**JOB, "hold": True}] * 3}])
        *_, page = call(connected, 0, 2, "queue", [{"limit": 2}])
        assert [job["job_id"] for job in page["jobs"]] == [1, 2]
        *_, page = call(connected, 0, 3, "queue", [{"after": 2}])
        assert [job["job_id"] for job in page["jobs"]] == [3]
        *_, page = call(connected, 0, 4, "queue", [{"after": 3}])
        assert page == {"jobs": [], "total": 3}
        call(connected, 0, 5, "cancel", [{"job_ids": [2]}])
        *_, error, _ = call(connected, 0, 6, "queue", [{"after": 2}])
        assert error["code"] == "not_found"


def test_a_gpu_is_named_by_its_index_as_text_or_integer(daemon: DaemonProcess) -> None:
    with raw(daemon) as connected:
        *_, drained = call(connected, 0, 1, "drain", [{"gpu": 0, "reason": "fan"}])
        assert (drained["gpu"]["index"], drained["gpu"]["state"]) == (0, "drained")
        *_, resumed = call(connected, 0, 2, "resume", [{"gpu": "0"}])
        assert (resumed["gpu"]["index"], resumed["gpu"]["state"]) == (0, "ok")


def events_of(connected: socket.socket, last: int) -> list[dict[str, Any]]:
    """Notifications up to the event with this id."""
    unpacker = msgpack.Unpacker()
    events: list[dict[str, Any]] = []
    while not events or events[-1]["event_id"] < last:
        unpacker.feed(connected.recv(65536))
        events += [params[0] for kind, *_, params in unpacker if kind == 2]
    return events


def test_a_watch_that_missed_more_than_is_kept_says_how_many(daemon: DaemonProcess) -> None:
    """First the marker, then the newest without a gap."""
    with raw(daemon) as connected, raw(daemon) as watching:
        call(connected, 0, 1, "submit", [{"jobs": [{**JOB, "hold": True}] * 700}])
        call(connected, 0, 2, "cancel", [{"job_ids": list(range(1, 701))}])
        watching.sendall(msgpack.packb([0, 3, "watch", [{"since": 0}]]))
        *_, result = call(connected, 0, 4, "watch", [])
        last = result["last_event_id"]
        marker, *events = events_of(watching, last)
        assert (marker["kind"], marker["data"]) == ("dropped", {"count": last - 1000})
        assert [event["event_id"] for event in events] == list(range(last - 999, last + 1))


def test_a_connection_has_one_watch(daemon: DaemonProcess) -> None:
    """A second would send everything twice, and there are not endlessly many."""
    with raw(daemon) as connected:
        call(connected, 0, 1, "watch", [])
        *_, error, _ = call(connected, 0, 2, "watch", [])
        assert error["code"] == "conflict"


def test_half_a_message_and_silence_is_cut_after_ten_seconds(daemon: DaemonProcess) -> None:
    """The slow-loris gets an error and its connection back."""
    with raw(daemon) as connected:
        connected.sendall(msgpack.packb([0, 1, "hello", []])[:-1])
        began_s = time.monotonic()
        reply = read(connected)
        assert time.monotonic() - began_s > 9.0
        assert reply[2]["code"] == "unavailable"
        assert connected.recv(1) == b""


def test_a_reader_that_never_reads_is_cut_at_its_limit(daemon: DaemonProcess) -> None:
    """Replies pile up to 4 MiB, not further; others are served meanwhile."""
    with daemon.client() as client:
        for _ in range(3):
            client.submit_many([_job_request(daemon) for _ in range(300)])
    with raw(daemon) as stalled:
        request = msgpack.packb([0, 1, "jobs", []])
        sent, cut = 0, False
        while not cut and sent < 400:
            try:
                stalled.sendall(request)
                sent += 1
            except (BrokenPipeError, ConnectionResetError):
                cut = True
            except TimeoutError:
                break
            with daemon.client() as client:
                client.hello()
        until(lambda: _is_cut(stalled), "the stalled reader is cut")


def _job_request(daemon: DaemonProcess) -> Any:
    from gpusched_client import job_request

    return job_request(["true"], hold=True, cwd=daemon.work_dir, environment={})


def _is_cut(connected: socket.socket) -> bool:
    try:
        connected.sendall(b"")
        connected.send(msgpack.packb([0, 2, "hello", []]), socket.MSG_DONTWAIT)
    except (BrokenPipeError, ConnectionResetError):
        return True
    except BlockingIOError:
        return False
    return False


def test_connections_beyond_the_limit_are_told_so(tmp_path: Path) -> None:
    """One user's connections have a number; root's own are not counted out."""
    daemon = DaemonProcess(tmp_path, "1x1G", "--set", "limits.connections=4").start()
    try:
        held = []
        refusals = []
        for _ in range(6):
            connected = socket.socket(socket.AF_UNIX)
            connected.settimeout(60)
            connected.connect(str(daemon.socket))
            held.append(connected)
            connected.sendall(msgpack.packb([0, 1, "hello", []]))
            reply = read(connected)
            if reply[2] is not None:
                refusals.append(reply[2]["code"])
        expected = [] if os.getuid() == 0 else ["limit", "limit"]
        assert refusals == expected
        for connected in held:
            connected.close()
    finally:
        daemon.stop()


def test_mutated_messages_never_crash_the_daemon(daemon: DaemonProcess, is_soak: bool) -> None:
    """20,000 through the decoder are in the client's tests; here 2,000 reach a live daemon."""
    count = 100_000 if is_soak else 2_000
    print(f"{count} mutations of 100000")
    seeds = [
        msgpack.packb([0, 1, "submit", [{"jobs": [{**JOB, "hold": True}]}]]),
        msgpack.packb([0, 1, "jobs", [{"ids": [1, 2], "states": ["PENDING"]}]]),
        msgpack.packb([0, 1, "cancel", [{"job_ids": [1], "signal": 10}]]),
        msgpack.packb([0, 1, "update", [{"job_ids": [1], "nice": 3}]]),
        msgpack.packb([0, 1, "queue", [{"limit": 5}]]),
    ]
    random_ = random.Random(11)
    assert daemon.process is not None
    before = _resident_bytes(daemon.process.pid)
    for _ in range(count // 50):
        with raw(daemon) as connected:
            connected.setblocking(False)
            for _ in range(50):
                try:
                    connected.send(_mutated(random_, random_.choice(seeds)))
                except OSError:
                    break
    with daemon.client() as client:
        client.hello()
    assert daemon.process.poll() is None
    assert "command_failed" not in daemon.log_tail()
    assert "request_failed" not in daemon.log.read_text()
    assert "Traceback" not in daemon.log.read_text()
    assert _resident_bytes(daemon.process.pid) - before < 50 * 2**20


def _mutated(random_: random.Random, seed: bytes) -> bytes:
    data = bytearray(seed)
    for _ in range(random_.randint(1, 4)):
        place = random_.randrange(len(data))
        match random_.randrange(3):
            case 0:
                data[place] = random_.randrange(256)
            case 1:
                del data[place]
            case _:
                data.insert(place, random_.randrange(256))
        if not data:
            return bytes(seed)
    return bytes(data)


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_the_same_submission_id_gives_the_same_ids_and_other_content_is_a_conflict(
    daemon: DaemonProcess,
) -> None:
    """Also after a restart."""
    request = {"jobs": [{**JOB, "hold": True}], "submission_id": "once"}
    with raw(daemon) as connected:
        first = call(connected, 0, 1, "submit", [request])[3]["job_ids"]
        assert call(connected, 0, 2, "submit", [request])[3]["job_ids"] == first
    daemon.kill()
    daemon.start()
    with raw(daemon) as connected:
        assert call(connected, 0, 1, "submit", [request])[3]["job_ids"] == first
        other = {**request, "jobs": [{**JOB, "hold": True, "nice": 5}]}
        assert call(connected, 0, 2, "submit", [other])[2]["code"] == "conflict"


def test_a_watcher_hears_of_events_in_order(daemon: DaemonProcess) -> None:
    """Ids rise, and the story of a job is complete."""
    with raw(daemon) as connected:
        assert call(connected, 0, 1, "watch", [])[2] is None
        with daemon.client() as client:
            job = client.submit(["true"], gpus=1, output="/dev/null")
        unpacker = msgpack.Unpacker()
        events: list[Any] = []
        while not any(event["kind"] == "job_ended" for event in events):
            unpacker.feed(connected.recv(65536))
            events += [message[2][0] for message in unpacker]
        kinds = [event["kind"] for event in events if event["job_id"] == job.id]
        assert kinds[:3] == ["job_submitted", "job_placed", "job_started"]
        ids = [event["event_id"] for event in events]
        assert ids == sorted(set(ids))


def test_submissions_that_arrive_together_share_a_commit(daemon: DaemonProcess) -> None:
    """300 pipelined requests take far fewer batches, hence far fewer syncs."""
    held = {**JOB, "hold": True}
    with raw(daemon) as connected:
        before = call(connected, 0, 1, "stats", [])[3]["counters"]["batches"]
        connected.sendall(
            b"".join(msgpack.packb([0, n, "submit", [{"jobs": [held]}]]) for n in range(2, 302))
        )
        unpacker = msgpack.Unpacker()
        replies: list[Any] = []
        while len(replies) < 300:
            unpacker.feed(connected.recv(65536))
            replies += list(unpacker)
        assert all(reply[2] is None for reply in replies)
        after = call(connected, 0, 999, "stats", [])[3]["counters"]["batches"]
    assert after - before < 100


def test_notifications_and_responses_get_no_answer(daemon: DaemonProcess) -> None:
    """As the protocol says; the next request is answered as ever."""
    with raw(daemon) as connected:
        connected.sendall(msgpack.packb([2, "hello", [{}]]) + msgpack.packb([1, 5, None, {}]))
        assert call(connected, 0, 6, "hello", [])[1] == 6


def test_a_job_far_down_the_queue_knows_its_place(daemon: DaemonProcess) -> None:
    """Position and priority in parts, also where the pass explained nothing of it."""
    job = {**JOB, "gpus": 4, "argv": ["sleep", "600"], "time_limit_s": 600}
    with raw(daemon) as connected:
        ids = call(connected, 0, 1, "submit", [{"jobs": [job] * 300}])[3]["job_ids"]
        until(
            lambda: call(connected, 0, 2, "job", [{"job_id": ids[0]}])[3]["state"] == "RUNNING",
            "the first runs",
        )
        last = call(connected, 0, 3, "job", [{"job_id": ids[-1]}])[3]
        assert last["queue_position"] == 299
        assert set(last["priority_parts"]) == {"fair", "age", "nice"}
        call(connected, 0, 4, "cancel", [{"job_ids": ids}])


def test_a_name_is_shown_as_given_and_is_no_path(daemon: DaemonProcess, tmp_path: Path) -> None:
    """`lr=0.1/2` names a file with %x, and not one in another directory."""
    job = {
        **JOB,
        "cwd": str(tmp_path),
        "name": "lr=0.1/2 ä",
        "output": "%x.out",
        "argv": ["/usr/bin/printenv", "GPUSCHED_JOB_NAME"],
    }
    with raw(daemon) as connected:
        call(connected, 0, 1, "submit", [{"jobs": [job]}])
        *_, result = call(connected, 0, 2, "wait", [{"job_ids": [1]}])
        assert (result["jobs"][0]["state"], result["jobs"][0]["name"]) == ("COMPLETED", job["name"])
    assert (tmp_path / "lr=0.1_2 ä.out").read_text() == "lr=0.1/2 ä\n"


def test_a_list_shows_what_runs_where(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Command and directory; a long command is cut, and whole in the one job's answer."""
    short = {**JOB, "hold": True, "cwd": str(tmp_path), "argv": ["python", "train.py", "a\nb"]}
    long = {**short, "argv": ["echo", "x" * 5000]}
    scripted = {**short, "argv": None, "script": "#!/bin/sh\n", "args": ["-v"]}
    with raw(daemon) as connected:
        call(connected, 0, 1, "submit", [{"jobs": [short, long, scripted]}])
        *_, result = call(connected, 0, 2, "jobs", [])
        *_, queue = call(connected, 0, 3, "queue", [])
        *_, one = call(connected, 0, 4, "job", [{"job_id": 2}])
    first, second, third = result["jobs"]
    assert first["command"] == "python train.py a\\nb"
    assert first["argv"] == [b"python", b"train.py", b"a\nb"]
    assert {job["cwd"] for job in result["jobs"]} == {bytes(tmp_path)}
    assert (second["command"], second["argv"]) == ("echo " + "x" * 292 + "...", None)
    assert one["argv"] == [b"echo", b"x" * 5000]
    assert (third["command"], third["argv"], third["script_bytes"]) == ("<script> -v", [b"-v"], 10)
    assert [job["command"] for job in queue["jobs"]] == [job["command"] for job in result["jobs"]]
