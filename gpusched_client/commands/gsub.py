"""gsub: submit one job. Parse, one call, render, exit; with --wait a second call."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from gpusched_client.commands.click_options import asked_by, flag_given, submit_options
from gpusched_client.commands.common import (
    CONTEXT_SETTINGS,
    EXIT_INTERRUPTED,
    VERSION,
    Command,
    note_done,
    print_err,
    print_out,
    tell_who_answered,
)
from gpusched_client.errors import Invalid
from gpusched_client.wire.job_options import OPTIONS, Section, describe_request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpusched_client.client import Client
    from gpusched_client.submission.script import Script
    from gpusched_client.submission.slurm import Given
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
    "no_check": "--no-check",
}


class _Gsub(Command):
    """Keeps its words, since the options in a script are read before them.

    Slurm's options among them are put into its own words.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, slurm = self._parted(ctx, args)
        ctx.meta["gsub.words"], ctx.meta["gsub.slurm"] = tuple(own), slurm
        if slurm:
            from gpusched_client.submission.slurm import translate

            try:
                own = [*translate(slurm).taken, *own]
            except Invalid as error:
                raise click.UsageError(error.message, ctx) from error
        return super().parse_args(ctx, own)

    def _parted(self, ctx: click.Context, args: list[str]) -> tuple[list[str], tuple[Given, ...]]:
        """Our own words, and Slurm's options, which stand before the command like ours."""
        flags = {
            name: isinstance(param, click.Option) and param.is_flag
            for param in self.params
            for name in (*param.opts, *param.secondary_opts)
        } | dict.fromkeys(("--help", "-h"), True)
        left, own = list(args), list[str]()
        slurm: list[Given] = []
        while left and left[0].startswith("-") and left[0] not in ("-", "--"):
            word = left[0]
            name, equals, value = word.partition("=") if word[:2] == "--" else (word[:2], "", "")
            is_ours = name in flags and not (equals and flags[name])
            if is_ours and name == "--gpus":  # --gpus a100:2 is Slurm's, with = as well
                is_ours = value.isdecimal() if value else ":" not in "".join(left[1:2])
            if not is_ours:
                option = _slurm_option(ctx, left, flags)
                if option.option.name == "--wait":
                    own.append("--wait")
                else:
                    slurm.append(option)
                continue
            takes_next = not flags[name] and not equals and (word[:2] == "--" or len(word) == 2)
            own += left[: 1 + takes_next]
            del left[: 1 + takes_next]
        return [*own, *left], tuple(slurm)


def _slurm_option(ctx: click.Context, left: list[str], flags: dict[str, bool]) -> Given:
    from gpusched_client.submission.slurm import take_option

    try:
        return take_option(left, "", tuple(flags))
    except Invalid as error:
        raise click.UsageError(error.message, ctx) from error


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
@click.option("--no-check", is_flag=True, help="Submit also what is not there yet.")
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
    if script is not None or ctx.meta["gsub.slurm"]:
        options = _with_script_options(ctx, script, options)
    request = _request(script, options)
    return _dry_run(request, options) if options["dry_run"] else _submit(request, options)


# ----------------------------------------------------------------------------------- request


def _script(options: dict[str, Any]) -> Script | None:
    """The script to capture, if the words name one; its arguments are left in the words."""
    words: tuple[str, ...] = options["words"]
    if options["line"] is not None:
        if words or options["script_file"] is not None:
            line = options["line"]
            hint = f" For {line} CPUs write --cpus {line}." if line.isdecimal() else ""
            raise click.UsageError(f"-c takes the whole command; give no other beside it.{hint}")
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
    return script.script_named(words[0])


def _script_from_stdin() -> Script:
    from gpusched_client.submission import script
    from gpusched_client.wire.limits import PAYLOAD_BYTES_MAX

    if sys.stdin is None:
        raise click.UsageError("no script: stdin is closed; pipe it in, or name its file.")
    if sys.stdin.isatty():
        print_err("gsub: reading the script from the terminal; end it with Ctrl-D")
    return script.script_of(sys.stdin.buffer.read(PAYLOAD_BYTES_MAX + 1), "-")


