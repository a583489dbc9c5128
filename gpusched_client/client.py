"""The public Python API: a blocking client of the daemon.

    from gpusched_client import Client

    with Client() as client:
        job = client.submit(["python", "train.py"], gpus=2, vram="18G")
        ended = client.wait(job.id)
        print(ended.state, ended.exit_code)

One method for each of the wire's, those of administrators in administration.py. What it raises is
the tree of gpusched_client.errors. Must not print, exit, or know how anything is shown. One thread
at a time may use a Client.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Unpack, overload

from gpusched_client.administration import Administration
from gpusched_client.errors import GpuschedError, Invalid, PartlySubmitted, StillRunning
from gpusched_client.terms import JobState, parse_states
from gpusched_client.wire.limits import IDS_MAX, RESPONSE_JOBS_MAX, TIME_LIMIT_S_MAX
from gpusched_client.wire.message import changed
from gpusched_client.wire.session import PAUSE_S, Session
from gpusched_client.wire.transport import ConnectionLost

if TYPE_CHECKING:
    from gpusched_client.submission.request import SubmitKeywords, Word
    from gpusched_client.submission.submitted import SubmittedJob
    from gpusched_client.wire.admin_messages import UsageView
    from gpusched_client.wire.gpu_messages import GpusResult, GpuView
    from gpusched_client.wire.hello_messages import HelloResult
    from gpusched_client.wire.job_messages import (
        Event,
        JobsResult,
        JobView,
        Outcome,
        QueueResult,
        WaitResult,
        WhyResult,
    )
    from gpusched_client.wire.submit_messages import JobRequest, SubmitRequest, SubmitResult

REPLY_TIMEOUT_S = 30.0
RECONNECT_S = 30.0
_LOGS_LOOKED_AT_MAX = 20


class Client(Administration):
    """A connection to the daemon, opened at the first call.

    `socket_path` None looks where the commands look: GPUSCHED_SOCKET, the system's daemon where
    its socket exists, this user's own. A call whose reply takes longer than `timeout_s` raises
    Unavailable; `wait` has its own time-out. When the daemon goes away during a call, or between
    two, the call is tried again for `reconnect_s`; this is safe, since submissions carry an id and
    all else but a signal can be repeated. The first connection of all is not waited for.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = REPLY_TIMEOUT_S,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        path = None if socket_path is None else os.fspath(socket_path)
        reply_s, again_s = wait_s(timeout_s, "timeout_s"), wait_s(reconnect_s, "reconnect_s")
        super().__init__(
            Session(
                path,
                timeout_s=float(TIME_LIMIT_S_MAX) if reply_s is None else reply_s,
                reconnect_s=float(TIME_LIMIT_S_MAX) if again_s is None else again_s,
            )
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a later call opens a new one."""
        self._session.close()

    def hello(self) -> HelloResult:
        """Who the daemon is, and who it takes this process for."""
        from gpusched_client.wire.hello_messages import Hello

        return self._session.call(Hello())

    # --- submitting ---------------------------------------------------------------------------

    def submit(
        self,
        argv: Sequence[Word] | None = None,
        *,
        submission_id: str | None = None,
        **keywords: Unpack[SubmitKeywords],
    ) -> SubmittedJob:
        """Submit one job that runs as this process would; its keywords are those of job_request.

        The job is stored durably when this returns. `submission_id` (default: a random one) makes
        it safe to submit again after a doubt: the same id gives the same job.
        """
        from gpusched_client.submission.request import job_request

        request = job_request(argv, **keywords)
        warnings = self.shared_logs(request) if request.checked else ()
        job = self.submit_many([request], submission_id=submission_id)[0]
        if not warnings:
            return job
        from dataclasses import replace

        return replace(job, warnings=(*job.warnings, *warnings))

    def shared_logs(self, request: JobRequest) -> tuple[str, ...]:
        """A warning where one of my live jobs has a file of this one's as its log, too."""
        patterns = (request.output, request.error)
        if all(pattern is None or pattern == b"/dev/null" for pattern in patterns):
            return ()  # the default has the job's id in it
        from gpusched_client.submission.shared_logs import shared_logs

        with suppress(GpuschedError):  # no warning is worth a submission
            return shared_logs(request, self._live_jobs_of)
        return ()

    def _live_jobs_of(self, uid: int) -> Iterator[JobView]:
        """All about the newest live jobs of a user: each is a call."""
        listed = self.jobs(users=[str(uid)], states=["live"], limit=_LOGS_LOOKED_AT_MAX).jobs
        yield from (self.job(job.job_id) for job in reversed(listed))

    def submit_many(
        self, jobs: Iterable[JobRequest], *, submission_id: str | None = None
    ) -> list[SubmittedJob]:
        """Submit jobs; the result is in their order.

        All of them or none, where one message holds them: 10,000 jobs, 1 MiB in all. More are sent
        in parts, each all or none, and PartlySubmitted is raised where a later one is refused or
        lost: the same call again, with its `submission_id`, completes them.
        """
        requests = _checked(jobs)
        parts = _message_parts(requests)
        if len(parts) == 1:
            return self._submit_part(parts[0], submission_id)
        whole_id = submission_id or new_submission_id()
        submitted: list[SubmittedJob] = []
        for number, part in enumerate(parts, start=1):
            try:
                submitted += self._submit_part(part, f"{whole_id}/{number}")
            except GpuschedError as error:
                if not submitted:
                    raise
                ids = [job.id for job in submitted]
                raise PartlySubmitted(ids, len(requests), whole_id, error) from error
        return submitted

    def _submit_part(
        self, jobs: Sequence[JobRequest], submission_id: str | None
    ) -> list[SubmittedJob]:
        from gpusched_client.submission.submitted import SubmittedJob
        from gpusched_client.wire.submit_messages import SubmitRequest

        result = self.submit_request(SubmitRequest(tuple(jobs), submission_id))
        limits: Sequence[int | None] = result.time_limits_s or (None,) * len(result.job_ids)
        return [
            SubmittedJob(job_id, limit_s, result.warnings)
            for job_id, limit_s in zip(result.job_ids, limits, strict=True)
        ]

    def submit_request(self, request: SubmitRequest) -> SubmitResult:
        """Send a submission as it is, with a submission_id where it has none."""
        if request.submission_id is None and not request.dry_run:
            request = changed(request, submission_id=new_submission_id())
        return self._session.call(request)

    # --- asking -------------------------------------------------------------------------------

    def jobs(
        self,
        ids: Iterable[int] | None = None,
        *,
        users: Iterable[str] | None = None,
        states: Iterable[JobState | str] | None = None,
        name: str | None = None,
        ended_within_s: int | None = None,
        limit: int = RESPONSE_JOBS_MAX,
        before_id: int | None = None,
    ) -> JobsResult:
        """Jobs that pass all given filters, newest last; `total` counts those left out too.

        States as `gq --state` takes them: "RUNNING", "PD", "live", "final"; Invalid for others.
        """
        from gpusched_client.wire.job_messages import JobsRequest

        request = JobsRequest(
            ids=None if ids is None else tuple(ids),
            users=_users(users),
            states=None if states is None else _states(states),
            name=name,
            ended_within_s=ended_within_s,
            limit=limit,
            before_id=before_id,
        )
        return self._session.call(request)

    def queue(
        self,
        *,
        limit: int = RESPONSE_JOBS_MAX,
        after: int | None = None,
        users: Iterable[str] | None = None,
        name: str | None = None,
    ) -> QueueResult:
        """Pending jobs that pass the filters, in the order in which they are considered."""
        from gpusched_client.wire.job_messages import QueueRequest

        return self._session.call(QueueRequest(limit, after, _users(users), name))

    def job(self, job_id: int) -> JobView:
        """Everything about one job; NotFound where there is none."""
        from gpusched_client.wire.job_messages import JobQuery

        return self._session.call(JobQuery(job_id))

    @overload
    def wait(self, job_ids: int, *, timeout_s: float | None = None) -> JobView: ...

    @overload
    def wait(
        self, job_ids: Iterable[int], *, timeout_s: float | None = None
    ) -> tuple[JobView, ...]: ...

    def wait(
        self, job_ids: int | Iterable[int], *, timeout_s: float | None = None
    ) -> JobView | tuple[JobView, ...]:
        """Wait until the jobs are final; one view for one id, a tuple for several.

        Raises StillRunning, a TimeoutError, after timeout_s. Outlasts a restart of the daemon.
        """
        ids = _ids(job_ids)
        left_s = wait_s(timeout_s, "timeout_s")
        deadline = None if left_s is None else time.monotonic() + left_s
        jobs: list[JobView] = []
        for part in _parts(ids):
            result = self._wait_once(part, deadline)
            if result.timed_out:
                open_ids = [job.job_id for job in result.jobs if job.state.is_live]
                shown = ", ".join(map(str, open_ids[:10])) + (", ..." if len(open_ids) > 10 else "")
                named = f"job {shown} is" if len(open_ids) == 1 else f"jobs {shown} are"
                raise StillRunning(f"{named} not final after {timeout_s} s", {"job_ids": open_ids})
            jobs += result.jobs
        return jobs[0] if isinstance(job_ids, int) else tuple(jobs)

    def _wait_once(self, ids: tuple[int, ...], deadline: float | None) -> WaitResult:
        from gpusched_client.wire.job_messages import WaitRequest

        def left_s() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        return self._session.call(lambda: WaitRequest(ids, left_s()), extra_s=left_s())

    def watch(self, since: int | None = None) -> Iterator[Event]:
        """Events as they happen, over a connection of its own; `since` is the last id seen.

        It goes on after a restart of the daemon. Ends with Unavailable when that stays away.
        """
        from gpusched_client.wire.job_messages import EVENT_METHOD, Event, WatchRequest

        while True:
            try:
                connection, begun = self._session.subscribe(WatchRequest(since))
                try:
                    since = begun.last_event_id if since is None else since
                    for notification in connection.notifications():
                        if notification.method == EVENT_METHOD:
                            event = Event.from_wire(notification.params)
                            since = event.event_id
                            yield event
                finally:
                    connection.close()
            except ConnectionLost:
                time.sleep(PAUSE_S)

    def why(self, job_id: int) -> WhyResult:
        """Why that job was placed before others, also where it passed one of mine."""
        from gpusched_client.wire.job_messages import WhyRequest

        return self._session.call(WhyRequest(job_id))

    def gpus(self) -> tuple[GpuView, ...]:
        """The state of each GPU."""
        return self.gpus_result().gpus

    def gpus_result(self) -> GpusResult:
        """The same, with the reason where the GPUs cannot be read."""
        from gpusched_client.wire.gpu_messages import GpusRequest

        return self._session.call(GpusRequest())

    def usage(self) -> tuple[UsageView, ...]:
        """Decayed usage, share and fair-share factor of each user."""
        from gpusched_client.wire.admin_messages import UsageRequest

        return self._session.call(UsageRequest()).users

    # --- changing -----------------------------------------------------------------------------

    def cancel(
        self,
        job_ids: int | Iterable[int],
        *,
        signal: int | None = None,
        reason: str | None = None,
    ) -> tuple[Outcome, ...]:
        """End jobs, queued or running, or send running ones a signal; one outcome per id."""
        from gpusched_client.wire.job_messages import CancelRequest

        outcomes: list[Outcome] = []
        for ids in _parts(_ids(job_ids)):
            request = CancelRequest(ids, signal, reason)
            outcomes += self._session.call(request, repeatable=signal is None).outcomes
        return tuple(outcomes)

    def update(
        self,
        job_ids: int | Iterable[int],
        *,
        time_limit: str | int | None = None,
        nice: int | None = None,
        name: str | None = None,
        hold: bool | None = None,
        vram: str | int | None = None,
    ) -> tuple[Outcome, ...]:
        """Change what is given (time_limit, vram as in submit), leave the rest; outcomes per id."""
        from gpusched_client.wire.job_messages import UpdateRequest
        from gpusched_client.wire.job_options import OPTIONS

        changes = {
            "time_limit_s": OPTIONS["time_limit"].value(time_limit),
            "nice": nice,
            "name": name,
            "hold": hold,
            "vram_bytes": OPTIONS["vram"].value(vram),
        }
        outcomes: list[Outcome] = []
        for ids in _parts(_ids(job_ids)):
            outcomes += self._session.call(UpdateRequest(ids, **changes)).outcomes
        return tuple(outcomes)

    def top(self, job_id: int) -> Outcome:
        """Put a waiting job first: before your own others, or as an admin before all."""
        from gpusched_client.wire.job_messages import TopRequest

        return self._session.call(TopRequest(job_id)).outcome


def _checked(jobs: Iterable[JobRequest]) -> Sequence[JobRequest]:
    from gpusched_client.wire.submit_messages import JobRequest

    requests = tuple(jobs)
    others = [n for n, job in enumerate(requests) if not isinstance(job, JobRequest)]
    if others:
        path = f"jobs[{others[0]}]"
        problem = f"{path}: {requests[others[0]]!r} is no job; make it with job_request()"
        raise Invalid(problem, {"path": path})
    return requests


def _message_parts(jobs: Sequence[JobRequest]) -> Sequence[Sequence[JobRequest]]:
    if len(jobs) < 2:  # a single one is sent as it is: what refuses it knows why
        return [jobs]
    from gpusched_client.submission.parts import parts_of

    return list(parts_of(jobs))


def _users(named: Iterable[str] | None) -> tuple[str, ...] | None:
    return None if named is None else (named,) if isinstance(named, str) else tuple(named)


def _states(named: Iterable[JobState | str]) -> tuple[JobState, ...]:
    words = (named,) if isinstance(named, str) else tuple(named)
    return parse_states(",".join(words)) if words else ()


def _ids(job_ids: int | Iterable[int]) -> tuple[int, ...]:
    if isinstance(job_ids, int):
        return (job_ids,)
    ids = tuple(job_ids) if isinstance(job_ids, Iterable) else (None,)
    if not all(isinstance(job_id, int) for job_id in ids):
        raise Invalid(f"{job_ids!r} is neither a job's id nor several; ids are numbers")
    return ids


def _parts(ids: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """So many at a time as one request may name; none at all are one request as well."""
    for start in range(0, max(1, len(ids)), IDS_MAX):
        yield ids[start : start + IDS_MAX]


def wait_s(given: float | None, name: str) -> float | None:
    """A time to wait, in seconds; None (also for infinity) waits for ever. Raises Invalid."""
    if given is None or given == float("inf"):
        return None
    if not isinstance(given, (int, float)) or not 0 <= given <= TIME_LIMIT_S_MAX:  # nan is neither
        raise Invalid(
            f"{name}={given!r} is not a time to wait; give seconds from 0 to {TIME_LIMIT_S_MAX}, "
            "or None to wait for ever",
            {"path": name},
        )
    return given


def new_submission_id() -> str:
    """A random id for one submission, the same for each try of it."""
    return os.urandom(16).hex()
