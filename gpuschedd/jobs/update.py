"""Changes that clients ask of their jobs: limit, nice, VRAM, name, holds, and the first place.

Each function judges one request inside a batch. Owners may make their jobs cheaper, admins may do
anything. No I/O.
"""

from __future__ import annotations

from dataclasses import replace

from gpusched_client.errors import Conflict, Denied, LimitReached
from gpusched_client.terms import EventKind, HoldKind, JobId, JobState
from gpusched_client.units import bytes_text, format_duration
from gpusched_client.wire.job_messages import Outcome, UpdateRequest
from gpusched_client.wire.limits import NICE_MIN, limit_from_wire
from gpuschedd.core import admission, forecast
from gpuschedd.core.job import Job
from gpuschedd.core.length_key import name_key
from gpuschedd.core.model import PromiseException, RunningJob, Snapshot
from gpuschedd.jobs import gates
from gpuschedd.jobs.batch import Batch
from gpuschedd.jobs.outcomes import outcome_of, outcomes_of
from gpuschedd.jobs.principal import Principal
from gpuschedd.jobs.submit import allowed_limit_s
from gpuschedd.store.records import FIRST_OF_ALL

GIVING_WAY_MAX = 1_000  # other jobs that one `top` of an owner changes
EXTENSIONS_MAX = 20  # running jobs of one request for which the planner is asked


def top(batch: Batch, caller: Principal, job_id: JobId) -> Outcome:
    """Put a waiting job first; one outcome, as of update.

    An owner's job moves before the owner's others; those with a smaller nice value are raised to
    its own, since an owner may not lower any. An admin's word gives the job the smallest nice value
    there is, on record.
    """
    return outcome_of(batch, caller, job_id, lambda job: _top_one(batch, caller, job), "top")


def _top_one(batch: Batch, caller: Principal, job: Job) -> tuple[str, JobState]:
    if job.state is not JobState.PENDING:
        raise Conflict(f"job {job.job_id} is {job.state}; only a queued job can be put first")
    text = _put_first(batch, job) if caller.is_admin else _put_first_of_own(batch, caller, job)
    facts = {FIRST_OF_ALL: True} if caller.is_admin else {}
    batch.emit(EventKind.JOB_UPDATED, job, changed=[f"top: {text}"], by=caller.user, **facts)
    return text, job.state


def _put_first(batch: Batch, job: Job) -> str:
    batch.put(replace(job, nice=NICE_MIN))
    return f"first of all, by nice {NICE_MIN}"


def _put_first_of_own(batch: Batch, caller: Principal, job: Job) -> str:
    blocked = gates.blocked_by(job, batch.now_s)
    if blocked is not None:
        raise Conflict(f"job {job.job_id} waits for more than its turn: {blocked.text}")
    ahead = _of_smaller_nice(batch, job)
    if len(ahead) > GIVING_WAY_MAX:
        raise LimitReached(
            f"{len(ahead)} other jobs of yours have a smaller nice value than job {job.job_id}, "
            f"which has {job.nice}; at most {GIVING_WAY_MAX} give way at once. Raise theirs with "
            "`gctl update --nice`, or submit it again with a smaller one."
        )
    for other in ahead:
        after = replace(other, nice=job.nice)
        _void_promise(batch, caller, other, after)
        batch.put(after)
    promised = batch.state.promise
    holder = None if promised is None else batch.job(promised.job_id)
    if holder is not None and holder.uid == job.uid and holder.job_id != job.job_id:
        batch.voided[holder.job_id] = None
    batch.put(job)
    batch.put_in_front(job.job_id)
    if not ahead:
        return "first of yours"
    others = "1 other has" if len(ahead) == 1 else f"{len(ahead)} others have"
    return f"first of yours; {others} nice {job.nice} now"


def _of_smaller_nice(batch: Batch, job: Job) -> list[Job]:
    """The owner's other waiting jobs that would come first, wherever else they stand."""
    ids = dict.fromkeys(batch.state.queues.before_nice(job.uid, job.nice))
    ids |= dict.fromkeys(other.job_id for other in batch.changed_so_far())
    others = [batch.job(job_id) for job_id in ids]
    return [
        other
        for other in others
        if other is not None
        and (other.uid, other.state) == (job.uid, JobState.PENDING)
        and other.nice < job.nice
    ]


def update(
    batch: Batch,
    caller: Principal,
    request: UpdateRequest,
    snapshot: Snapshot | None,
    extensions: Extensions | None = None,
) -> tuple[Outcome, ...]:
    """One outcome per id. `snapshot` judges an owner's wish for a longer limit, `extensions` counts
    them over the parts of one request.
    """
    extensions = extensions or Extensions()
    extensions.begin(batch, snapshot)

    def act(job: Job) -> tuple[str, JobState]:
        return _update_one(batch, caller, request, job, extensions)

    return outcomes_of(batch, caller, request.job_ids, act, "update")


