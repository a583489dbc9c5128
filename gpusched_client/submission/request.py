"""What a submission takes along from its submitter's process: directory, environment, limits.

Builds JobRequests for the Python API and for gsub. Must not talk to a daemon.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, Unpack

from gpusched_client.errors import GpuschedError, Invalid, TooLarge
from gpusched_client.terms import legal_name, unknown_marks
from gpusched_client.wire.job_options import OPTIONS, JobKeywords, fields_of
from gpusched_client.wire.limits import RLIMIT_NAMES
from gpusched_client.wire.message import changed, read_fields, specs_of
from gpusched_client.wire.submit_messages import JobRequest, job_over_common

R = TypeVar("R")
Word = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""One argument or path; text becomes bytes as os.fsencode does it."""

_PYTHON = rb"(?:.*/)?python[\d.]*"
_DEFAULTS = {name: spec.default for name, spec in specs_of(JobRequest).items()}
# What Python makes of LC_CTYPE at its start in the C locale (PEP 538), and says so to nobody.
_COERCED_LOCALES = frozenset({b"C.UTF-8", b"C.utf8", b"UTF-8"})
_C_LOCALES = frozenset({b"", b"C", b"POSIX"})


class Surroundings:
    """What each job takes along from this process: directory, environment, umask and limits.

    They are read when this is made, and checked, so that thousands of jobs can share them.
    """

    def __init__(
        self, environment: Mapping[str, str] | Mapping[bytes, bytes] | None = None
    ) -> None:
        taken = {
            "environment": _environment(environment),
            "umask": current_umask(),
            "rlimits": current_rlimits(),
            "niceness": current_niceness(),
            "affinity": current_affinity(),
        }
        self.fields = _read(lambda: read_fields(JobRequest, taken, "job"))
        self._cwd: bytes | None = None

    @property
    def environment(self) -> Mapping[bytes, bytes]:
        """The environment."""
        environment: Mapping[bytes, bytes] = self.fields["environment"]
        return environment

    def directory(self) -> bytes:
        """Where this process is, as of the first time that it is asked. Raises Invalid."""
        if self._cwd is None:
            self._cwd = _directory(None, self.environment)
        return self._cwd


class SubmitKeywords(JobKeywords, total=False):
    """What Client.submit and job_request take by keyword.

    One of `shell`, a line for /bin/sh, and `script`, a script's content with its `args`, where no
    argv is given; `script_path` is where it was. `cwd` and `environment` are this process's where
    they are not given. With `check` the job is looked up as it will be at its start: Invalid, with
    the cure, where its command, directory or a place of its output is not there. `surroundings` are
    what thousands of jobs take along, read once: Surroundings(); by default they are read anew.
    """

    shell: str | bytes | None
    script: str | bytes | None
    script_path: Word | None
    args: Sequence[Word]
    cwd: Word | None
    environment: Mapping[str, str] | Mapping[bytes, bytes] | None
    check: bool
    surroundings: Surroundings | None


