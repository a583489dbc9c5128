"""From the command line to the claim: the spec is checked, the attempt claimed, its life begun."""

from __future__ import annotations

import os

from gpuschedd.supervisor.errors import (
    EXIT_BUG,
    EXIT_CLAIM_LOST,
    EXIT_NO_SPEC,
    EXIT_OK,
    EXIT_SPEC_REFUSED,
    EXIT_STORAGE,
    EXIT_UNAVAILABLE,
    SHORT_ERRNOS,
    STORAGE_ERRNOS,
    Refused,
    complain,
)
from gpuschedd.supervisor.identity import set_oom_score
from gpuschedd.supervisor.life import Supervisor
from gpuschedd.supervisor.pam import Pam
from gpuschedd.supervisor.record_writer import RecordWriter
from gpuschedd.supervisor.records import LOG, open_directory
from gpuschedd.supervisor.script import clear_script, place_script
from gpuschedd.supervisor.spec import load_spec
from gpuschedd.supervisor.syscalls import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    SignalQueue,
    close_all_except,
    prctl,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpuschedd.supervisor.spec import Spec

OOM_SCORE = -500  # of a supervisor in system mode: the host's OOM killer takes others first


def main(arguments: list[str]) -> int:
    """Supervise the attempt of the directory that is named; the exit status."""
    detach = arguments[:1] == ["--detach"]
    paths = arguments[1:] if detach else arguments
    if len(paths) != 1:
        complain("usage: gpuschedd/supervisor/__main__.py [--forker | [--detach] JOBDIR]")
        return EXIT_SPEC_REFUSED
    path = os.path.abspath(paths[0])
    become_bare(())

    def work() -> int:
        dir_fd, spec = _opened(path)
        return detached(dir_fd, spec) if detach else supervise(dir_fd, spec, lambda: None)

    return guarded(work)


def become_bare(keep: Iterable[int]) -> None:
    """Nothing of whoever started us stays, but the standard descriptors and those to keep."""
    close_all_except(keep)
    os.environ.clear()
    os.umask(0o077)
    os.chdir("/")


def _opened(path: str) -> tuple[int, Spec]:
    """The directory and what it asks for. Raises Refused or OSError."""
    try:
        dir_fd = open_directory(path)
    except FileNotFoundError:
        raise Refused(EXIT_NO_SPEC, f"there is no {path}") from None
    spec = load_spec(dir_fd)
    if os.path.basename(path) != spec.label:
        raise Refused(EXIT_SPEC_REFUSED, f"the spec is of {spec.label}, not of {path}")
    return dir_fd, spec


def guarded(work: Callable[[], int]) -> int:
    """The exit status of work, with the reason of a failure on stderr."""
    try:
        return work()
    except Refused as refusal:
        complain(str(refusal))
        return refusal.status
    except OSError as error:
        complain(str(error))
        if error.errno in STORAGE_ERRNOS:
            return EXIT_STORAGE
        return EXIT_UNAVAILABLE if error.errno in SHORT_ERRNOS else EXIT_BUG


def detached(dir_fd: int, spec: Spec) -> int:
    """Claim and run in a process of its own; the caller returns when the claim is decided."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_fd)
        if os.read(read_fd, 1):
            return EXIT_OK
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return status if status > 0 else EXIT_BUG
    os.close(read_fd)
    os.setsid()

    def claimed() -> None:
        try:
            os.write(write_fd, b"c")
        except BrokenPipeError:
            pass  # the daemon died meanwhile; the job lives
        os.close(write_fd)

    return guarded(lambda: _supervise_apart(dir_fd, spec, claimed))


def supervise_forked(path: str, claimed: Callable[[], None]) -> int:
    """As a process that the forker made for this directory; the exit status."""

    def work() -> int:
        dir_fd, spec = _opened(path)
        return _supervise_apart(dir_fd, spec, claimed)

    return guarded(work)


def _supervise_apart(dir_fd: int, spec: Spec, tell: Callable[[], None]) -> int:
    """Once claimed, stdout and stderr are a log in the job directory; then it is told."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    log_fd = os.open(LOG, flags, 0o600, dir_fd=dir_fd)

    def claimed() -> None:
        for fd in (1, 2):
            os.dup2(log_fd, fd, inheritable=False)
        os.close(log_fd)
        tell()

    return supervise(dir_fd, spec, claimed)


def supervise(dir_fd: int, spec: Spec, claimed: Callable[[], None]) -> int:
    """Claim and run; `claimed` is called once the attempt is ours and can start."""
    signals = SignalQueue()
    pam = Pam() if spec.system else None
    records = RecordWriter(dir_fd, spec)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    set_oom_score(OOM_SCORE if spec.system else 0, None if spec.system else 0)
    if spec.system:
        # Its child holds the user's environment before it is the user's. A process that is the
        # user's anyway would only be hidden by it from its own daemon, where /proc hides any.
        prctl(PR_SET_DUMPABLE, 0)
    if not records.claim():
        records.discard()
        raise Refused(EXIT_CLAIM_LOST, "the claim is taken")
    # From here on nothing is imported.
    try:
        script_path = place_script(spec)
        claimed()
        return Supervisor(dir_fd, spec, records, signals).run(pam, script_path)
    finally:
        clear_script(spec)


RECORD_VERSION = 1
