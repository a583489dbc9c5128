"""Expected lengths: how long a job will probably run, by what its owner's last runs took.

Owns the history of runs, the lookup, and the steps by which an expectation that has passed is put
off. It orders nothing and promises nothing: only who has no planned end is planned by it.

Theory. The mean of a user's last two runs predicts the next one better than what users ask for, and
costs no tuning: Tsafrir, Etsion, Feitelson, "Backfilling Using System-Generated Predictions Rather
Than User Runtime Estimates" (IEEE TPDS 18(6), 2007), here by command and GPUs first. A job that
outlives its expectation gets a later one, in growing steps: it has shown that it is a long one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from gpuschedd.core.model import (
    DAY_S,
    HOUR_S,
    Kind,
    LengthRow,
    Lengths,
    OwnLengths,
    Policy,
    Request,
    Run,
)

RUNS_KEPT = 2
KEPT_S = 90 * DAY_S
ROWS_PER_USER_MAX = 1_000
SHORT_S = 60.0  # who fails sooner says nothing about the length
LEAST_S = 1.0

# What is added when an expectation has passed, each time to the one before.
_STEPS_S = (60.0, 300.0, 900.0, 1800.0, *(HOUR_S * hours for hours in (1, 2, 5, 10, 20, 50, 100)))
_LATER_S = tuple(accumulate(_STEPS_S))
_LAST_STEP_S = _STEPS_S[-1]


class Basis(StrEnum):
    """What an expectation rests on."""

    ESTIMATE = "estimate"  # its owner's word
    KIND = "kind"  # runs of the same command on as many GPUs
    KEY = "key"  # runs of the same command
    OWNER = "owner"  # its owner's last runs
    LIMIT = "limit"
    GUESS = "guess"  # nothing is known


class Expectation(NamedTuple):
    """How long a job will probably run from its start, in seconds, why, and by which runs."""

    length_s: float
    basis: Basis
    runs: tuple[Run, ...] = ()


class Histories:
    """The histories of all users as they grow. Returns what a caller has to store."""

    def __init__(self, rows: Iterable[LengthRow] = ()) -> None:
        of: dict[int, dict[Kind, tuple[Run, ...]]] = {}
        for row in rows:
            of.setdefault(row.uid, {})[row.kind] = row.runs
        self._own: dict[int, OwnLengths] = {uid: _own(kinds) for uid, kinds in of.items()}
        self._begin()

    def _begin(self) -> None:
        self._view: Lengths | None = None
        newest = (runs[-1] for own in self._own.values() for runs in own.rows.values())
        self._oldest_s = min((run.ended_s for run in newest), default=math.inf)  # or later

    @classmethod
    def as_of(cls, view: Lengths) -> Histories:
        """As they were."""
        histories = cls()
        histories._own = dict(view.by_uid)
        histories._begin()
        return histories

    def view(self) -> Lengths:
        """As of now; the same object until a run is noted or forgotten."""
        if self._view is None:
            self._view = Lengths(dict(self._own))
        return self._view

    def note(self, uid: int, kind: Kind, run: Run) -> tuple[LengthRow, ...]:
        """A run that counts has ended: the rows that change, emptied ones among them."""
        own = self._own.get(uid)
        rows = {} if own is None else dict(own.rows)
        rows[kind] = _last((*rows.get(kind, ()), run))
        gone = []
        while len(rows) > ROWS_PER_USER_MAX:
            gone.append(min(rows, key=lambda each: rows[each][-1]))
            del rows[gone[-1]]
        self._own[uid] = _own(rows) if own is None or gone else _grown(own, rows, kind.key, run)
        self._view = None
        self._oldest_s = min(self._oldest_s, run.ended_s)
        return (LengthRow(uid, kind, rows[kind]), *(LengthRow(uid, each, ()) for each in gone))

    def forget(self, now_s: float) -> None:
        """What is older than KEPT_S no longer counts; a store drops it by itself."""
        since_s = now_s - KEPT_S
        if self._oldest_s >= since_s:
            return
        for uid, own in list(self._own.items()):
            rows = {kind: runs for kind, runs in own.rows.items() if runs[-1].ended_s >= since_s}
            if not rows:
                del self._own[uid]
            elif len(rows) < len(own.rows):
                self._own[uid] = _own(rows)
        self._begin()


def _own(rows: Mapping[Kind, tuple[Run, ...]]) -> OwnLengths:
    by_key: dict[str, list[Run]] = {}
    for kind, runs in rows.items():
        by_key.setdefault(kind.key, []).extend(runs)
    every = [run for runs in rows.values() for run in runs]
    return OwnLengths(rows, {key: _last(runs) for key, runs in by_key.items()}, _last(every))


def _grown(own: OwnLengths, rows: Mapping[Kind, tuple[Run, ...]], key: str, run: Run) -> OwnLengths:
    """With one run more; the same as made anew from the rows."""
    of_key = _last((*own.by_key.get(key, ()), run))
    return OwnLengths(rows, {**own.by_key, key: of_key}, _last((*own.last, run)))


def _last(runs: Iterable[Run]) -> tuple[Run, ...]:
    return tuple(sorted(runs)[-RUNS_KEPT:])


def expected(lengths: Lengths, uid: int, key: str, request: Request, policy: Policy) -> Expectation:
    """How long such a job will probably run: at least 1 s, never above its limit.

    The owner's estimate comes first, then the mean of the last two runs of the same command and
    GPUs, else of the command, else of the owner; without any its limit, else the policy's guess.
    """
    limit_s = request.time_limit_s
    found = _by_word_or_history(lengths, uid, key, request, policy)
    if found is None:
        guess = Expectation(policy.guess_length_s, Basis.GUESS)
        found = guess if limit_s is None else Expectation(limit_s, Basis.LIMIT)
    length_s = found.length_s if limit_s is None else min(found.length_s, limit_s)
    return found._replace(length_s=max(LEAST_S, length_s))


def _by_word_or_history(
    lengths: Lengths, uid: int, key: str, request: Request, policy: Policy
) -> Expectation | None:
    if request.estimate_s is not None:
        return Expectation(request.estimate_s, Basis.ESTIMATE)
    own = lengths.by_uid.get(uid) if policy.learn_lengths else None
    if own is None:
        return None
    if runs := own.rows.get(Kind(key, request.gpus)):
        return Expectation(_mean_s(runs), Basis.KIND, runs)
    if runs := own.by_key.get(key):
        return Expectation(_mean_s(runs), Basis.KEY, runs)
    return Expectation(_mean_s(own.last), Basis.OWNER, own.last)


def _mean_s(runs: tuple[Run, ...]) -> float:
    return sum(run.length_s for run in runs) / len(runs)


def put_off_s(first_s: float, now_s: float) -> float:
    """When an end that was expected at first_s is expected now: always later than now.

    60 s after the first, 5, 15, 30 min, 1, 2, 5, 10, 20, 50 and 100 h after the one before, then
    every 100 h.
    """
    if now_s < first_s:
        return first_s
    # The sums are compared, not the differences: these round to the other side of a step.
    step = bisect_right(_LATER_S, now_s, key=lambda later_s: first_s + later_s)
    if step < len(_LATER_S):
        return first_s + _LATER_S[step]
    rounds = (now_s - first_s - _LATER_S[-1]) // _LAST_STEP_S
    while (end_s := first_s + _LATER_S[-1] + rounds * _LAST_STEP_S) <= now_s:
        rounds += 1
    return end_s


def counts(ran_s: float, expected_s: float, *, by_itself: bool, failed: bool) -> bool:
    """Whether a run of that length teaches anything.

    `by_itself`: it ended so, or by its limit, which is its length then. One that failed at once, or
    was cancelled, stopped or lost, shows no more than that such a job may run so long.
    """
    return ran_s > expected_s or (by_itself and not (failed and ran_s < SHORT_S))
