"""Becoming the user, in the forked child: provably, for ever, or with a reason why not."""

from __future__ import annotations

import os
import pwd

from gpuschedd.supervisor.errors import EnvironmentLost, SetupFailed
from gpuschedd.supervisor.procfs import line_after
from gpuschedd.supervisor.spec import UID_INVALID
from gpuschedd.supervisor.syscalls import join_new_keyring

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from gpuschedd.supervisor.pam import Pam
    from gpuschedd.supervisor.spec import Spec

    T = TypeVar("T")

UID_NOBODY = 65534
UID_MIN_DEFAULT = 1000


def uid_min(path: str = "/etc/login.defs") -> int:
    try:
        with open(path, "rb") as file:
            rows = [line.split() for line in file.read(2**20).split(b"\n")]
    except OSError:
        return UID_MIN_DEFAULT
    found = [row[1] for row in rows if row[:1] == [b"UID_MIN"] and row[1:2]]
    return int(found[0]) if found and found[0].isdigit() else UID_MIN_DEFAULT


def check_uid(uid: int, allow_system_uid: bool) -> None:
    """SetupFailed unless this uid may run jobs at all."""
    if uid in (UID_NOBODY, UID_INVALID) or not 0 <= uid < UID_INVALID:
        raise SetupFailed(f"uid {uid} is not a user's and runs no jobs")
    if uid < uid_min() and not allow_system_uid:
        raise SetupFailed(f"uid {uid} is a system account (below UID_MIN {uid_min()})")


def account_of(user: str, uid: int) -> pwd.struct_passwd:
    """The account as it was at submit: name and uid must still belong together."""
    by_name, by_uid = _known(pwd.getpwnam, user), _known(pwd.getpwuid, uid)
    if by_name is None and by_uid is None:
        # A directory server that is away says the same as one that has forgotten somebody.
        raise EnvironmentLost(f"account {user}", f"unknown; it had uid {uid} at submit")
    if by_name is None or by_uid is None:
        raise SetupFailed(f"account {user} with uid {uid} no longer exists")
    if by_name.pw_uid != uid or by_uid.pw_name != user:
        reason = f"account {user} had uid {uid} at submit; now {user} is uid {by_name.pw_uid}"
        raise SetupFailed(f"{reason} and uid {uid} is {by_uid.pw_name}")
    return by_name


def _known(look: Callable[[T], pwd.struct_passwd], key: T) -> pwd.struct_passwd | None:
    try:
        return look(key)
    except KeyError:
        return None


def drop_to(user: str, uid: int, gid: int) -> None:
    """All groups, gid and uid of the user, for ever; each step is verified."""
    os.initgroups(user, gid)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if set(os.getgroups()) != set(os.getgrouplist(user, gid)):
        raise SetupFailed("the supplementary groups could not be set")
    if os.getresgid() != (gid, gid, gid) or os.getresuid() != (uid, uid, uid):
        raise SetupFailed("the identity could not be set")
    if uid != 0:
        _require_no_way_back()


def _require_no_way_back() -> None:
    with open("/proc/self/status", "rb") as file:
        status = file.read()
    held = [line_after(b"Cap" + which + b":", status) for which in (b"Prm", b"Eff", b"Amb")]
    if any(mask is not None and int(mask, 16) for mask in held):
        raise SetupFailed("capabilities are left after the change of identity")
    try:
        os.setuid(0)
    except PermissionError:
        return
    raise SetupFailed("the change of identity can be undone")


def set_oom_score(value: int, only_if_below: int | None = None) -> None:
    """How eagerly the host's OOM killer takes this process; best effort."""
    try:
        with open("/proc/self/oom_score_adj", "rb+", buffering=0) as file:
            if only_if_below is None or int(file.read()) < only_if_below:
                file.write(b"%d" % value)
    except OSError:
        pass


def become_user(spec: Spec, pam: Pam | None) -> None:
    """In system mode the user, with the session where `pam` is given; in user mode we are it."""
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    if not spec.system:
        return
    check_uid(spec.uid, spec.allow_system_uid)
    account = account_of(spec.user, spec.uid)
    if pam is not None:
        pam.open_session(spec.user)
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    set_oom_score(0)
    drop_to(spec.user, spec.uid, account.pw_gid)
    join_new_keyring()


RECORD_VERSION = 1
