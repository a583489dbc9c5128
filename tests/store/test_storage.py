"""A full disk: typed refusals, running jobs go on, ends appear later, nothing is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpusched_client.errors import GpuschedError, StorageError
from gpusched_client.terms import JobState
from gpuschedd.store.database import StoreFull
from gpuschedd.store.records import Changes, Submission
from gpuschedd.store.retention import Old
from gpuschedd.store.writer import Store
from gpuschedd.system.clock import ClockMark
from tests.support.daemon import DaemonProcess, clean_up, until

pytestmark = pytest.mark.root


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A small tmpfs for the state directory."""
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m,nr_inodes=200", "tmpfs", str(mount)], check=True
    )
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def _fill_bytes(mount: Path) -> list[Path]:
    ballast = mount / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return [ballast]


def _fill_inodes(mount: Path) -> list[Path]:
    made: list[Path] = []
    try:
        while True:
            path = mount / f"inode-{len(made)}"
            path.touch()
            made.append(path)
    except OSError:
        return made


@pytest.mark.parametrize("fill", [_fill_bytes, _fill_inodes])
def test_a_full_disk_loses_nothing_and_heals_by_itself(
    tmp_path: Path, small_disk: Path, fill: Callable[[Path], list[Path]]
) -> None:
    """Refused by type; a running job's code appears later; queued jobs wait and none is held."""
    daemon = DaemonProcess(tmp_path, "1x24G", "--set", "scheduling.kill_grace=1.0")
    daemon.state_dir = small_disk / "state"
    daemon.start()
    go = tmp_path / "go"
    try:
        with daemon.client() as client:
            running = client.submit(
                shell=f"until [ -e {go} ]; do sleep 0.05; done; exit 5", cwd=daemon.work_dir
            )
            until(lambda: client.job(running.id).state is JobState.RUNNING, "it runs")
            acknowledged = [client.submit(["true"], cwd=daemon.work_dir).id for _ in range(3)]
            ballast = fill(small_disk)
            refused = _submit_until_refused(daemon, acknowledged)
            if fill is _fill_bytes:
                assert isinstance(refused, StorageError)
            go.touch()
            until(lambda: _is_gone(daemon, running.id), "the running job ends in spite of it")
            # The first of them is tried once: its launch is what finds out, where inodes are short.
            until(lambda: _waits_for_storage(daemon, acknowledged[0]), "the reason says Storage")
            waiting = client.jobs(ids=acknowledged).jobs
            assert all(job.state is JobState.PENDING for job in waiting)
            assert not any(job.hold for job in waiting)
            for path in ballast:
                path.unlink()
            ended = client.wait([running.id, *acknowledged], timeout_s=60)
            assert [job.exit_code for job in ended] == [5] + [0] * len(acknowledged)
            assert [job.attempt for job in ended] == [1] * len(ended)
    finally:
        clean_up(daemon)


def test_a_killed_daemon_comes_back_on_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    """It answers, watches what runs, and knows its end once there is room."""
    daemon = DaemonProcess(tmp_path, "1x24G")
    daemon.state_dir = small_disk / "state"
    daemon.start()
    go = tmp_path / "go"
    try:
        with daemon.client() as client:
            job = client.submit(
                shell=f"until [ -e {go} ]; do sleep 0.05; done; exit 5", cwd=daemon.work_dir
            )
            until(lambda: client.job(job.id).state is JobState.RUNNING, "it runs")
        daemon.kill()
        (ballast,) = _fill_bytes(small_disk)
        daemon.start()
        with daemon.client() as client:
            assert client.job(job.id).state is JobState.RUNNING
            go.touch()
            until(lambda: _is_gone(daemon, job.id), "it ends in spite of it")
            ballast.unlink()
            assert client.wait(job.id, timeout_s=60).exit_code == 5
        assert "Traceback" not in daemon.log.read_text()
    finally:
        clean_up(daemon)


def test_a_full_wal_is_emptied_where_that_makes_room(small_disk: Path) -> None:
    """What the books hold already is written on with, though the disk takes nothing more."""
    store = Store.open(small_disk)
    store.commit(_marked(0))
    (ballast,) = _fill_bytes(small_disk)
    wal = small_disk / "gpuschedd.sqlite3-wal"
    before = wal.stat().st_size
    for number in range(1, 300):
        store.commit(_marked(number))
    assert wal.stat().st_size <= before + 4096
    assert store.load().mark == _marked(299).mark
    ballast.unlink()
    store.close()


