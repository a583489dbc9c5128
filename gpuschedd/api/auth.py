"""Who is asking, and what it may. Credentials come from the kernel, never from a message.

Owner of SO_PEERCRED, and of the record of denials.
"""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpusched_client.errors import Denied, Unavailable
from gpusched_client.terms import Mode
from gpusched_client.wire.job_messages import Outcome
from gpusched_client.wire.methods import Right
from gpuschedd.api.limits import ACCOUNTS_KEPT_S, DENIALS_AN_HOUR_MAX, KEPT_MAX
from gpuschedd.jobs import holds
from gpuschedd.jobs.controller import Controller
from gpuschedd.jobs.principal import STRANGERS, Principal
from gpuschedd.store.records import AuditRow
from gpuschedd.system.accounts import NameService, is_system_account

CALLER_KEPT_S = 5.0  # an account that changes hands is another's after this

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
            f"uid {uid} is not anybody's identity (a user namespace without a mapping?); "
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


class KnownAccounts:
    """On whose allowance a uid lives: its own, or that of all which have no account here.

    Kept for a while: each connection needs it, and a name service may take its time.
    """

    def __init__(self, accounts: NameService, mode: Mode) -> None:
        self._accounts = accounts
        self._is_shared = mode is Mode.SYSTEM
        self._known: OrderedDict[int, tuple[int, float]] = OrderedDict()  # account, until when

    def get(self, uid: int) -> int | None:
        """The account; None: it has to be asked."""
        if not self._is_shared or uid == 0:
            return uid
        account, until_s = self._known.get(uid, (uid, 0.0))
        return account if time.monotonic() < until_s else None

    async def ask(self, uid: int) -> int:
        """The account. Where nobody answers it is the uid's own: its requests wait all the same."""
        try:
            has_one = await self._accounts.ask(lambda: user_name(uid) != str(uid))
        except TimeoutError:
            return uid
        account = uid if has_one else STRANGERS
        self._known[uid] = (account, time.monotonic() + ACCOUNTS_KEPT_S)
        self._known.move_to_end(uid)
        if len(self._known) > KEPT_MAX:
            self._known.popitem(last=False)
        return account


