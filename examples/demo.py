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
    command += ["--socket", os.environ["GPUSCHED_SOCKET"], "--config", os.devnull]
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


def simjob(vram: str, hold_s: int) -> list[str]:
    """A stand-in for a training job: it claims memory on its simulated GPUs."""
    return ["gpusched-simjob", "--vram", vram, "--hold", f"{hold_s}s"]


def jobs() -> None:
    """Six jobs for four GPUs: some run, some wait, one is cancelled, one fails."""
    say("A takes 2 of the 4 GPUs for 20 s. B wants all 4: it waits, with a promised start.")
    run("gsub", "-J", "A", "-g", "2", "-t", "20s", *simjob("20G", 18))
    run("gsub", "-J", "B", "-g", "4", "-t", "10s", *simjob("20G", 2))
    say("C wants 1 GPU for 3 s: it fits into the gap. D wants 1 for 40 s: it would delay B.")
    run("gsub", "-J", "C", "-t", "3s", *simjob("20G", 1))
    run("gsub", "-J", "D", "-t", "40s", *simjob("20G", 38))
    say("One that declares its memory and shares a GPU, and one that fails.")
    run("gsub", "-J", "share", "-m", "8G", "-t", "5s", *simjob("8G", 3))
    run("gsub", "-J", "broken", "-t", "3s", "-c", "echo 'loading data'; exit 3")


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
            say("Why does B wait?")
            run("gq", "2")
            client.wait([3, 5, 6], timeout_s=50)
            say("Two GPUs are idle now. Why does D wait all the same?")
            run("gq", "4")
            client.wait(2, timeout_s=50)
            say("B is done; D had its turn after it. We cancel D.")
            run("gq")
            run("gcancel", "4", "--reason", "demo")
            client.wait(range(1, 7), timeout_s=50)
            say("All done: states and true exit codes")
            run("gq", "1-6", "--format", "JOBID,NAME,ST,ELAPSED,GPUS,VRAM,EXIT")
            say("The output of A")
            print((place / "gsub-1.out").read_text(), end="")
            finals = {job.job_id: job for job in client.jobs(ids=range(1, 7)).jobs}
            ends = {1: "CD", 2: "CD", 3: "CD", 4: "CA", 5: "CD", 6: "F"}
            expected = [ends[job_id] for job_id in range(1, 7)]
            found = [finals[job_id].state.short for job_id in range(1, 7)]
            assert finals[1].submitted_at_s is not None
            waited_s = (finals[2].started_at_s or 0.0) - finals[1].submitted_at_s
            print(f"B started {waited_s:.0f} s after A was submitted; promised was within 35.")
            return 0 if found == expected and finals[6].exit_code == 3 and waited_s <= 35 else 1


if __name__ == "__main__":
    sys.exit(main())
