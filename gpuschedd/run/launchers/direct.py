"""The launcher: the only owner of processes. Starts supervisors, finds them again, wakes and ends.

It must not change job state, read the database or interpret records beyond the claim and `started`;
it decides nothing. All calls block and belong in a thread. A process is signalled only through a
pidfd, after a second look has proved whom the pidfd pins.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from gpuschedd import supervisor
from gpuschedd.core.attempt import Claim, StartedRecord
from gpuschedd.gpu.source import DeviceAccess
from gpuschedd.run.job_dir import JobDir, is_claim_alive

LAUNCH_DEADLINE_S = 20.0  # from the start of the interpreter to the claim: fsyncs on a slow disk
REASON_BYTES_MAX = 2000
KILL_DEADLINE_S = 2.0
KILL_ROUND_S = 0.02
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


UNFILTERED = DeviceAccess(None, "this way of launching filters no devices")


class LaunchFailed(Exception):
    """The supervisor did not get to run the job. Whether it holds the claim says the directory."""


class LaunchStorage(LaunchFailed):
    """The disk did not take what a start needs: the host's fault, not the job's."""


class LaunchDeferred(LaunchFailed):
    """PID 1 did not answer in time: the host's fault, so it counts for nothing against the job."""


class AccountGone(LaunchFailed):
    """Name and uid of the job belong together no more: it must wait for a person."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the attempt's unit is held to. Direct launch cannot, and passes it over.

    None: no bound. `cpus` is in CPUs' worth of time. `grace_s` is what the supervisor takes to end
    a job.
    """

    devices: DeviceAccess = UNFILTERED
    memory_bytes: int | None = None
    cpus: float | None = None
    tasks_max: int | None = None
    grace_s: float = 10.0


NO_BOUNDS = Bounds()


class Launcher(Protocol):
    """What the controller needs of whatever starts supervisors.

    `filters_devices`: it can keep a job from other GPUs than its own. `launch` returns when the
    supervisor holds the claim (direct) or was started (through PID 1). `leftovers` are the job's
    processes that outlive a dead supervisor.
    """

    filters_devices: ClassVar[bool]

    def launch(self, job_dir: JobDir, bounds: Bounds = NO_BOUNDS) -> None:
        """Start the supervisor of this directory. Raises LaunchFailed or one of its kinds."""

    def attach(self, claim: Claim) -> int | None:
        """A pidfd of the live supervisor that took the claim, None when it is dead.

        The pidfd becomes readable when the supervisor ends; the caller closes it.
        """

    def wake(self, pidfd: int) -> None:
        """Make the supervisor read its orders. Nothing happens when it is gone."""

    def stop(self, claim: Claim) -> None:
        """End a supervisor that does not obey its orders; its processes are then leftovers."""

    def leftovers(
        self, job_id: int, attempt: int, instance: str, uid: int, started: StartedRecord | None
    ) -> tuple[int, ...]:
        """Pids of the attempt's processes. Meant for a dead supervisor; a live one is not in it."""

    def kill_leftovers(
        self, job_id: int, attempt: int, instance: str, uid: int, started: StartedRecord | None
    ) -> tuple[int, ...]:
        """KILL them, again while new ones show up; returns those that live after 2 s."""


