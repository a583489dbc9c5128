"""gsub: submit one job. Parse, one call, render, exit; with --wait a second call."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from gpusched_client.commands.click_options import submit_options
from gpusched_client.commands.common import (
    CONTEXT_SETTINGS,
    EXIT_INTERRUPTED,
    VERSION,
    Command,
    print_err,
    print_out,
)
from gpusched_client.wire.job_options import OPTIONS, Section, describe_request

if TYPE_CHECKING:
    from gpusched_client.client import Client
    from gpusched_client.submission.script import Script
    from gpusched_client.wire.job_messages import JobView
    from gpusched_client.wire.submit_messages import JobRequest, SubmitResult

_WAIT_RECONNECT_S = 600.0

_NOT_IN_SCRIPTS = {
    "line": "-c",
    "script_file": "--script",
    "words": "a command",
    "wait": "--wait",
    "parsable": "--parsable",
    "as_json": "--json",
    "dry_run": "--dry-run",
}


class _Gsub(Command):
    """Keeps its words, since the options in a script are read before them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["gsub.words"] = list(args)
        return super().parse_args(ctx, args)


@click.command(
    cls=_Gsub,
    name="gsub",
    context_settings={**CONTEXT_SETTINGS, "allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    epilog="Examples: gsub -g 2 -t 4h python train.py · gsub -m 18G -- ./infer --fast · "
    "gsub -c 'make && ./bench' · gsub train.sh (options in its #GSUB lines)",
)
@click.option("-c", "--command", "line", metavar="LINE", help="Run a shell line with /bin/sh.")
@click.option(
    "--script", "script_file", metavar="FILE", help="Run this script as it is now; - is stdin."
)
@submit_options(Section.RESOURCES)
@submit_options(Section.FILES)
@click.option("-D", "--chdir", metavar="DIR", help="Run in this directory.")
@submit_options(Section.QUEUE)
@click.option("--wait", is_flag=True, help="Wait for the end; exit with the job's status.")
@click.option("--parsable", is_flag=True, help="Print the id alone.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
@click.option("--dry-run", is_flag=True, help="Say what would happen; submit nothing.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGS]...")
@VERSION
@click.pass_context
def cli(ctx: click.Context, /, **options: Any) -> int:
    """Submit a job: a command, a script (its content is kept), or - for a script from stdin.

    The first word that is not an option begins the command. A shell script, or a file with #GSUB or
    #SBATCH lines, is captured as it is now; any other command runs from where it lies.
    """
    if options["parsable"] and options["as_json"]:
        raise click.UsageError("--parsable and --json exclude each other.")
    script = _script(options)
    if script is not None:
        options = _with_script_options(ctx, script, options)
    request = _request(script, options)
    return _dry_run(request, options) if options["dry_run"] else _submit(request, options)


# ----------------------------------------------------------------------------------- request


def _script(options: dict[str, Any]) -> Script | None:
    """The script to capture, if the words name one; its arguments are left in the words."""
    words: tuple[str, ...] = options["words"]
    if options["line"] is not None:
        if words or options["script_file"] is not None:
            raise click.UsageError("-c takes the whole command; give no other beside it.")
        if not options["line"].strip():
            raise click.UsageError(
                f"-c {options['line']!r} is not a command; give it a shell line."
            )
        return None
    from gpusched_client.submission import script

    if options["script_file"] == "-":
        return _script_from_stdin()
    if options["script_file"] is not None:
        return script.read_script(options["script_file"])
    if not words:
        raise click.UsageError("no command; write gsub [OPTIONS] COMMAND [ARGS]...")
    if words[0] == "-":
        return _script_from_stdin()
    return script.read_script(words[0]) if script.is_script(words[0]) else None


def _script_from_stdin() -> Script:
    from gpusched_client.submission import script
    from gpusched_client.wire.limits import PAYLOAD_BYTES_MAX

    if sys.stdin.isatty():
        print_err("gsub: reading the script from the terminal; end it with Ctrl-D")
    return script.script_of(sys.stdin.buffer.read(PAYLOAD_BYTES_MAX + 1), "-")


def _with_script_options(
    ctx: click.Context, script: Script, options: dict[str, Any]
) -> dict[str, Any]:
    """The options again, those in the script first, so that the command line's win."""
    for warning in script.warnings:
        print_err(f"gsub: {warning}")
    if not script.options:
        return options
    for here, words in script.lines:
        try:
            inner = ctx.command.make_context("gsub", list(words))
        except click.UsageError as error:
            raise click.UsageError(f"{here}: {error.format_message()}") from error
        for name, text in _NOT_IN_SCRIPTS.items():
            if inner.params[name]:
                raise click.UsageError(f"{here}: a script's option lines cannot hold {text}.")
    return ctx.command.make_context("gsub", [*script.options, *ctx.meta["gsub.words"]]).params


def _request(script: Script | None, options: dict[str, Any]) -> JobRequest:
    from gpusched_client.submission.request import job_request, legal_name

    words = list(options["words"])
    command: dict[str, Any] = {"argv": words}
    name = options["name"]
    if options["line"] is not None:
        command = {"shell": options["line"]}
    elif script is not None:
        source = options["script_file"] or words.pop(0)
        command = {"script": script.content, "args": words}
        name = name or ("script" if source == "-" else legal_name(source))
    asked = {keyword: options[keyword] for keyword in OPTIONS}
    return job_request(**command, cwd=options["chdir"], **{**asked, "name": name})


# ------------------------------------------------------------------------------------- calls


def _dry_run(request: JobRequest, options: dict[str, Any]) -> int:
    from gpusched_client.client import Client
    from gpusched_client.output.json import json_text
    from gpusched_client.terms import printable
    from gpusched_client.wire.submit_messages import SubmitRequest

    with Client() as client:
        result = client.submit_request(SubmitRequest((request,), dry_run=True))
    _warn(result)
    if options["as_json"]:
        print_out(json_text({"would_start": result.would_start, "reasons": result.reasons}))
        return 0
    limit_s = result.time_limits_s[0] if result.time_limits_s else None
    print_out(f"Understood: {printable(describe_request(request, limit_s))}\n")
    for text in filter(None, result.would_start):
        print_out(f"Would start now on {printable(text)}\n")
    for text in filter(None, result.reasons):
        print_out(f"Would wait: {printable(text)}\n")
    return 0


def _submit(request: JobRequest, options: dict[str, Any]) -> int:
    from gpusched_client.client import Client
    from gpusched_client.wire.submit_messages import SubmitRequest

    with Client(reconnect_s=_WAIT_RECONNECT_S if options["wait"] else 30.0) as client:
        try:
            result = client.submit_request(SubmitRequest((request,)))
        except KeyboardInterrupt:
            print_err(
                "gsub: interrupted while submitting; `gq --me` shows whether the job is there"
            )
            return EXIT_INTERRUPTED
        _warn(result)
        job_id = result.job_ids[0]
        if not (options["wait"] and options["as_json"]):
            _print_submitted(request, result, options)
        return _wait(client, job_id, options) if options["wait"] else 0


def _warn(result: SubmitResult) -> None:
    for warning in result.warnings:
        print_err(f"gsub: {warning}")


def _print_submitted(request: JobRequest, result: SubmitResult, options: dict[str, Any]) -> None:
    job_id = result.job_ids[0]
    if options["parsable"]:
        print_out(f"{job_id}\n")
        return
    limit_s = result.time_limits_s[0] if result.time_limits_s else None
    if options["as_json"]:
        from gpusched_client.output.json import json_text

        print_out(json_text({"job_id": job_id, "time_limit_s": limit_s, "name": request.name}))
    else:
        from gpusched_client.terms import printable

        print_out(f"Submitted job {job_id}: {printable(describe_request(request, limit_s))}\n")


def _wait(client: Client, job_id: int, options: dict[str, Any]) -> int:
    """Wait for the job's end and give its status; an interrupt leaves the job alone."""
    from gpusched_client.commands.report import exit_status
    from gpusched_client.errors import Unavailable
    from gpusched_client.output.json import json_text

    sys.stdout.flush()
    try:
        job = client.wait(job_id)
    except KeyboardInterrupt:
        print_err(f"gsub: job {job_id} goes on; `gq {job_id}` shows it, `gcancel {job_id}` ends it")
        return EXIT_INTERRUPTED
    except Unavailable as error:
        raise Unavailable(f"job {job_id} is submitted, but {error.message}") from error
    if options["as_json"]:
        print_out(json_text(job))
    _print_ended(job)
    return exit_status(job)


def _print_ended(job: JobView) -> None:
    from gpusched_client.output.text import gpu_or_reason
    from gpusched_client.terms import JobState

    if job.state is not JobState.COMPLETED:
        print_err(f"gsub: job {job.job_id} is {job.state}: {gpu_or_reason(job)}")


if __name__ == "__main__":
    cli()
