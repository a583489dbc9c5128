"""Aftermath: the snapshot once a plan's starts are carried out, at the same moment."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from gpusched_client.terms import JobId
from gpuschedd.core.model import Plan, RunningJob, Snapshot, Start, UserQueue, Waiting


def running(
    start: Start, job: Waiting, now_s: float, started_at_s: float | None = None
) -> RunningJob:
    """The job that starts, as one that holds GPUs. `started_at_s`: None until it is launched."""
    limit_s = job.request.time_limit_s
    return RunningJob(
        job_id=start.job_id,
        uid=start.uid,
        user=job.user,
        request=job.request,
        grants=start.grants,
        whole=start.whole,
        exclusive=start.exclusive,
        decided_at_s=now_s,
        started_at_s=started_at_s,
        time_limit_s=limit_s,
        decided_limit_s=limit_s,
        expected_s=start.expected_s,
    )


def all_running(snapshot: Snapshot, made: Plan) -> tuple[RunningJob, ...]:
    """Those that ran, and those that start."""
    queues = (*snapshot.queues.gpu, *snapshot.queues.cpu)
    jobs = {job.job_id: job for queue in queues for job in queue.jobs}
    started = (running(start, jobs[start.job_id], snapshot.now_s) for start in made.starts)
    return (*snapshot.running, *started)


def after(snapshot: Snapshot, made: Plan) -> Snapshot:
    """What a second pass at the same moment looks at.

    The bounds of the lists stay as they were: they bound what is left as well.
    """
    started = frozenset(made.start_ids)
    queues = snapshot.queues
    return replace(
        snapshot,
        running=all_running(snapshot, made),
        queues=replace(queues, gpu=_left(queues.gpu, started), cpu=_left(queues.cpu, started)),
        promise=made.promise,
        reservation=made.reservation,
    )


def _left(lists: tuple[UserQueue, ...], started: Container[JobId]) -> tuple[UserQueue, ...]:
    return tuple(
        replace(queue, jobs=jobs)
        for queue in lists
        if (jobs := tuple(job for job in queue.jobs if job.job_id not in started))
    )


def joined(first: Plan, second: Plan, snapshot: Snapshot) -> Plan:
    """Two passes of one moment as one plan; `snapshot` is what the first looked at."""
    ended = first.ended
    was_shown = snapshot.promise is not None
    if ended is None and was_shown:  # what the first pass promised nobody has heard of
        ended = second.ended
    started = set(second.start_ids)
    reasons = {job_id: why for job_id, why in first.reasons.items() if job_id not in started}
    return Plan(
        now_s=first.now_s,
        starts=(*first.starts, *second.starts),
        reservation=second.reservation,
        promise=second.promise,
        ended=ended,
        reasons={**reasons, **second.reasons},
        fallback=second.fallback,
        priorities={**first.priorities, **second.priorities},
        unknown=(first.unknown | second.unknown) - started,
        horizon=second.horizon,
        next_change_at_s=second.next_change_at_s,
        first_heads={**second.first_heads, **first.first_heads},
        first=first.first,
    )
