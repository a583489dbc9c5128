"""THE table of job options: what a submitter may ask for, one row an option.

A row is a field of JobOptions. Everything else about the option is made from it: the fields of
JobRequest and JobView, gsub's option, the keyword of Client.submit, the #GSUB and #SBATCH lines,
the words in which gsub repeats a request, and the fact that `gq ID` shows. A new option is one row
here and the type of its keyword in JobKeywords, apart from what the daemon does with it.

It belongs to the wire because the messages are made from it. Pure: it knows no terminal and no
process; the commands turn a row into an option of click.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple, ParamSpec, TypedDict, TypeVar, dataclass_transform

from gpusched_client.errors import Invalid
from gpusched_client.units import (
    MIB,
    VRAM_ASKED_BYTES_MIN,
    bytes_text,
    duration_text,
    is_slice_profile,
    parse_asked_bytes,
    parse_duration,
)
from gpusched_client.wire.fields import Reader, boolean, integer, octets, one_of, text
from gpusched_client.wire.limits import (
    CPUS_MAX,
    GPUS_MAX,
    MEMORY_BYTES_MAX,
    MEMORY_BYTES_MIN,
    NICE_MAX,
    NICE_MIN,
    PATH_BYTES_MAX,
    RETRIES_MAX,
    TIME_LIMIT_S_MAX,
    VRAM_BYTES_MAX,
    limit_from_wire,
    limit_to_wire,
)
from gpusched_client.wire.message import Declared, Message, part
from gpusched_client.wire.values import JOB_NAME, TIME_LIMIT

P = ParamSpec("P")
M = TypeVar("M", bound=Message)

Words = Callable[["JobOptions", int | None], str]
"""Of what is asked, and the time limit that the daemon gave where it is known; "" says nothing."""


class Section(Enum):
    """The part of gsub's help in which an option stands."""

    RESOURCES = "what it takes"
    FILES = "its name and files"
    QUEUE = "how it waits"


class OtherForm(NamedTuple):
    """A second option of gsub for the same field, with a grammar of its own."""

    flag: str
    metavar: str
    help: str
    parse: Callable[[str], str]

    @property
    def keyword(self) -> str:
        """What it is called among the values that were given."""
        return self.flag.removeprefix("--")


class JobOption:
    """One row. The reader says type and limits; what is text there may be parsed from other text.

    `keyword` is its name in Python, where it is not the field's. `check` refuses numbers that the
    wire could carry and that no person can mean. `slurm` are the names of #SBATCH
    that mean the same; `from_slurm` turns their value into ours, or into None where it asks for
    what is done anyway. `words` are for describe_request; `fact` is a name and a value for `gq ID`.
    """

    # Written out, since a dataclass's methods are generated at each start of each command.
    def __init__(
        self,
        *,
        reader: Reader,
        default: Any,
        section: Section,
        flags: tuple[str, ...],
        help: str,
        metavar: str | None = None,
        shows_default: bool = False,
        keyword: str = "",
        parse: Callable[[str], float] | None = None,
        check: Callable[[int], None] = lambda _value: None,
        slurm: tuple[str, ...] = (),
        from_slurm: Callable[[str], str | None] = lambda value: value,
        words: Words = lambda _asked, _limit_s: "",
        is_said_last: bool = False,
        fact: tuple[str, Callable[[JobOptions], str]] | None = None,
        other_form: OtherForm | None = None,
    ) -> None:
        self.reader, self.default, self.parse, self.check = reader, default, parse, check
        self.flags, self.section, self.help, self.metavar = flags, section, help, metavar
        self.shows_default = shows_default
        self.slurm, self.from_slurm = slurm, from_slurm
        self.words, self.is_said_last, self.fact = words, is_said_last, fact
        self.other_form = other_form
        self.keyword = keyword
        self.field = ""  # the wire's name of it, by the class below

    @property
    def is_flag(self) -> bool:
        """Whether it is given by naming it, without a value."""
        return self.reader is boolean

    @property
    def names(self) -> tuple[str, ...]:
        """All that gsub takes it by."""
        return self.flags if self.other_form is None else (*self.flags, self.other_form.flag)

    @property
    def longest_flag(self) -> str:
        """As messages and #GSUB lines name it."""
        return max(self.flags, key=len)

    def value(self, given: object) -> Any:
        """What travels, of what a caller gave: amounts may be text, paths become bytes."""
        if isinstance(given, str) and self.parse is not None:
            return self.parse(given)
        if isinstance(given, int):
            self.check(given)
        if self.reader.kind == "bytes" and isinstance(given, (str, bytes, os.PathLike)):
            return os.fsencode(given)
        return given


