"""`gpuschedd replay`: parse, run, print. Owns the options and the text; decides nothing."""

from __future__ import annotations

import csv
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from gpusched_client.errors import GpuschedError, Invalid, StorageError
from gpusched_client.terms import printable
from gpusched_client.units import parse_seconds
from gpuschedd.core.model import NEVER_S, Backfill, Gpu, Order, Policy
from gpuschedd.replay.engine import Replay, Replayed
from gpuschedd.replay.stats import Figures, Waits, figures
from gpuschedd.replay.workload import (
    TraceJob,
    Workload,
    equal_gpus,
    host_of,
    read_workload,
)

BAR_FROM_JOBS = 2000
USERS_SHOWN_MAX = 20


def _seconds(_ctx: click.Context, _param: click.Parameter, value: str) -> float:
    """ "90s", "30m", "24h", "7d", a bare number of seconds, or "inf"."""
    if value.strip().lower() == "inf":
        return NEVER_S
    try:
        return parse_seconds(value)
    except Invalid as error:
        raise click.BadParameter(
            f"{value!r} is not a time; write it like 90s, 30m, 24h, 7d or inf"
        ) from error


@click.command()
@click.argument("workload", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--gpus", type=click.IntRange(1), metavar="N", help="So many equal GPUs.")
@click.option("--host", metavar="HOST", help="GPUs with their memory, as 8x80G or 2x80G+2x24G.")
@click.option(
    "--backfill",
    type=click.Choice([mode.value for mode in Backfill]),
    default="easy",
    show_default=True,
    help="How jobs pass one that is blocked.",
)
@click.option(
    "--order",
    type=click.Choice([order.value for order in Order]),
    default="priority",
    show_default=True,
    help="fcfs is submit order without fair-share and age.",
)
@click.option(
    "--w-fair",
    type=click.FloatRange(0),
    metavar="WEIGHT",
    default=1000.0,
    show_default=True,
    help="Weight of the fair-share factor.",
)
@click.option(
    "--w-age",
    type=click.FloatRange(0, min_open=True),
    metavar="WEIGHT",
    default=10.0,
    show_default=True,
    help="Weight of an hour of waiting.",
)
@click.option(
    "--half-life",
    callback=_seconds,
    metavar="TIME",
    default="7d",
    show_default=True,
    help="Usage counts half after this time.",
)
@click.option(
    "--age-jobs",
    type=click.IntRange(0),
    metavar="N",
    default=1,
    show_default=True,
    help="Jobs of each user that gain age at a time; 0 is all.",
)
@click.option(
    "--promise-within",
    callback=_seconds,
    metavar="TIME",
    default="24h",
    show_default=True,
    help="A start this near is promised; 0 never, inf always.",
)
@click.option(
    "--promise-slack",
    callback=_seconds,
    metavar="TIME",
    default="24h",
    show_default=True,
    help="Early ends make a promise no earlier than this from now; 0: all the way.",
)
@click.option(
    "--learn/--no-learn",
    default=True,
    show_default=True,
    help="Expect of a job what its user's last two runs of the command took.",
)
@click.option(
    "--guess-length",
    callback=_seconds,
    metavar="TIME",
    default="24h",
    show_default=True,
    help="What a job without limit is expected to run when nothing is known.",
)
@click.option(
    "--head-patience",
    callback=_seconds,
    metavar="TIME",
    default="48h",
    show_default=True,
    help="So long beyond the start first expected, then GPUs are closed for the first job.",
)
@click.option(
    "--starts",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write job_id,start_s,end_s.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def replay(
    workload: Path,
    gpus: int | None,
    host: str | None,
    backfill: str,
    order: str,
    w_fair: float,
    w_age: float,
    half_life: float,
    age_jobs: int,
    promise_within: float,
    promise_slack: float,
    learn: bool,
    guess_length: float,
    head_patience: float,
    starts: Path | None,
    as_json: bool,
) -> None:
    """Run a WORKLOAD (CSV or .swf, also .gz) through the scheduler by a virtual clock.

    CSV columns: job_id,user,submit_s,gpus,run_s[,limit_s][,vram_bytes][,command]. A missing limit
    is run_s, -1 is no limit. Jobs that ask more than the host has are left out and counted.
    """
    try:
        cards = _cards(gpus, host)
        if half_life <= 0:
            raise Invalid("a half-life of 0; it must be above 0")
        if not 1 <= guess_length < math.inf:
            raise Invalid(f"a guess of {guess_length:g} s; it must be from 1 s on, and end")
        read = read_workload(workload)
        policy = Policy(
            backfill=Backfill(backfill),
            order=Order(order),
            w_fair=w_fair,
            w_age_per_h=w_age,
            half_life_s=half_life,
            age_jobs_per_user=age_jobs,
            promise_within_s=promise_within,
            promise_slack_s=promise_slack,
            learn_lengths=learn,
            guess_length_s=guess_length,
            head_patience_s=head_patience,
            kill_grace_s=0.0,
            launch_allowance_s=0.0,
        )
        before_s = time.perf_counter()
        with _progress(len(read.jobs)) as advance:
            done = Replay(read.jobs, cards, policy, on_start=advance).run()
        took_s = time.perf_counter() - before_s
        if starts is not None:
            _write_starts(starts, read.jobs, done)
        _report(figures(done, len(cards)), read, took_s, as_json=as_json)
    except GpuschedError as error:
        click.echo(f"gpuschedd replay: {error.message}", err=True)
        sys.exit(error.exit_status)
    except BrokenPipeError:
        raise  # a reader that left, as `| head` does: click ends quietly
    except OSError as error:
        click.echo(f"gpuschedd replay: cannot write the report: {error.strerror}", err=True)
        _forget_the_report()
        sys.exit(StorageError.exit_status)


def _forget_the_report() -> None:
    """What cannot be written is still buffered: the interpreter's last try must not fail again."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _cards(count: int | None, host: str | None) -> tuple[Gpu, ...]:
    if (count is None) == (host is None):
        raise Invalid("give the GPUs by either --gpus N or --host 8x80G")
    return host_of(host) if host is not None else equal_gpus(count or 0)


@contextmanager
def _progress(jobs: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on stderr where it is long and a terminal; stdout holds only the answer."""
    if jobs < BAR_FROM_JOBS or not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=jobs, label="started", file=sys.stderr) as bar:
        yield bar.update


def _write_starts(path: Path, jobs: tuple[TraceJob, ...], done: Replayed) -> None:
    """`job_id,start_s,end_s` in input order; jobs that were left out are missing."""
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(("job_id", "start_s", "end_s"))
            for job, ran in zip(jobs, done.ran, strict=True):
                if ran is not None:
                    rows.writerow((job.name, _plain(ran.start_s), _plain(ran.end_s)))
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror}; give --starts a place that can be written"
        ) from error