def _with_script_options(
    ctx: click.Context, script: Script | None, options: dict[str, Any]
) -> dict[str, Any]:
    """The options again, those in the script first, so that the command line's win.

    Slurm's come before ours, all of them together: their counts depend on each other.
    """
    in_script: tuple[Given, ...] = () if script is None else script.slurm
    typed: tuple[Given, ...] = ctx.meta["gsub.slurm"]
    from gpusched_client.submission.slurm import translate

    own_gpus = options["gpus"] if _is_given(ctx, "gpus") else None
    slurm = translate((*in_script, *typed), own_gpus)
    lines = [*slurm.lines, *(script.lines if script is not None else ())]
    for here, words in lines:
        _check_line(ctx, here, words)
    front = [word for _, words in lines for word in words]
    again = translate(typed, own_gpus).taken if front else []
    final = _context(ctx, [*front, *again, *ctx.meta["gsub.words"]])
    if script is not None:
        for warning in script.warnings:
            print_err(f"gsub: {warning}")
    if slurm.ignored:
        print_err(f"gsub: {_ignored(slurm.ignored)}")
    if in_script and not slurm.names_gpus and not _is_given(final, "gpus"):
        print_err("gsub: the script names no GPUs: it gets 1 GPU (Slurm would give none: -g 0)")
    return final.params


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def _context(ctx: click.Context, words: Sequence[str]) -> click.Context:
    return ctx.command.make_context("gsub", list(words))


def _check_line(ctx: click.Context, here: str, words: Sequence[str]) -> None:
    """Refuse what gsub would refuse, with the line."""
    prefix = f"{here}: " if here else ""
    try:
        inner = _context(ctx, words)
    except click.UsageError as error:
        raise click.UsageError(f"{prefix}{error.format_message()}") from error
    for name, text in _NOT_IN_SCRIPTS.items():
        if inner.params[name]:
            raise click.UsageError(f"{prefix}a script's option lines cannot hold {text}.")


def _ignored(given: Sequence[Given]) -> str:
    """One line for all of them: a script from elsewhere has a dozen."""
    source = next((each.here.rpartition(": line ")[0] for each in given if each.here), "")
    names = [
        f"{each.written}{f' (line {line})' if (line := each.here.rpartition(': line ')[2]) else ''}"
        for each in given
    ]
    prefix = f"{source}: " if source else ""
    return f"{prefix}ignored, because they have no meaning here: {', '.join(names)}"


def _request(script: Script | None, options: dict[str, Any]) -> JobRequest:
    from gpusched_client.submission.request import job_request
    from gpusched_client.terms import legal_name

    words = list(options["words"])
    command: dict[str, Any] = {"argv": words}
    name = options["name"]
    if options["line"] is not None:
        command = {"shell": options["line"]}
    elif script is not None:
        source = options["script_file"] or words.pop(0)
        name = name or ("script" if source == "-" else legal_name(source))
        if script.is_captured:
            path = script.path
            command = {"script": script.content, "script_path": path, "args": words}
        else:
            command = {"argv": [*script.place_command, *words]}
        for warning in _misplaced(words):
            print_err(f"gsub: {warning}")
    else:
        from gpusched_client.submission.script import unread

        for warning in unread(words):
            print_err(f"gsub: {warning}")
    asked = asked_by(options)
    check = not options["no_check"]
    try:
        return job_request(**command, cwd=options["chdir"], check=check, **{**asked, "name": name})
    except Invalid as error:
        raise _in_our_words(error, options) from error


def _misplaced(words: Sequence[str]) -> Iterator[str]:
    """Options of gsub that stand behind the script, and so are the script's."""
    known = {name for param in cli.params for name in param.opts if name.startswith("-")}
    for word in words:
        if word == "--":
            return
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        is_short = not word.startswith("--")
        is_ours = name in known and (not is_short or len(word) == 2 or word[2:].isalnum())
        if is_ours or (not is_short and _is_slurms(name)):
            yield (
                f"{word} stands behind the script and goes to it, not to gsub; gsub's own options "
                "stand before it"
            )
            return


