"""Other schedulers beside ours: each is measured where it is on PATH, never installed for it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.daemon import until

SLOTS = 8
UP_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Peer:
    """How one takes a command; `environment` leads to the server that was started for it."""

    name: str
    submit_words: tuple[str, ...]
    environment: dict[str, str]
    place: Path

    def submit(self, command: Sequence[str]) -> None:
        """Queue one job; it runs when it can."""
        subprocess.run(
            [*self.submit_words, *command],
            env=os.environ | self.environment,
            cwd=self.place,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )


@dataclass(frozen=True)
class Absent:
    """One that cannot be measured here, and why."""

    name: str
    why: str

    @property
    def text(self) -> str:
        """For the report."""
        return f"{self.name}: {self.why}"


@contextmanager
def task_spooler(place: Path) -> Iterator[Peer | Absent]:
    """Its own server behind a socket of its own; Debian calls it tsp, others ts."""
    program = shutil.which("tsp")
    if program is None:
        yield Absent("task-spooler", "not installed")
        return
    environment = {"TS_SOCKET": str(place / "ts.sock"), "TMPDIR": str(place)}
    environment["TS_SLOTS"] = str(SLOTS)
    try:
        yield Peer("task-spooler", (program, "-n"), environment, place)
    finally:
        subprocess.run([program, "-K"], env=os.environ | environment, check=False)


@contextmanager
def hyper_queue(place: Path) -> Iterator[Peer | Absent]:
    """A server and a worker of its own."""
    program = shutil.which("hq")
    if program is None:
        yield Absent("HyperQueue", "not installed")
        return
    words = [program, "--server-dir", str(place / "hq")]
    running = [subprocess.Popen([*words, "server", "start"], stdout=subprocess.DEVNULL)]
    try:
        until((place / "hq" / "hq-current" / "access.json").exists, "its server", UP_DEADLINE_S)
        worker = [*words, "worker", "start", "--cpus", str(SLOTS)]
        running.append(subprocess.Popen(worker, stdout=subprocess.DEVNULL))
        nothing = ("--stdout", "none", "--stderr", "none")
        yield Peer("HyperQueue", (*words, "submit", *nothing, "--"), {}, place)
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait()


@contextmanager
def slurm(place: Path) -> Iterator[Peer | Absent]:
    """The one that serves this host, as it is configured."""
    if shutil.which("srun") is None or shutil.which("sinfo") is None:
        yield Absent("Slurm", "not installed")
    elif subprocess.run(["sinfo"], capture_output=True, check=False).returncode != 0:
        yield Absent("Slurm", "installed, but its daemons do not answer")
    else:
        script = place / "words.sh"
        script.write_text('#!/bin/sh\nexec "$@"\n')
        words = ("sbatch", "--quiet", "--output=/dev/null", str(script))
        yield Peer("Slurm", words, {}, place)


@contextmanager
def queue_only(program: str) -> Iterator[Absent]:
    """One whose programs are looked for and, so far, not driven."""
    found = shutil.which(program)
    yield Absent(program, "not installed" if found is None else f"{found}: no driver here yet")


ALL = (
    task_spooler,
    hyper_queue,
    slurm,
    lambda _place: queue_only("runqd"),
    lambda _place: queue_only("gpusched"),
)
