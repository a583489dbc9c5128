"""gsub: submit one job. Takes its words and those in scripts apart; submitting.py does the rest."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from gpusched_client.commands.answering import print_err
from gpusched_client.commands.click_options import asked_by, submit_options
from gpusched_client.commands.common import CONTEXT_SETTINGS, VERSION, Command
from gpusched_client.commands.submitting import dry_run, request_of, submit
from gpusched_client.errors import Invalid
from gpusched_client.wire.job_options import Section

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpusched_client.submission.script import Script
    from gpusched_client.submission.slurm import Given

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
    _warn_of_misplaced(script, options)
    request = request_of(script, options, asked_by(options))
    return dry_run(request, options) if options["dry_run"] else submit(request, options)


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


def _warn_of_misplaced(script: Script | None, options: dict[str, Any]) -> None:
    if script is not None:
        for warning in _misplaced(options["words"][options["script_file"] is None :]):
            print_err(f"gsub: {warning}")


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


if __name__ == "__main__":
    cli()
