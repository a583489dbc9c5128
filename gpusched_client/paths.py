"""Where sockets, state and configuration lie: the rules that client and daemon share.

Owns the names of places. Creates, opens and checks nothing. They are text here, since importing
pathlib takes a twentieth of a command's start.
"""

from __future__ import annotations

import os
from collections.abc import Callable

APP = "gpuschedd"
SOCKET_NAME = "gpuschedd.sock"
SOCKET_ENV = "GPUSCHED_SOCKET"
SOCKET_PATH_BYTES_MAX = 107  # sun_path less its NUL

SYSTEM_SOCKET = f"/run/gpuschedd/{SOCKET_NAME}"
SYSTEM_STATE_DIR = "/var/lib/gpuschedd"
SYSTEM_CONFIG = "/etc/gpuschedd/config.toml"


class NoHome(Exception):
    """This user has no place of their own."""


def user_state_dir() -> str:
    """The state directory of this user's own daemon. Raises NoHome."""
    import platformdirs  # slow to import, and most clients are told their socket

    return _place(platformdirs.user_state_dir)


def user_config() -> str:
    """The configuration file of this user's own daemon. Raises NoHome."""
    import platformdirs

    return os.path.join(_place(platformdirs.user_config_dir), "config.toml")


def _place(directory_of: Callable[[str], str]) -> str:
    try:
        place = directory_of(APP)
    except RuntimeError as error:  # neither HOME nor an account that names one
        place = str(error)
    if not os.path.isabs(place):
        raise NoHome(
            f"uid {os.geteuid()} has no home directory; set HOME, or name the places with options"
        )
    return place


def user_runtime_dir() -> str | None:
    """The directory for this user's socket, or None without XDG_RUNTIME_DIR.

    None, since a fallback under /tmp, as platformdirs has it, can be created by anyone before us.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return os.path.join(runtime, APP) if runtime.startswith("/") else None


def user_socket() -> str:
    """Where this user's own daemon listens."""
    return os.path.join(user_runtime_dir() or user_state_dir(), SOCKET_NAME)


def fits_address(path: str | os.PathLike[str]) -> bool:
    """Whether a socket's address can hold this path."""
    return len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX


def state_dir(system: bool) -> str:
    """The state directory of a daemon in system or user mode."""
    return SYSTEM_STATE_DIR if system else user_state_dir()


def config_path(system: bool) -> str:
    """The configuration file of a daemon in system or user mode."""
    return SYSTEM_CONFIG if system else user_config()


def socket_path(system: bool) -> str:
    """The socket of a daemon in system or user mode."""
    return SYSTEM_SOCKET if system else user_socket()


def client_sockets() -> list[str]:
    """Where a client looks, best first.

    GPUSCHED_SOCKET alone; else the system's alone where it exists, so that nobody's own daemon
    stands before it; else this user's, at its usual place and in the state directory: the daemon
    may have been started without XDG_RUNTIME_DIR, or this client may run without it.
    """
    named = os.environ.get(SOCKET_ENV)
    if named:
        return [named]
    if os.path.lexists(SYSTEM_SOCKET):
        return [SYSTEM_SOCKET]
    try:
        in_state_dir = os.path.join(user_state_dir(), SOCKET_NAME)
        first = user_socket()
    except NoHome:
        return [SYSTEM_SOCKET]
    own = [first] if first == in_state_dir else [first, in_state_dir]
    return [*own, SYSTEM_SOCKET]
