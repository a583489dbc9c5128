"""The private PAM stack: account and session of a job's user, and whether the host is closed."""

from __future__ import annotations

import ctypes
import os
import re

from gpuschedd.supervisor.errors import EnvironmentLost, HostClosed, SetupFailed
from gpuschedd.supervisor.syscalls import libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PAM_SERVICE = "gpusched"
PAM_DIRECTORIES = ("/etc/pam.d", "/usr/lib/pam.d", "/usr/share/pam.d")
NOLOGIN_FILES = ("/run/nologin", "/etc/nologin")


def pam_stack() -> str | None:
    """The file with the private stack."""
    places = (f"{place}/{PAM_SERVICE}" for place in PAM_DIRECTORIES)
    return next((place for place in places if os.path.exists(place)), None)


def closed_by() -> str | None:
    """What closes the host to users: no private stack, or a file that says so (pam_nologin(8)).

    None where users are let in. Such a file closes nothing where the stack does not ask for it.
    """
    stack = pam_stack()
    if stack is None:
        missing = f"{PAM_DIRECTORIES[0]}/{PAM_SERVICE} is missing"
        return f"{missing}; `gpuschedd install` puts it in place"
    found = next((path for path in NOLOGIN_FILES if os.path.exists(path)), None)
    if found is None:
        return None
    try:
        with open(stack, "rb") as file:
            heeded = re.search(rb"^[^#\n]*\bpam_nologin\b", file.read(2**16), re.MULTILINE)
    except OSError:
        return None
    return f"{found} exists" if heeded else None


class _PamMessage(ctypes.Structure):
    _fields_ = (("style", ctypes.c_int), ("text", ctypes.c_char_p))


_PAM_CONVERSE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.POINTER(ctypes.POINTER(_PamMessage)),
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)


class _PamConversation(ctypes.Structure):
    _fields_ = (("converse", _PAM_CONVERSE), ("data", ctypes.c_void_p))


class Pam:
    """Account and session of the private stack, for the calling process (pam_limits acts on it).

    The session is never closed: the process that opened it becomes the job. The stack must hold
    nothing that needs closing, and not pam_systemd, which would move the job out of its unit.
    """

    _ERROR_MSG, _TEXT_INFO = 3, 4
    _SUCCESS, _CONV_ERR = 0, 19
    _DATA_SILENT = 0x40000000

    def __init__(self) -> None:
        """Loads the library, so before the claim; OSError where there is none."""
        self._lib = ctypes.CDLL("libpam.so.0")
        self._lib.pam_strerror.restype = ctypes.c_char_p
        libc.calloc.restype = ctypes.c_void_p
        self._said: list[str] = []

    def open_session(self, user: str) -> None:
        if pam_stack() is None:
            raise HostClosed(closed_by())
        handle = ctypes.c_void_p()
        converse = _PAM_CONVERSE(self._converse)
        conversation = _PamConversation(converse, None)
        name = user.encode()
        service = PAM_SERVICE.encode()
        start = self._lib.pam_start
        status = start(service, name, ctypes.byref(conversation), ctypes.byref(handle))
        self._check("start", handle, status)
        status = self._lib.pam_acct_mgmt(handle, 0)
        self._check("account", handle, status, f"account {user}")
        self._check("session", handle, self._lib.pam_open_session(handle, 0))
        self._lib.pam_end(handle, self._DATA_SILENT)

    def _check(
        self, step: str, handle: ctypes.c_void_p, status: int, place: str | None = None
    ) -> None:
        """`place`: what the job waits for where this is refused: it was well at the submission."""
        if status == self._SUCCESS:
            return
        text = self._lib.pam_strerror(handle, status) or b"unknown"
        said = "".join(f" ({line})" for line in self._said)
        reason = f"PAM {step} refused: {text.decode('utf-8', 'replace')}{said}"
        if closed_by() is not None:
            raise HostClosed(reason)
        raise SetupFailed(reason) if place is None else EnvironmentLost(place, reason)

    def _converse(self, count: int, messages: Any, answers: Any, _data: Any) -> int:
        """Nobody is there to answer: remarks are kept for the reason, questions refused."""
        styles = {messages[index].contents.style for index in range(count)}
        if not styles <= {self._ERROR_MSG, self._TEXT_INFO}:
            return self._CONV_ERR
        for index in range(count):
            text = messages[index].contents.text or b""
            if text.strip():
                self._said.append(text.decode("utf-8", "replace").strip())
        # The caller frees it: an array of {char *text; int code}, all empty.
        answers[0] = libc.calloc(count, ctypes.sizeof(_PamMessage))
        return self._SUCCESS


RECORD_VERSION = 1
