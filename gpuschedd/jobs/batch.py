"""The overlay in which a batch is tried before it is real.

Reads fall through to the state of the last commit. Each command gets a child of its own, so that a
refused one leaves no trace. Nothing here does I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gpusched_client.terms import EventKind, GpuUuid, JobId
from gpuschedd.core import admission
from gpuschedd.core.job import Job, JobEvent, advance
from gpuschedd.core.model import Gpu, Kind, PromiseException, Run
from gpuschedd.jobs.state import State
from gpuschedd.store.records import (
    RECENT_SUBMISSIONS_MAX,
    AttemptEnd,
    AuditRow,
    Changes,
    Event,
    GpuRow,
    GpuUse,
    Payload,
    Remembered,
    Submission,
    UsageRow,
)


class Ended(NamedTuple):
    """A run that has ended and counts, and how long it was expected to be."""

    uid: int
    kind: Kind
    run: Run
    expected_s: float


class Batch:
    """Changes that are tried: reads fall through to the parent, and to the state beneath."""

    def __init__(self, state: State, now_s: float, wall_s: float, parent: Batch | None = None):
        self.state = state
        self.now_s = now_s
        self.wall_s = wall_s
        self._parent = parent
        self._jobs: dict[JobId, Job] = {}
        self._submissions: dict[tuple[int, str], Submission] = {}
        self._live_of: Counter[int] = Counter()
        self._bytes_of: Counter[int] = Counter()
        self._request_bytes: dict[JobId, int] = {}
        self.payloads: dict[JobId, Payload] = {}
        self.rested: set[JobId] = set()  # jobs whose age begins again
        self.fronted: dict[JobId, None] = {}  # put before their user's others, the last one first
        self.keeps_time = False  # the clock alone is worth a commit
        self.voided: dict[JobId, PromiseException | None] = {}  # promises that end by a change
        self.delayed: dict[JobId, PromiseException] = {}  # promises that a change makes late
        self.events: list[Event] = []
        self.audits: list[AuditRow] = []
        self.gpu_rows: dict[GpuUuid, GpuRow] = {}
        self.gpus_seen: tuple[Gpu, ...] = ()  # they count for what could ever run here
        self.gpu_uses: list[GpuUse] = []
        self.health: Mapping[GpuUuid, Remembered] | None = None
        self.accounts: dict[int, UsageRow] = {}
        self.attempts: list[AttemptEnd] = []
        self.runs: list[Ended] = []  # that count
        self.next_job_id: int = parent.next_job_id if parent else state.next_job_id

    def child(self) -> Batch:
        """An overlay for one command."""
        return Batch(self.state, self.now_s, self.wall_s, self)

    def absorb(self, child: Batch) -> None:
        """Take over what a command that was not refused has changed."""
        self._jobs.update(child._jobs)
        self._submissions.update(child._submissions)
        self._live_of.update(child._live_of)
        self._bytes_of.update(child._bytes_of)
        self._request_bytes.update(child._request_bytes)
        self.payloads.update(child.payloads)
        self.rested |= child.rested
        for job_id in child.fronted:
            self.put_in_front(job_id)
        self.voided |= child.voided
        self.delayed |= child.delayed
        self.keeps_time = self.keeps_time or child.keeps_time
        self.events += child.events
        self.audits += child.audits
        self.gpu_rows.update(child.gpu_rows)
        self.gpus_seen = child.gpus_seen or self.gpus_seen
        self.gpu_uses += child.gpu_uses
        self.health = self.health if child.health is None else child.health
        self.accounts.update(child.accounts)
        self.attempts += child.attempts
        self.runs += child.runs
        self.next_job_id = child.next_job_id

    def job(self, job_id: JobId) -> Job | None:
        """The job with the batch's changes; None when it is not live."""
        found = self._jobs.get(job_id)
        if found is not None:
            return found
        return self._parent.job(job_id) if self._parent else self.state.jobs.get(job_id)

    def gpu_row(self, uuid: GpuUuid) -> GpuRow | None:
        """A GPU's row with the batch's changes."""
        found = self.gpu_rows.get(uuid)
        if found is not None:
            return found
        return self._parent.gpu_row(uuid) if self._parent else self.state.gpu_rows.get(uuid)

    def changed_so_far(self) -> Iterator[Job]:
        """Every job that the batch has added or changed by now."""
        seen = set()
        level: Batch | None = self
        while level is not None:
            for job_id, job in level._jobs.items():
                if job_id not in seen:
                    seen.add(job_id)
                    yield job
            level = level._parent

    def live_jobs(self) -> Iterator[Job]:
        """Every live job with the batch's changes."""
        changed = {job.job_id: job for job in self.changed_so_far()}
        yield from changed.values()
        yield from (job for job_id, job in self.state.jobs.items() if job_id not in changed)

    def submission(self, uid: int, submission_id: str) -> Submission | None:
        """An earlier submission under this id, of this batch or before."""
        found = self._submissions.get((uid, submission_id))
        if found is not None:
            return found
        if self._parent:
            return self._parent.submission(uid, submission_id)
        return self.state.submissions.get((uid, submission_id))

    def live_count(self, uid: int) -> int:
        """A user's jobs that are not final."""
        below = self._parent.live_count(uid) if self._parent else self.state.live_of[uid]
        return below + self._live_of[uid]

    def live_bytes(self, uid: int) -> int:
        """What the requests of these jobs take."""
        below = self._parent.live_bytes(uid) if self._parent else self.state.bytes_of[uid]
        return below + self._bytes_of[uid]

    def live_total(self) -> int:
        """All jobs that are not final."""
        below = self._parent.live_total() if self._parent else len(self.state.jobs)
        return below + self._live_of.total()

    def take_job_id(self) -> JobId:
        """The next id; a refused command's ids are given again."""
        job_id = JobId(self.next_job_id)
        self.next_job_id += 1
        return job_id

    def add(self, job: Job, payload: Payload, request_bytes: int) -> None:
        """A new job; its request takes so many bytes."""
        self._request_bytes[job.job_id] = request_bytes
        self._bytes_of[job.uid] += request_bytes
        self._jobs[job.job_id] = job
        self.payloads[job.job_id] = payload
        self._live_of[job.uid] += 1

    def remember(self, submission: Submission) -> None:
        """An idempotency key of this batch."""
        self._submissions[(submission.uid, submission.submission_id)] = submission

    def put(self, job: Job) -> None:
        """A changed job, in the same state."""
        before = self.job(job.job_id)
        assert before is not None
        assert before.state is job.state
        self._jobs[job.job_id] = job

    def put_in_front(self, job_id: JobId) -> None:
        """Before all others of its user's list, those included that were put there earlier."""
        self.fronted.pop(job_id, None)
        self.fronted[job_id] = None

    def advance(self, job: Job, event: JobEvent) -> Job:
        """Move a job through the table of states."""
        after = advance(job, event)
        if after.is_final:
            self._live_of[job.uid] -= 1
        self._jobs[job.job_id] = after
        return after

    def emit(self, kind: EventKind, job: Job | None = None, **data: object) -> None:
        """An event, for watchers, the log and the accounting database."""
        self.events.append(
            Event(
                kind=kind.value,
                at_s=self.wall_s,
                job_id=job.job_id if job else None,
                uid=job.uid if job else None,
                data=data,
            )
        )

    def changed_jobs(self) -> dict[JobId, Job]:
        """The jobs that this batch adds or changes."""
        return self._jobs

    def changed_submissions(self) -> list[Submission]:
        """The idempotency keys that this batch adds."""
        return list(self._submissions.values())

    def into(self, changes: Changes) -> None:
        """What of this batch is to be written."""
        changes.jobs.update(self._jobs)
        changes.payloads.update(self.payloads)
        changes.submissions += self.changed_submissions()
        changes.audits += self.audits
        changes.gpus.update(self.gpu_rows)
        changes.gpu_uses += self.gpu_uses
        changes.health = self.health
        changes.accounts.update(self.accounts)
        changes.attempts += self.attempts
        changes.keeps_time = self.keeps_time


