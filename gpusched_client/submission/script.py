"""Scripts: which files are captured at submit, and the lines of options in them.

Owns where #GSUB and #SBATCH lines may stand. Reads files; must not know jobs or the daemon.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gpusched_client.errors import Invalid, TooLarge
from gpusched_client.wire.limits import PAYLOAD_BYTES_MAX

if TYPE_CHECKING:
    from gpusched_client.submission.slurm import Given

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SNIFF_BYTES = 64 * 1024
_SHELLS = rb"(?:ba|da|k|mk|z|fi|a|c|tc)?sh"
_SHELL_SHEBANG = rb"#!\s*(?:\S*/)?(?:env\s+(?:-\S+\s+)*)?(?:\S*/)?" + _SHELLS + rb"(?:\s|$)"
_DIRECTIVE = rb"#(GSUB|SBATCH)(?:[ \t]+(.*))?"
# What was meant as a line of options: `#SBATCH--gpus=4`, `# sbatch -G 4`; and other schedulers'.
_ALMOST = rb"#\s*(?:gsub|sbatch)\W*-\s*\w.*|#(?:gsub|sbatch)\W+\S.*"
# A word at the begin of a comment with options behind it: `#SBACTH -G 4`, `#SLURM --gpus=4`.
_MISSPELT = rb"#\s*([A-Za-z]{4,8})\W*\s-{1,2}\w.*"
_ALIKE_MIN = 0.75
_OF_OTHERS = rb"#(?:PBS|BSUB|MSUB|OAR|COBALT|FLUX)\W+-.*|#\$\s+-[a-z].*"
_WARNED_LINES_MAX = 5
_LOOKED_AT_WORDS = 4  # of a command: `bash -x job.sh`
_WORD = r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:\\.|[^"\\])*")+"""


class Script(NamedTuple):
    """A script: its content, the options in it, and what to tell.

    `path` is where it lies, absolute; None for stdin. `lines` are those of #GSUB: (where, options).
    One that is not `is_captured` runs from where it lies: what it imports lies beside it.
    """

    content: bytes
    path: bytes | None = None
    lines: tuple[tuple[str, tuple[str, ...]], ...] = ()
    slurm: tuple[Given, ...] = ()
    warnings: tuple[str, ...] = ()
    is_captured: bool = True

    @property
    def options(self) -> tuple[str, ...]:
        """Those of the #GSUB lines, in order."""
        return tuple([word for _, words in self.lines for word in words])

    @property
    def place_command(self) -> list[bytes]:
        """What runs it from where it lies: itself, or its interpreter where it may not be run."""
        assert self.path is not None, "one that is not captured has a path"
        if os.access(self.path, os.X_OK):
            return [self.path]
        return [*interpreter_words(self.content), self.path]


def interpreter_words(content: bytes) -> list[bytes]:
    """The interpreter and its one argument, as the kernel parts a first line; none without #!."""
    line = content[:256].split(b"\n", 1)[0]
    return line[2:].strip(b" \t\r").split(None, 1) if line.startswith(b"#!") else []


def script_named(path: str) -> Script | None:
    """The script that a command's first word names, where it names one.

    A regular file with a shell's shebang, or with #GSUB or #SBATCH lines. Raises Invalid.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        with open(path, "rb") as file:
            head = file.read(_SNIFF_BYTES).removeprefix(BYTE_ORDER_MARK)
    except (OSError, ValueError):
        return None
    if is_shells(head):
        return read_script(path)
    if not any(line.is_taken for line in _directives(head)):
        return None
    return script_of(head, path, path)._replace(is_captured=False)


def is_shells(content: bytes) -> bool:
    """Whether a shell's shebang begins it."""
    return re.match(_SHELL_SHEBANG, content.split(b"\n", 1)[0]) is not None


