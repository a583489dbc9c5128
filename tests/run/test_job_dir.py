"""The job directory from the daemon's side: whole records or none, and one holder of the claim."""

from __future__ import annotations

import errno
import math
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from gpusched_client.terms import JobId
from gpuschedd.core.attempt import Cancel, Claim, Orders
from gpuschedd.run.fencing import fence_once
from gpuschedd.run.job_dir import (
    JobDir,
    JobDirCorrupt,
    JobDirError,
    JobDirExists,
    abandoned_in,
    is_claim_alive,
)
from gpuschedd.supervisor import procfs
from gpuschedd.supervisor.procfs import boot_id, process_stat
from tests.support.jobs import Host


@pytest.fixture
def host() -> Iterator[Host]:
    with Host() as made:
        yield made


@pytest.fixture
def job(host: Host) -> JobDir:
    return JobDir.create(host.jobs_root, host.spec("true"))


def own_claim(**changes: object) -> Claim:
    own = process_stat(os.getpid())
    assert own is not None
    claim = Claim("supervisor", boot_id(), os.getpid(), own.start_ticks)
    return replace(claim, **changes)  # type: ignore[arg-type]


def test_a_spec_comes_back_as_it_was_written(host: Host) -> None:
    spec = host.spec(
        b"\xff\n\0"[:2],
        b"",
        script=bytes(range(256)),
        environment=((b"K", b"\x80=\n"), (b"E", b"")),
        rlimits=(("RLIMIT_NOFILE", 1024, -1),),
        error=b"e/\xfe",
        time_limit_s=1.5,
        no_exec=True,
    )
    assert JobDir.create(host.jobs_root, spec).spec() == spec


def test_directory_and_spec_are_private_whatever_the_umask(host: Host) -> None:
    before = os.umask(0o777)
    try:
        path = JobDir.create(host.jobs_root, host.spec("true")).path
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "spec").stat().st_mode) == 0o600


def test_create_may_be_repeated_until_the_claim(host: Host) -> None:
    spec = host.spec("true")
    job = JobDir.create(host.jobs_root, spec)
    JobDir.create(host.jobs_root, spec)
    with pytest.raises(JobDirExists, match="another spec"):
        JobDir.create(host.jobs_root, replace(spec, name="other"))
    job.fence()
    with pytest.raises(JobDirExists, match="claimed"):
        JobDir.create(host.jobs_root, spec)


def test_create_goes_on_after_a_crash_before_the_spec(host: Host) -> None:
    spec = host.spec("true")
    (host.jobs_root / spec.label).mkdir(mode=0o700)
    (host.jobs_root / spec.label / ".spec.1").write_bytes(b"half")
    assert JobDir.create(host.jobs_root, spec).spec() == spec


def test_a_record_that_is_not_there_is_none(host: Host, job: JobDir) -> None:
    assert job.observe() == (None, False, None, None, None)
    assert job.orders() is None
    missing = JobDir.open(host.jobs_root, 99, 1)
    assert missing.observe() == (None, False, None, None, None)
    assert missing.spec() is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"version": 1}',
        b'{"version": 2, "by": "daemon", "boot_id": "x", "pid": 1, "start_ticks": 1}',
        b'{"version": 1, "by": "nobody", "boot_id": "x", "pid": 1, "start_ticks": 1}',
        b'{"version": 1, "by": "daemon", "boot_id": "x", "pid": "1", "start_ticks": 1}',
        b'{"version": 1, "by": "daemon", "boot_id": "x", "pid": true, "start_ticks": 1}',
        b'{"version": 1, "by": "daemon", "boot_id": "x", "pid": 1, "start_ticks": 1, "more": 1}',
        b"x" * 100_000,
    ],
)
def test_a_corrupt_record_is_said_to_be_so(job: JobDir, content: bytes) -> None:
    (job.path / "claim").write_bytes(content)
    with pytest.raises(JobDirCorrupt, match="claim cannot be understood"):
        job.claim()


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        os.mkdir,
        lambda path: os.symlink("elsewhere", path),
        lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    ],
    ids=["fifo", "directory", "link", "socket"],
)
def test_what_is_no_file_is_no_record_and_is_not_waited_for(
    job: JobDir, make: Callable[[Path], None]
) -> None:
    make(job.path / "ended")
    with pytest.raises(JobDirCorrupt, match="ended cannot be understood: ended is not a file"):
        job.observe()
    job.remove()
    assert not job.path.exists()


def test_what_took_the_place_of_a_directory_is_neither_followed_nor_removed(
    host: Host, job: JobDir
) -> None:
    """As if the directory were gone; nothing can be launched or fenced in it."""
    spec = job.spec()
    assert spec is not None
    moved = job.path.rename(host.jobs_root / "moved")
    job.path.symlink_to(moved)
    moved.chmod(0o755)
    assert job.observe() == (None, False, None, None, None)
    for work in (job.fence, job.remove, lambda: JobDir.create(host.jobs_root, spec)):
        with pytest.raises(JobDirError, match="is not a directory; it is left alone"):
            work()
    assert job.path.is_symlink()
    assert [entry.name for entry in moved.iterdir()] == ["spec"]
    assert stat.S_IMODE(moved.stat().st_mode) == 0o755
    assert fence_once(host.jobs_root, (JobId(job.job_id), job.attempt)) is None


