"""What a submission takes along from its submitter's process: directory, environment, limits.

Builds JobRequests for the Python API and for gsub. Must not talk to a daemon.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

from gpusched_client.errors import Invalid
from gpusched_client.wire.job_options import JobKeywords, fields_of
from gpusched_client.wire.limits import RLIMIT_NAMES
from gpusched_client.wire.submit_messages import JobRequest

Word = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""One argument or path; text becomes bytes as os.fsencode does it."""

_DEFAULT_NAME_CHARS_MAX = 64
_NOT_IN_NAMES = r"[^-A-Za-z0-9_.+]+"


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """What a submission gives back: the id, the limit it got, and what people should know."""

    id: int
    time_limit_s: int | None = None
    warnings: tuple[str, ...] = ()


class SubmitKeywords(JobKeywords, total=False):
    """What Client.submit and job_request take by keyword.

    One of `shell`, a line for /bin/sh, and `script`, a script's content with its `args`, where no
    argv is given. `cwd` and `environment` are this process's where they are not given.
    """

    shell: str | bytes | None
    script: str | bytes | None
    args: Sequence[Word]
    cwd: Word | None
    environment: Mapping[str, str] | Mapping[bytes, bytes] | None


def job_request(
    argv: Sequence[Word] | None = None, **keywords: Unpack[SubmitKeywords]
) -> JobRequest:
    """A job that runs as this process would: same directory, environment, umask and limits.

    Exactly one of `argv`, `shell` (a line for /bin/sh) and `script` (a script's content, with
    `args`). The other keywords, with their types, are in JobKeywords: `gpus`, `vram`, `time_limit`
    and so on, as the options of gsub. Raises Invalid.
    """
    if isinstance(argv, (str, bytes)):
        raise Invalid(f"argv is {argv!r}; give a list of words, or use shell=", {"path": "argv"})
    shell, script = keywords.pop("shell", None), keywords.pop("script", None)
    args, cwd = keywords.pop("args", ()), keywords.pop("cwd", None)
    environment = keywords.pop("environment", None)
    options = fields_of(keywords)
    options["name"] = options.get("name") or default_name(argv, shell)
    request = JobRequest(
        cwd=_directory(cwd),
        environment=_environment(environment),
        argv=None if argv is None else _words(argv),
        script=script.encode() if isinstance(script, str) else script,
        args=_words(args),
        shell=None if shell is None else os.fsencode(shell),
        umask=current_umask(),
        rlimits=current_rlimits(),
        niceness=current_niceness(),
        affinity=current_affinity(),
        **options,
    )
    # Read back what was built, so that a mistake is found here and with the field's name.
    return JobRequest.from_wire(request.to_wire(), "job")


def _directory(given: Word | None) -> bytes:
    """Where the job runs: `given`, or where this process is."""
    try:
        return os.getcwdb() if given is None else os.path.abspath(os.fsencode(given))
    except FileNotFoundError:
        problem = "the current directory no longer exists; go to another, or name one"
        raise Invalid(problem, {"path": "cwd"}) from None


def _words(words: Sequence[Word]) -> tuple[bytes, ...]:
    return tuple([os.fsencode(word) for word in words])


def _environment(given: Mapping[str, str] | Mapping[bytes, bytes] | None) -> dict[bytes, bytes]:
    if given is None:
        # A name of no bytes can be inherited but not handed on.
        return {name: value for name, value in os.environb.items() if name}
    return {os.fsencode(name): os.fsencode(value) for name, value in given.items()}


def default_name(argv: Sequence[Word] | None, shell: str | bytes | None) -> str:
    """A job name from the command: its last path component, what is hard to type replaced."""
    if argv:
        return legal_name(os.fsdecode(argv[0]))
    first = os.fsdecode(shell or b"").split(maxsplit=1)
    return legal_name(first[0]) if first else "job"


def legal_name(path: str) -> str:
    """The last component of `path` as a name that is easy to type; "job" where nothing is left."""
    base = path.rstrip("/").rpartition("/")[2]
    return re.sub(_NOT_IN_NAMES, "_", base)[:_DEFAULT_NAME_CHARS_MAX].strip("_") or "job"


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
