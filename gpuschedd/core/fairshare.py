"""Fair-share: what each user has used, decayed, and the factor F that follows from it.

Owns usage, rates and shares. One accumulator per user in closed form: its value at a time does not
depend on how often it was looked at. Knows no queue and no job's priority.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpusched_client.terms import GpuUuid, JobId
from gpuschedd.core.model import HOUR_S, Gpu, Grant, Policy
from gpuschedd.core.timeline import model_matches

LN2 = math.log(2.0)


def decayed(usage_gpu_s: float, elapsed_s: float, half_life_s: float) -> float:
    """Usage left after elapsed_s >= 0; it halves every half_life_s > 0."""
    return usage_gpu_s * math.exp2(-elapsed_s / half_life_s)


@dataclass(frozen=True, slots=True)
class AccountRow:
    """One user's usage as of a time, as stored. Rates are not stored: they follow from the jobs."""

    uid: int
    usage_gpu_s: float
    as_of_s: float


class _Account:
    __slots__ = ("as_of_s", "rate", "rates", "usage_gpu_s")

    def __init__(self, usage_gpu_s: float, as_of_s: float) -> None:
        self.usage_gpu_s = usage_gpu_s
        self.as_of_s = as_of_s
        self.rates: dict[JobId, float] = {}
        self.rate = 0.0

    def at(self, now_s: float, half_life_s: float) -> float:
        """Usage at now_s: what is left of the past, and the integral of the rate, decayed alike.

        A time before as_of_s counts as as_of_s.
        """
        if now_s <= self.as_of_s:
            return self.usage_gpu_s
        decay_per_s = LN2 / half_life_s
        gone = -math.expm1(decay_per_s * (self.as_of_s - now_s))
        return self.usage_gpu_s * (1.0 - gone) + self.rate * gone / decay_per_s


class Accounts:
    """All users' accumulators. Moves only when a job's rate changes, so looking costs nothing."""

    def __init__(self, policy: Policy) -> None:
        self._half_life_s = policy.half_life_s
        self._by_uid: dict[int, _Account] = {}

    @classmethod
    def restore(cls, policy: Policy, rows: Iterable[AccountRow]) -> Accounts:
        """From stored rows; give the running jobs their rates again with `resume_rate`."""
        accounts = cls(policy)
        for row in rows:
            accounts._by_uid[row.uid] = _Account(max(0.0, row.usage_gpu_s), row.as_of_s)
        return accounts

    def resume_rate(self, uid: int, job_id: JobId, rate: float, since_s: float) -> None:
        """A job that ran when its user's row was stored goes on at its rate from the row's time.

        `since_s` (its start) counts only where there is no row.
        """
        account = self._by_uid.setdefault(uid, _Account(0.0, since_s))
        _change(account, job_id, rate)

    def set_rate(self, uid: int, job_id: JobId, rate: float, now_s: float) -> AccountRow:
        """A job starts (rate > 0), changes what it holds, or stops (0). The row to store."""
        account = self._by_uid.setdefault(uid, _Account(0.0, now_s))
        account.usage_gpu_s = account.at(now_s, self._half_life_s)
        account.as_of_s = max(account.as_of_s, now_s)
        _change(account, job_id, rate)
        return AccountRow(uid, account.usage_gpu_s, account.as_of_s)

    def usage(self, uid: int, now_s: float) -> float:
        """Decayed GPU-seconds of one user; changes nothing."""
        account = self._by_uid.get(uid)
        return 0.0 if account is None else account.at(now_s, self._half_life_s)

    def rows(self) -> tuple[AccountRow, ...]:
        """All rows by uid, as last moved."""
        return tuple(
            AccountRow(uid, account.usage_gpu_s, account.as_of_s)
            for uid, account in sorted(self._by_uid.items())
        )


def _change(account: _Account, job_id: JobId, rate: float) -> None:
    if rate > 0.0:
        account.rates[job_id] = rate
    else:
        account.rates.pop(job_id, None)
    # Summed again: adding and subtracting would leave a residue after the last job.
    account.rate = math.fsum(account.rates.values())


def charge_rate(
    grants: Iterable[Grant], gpus: Mapping[GpuUuid, Gpu], *, whole: bool, policy: Policy
) -> float:
    """GPU-seconds per second of one job: the share of each GPU times its model's weight.

    A GPU that is no longer known counts as one whole GPU of weight 1.
    """
    return math.fsum(
        _gpu_rate(grant, gpus.get(grant.uuid), whole=whole, policy=policy) for grant in grants
    )


def _gpu_rate(grant: Grant, gpu: Gpu | None, *, whole: bool, policy: Policy) -> float:
    if gpu is None:
        return 1.0
    weight = billing_weight(gpu.model, policy)
    if whole:
        return weight
    held = max(grant.declared_bytes, grant.held_bytes)
    return weight * min(1.0, max(held / gpu.total_bytes, policy.min_share))


def billing_weight(model: str, policy: Policy) -> float:
    """The first matching line of `[billing]`; 1 without one."""
    for wanted, weight in policy.billing:
        if model_matches(wanted, model):
            return weight
    return 1.0


def share_of(user: str, groups: Iterable[str], policy: Policy) -> float:
    """The share: the line with the user's own name, else the first `@group` of its, else 1."""
    for name, share in policy.shares:
        if name == user:
            return share
    known = {f"@{group}" for group in groups}
    for name, share in policy.shares:
        if name in known:
            return share
    return 1.0


def factors(usages: Mapping[int, float], shares: Mapping[int, float]) -> dict[int, float]:
    """F = 2 ** (-U/S) of each active user; U/S = u * sum(s) / (s * max(sum(u), 1 GPU-hour)).

    Both sums run over the active users, so a join or a leave scales all exponents alike.
    """
    uids = sorted(usages)
    pool = max(math.fsum([usages[uid] for uid in uids]), HOUR_S)
    scale = math.fsum([shares[uid] for uid in uids]) / pool
    return {
        uid: 2.0 ** (-usages[uid] * scale / shares[uid]) if shares[uid] > 0 else 0.0 for uid in uids
    }