def _update_one(
    batch: Batch,
    caller: Principal,
    request: UpdateRequest,
    job: Job,
    extensions: Extensions,
) -> tuple[str, JobState]:
    if job.is_final:
        raise Conflict(f"job {job.job_id} is {job.state}; it can no longer be changed")
    changed: list[str] = []
    before = job
    if request.name is not None:
        job = replace(job, name=request.name, length_key=name_key(request.name) or job.length_key)
        changed.append(f"name {request.name}")
    if request.nice is not None:
        job = _new_nice(caller, job, request.nice)
        changed.append(f"nice {request.nice}")
    if request.time_limit_s is not None:
        job = _new_limit(batch, caller, job, request.time_limit_s, extensions)
        changed.append(f"limit {format_duration(limit_from_wire(request.time_limit_s))}")
    if request.vram_bytes is not None:
        job = _new_vram(batch, job, request.vram_bytes)
        changed.append(f"VRAM {bytes_text(request.vram_bytes)}")
    if request.hold is not None:
        job = _new_hold(batch, caller, job, request.hold)
        changed.append("held" if request.hold else "released")
    is_new_hold = job.hold is not None and before.hold is None
    if is_new_hold or job.request != before.request or job.nice != before.nice:
        _void_promise(batch, caller, before, job)
    batch.put(job)
    batch.emit(EventKind.JOB_UPDATED, job, changed=changed, by=caller.user)
    return ", ".join(changed), job.state


def _void_promise(batch: Batch, caller: Principal, before: Job, after: Job) -> None:
    """A changed job loses its promise, unless only its limit became shorter."""
    old_s, new_s = before.request.time_limit_s, after.request.time_limit_s
    is_shorter = new_s is not None and (old_s is None or new_s <= old_s)
    same_otherwise = replace(after.request, time_limit_s=old_s) == before.request
    if is_shorter and same_otherwise and after.nice == before.nice and after.hold is None:
        return
    by_owner = caller.uid == before.uid
    batch.voided[before.job_id] = None if by_owner else PromiseException.ADMIN_CHANGE


def _new_vram(batch: Batch, job: Job, vram_bytes: int) -> Job:
    """A queued job asks for another amount; its owner's word goes before a retry's."""
    if job.state is not JobState.PENDING:
        raise Conflict(f"job {job.job_id} is {job.state}; only a queued job's VRAM can be changed")
    asked = replace(job.request, vram_bytes=vram_bytes, card_bytes=0)
    admitted = admission.admit(asked, batch.state.inventory, batch.state.policy)
    batch.rested.add(job.job_id)
    return replace(job, request=admitted.request, whole_note=admitted.note)


def _new_nice(caller: Principal, job: Job, nice: int) -> Job:
    if not caller.is_admin and nice < max(0, job.nice):
        raise Denied(
            f"job {job.job_id} has nice {job.nice}; its owner may only raise it, "
            "an admin may lower it"
        )
    return replace(job, nice=nice)


def _new_limit(
    batch: Batch, caller: Principal, job: Job, wanted_s: int, extensions: Extensions
) -> Job:
    limit_s = allowed_limit_s(batch, caller, wanted_s)
    now_limit_s = job.request.time_limit_s
    is_longer = now_limit_s is not None and (limit_s is None or limit_s > now_limit_s)
    if job.holds_gpus and is_longer and not caller.is_admin:
        extensions.check(job, limit_s)
    if job.state is JobState.PENDING and is_longer:
        batch.rested.add(job.job_id)
    return replace(job, request=replace(job.request, time_limit_s=limit_s), default_limit=False)


class Extensions:
    """Whether running jobs of one request may have longer limits: asked of the planner."""

    def __init__(self) -> None:
        self._asked = 0

    def begin(self, batch: Batch, snapshot: Snapshot | None) -> None:
        """The next jobs are judged in this batch, as of this snapshot."""
        self._batch, self._snapshot = batch, snapshot

    def check(self, job: Job, limit_s: float | None) -> None:
        """An owner's longer limit must not move a promised start. Raises Conflict, LimitReached."""
        batch, snapshot = self._batch, self._snapshot
        if snapshot is None or limit_s is None:
            raise Conflict(f"job {job.job_id} runs; only an admin may make it unlimited")
        if snapshot.promise is None:
            return
        if self._asked >= EXTENSIONS_MAX:
            raise LimitReached(
                f"while a start is promised, one request may raise the limits of {EXTENSIONS_MAX} "
                "running jobs; send the rest in another"
            )
        self._asked += 1
        changed = tuple(_as_changed(batch, run) for run in snapshot.running)
        most_s = forecast.raise_limit_allowed(
            replace(snapshot, running=changed), batch.state.policy, job.job_id, limit_s
        )
        if most_s < limit_s:
            raise Conflict(
                f"a limit of {format_duration(limit_s)} for job {job.job_id} would delay a "
                f"promised start; at most {format_duration(most_s)} is possible",
                {"limit": most_s},
            )


def _as_changed(batch: Batch, running: RunningJob) -> RunningJob:
    """With the limit that the batch gave it: one extension may leave no room for the next."""
    job = batch.job(running.job_id)
    return running if job is None else replace(running, time_limit_s=job.request.time_limit_s)


def _new_hold(batch: Batch, caller: Principal, job: Job, hold: bool) -> Job:
    if job.state is not JobState.PENDING:
        raise Conflict(
            f"job {job.job_id} is {job.state}; only a queued job can be held or released"
        )
    if hold:
        kind = HoldKind.USER if caller.uid == job.uid else HoldKind.ADMIN
        return job if job.hold is not None and kind is HoldKind.USER else replace(job, hold=kind)
    if job.hold in (HoldKind.ADMIN, HoldKind.CONFIG) and not caller.is_admin:
        raise Denied(f"job {job.job_id} is held by an admin; only an admin may release it")
    if job.hold is not None:
        batch.rested.add(job.job_id)
    return replace(job, hold=None, hold_detail=None, launch_failures=0)