class DirectLauncher:
    """Supervisors as processes of their own, outliving the daemon; no systemd needed.

    The process that is started forks the supervisor, waits for its claim and ends: the daemon has
    no child to reap, and the exit status and stderr say what went wrong.
    """

    filters_devices: ClassVar[bool] = False

    def __init__(self, python: str = sys.executable) -> None:
        self._command = [python, "-I", "-S", supervisor.__file__, "--detach"]

    def launch(self, job_dir: JobDir, bounds: Bounds = NO_BOUNDS) -> None:
        del bounds  # nobody but PID 1 can hold a job to them
        try:
            process = subprocess.Popen(
                [*self._command, os.fspath(job_dir.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            kind = LaunchStorage if error.errno in supervisor.STORAGE_ERRNOS else LaunchFailed
            raise kind(f"cannot start a process: {error}") from error
        with process:
            _raise_for(process)

    def attach(self, claim: Claim) -> int | None:
        if claim.by != "supervisor" or not is_claim_alive(claim):
            return None
        try:
            pidfd = os.pidfd_open(claim.pid)
        except ProcessLookupError:
            return None
        # The pid may have gone to a stranger between the look and the open.
        if is_claim_alive(claim):
            return pidfd
        os.close(pidfd)
        return None

    def wake(self, pidfd: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGUSR1)

    def stop(self, claim: Claim) -> None:
        pidfd = self.attach(claim)
        if pidfd is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)

    def leftovers(
        self, job_id: int, attempt: int, instance: str, uid: int, started: StartedRecord | None
    ) -> tuple[int, ...]:
        marks = _Marks(job_id, attempt, instance, uid, started)
        return tuple(pid for pid in supervisor.pids() if marks.match(pid) is not None)

    def kill_leftovers(
        self, job_id: int, attempt: int, instance: str, uid: int, started: StartedRecord | None
    ) -> tuple[int, ...]:
        deadline_s = time.monotonic() + KILL_DEADLINE_S
        while True:
            marks = _Marks(job_id, attempt, instance, uid, started)
            pidfds = {
                pid: pidfd for pid in supervisor.pids() if (pidfd := marks.kill(pid)) is not None
            }
            _wait_and_close(pidfds.values())
            if not pidfds or time.monotonic() > deadline_s:
                return tuple(pid for pid in pidfds if marks.match(pid) is not None)


def _raise_for(process: subprocess.Popen[bytes]) -> None:
    """Wait for the claim; the exception that its exit status stands for."""
    try:
        _, said = process.communicate(timeout=LAUNCH_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise LaunchFailed(f"no claim after {LAUNCH_DEADLINE_S:.0f} s") from None
    if process.returncode == supervisor.EXIT_OK:
        return
    text = said[-REASON_BYTES_MAX:].decode("utf-8", "replace").strip()
    reason = text or f"the supervisor ended with status {process.returncode}"
    if process.returncode == supervisor.EXIT_STORAGE:
        raise LaunchStorage(reason)
    raise LaunchFailed(reason)


class _Marks:
    """How the processes of one attempt are known: uid, and environment or session."""

    def __init__(
        self, job_id: int, attempt: int, instance: str, uid: int, started: StartedRecord | None
    ) -> None:
        self._uid = uid
        self._variables = {
            f"GPUSCHED_JOB_ID={job_id}".encode(),
            f"GPUSCHED_ATTEMPT={attempt}".encode(),
            f"GPUSCHED_INSTANCE={instance}".encode(),
        }
        self._session = _session_of(started)

    def match(self, pid: int) -> int | None:
        """The start ticks of a live process of the attempt, None of any other."""
        found = supervisor.process_stat(pid)
        if found is None or not found.alive or self._uid not in _uids(pid):
            return None
        if found.session == self._session or self._variables <= _environment(pid):
            return found.start_ticks
        return None

    def kill(self, pid: int) -> int | None:
        """KILL the process if it is the attempt's; its pidfd, which the caller closes."""
        if self.match(pid) is None:
            return None
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
        if self.match(pid) is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return pidfd
        os.close(pidfd)
        return None


def _session_of(started: StartedRecord | None) -> int | None:
    """The recorded session where its number still is the job's.

    While any process of a session lives, the kernel gives its number to nobody else. A leader with
    other start ticks is a stranger who got the number after the job was gone.
    """
    if started is None or started.boot_id != supervisor.boot_id():
        return None
    leader = supervisor.process_stat(started.session)
    if leader is not None and leader.start_ticks != started.start_ticks:
        return None
    return started.session


def _uids(pid: int) -> tuple[int, ...]:
    """Real, effective, saved and file-system uid; empty where the process is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"Uid:"):
                    return tuple(int(uid) for uid in line.split()[1:])
    except (FileNotFoundError, ProcessLookupError):
        pass
    return ()


def _environment(pid: int) -> set[bytes]:
    """Empty where it cannot be read: another's, or a process that hides its memory.

    Any thread has it; one that has ended, as the first may have, has none.
    """
    try:
        threads = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except OSError:
        return set()
    for thread in threads:
        with contextlib.suppress(OSError):
            if found := Path(f"/proc/{pid}/task/{thread}/environ").read_bytes():
                return set(found.split(b"\0"))
    return set()


def _wait_and_close(pidfds: Iterable[int]) -> None:
    """Give the killed a moment to go; they are looked for again anyway."""
    poll = select.poll()
    held = list(pidfds)
    for pidfd in held:
        poll.register(pidfd, select.POLLIN)
    if held:
        poll.poll(1000 * KILL_ROUND_S)
    for pidfd in held:
        os.close(pidfd)
