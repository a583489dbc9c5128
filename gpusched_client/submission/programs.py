"""What is known of programs by their names alone. Pure."""

from __future__ import annotations

import os

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


def interpreter_for(path: bytes) -> str | None:
    """What usually runs a file of this ending."""
    return _INTERPRETERS.get(os.path.splitext(path)[1])
