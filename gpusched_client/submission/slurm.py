"""Slurm's options in gsub's words: #SBATCH lines, and the same words on gsub's command line.

Which mean the same, are harmless or are refused is in slurm_options. Here stand those whose values
are spelt otherwise, or whose counts are computed from each other: as sbatch does, the last of each
counts, wherever it stands. Pure but for this host's name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpusched_client.errors import Invalid
from gpusched_client.submission.slurm_options import (
    Fate,
    SlurmOption,
    Takes,
    nearest,
    option_named,
)
from gpusched_client.units import MIB, parse_bytes
from gpusched_client.wire.job_options import OPTIONS, JobOption

_ROW_OF: dict[str, JobOption] = {
    name: row for row in OPTIONS.values() for name in row.slurm if name.startswith("--")
}
_DEFAULT_NICE = "100"  # of --nice without a value
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2212"  # what web pages and word processors make of "-"


class Given(NamedTuple):
    """One option as it was written; `here` says where, and is "" on the command line."""

    here: str
    written: str
    option: SlurmOption
    value: str | None

    def refuse(self, why: str) -> Invalid:
        """The error that names it."""
        shown = self.written if self.value is None else f"{self.written}={self.value}"
        return Invalid(f"{self.here}{': ' if self.here else ''}{shown} {why}")


@dataclass(slots=True)
class Translation:
    """What gsub takes, by line; those that are ignored; and whether a number of GPUs was named."""

    lines: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    ignored: list[Given] = field(default_factory=list)
    names_gpus: bool = False

    def take(self, given: Given, *words: str) -> None:
        """Options of gsub that come of one of Slurm's."""
        self.lines.append((given.here, words))

    @property
    def taken(self) -> list[str]:
        """The words of all lines."""
        return [word for _, words in self.lines for word in words]


# ---------------------------------------------------------------------------------- reading


def read_line(words: Sequence[str], here: str) -> list[Given]:
    """The options of one #SBATCH line. Raises Invalid for a word that is none."""
    left, found = list(words), []
    while left:
        found.append(take_option(left, here))
    return found


def take_option(words: list[str], here: str, others: tuple[str, ...] = ()) -> Given:
    """Remove one option, with its value, from the front of the words.

    `others` are names that could have been meant as well.
    """
    word = words.pop(0)
    prefix = f"{here}: " if here else ""
    if word[0] in _DASHES:
        raise Invalid(f"{prefix}{word!r} begins with a dash that is no '-'; type it again")
    if not word.startswith("-") or word in ("-", "--"):
        raise Invalid(f"{prefix}{word!r} is not an option")
    name, value = _parted(word)
    option = option_named(name)
    if option is None:
        if here and any(name in row.names for row in OPTIONS.values()):
            raise Invalid(f"{prefix}{name} is gsub's own; write it as #GSUB {word}")
        meant = nearest(name, others) if name.startswith("--") else None
        hint = f"; did you mean {meant}?" if meant else "; `man sbatch` and gsub --help list them"
        raise Invalid(f"{prefix}no option {name} is known{hint}")
    if value is not None and option.takes is Takes.NONE:
        if name.startswith("--"):
            raise Invalid(f"{prefix}{name} takes no value; write it without ={value}")
        words.insert(0, f"-{value}")  # letters in one word
        value = None
    if value is None and option.takes is Takes.VALUE:
        if not words:
            raise Invalid(f"{prefix}{name} needs a value; write {name}=.. or remove it")
        value = words.pop(0)
    return Given(here, name, option, value)


def _parted(word: str) -> tuple[str, str | None]:
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        return name, value if equals else None
    return word[:2], word[2:].removeprefix("=") or None


# ------------------------------------------------------------------------------ translating


def translate(given: Iterable[Given], gpus: int | None = None) -> Translation:
    """All options together. Raises Invalid. `gpus` is the number that gsub's own -g asks for."""
    last: dict[str, Given] = {}
    for each in given:
        last.pop(each.option.name, None)
        last[each.option.name] = each
    translation = Translation()
    for each in last.values():
        _translate_one(each, translation)
    _Counts(last, gpus).translate(translation)
    return translation