def read_script(path: str) -> Script:
    """The script in a file. Raises Invalid where it cannot be read or is not a script."""
    try:
        with open(path, "rb") as file:
            content = file.read(PAYLOAD_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Invalid(f"cannot read the script {path!r}: {reason}") from error
    return script_of(content, path, path)


def script_of(content: bytes, source: str, path: str | None = None) -> Script:
    """A script's content with the options found in it; `source` names it in messages."""
    content = content.removeprefix(BYTE_ORDER_MARK)
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
    refuse_carriage_return(content, source)
    lines: list[tuple[str, tuple[str, ...]]] = []
    given: list[Given] = []
    for line in _directives(content):
        if not line.is_taken:
            continue
        here = f"{source}: line {line.number}"
        if line.kind == "GSUB":
            lines.append((here, tuple(_gsub_words(line.text, here))))
        else:
            from gpusched_client.submission.slurm import read_line

            given += read_line(_split(line.text, here), here)
    where = None if path is None else os.path.abspath(os.fsencode(path))
    return Script(content, where, tuple(lines), tuple(given), overlooked(content, source))


def unread(argv: Sequence[str]) -> tuple[str, ...]:
    """Warnings of lines of options in a file that is run as it is, or given to an interpreter."""
    for word in argv[:_LOOKED_AT_WORDS]:
        try:
            if word.startswith("-") or not stat.S_ISREG(os.stat(word).st_mode):
                continue
            with open(word, "rb") as file:
                head = file.read(_SNIFF_BYTES).removeprefix(BYTE_ORDER_MARK)
        except (OSError, ValueError):
            continue
        if not head.startswith(b"#"):
            continue
        taken = [line.number for line in _directives(head) if line.is_taken]
        if taken and word is not argv[0]:
            return (f"{word}: the options in line {taken[0]} are not read; write gsub {word}",)
        return overlooked(head, word)
    return ()


def refuse_carriage_return(content: bytes, source: str) -> None:
    """Raise Invalid for a first line that names an interpreter whose name ends in CR."""
    if content.startswith(b"#!") and content.split(b"\n", 1)[0].endswith(b"\r"):
        raise Invalid(
            f"line 1 of {source} ends in CR, as files from Windows do, so that no interpreter is "
            "found; run dos2unix on it, or sed -i 's/\\r$//'"
        )


def overlooked(content: bytes, source: str) -> tuple[str, ...]:
    """A warning of each line that looks like one of options and is not read as such."""
    warnings = [
        f"{source}: line {line.number} is not read: {line.text}"
        for line in _directives(content)
        if not line.is_taken
    ]
    more = len(warnings) - _WARNED_LINES_MAX
    return tuple(warnings[:_WARNED_LINES_MAX]) + (
        (f"{source}: nor are {more} more such lines",) if more > 0 else ()
    )


class _Line(NamedTuple):
    """A line of options, with the rest of it; or (not is_taken) what only looks like one, why."""

    number: int
    kind: str
    text: str
    is_taken: bool = True


def _directives(content: bytes) -> Iterator[_Line]:
    """Lines of options are those before the first that is not a comment."""
    first_command: int | None = None
    for number, line in enumerate(content.split(b"\n"), start=1):
        stripped = line.strip()
        if not stripped.startswith(b"#"):
            if stripped and first_command is None:
                first_command = number
            continue
        match = re.fullmatch(_DIRECTIVE, stripped)
        if match is not None and first_command is None:
            yield _Line(number, match[1].decode(), os.fsdecode(match[2] or b""))
        elif match is not None:
            why = f"it stands behind line {first_command}, the first command; move it up"
            yield _Line(number, match[1].decode(), why, is_taken=False)
        elif re.fullmatch(_ALMOST, stripped, re.IGNORECASE) is not None:
            word = "GSUB" if b"gsub" in stripped[:8].lower() else "SBATCH"
            why = f"write it as #{word} --option, or as ##{word} where it is a comment"
            yield _Line(number, word, why, is_taken=False)
        elif first_command is None and (meant := _misspelt(stripped)) is not None:
            yield _Line(number, meant, f"write it as #{meant} --option", is_taken=False)
        elif first_command is None and re.fullmatch(_OF_OTHERS, stripped, re.IGNORECASE):
            why = "it is for another scheduler; write it as #GSUB --option"
            yield _Line(number, "", why, is_taken=False)


def _misspelt(line: bytes) -> str | None:
    """Which word was meant by one that is almost it, with options behind it."""
    found = re.fullmatch(_MISSPELT, line)
    if found is None:
        return None
    import difflib

    word = found[1].decode().upper()
    if word == "SLURM":
        return "SBATCH"
    near = difflib.get_close_matches(word, ("SBATCH", "GSUB"), 1, _ALIKE_MIN)
    return near[0] if near else None


def _split(text: str, here: str) -> list[str]:
    """Words as a shell has them; a word that begins with # begins a comment."""
    if text.rstrip().endswith("\\"):
        raise Invalid(f"{here}: a line of options is not continued by \\; begin the next with #")
    for word in re.finditer(_WORD, text):
        if word[0].startswith("#"):
            text = text[: word.start()]
            break
    try:
        return shlex.split(text)
    except ValueError as error:
        raise Invalid(f"{here}: {error}; close the quotes") from error


def _gsub_words(text: str, here: str) -> list[str]:
    words = _split(text, here)
    if words and not words[0].startswith("-"):
        raise Invalid(f"{here}: {words[0]!r} is not an option; write it as #GSUB --gpus 2")
    return words
