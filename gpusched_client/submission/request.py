"""What a submission takes along from its submitter's process: directory, environment, limits.

Builds JobRequests for the Python API and for gsub. Must not talk to a daemon.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from gpusched_client.errors import Invalid
from gpusched_client.units import parse_bytes, parse_duration
from gpusched_client.wire.limits import RLIMIT_NAMES, limit_to_wire
from gpusched_client.wire.submit_messages import JobRequest

Word = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""One argument or path; text becomes bytes as os.fsencode does it."""

_DEFAULT_NAME_CHARS_MAX = 64
_NOT_IN_NAMES = re.compile(r"[^-A-Za-z0-9_.+]+")


def job_request(
    argv: Sequence[Word] | None = None,
    *,
    shell: str | bytes | None = None,
    script: str | bytes | None = None,
    args: Sequence[Word] = (),
    gpus: int = 1,
    vram: str | int | None = None,
    gpu_model: str | None = None,
    exclusive: bool = False,
    topology: str | None = None,
    memory: str | int | None = None,
    cpus: int | None = None,
    time_limit: str | int | None = None,
    name: str | None = None,
    nice: int = 0,
    output: Word | None = None,
    error: Word | None = None,
    hold: bool = False,
    retries: int = 0,
    cwd: Word | None = None,
    environment: Mapping[str, str] | Mapping[bytes, bytes] | None = None,
) -> JobRequest:
    """A job that runs as this process would: same directory, environment, umask and limits.

    Exactly one of `argv`, `shell` (a line for /bin/sh) and `script` (a script's content, with
    `args`). `vram` is per GPU and `memory` of the host: bytes, or text such as "18G".
    `time_limit` is seconds, or text such as "2h" or "unlimited"; None is the daemon's default.
    Raises Invalid.
    """
    if isinstance(argv, (str, bytes)):
        raise Invalid(f"argv is {argv!r}; give a list of words, or use shell=", {"path": "argv"})
    request = JobRequest(
        cwd=_directory(cwd),
        environment=_environment(environment),
        argv=None if argv is None else _words(argv),
        script=script.encode() if isinstance(script, str) else script,
        args=_words(args),
        shell=None if shell is None else os.fsencode(shell),
        umask=current_umask(),
        rlimits=current_rlimits(),
        gpus=gpus,
        vram_bytes=parse_bytes(vram) if isinstance(vram, str) else vram,
        gpu_model=gpu_model,
        exclusive=exclusive,
        topology=topology,
        memory_bytes=parse_bytes(memory) if isinstance(memory, str) else memory,
        cpus=cpus,
        time_limit_s=_limit_on_wire(time_limit),
        name=name or default_name(argv, shell),
        nice=nice,
        output=None if output is None else os.fsencode(output),
        error=None if error is None else os.fsencode(error),
        hold=hold,
        retries=retries,
    )
    # Read back what was built, so that a mistake is found here and with the field's name.
    return JobRequest.from_wire(request.to_wire(), "job")


def _limit_on_wire(given: str | int | None) -> int | None:
    return limit_to_wire(parse_duration(given)) if isinstance(given, str) else given


def _directory(given: Word | None) -> bytes:
    """Where the job runs: `given`, or where this process is."""
    try:
        return os.getcwdb() if given is None else os.path.abspath(os.fsencode(given))
    except FileNotFoundError:
        problem = "the current directory does not exist any more; go to another, or name one"
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
    return _NOT_IN_NAMES.sub("_", base)[:_DEFAULT_NAME_CHARS_MAX].strip("_") or "job"


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
    """This process's resource limits that are not unlimited, as (soft, hard)."""
    import resource

    limits = {}
    for name in sorted(RLIMIT_NAMES):
        number = getattr(resource, f"RLIMIT_{name.upper()}", None)
        if number is None:
            continue
        soft, hard = resource.getrlimit(number)
        if (soft, hard) != (resource.RLIM_INFINITY, resource.RLIM_INFINITY):
            limits[name] = (soft, hard)
    return limits