def _translate_one(given: Given, translation: Translation) -> None:
    name, value = given.option.name, given.value
    if given.option.fate is Fate.REFUSED:
        raise given.refuse(f"is not supported; {given.option.cure}")
    _CONDITIONS.get(name, lambda _given: None)(given)
    row = _ROW_OF.get(name)
    if given.option.fate is Fate.HARMLESS:
        translation.ignored.append(given)
    elif name == "--nice":
        translation.take(given, f"--nice={value or _DEFAULT_NICE}")
    elif name == "--chdir":
        translation.take(given, f"--chdir={value}")
    elif row is not None and row.is_flag:
        translation.take(given, row.longest_flag)
    elif row is not None and value is not None and name not in _COUNTED:
        ours = row.from_slurm(value)
        if ours is not None:
            translation.take(given, f"{row.longest_flag}={ours}")


def _check_nodes(given: Given) -> None:
    """Refuse more than the one host there is: the job would run, and not as it was meant."""
    least = str(given.value).split("-")[0].split(",")[0]
    if not least.isdecimal() or int(least) != 1:
        raise given.refuse("is more than the one host there is; ask for 1, and for its GPUs")


def _host() -> str:
    return os.uname().nodename.partition(".")[0]


def _check_nodelist(given: Given) -> None:
    if str(given.value).partition(".")[0] not in (_host(), "localhost"):
        raise given.refuse(f"names another host; this one is {_host()}. Remove it")


def _check_exclude(given: Given) -> None:
    if _host() in [name.partition(".")[0] for name in str(given.value).split(",")]:
        raise given.refuse("excludes the one host there is; remove it")


def _check_export(given: Given) -> None:
    value = str(given.value)
    if value.upper() == "NONE":
        raise given.refuse("is not supported: the environment goes along; run gsub in `env -i`")
    if value.upper() != "ALL":
        raise given.refuse("is not supported: all goes along; set variables before gsub (export)")


def _check_open_mode(given: Given) -> None:
    if given.value != "truncate":
        raise given.refuse(
            "is not supported: a job begins its files anew; put %j into their names, or redirect "
            "with >> in the script"
        )


def _check_propagate(given: Given) -> None:
    if (given.value or "ALL").upper() == "NONE":
        raise given.refuse("is not supported: limits go along; set them with ulimit in the script")


_CONDITIONS = {
    "--nodes": _check_nodes,
    "--nodelist": _check_nodelist,
    "--exclude": _check_exclude,
    "--export": _check_export,
    "--open-mode": _check_open_mode,
    "--propagate": _check_propagate,
}


# ---------------------------------------------------------------------------------- counting

