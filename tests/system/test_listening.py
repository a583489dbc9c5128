"""Names of the daemon's that somebody takes away: sockets, the lock, the state directory."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from gpusched_client import Client, paths
from gpusched_client.errors import GpuschedError
from gpuschedd.run.hints import HintSocket
from gpuschedd.system.listening import Door, Doors
from gpuschedd.system.state_dir import AlreadyRunning, Lock, Unusable
from tests.support.daemon import DaemonProcess, clean_up, daemon_in, until


def answers(path: Path | None) -> bool:
    """None: wherever a client looks by itself."""
    try:
        with Client(path, reconnect_s=0.0) as client:
            return client.hello().version != ""
    except GpuschedError:
        return False


def bound(door: Door) -> bool:
    """Whether its name leads to it."""
    return door.is_open


def test_sockets_that_lost_their_names_are_bound_anew(tmp_path: Path) -> None:
    """A cleaner of old files takes them: clients reach the daemon again, and it hears hints."""
    with daemon_in(tmp_path) as daemon:
        second = daemon.state_dir / "gpuschedd.sock"
        hints = daemon.state_dir / "hint.sock"
        assert answers(second)  # the second way, where the first is not in the state directory
        for path in (daemon.socket, second, hints):
            path.unlink()
        until(lambda: answers(daemon.socket), "the socket is there again")
        until(lambda: answers(second), "and the second one")
        until(hints.exists, "and that of the supervisors")
        with daemon.client() as client:
            job = client.submit(["true"], output="/dev/null")
            assert client.wait(job.id, timeout_s=30).exit_code == 0


def test_a_runtime_directory_that_vanishes_at_a_logout_leaves_the_second_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it cannot be made, who looks where a user's daemon lies finds it; then it is there."""
    runtime, state = tmp_path / "run", tmp_path / "state"
    monkeypatch.delenv("GPUSCHED_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    monkeypatch.setattr(paths, "SYSTEM_SOCKET", str(tmp_path / "system.sock"))
    daemon = DaemonProcess(tmp_path)
    daemon.socket, second, _ = map(Path, paths.client_sockets())
    daemon.state_dir = second.parent
    try:
        process = daemon.start().process
        assert process is not None
        process.send_signal(signal.SIGSTOP)  # so that it does not bind anew in between
        shutil.rmtree(runtime)
        runtime.touch()
        process.send_signal(signal.SIGCONT)
        until(lambda: "socket_lost" in daemon.log_text(), "it cannot be bound anew")
        assert not answers(daemon.socket)
        assert answers(None)
        runtime.unlink()
        until(lambda: answers(daemon.socket), "the socket is there again")
        assert stat.S_IMODE(daemon.socket.parent.stat().st_mode) == 0o700
        assert answers(second)
    finally:
        clean_up(daemon)


def test_a_socket_of_the_service_manager_s_that_lost_its_name_is_bound_anew(tmp_path: Path) -> None:
    """It is handed over again at each start, and nobody can reach it any more."""
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as passed:
        passed.bind(str(path))
        passed.listen()
        path.unlink()
        doors = Doors(lambda listening: listening.listen(), lambda _listening: None)
        door = Door(path, 0o600, 0o700)
        doors.open(door, passed)
        assert bound(door)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        path.unlink()
        assert not bound(door)
        doors.look()
        assert bound(door)
        doors.close()
        doors.remove_names()
        assert not path.exists()


def test_a_look_without_descriptors_leaves_the_hint_socket_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one from before is closed once there is another."""

    async def play() -> None:
        path = tmp_path / "hint.sock"
        hints = HintSocket(path, lambda _key: None)
        path.unlink()

        def none_left(*_words: object) -> socket.socket:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as short:
            short.setattr("gpuschedd.run.hints.socket.socket", none_left)
            with pytest.raises(OSError, match="Too many"):
                hints.look()
        hints.look()
        assert path.exists()
        hints.close()

    asyncio.run(play())


def test_a_socket_that_somebody_else_took_is_left_alone(tmp_path: Path) -> None:
    """The daemon goes on by its second way, and says so."""
    with daemon_in(tmp_path) as daemon:
        with socket.socket(socket.AF_UNIX) as other:
            daemon.socket.unlink()
            other.bind(str(daemon.socket))
            other.listen(8)
            until(lambda: "another daemon answers" in daemon.log.read_text(), "it is told")
            assert answers(daemon.state_dir / "gpuschedd.sock")
        until(lambda: answers(daemon.socket), "nobody answers there any more: it is ours again")


def test_a_daemon_whose_socket_is_answered_by_another_touches_nothing(tmp_path: Path) -> None:
    """Not even its own state: its jobs would start on the other's GPUs."""
    with daemon_in(tmp_path / "first") as first:
        second = DaemonProcess(tmp_path / "second")
        second.socket = first.socket
        process = second.spawn()
        assert process.wait(30) == 75
        assert f"another daemon answers at {first.socket}" in second.log_text()
        assert {path.name for path in second.state_dir.iterdir()} == {"lock", "jobs", "scripts"}
        assert answers(first.socket)


def test_no_second_daemon_starts_though_the_lock_file_is_gone(tmp_path: Path) -> None:
    """Two on one database would each give the same job ids. The second touches nothing."""
    with daemon_in(tmp_path) as daemon:
        hints = (daemon.state_dir / "hint.sock").stat().st_ino
        (daemon.state_dir / "lock").unlink()
        command = [*daemon.command, "--socket", str(tmp_path / "other.sock")]
        second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert second.returncode == 75
        assert "another gpuschedd" in second.stderr
        assert "--state-dir" in second.stderr
        assert (daemon.state_dir / "hint.sock").stat().st_ino == hints
        until((daemon.state_dir / "lock").exists, "the first makes the file again")
        third = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert third.returncode == 75
        assert daemon.process is not None
        assert f"pid {daemon.process.pid}" in until_it_says(daemon, command)


def until_it_says(daemon: DaemonProcess, command: list[str]) -> str:
    """What a second daemon prints once the lock file names the first one."""
    assert daemon.process is not None
    pid = str(daemon.process.pid)
    until(lambda: pid in (daemon.state_dir / "lock").read_text(), "the file says by whom")
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return run.stderr


def test_a_state_directory_that_was_moved_away_ends_the_daemon(tmp_path: Path) -> None:
    """What it writes there nobody would ever read: exit 78, and the new place is untouched."""
    daemon = DaemonProcess(tmp_path)
    daemon.start()
    moved = tmp_path / "moved"
    daemon.state_dir.rename(moved)
    daemon.state_dir.mkdir()
    assert daemon.process is not None
    assert daemon.process.wait(60) == 78
    assert list(daemon.state_dir.iterdir()) == []
    shutil.rmtree(moved)


def test_a_lock_is_one_however_its_file_is_treated(tmp_path: Path) -> None:
    """The directory's own lock holds; the file is made again, unless somebody was faster."""
    first = Lock(tmp_path)
    with pytest.raises(AlreadyRunning, match="kill"):
        Lock(tmp_path)
    (tmp_path / "lock").unlink()
    with pytest.raises(AlreadyRunning, match="lock file was removed"):
        Lock(tmp_path)
    first.look()
    with pytest.raises(AlreadyRunning, match="pid"):
        Lock(tmp_path)
    first.release()
    second = Lock(tmp_path)
    tmp_path.rename(tmp_path.with_name("moved"))
    with pytest.raises(Unusable, match="removed or replaced"):
        second.look()
    second.release()


def test_directories_that_were_removed_are_made_again_and_hold_no_job(tmp_path: Path) -> None:
    """They are the daemon's: no job is held for it, and it runs once they are there."""
    with daemon_in(tmp_path) as daemon, daemon.client() as client:
        for name in ("jobs", "scripts"):
            shutil.rmtree(daemon.state_dir / name)
        job = client.submit(script="#!/bin/sh\nexit 3\n", gpus=1, output="/dev/null")
        ended = client.wait(job.id, timeout_s=60)
        assert ended.exit_code == 3


@pytest.mark.parametrize("name", ["hint.sock", "sim", "jobs"])
def test_something_else_in_the_place_of_a_name_of_ours_has_words(tmp_path: Path, name: str) -> None:
    """Exit 78, which names it; no traceback that the service manager repeats."""
    daemon = DaemonProcess(tmp_path).start()
    assert daemon.stop() == 0
    place = daemon.state_dir / name
    if name == "hint.sock":
        place.unlink(missing_ok=True)
        place.mkdir()
    else:
        shutil.rmtree(place)
        place.write_text("not ours")
    assert daemon.spawn().wait(30) == 78
    assert str(place) in daemon.log_text()
    assert "Traceback" not in daemon.log_text()


def test_a_daemon_that_starts_beside_does_not_end_the_one_that_runs(tmp_path: Path) -> None:
    """It has the removed lock file for a moment, and the lock of the directory turns it away."""
    first = Lock(tmp_path)
    (tmp_path / "lock").unlink()
    beside = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(beside, fcntl.LOCK_EX | fcntl.LOCK_NB)
    first.look()
    os.close(beside)
    first.look()
    again = os.open(tmp_path / "lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(again)
    first.release()
