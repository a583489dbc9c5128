"""gctl: what administrators do, and what owners do to their own queued jobs. One call a command."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from gpusched_client.commands.answering import (
    note_done,
    print_err,
    print_out,
    tell_who_answered,
    terminal_width,
)
from gpusched_client.commands.click_options import change_option
from gpusched_client.commands.common import CONTEXT_SETTINGS, VERSION, Group
from gpusched_client.errors import Conflict, Denied, GpuschedError, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from gpusched_client.client import Client

EXIT_PROBLEMS = 1
_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
_JOBS = click.argument("words", nargs=-1, required=True, metavar="IDS...")


@click.group(
    cls=Group,
    name="gctl",
    context_settings=CONTEXT_SETTINGS,
    epilog="Jobs are written 7, 1-3,7, @ (your last job). Owners may hold, release, update and top "
    "their own jobs; the rest is for root and the admin group.",
)
@VERSION
def cli() -> None:
    """Administer the scheduler; hold, release and change jobs."""


# ------------------------------------------------------------------------------------- GPUs


@cli.command(context_settings=CONTEXT_SETTINGS)
@click.argument("gpu", metavar="GPU")
@click.option(
    "--reason", metavar="TEXT", default="by an admin", help="Why; shown to people who wait."
)
def drain(gpu: str, reason: str) -> int:
    """Let GPU (index or UUID) take no more jobs; those on it go on. In MIG mode: all its slices."""
    with _client() as client:
        drained = client.drain_all(gpu, reason)
    note_done(f"GPU {gpu} is drained")
    for each in drained:
        _print_gpu(each)
    return 0


@cli.command(context_settings=CONTEXT_SETTINGS)
@click.argument("gpu", metavar="GPU")
def resume(gpu: str) -> int:
    """Put GPU back into service."""
    with _client() as client:
        resumed = client.resume_all(gpu)
    note_done(f"GPU {gpu} is in service again")
    for each in resumed:
        _print_gpu(each)
    return 0


@cli.group(context_settings=CONTEXT_SETTINGS)
def gpus() -> None:
    """Release the driver and take it back, to change MIG modes or reset a GPU."""


@gpus.command("release", context_settings=CONTEXT_SETTINGS)
@click.option(
    "--reason", metavar="TEXT", default="for maintenance", help="Shown to people who wait."
)
def gpus_release(reason: str) -> int:
    """Close the driver. Running jobs go on; no job starts until `gctl gpus resume`."""
    with _client() as client:
        result = client.gpus_release(reason)
    note_done("the driver is released")
    busy = sorted({job for gpu in result.gpus for job in gpu.jobs})
    still = f"; {_jobs(busy)} still use{'s' if len(busy) == 1 else ''} it" if busy else ""
    print_out(f"the driver is released{still}\n")
    return 0


@gpus.command("resume", context_settings=CONTEXT_SETTINGS)
def gpus_resume() -> int:
    """Open the driver again, with the GPUs and slices that there are now."""
    from gpusched_client.output.status import gpus_table
    from gpusched_client.terms import printable

    with _client() as client:
        result = client.gpus_resume()
    note_done("what was asked is done")
    print_out(gpus_table(result.gpus, terminal_width()))
    if result.problem is not None:
        print_err(f"gctl: {printable(result.problem)}")
    return 0 if result.problem is None else EXIT_PROBLEMS


def _print_gpu(gpu: Any) -> None:
    from gpusched_client.terms import printable

    reason = f": {printable(gpu.reason)}" if gpu.reason else ""
    jobs = f"; runs {_jobs(gpu.jobs)}" if gpu.jobs else ""
    name = gpu.uuid if gpu.index is None else gpu.index
    print_out(f"GPU {name}: {printable(gpu.state)}{reason}{jobs}\n")


def _jobs(job_ids: Sequence[int]) -> str:
    """As "job 7" or "jobs 7, 9"."""
    return f"job{'' if len(job_ids) == 1 else 's'} {', '.join(map(str, job_ids))}"


# ------------------------------------------------------------------------------------- jobs


@cli.command(context_settings=CONTEXT_SETTINGS)
@_JOBS
@_AS_JSON
def hold(words: tuple[str, ...], as_json: bool) -> int:
    """Let queued jobs wait until they are released."""
    return _update(words, as_json, hold=True)


@cli.command(context_settings=CONTEXT_SETTINGS)
@_JOBS
@_AS_JSON
def release(words: tuple[str, ...], as_json: bool) -> int:
    """Let held jobs run when their turn comes.

    Their waiting time starts again.
    """
    return _update(words, as_json, hold=False)


@cli.command(context_settings=CONTEXT_SETTINGS)
@_JOBS
@change_option("time_limit", "New limit.")
@change_option("nice", "New nice value; owners may only raise it.")
@change_option("name", "New name.")
@change_option("vram", "New VRAM of a queued job.")
@_AS_JSON
def update(words: tuple[str, ...], as_json: bool, **changes: Any) -> int:
    """Change jobs. A running job's limit may grow as far as no promised start moves later."""
    if all(value is None for value in changes.values()):
        raise click.UsageError("nothing to change; give --time, --nice, --name or --vram.")
    return _update(words, as_json, **changes)


