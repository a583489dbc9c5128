"""The command key: what a user's runs are told apart by, so that the next one can be foretold.

Digits are left out of names and code: a sweep numbers its jobs, and they run alike.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from gpusched_client.terms import legal_name

KEY_BYTES_MAX = 200
_DIGITS = re.compile(r"[0-9]+")
_VERSION = re.compile(r"[0-9.]+$")


class _Options(NamedTuple):
    """Those of an interpreter that the word behind them belongs to."""

    code: str = ""  # letters: that word is what runs
    module: str = ""  # a letter: that word names what runs
    valued: Collection[str] = ()
    flags: Collection[str] | None = None  # where given, all others take a value


_SHELL = _Options(code="c", valued=("-o", "-O", "+o", "+O", "--rcfile", "--init-file"))
_PYTHON = _Options("c", "m", ("-W", "-X", "--check-hash-based-pycs"))
_TORCHRUN_FLAGS = ("--standalone", "--no-python", "--no_python", "--run-path", "--run_path")
_INTERPRETERS = {
    **dict.fromkeys(("sh", "bash", "dash", "zsh", "ksh", "fish"), _SHELL),
    **dict.fromkeys(("python", "pypy"), _PYTHON),
    "torchrun": _Options(module="m", flags=("--module", *_TORCHRUN_FLAGS)),
    "perl": _Options(code="eE", valued=("-I",)),
    "ruby": _Options(code="e", valued=("-I", "-r", "-C")),
    "node": _Options(code="ep", valued=("-r", "--require", "--import", "--env-file")),
    "julia": _Options(code="eE", valued=("-p", "-t", "-J", "-L")),
    "Rscript": _Options(code="e"),
    "lua": _Options(code="e", valued=("-l",)),
    "php": _Options(code="r", valued=("-c", "-d")),
}


def length_key(name: str | None, argv: Sequence[bytes]) -> str:
    """At most KEY_BYTES_MAX bytes; empty where nothing tells the runs apart.

    `name`: the job's, which is the command's where none was given. Without digits it is the key;
    else the base name of the program, and for an interpreter of its first argument that is not an
    option, M for `python -m M`, the code without digits for `sh -c` and its like.
    """
    words = [word.decode("utf-8", "surrogateescape") for word in argv] or [""]
    if name is not None and name not in _names_by_default(words) and (key := name_key(name)):
        return key
    program = _base(words[0])
    options = _INTERPRETERS.get(program) or _INTERPRETERS.get(_VERSION.sub("", program))
    found = None if options is None else _what_runs(options, words[1:])
    return _cut(program if found is None else found)


def name_key(name: str) -> str:
    """Of a job that was given a name; empty where it has digits alone."""
    return _cut(_DIGITS.sub("", name))


def _what_runs(options: _Options, words: Sequence[str]) -> str | None:
    """What an interpreter is told to run; None: nothing, as when it reads its input."""
    left = iter(words)
    for word in left:
        if not word.startswith(("-", "+")) or word in ("-", "--"):
            first = word if not word.startswith("-") else next(left, None)
            return None if first is None or word == "-" else _base(first)
        letter, rest = _last_letter(word, options)
        if letter and letter in options.code:
            return _DIGITS.sub("", rest or next(left, ""))
        if letter and letter == options.module:
            return rest or next(left, "")
        if _takes_next(word, options):
            next(left, None)
    return None


def _last_letter(word: str, options: _Options) -> tuple[str, str]:
    """The letter of a short option that brings what runs, and what is joined to it.

    Letters may stand together, as in `bash -lc`; what follows `-m` or `-c` of python is its value.
    """
    if word.startswith("--") or not word.startswith("-"):
        return "", ""
    for at, letter in enumerate(word[1:], 1):
        if letter == options.module or letter in options.code:
            return letter, "" if options is _SHELL else word[at + 1 :]
        if word[: at + 1] in options.valued:
            break
    return "", ""


def _takes_next(word: str, options: _Options) -> bool:
    if options.flags is not None:
        return "=" not in word and word not in options.flags
    return word in options.valued


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _names_by_default(words: Sequence[str]) -> frozenset[str]:
    """What clients call a job of this command: its first word, of a shell line that of the line."""
    line = words[-1].split(maxsplit=1) if len(words) > 1 and words[1] == "-c" else []
    return frozenset({legal_name(words[0]), *map(legal_name, line[:1])})


def _cut(key: str) -> str:
    """Whole characters of the first bytes, and nothing that no database takes."""
    shown = key.encode("utf-8", "backslashreplace")[:KEY_BYTES_MAX]
    return shown.decode("utf-8", "ignore")