# A view is read loosely: a newer daemon may allow more than this client would ask for.
_LOOSE = {"integer": integer(), "text": text(), "bytes": octets(PATH_BYTES_MAX)}


def _field_of(make_row: Callable[P, JobOption]) -> Callable[P, Any]:
    def option(*args: P.args, **about: P.kwargs) -> Any:
        row = make_row(*args, **about)
        shown = _LOOSE.get(row.reader.kind, row.reader)
        return Declared(row.reader, row.default, shown, row)

    return option


option = _field_of(JobOption)


@dataclass_transform(frozen_default=True, field_specifiers=(option,))
def _table(cls: type[M]) -> type[M]:
    return part(cls)


# -------------------------------------------------------------------------- amounts in words


def _parse_vram(text: str) -> int:
    size = parse_asked_bytes(text)
    if size == 0:
        raise Invalid(f"{text!r} is not an amount of memory; leave it out to take whole GPUs")
    if size < VRAM_ASKED_BYTES_MIN:
        raise Invalid(f"{text!r} is {_too_little_vram()}")
    return size


def _too_little_vram() -> str:
    least = bytes_text(VRAM_ASKED_BYTES_MIN)
    return f"less than the {least} that a process on a GPU needs at least; write it as 18G"


def _check_vram(size: int) -> None:
    """A number in Python is bytes: 18 would share a GPU as if it took nothing."""
    if size < VRAM_ASKED_BYTES_MIN:
        could_be = 0 < size < 1024 and not isinstance(size, bool)
        meant = f'; did you mean "{size}G"?' if could_be else ""
        raise Invalid(f"vram={size} is in bytes, {_too_little_vram()}{meant}")


def _check_memory(size: int) -> None:
    if size < MEMORY_BYTES_MIN:
        meant = f'; did you mean "{size}G"?' if 0 < size < 1024 else '; write it as "64G"'
        raise Invalid(f"memory={size} is in bytes, too little to start a process{meant}")


def _parse_mig(text: str) -> str:
    """As the driver ends the names of slices, "NVIDIA A100-SXM4-80GB MIG 1g.10gb"."""
    profile = text.strip().lower().removeprefix("mig ")
    if not is_slice_profile(profile):
        raise Invalid(
            f"{text!r} is not a MIG profile; write it as 1g.10gb, as `gq --gpus` shows it; "
            "a model goes with --gpu-model"
        )
    return f"MIG {profile}"


def _parse_memory(text: str) -> int:
    size = parse_asked_bytes(text)
    if size < MIB:
        raise Invalid(f"{text!r} is too little to start a process; leave it out for the default")
    return size


def _parse_time_limit(text: str) -> int:
    seconds = parse_duration(text)
    if seconds == 0:
        raise Invalid(f"{text!r} is not a time limit; use unlimited for no limit")
    return limit_to_wire(seconds)


def _parse_estimate(text: str) -> int:
    seconds = parse_duration(text)
    if not seconds:
        raise Invalid(f"{text!r} says nothing about how long it runs; leave it out")
    return min(max(1, round(seconds)), TIME_LIMIT_S_MAX)


def _time_from_slurm(value: str) -> str:
    """No time is Slurm's word for no limit."""
    return "unlimited" if value and not value.strip("0:-") else value


# ------------------------------------------------------------------------ a request in words


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _gpus_words(asked: JobOptions, _limit_s: int | None) -> str:
    return _count(asked.gpus, "GPU", "GPUs") if asked.gpus else "no GPU"


def _vram_words(asked: JobOptions, _limit_s: int | None) -> str:
    if asked.vram_bytes is None:
        return ""
    return bytes_text(asked.vram_bytes) + (" each" if asked.gpus > 1 else "")


def _model_words(asked: JobOptions, _limit_s: int | None) -> str:
    return f"model {asked.gpu_model}" if asked.gpu_model is not None else ""


def _topology_words(asked: JobOptions, _limit_s: int | None) -> str:
    return f"connected by {asked.topology}" if asked.topology is not None else ""


def _memory_words(asked: JobOptions, _limit_s: int | None) -> str:
    return "" if asked.memory_bytes is None else f"{bytes_text(asked.memory_bytes)} of host memory"


def _cpus_words(asked: JobOptions, _limit_s: int | None) -> str:
    return _count(asked.cpus, "CPU", "CPUs") if asked.cpus else ""


def _limit_words(asked: JobOptions, given_s: int | None) -> str:
    wired_s = asked.time_limit_s if given_s is None else given_s
    if wired_s is None:
        return "default limit"
    limit_s = limit_from_wire(wired_s)
    if limit_s is None:
        return "no limit"
    words = f"limit {duration_text(limit_s)}"
    return words if asked.time_limit_s is not None else f"{words} (default), stopped after that"


