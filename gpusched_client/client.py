"""The public Python API: a blocking client of the daemon.

    from gpusched_client import Client

    with Client() as c:
        job = c.submit(["python", "train.py"], gpus=2, vram="18G")
        ended = c.wait(job.id)
        print(ended.state, ended.exit_code)

Owns the socket: which one, whether its server is to be trusted, and what is tried again when the
daemon restarts. What it raises is the tree of gpusched_client.errors. Must not print, exit, or
know how anything is shown. One thread at a time may use a Client.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from gpusched_client import paths
from gpusched_client.errors import (
    Denied,
    GpuschedError,
    Internal,
    Invalid,
    StillRunning,
    Unavailable,
)
from gpusched_client.submission.request import Word, job_request
from gpusched_client.terms import JobState, parse_states
from gpusched_client.units import parse_bytes, parse_duration
from gpusched_client.wire import framing, protocol
from gpusched_client.wire.protocol import JobRequest, JobView

REPLY_TIMEOUT_S = 30.0
RECONNECT_S = 30.0
BACKLOG_RETRY_S = 5.0
_RECEIVE_BYTES = 256 * 1024
_PAUSE_S, _PAUSE_MAX_S = 0.02, 0.5
_OVERFLOW_UID = 65_534  # what a user namespace shows for a uid that it does not map

R = TypeVar("R", bound=protocol.Response)


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """What a submission gives back: the id, the limit it got, and what people should know."""

    id: int
    time_limit_s: int | None = None
    warnings: tuple[str, ...] = ()


class _Lost(Exception):
    """The connection broke before the reply: nobody knows whether the request was taken."""


class Client:
    """A connection to the daemon, opened at the first call.

    `socket_path` None looks where the commands look: GPUSCHED_SOCKET, this user's own daemon,
    the system's. A call whose reply takes longer than `timeout_s` raises Unavailable; `wait` has
    its own time-out. When the daemon goes away during a call, or between two, the call is tried
    again for `reconnect_s`; this is safe, since submissions carry an id and all else but a signal
    can be repeated. The first connection of all is not waited for.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = REPLY_TIMEOUT_S,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        self._given_path = None if socket_path is None else Path(socket_path)
        self._timeout_s, self._reconnect_s = timeout_s, reconnect_s
        self._wire: _Connection | None = None
        self._was_connected = False

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a later call opens a new one."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    # ------------------------------------------------------------------------------ methods

    def hello(self) -> protocol.HelloResult:
        """Who the daemon is, and who it takes this process for."""
        return self._call("hello", protocol.Hello(), protocol.HelloResult)

    def submit(
        self,
        argv: Sequence[Word] | None = None,
        *,
        shell: str | bytes | None = None,
        script: str | bytes | None = None,
        args: Sequence[Word] = (),
        gpus: int = 1,
        vram: str | int | None = None,
        gpu_model: str | None = None,
        exclusive: bool = False,
        topology: str | None = None,
        memory: str | int | None = None,
        cpus: int | None = None,
        time_limit: str | int | None = None,
        name: str | None = None,
        nice: int = 0,
        output: Word | None = None,
        error: Word | None = None,
        hold: bool = False,
        retries: int = 0,
        cwd: Word | None = None,
        environment: Mapping[str, str] | Mapping[bytes, bytes] | None = None,
        submission_id: str | None = None,
    ) -> SubmittedJob:
        """Submit one job that runs as this process would; see capture.job_request.

        The job is stored durably when this returns. `submission_id` (default: a random one) makes
        it safe to submit again after a doubt: the same id gives the same job.
        """
        request = job_request(
            argv,
            shell=shell,
            script=script,
            args=args,
            gpus=gpus,
            vram=vram,
            gpu_model=gpu_model,
            exclusive=exclusive,
            topology=topology,
            memory=memory,
            cpus=cpus,
            time_limit=time_limit,
            name=name,
            nice=nice,
            output=output,
            error=error,
            hold=hold,
            retries=retries,
            cwd=cwd,
            environment=environment,
        )
        return self.submit_many([request], submission_id=submission_id)[0]

    def submit_many(
        self, jobs: Iterable[JobRequest], *, submission_id: str | None = None
    ) -> list[SubmittedJob]:
        """Submit all of the jobs or none, at most SUBMIT_JOBS_MAX; the result is in their order."""
        result = self.submit_request(protocol.SubmitRequest(tuple(jobs), submission_id))
        limits: Sequence[int | None] = result.time_limits_s or (None,) * len(result.job_ids)
        return [
            SubmittedJob(job_id, limit_s, result.warnings)
            for job_id, limit_s in zip(result.job_ids, limits, strict=True)
        ]

    def submit_request(self, request: protocol.SubmitRequest) -> protocol.SubmitResult:
        """Send a submission as it is, with a submission_id where it has none."""
        if request.submission_id is None and not request.dry_run:
            request = protocol.SubmitRequest(request.jobs, new_submission_id())
        return self._call("submit", request, protocol.SubmitResult)

    def jobs(
        self,
        ids: Iterable[int] | None = None,
        *,
        users: Iterable[str] | None = None,
        states: Iterable[JobState | str] | None = None,
        name: str | None = None,
        ended_within_s: int | None = None,
        limit: int = protocol.RESPONSE_JOBS_MAX,
        before_id: int | None = None,
    ) -> protocol.JobsResult:
        """Jobs that pass all given filters, newest last; `total` counts those left out too.

        States as `gq --state` takes them: "RUNNING", "PD", "live", "final"; Invalid for others.
        """
        request = protocol.JobsRequest(
            ids=None if ids is None else tuple(ids),
            users=None if users is None else tuple(users),
            states=None if states is None else _states(states),
            name=name,
            ended_within_s=ended_within_s,
            limit=limit,
            before_id=before_id,
        )
        return self._call("jobs", request, protocol.JobsResult)

    def queue(
        self, *, limit: int = protocol.RESPONSE_JOBS_MAX, after: int | None = None
    ) -> protocol.QueueResult:
        """Pending jobs in the order in which they are considered."""
        return self._call("queue", protocol.QueueRequest(limit, after), protocol.QueueResult)

    def job(self, job_id: int) -> JobView:
        """Everything about one job; NotFound where there is none."""
        return self._call("job", protocol.JobQuery(job_id), JobView)

    def cancel(
        self,
        job_ids: int | Iterable[int],
        *,
        signal: int | None = None,
        reason: str | None = None,
    ) -> tuple[protocol.Outcome, ...]:
        """End jobs, queued or running, or send running ones a signal; one outcome per id."""
        request = protocol.CancelRequest(_ids(job_ids), signal, reason)
        result = self._call("cancel", request, protocol.CancelResult, repeatable=signal is None)
        return result.outcomes

    def update(
        self,
        job_ids: int | Iterable[int],
        *,
        time_limit: str | int | None = None,
        nice: int | None = None,
        name: str | None = None,
        hold: bool | None = None,
        vram: str | int | None = None,
    ) -> tuple[protocol.Outcome, ...]:
        """Change what is given (time_limit, vram as in submit), leave the rest; outcomes per id."""
        limit_s = _limit_on_wire(time_limit)
        vram_bytes = parse_bytes(vram) if isinstance(vram, str) else vram
        request = protocol.UpdateRequest(_ids(job_ids), limit_s, nice, name, hold, vram_bytes)
        return self._call("update", request, protocol.UpdateResult).outcomes

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
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        reply_s = None if timeout_s is None else timeout_s + self._timeout_s

        def request() -> protocol.WaitRequest:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            return protocol.WaitRequest(_ids(job_ids), left_s)

        result = self._call("wait", request, protocol.WaitResult, reply_timeout_s=reply_s)
        if result.timed_out:
            open_ids = [job.job_id for job in result.jobs if job.state.is_live]
            shown = ", ".join(map(str, open_ids[:10])) + (", ..." if len(open_ids) > 10 else "")
            named = f"job {shown} is" if len(open_ids) == 1 else f"jobs {shown} are"
            raise StillRunning(f"{named} not final after {timeout_s} s", {"job_ids": open_ids})
        return result.jobs[0] if isinstance(job_ids, int) else result.jobs

    def watch(self, since: int | None = None) -> Iterator[protocol.Event]:
        """Events as they happen, over a connection of its own; `since` is the last id seen.

        It goes on after a restart of the daemon. Ends with Unavailable when that stays away.
        """
        while True:
            wire = self._connected(self._deadline())
            self._wire = None  # from here on it is the watch's alone; other calls open another
            try:
                result = wire.call("watch", protocol.WatchRequest(since), self._timeout_s)
                if since is None:
                    since = protocol.WatchResult.from_wire(result).last_event_id
                for notification in wire.notifications():
                    if notification.method == protocol.EVENT_METHOD:
                        event = protocol.Event.from_wire(notification.params)
                        since = event.event_id
                        yield event
            except _Lost:
                time.sleep(_PAUSE_S)
            finally:
                wire.close()

    def gpus(self) -> tuple[protocol.GpuView, ...]:
        """The state of each GPU."""
        return self.gpus_result().gpus

    def gpus_result(self) -> protocol.GpusResult:
        """The same, with the reason where they cannot be looked at."""
        return self._call("gpus", protocol.GpusRequest(), protocol.GpusResult)

    def gpus_release(self, reason: str) -> protocol.GpusResult:
        """Have the daemon let go of the driver; nothing is placed until gpus_resume. Admin only."""
        request = protocol.GpusReleaseRequest(reason)
        return self._call("gpus_release", request, protocol.GpusResult)

    def gpus_resume(self) -> protocol.GpusResult:
        """Have the daemon open the driver again. Admin only."""
        return self._call("gpus_resume", protocol.GpusResumeRequest(), protocol.GpusResult)

    def usage(self) -> tuple[protocol.UsageView, ...]:
        """Decayed usage, share and fair-share factor of each user."""
        return self._call("usage", protocol.UsageRequest(), protocol.UsageResult).users

    def stats(self) -> Mapping[str, Any]:
        """The daemon's counters."""
        return self._call("stats", protocol.StatsRequest(), protocol.StatsResult).counters

    def drain(self, gpu: str | int, reason: str) -> protocol.GpuView:
        """Take a GPU (index or UUID) out of service once its jobs are gone. Admin only."""
        request = protocol.DrainRequest(str(gpu), reason)
        return self._call("drain", request, protocol.DrainResult).gpu

    def resume(self, gpu: str | int) -> protocol.GpuView:
        """Put a GPU back into service. Admin only."""
        return self._call("resume", protocol.ResumeRequest(str(gpu)), protocol.ResumeResult).gpu

    def reload(self) -> tuple[str, ...]:
        """Have the daemon read its configuration again; the keys that changed. Admin only."""
        return self._call("reload", protocol.ReloadRequest(), protocol.ReloadResult).changed

    def top(self, job_id: int) -> protocol.Outcome:
        """Put a waiting job first: before your own others, or as an admin before all."""
        return self._call("top", protocol.TopRequest(job_id), protocol.TopResult).outcome

    def status(self) -> protocol.StatusResult:
        """The daemon's health."""
        return self._call("status", protocol.StatusRequest(), protocol.StatusResult)

    def backup(self) -> Iterator[bytes]:
        """A consistent copy of the database, piece by piece, made while the daemon runs.

        For root alone (in user mode for the daemon's owner): it holds the environments of waiting
        jobs. Unavailable where the connection is lost in between: begin again.
        """
        request = protocol.BackupRequest()
        while True:
            piece = self._call("backup", request, protocol.BackupResult, repeatable=False)
            yield piece.data
            offset = piece.offset + len(piece.data)
            if offset >= piece.size_bytes:
                return
            request = protocol.BackupRequest(piece.backup_id, offset)

    # ------------------------------------------------------------------------- the one call

    def _call(
        self,
        method: str,
        request: protocol.Request | Callable[[], protocol.Request],
        result_type: type[R],
        *,
        reply_timeout_s: float | None = -1.0,
        repeatable: bool = True,
    ) -> R:
        """One request and its reply, tried again over a new connection when this one is lost.

        `request` may be a function, for what depends on the time of each try.
        """
        timeout_s = self._timeout_s if reply_timeout_s == -1.0 else reply_timeout_s
        deadline = self._deadline()
        while True:
            wire = self._connected(deadline)
            asked_at_s = time.monotonic()
            try:
                result = wire.call(method, request() if callable(request) else request, timeout_s)
                return _typed(result_type, result)
            except (_Lost, Unavailable) as error:
                self.close()
                now_s = time.monotonic()
                if deadline is None or now_s - asked_at_s > self._reconnect_s:
                    deadline = now_s + self._reconnect_s
                if not repeatable or isinstance(error, _TooLate) or now_s >= deadline:
                    raise _as_unavailable(error, method) from error
                time.sleep(_PAUSE_S)
            except GpuschedError:
                raise
            except BaseException:
                self.close()  # a reply may be half read
                raise

    def _deadline(self) -> float | None:
        return time.monotonic() + self._reconnect_s if self._was_connected else None

    def _connected(self, deadline: float | None) -> _Connection:
        pause_s = _PAUSE_S
        if self._wire is not None and self._wire.is_closed_by_peer():
            self.close()  # idle for too long: nothing is lost
        while self._wire is None:
            try:
                self._wire = _connect(self._given_path)
                self._was_connected = True
            except Unavailable:
                if deadline is None or time.monotonic() >= deadline:
                    raise
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        return self._wire


