"""How many jobs a second, and what each costs: `true` on 8 slots, every step durable.

Usage: python benchmarks/throughput.py [--jobs N] [--runs N] [--base REVISION] [--write]. All jobs
are submitted in one go; the rate counts from before that to the end of the last. CPU is that of
the daemon, the supervisors and their children, from /proc. Each round asks for the floors, a peer
where one is installed, an older revision of this clone, and the fsyncs that a second allows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import peers
from benchmarks.measure import (
    adopt_orphans,
    fork_exec_ms,
    fsync_ms,
    interleaved,
    scratch,
    tree_cpu_s,
)
from benchmarks.private import Private, private
from benchmarks.report import ROOT, Report, options
from benchmarks.trees import BASE, NoTree, tree_of
from gpusched_client import Client
from gpusched_client.submission.request import job_request
from tests.support.daemon import until

JOBS, RUNS = 100, 5
DEADLINE_S = 120.0
HOST = f"{peers.SLOTS}x24G"


@dataclass
class Ours:
    """A daemon with 8 GPUs; what its rounds cost is kept."""

    daemon: Private
    client: Client
    cpu_ms: list[float] = field(default_factory=list)

    def jobs_per_s(self, jobs: int) -> float:
        """One round."""
        place = str(self.daemon.place)
        request = job_request(["true"], cwd=place, output="/dev/null", time_limit="1:00")
        cpu_s, began_s = tree_cpu_s(), time.monotonic()
        ids = [job.id for job in self.client.submit_many([request] * jobs)]
        ended = self.client.wait(ids, timeout_s=DEADLINE_S)
        took_s = time.monotonic() - began_s
        self.cpu_ms.append(1e3 * (tree_cpu_s() - cpu_s) / jobs)
        assert all(job.exit_code == 0 for job in ended)
        return jobs / took_s


def peer_jobs_per_s(peer: peers.Peer, place: Path, jobs: int) -> float:
    """One by one, as its command takes them; each leaves a file, as the end is not told."""
    began_s = time.monotonic()
    done = place / f"done{time.monotonic_ns()}"
    done.mkdir()
    for number in range(jobs):
        peer.submit(["touch", str(done / str(number))])
    until(lambda: len(os.listdir(done)) == jobs, f"{peer.name} has run all", DEADLINE_S)
    return jobs / (time.monotonic() - began_s)


@contextmanager
def ours(place: Path, tree: Path) -> Iterator[Ours]:
    """A daemon of that tree with a connection to it."""
    with private(place, "--simulate", HOST, tree=tree) as daemon, daemon.client() as client:
        client.hello()
        yield Ours(daemon, client)


def measure(report: Report, stack: ExitStack, place: Path, base: str, jobs: int, runs: int) -> None:
    """Everything in turns, then every figure."""
    now = stack.enter_context(ours(place / "now", ROOT))
    measures: dict[str, Callable[[], float]] = {
        "fork and exec of true, one after the other": lambda: 1e3 / fork_exec_ms(),
        "fsyncs of new files, one after the other": lambda: 1e3 / fsync_ms(place),
        "true on 8 slots, durable": lambda: now.jobs_per_s(jobs),
    }
    before: Ours | None = None
    try:
        tree = stack.enter_context(tree_of(base))
        before = stack.enter_context(ours(place / "base", tree))
        measures[f"true on 8 slots, {base}"] = partial(before.jobs_per_s, jobs)
    except NoTree as error:
        report.note(f"no comparison: {error}")
    for start_peer in peers.ALL:
        peer = stack.enter_context(start_peer(place))
        if isinstance(peer, peers.Absent):
            report.note(peer.text)
        else:
            measures[f"touch, {peer.name}"] = partial(peer_jobs_per_s, peer, place, jobs)
    taken = interleaved(measures, runs)
    for name, values in taken.items():
        report.figure(name, "a second", values, at_least=150 if "durable" in name else None)
    report.figure("CPU of a job", "ms", now.cpu_ms[1:], at_most=13)
    if before is not None:
        report.figure(f"CPU of a job, {base}", "ms", before.cpu_ms[1:])


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS, help="of each round")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--base", default=BASE, help="revision or directory to compare with")
    asked = parser.parse_args()
    adopt_orphans()
    report = Report("throughput", "`true` on 8 simulated GPUs, from submission to the last end.")
    with scratch("throughput") as place, ExitStack() as stack:
        measure(report, stack, place, asked.base, asked.jobs, asked.runs)
    report.finish(write=asked.write)


if __name__ == "__main__":
    main()
