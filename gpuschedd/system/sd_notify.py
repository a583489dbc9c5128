"""Talking to the service manager: readiness, watchdog, sockets it passes. No dependency on it."""

from __future__ import annotations

import os
import socket

LISTEN_FDS_START = 3


class ServiceManager:
    """sd_notify's datagrams; does nothing where nobody listens. No user's text goes into them."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        self.watchdog_s = _watchdog_s()

    def send(self, text: str) -> None:
        """One datagram, such as READY=1. Failure changes nothing."""
        if not self._address:
            return
        address = self._address
        if address.startswith("@"):
            address = "\0" + address[1:]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.connect(address)
                sender.send(text.encode())
        except OSError:
            return


def _watchdog_s() -> float | None:
    """Half of the time-out the service manager set for us."""
    micros = os.environ.pop("WATCHDOG_USEC", "")
    pid = os.environ.pop("WATCHDOG_PID", "")
    if not micros.isdecimal() or (pid and pid != str(os.getpid())):
        return None
    return int(micros) / 2e6


def is_activated() -> bool:
    """Whether the service manager listens for us, and hands that socket over."""
    return os.environ.get("LISTEN_PID") == str(os.getpid())


def passed_socket() -> socket.socket | None:
    """The one listening socket of socket activation, or None."""
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or count != "1":
        return None
    passed = socket.socket(fileno=LISTEN_FDS_START)
    passed.setblocking(False)
    os.set_inheritable(LISTEN_FDS_START, False)
    return passed