class _TooLate(Unavailable):
    """No reply in time; the daemon may be alive, so it is not asked again."""


def _as_unavailable(error: Exception, method: str) -> Unavailable:
    if isinstance(error, Unavailable):
        return error
    return Unavailable(f"the daemon closed the connection during {method}, and stays away")


def _typed(result_type: type[R], result: object) -> R:
    """The reply as its type. A reply that is none is the daemon's bug, not the caller's mistake."""
    try:
        return result_type.from_wire(result)
    except GpuschedError as error:
        raise Internal(f"the daemon's reply is not understood: {error.message}") from error


def _limit_on_wire(given: str | int | None) -> int | None:
    return protocol.limit_to_wire(parse_duration(given)) if isinstance(given, str) else given


def _states(named: Iterable[JobState | str]) -> tuple[JobState, ...]:
    words = tuple(named)
    return parse_states(",".join(words)) if words else ()


def _ids(job_ids: int | Iterable[int]) -> tuple[int, ...]:
    return (job_ids,) if isinstance(job_ids, int) else tuple(job_ids)


def new_submission_id() -> str:
    """A random id for one submission, the same for each try of it."""
    return os.urandom(16).hex()


# ------------------------------------------------------------------------------- connection


class _Connection:
    """One socket and its decoder; one call at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = framing.Decoder(framing.RESPONSE_LIMITS)
        self._msgid = 0
        self._notifications: list[framing.Notification] = []

    def close(self) -> None:
        self._sock.close()

    def is_closed_by_peer(self) -> bool:
        """True when the server has closed this connection since the last call."""
        try:
            self._sock.settimeout(0)
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _why_silent(self) -> str:
        """What a silent server may suffer from: PID 1 listens also for one that does not start."""
        if self._sock.getpeername() == os.fspath(paths.SYSTEM_SOCKET):
            return (
                "the daemon is busy, stuck, or does not start; `systemctl status gpuschedd` tells "
                "which"
            )
        return "the daemon is busy or stuck. Try again later."

    def call(self, method: str, request: protocol.Request, timeout_s: float | None) -> object:
        """The result of one call; raises its error, _TooLate, or _Lost."""
        self._msgid = (self._msgid + 1) % framing.MSGID_MAX
        data = framing.encode_request(self._msgid, method, request.to_wire())
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._sock.settimeout(timeout_s)
            self._sock.sendall(data)
        except TimeoutError as error:
            raise _TooLate(f"the daemon took no request in {timeout_s:g} s") from error
        except OSError:
            pass  # a server that refuses and closes has said why: read it first
        while True:
            for message in self._receive(deadline, timeout_s):
                if isinstance(message, framing.Response) and message.msgid in (None, self._msgid):
                    if message.error is not None:
                        raise message.error
                    return message.result

    def notifications(self) -> Iterator[framing.Notification]:
        """Notifications, those that came with an earlier reply first; ends by _Lost only."""
        while True:
            pending, self._notifications = self._notifications, []
            yield from pending
            self._receive(None, None)

    def _receive(self, deadline: float | None, timeout_s: float | None) -> list[framing.Incoming]:
        """What comes next; notifications are put aside for notifications()."""
        try:
            self._sock.settimeout(_left_s(deadline))
            data = self._sock.recv(_RECEIVE_BYTES)
        except (TimeoutError, BlockingIOError) as error:
            raise _TooLate(f"no reply in {timeout_s:g} s; {self._why_silent()}") from error
        except OSError as error:
            raise _Lost from error
        if not data:
            raise _Lost
        messages = self._decoder.feed(data)
        for message in messages:
            if isinstance(message, framing.Notification):
                self._notifications.append(message)
            elif isinstance(message, framing.Malformed):
                raise Internal(f"the server does not speak our protocol: {message.error.message}")
        return messages


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.001, deadline - time.monotonic())


def _connect(given: Path | None) -> _Connection:
    """A connection to the first live socket whose server may be trusted."""
    candidates = paths.client_sockets() if given is None else [given]
    refusals: list[tuple[Path, OSError]] = []
    for path in candidates:
        try:
            sock = _open(path)
        except OSError as error:
            refusals.append((path, error))
            continue
        try:
            _check_server(sock, path)
        except BaseException:
            sock.close()
            raise
        return _Connection(sock)
    raise Unavailable(_nobody_there(refusals), {"paths": [str(path) for path, _ in refusals]})


def _open(path: Path) -> socket.socket:
    """A connected socket. A full backlog is a busy daemon, so it is tried for some seconds."""
    if len(os.fsencode(path)) > paths.SOCKET_PATH_BYTES_MAX:
        raise Invalid(
            f"socket path {str(path)!r} is longer than {paths.SOCKET_PATH_BYTES_MAX} bytes; "
            f"name a shorter one with {paths.SOCKET_ENV}"
        )
    deadline = time.monotonic() + BACKLOG_RETRY_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(0)  # a blocking connect to a full backlog has no time-out
            sock.connect(os.fspath(path))
        except OSError as error:
            sock.close()
            if error.errno != errno.EAGAIN or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)
        else:
            return sock


def _check_server(sock: socket.socket, path: Path) -> None:
    """Refuse a server that is neither root nor this user: it would get our environment."""
    size = struct.calcsize("3i")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    uid = struct.unpack("iII", credentials)[1]
    if uid not in (0, os.geteuid()) and not _may_be_hidden_root(uid, path):
        raise Denied(
            f"the server at {path} runs as uid {uid}, which is neither root nor you; not used",
            {"uid": uid},
        )


def _may_be_hidden_root(uid: int, path: Path, uid_map: str | None = None) -> bool:
    """Whether the server is the host's root, as a user namespace without root in its map shows it.

    Only at the system's own place, in a directory that is nobody's here and that we cannot change:
    on the host only root can have made it.
    """
    if uid != _OVERFLOW_UID or path != paths.SYSTEM_SOCKET:
        return False
    mapped = Path("/proc/self/uid_map").read_text() if uid_map is None else uid_map
    for line in mapped.splitlines():
        first, count = map(int, line.split()[1:3])
        if first <= 0 < first + count:
            return False
    place = path.parent
    return place.stat().st_uid == _OVERFLOW_UID and not os.access(place, os.W_OK)


def _nobody_there(refusals: list[tuple[Path, OSError]]) -> str:
    tried = "; ".join(
        f"{path}: {(error.strerror or str(error)).lower()}" for path, error in refusals
    )
    return (
        f"no gpuschedd is reachable ({tried}). Start your own with `gpuschedd` "
        "(without GPUs: `gpuschedd --simulate 4x24G`), have an administrator start the system's "
        f"with `systemctl start gpuschedd.socket`, or name another with {paths.SOCKET_ENV}."
    )