def _shown(estimate_s: int) -> str:
    return duration_text(estimate_s)


def _estimate_words(asked: JobOptions, limit_s: int | None) -> str:
    if asked.estimate_s is None:
        return ""
    if limit_s is not None and asked.estimate_s > limit_s:
        return f"will probably reach it (estimate {_shown(asked.estimate_s)})"
    return f"will probably run {_shown(asked.estimate_s)}"


def _retries_words(asked: JobOptions, _limit_s: int | None) -> str:
    return f"up to {_count(asked.retries, 'retry', 'retries')}" if asked.retries else ""


# ------------------------------------------------------------------------ facts for `gq ID`


def _gpus_fact(job: JobOptions) -> str:
    if job.vram_bytes is not None:
        return f"{job.gpus}, {bytes_text(job.vram_bytes)} each"
    return f"{job.gpus}, whole" if job.gpus else "0"


def _memory_fact(job: JobOptions) -> str:
    return "" if job.memory_bytes is None else bytes_text(job.memory_bytes)


def _limit_fact(job: JobOptions) -> str:
    return "" if job.time_limit_s is None else duration_text(limit_from_wire(job.time_limit_s))


# --------------------------------------------------------------------------------- the table


@_table
class JobOptions(Message):
    """The fields of all options, of a request as of a view.

    They stand in the order in which they are written, and a submission id is kept with a digest of
    what was written: new ones come last.
    """

    __slots__ = ()

    gpus: int = option(
        reader=integer(0, GPUS_MAX),
        default=1,
        section=Section.RESOURCES,
        flags=("-g", "--gpus"),
        metavar="N",
        shows_default=True,
        help="GPUs; 0 runs without any.",
        words=_gpus_words,
        fact=("GPUs", _gpus_fact),
    )
    vram_bytes: int | None = option(
        reader=integer(1, VRAM_BYTES_MAX),
        default=None,
        section=Section.RESOURCES,
        flags=("-m", "--vram"),
        metavar="SIZE",
        help="VRAM on each GPU, such as 18G; shares GPUs. Without it GPUs are taken whole.",
        keyword="vram",
        parse=_parse_vram,
        check=_check_vram,
        words=_vram_words,
    )
    gpu_model: str | None = option(
        reader=text(256),
        default=None,
        section=Section.RESOURCES,
        flags=("--gpu-model",),
        metavar="MODEL",
        help="Only GPUs whose model has this in its name.",
        other_form=OtherForm(
            "--mig", "PROFILE", "Only MIG slices of this profile, as 1g.10gb.", _parse_mig
        ),
        words=_model_words,
        fact=("Model", lambda job: job.gpu_model or ""),
    )
    exclusive: bool = option(
        reader=boolean,
        default=False,
        section=Section.RESOURCES,
        flags=("--exclusive",),
        help="With --vram: no other job on these GPUs.",
        words=lambda asked, _: "exclusive" if asked.exclusive else "",
        fact=("Exclusive", lambda job: "yes" if job.exclusive else ""),
    )
    topology: str | None = option(
        reader=one_of("nvlink"),
        default=None,
        section=Section.RESOURCES,
        flags=("--topology",),
        help="Only GPUs connected like this.",
        words=_topology_words,
        fact=("Topology", lambda job: job.topology or ""),
    )
    memory_bytes: int | None = option(
        reader=integer(MEMORY_BYTES_MIN, MEMORY_BYTES_MAX),
        default=None,
        section=Section.RESOURCES,
        flags=("--mem",),
        metavar="SIZE",
        help="Host memory it may use, as 64G.",
        keyword="memory",
        parse=_parse_memory,
        check=_check_memory,
        slurm=("--mem",),
        words=_memory_words,
        fact=("Host memory", _memory_fact),
    )
    cpus: int | None = option(
        reader=integer(1, CPUS_MAX),
        default=None,
        section=Section.RESOURCES,
        flags=("--cpus",),
        metavar="N",
        help="CPUs it may keep busy.",
        slurm=("--cpus-per-task", "-c"),
        words=_cpus_words,
        fact=("CPUs", lambda job: str(job.cpus or "")),
    )
    time_limit_s: int | None = option(
        reader=TIME_LIMIT,
        default=None,
        section=Section.RESOURCES,
        flags=("-t", "--time"),
        metavar="TIME",
        help="Limit: 90 (minutes), 2h, 1-12:00:00, unlimited. The job is stopped after it.",
        keyword="time_limit",
        parse=_parse_time_limit,
        slurm=("--time", "-t"),
        from_slurm=_time_from_slurm,
        words=_limit_words,
        fact=("Time limit", _limit_fact),
    )
    name: str | None = option(
        reader=JOB_NAME,
        default=None,
        section=Section.FILES,
        flags=("-J", "--name"),
        metavar="NAME",
        help="Name; the command's by default.",
        slurm=("--job-name", "-J"),
    )
    nice: int = option(
        reader=integer(NICE_MIN, NICE_MAX),
        default=0,
        section=Section.QUEUE,
        flags=("--nice",),
        metavar="N",
        help="Lower the job's priority.",
        slurm=("--nice",),
        fact=("Nice", lambda job: str(job.nice or "")),
    )
    output: bytes | None = option(
        reader=octets(PATH_BYTES_MAX, empty=False),
        default=None,
        section=Section.FILES,
        flags=("-o", "--output"),
        metavar="FILE",
        help="stdout; %j is the job id.",
        slurm=("--output", "-o"),
    )
    error: bytes | None = option(
        reader=octets(PATH_BYTES_MAX, empty=False),
        default=None,
        section=Section.FILES,
        flags=("-e", "--error"),
        metavar="FILE",
        help="stderr; the same file by default.",
        slurm=("--error", "-e"),
    )
    hold: bool = option(
        reader=boolean,
        default=False,
        section=Section.QUEUE,
        flags=("--hold",),
        help="Submit held; it waits for a release.",
        slurm=("--hold", "-H"),
        words=lambda asked, _: "held" if asked.hold else "",
        is_said_last=True,
        fact=("Held", lambda job: "yes" if job.hold else ""),
    )
    retries: int = option(
        reader=integer(0, RETRIES_MAX),
        default=0,
        section=Section.QUEUE,
        flags=("--retries",),
        metavar="N",
        help="Tries again after CUDA out of memory, with more VRAM.",
        words=_retries_words,
        fact=("Retries", lambda job: str(job.retries or "")),
    )
    estimate_s: int | None = option(
        reader=integer(1, TIME_LIMIT_S_MAX),
        default=None,
        section=Section.RESOURCES,
        flags=("--estimate",),
        metavar="TIME",
        help="How long it will probably run; that never stops it.",
        keyword="estimate",
        parse=_parse_estimate,
        words=_estimate_words,
        fact=("Estimate", lambda job: "" if job.estimate_s is None else _shown(job.estimate_s)),
    )