@cli.command(context_settings=CONTEXT_SETTINGS)
@click.argument("word", metavar="ID")
@_AS_JSON
def top(word: str, as_json: bool) -> int:
    """Put a queued job before your own others.

    An admin puts it before everybody's.
    """
    from gpusched_client.commands.report import report

    with _client() as client:
        (job_id, *others) = _ids(client, [word])
        if others:
            raise click.UsageError("only one job can be first; name one.")
        outcome = client.top(job_id)
    note_done("what was asked is done")
    return report("gctl", [outcome], as_json)


def _update(words: Sequence[str], as_json: bool, **changes: Any) -> int:
    from gpusched_client.commands.report import report

    with _client() as client:
        outcomes = client.update(_ids(client, words), **changes)
    note_done("what was asked is done")
    return report("gctl", outcomes, as_json)


def _ids(client: Client, words: Sequence[str]) -> Sequence[int]:
    from gpusched_client.commands.selectors import named_ids

    return named_ids(client, words)


# ----------------------------------------------------------------------------------- daemon


@cli.command(context_settings=CONTEXT_SETTINGS)
def reload() -> int:
    """Read the configuration again; a bad one changes nothing."""
    with _client() as client:
        result = client.reload()
    note_done("the configuration is read again")
    lines = [f"changed {key}\n" for key in result.changed] or ["nothing has changed\n"]
    print_out("".join([*lines, *(f"{text}\n" for text in result.broken)]))
    return 0


@cli.command(context_settings=CONTEXT_SETTINGS)
@_AS_JSON
def status(as_json: bool) -> int:
    """Show the daemon's health.

    The exit status is 1 where something needs a person.
    """
    import time

    from gpusched_client.output.json import json_text
    from gpusched_client.output.status import status_text

    with _client() as client:
        found = client.status()
    print_out(json_text(found) if as_json else status_text(found, time.time(), terminal_width()))
    return EXIT_PROBLEMS if found.problems else 0


@cli.command(context_settings=CONTEXT_SETTINGS)
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def backup(file: str, force: bool) -> int:
    """Write a copy of the database to FILE.

    It is consistent, and made while the daemon runs. For root alone: the copy holds the
    environments of waiting jobs, so FILE is readable by its owner only.
    """
    from pathlib import Path

    from gpusched_client.errors import Conflict

    if not file:
        raise click.UsageError("FILE is empty; name the file that the copy is to be.")
    target = Path(file)
    if target.exists() and not force:
        raise Conflict(f"{target} exists; choose another name, or replace it with --force")
    with _client() as client:
        if target.exists():
            _require_other(target, client.status().database)
        size = _write(target, client)
    note_done(f"{target} is written")
    from gpusched_client.units import bytes_text

    print_out(f"{target}: {bytes_text(size)}\n")
    return 0


def _require_other(target: Path, database: str) -> None:
    """Raises Conflict: the daemon would end, without what was committed meanwhile."""
    from gpusched_client.errors import Conflict

    for each in (database, f"{database}-wal", f"{database}-shm"):
        if os.path.exists(each) and os.path.samefile(target, each):
            raise Conflict(f"{target} is in use by the daemon; choose another name")


def _write(target: Path, client: Client) -> int:
    """The pieces, into a file that gets its name when it is whole and durable; its size."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error
    try:
        size = 0
        with open(descriptor, "wb") as copy:
            for piece in client.backup():
                size += copy.write(piece)
            copy.flush()
            os.fsync(copy.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return size


@contextmanager
def _client() -> Iterator[Client]:
    from gpusched_client.client import Client

    with Client() as client:
        try:
            yield client
        except (Conflict, Denied, NotFound):
            with suppress(GpuschedError):  # that error is the one to tell
                tell_who_answered("gctl", client)
            raise
        with suppress(GpuschedError):  # what was asked is done
            tell_who_answered("gctl", client)


if __name__ == "__main__":
    cli()
