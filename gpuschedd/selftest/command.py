"""`gpuschedd selftest`: whom it asks, as whom, and how it answers. Owns options and text."""

from __future__ import annotations

import json
import os
import platform
import pwd
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gpusched_client import Client, __version__, job_request, paths
from gpusched_client.errors import Denied, GpuschedError, Unavailable
from gpusched_client.terms import Mode
from gpusched_client.wire.submit_messages import SubmitRequest
from gpuschedd.selftest.findings import Finding, Result, finding_json, findings_table
from gpuschedd.selftest.host import driver_version, listing
from gpuschedd.selftest.jobs import Bench, Patience, Stopped
from gpuschedd.selftest.rounds import SelfTest, Tried
from gpuschedd.supervisor.errors import SetupFailed
from gpuschedd.supervisor.identity import drop_to

EXIT_FAILED = 1
PATH = "/usr/local/bin:/usr/bin:/bin"


@click.command("selftest")
@click.option("--system", is_flag=True, help="The system's daemon; needs --as.")
@click.option("--as", "user", metavar="USER", help="Whose jobs the checks run as.")
@click.option("--json", "as_json", is_flag=True, help="One JSON value, for bug reports.")
@click.pass_context
def selftest(context: click.Context, system: bool, user: str | None, as_json: bool) -> None:
    """Try whether the daemon sees and gives this host's GPUs as they are.

    Runs small jobs (1 GiB, 20 s) on the GPUs that are idle, and one process beside the scheduler;
    under five minutes. Exit status 0: all ok or skipped; 1: a check failed; 69: no daemon.
    """
    group = context.find_root().params  # `gpuschedd --system selftest` says it as well
    system = system or bool(group.get("system"))
    socket: Path | None = group.get("socket_path")
    if socket is None and system and not os.environ.get(paths.SOCKET_ENV):
        socket = Path(paths.SYSTEM_SOCKET)
    if system and user is None:
        raise click.UsageError("--system needs --as USER, whose jobs the checks run as")
    if user is not None:
        _become(user, is_system=system)
    try:
        status = _run(socket, as_json, is_system=system)
    except Stopped as stopped:
        status = 128 + stopped.number
    except GpuschedError as error:
        click.echo(f"gpuschedd selftest: {error.message}", err=True)
        status = error.exit_status
    sys.exit(status)


def _become(user: str, *, is_system: bool) -> None:
    """Be that user from now on: jobs, files and the foreign process are all theirs."""
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        raise click.UsageError(f"--as {user}: no such user") from None
    if account.pw_uid == os.geteuid():
        return
    if os.geteuid() != 0:
        own = f"uid {os.geteuid()}"
        raise click.UsageError(f"--as {user}: {own} can only be itself; root can be others")
    if not is_system:
        raise click.UsageError(f"--as {user}: root's own daemon serves root alone; give --system")
    socket = os.environ.get(paths.SOCKET_ENV)
    try:
        drop_to(user, account.pw_uid, account.pw_gid)
    except (SetupFailed, OSError) as error:
        raise click.UsageError(f"--as {user}: {error}") from error
    os.chdir("/")
    own_names = {"HOME": account.pw_dir, "USER": user, "LOGNAME": user, "SHELL": account.pw_shell}
    path, language = os.environ.get("PATH", PATH), os.environ.get("LANG", "C.UTF-8")
    os.environ.clear()
    os.environ.update(own_names | {"PATH": path, "LANG": language})
    if socket:
        os.environ[paths.SOCKET_ENV] = socket


def _run(socket: Path | None, as_json: bool, *, is_system: bool) -> int:
    """The exit status."""
    began_s = time.monotonic()
    patience = Patience()
    with Client(socket) as client:
        hello = client.hello()
        if is_system and hello.mode != Mode.SYSTEM:
            raise Unavailable("a user's own daemon answered, not the system's; leave --system out")
        if hello.mode == Mode.SYSTEM and os.geteuid() == 0 and not is_system:
            raise click.UsageError("the system's daemon answered: give --system --as USER")
        if hello.mode == Mode.SYSTEM:
            _require_taken(client)
        daemon = Tried.ask(client)
        found = listing()
        bench = Bench(client, patience, is_simulated=daemon.is_simulated)
        try:
            test = SelfTest(daemon, found, bench, patience, _say)
            findings = test.run()
        finally:
            bench.close()
    facts = _facts(daemon, driver_version(found), test.cuda)
    if as_json:
        facts |= {"took_s": round(time.monotonic() - began_s, 1), **_results(findings)}
        click.echo(json.dumps(facts, indent=2))
    else:
        click.echo(_headline(daemon, facts))
        click.echo(findings_table(findings), nl=False)
    return EXIT_FAILED if _is_failed(findings) else 0


def _require_taken(client: Client) -> None:
    """UsageError where jobs of this user are refused whatever they are: that is no check's."""
    trial = SubmitRequest((job_request(["true"], gpus=0, cwd="/"),), dry_run=True)
    try:
        client.submit_request(trial)
    except Denied as error:
        raise click.UsageError(
            f"{error.message}. The checks need somebody whose jobs are taken: give --system --as "
            "with the name of a person"
        ) from error
    except Unavailable:
        raise
    except GpuschedError:
        return  # a limit, or a disk that is full: the checks' own jobs will say so


def _say(text: str) -> None:
    click.echo(f"gpuschedd selftest: {text}", err=True)


def _is_failed(findings: Sequence[Finding]) -> bool:
    return any(finding.result is Result.FAILED for finding in findings)


def _facts(daemon: Tried, driver: str | None, cuda: int | None) -> dict[str, Any]:
    """What a bug report needs beside the results."""
    status = daemon.status
    return {
        "version": __version__,
        "daemon": {
            "version": status.version,
            "mode": status.mode,
            "launch": status.launch,
            "gpu_source": status.gpu_source,
            "problems": list(status.problems),
        },
        "driver": driver,
        "cuda": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        "kernel": os.uname().release,
        "python": platform.python_version(),
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "model": gpu.model,
                "total_bytes": gpu.total_bytes,
                "state": gpu.state,
                "reason": gpu.reason,
            }
            for gpu in daemon.gpus
        ],
    }


def _results(findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "result": (Result.FAILED if _is_failed(findings) else Result.OK).value,
        "checks": [finding_json(finding) for finding in findings],
    }


def _headline(daemon: Tried, facts: Mapping[str, Any]) -> str:
    """The versions, in one line."""
    status = daemon.status
    driver = f"driver {facts['driver']}" if facts["driver"] else "no driver"
    who = f"gpuschedd {status.version} ({status.mode}, {status.launch}, {status.gpu_source})"
    return f"{who}, {driver}, Linux {facts['kernel']}, Python {facts['python']}"
