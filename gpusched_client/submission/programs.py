"""What is known of programs by their names alone. Pure."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

# A job of these does nothing, also where a program of the name exists (POSIX wants one of cd).
SHELL_WORDS = frozenset(
    {b"cd", b"alias", b"unalias", b"export", b"unset", b"source", b".", b"set", b"shopt", b"local"}
    | {b"declare", b"ulimit", b"umask", b"pushd", b"popd", b"eval", b"exec", b"builtin"}
    | {b"if", b"for", b"while", b"until", b"case", b"function", b"{", b"(", b"!", b"[["}
)
_INTERPRETERS = {
    b".py": "python3", b".sh": "bash", b".bash": "bash", b".R": "Rscript", b".r": "Rscript",
    b".jl": "julia", b".pl": "perl", b".js": "node", b".rb": "ruby", b".lua": "lua",
}  # fmt: skip
SHELLS = frozenset({b"bash", b"sh", b"dash", b"zsh", b"ksh"})
_LAUNCHERS = frozenset({b"torchrun", b"accelerate", b"deepspeed"})  # of Python's scripts


class _Options(NamedTuple):
    """The options of a program that are known: letters and long names, with a value or without.

    `words` are its own that stand before the command.
    """

    flags: str = ""
    valued: str = ""
    words: int = 0

    def behind(self, words: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """What follows them; nothing where one is another, that may have a value or not."""
        left = list(words)
        while left and left[0].startswith(b"-") and left[0] != b"-":
            word = left.pop(0).decode("latin-1")
            if word == "--":
                break
            if word.startswith("--"):
                if "=" in word or word in self.flags.split():
                    continue
                if word not in self.valued.split():
                    return ()
                del left[:1]
                continue
            for place, letter in enumerate(word[1:], start=1):
                if letter in _letters(self.valued):
                    if place == len(word) - 1:
                        del left[:1]
                    break
                if letter not in _letters(self.flags):
                    return ()
        return tuple(left[self.words :])


def _letters(known: str) -> str:
    """Those of "kv --foreground": they stand first."""
    return "" if known.startswith("--") else known.partition(" ")[0]


_WRAPPERS = {
    b"nohup": _Options(),
    b"setsid": _Options("cfw --ctty --fork --wait"),
    b"nice": _Options("0123456789", "n --adjustment"),
    b"ionice": _Options("t --ignore", "cn --class --classdata"),
    b"time": _Options("pvaq", "fo --format --output"),
    b"timeout": _Options(
        "v --foreground --preserve-status --verbose", "ks --kill-after --signal", 1
    ),
    b"stdbuf": _Options("", "ioe --input --output --error"),
    b"taskset": _Options("ac --all-tasks --cpu-list", "", 1),
    b"numactl": _Options(
        "albt --all --localalloc --balancing",
        "iNmCpP --interleave --cpunodebind --membind --physcpubind --preferred",
    ),
    b"flock": _Options("exsunoF --exclusive --shared --nonblock --no-fork", "wE --timeout", 1),
    b"xvfb-run": _Options("al --auto-servernum", "nsefpw --server-num --server-args"),
}  # that run what follows
# Those of interpreters, so that the script comes behind them; -c, -m, -e are another way.
_PYTHON = _Options("uOBEsSIvqxbdPi", "XW")
_SHELL = _Options("exuvlfinabhkmpBCEHPT --login --norc --noprofile --posix", "oO --rcfile")
_OTHERS = {
    b"perl": _Options("wWTtXnlpsU", "I"),
    b"ruby": _Options("wW", "I"),
    b"node": _Options("--expose-gc --inspect --no-warnings --trace-warnings"),
    b"Rscript": _Options(
        "--vanilla --verbose --no-save --no-restore --no-environ --slave --no-echo"
    ),
    b"julia": _Options("", "tpJ --threads --procs --project --sysimage --optimize"),
    b"lua": _Options("iE", "l"),
}


def interpreter_for(path: bytes) -> str | None:
    """What usually runs a file of this ending."""
    return _INTERPRETERS.get(os.path.splitext(path)[1])


def is_wrapper(name: bytes) -> bool:
    """Whether it runs the command that follows its own options."""
    return name in _WRAPPERS


def command_behind(wrapper: bytes, words: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The command that such a program runs; nothing where its options leave that open."""
    return _WRAPPERS[wrapper].behind(words)


def is_pythons(name: bytes) -> bool:
    """Whether it is Python by its name, "python3.11"."""
    return re.fullmatch(rb"(?:python|pypy)[\d.]*", name) is not None


def script_argument(name: bytes, words: tuple[bytes, ...]) -> bytes | None:
    """The script that an interpreter of this name is given; None where it is another program,
    or where its options leave that open.
    """
    if name in _LAUNCHERS:
        return next((word for word in words if word.endswith(b".py")), None)
    known = _PYTHON if is_pythons(name) else _SHELL if name in SHELLS else _OTHERS.get(name)
    behind = known.behind(words) if known is not None else ()
    return behind[0] if behind and behind[0] not in (b"-", b"") else None
