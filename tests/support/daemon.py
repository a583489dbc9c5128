"""A real daemon in a directory of its own: started, killed, started again, talked to."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from gpusched_client import Client
from gpusched_client.errors import Unavailable
from tests.support import forked, logs
from tests.support.forked import Process

BIN = Path(sys.executable).parent
SOAK = os.environ.get("GPUSCHED_SOAK") == "1"
DEADLINE_S = 60.0
LOOK_S = 0.02  # between two looks at a condition that has no event to wait for

T = TypeVar("T")


def until(condition: Callable[[], T | None], what: str, deadline_s: float = DEADLINE_S) -> T:
    """The condition's first true value. Fails loudly after deadline_s."""
    end_s = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end_s:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        select.select([], [], [], LOOK_S)


class DaemonProcess:
    """One state directory, and the daemon that runs on it now and then."""

    def __init__(
        self,
        place: Path,
        host: str = "4x24G",
        *options: str,
        wrapper: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.place = place
        self.state_dir = place / "state"
        self.socket = place / "s.sock"
        self.work_dir = place / "work"
        self.work_dir.mkdir(parents=True, exist_ok=True)
        (place / "config.toml").touch()
        self.options = ["--simulate", host, *options]
        self.wrapper = list(wrapper)
        self.environment = environment or {}
        self.log = place / "daemon.log"
        self.process: Process | None = None

    @property
    def command(self) -> list[str]:
        """The daemon's command line."""
        return [*self.wrapper, sys.executable, "-m", "gpuschedd.main", *self._words]

    @property
    def _words(self) -> list[str]:
        words = ["--state-dir", str(self.state_dir), "--socket", str(self.socket)]
        return [*words, "--config", str(self.place / "config.toml"), *self.options]

    def spawn(self) -> Process:
        """Start it without waiting for anything."""
        logs.keep(self)
        environment = {**os.environ, **self.environment}
        with self.log.open("ab") as log:
            if not self.wrapper and not SOAK:
                self.process = forked.start(self._words, self.place, environment, log.fileno())
            if self.wrapper or SOAK or self.process is None:
                self.process = subprocess.Popen(
                    self.command,
                    stderr=log,
                    stdout=log,
                    stdin=subprocess.DEVNULL,
                    cwd=self.place,
                    env=environment,
                )
        return self.process

    def start(self) -> DaemonProcess:
        """Start it and wait until it answers."""
        process = self.spawn()

        def answers() -> bool:
            if process.poll() is not None:
                raise AssertionError(f"exit {process.returncode}: {self.log_tail()}")
            try:
                with self.client(reconnect_s=0.0) as client:
                    client.hello()
            except Unavailable:
                return False
            return True

        until(answers, "the daemon answers")
        return self

    def client(self, **options: float) -> Client:
        """A client of this daemon."""
        return Client(self.socket, **options)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.end(signal.SIGKILL)

    def stop(self) -> int:
        """An orderly stop; the exit status."""
        return self.end(signal.SIGTERM)

    def end(self, number: int) -> int:
        """Send a signal to the daemon we started and reap it."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)

    def end_traced(self) -> None:
        """Stop the daemon beneath strace, which itself must not be killed first."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in children.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGTERM)
        self.process.wait(DEADLINE_S)

    @property
    def log_name(self) -> str:
        """Whose log it is, for reports."""
        return f"the daemon in {self.place}"

    def log_text(self) -> str:
        """All that it has logged."""
        return self.log.read_text(errors="replace")

    def log_tail(self) -> str:
        """The end of its log, for messages."""
        return self.log_text()[-3000:]

    def is_over(self) -> bool:
        """Whether no daemon runs here now."""
        return self.process is None or self.process.poll() is not None

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """One of our commands, typed in the work directory."""
        return self._typed([str(BIN / words[0]), *words[1:]])

    def run_shell(self, line: str) -> subprocess.CompletedProcess[str]:
        """A shell's line in the work directory, where our commands are in PATH."""
        return self._typed(["sh", "-c", line])

    def _typed(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            cwd=self.work_dir,
            env={
                **os.environ,
                "GPUSCHED_SOCKET": str(self.socket),
                "PATH": f"{BIN}:{os.environ['PATH']}",
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@contextmanager
def daemon_in(place: Path, host: str = "4x24G", *options: str) -> Iterator[DaemonProcess]:
    """A started daemon; afterwards its jobs are cancelled and it is stopped."""
    daemon = DaemonProcess(place, host, *options)
    try:
        yield daemon.start()
    finally:
        clean_up(daemon)


def clean_up(daemon: DaemonProcess) -> None:
    """Leave no process behind."""
    if daemon.process is None:
        return
    try:
        if daemon.process.poll() is not None:
            daemon.start()
        _cancel_all(daemon)
        daemon.stop()
    finally:
        if daemon.process.poll() is None:
            daemon.kill()


def _cancel_all(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        live = client.jobs(states=["PENDING", "CONFIGURING", "RUNNING", "COMPLETING"]).jobs
        ids = [job.job_id for job in live]
        if ids:
            client.cancel(ids)
            client.wait(ids, timeout_s=DEADLINE_S)
