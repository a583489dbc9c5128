"""Slurm's options in gsub's words: which of them mean the same, are refused, or have no meaning.

What the table of job options names is taken from there; here stand those whose values are spelt
otherwise. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpusched_client.errors import Invalid
from gpusched_client.wire.job_options import OPTIONS, SLURM_REFUSED, JobOption

_ROW_OF: dict[str, JobOption] = {name: row for row in OPTIONS.values() for name in row.slurm}
_DIRECTORY = ("--chdir", "-D")
_GPUS = ("--gpus", "-G", "--gpus-per-node", "--gres")
_TASKS = ("--ntasks", "-n", "--ntasks-per-node")
_NODES = ("--nodes", "-N")
_WITHOUT_VALUE = ("--exclusive", "--requeue", "--no-requeue")


@dataclass(slots=True)
class Translation:
    """Options as gsub takes them, and the names of those that are ignored."""

    taken: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def translate(words: list[str], here: str) -> Translation:
    """The words of one #SBATCH line. Raises Invalid, which says `here`."""
    words, translation = list(words), Translation()
    while words:
        name, value = _take_option(words, here)
        _translate_one(name, value, here, translation)
    return translation


def _translate_one(name: str, value: str | None, here: str, translation: Translation) -> None:
    row = _ROW_OF.get(name)
    if row is not None and row.is_flag:
        translation.taken.append(row.longest_flag)
    elif row is not None and value is not None:
        ours = row.from_slurm(value)
        translation.taken += [] if ours is None else [f"{row.longest_flag}={ours}"]
    elif name in SLURM_REFUSED:
        raise Invalid(f"{here}: {name} is not supported; remove it")
    elif name in _DIRECTORY and value is not None:
        translation.taken.append(f"--chdir={value}")
    elif name in _GPUS and value is not None:
        _translate_gpus(name, value, here, translation)
    elif name in _NODES and value is not None:
        _check_nodes(name, value, here)
    elif name not in _TASKS or value != "1":  # one task is what is done anyway
        translation.ignored.append(name)


def _take_option(words: list[str], here: str) -> tuple[str, str | None]:
    """Remove one option, with its value, from the front of the words."""
    word = words.pop(0)
    if not word.startswith("-") or word in ("-", "--"):
        raise Invalid(f"{here}: {word!r} is not an option")
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        if equals:
            return name, value
    else:
        name, value = word[:2], word[2:].removeprefix("=")
        if value:
            return name, value
    row = _ROW_OF.get(name)
    takes_none = name in _WITHOUT_VALUE or (row is not None and row.is_flag)
    if words and not words[0].startswith("-") and not takes_none:
        return name, words.pop(0)
    return name, None


def _translate_gpus(name: str, value: str, here: str, translation: Translation) -> None:
    """`2`, `a100:2`, and for --gres `gpu`, `gpu:2`, `gpu:a100:2`."""
    parts = value.split(":")
    if name == "--gres":
        if parts[0] != "gpu":
            translation.ignored.append(f"--gres={value}")
            return
        parts = parts[1:] or ["1"]
    count = parts.pop() if parts[-1].isdecimal() else "1"
    if len(parts) > 1:
        raise Invalid(f"{here}: {name}={value} is not understood; write gpu:MODEL:COUNT")
    translation.taken.append(f"--gpus={count}")
    translation.taken += [f"--gpu-model={model}" for model in parts]


def _check_nodes(name: str, value: str, here: str) -> None:
    """Refuse more than the one host there is: the job would run, and not as it was meant."""
    least = value.split("-")[0]
    if least.isdecimal() and int(least) > 1:
        raise Invalid(
            f"{here}: {name}={value}: there is one host here; ask for 1, and for its GPUs"
        )
