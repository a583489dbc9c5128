"""How long a start takes, in two trees side by side: from submit to the job's first instruction.

Usage: python benchmarks/start.py [--runs N] [--json] BASE [TREE]. BASE and TREE (default HEAD) are
revisions, of which worktrees are made, or directories. Each is installed into a venv of its own as
users do (needs git, gcc and a package index), and has its own daemon with simulated GPUs in user
mode; all is removed afterwards. Runs alternate between the two, so that what else the host does
falls on both: compare the ratios, and milliseconds only where nothing else runs. The least values
are what a quiet moment gives.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
RUNS, RUNS_MIN = 60, 30
WARM_UP_RUNS = 5
DEADLINE_S = 60.0
#: What the job does: it says when its first instructions were executed.
JOB = r"""
#include <stdio.h>
#include <time.h>
int main(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return printf("%lld\n", now.tv_sec * 1000000000LL + now.tv_nsec) < 0;
}
"""
COMMANDS = (("gsub", "--version"), ("gq", "--version"), ("gq",))


# --- in the tree's own interpreter --------------------------------------------------------------


def submit_when_told(socket: str, work: str, program: str) -> None:
    """For each line of stdin: submit the program; the nanoseconds until it ran, on stdout."""
    from gpusched_client import Client

    output = Path(work) / "output"
    with Client(socket) as client:
        client.hello()
        for _ in sys.stdin:
            began_ns = time.monotonic_ns()
            job = client.submit([program], cwd=work, output=str(output), time_limit="1:00")
            client.wait(job.id, timeout_s=DEADLINE_S)
            print(int(output.read_text()) - began_ns, flush=True)


# --- one tree -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """An installed tree with its daemon up and its submitter waiting."""

    scripts: Path
    socket: Path
    asked: IO[str]
    answers: IO[str]

    def start_s(self) -> float:
        """One job: from before the submit to its first instruction."""
        self.asked.write("go\n")
        self.asked.flush()
        return int(self.answers.readline()) / 1e9

    def command_s(self, words: tuple[str, ...]) -> float:
        """One command as people type it, the whole process."""
        environment = {"GPUSCHED_SOCKET": str(self.socket), "PATH": "/usr/bin:/bin"}
        began_s = time.monotonic()
        subprocess.run(
            [self.scripts / words[0], *words[1:]],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        return time.monotonic() - began_s


@contextmanager
def checked_out(revision: str, place: Path) -> Iterator[Path]:
    """The tree of a revision; a directory is its own."""
    if Path(revision).is_dir():
        yield Path(revision).resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(place), revision], check=True)
    try:
        yield place
    finally:
        subprocess.run([*git, "remove", "--force", str(place)], check=True)


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A process of ours, which is ended on leaving."""
    try:
        yield process
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


@contextmanager
def running(revision: str, place: Path, program: Path) -> Iterator[Tree]:
    """The revision's tree, installed and up, in a directory of its own."""
    place.mkdir()
    scripts, socket = place / "venv" / "bin", place / "s.sock"
    python = str(scripts / "python")
    with ExitStack() as stack:
        tree = stack.enter_context(checked_out(revision, place / "tree"))
        subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", str(tree)], check=True)
        daemon = [str(scripts / "gpuschedd"), "--simulate", "2x24G", "--socket", str(socket)]
        daemon += ["--state-dir", str(place / "state"), "--config", os.devnull]
        log = stack.enter_context((place / "log").open("w"))
        stack.enter_context(ended(subprocess.Popen(daemon, stderr=log, text=True)))
        _wait_for(socket.exists, f"no daemon: {place / 'log'}")
        submitter = subprocess.Popen(
            [python, __file__, "--submitter", str(socket), str(place), str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=place,
        )
        stack.enter_context(ended(submitter))
        assert submitter.stdin is not None
        assert submitter.stdout is not None
        yield Tree(scripts, socket, submitter.stdin, submitter.stdout)


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.02)


# --- both ---------------------------------------------------------------------------------------


def alternating(measures: Sequence[Callable[[], float]], runs: int) -> list[list[float]]:
    """`runs` values of each measure, taken in turns; every other round backwards."""
    taken: list[list[float]] = [[] for _ in measures]
    for number in range(WARM_UP_RUNS + runs):
        order = range(len(measures))
        for index in order if number % 2 else reversed(order):
            value = measures[index]()
            if number >= WARM_UP_RUNS:
                taken[index].append(value)
    return taken


def compared(base: list[float], tree: list[float]) -> dict[str, float]:
    """Medians and least values in milliseconds, and the ratio of each two."""
    figures: dict[str, float] = {}
    for which, pick in (("", median), ("least_", min)):
        before, after = 1e3 * pick(base), 1e3 * pick(tree)
        figures |= {
            f"{which}base_ms": round(before, 1),
            f"{which}tree_ms": round(after, 1),
            f"{which}ratio": round(after / before, 2),
        }
    return figures


def measure(trees: list[Tree], runs: int) -> dict[str, dict[str, float]]:
    """A row for the start of a job and one for each command."""
    base, tree = alternating([each.start_s for each in trees], runs)
    rows = {"submit to first instruction": compared(base, tree)}
    for words in COMMANDS:
        calls = [partial(each.command_s, words) for each in trees]
        rows[" ".join(words)] = compared(*alternating(calls, runs))
    return rows


def main() -> None:
    """Measure, print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base")
    parser.add_argument("tree", nargs="?", default="HEAD")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpusched-start-") as name, ExitStack() as stack:
        place = Path(name)
        program = place / "job"
        compiler = ["gcc", "-O2", "-static", "-x", "c", "-", "-o", str(program)]
        subprocess.run(compiler, input=JOB, text=True, check=True)
        trees = [
            stack.enter_context(running(revision, place / which, program))
            for which, revision in (("base", options.base), ("tree", options.tree))
        ]
        rows = measure(trees, max(RUNS_MIN, options.runs))
    if options.json:
        print(json.dumps(rows))
        return
    print(f"medians of {max(RUNS_MIN, options.runs)}, load {os.getloadavg()[0]:.1f}")
    for what, row in rows.items():
        print(f"{what:>28}: " + ", ".join(f"{key} {value:g}" for key, value in row.items()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--submitter"]:
        submit_when_told(*sys.argv[2:])
    else:
        main()
