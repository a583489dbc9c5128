"""What the runner knows of each attempt that is under way, and the pidfds of live supervisors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuschedd.core.attempt import Claim, Observation
from gpuschedd.core.recovery import Recovery, facts_of, recover
from gpuschedd.gpu.attribution import JobKey, Supervisor


@dataclass(frozen=True, slots=True)
class Look:
    """What a directory shows, and a pidfd of its supervisor where one is to be watched from now."""

    seen: Observation
    pidfd: int | None


@dataclass(slots=True, eq=False)
class Tracked:
    """One attempt until it is forgotten."""

    key: JobKey
    uid: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one thing at a time
    over: bool = False  # forgotten: its end is on record
    ran: bool = False  # by the database, which outlives a directory
    cancel_requested: bool = False
    claimed: bool = False  # had a supervisor, whatever the directory says
    launching: bool = False
    quiet_since_s: float = 0.0  # event loop's time since which no launch of it is under way
    watched_since_s: float = 0.0  # event loop's time since which `pidfd` is watched
    has_started: bool = False  # by its records
    looking: bool = False
    look_again: bool = False  # asked for while a look was taken
    ordering: asyncio.Task[None] | None = None  # the last order that is being published
    pidfd: int | None = None  # of the live supervisor
    hinted: asyncio.TimerHandle | None = None  # by its supervisor, for the first time
    told_exit: bool = False  # reported with its exit record, after which there is nothing to see
    supervisor: tuple[int, Supervisor] | None = None  # its pid, and who it is
    claim: Claim | None = None  # that the live supervisor took

    def verdict(self, seen: Observation | None) -> Recovery:
        """By the table; processes count as left until somebody has looked for them."""
        facts = facts_of(
            seen,
            ran=self.ran,
            cancel_requested=self.cancel_requested,
            processes_left=True,
        )
        return recover(facts)

    def is_unclaimed_since(self, at_s: float) -> bool:
        """No launch of it has been under way since then, and nobody took the claim."""
        return not (self.over or self.launching or self.claimed) and self.quiet_since_s <= at_s

    def is_setting_up_since(self, at_s: float) -> bool:
        """Its supervisor has lived since then, and still nothing of the user's runs."""
        if self.over or self.has_started or self.pidfd is None:
            return False
        return self.watched_since_s <= at_s

    def watch(self, pidfd: int, claim: Claim, ended: Callable[[], None]) -> None:
        """The live supervisor that took the claim; `ended` is called once it is dead."""
        self.pidfd, self.claim, self.claimed = pidfd, claim, True
        self.watched_since_s = asyncio.get_running_loop().time()
        job_id, attempt = self.key
        self.supervisor = (claim.pid, Supervisor(job_id, claim.start_ticks, attempt))
        asyncio.get_running_loop().add_reader(pidfd, ended)

    def unwatch(self) -> None:
        """The supervisor is dead, or the attempt over."""
        pidfd, self.pidfd = self.pidfd, None
        self.supervisor = self.claim = None
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
