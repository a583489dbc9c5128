"""The socket: which one a client takes, and which servers it trusts."""

from __future__ import annotations

import _socket
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpusched_client import Client, paths
from gpusched_client.errors import Denied, Invalid, Unavailable
from gpusched_client.wire import transport
from tests.client.fake_server import FakeServer, Handler

Serve = Callable[[dict[str, Handler]], FakeServer]


def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime: Path | None) -> None:
    monkeypatch.delenv("GPUSCHED_SOCKET", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(paths, "SYSTEM_SOCKET", str(tmp_path / "system.sock"))
    if runtime is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))


def test_without_a_runtime_directory_the_socket_lies_in_the_state_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home(monkeypatch, tmp_path, None)
    own = str(tmp_path / "state/gpuschedd/gpuschedd.sock")
    assert paths.user_socket() == own
    assert paths.client_sockets() == [own, str(tmp_path / "system.sock")]


def test_the_users_own_is_looked_for_in_the_state_directory_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home(monkeypatch, tmp_path, tmp_path / "run")
    own = str(tmp_path / "run/gpuschedd/gpuschedd.sock")
    in_state = str(tmp_path / "state/gpuschedd/gpuschedd.sock")
    assert paths.client_sockets() == [own, in_state, str(tmp_path / "system.sock")]
    monkeypatch.setenv("GPUSCHED_SOCKET", "/x/y.sock")
    assert paths.client_sockets() == ["/x/y.sock"]


def test_where_the_systems_socket_exists_nobodys_own_daemon_stands_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home(monkeypatch, tmp_path, None)
    own_path = Path(paths.user_socket())
    own_path.parent.mkdir(parents=True)
    own = FakeServer(own_path, {"reload": lambda _: {"changed": ["own"]}})
    with Client() as c:
        assert c.reload().changed == ("own",)
    server = FakeServer(tmp_path / "system.sock", {"reload": lambda _: {"changed": []}})
    with Client() as c:
        assert c.reload().changed == ()
    # Not even where the system's does not answer: jobs would go on to the wrong one unseen.
    server.close()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "system.sock"))
    dead.close()
    with Client() as c, pytest.raises(Unavailable, match="the system's gpuschedd is not reach"):
        c.reload()
    own.close()


def test_a_dead_socket_is_passed_over_for_the_next_live_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home(monkeypatch, tmp_path, tmp_path / "run")
    (tmp_path / "run/gpuschedd").mkdir(parents=True)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(paths.user_socket())
    dead.close()
    in_state = tmp_path / "state/gpuschedd/gpuschedd.sock"
    in_state.parent.mkdir(parents=True)
    server = FakeServer(in_state, {"reload": lambda _: {"changed": []}})
    with Client() as c:
        assert c.reload().changed == ()
    server.close()


@pytest.mark.parametrize("state_home", [None, "relative", "/" + 120 * "x"])
def test_users_without_a_place_of_their_own_reach_the_systems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state_home: str | None
) -> None:
    home(monkeypatch, tmp_path, None)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.delenv("XDG_STATE_HOME")
    if state_home is not None:
        monkeypatch.setenv("XDG_STATE_HOME", state_home)
    assert paths.client_sockets()[-1] == str(tmp_path / "system.sock")
    with Client() as c, pytest.raises(Unavailable, match=r"system\.sock: no such file"):
        c.hello()


def test_nobody_there_says_where_it_looked_and_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home(monkeypatch, tmp_path, None)
    # At once: the first connection of all is not waited for.
    with Client(reconnect_s=3600.0) as c, pytest.raises(Unavailable) as caught:
        c.hello()
    assert str(tmp_path / "system.sock") in caught.value.message
    assert "Start your own with `gpuschedd`" in caught.value.message
    assert caught.value.exit_status == 69


def test_a_server_that_is_neither_root_nor_oneself_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve({"hello": lambda _: None})

    class Foreign(_socket.socket):
        def getsockopt(self, *_args: Any) -> Any:
            return struct.pack("iII", 1, 12_345, 12_345)

    monkeypatch.setattr("_socket.socket", Foreign)
    with Client() as c, pytest.raises(Denied, match="uid 12345"):
        c.hello()
    assert server.requests == []


def test_a_full_backlog_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "full.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(0)
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for sock in waiting:
        sock.setblocking(False)
        sock.connect_ex(str(path))
    monkeypatch.setattr(transport, "BACKLOG_WAIT_S", 60)
    taken: list[socket.socket] = []
    taker = threading.Timer(0.2, lambda: taken.extend(listener.accept()[0] for _ in range(2)))
    taker.start()
    opened = transport._open(str(path))
    assert opened.getpeername() == str(path)
    taker.join()
    opened.close()
    for sock in (listener, *waiting, *taken):
        sock.close()


def test_a_backlog_that_stays_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "full.sock"
    monkeypatch.setattr(transport, "BACKLOG_WAIT_S", 1)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(str(path))
        listener.listen(0)
        waiting.connect(str(path))
        with Client(path) as c, pytest.raises(Unavailable, match="temporarily unavailable"):
            c.hello()


def test_a_signal_while_room_is_waited_for_is_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends the wait, and Python takes the socket for connected."""
    path, caught = tmp_path / "full.sock", list[int]()
    monkeypatch.setattr(transport, "BACKLOG_WAIT_S", 1)
    before = signal.signal(signal.SIGALRM, lambda number, _frame: caught.append(number))
    try:
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
            listener.bind(str(path))
            listener.listen(0)
            waiting.connect(str(path))
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with Client(path) as c, pytest.raises(Unavailable, match="temporarily unavailable"):
                c.hello()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert caught == [signal.SIGALRM]


def test_a_socket_path_that_is_too_long_is_invalid(tmp_path: Path) -> None:
    with Client(tmp_path / ("x" * 120)) as c, pytest.raises(Invalid, match="107"):
        c.hello()


@pytest.mark.parametrize(
    ("uid", "uid_map", "owner", "writable", "expected"),
    [
        (65_534, "0 3001 1\n", 65_534, False, True),
        (65_534, "0 0 4294967295\n", 65_534, False, False),  # root is mapped: this is not root
        (65_534, "0 3001 1\n", 65_534, True, False),  # a place that we could have made
        (65_534, "0 3001 1\n", 0, False, False),  # a place of our own namespace
        (3002, "0 3001 1\n", 65_534, False, False),
    ],
)
def test_the_hosts_root_is_known_from_within_a_user_namespace(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    uid: int,
    uid_map: str,
    owner: int,
    writable: bool,
    expected: bool,
) -> None:
    """`unshare -Ur` changes nothing: only root can have made the system's own place."""
    place = tmp_path / "run"
    place.mkdir()
    monkeypatch.setattr(paths, "SYSTEM_SOCKET", str(place / "s.sock"))
    monkeypatch.setattr(os, "access", lambda *_: writable)
    real = os.stat

    def stat_of(path: str) -> os.stat_result:
        found = list(real(path))
        found[4] = owner
        return os.stat_result(found)

    monkeypatch.setattr(os, "stat", stat_of)
    assert transport._may_be_hidden_root(uid, str(place / "s.sock"), uid_map) is expected
    assert not transport._may_be_hidden_root(uid, str(tmp_path / "other.sock"), uid_map)
