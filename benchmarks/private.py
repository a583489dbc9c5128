"""A private daemon to measure: started, asked, ended. It may be of another tree than this."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import BIN, descendants
from benchmarks.report import ROOT
from benchmarks.trees import command
from gpusched_client import Client
from gpusched_client.errors import Unavailable
from tests.support.daemon import until

END_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Private:
    """A daemon that is up."""

    place: Path
    socket: Path
    state_dir: Path
    process: subprocess.Popen[bytes]
    tree: Path

    @property
    def pid(self) -> int:
        """Of the daemon itself."""
        return self.process.pid

    @property
    def environment(self) -> dict[str, str]:
        """What a command needs to be of the daemon's tree and ask it."""
        return {"GPUSCHED_SOCKET": str(self.socket), "PYTHONPATH": str(self.tree)}

    def command(self, name: str) -> list[str]:
        """One of the tree's commands, as people type it where the tree is this one."""
        return [str(BIN / name)] if self.tree == ROOT else command(self.tree, name)

    def client(self, **options: float) -> Client:
        """A connection to it."""
        return Client(self.socket, **options)


@contextmanager
def private(
    place: Path,
    *options: str,
    config: str = "",
    tree: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Private]:
    """A daemon in `place`, which keeps its state; afterwards it and its jobs are ended."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.toml").write_text(config)
    socket, state_dir = place / "s.sock", place / "state"
    words = ["--socket", str(socket), "--state-dir", str(state_dir)]
    words += ["--config", str(place / "config.toml")]
    if tree == ROOT:
        words.append("--private")  # an older one has no such option, and no need of it
    with (place / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpuschedd.main", *words, *options],
            cwd=place,
            env={**os.environ, **(environment or {}), "PYTHONPATH": str(tree)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    daemon = Private(place, socket, state_dir, process, tree)
    try:
        until(lambda: _answers(daemon), f"the daemon of {place / 'log'} answers")
        yield daemon
    finally:
        left = list(descendants(process.pid))  # supervisors and jobs: they outlive their daemon
        process.send_signal(signal.SIGTERM)
        process.wait(END_DEADLINE_S)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _answers(daemon: Private) -> bool:
    if daemon.process.poll() is not None:
        raise SystemExit((daemon.place / "log").read_text()[-2_000:])
    try:
        with daemon.client(reconnect_s=0.0) as client:
            client.hello()
    except Unavailable:
        return False
    return True


def filled(daemon: Private, vram: str, gpus: int) -> None:
    """One job takes so many GPUs whole and keeps them: what else asks those of that size waits."""
    with daemon.client() as client:
        job = client.submit(
            ["sleep", "86400"], gpus=gpus, vram=vram, exclusive=True, cwd="/", output="/dev/null"
        )
        until(lambda: client.job(job.id).started_at_s is not None, "the host is full")
