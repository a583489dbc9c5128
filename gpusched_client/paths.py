"""Where sockets, state and configuration lie: the rules that client and daemon share.

Owns the names of places. Creates, opens and checks nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

APP = "gpuschedd"
SOCKET_NAME = "gpuschedd.sock"
SOCKET_ENV = "GPUSCHED_SOCKET"
SOCKET_PATH_BYTES_MAX = 107  # sun_path less its NUL

SYSTEM_SOCKET = Path("/run/gpuschedd") / SOCKET_NAME
SYSTEM_STATE_DIR = Path("/var/lib/gpuschedd")
SYSTEM_CONFIG = Path("/etc/gpuschedd/config.toml")


def user_state_dir() -> Path:
    """The state directory of this user's own daemon."""
    import platformdirs  # slow to import, and most clients are told their socket

    return Path(platformdirs.user_state_dir(APP))


def user_config() -> Path:
    """The configuration file of this user's own daemon."""
    import platformdirs

    return Path(platformdirs.user_config_dir(APP)) / "config.toml"


def user_runtime_dir() -> Path | None:
    """The directory for this user's socket, or None without XDG_RUNTIME_DIR.

    None, since the fallback under /tmp can be created by anyone before us.
    """
    if not os.environ.get("XDG_RUNTIME_DIR"):
        return None
    import platformdirs

    return Path(platformdirs.user_runtime_dir(APP))


def user_socket() -> Path:
    """Where this user's own daemon listens."""
    return (user_runtime_dir() or user_state_dir()) / SOCKET_NAME


def fits_address(path: Path) -> bool:
    """Whether a socket's address can hold this path."""
    return len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX


def state_dir(system: bool) -> Path:
    """The state directory of a daemon in system or user mode."""
    return SYSTEM_STATE_DIR if system else user_state_dir()


def config_path(system: bool) -> Path:
    """The configuration file of a daemon in system or user mode."""
    return SYSTEM_CONFIG if system else user_config()


def socket_path(system: bool) -> Path:
    """The socket of a daemon in system or user mode."""
    return SYSTEM_SOCKET if system else user_socket()


def client_sockets() -> list[Path]:
    """Where a client looks, best first: GPUSCHED_SOCKET alone, else the user's, then the system's.

    The user's socket in the state directory counts also where XDG_RUNTIME_DIR is set: the daemon
    may have been started without it, from cron for instance.
    """
    named = os.environ.get(SOCKET_ENV)
    if named:
        return [Path(named)]
    in_state_dir = user_state_dir() / SOCKET_NAME
    first = user_socket()
    own = [first] if first == in_state_dir else [first, in_state_dir]
    return [*own, SYSTEM_SOCKET]