def _plain(seconds: float) -> str:
    """Whole seconds without a fraction."""
    return str(int(seconds)) if seconds == int(seconds) else repr(seconds)


def _report(found: Figures, read: Workload, took_s: float, *, as_json: bool) -> None:
    rate = found.jobs / took_s if took_s > 0 else 0.0
    if as_json:
        extra = {"unusable": read.unusable, "took_s": took_s, "jobs_per_s": rate}
        click.echo(json.dumps(found.as_json() | extra, indent=2))
        return
    for line in _lines(found):
        click.echo(line)
    note = f"{found.passes} passes in {took_s:.2f} s, {rate:.0f} jobs/s"
    if found.left_out or read.unusable:
        note += f"; left out: {found.left_out} too large, {read.unusable} without GPUs or run time"
    click.echo(note, err=True)


def _lines(found: Figures) -> Iterator[str]:
    yield f"jobs                {found.jobs}"
    yield f"utilisation         {100 * found.utilisation:.2f} %"
    yield f"makespan            {found.makespan_s:.0f} s"
    yield f"bounded slowdown    {found.bounded_slowdown:.2f} (mean, 10 s)"
    kept = f"promises            {found.promises_kept} kept, {found.promises_broken} broken"
    causes = ", ".join(f"{cause} {count}" for cause, count in found.broken_by.items())
    yield f"{kept} ({causes})" if causes else kept
    yield ""
    yield f"{'WAIT (s)':<20}{'JOBS':>8}{'MEAN':>12}{'MEDIAN':>12}{'P95':>12}{'MAX':>12}"
    yield _row("all", found.waits)
    for size, waits in found.by_size.items():
        yield _row(f"{size} GPU{'s' if size > 1 else ''}", waits)
    for user, waits in list(found.by_user.items())[:USERS_SHOWN_MAX]:
        yield _row(f"user {printable(user)}"[:19], waits)
    if len(found.by_user) > USERS_SHOWN_MAX:
        yield f"(users: {USERS_SHOWN_MAX} of {len(found.by_user)}; --json has all)"


def _row(name: str, waits: Waits) -> str:
    numbers = (waits.mean_s, waits.median_s, waits.p95_s, waits.max_s)
    return f"{name:<20}{waits.jobs:>8}" + "".join(f"{number:>12.1f}" for number in numbers)