def _count_bytes(state: State, batch: Batch) -> None:
    """Of the requests of live jobs: those that are over no longer count."""
    state.request_bytes.update(batch._request_bytes)
    state.bytes_of.update(batch._bytes_of)
    for job in batch.changed_jobs().values():
        if job.is_final:
            state.bytes_of[job.uid] -= state.request_bytes.pop(job.job_id, 0)
            if not state.bytes_of[job.uid]:
                del state.bytes_of[job.uid]


def apply(state: State, batch: Batch) -> None:
    """Make a committed batch real."""
    for job_id, job in batch.changed_jobs().items():
        state.index(job)
        if job.is_final:
            state.jobs.pop(job_id, None)
            state.ages.pop(job_id, None)
        else:
            state.jobs[job_id] = job
    _count_bytes(state, batch)
    state.live_of.update(batch._live_of)
    for uid in batch._live_of:
        if state.live_of[uid] == 0:
            del state.live_of[uid]
            state.user_of.pop(uid, None)
    state.next_job_id = batch.next_job_id
    for submission in batch.changed_submissions():
        state.submissions[(submission.uid, submission.submission_id)] = submission
    while len(state.submissions) > RECENT_SUBMISSIONS_MAX:
        state.submissions.popitem(last=False)
        state.submissions_forgotten = True
    state.gpu_rows.update(batch.gpu_rows)
    if batch.gpus_seen:
        state.inventory = admission.seen(state.inventory, batch.gpus_seen)
    state.health = state.health if batch.health is None else batch.health
