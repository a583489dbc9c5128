"""A private daemon with four simulated GPUs runs real jobs before your eyes; about half a minute.

Nothing of it stays: state, socket and output live in a temporary directory. Each step prints the
command that it runs, so that everything here can be typed by hand.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpusched_client import Client
from gpusched_client.errors import Unavailable
from gpusched_client.terms import JobState

BIN = Path(sys.executable).parent
START_DEADLINE_S = 30.0


def say(text: str) -> None:
    """One line of narration."""
    print(f"\n\033[1m# {text}\033[0m" if sys.stdout.isatty() else f"\n# {text}", flush=True)


def run(*words: str) -> None:
    """Run one of our commands and show both it and what it says."""
    print("$ " + shlex.join(words), flush=True)
    subprocess.run([str(BIN / words[0]), *words[1:]], check=False)


@contextmanager
def private_daemon(place: Path) -> Iterator[Client]:
    """A daemon of our own, ended at the end."""
    os.environ["GPUSCHED_SOCKET"] = str(place / "gpuschedd.sock")
    command = [str(BIN / "gpuschedd"), "--simulate", "4x24G", "--state-dir", str(place / "state")]
    command += ["--socket", os.environ["GPUSCHED_SOCKET"], "--config", str(place / "none.toml")]
    with (place / "daemon.log").open("wb") as log, subprocess.Popen(command, stderr=log) as daemon:
        try:
            yield connect(daemon)
        finally:
            daemon.terminate()


def connect(daemon: subprocess.Popen[bytes]) -> Client:
    """The first connection, as soon as the daemon answers."""
    deadline_s = time.monotonic() + START_DEADLINE_S
    while True:
        client = Client()
        try:
            client.hello()
        except Unavailable:
            if daemon.poll() is not None or time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
        else:
            return client


def jobs() -> None:
    """Six jobs for four GPUs: some run, some wait, one is cancelled, one fails."""
    say("Six jobs for four GPUs")
    run(
        "gsub",
        "-J",
        "train",
        "-g",
        "2",
        "-t",
        "2",
        "gpusched-simjob",
        "--vram",
        "20G",
        "--hold",
        "6",
    )
    run(
        "gsub",
        "-J",
        "wide",
        "-g",
        "4",
        "-t",
        "1",
        "gpusched-simjob",
        "--vram",
        "20G",
        "--hold",
        "2",
    )
    run(
        "gsub",
        "-J",
        "share-a",
        "-m",
        "8G",
        "-t",
        "5s",
        "gpusched-simjob",
        "--vram",
        "8G",
        "--hold",
        "2",
    )
    run(
        "gsub",
        "-J",
        "share-b",
        "-m",
        "8G",
        "-t",
        "5s",
        "gpusched-simjob",
        "--vram",
        "8G",
        "--hold",
        "3",
    )
    run("gsub", "-J", "broken", "-t", "5s", "-c", "echo 'loading data'; exit 3")
    run("gsub", "-J", "forever", "-g", "1", "-t", "60", "sleep", "3600")


def main() -> int:
    """The tour."""
    with tempfile.TemporaryDirectory(prefix="gpusched-demo-") as name:
        place = Path(name)
        os.chdir(place)
        os.environ["PATH"] = f"{BIN}:{os.environ['PATH']}"
        with private_daemon(place) as client:
            run("gq", "--gpus")
            jobs()
            say("What runs, what waits and why")
            run("gq")
            say("Why does job 2 wait?")
            run("gq", "2")
            say("Cancel the endless one")
            run("gcancel", "6", "--reason", "demo")
            client.wait([1, 2, 3, 4, 5, 6], timeout_s=45)
            say("All done: states and true exit codes")
            run("gq", "1-6", "--format", "JOBID,NAME,ST,ELAPSED,GPUS,VRAM,EXIT")
            say("The output of job 1")
            print((place / "gsub-1.out").read_text(), end="")
            finals = {job.job_id: job for job in client.jobs(ids=range(1, 7)).jobs}
            expected = [JobState.COMPLETED] * 4 + [JobState.FAILED, JobState.CANCELLED]
            found = [finals[job_id].state for job_id in range(1, 7)]
            return 0 if found == expected and finals[5].exit_code == 3 else 1


if __name__ == "__main__":
    sys.exit(main())