class JobKeywords(TypedDict, total=False):
    """The types of the same as keywords of Client.submit and job_request.

    Sizes are bytes, or text such as "18G". `vram` is per GPU, `memory` of the host. `time_limit` is
    seconds, or text such as "2h" or "unlimited"; None is the daemon's default. So is `estimate`,
    how long it will probably run.
    """

    gpus: int
    vram: str | int | None
    gpu_model: str | None
    exclusive: bool
    topology: str | None
    memory: str | int | None
    cpus: int | None
    time_limit: str | int | None
    name: str | None
    nice: int
    output: str | bytes | os.PathLike[str] | os.PathLike[bytes] | None
    error: str | bytes | os.PathLike[str] | os.PathLike[bytes] | None
    hold: bool
    retries: int
    estimate: str | int | None


def _rows() -> dict[str, JobOption]:
    rows = {}
    for name, entry in JobOptions.declared.items():
        row: JobOption = entry.row
        row.field = name
        row.keyword = row.keyword or name
        rows[row.keyword] = row
    return rows


OPTIONS: Mapping[str, JobOption] = _rows()
"""The rows by keyword, in the order of the table."""


def fields_of(given: Mapping[str, object]) -> dict[str, Any]:
    """What travels, of a caller's keywords. Raises TypeError for an unknown one, and Invalid."""
    unknown = given.keys() - OPTIONS.keys()
    if unknown:
        raise TypeError(f"unexpected keyword argument: {', '.join(sorted(unknown))}")
    rows = [OPTIONS[keyword] for keyword in given]
    return {row.field: row.value(given[row.keyword]) for row in rows}


def describe_request(asked: JobOptions, limit_s: int | None) -> str:
    """What a submission asks for, in words: "2 GPUs, 18 GiB each, limit 30 min".

    `limit_s` is the time limit that the daemon gave it, as it travels; None: not known.
    """
    rows = sorted(OPTIONS.values(), key=lambda row: row.is_said_last)
    return ", ".join(filter(None, [row.words(asked, limit_s) for row in rows]))


def asked_facts(job: JobOptions) -> list[tuple[str, str]]:
    """What a job asks for, by name, for `gq ID`; "" where there is nothing to say."""
    return [(row.fact[0], row.fact[1](job)) for row in OPTIONS.values() if row.fact is not None]