def job_request(
    argv: Sequence[Word] | None = None, **keywords: Unpack[SubmitKeywords]
) -> JobRequest:
    """A job that runs as this process would: same directory, environment, umask and limits.

    Exactly one of `argv`, `shell` (a line for /bin/sh) and `script` (a script's content, with
    `args`). The other keywords, with their types, are in JobKeywords: `gpus`, `vram`, `time_limit`
    and so on, as the options of gsub. Raises Invalid.
    """
    for name, given in (("argv", argv), ("args", keywords.get("args"))):
        if isinstance(given, (str, bytes)):
            other = ", or use shell=" if name == "argv" else ""
            problem = f"{name} is {given!r}; give a list of words{other}"
            raise Invalid(problem, {"path": name})
    shell, script = keywords.pop("shell", None), keywords.pop("script", None)
    script_path = keywords.pop("script_path", None)
    args, cwd = keywords.pop("args", ()), keywords.pop("cwd", None)
    words = None if argv is None else _words(argv, "argv")
    line = None if shell is None else _octets(shell, "shell")
    around, environment = keywords.pop("surroundings", None), keywords.pop("environment", None)
    if around is None or environment is not None:
        around = Surroundings(environment)
    is_checked = keywords.pop("check", False)
    options = fields_of(keywords)
    _check_needs_gpus(keywords)
    options["name"] = options.get("name") or default_name(words, line)
    for name in ("output", "error"):
        options[name] = _log_pattern(name, options.get(name), around.environment)
    asked = {
        "cwd": around.directory() if cwd is None else _directory(cwd, around.environment),
        "argv": words,
        "script": script.encode() if isinstance(script, str) else script,
        "script_path": None if script_path is None else _place(script_path, "script_path"),
        "args": _words(args, "args"),
        "shell": line,
        **options,
    }
    own = {name: value for name, value in asked.items() if value != _DEFAULTS[name]}
    # Read as the daemon will, so that a mistake is found here and with the field's name.
    request = _read(lambda: job_over_common(around.fields, own, "job"))
    request = _with_module_path(request)
    if not is_checked:
        return request
    from gpusched_client.submission.checks import check_request

    check_request(request)
    return changed(request, checked=True)


def _read(read: Callable[[], R]) -> R:
    """What is read; a refusal has the caller's name of the value."""
    try:
        return read()
    except (Invalid, TooLarge) as error:
        raise _by_keyword(error) from None


def _by_keyword(error: GpuschedError) -> GpuschedError:
    """The same with the caller's name of a value instead of the wire's."""
    path = str(error.data.get("path", ""))
    field = path.removeprefix("job.")
    name = next((row.keyword for row in OPTIONS.values() if row.field == field), field)
    text = error.message.removeprefix(f"{path}: ")
    return type(error)(f"{name}: {text}", {**error.data, "path": name})


def _directory(given: Word | None, environment: Mapping[bytes, bytes]) -> bytes:
    """Where the job runs: `given`, or where this process is."""
    try:
        if given is None:
            return os.getcwdb()
        path = _octets(given, "cwd")
        if not path:
            problem = "the name of the directory is empty; name one, or leave it out"
            raise Invalid(problem, {"path": "cwd"})
        return os.path.abspath(_expanded(path, environment))
    except FileNotFoundError:
        problem = "the current directory no longer exists; go to another, or name one"
        raise Invalid(problem, {"path": "cwd"}) from None


def _expanded(path: bytes, environment: Mapping[bytes, bytes]) -> bytes:
    """`~/x` below the home directory, which no shell expands in #SBATCH -o ~/x or --output=~/x."""
    if not path.startswith(b"~"):
        return path
    home = environment.get(b"HOME")
    if home and (path == b"~" or path.startswith(b"~/")):
        return home + path[1:]
    return os.path.expanduser(path)


def _log_pattern(
    name: str, pattern: bytes | None, environment: Mapping[bytes, bytes]
) -> bytes | None:
    """A pattern for a file's name as it is sent. Invalid for a % that nothing would replace."""
    if not isinstance(pattern, bytes):
        return pattern
    unknown = unknown_marks(pattern) if b"%" in pattern else ()
    if unknown:
        known = "%j %A %J id, %a 0, %x name, %u user, %N host, %n %t 0, %s batch, %% a %"
        problem = f"{unknown[0]} has no meaning in {name} {os.fsdecode(pattern)!r}; use {known}"
        raise Invalid(problem, {"path": name})
    return _expanded(pattern, environment)


def _words(words: Sequence[Word], name: str) -> tuple[bytes, ...]:
    return tuple([_octets(word, f"{name}[{n}]") for n, word in enumerate(words)])


def _place(path: Word, name: str) -> bytes:
    return os.path.abspath(_octets(path, name))


def _octets(given: Word, path: str) -> bytes:
    """As os.fsencode gives them. Invalid for what is no text, such as a number among words."""
    try:
        return os.fsencode(given)
    except TypeError:
        problem = f"{path}: {given!r} is no text; give it as text, such as {str(given)!r}"
        raise Invalid(problem, {"path": path}) from None
    except UnicodeEncodeError:
        problem = f"{path}: {given!r} is not valid Unicode; give valid text, or bytes"
        raise Invalid(problem, {"path": path}) from None