class Authenticator:
    """Names and rights of peers, asked of the system every few seconds at most per uid."""

    def __init__(
        self, controller: Controller, accounts: NameService, mode: Mode, own_uid: int
    ) -> None:
        """`own_uid`: the daemon's; in user mode nobody else is served."""
        self._controller = controller
        self._accounts = accounts
        self._mode = mode
        self._own_uid = own_uid
        self._callers: dict[int, asyncio.Future[Principal]] = {}
        self._last: dict[int, asyncio.Future[None]] = {}  # of those who wait, by uid: it is through
        self.known_accounts = KnownAccounts(accounts, mode)
        self._denials: dict[tuple[int, int], int] = {}

    async def identify(self, peer: Peer) -> Principal:
        """The peer with name and rights, asked of the system every few seconds at most per uid.

        A user's requests go on in the order they came, whoever's answer is there first.
        """
        known = self._known(peer)
        ahead = self._last.get(peer.uid)
        if known.done() and ahead is None:
            caller = known.result()
        else:
            caller = await self._in_turn(peer.uid, known, ahead)
        return caller if caller.pid == peer.pid else replace(caller, pid=peer.pid)

    def _known(self, peer: Peer) -> asyncio.Future[Principal]:
        """The answer of a few seconds ago, or the one that is under way."""
        known = self._callers.get(peer.uid)
        if known is None:
            known = asyncio.ensure_future(self._look_up(peer))
            self._callers[peer.uid] = known
            known.add_done_callback(lambda done: self._forget_failure(peer.uid, done))
            asyncio.get_running_loop().call_later(CALLER_KEPT_S, self._callers.pop, peer.uid, None)
        return known

    async def _in_turn(
        self, uid: int, known: asyncio.Future[Principal], ahead: asyncio.Future[None] | None
    ) -> Principal:
        """The answer, once those who came before have theirs.

        An answer wakes who waits for it in a later round of the loop: who comes in between, or
        finds a newer answer, must not be the first.
        """
        through = self._last[uid] = asyncio.get_running_loop().create_future()
        try:
            caller = await asyncio.shield(known)
            if ahead is not None:
                await asyncio.shield(ahead)
            return caller
        finally:
            if ahead is None or ahead.done():
                self._pass_on(uid, through)
            else:  # it gives up its place: who is behind it waits for those before it
                ahead.add_done_callback(lambda _: self._pass_on(uid, through))

    def _pass_on(self, uid: int, through: asyncio.Future[None]) -> None:
        if self._last.get(uid) is through:
            del self._last[uid]
        if not through.done():
            through.set_result(None)

    def _forget_failure(self, uid: int, done: asyncio.Future[Principal]) -> None:
        """A name service that did not answer is asked again by the next request."""
        if not done.cancelled() and done.exception() is not None:
            self._callers.pop(uid, None)

    async def _look_up(self, peer: Peer) -> Principal:
        config = self._controller.state.config
        try:
            caller = await self._accounts.ask(lambda: self._principal_of(peer, config.admin_group))
        except TimeoutError:
            raise Unavailable("the host's name service does not answer; try again later") from None
        if config.names_groups:
            await self._accounts.learn([caller.user])
            caller = replace(caller, groups=self._accounts.groups(caller.user))
        if not holds.is_allowed(caller.user, caller.groups, config.jobs.users):
            text = f"{caller.user} may not submit: the configuration (jobs.users) does not name you"
            caller = replace(caller, barred=text)
        return caller

    def _principal_of(self, peer: Peer, admin_group: str) -> Principal:
        """Name and rights of a peer. Blocks."""
        user = user_name(peer.uid)
        if self._mode is Mode.USER:
            return Principal(peer.uid, user, peer.pid, peer.uid == self._own_uid)
        is_admin = peer.uid == 0 or (bool(admin_group) and in_group(peer.uid, admin_group))
        barred, is_stranger = None, user == str(peer.uid)
        if is_stranger:
            barred = f"uid {peer.uid} has no account on this host, so nothing can run as it"
        elif is_system_account(peer.uid) and not self._controller.state.config.jobs.system_users:
            barred = (
                f"jobs of {user} (uid {peer.uid}, below UID_MIN) are not taken here; submit as a "
                "person, for instance `runuser -u NAME -- gsub ...`, or set jobs.system_users"
            )
        is_stranger = is_stranger and peer.uid != 0
        return Principal(peer.uid, user, peer.pid, is_admin, barred=barred, is_stranger=is_stranger)

    def forget(self) -> None:
        """The configuration changed: rights are looked up again."""
        self._callers.clear()

    def record_denial(self, caller: Principal, method: str, detail: str) -> None:
        """On record, up to a number an hour; a flood of denials does not become a flood of rows."""
        now_s = self._controller.clock.wall_s()
        key = (caller.account, int(now_s // 3600))
        count = self._denials.get(key, 0) + 1
        if key not in self._denials:
            self._denials = {k: n for k, n in self._denials.items() if k[1] >= key[1]}
        self._denials[key] = count
        self._controller.count_denial()
        if count <= DENIALS_AN_HOUR_MAX:
            if caller.is_stranger:  # all of them are one there, or they would push out the others'
                detail = f"uid {caller.uid}: {detail}"
            row = AuditRow(now_s, caller.account, caller.pid, method, "denied", detail)
            self._controller.post(lambda batch: batch.audits.append(row))

    def authorise(self, caller: Principal, method: str, right: Right) -> None:
        """Raise Denied, on record, where this caller may not call the method."""
        if self._has_right(caller, right):
            return
        self.record_denial(caller, method, "not an admin")
        who = "root" if right is Right.ROOT else "admins"
        raise Denied(f"{method} is for {who}; you are {caller.user} (uid {caller.uid})")

    def _has_right(self, caller: Principal, right: Right) -> bool:
        if right is Right.ROOT:
            return caller.uid in (0, self._own_uid)
        return right is not Right.ADMIN or caller.is_admin

    def hides_names(self, caller: Principal) -> bool:
        """Whether the names of others' jobs are not for this caller."""
        return self._controller.state.config.private and not caller.is_admin

    def record_outcomes(self, caller: Principal, method: str, outcomes: Iterable[Outcome]) -> None:
        """The denials among them."""
        for outcome in outcomes:
            if outcome.code == Denied.code:
                self.record_denial(caller, method, f"job {outcome.job_id}")

    def record_done(self, caller: Principal, method: str, detail: str) -> None:
        """An act of an admin."""
        wall_s = self._controller.clock.wall_s()
        row = AuditRow(wall_s, caller.uid, caller.pid, method, "done", detail)
        self._controller.post(lambda batch: batch.audits.append(row))
