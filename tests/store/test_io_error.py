"""An I/O error while committing: no acknowledgement, and the daemon ends: it cannot trust more."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from gpusched_client.errors import GpuschedError, StorageError
from gpuschedd.store.database import StoreBroken
from gpuschedd.store.records import Changes
from gpuschedd.store.writer import Store
from tests.sim.harness import Host
from tests.support.daemon import DaemonProcess, clean_up, until


@pytest.mark.tool("strace")
def test_a_failed_sync_is_not_acknowledged_and_ends_the_daemon(tmp_path: Path) -> None:
    """The fourth fdatasync (the first ones open the log) fails once with EIO.

    The restart reads again what is really there.
    """
    daemon = DaemonProcess(tmp_path, "1x24G")
    daemon.start()
    daemon.stop()
    daemon.wrapper = [
        *("strace", "-f", "-b", "execve", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync"),
        *("-e", "inject=fdatasync:error=EIO:when=4"),
    ]
    process = daemon.start().process
    daemon.wrapper = []
    assert process is not None
    acknowledged: list[int] = []

    def submit_many() -> None:
        with daemon.client(reconnect_s=0.2) as client:
            for _ in range(20):
                acknowledged.append(client.submit(["true"], hold=True).id)

    with pytest.raises(GpuschedError):
        submit_many()
    until(lambda: process.poll() is not None, "the daemon ends by itself")
    assert process.returncode == 74
    daemon.start()
    with daemon.client() as client:
        assert {job.job_id for job in client.jobs().jobs} >= set(acknowledged)
    clean_up(daemon)


@pytest.mark.parametrize("name", ["gpuschedd.sqlite3", "gpuschedd.sqlite3-wal"])
def test_a_database_removed_in_use_acknowledges_nothing_more(tmp_path: Path, name: str) -> None:
    """SQLite would go on in a file that nobody can open any more. 78: an operator must look."""
    daemon = DaemonProcess(tmp_path, "1x24G")
    daemon.start()
    process = daemon.process
    assert process is not None
    with daemon.client(reconnect_s=0.2) as client:
        client.submit(["true"], hold=True)
        (daemon.state_dir / name).unlink()
        with pytest.raises(GpuschedError) as refused:
            client.submit(["true"], hold=True)
    assert refused.value.code in ("storage", "unavailable")
    until(lambda: process.poll() is not None, "the daemon ends by itself")
    assert process.returncode == 78
    assert "Restore a backup" in daemon.log_tail()


def _break(_: Store) -> None:
    raise StoreBroken("disk I/O error")


def test_an_error_beside_the_commits_ends_the_daemon_as_well(tmp_path: Path) -> None:
    """What reads for a launch, or forgets what is old, uses the same file as the commits."""

    async def story() -> None:
        host = Host(tmp_path, 1)
        running = asyncio.ensure_future(host.controller.run())
        with pytest.raises(StoreBroken):
            await host.controller.in_database(_break)
        with pytest.raises(StoreBroken):  # though the disk might take it
            await host.controller.in_database(lambda store: store.commit(Changes()))
        with pytest.raises(StoreBroken):
            await asyncio.wait_for(running, 30)
        host.controller.close()

    asyncio.run(story())


def test_a_database_that_cannot_be_read_is_no_bug_of_ours(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, "1x24G").start()
    with daemon.client() as client:
        job = client.submit(["true"], hold=True)
        client.cancel(job.id)
        shutil.rmtree(daemon.state_dir)
        with pytest.raises(StorageError, match="cannot be read"):
            client.job(job.id)
    daemon.stop()