_COUNTED = frozenset(
    {"--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "--gres"}
    | {"--ntasks", "--ntasks-per-node", "--ntasks-per-gpu", "--sockets-per-node"}
    | {"--cpus-per-task", "--cpus-per-gpu", "--mem", "--mem-per-cpu", "--mem-per-gpu"}
    | {"--tres-per-task"}
)
#: They say nothing by themselves; as in sbatch the script runs once, however many tasks there are.
_COUNTS_OF_OTHERS = ("--ntasks", "--ntasks-per-node", "--ntasks-per-gpu", "--sockets-per-node")


class _Gpus(NamedTuple):
    given: Given
    number: int
    model: str | None


class _Counts:
    """GPUs, CPUs and memory of the one host, out of what is asked per node, task, CPU and GPU."""

    def __init__(self, last: dict[str, Given], gpus: int | None) -> None:
        self._last, self._own_gpus = last, gpus
        self._used: set[str] = set()  # counts that something was computed from
        gpus_per_task, self._cpus_per_task = self._per_task()
        total = self._total()
        self.tasks, self._tasks_of = self._tasks(total, gpus_per_task)
        self._gpus = total or self._of_tasks(gpus_per_task)
        if total is not None and gpus_per_task is not None:
            self._require_equal(total, self._of_tasks(gpus_per_task))

    def _tasks(self, total: _Gpus | None, each: _Gpus | None) -> tuple[int, Given | None]:
        """How many there are, and what says so."""
        for name in ("--ntasks", "--ntasks-per-node"):
            if (number := self._number(name)) is not None:
                return number, self._last[name]
        if total is not None and (per_gpu := self._number("--ntasks-per-gpu")):
            return max(1, total.number * per_gpu), self._last["--ntasks-per-gpu"]
        if total is not None and each is not None and each.number:
            return max(1, total.number // each.number), each.given
        return 1, None

    def _times_tasks(self, number: int) -> int:
        if self._tasks_of is not None:
            self._used.add(self._tasks_of.option.name)
        return number * self.tasks

    def translate(self, translation: Translation) -> None:
        """Put what was computed into gsub's words."""
        if self._gpus is not None:
            given, number, model = self._gpus
            translation.names_gpus = True
            translation.take(given, f"--gpus={number}")
            if model is not None and number:
                translation.take(given, f"--gpu-model={model}")
        for each in self._other_gres():
            translation.ignored.append(each)
        self._translate_cpus(translation)
        self._translate_memory(translation)
        for name in _COUNTS_OF_OTHERS:
            if name not in self._used and (self._number(name) or 1) > 1:
                translation.ignored.append(self._last[name])

    # ------------------------------------------------------------------------------ GPUs

    def _total(self) -> _Gpus | None:
        """What is asked for the host as a whole; forms that contradict each other are refused."""
        found: list[_Gpus] = []
        for name in ("--gpus", "--gpus-per-node"):
            if name in self._last:
                given = self._last[name]
                found.append(_typed(given, str(given.value)))
        if "--gres" in self._last:
            found += _gres_gpus(self._last["--gres"])
        if "--gpus-per-socket" in self._last:
            found.append(self._of_sockets(self._last["--gpus-per-socket"]))
        for other in found[1:]:
            self._require_equal(found[0], other)
        return found[0] if found else None

    def _of_sockets(self, given: Given) -> _Gpus:
        sockets = self._number("--sockets-per-node")
        if sockets is None:
            raise given.refuse("needs --sockets-per-node; use --gpus")
        self._used.add("--sockets-per-node")
        each = _typed(given, str(given.value))
        return each._replace(number=each.number * sockets)

    def _of_tasks(self, each: _Gpus | None) -> _Gpus | None:
        if each is not None:
            return each._replace(number=self._times_tasks(each.number))
        per_gpu = self._number("--ntasks-per-gpu")
        if per_gpu is None or not ("--ntasks" in self._last or "--ntasks-per-node" in self._last):
            return None
        given = self._last["--ntasks-per-gpu"]
        if self.tasks % per_gpu:
            raise given.refuse(f"does not divide the {self.tasks} tasks; name --gpus")
        self._used.add(given.option.name)
        return _Gpus(given, self._times_tasks(1) // per_gpu, None)

    def _require_equal(self, one: _Gpus, other: _Gpus | None) -> None:
        if other is not None and (one.number, one.model) != (
            other.number,
            other.model or one.model,
        ):
            raise other.given.refuse(
                f"asks for {other.number} GPUs and {one.given.written}={one.given.value} for "
                f"{one.number}; keep one of them"
            )

    def _other_gres(self) -> list[Given]:
        given = self._last.get("--gres")
        items = [] if given is None else str(given.value).split(",")
        return [
            given._replace(value=item)
            for item in items
            if given is not None and not _is_gpu(item) and item.lower() != "none"
        ]

    # ------------------------------------------------------------------- CPUs and memory

    def _cpus(self) -> tuple[Given, int] | None:
        per_gpu = self._number("--cpus-per-gpu")
        if per_gpu is not None:
            return self._last["--cpus-per-gpu"], per_gpu * max(1, self._gpu_count())
        if self._cpus_per_task is not None:
            given, each = self._cpus_per_task
            return given, self._times_tasks(each)
        if self.tasks > 1 and self._tasks_of is not None:
            return self._tasks_of, self._times_tasks(1)
        return None

    def _gpu_count(self) -> int:
        if self._own_gpus is not None:
            return self._own_gpus
        return 1 if self._gpus is None else self._gpus.number

    def _translate_cpus(self, translation: Translation) -> None:
        found = self._cpus()
        if found is not None:
            translation.take(found[0], f"--cpus={found[1]}")

    def _translate_memory(self, translation: Translation) -> None:
        names = ("--mem", "--mem-per-cpu", "--mem-per-gpu")
        forms = [self._last[name] for name in names if name in self._last]
        if len(forms) > 1:
            raise forms[1].refuse(f"and {forms[0].written} exclude each other; keep one of them")
        if not forms or str(forms[0].value) == "0":  # 0 is all there is: no bound
            return
        (given,) = forms
        factor = 1
        if given.option.name == "--mem-per-cpu":
            found = self._cpus()
            factor = 1 if found is None else found[1]
        elif given.option.name == "--mem-per-gpu":
            factor = max(1, self._gpu_count())
        try:
            size = parse_bytes(str(given.value)) * factor  # a bare number is MB, as in Slurm
        except Invalid as error:
            raise given.refuse(f"is not understood: {error.message}") from error
        exact, rest = divmod(size, MIB)
        translation.take(given, f"--mem={size}B" if rest else f"--mem={exact}M")

    # ------------------------------------------------------------------------- numbers

    def _per_task(self) -> tuple[_Gpus | None, tuple[Given, int] | None]:
        """GPUs and CPUs of each task."""
        gpus = cpus = None
        if "--tres-per-task" in self._last:
            given = self._last["--tres-per-task"]
            for item in str(given.value).replace("=", ":").split(","):
                if _is_gpu(item):
                    gpus = _gres_gpu(given, item)
                elif item.startswith("cpu:") and item[4:].isdecimal():
                    cpus = (given, int(item[4:]))
                else:
                    raise given.refuse("is not understood; use --gpus, --cpus")
        if "--gpus-per-task" in self._last:
            given = self._last["--gpus-per-task"]
            gpus = _typed(given, str(given.value))
        each = self._number("--cpus-per-task")
        if each is not None:
            cpus = (self._last["--cpus-per-task"], each)
        return gpus, cpus

    def _number(self, name: str) -> int | None:
        given = self._last.get(name)
        if given is None:
            return None
        value = str(given.value)
        if not (value.isascii() and value.isdecimal()) or not 1 <= int(value) <= 65_536:
            raise given.refuse("is not a number from 1 to 65536")
        return int(value)


def _is_gpu(item: str) -> bool:
    return item.removeprefix("gres/").split(":")[0] == "gpu"


def _gres_gpus(given: Given) -> list[_Gpus]:
    """The GPUs of --gres=LIST, of which there may be one kind."""
    found = []
    for item in str(given.value).split(","):
        name = item.removeprefix("gres/").split(":")[0]
        if name in ("shard", "mps"):
            raise given.refuse(f"is not supported: {name} has no size; share a GPU with --vram 8G")
        if _is_gpu(item):
            found.append(_gres_gpu(given, item))
        elif item.lower() == "none":
            found.append(_Gpus(given, 0, None))
        elif name.lower().startswith("gpu"):
            raise given.refuse("is not understood; write gpu:COUNT or gpu:MODEL:COUNT")
    if len(found) > 1:
        raise given.refuse("names several kinds of GPUs; a job gets one kind")
    return found


def _gres_gpu(given: Given, item: str) -> _Gpus:
    """`gpu`, `gpu:2`, `gpu:a100:2`."""
    rest = item.removeprefix("gres/").partition(":")[2]
    return _typed(given, rest or "1")


def _typed(given: Given, text: str) -> _Gpus:
    """`2`, `a100:2`, `a100`."""
    if "$" in text:
        raise given.refuse("is not expanded here; write the number, or give -g on the command line")
    parts = text.split(":")
    count = parts.pop() if parts[-1].isascii() and parts[-1].isdecimal() else "1"
    if len(parts) > 1 or "," in text or not all(parts) or len(count) > 4:
        raise given.refuse("is not understood; write MODEL:COUNT, or COUNT alone, of one kind")
    return _Gpus(given, int(count), parts[0] if parts else None)