def _check_needs_gpus(keywords: Mapping[str, object]) -> None:
    """Refuse what would say nothing without GPUs: it was meant for some."""
    for name in ("exclusive", "retries"):
        if keywords.get("gpus") == 0 and keywords.get(name):
            problem = f"{name}: the job asks for 0 GPUs; ask for one, or leave it out"
            raise Invalid(problem, {"path": name})


def _environment(
    given: Mapping[str, str] | Mapping[bytes, bytes] | None,
) -> Mapping[bytes, bytes]:
    if given is not None:
        return {
            _octets(name, "environment"): _octets(value, f"environment.{name!s}")
            for name, value in given.items()
        }
    # A name of no bytes can be inherited but not handed on.
    own = {name: value for name, value in os.environb.items() if name}
    if own.get(b"LC_CTYPE") in _COERCED_LOCALES:
        _undo_coercion(own)
    return own


def _undo_coercion(own: dict[bytes, bytes]) -> None:
    """Give LC_CTYPE as the user had it, if it is this interpreter that set it."""
    try:
        with open("/proc/self/environ", "rb") as file:
            lines = file.read().split(b"\0")
    except OSError:
        return
    first = dict(line.split(b"=", 1) for line in lines if b"=" in line)
    asked = first.get(b"LC_ALL") or first.get(b"LC_CTYPE") or first.get(b"LANG") or b""
    if asked not in _C_LOCALES or first.get(b"LC_CTYPE") == own[b"LC_CTYPE"]:
        return
    del own[b"LC_CTYPE"]
    if b"LC_CTYPE" in first:
        own[b"LC_CTYPE"] = first[b"LC_CTYPE"]


def _with_module_path(request: JobRequest) -> JobRequest:
    """A captured script of Python's finds the modules beside where it was."""
    if request.script is None or request.script_path is None:
        return request
    words = request.script[:256].split(b"\n", 1)[0].removeprefix(b"#!").split()
    if not any(re.fullmatch(_PYTHON, word) for word in words):
        return request
    beside = os.path.dirname(request.script_path)
    others = request.environment.get(b"PYTHONPATH")
    path = beside + b":" + others if others else beside
    longer = {**request.environment, b"PYTHONPATH": path}
    return _read(lambda: JobRequest.from_wire({**request.to_wire(), "environment": longer}, "job"))


def default_name(argv: Sequence[Word] | None, shell: str | bytes | None) -> str:
    """A job name from the command: its last path component, what is hard to type replaced."""
    if argv:
        return legal_name(os.fsdecode(argv[0]))
    first = os.fsdecode(shell or b"").split(maxsplit=1)
    return legal_name(first[0]) if first else "job"


def current_umask() -> int:
    """This process's umask, read without setting it where the kernel tells it."""
    try:
        with open("/proc/self/status", "rb") as status:
            for line in status:
                if line.startswith(b"Umask:"):
                    return int(line.split()[1], 8)
    except OSError:
        pass
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def current_rlimits() -> dict[str, tuple[int, int]]:
    """This process's resource limits as (soft, hard), also those that are none."""
    import resource

    limits = {}
    for name in sorted(RLIMIT_NAMES):
        number = getattr(resource, f"RLIMIT_{name.upper()}", None)
        if number is None:
            continue
        limits[name] = resource.getrlimit(number)
    return limits


def current_niceness() -> int:
    """This process's, 0 where it is below: only root may give that to a job."""
    return max(0, os.getpriority(os.PRIO_PROCESS, 0))


def current_affinity() -> tuple[int, ...] | None:
    """The CPUs that this process may use, None where these are all that its host has online."""
    own = os.sched_getaffinity(0)
    return tuple(sorted(own)) if len(own) < (os.cpu_count() or 1) else None
