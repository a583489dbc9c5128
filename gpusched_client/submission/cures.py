"""What was probably meant by a command that is not found: the cure in a refusal.

Looks at names in the file system. Must not refuse anything itself.
"""

from __future__ import annotations

import os
import re
import shlex

from gpusched_client.submission.programs import SHELL_WORDS, interpreter_for
from gpusched_client.terms import printable

_OUR_COMMAND = {
    "gq": "list queue q squeue status stat jobs job show info ps top qstat bjobs ginfo sinfo",
    "gq --gpus": "gpus gpu nvidia smi",
    "gcancel": "cancel scancel kill delete del rm stop qdel bkill gkill",
    "gctl": "hold release update drain resume reload admin scontrol",
    "gsub": "submit sub sbatch salloc srun run qsub bsub gbatch add",
}
_SHELL_FUNCTIONS = frozenset({b"conda", b"mamba", b"micromamba", b"module", b"ml", b"nvm"})
_SHELL_SIGNS = re.compile(rb"&&|\|\||[;|&<>`]|\$\(|\$\{?\w|\n")
_NAMES_MAX = 20_000  # that are compared


def cure_of(argv: tuple[bytes, ...], cwd: bytes, path: bytes) -> str:
    """Why the command is not found, and what was meant."""
    command, rest = argv[0], argv[1:]
    name = printable(command)
    if command in SHELL_WORDS or command.split(b" ")[0] in SHELL_WORDS:
        line = printable(b" ".join(argv))
        also = ", or -D DIR" if command == b"cd" else ""
        return f"{name} is a word of the shell, not a program; a shell line goes with -c: " + (
            f"gsub -c {shlex.quote(line + ' && ..' if command == b'cd' else line)}{also}"
        )
    if re.match(rb"[A-Za-z_]\w*=", command):
        return (
            f"{name} is a variable, not a program; {name} goes before gsub or through env: "
            f"gsub env {printable(b' '.join(argv))}"
        )
    if _SHELL_SIGNS.search(command) or (re.search(rb"\s", command) and not rest):
        return f"{name} is not a program; a shell line goes with -c: gsub -c {shlex.quote(name)}"
    if command.startswith(b"-"):
        return f"{name} is not a program; gsub's own options stand before --, the command behind it"
    if command.startswith(b"~"):
        return f"{name} is not found: ~ is not expanded here; write it without quotes, or $HOME"
    if b"/" in command:
        return _missing_file(os.path.join(cwd, command), name)
    if os.path.exists(os.path.join(cwd, command)):
        return _lies_here(os.path.join(cwd, command), command)
    if command in _SHELL_FUNCTIONS:
        return (
            f"{name} is not in PATH: it may be a function of your shell, which is not there in a "
            "job; call it in a script that begins with #!/bin/bash -l"
        )
    meant = _ours(name)
    if meant == "gsub":
        return f"there is no {name} here; leave the word out, gsub submits what follows"
    if meant is not None:
        return f"{name} is not a program; did you mean {meant}?"
    near = nearest_file(os.path.join(cwd, command)) or _nearest_program(command, path)
    return f"{name} is not in PATH" + (f"; did you mean {near}?" if near else "")


def _ours(name: str) -> str | None:
    for meant, words in _OUR_COMMAND.items():
        if name in words.split():
            return meant
    return None


def _missing_file(path: bytes, name: str) -> str:
    directory = os.path.dirname(path)
    if not os.path.isdir(directory):
        return f"{name} does not exist: {printable(directory)} is no directory"
    near = nearest_file(path)
    return f"{name} does not exist" + (f"; did you mean {near}?" if near else "")


def _lies_here(path: bytes, command: bytes) -> str:
    name = printable(command)
    if os.path.isdir(path):
        return f"{name} is a directory here, not a program"
    interpreter = interpreter_for(path)
    forms = [f"./{name}"] if os.access(path, os.X_OK) or interpreter is None else []
    if interpreter is not None:
        forms = [f"./{name}", f"{interpreter} {name}"]
    if not os.access(path, os.X_OK) and interpreter is None:
        return (
            f"{name} lies here and is not executable; is it a program? chmod +x it, then ./{name}"
        )
    return f"{name} lies here and is not in PATH; write {' or '.join(forms)}"


def not_executable(path: bytes) -> str:
    """A file that lies there and may not be executed."""
    name = printable(path)
    try:
        if os.statvfs(path).f_flag & os.ST_NOEXEC:
            return f"{name} lies on a file system from which nothing is executed (noexec)"
    except OSError:
        pass
    interpreter = interpreter_for(path)
    named = f"; write {interpreter} {name}, or" if interpreter else "; is it a program?"
    return f"{name} is not executable{named} chmod +x it"


def nearest_file(path: bytes) -> str | None:
    """The name in the same directory that is most like it."""
    directory, wanted = os.path.split(path)
    try:
        names = os.listdir(directory or b".")[:_NAMES_MAX]
    except OSError:
        return None
    found = _nearest(wanted, names)
    if found is None:
        return None
    return (
        f"./{found}"
        if os.path.normpath(directory) == os.getcwdb()
        else printable(directory) + f"/{found}"
    )


def _nearest_program(command: bytes, path: bytes) -> str | None:
    names: set[bytes] = set()
    for place in path.split(b":"):
        try:
            names.update(os.listdir(place or b"."))
        except OSError:
            continue
    return _nearest(command, sorted(names)[:_NAMES_MAX])


def _nearest(wanted: bytes, names: list[bytes]) -> str | None:
    import difflib

    known = {printable(name): name for name in names}
    found = difflib.get_close_matches(printable(wanted), known, 1, 0.75)
    return found[0] if found else None
