"""An I/O error while committing: no acknowledgement, and the daemon ends: it cannot trust more."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusched_client.errors import GpuschedError
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
