"""Many jobs at once: 10,000 in one go, and one by one over one connection.

Usage: python benchmarks/bulk.py [--jobs N] [--queued N] [--runs N] [--write]. In one go: the
requests are built, then submitted in as few calls as the daemon takes, all durable at the end. One
by one: with 1,000 jobs queued on a host whose free GPUs none of them can use, and with an empty
queue. Nothing runs; an fsync of the same directory is measured beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measure import fsync_ms, interleaved, scratch, timed_ms
from benchmarks.private import filled, private
from benchmarks.report import Report, options
from gpusched_client import Client
from gpusched_client.errors import TooLarge
from gpusched_client.submission.request import Surroundings, job_request
from gpusched_client.wire.submit_messages import JobRequest

JOBS, QUEUED, SINGLES, RUNS = 10_000, 1_000, 200, 5
PART = 1_000
#: All GPUs of 80 GiB are held by one job; those of 24 GiB are free.
MIXED_HOST = "4x80G+4x24G"
LIMITS = "[limits]\nqueued_jobs = 1_000_000\nqueued_jobs_all = 1_000_000\n"


def wide(number: int, surroundings: Surroundings | None = None) -> JobRequest:
    """A job that waits for a GPU of 80 GiB; sizes and limits as mixed as people's, no two alike."""
    return job_request(
        ["true", str(number)],
        cwd="/",
        output="/dev/null",
        vram=f"{40 + number % 37}G",
        time_limit=f"{1 + number % 31}h",
        surroundings=surroundings,
    )


def build(jobs: int) -> list[JobRequest]:
    """So many jobs of one process."""
    surroundings = Surroundings()
    return [wide(number, surroundings) for number in range(jobs)]


@dataclass
class InOneGo:
    """A daemon for each round, since the queue has to be empty."""

    place: Path
    jobs: int
    build_ms: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)

    def ms(self) -> float:
        """One round: how long the calls take."""
        place = self.place / str(len(self.build_ms))
        made: list[JobRequest] = []
        self.build_ms.append(timed_ms(lambda: made.extend(build(self.jobs))))
        with private(place, "--simulate", MIXED_HOST, "--no-exec", config=LIMITS) as daemon:
            filled(daemon, "60G", gpus=4)
            with daemon.client(timeout_s=120.0) as client:
                client.hello()
                return timed_ms(lambda: self.calls.append(submit_all(client, made)))


def submit_all(client: Client, made: Sequence[JobRequest]) -> int:
    """Submit all in one call, or in parts where that is too much for one; the calls it took."""
    try:
        client.submit_many(made)
    except TooLarge:
        for begin in range(0, len(made), PART):
            client.submit_many(made[begin : begin + PART])
        return -(-len(made) // PART)
    return 1


@dataclass
class OneByOne:
    """A connection to a daemon with so many jobs queued."""

    client: Client

    def per_s(self) -> float:
        """So many are submitted, and cancelled again afterwards."""
        made = [wide(number) for number in range(SINGLES)]
        ids: list[int] = []
        took_ms = timed_ms(lambda: ids.extend(self.client.submit_many([one])[0].id for one in made))
        self.client.cancel(ids)
        return 1e3 * SINGLES / took_ms


def one_by_one(stack: ExitStack, place: Path, queued: int) -> OneByOne:
    """A daemon with that queue."""
    host = ("--simulate", MIXED_HOST, "--no-exec")
    daemon = stack.enter_context(private(place / f"queue{queued}", *host, config=LIMITS))
    filled(daemon, "60G", gpus=4)
    client = stack.enter_context(daemon.client())
    if queued > 0:
        submit_all(client, [wide(number) for number in range(queued)])
    return OneByOne(client)


def measure_one_go(report: Report, place: Path, jobs: int, runs: int) -> None:
    """In turns with an fsync."""
    rounds = InOneGo(place, jobs)
    taken = interleaved({"fsync": lambda: fsync_ms(place), "calls": rounds.ms}, runs)
    report.figure("fsync of a new file", "ms", taken["fsync"])
    report.figure(f"{jobs:,} requests are built", "ms", rounds.build_ms[1:])
    report.figure(f"{jobs:,} jobs are submitted, durable", "ms", taken["calls"], at_most=1_000)
    report.figure("calls it takes", "calls", rounds.calls[1:], at_most=1)


def measure_singles(report: Report, stack: ExitStack, place: Path, queued: int, runs: int) -> None:
    """Beside the long queue and the empty one, in turns."""
    empty, long = (one_by_one(stack, place, number) for number in (0, queued))
    rates = interleaved({"empty": empty.per_s, "long": long.per_s}, runs)
    report.figure("one by one, an empty queue", "a second", rates["empty"])
    report.figure(f"one by one, {queued:,} queued", "a second", rates["long"])
    slower = [fast / slow for fast, slow in zip(rates["empty"], rates["long"], strict=True)]
    report.figure("so many times slower with the queue", "times", slower, at_most=1.5)


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS, help="in one go")
    parser.add_argument("--queued", type=int, default=QUEUED)
    parser.add_argument("--runs", type=int, default=RUNS)
    asked = parser.parse_args()
    report = Report("bulk", "Submissions in bulk, by the Python API; nothing runs.")
    with scratch("bulk") as place, ExitStack() as stack:
        measure_one_go(report, place, asked.jobs, asked.runs)
        measure_singles(report, stack, place, asked.queued, asked.runs)
    report.finish(write=asked.write)


if __name__ == "__main__":
    main()
