"""What the runner knows of each attempt that is under way, and the pidfds of live supervisors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuschedd.core.attempt import Claim, Observation
from gpuschedd.core.recovery import Recovery, facts_of, recover
from gpuschedd.gpu.attribution import JobKey, Supervisor


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
    looking: bool = False
    look_again: bool = False  # asked for while a look was taken
    pidfd: int | None = None  # of the live supervisor
    supervisor: tuple[int, Supervisor] | None = None  # its pid, and who it is

    def verdict(self, seen: Observation | None) -> Recovery:
        """By the table; processes count as left until somebody has looked for them."""
        facts = facts_of(
            seen,
            ran=self.ran,
            cancel_requested=self.cancel_requested,
            processes_left=True,
        )
        return recover(facts)

    def watch(self, pidfd: int, claim: Claim, ended: Callable[[], None]) -> None:
        """The live supervisor that took the claim; `ended` is called once it is dead."""
        self.pidfd, self.claimed = pidfd, True
        job_id, attempt = self.key
        self.supervisor = (claim.pid, Supervisor(job_id, claim.start_ticks, attempt))
        asyncio.get_running_loop().add_reader(pidfd, ended)

    def unwatch(self) -> None:
        """The supervisor is dead, or the attempt over."""
        pidfd, self.pidfd, self.supervisor = self.pidfd, None, None
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
