"""What keeps a supervisor from its work: exceptions, exit statuses, and the one way to say it."""

from __future__ import annotations

import errno
import os

# Exit statuses of the supervisor, for the process that started it.
EXIT_OK = 0
EXIT_NO_PROGRAM = 2  # Python's own, where it cannot open the file that it should run
EXIT_SPEC_REFUSED = 65
EXIT_NO_SPEC = 66
EXIT_UNAVAILABLE = 69  # __main__: a file is missing, cut, or of another version; or no process
EXIT_BUG = 70
EXIT_STORAGE = 74  # the host's fault: no claim, or a claim and nothing started
EXIT_CLAIM_LOST = 75

STORAGE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
# The host is short of processes, memory or descriptors; that passes.
SHORT_ERRNOS = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
# A path that cannot be used as it was given, wherever it leads and whenever it is tried.
_WRONG_PATH_ERRNOS = frozenset(
    {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO, errno.ETXTBSY}
)


def may_pass(error: OSError) -> bool:
    """Whether a path may be usable later: a mount that is away, a server that does not answer."""
    return error.errno not in _WRONG_PATH_ERRNOS


class Refused(Exception):
    """The supervisor will not run this directory; nothing was started."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class SetupFailed(Exception):
    """The child could not become the user or open the user's files; the text goes on the job."""


class EnvironmentLost(SetupFailed):
    """Something outside the job that it needs is not there for now; `place` says what.

    A directory, a log's place, an interpreter, an account: it may be back in a moment.
    """

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place


class HostClosed(SetupFailed):
    """PAM lets nobody in for now: no fault of the job's, which must wait."""


class ExecFailed(Exception):
    """The command cannot be executed; code as a shell would give it."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def reason_of(error: OSError) -> str:
    """What the system said, in words and by its name: "Stale file handle (ESTALE)"."""
    if not error.errno:
        return str(error)
    return f"{os.strerror(error.errno)} ({errno.errorcode.get(error.errno, error.errno)})"


def lost_or_wrong(place: str, error: OSError | ValueError) -> SetupFailed:
    """A path that cannot be used: for now, or as it was given."""
    if isinstance(error, OSError) and may_pass(error):
        return EnvironmentLost(place, reason_of(error))
    reason = reason_of(error) if isinstance(error, OSError) else str(error)
    return SetupFailed(f"{place}: {reason}")


def complain(text: str) -> None:
    """One line on stderr: the launcher's pipe, later the job directory's log; or the journal."""
    try:
        os.write(2, f"gpuschedd supervisor: {text}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        pass


RECORD_VERSION = 1
