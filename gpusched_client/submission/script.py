"""Scripts: which files are captured at submit, and the lines of options in them.

Owns where #GSUB and #SBATCH lines may stand. Reads files; must not know jobs or the daemon.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from dataclasses import dataclass

from gpusched_client.errors import Invalid, TooLarge
from gpusched_client.submission import slurm
from gpusched_client.wire.limits import PAYLOAD_BYTES_MAX

_SNIFF_BYTES = 64 * 1024
_SHELLS = rb"(?:ba|da|k|mk|z|fi|a|c|tc)?sh"
_SHELL_SHEBANG = rb"#!\s*(?:\S*/)?(?:env\s+(?:-\S+\s+)*)?(?:\S*/)?" + _SHELLS + rb"(?:\s|$)"
_DIRECTIVE = rb"#(GSUB|SBATCH)(?:\s+(.*))?"


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
    return re.match(_SHELL_SHEBANG, first_line) is not None or bool(_directives(head))


def read_script(path: str) -> Script:
    """The script in a file. Raises Invalid where it cannot be read or is not a script."""
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
        here = f"{source}: line {line}"
        if kind == "GSUB":
            lines.append((here, tuple(_gsub_words(words, here))))
            continue
        translation = slurm.translate(_split(words, here), here)
        lines.append((here, tuple(translation.taken)))
        warnings += [f"{name} (line {line})" for name in translation.ignored]
    if warnings:  # one line: a script from elsewhere has a dozen of them
        warnings = [f"{source}: ignored, because they have no meaning here: {', '.join(warnings)}"]
    return Script(content, tuple(lines), tuple(warnings))


def _directives(content: bytes) -> list[tuple[int, str, str]]:
    """(line number, GSUB or SBATCH, rest) of the lines before the first that is not a comment."""
    found = []
    for index, line in enumerate(content.split(b"\n"), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith(b"#"):
            break
        match = re.fullmatch(_DIRECTIVE, stripped)
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
        raise Invalid(f"{here}: {words[0]!r} is not an option; write it as #GSUB --gpus 2")
    return words