def _is_slurms(name: str) -> bool:
    """Whether it would change the job as an option of Slurm that gsub takes, or refuses."""
    from gpusched_client.submission.slurm_options import BY_NAME, Fate

    option = BY_NAME.get(name)
    return option is not None and option.fate is not Fate.HARMLESS


def _in_our_words(error: Invalid, options: dict[str, Any]) -> Invalid:
    """The same with the names of our options instead of the wire's fields."""
    path = str(error.data.get("path", ""))
    if not error.message.startswith(f"{path}: "):
        return error
    row = next((row for row in OPTIONS.values() if row.keyword == path), None)
    name = path if row is None else flag_given(row, options)
    text = error.message.removeprefix(f"{path}: ")
    if row is not None and not options["gpus"] and "0 GPUs" in text:
        return Invalid(f"{name} needs a GPU; -g is 0", error.data)
    return Invalid(text if path.startswith("argv") else f"{name}: {text}", error.data)


# ------------------------------------------------------------------------------------- calls


def _dry_run(request: JobRequest, options: dict[str, Any]) -> int:
    from gpusched_client.client import Client
    from gpusched_client.output.json import json_text
    from gpusched_client.terms import printable
    from gpusched_client.wire.submit_messages import SubmitRequest

    with Client() as client:
        tell_who_answered("gsub", client)
        _warn_of_shared_logs(request, client)
        result = client.submit_request(SubmitRequest((request,), dry_run=True))
    _warn(result)
    if options["as_json"]:
        print_out(json_text({"would_start": result.would_start, "reasons": result.reasons}))
        return 0
    limit_s = result.time_limits_s[0] if result.time_limits_s else None
    print_out(f"Understood: {printable(describe_request(request, limit_s))}\n")
    _hint(result)
    for text in filter(None, result.would_start):
        print_out(f"Would start now on {printable(text)}\n")
    for text in filter(None, result.reasons):
        print_out(f"Would wait: {printable(text)}\n")
    return 0


def _submit(request: JobRequest, options: dict[str, Any]) -> int:
    from gpusched_client.client import Client
    from gpusched_client.wire.submit_messages import SubmitRequest

    with Client(reconnect_s=_WAIT_RECONNECT_S if options["wait"] else 30.0) as client:
        tell_who_answered("gsub", client)
        _warn_of_shared_logs(request, client)
        try:
            result = client.submit_request(SubmitRequest((request,)))
        except KeyboardInterrupt:
            print_err(
                "gsub: interrupted while submitting; `gq --me` shows whether the job is there"
            )
            return EXIT_INTERRUPTED
        job_id = result.job_ids[0]
        note_done(f"job {job_id} is submitted")
        _warn(result)
        if not (options["wait"] and options["as_json"]):
            _print_submitted(request, result, options)
        return _wait(client, job_id, options) if options["wait"] else 0


def _warn_of_shared_logs(request: JobRequest, client: Client) -> None:
    for warning in client.shared_logs(request):
        print_err(f"gsub: {warning}")


def _warn(result: SubmitResult) -> None:
    for warning in result.warnings:
        print_err(f"gsub: {warning}")


def _hint(result: SubmitResult) -> None:
    from gpusched_client.terms import printable

    for hint in result.hints:
        print_err(f"gsub: {printable(hint)}")


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
        _hint(result)


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
    import time

    from gpusched_client.output.text import gpu_or_reason
    from gpusched_client.terms import JobState

    if job.state is not JobState.COMPLETED:
        print_err(f"gsub: job {job.job_id} is {job.state}: {gpu_or_reason(job, time.time())}")
    elif job.cause_detail:  # what it left behind, or what its output shows
        print_err(f"gsub: job {job.job_id}: {job.cause_detail}")


if __name__ == "__main__":
    cli()
