"""Scripts: which files are captured at submit, and the options written in them.

Owns #GSUB and #SBATCH lines. Reads files; must not know jobs or the daemon.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from dataclasses import dataclass

from gpusched_client.errors import Invalid, TooLarge
from gpusched_client.wire.limits import PAYLOAD_BYTES_MAX

_SNIFF_BYTES = 64 * 1024
_SHELLS = rb"(?:ba|da|k|mk|z|fi|a|c|tc)?sh"
_SHELL_SHEBANG = re.compile(
    rb"#!\s*(?:\S*/)?(?:env\s+(?:-\S+\s+)*)?(?:\S*/)?" + _SHELLS + rb"(?:\s|$)"
)
_DIRECTIVE = re.compile(rb"#(GSUB|SBATCH)(?:\s+(.*))?")

# Slurm's options that mean the same here; the value is ours.
_SBATCH_VALUES = {
    "--time": "--time",
    "-t": "--time",
    "--job-name": "--name",
    "-J": "--name",
    "--output": "--output",
    "-o": "--output",
    "--error": "--error",
    "-e": "--error",
    "--chdir": "--chdir",
    "-D": "--chdir",
    "--mem": "--mem",
    "--cpus-per-task": "--cpus",
    "-c": "--cpus",
}
_SBATCH_GPUS = ("--gpus", "-G", "--gpus-per-node", "--gres")
_SBATCH_TASKS = ("--ntasks", "-n", "--ntasks-per-node")
# To ignore these would run something else than what was asked for.
_SBATCH_REFUSED = ("--array", "-a", "--dependency", "-d", "--begin", "-b", "--wrap")


@dataclass(frozen=True, slots=True)
class Script:
    """A captured script: its content, the options in it as gsub takes them, and what to tell."""

    content: bytes
    lines: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (where, options of that line)
    warnings: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """Those of all lines, in order."""
        return tuple([word for _, words in self.lines for word in words])


def is_script(path: str) -> bool:
    """True for a regular file with a shell's shebang, or with #GSUB or #SBATCH lines."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as file:
            head = file.read(_SNIFF_BYTES)
    except (OSError, ValueError):
        return False
    first_line = head.split(b"\n", 1)[0]
    return _SHELL_SHEBANG.match(first_line) is not None or bool(_directives(head))


def read_script(path: str) -> Script:
    """The script in a file. Raises Invalid where it cannot be read or is none."""
    try:
        with open(path, "rb") as file:
            content = file.read(PAYLOAD_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Invalid(f"cannot read the script {path!r}: {reason}") from error
    return script_of(content, path)


def script_of(content: bytes, source: str) -> Script:
    """A script's content with the options found in it; `source` names it in messages."""
    if len(content) > PAYLOAD_BYTES_MAX:
        raise TooLarge(
            f"script {source!r} is longer than {PAYLOAD_BYTES_MAX} bytes; "
            "put it into a file and submit a command that runs it"
        )
    if not content.startswith(b"#!"):
        raise Invalid(
            f"script {source!r} does not begin with #!; let its first line name the interpreter, "
            "as in #!/bin/bash"
        )
    lines: list[tuple[str, tuple[str, ...]]] = []
    warnings: list[str] = []
    for line, kind, words in _directives(content):
        here, ignored = f"{source}: line {line}", list[str]()
        taken = _gsub_words(words, here) if kind == "GSUB" else _sbatch_words(words, here, ignored)
        lines.append((here, tuple(taken)))
        warnings += [f"{name} (line {line})" for name in ignored]
    if warnings:  # one line: a script from elsewhere has a dozen of them
        warnings = [f"{source}: ignored, since they have no meaning here: {', '.join(warnings)}"]
    return Script(content, tuple(lines), tuple(warnings))


def _directives(content: bytes) -> list[tuple[int, str, str]]:
    """(line number, GSUB or SBATCH, rest) of the lines before the first that is no comment."""
    found = []
    for index, line in enumerate(content.split(b"\n"), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith(b"#"):
            break
        match = _DIRECTIVE.fullmatch(stripped)
        if match is not None:
            found.append((index, match[1].decode(), os.fsdecode(match[2] or b"")))
    return found


def _split(text: str, here: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise Invalid(f"{here}: {error}; close the quotes") from error


def _gsub_words(text: str, here: str) -> list[str]:
    words = _split(text, here)
    if words and not words[0].startswith("-"):
        raise Invalid(f"{here}: {words[0]!r} is no option; write it as #GSUB --gpus 2")
    return words


def _sbatch_words(text: str, here: str, ignored: list[str]) -> list[str]:
    """Slurm's options in ours; what we do not have is left out and named in `ignored`."""
    taken: list[str] = []
    words = _split(text, here)
    while words:
        name, value = _take_option(words, here)
        if name in ("--nodes", "-N") and value is not None:
            _check_nodes(name, value, here)
            continue
        if name in _SBATCH_TASKS and value == "1":
            continue  # what is done anyway
        if name in _SBATCH_REFUSED:
            raise Invalid(f"{here}: {name} is not supported; remove it")
        if name == "--mem" and value == "0":
            continue  # all of the host's memory, which is what no bound means here
        if _SBATCH_VALUES.get(name) == "--time" and value and not value.strip("0:-"):
            value = "unlimited"  # what Slurm means by no time
        if name in _SBATCH_VALUES and value is not None:
            taken.append(f"{_SBATCH_VALUES[name]}={value}")
        elif name in _SBATCH_GPUS and value is not None:
            taken.extend(_sbatch_gpus(name, value, here, ignored))
        elif name == "--nice" and value is not None:
            taken.append(f"--nice={value}")
        elif name in ("--hold", "-H"):
            taken.append("--hold")
        else:
            ignored.append(name)
    return taken


def _check_nodes(name: str, value: str, here: str) -> None:
    """Refuse more than the one host there is: the job would run, and not as it was meant."""
    least = value.split("-")[0]
    if least.isdecimal() and int(least) > 1:
        raise Invalid(
            f"{here}: {name}={value}: there is one host here; ask for 1, and for its GPUs"
        )


def _take_option(words: list[str], here: str) -> tuple[str, str | None]:
    """Remove one option, with its value, from the front of the words."""
    word = words.pop(0)
    if not word.startswith("-") or word in ("-", "--"):
        raise Invalid(f"{here}: {word!r} is no option")
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        if equals:
            return name, value
    else:
        name, value = word[:2], word[2:].removeprefix("=")
        if value:
            return name, value
    takes_none = name in ("--hold", "-H", "--exclusive", "--requeue", "--no-requeue")
    if words and not words[0].startswith("-") and not takes_none:
        return name, words.pop(0)
    return name, None


def _sbatch_gpus(name: str, value: str, here: str, ignored: list[str]) -> list[str]:
    """`2`, `a100:2`, and for --gres `gpu`, `gpu:2`, `gpu:a100:2`."""
    parts = value.split(":")
    if name == "--gres":
        if parts[0] != "gpu":
            ignored.append(f"--gres={value}")
            return []
        parts = parts[1:] or ["1"]
    count = parts.pop() if parts[-1].isdecimal() else "1"
    if len(parts) > 1:
        raise Invalid(f"{here}: {name}={value} is not understood; write gpu:MODEL:COUNT")
    return [f"--gpus={count}", *[f"--gpu-model={model}" for model in parts]]