@pytest.mark.parametrize("read_before", range(5))
def test_who_ends_while_its_directory_is_read_is_seen_with_all_that_came_before(
    host: Host, monkeypatch: pytest.MonkeyPatch, read_before: int
) -> None:
    """All its records come after so many reads: none is seen without those that it wrote first."""
    job = host.start("true")
    host.wait_exit(job)
    host.wait_dead(job)
    names = ("claim", "started", "ended", "exit")
    later = {name: (job.path / name).read_bytes() for name in names}
    for name in names[1:]:
        (job.path / name).unlink()
    read, reads = JobDir._read, 0

    def reading(self: JobDir, dir_fd: int | None, name: str) -> object:
        nonlocal reads
        if reads == read_before:
            for each, content in later.items():
                (self.path / each).write_bytes(content)
        reads += 1
        return read(self, dir_fd, name)

    monkeypatch.setattr(JobDir, "_read", reading)
    seen = job.observe()
    assert reads == (4 if seen.exit is None else 3)
    order = [seen.started is not None, seen.ended is not None, seen.exit is not None]
    assert order == sorted(order, reverse=True)


def test_orders_come_back_and_replace_each_other(job: JobDir) -> None:
    first = Orders(time_limit_s=math.inf, cancel=Cancel("7", 1.5, "caf\u00e9"), signals=((1, 10),))
    job.write_orders(first)
    assert job.orders() == first
    job.write_orders(Orders(time_limit_s=3))
    assert job.orders() == Orders(time_limit_s=3)


def test_the_daemon_s_fence_stands_and_is_repeatable(job: JobDir) -> None:
    claim = job.fence()
    assert claim.by == "daemon"
    assert job.fence() == claim
    assert job.observe().supervisor_alive is False


def test_a_fence_on_a_missing_directory_leaves_no_way_to_run(host: Host) -> None:
    job = JobDir.open(host.jobs_root, 5, 1)
    assert job.fence().by == "daemon"
    with pytest.raises(JobDirExists):
        JobDir.create(host.jobs_root, host.spec("true", job_id=5))


def test_of_many_fences_one_wins_and_all_agree(host: Host) -> None:
    with ThreadPoolExecutor(8) as threads:
        for job_id in range(20):
            job = JobDir.create(host.jobs_root, host.spec("true", job_id=100 + job_id))
            claims = list(threads.map(lambda _, job=job: job.fence(), range(8)))
            assert len(set(claims)) == 1


def test_a_claim_is_alive_only_as_the_very_process() -> None:
    assert is_claim_alive(own_claim())
    assert not is_claim_alive(own_claim(boot_id="another"))
    assert not is_claim_alive(own_claim(start_ticks=1))
    assert not is_claim_alive(own_claim(pid=2**22 + 1))


def test_a_zombie_is_not_alive() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    found = process_stat(pid)
    assert found is not None
    assert not is_claim_alive(own_claim(pid=pid, start_ticks=found.start_ticks))
    os.waitpid(pid, 0)


def test_remove_takes_directory_and_script_and_may_be_repeated(host: Host) -> None:
    spec = host.spec(script=b"echo")
    job = JobDir.create(host.jobs_root, spec)
    job.fence()
    job.write_orders(Orders())
    (host.scripts_dir / spec.label).write_text("left by a supervisor that died")
    job.remove()
    job.remove()
    assert list(host.jobs_root.iterdir()) == []
    assert list(host.scripts_dir.iterdir()) == []


def test_remove_takes_a_corrupt_directory_too(host: Host, job: JobDir) -> None:
    (job.path / "spec").write_bytes(b"?")
    job.remove()
    assert list(host.jobs_root.iterdir()) == []


def test_all_in_finds_attempts_and_passes_over_the_rest(host: Host, job: JobDir) -> None:
    (host.jobs_root / "lost+found").mkdir()
    (host.jobs_root / "x.1").mkdir()
    assert [found.path for found in JobDir.all_in(host.jobs_root)] == [job.path]


def test_abandoned_is_what_nobody_keeps_and_no_supervisor_holds(host: Host, job: JobDir) -> None:
    ended, kept, running = host.sh("true"), host.sh("true"), host.sh("sleep 600")
    for one in (ended, kept):
        host.wait_exit(one)
        host.wait_dead(one)
    host.wait(running.started)
    found = abandoned_in(host.jobs_root, {(kept.job_id, kept.attempt)})
    assert sorted(one.job_id for one in found) == [job.job_id, ended.job_id]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_full_disk_refuses_the_spec_and_leaves_nothing_half(host: Host, small_disk: str) -> None:
    del small_disk
    host.fill_disk()
    with pytest.raises(OSError, match="No space left"):
        JobDir.create(host.jobs_root, host.spec("true", script=bytes(8192)))
    (found,) = JobDir.all_in(host.jobs_root)
    assert found.spec() is None


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_claim_that_is_taken_is_seen_on_a_full_disk(host: Host, small_disk: str) -> None:
    """Only a free claim takes room: who holds it must be known at any time."""
    del small_disk
    job = host.start("sleep", "60")
    host.fill_disk()
    assert job.fence() == job.claim()


@pytest.fixture
def small_disk(host: Host) -> Iterator[str]:
    with host.small_disk() as path:
        yield path


def test_a_supervisor_that_proc_hides_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hidepid=2 there is no /proc/PID of a process that hides its memory."""
    claim = own_claim()
    assert is_claim_alive(claim)
    monkeypatch.setattr(procfs, "process_stat", lambda _: None)
    with pytest.raises(PermissionError, match="hidepid"):
        is_claim_alive(claim)
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    assert not is_claim_alive(replace(claim, pid=gone.pid))


def test_what_may_have_a_supervisor_is_not_abandoned(
    host: Host, job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [found.path for found in abandoned_in(host.jobs_root, ())] == [job.path]

    def claim(_: JobDir) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(JobDir, "claim", claim)
    assert abandoned_in(host.jobs_root, ()) == []