def test_the_books_of_a_small_disk_are_not_all_wal(small_disk: Path) -> None:
    """What is written over and over takes a quarter of the room that the WAL had by default."""
    store = Store.open(small_disk)
    for number in range(1_000):
        store.commit(_marked(number))
    assert (small_disk / "gpuschedd.sqlite3-wal").stat().st_size < 2**20 + 2**16
    store.close()


def _drop_all(store: Store) -> None:
    while store.drop(Old("submission", 1e9)):
        pass


def _marked(number: int) -> Changes:
    return Changes(mark=ClockMark("boot", 0.0, float(number), 1e9))


def test_what_is_past_its_limit_stays_where_the_disk_is_full(small_disk: Path) -> None:
    """Refused by type, as a commit is; the daemon drops it at a later time."""
    store = Store.open(small_disk)
    changes = Changes()
    for number in range(1_000):
        changes.submissions.append(Submission(1000, f"{number}" * 20, b"d" * 32, (), 0.0))
    store.commit(changes)
    with closing(sqlite3.connect(store.path)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM submission").fetchone()  # keeps the WAL as it is
        store.commit(_marked(1))
        (ballast,) = _fill_bytes(small_disk)
        with pytest.raises(StoreFull):
            _drop_all(store)
    ballast.unlink()
    _drop_all(store)
    assert store.load().submissions == ()
    store.close()


def test_a_start_on_a_disk_that_is_read_only_says_so(tmp_path: Path, small_disk: Path) -> None:
    """74: it is started again, and goes on when the disk is writable."""
    daemon = DaemonProcess(tmp_path, "1x24G")
    daemon.state_dir = small_disk / "state"
    daemon.start().stop()
    _remount(small_disk, "ro")
    for state_dir in (daemon.state_dir, small_disk / "other"):
        daemon.state_dir = state_dir
        assert daemon.spawn().wait(30) == 74
        assert "Read-only file system" in daemon.log_tail()
        assert "Traceback" not in daemon.log_tail()
    with pytest.raises(StoreFull, match="Read-only"):
        Store.open(small_disk / "state")
    _remount(small_disk, "rw")
    daemon.state_dir = small_disk / "state"
    daemon.start().stop()


def _remount(mount: Path, how: str, *options: str) -> None:
    subprocess.run(["mount", *options, "-o", f"remount,{how}", str(mount)], check=True)


def test_a_job_whose_directory_is_removed_does_not_run_for_ever(tmp_path: Path) -> None:
    """When its supervisor is gone nobody will ever know its end: NODE_FAIL, and the GPU is free."""
    daemon = DaemonProcess(tmp_path, "1x24G").start()
    try:
        with daemon.client() as client:
            job = client.submit(["sleep", "1"], cwd=daemon.work_dir)
            until(lambda: client.job(job.id).state is JobState.RUNNING, "it runs")
            shutil.rmtree(daemon.state_dir / "jobs" / f"{job.id}.1")
            assert client.wait(job.id, timeout_s=60).state is JobState.NODE_FAIL
            after = client.submit(["true"], cwd=daemon.work_dir)
            assert client.wait(after.id, timeout_s=60).exit_code == 0
    finally:
        clean_up(daemon)


def _submit_until_refused(daemon: DaemonProcess, acknowledged: list[int]) -> GpuschedError | None:
    """Submit until the books have no room. What was acknowledged before that counts."""
    with daemon.client(reconnect_s=0.0) as client:
        for _ in range(60):
            try:
                job = client.submit(["true"], cwd=daemon.work_dir, environment={"A": "x" * 100_000})
            except GpuschedError as error:
                return error
            acknowledged.append(job.id)
    return None


def _is_gone(daemon: DaemonProcess, job_id: int) -> bool:
    """No process of the job is left (its record may still wait for room)."""
    mark = f"GPUSCHED_JOB_ID={job_id}\0".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if (
                mark in (entry / "environ").read_bytes()
                and str(daemon.place).encode() in (entry / "environ").read_bytes()
            ):
                return False
        except OSError:
            continue
    return True


def _waits_for_storage(daemon: DaemonProcess, job_id: int) -> bool:
    with daemon.client() as client:
        reason = client.job(job_id).reason
        return reason is not None and reason.code == "Storage"
