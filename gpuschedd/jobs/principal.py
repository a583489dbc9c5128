"""Who orders: the kernel's word for the uid, the host's for the name and the rights."""

from __future__ import annotations

from dataclasses import dataclass

from gpuschedd.core.job import Job

#: The account of all uids that have none, as sub-uids of /etc/subuid: they share one allowance.
STRANGERS = -1


@dataclass(frozen=True, slots=True)
class Principal:
    """Who orders, as the kernel says."""

    uid: int
    user: str
    pid: int
    is_admin: bool
    groups: tuple[str, ...] = ()
    barred: str | None = None  # why this caller may submit nothing
    is_stranger: bool = False  # the host knows no account of this uid

    @property
    def account(self) -> int:
        """On whose allowance it lives."""
        return STRANGERS if self.is_stranger else self.uid

    def may_change(self, job: Job) -> bool:
        """Owner or admin. A uid that was given to another name owns nothing of the first."""
        return self.is_admin or self.owns(job)

    def owns(self, job: Job) -> bool:
        """Name and uid, both."""
        return self.uid == job.uid and self.user == job.user
