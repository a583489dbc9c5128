"""Who is asking: credentials from the kernel, never from a message. Owner of SO_PEERCRED."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import struct
from dataclasses import dataclass

from gpusched_client.errors import Denied

OVERFLOW_UID = 65_534  # what a user namespace shows for an id it does not map: no one's identity
INVALID_UID = 2**32 - 1  # (uid_t) -1: "leave unchanged" to setresuid, never a person
_UCRED = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, as the kernel recorded it at connect."""

    uid: int
    gid: int
    pid: int  # for the log only: it may have been reused since

    @property
    def user(self) -> str:
        """Login name, or the number where the name service knows none."""
        return user_name(self.uid)


def peer_of(connection: socket.socket) -> Peer:
    """The credentials of a connected Unix socket. Any doubt is Denied, never root."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    except OSError as error:
        raise Denied("the kernel does not say who you are") from error
    pid, uid, gid = _UCRED.unpack(raw)
    uid &= 0xFFFFFFFF
    if uid in (OVERFLOW_UID, INVALID_UID):
        raise Denied(
            f"uid {uid} is nobody's identity (a user namespace without a mapping?); "
            "connect from outside it"
        )
    return Peer(uid=uid, gid=gid & 0xFFFFFFFF, pid=pid)


def user_name(uid: int) -> str:
    """Login name of uid; the number as text when there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def in_group(uid: int, group: str) -> bool:
    """Whether uid belongs to the named group, primary or supplementary; unknown names: False.

    Asked from the user's side: directory services often leave the list of a group's members empty.
    """
    try:
        account = pwd.getpwuid(uid)
        wanted = grp.getgrnam(group).gr_gid
    except KeyError:
        return False
    return wanted in os.getgrouplist(account.pw_name, account.pw_gid)
