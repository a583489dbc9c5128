"""NameService of this host: groups, and whether a name and a uid still belong together.

The only module beside peer and the supervisor that asks the name service. A question may hang for
as long as a directory server does, so answers are fetched in threads and kept; the loop reads what
is kept and never waits.
"""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

from gpuschedd.supervisor.identity import uid_min
from gpuschedd.system.threads import started_pool

T = TypeVar("T")

ANSWER_S = 20.0
FRESH_S = 300.0  # a group change shows after this
THREADS = 4


class NameService:
    """What is known of users' groups. `on_news` is called where an answer changed."""

    def __init__(self, on_news: Callable[[], None] = lambda: None) -> None:
        self.on_news = on_news
        self._groups: dict[str, tuple[str, ...]] = {}
        self._asked_s: dict[str, float] = {}
        self._threads = started_pool(THREADS, "accounts")

    def groups(self, user: str) -> tuple[str, ...]:
        """The groups as last known; asked again in the background when that is long ago."""
        if time.monotonic() - self._asked_s.get(user, -FRESH_S) >= FRESH_S:
            self._refresh_soon(user)
        return self._groups.get(user, ())

    async def learn(self, users: Iterable[str]) -> None:
        """Ask for the groups of those that are not known yet, and wait for the answers."""
        unknown = [user for user in users if user not in self._groups]
        await asyncio.gather(*(self._refresh(user) for user in unknown))

    def _refresh_soon(self, user: str) -> None:
        self._asked_s[user] = time.monotonic()
        task = asyncio.ensure_future(self._refresh(user))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _refresh(self, user: str) -> None:
        self._asked_s[user] = time.monotonic()
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, groups_of, user)
        before = self._groups.get(user)
        self._groups[user] = found
        if before is not None and before != found:
            self.on_news()

    async def ask(self, question: Callable[[], T]) -> T:
        """Something else of the name service, in a thread. Raises TimeoutError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(ANSWER_S):
            return await loop.run_in_executor(self._threads, question)

    async def look_up(self, user: str, uid: int) -> Account:
        """Whether this name and uid still belong together. Raises TimeoutError."""
        return await self.ask(lambda: account_of(user, uid))

    def close(self) -> None:
        """Leave questions that hang behind."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def groups_of(user: str) -> tuple[str, ...]:
    """Names of a user's groups; none where the name service knows nothing. Blocks."""
    try:
        account = pwd.getpwnam(user)
        numbers = os.getgrouplist(user, account.pw_gid)
    except (KeyError, OSError):
        return ()
    return tuple(_group_names(numbers))


def unknown_names(names: Iterable[str], admin_group: str) -> list[str]:
    """What of a configuration names nobody here, in words. Blocks."""
    unknown = []
    if admin_group and not _exists(partial(grp.getgrnam, admin_group)):
        unknown.append(f"there is no group {admin_group} (admin_group)")
    for name in dict.fromkeys(names):
        if name.startswith("@"):
            if not _exists(partial(grp.getgrnam, name[1:])):
                unknown.append(f"there is no group {name[1:]} ({name})")
        elif not _exists(partial(pwd.getpwnam, name)):
            unknown.append(f"there is no user {name}")
    return unknown


def _exists(look: Callable[[], object]) -> bool:
    try:
        look()
    except (KeyError, ValueError):  # a name with a NUL names nobody either
        return False
    return True


def _group_names(numbers: Iterable[int]) -> Iterator[str]:
    for number in numbers:
        try:
            yield grp.getgrgid(number).gr_name
        except KeyError:
            continue


class Account(NamedTuple):
    """What the name service says of a job's user.

    `is_missing`: neither the name nor the uid is known, which may pass. `problem`: why they no
    longer belong together.
    """

    is_missing: bool = False
    problem: str | None = None

    @property
    def is_good(self) -> bool:
        """As it was at submit."""
        return self == Account()


def account_of(user: str, uid: int) -> Account:
    """Blocks. The supervisor looks again by itself."""
    by_uid, by_name = _name_of(uid), _uid_of(user)
    if by_uid == user:
        return Account()
    if by_uid is not None:
        return Account(problem=f"uid {uid} belongs to {by_uid} now; the job is {user}'s")
    if by_name is not None:
        return Account(problem=f"{user} has uid {by_name} now; the job is uid {uid}'s")
    return Account(is_missing=True)


def _name_of(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def _uid_of(user: str) -> int | None:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None


def is_system_account(uid: int) -> bool:
    """root and accounts below UID_MIN, which run jobs only where the configuration says so."""
    return uid < uid_min()
