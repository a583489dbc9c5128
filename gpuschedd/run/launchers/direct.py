"""The launcher: the only owner of processes. Starts supervisors, finds them again, wakes and ends.

It must not change job state, read the database or interpret records beyond the claim and `started`;
it decides nothing. All calls block and belong in a thread. A process is signalled only through a
pidfd, after a second look has proved whom the pidfd pins.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from gpuschedd import supervisor
from gpuschedd.core.attempt import Claim, StartedRecord
from gpuschedd.gpu.source import DeviceAccess
from gpuschedd.run.job_dir import JobDir, is_claim_alive
from gpuschedd.supervisor import procfs
from gpuschedd.supervisor.errors import (
    EXIT_NO_PROGRAM,
    EXIT_OK,
    EXIT_STORAGE,
    EXIT_UNAVAILABLE,
    SHORT_ERRNOS,
    STORAGE_ERRNOS,
)

LAUNCH_DEADLINE_S = 20.0  # from the start of the interpreter to the claim: fsyncs on a slow disk
NO_CLAIM = f"no claim after {LAUNCH_DEADLINE_S:.0f} s"
REASON_BYTES_MAX = 2000
KILL_DEADLINE_S = 2.0
KILL_ROUND_S = 0.02
# No room for another process, or a program that an upgrade is just replacing.
_DEFERRING_ERRNOS = SHORT_ERRNOS | {
    *(errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC, errno.ETXTBSY)
}
#: Run by its path, so that no environment and no other package plays a part.
SUPERVISOR = os.fspath(Path(supervisor.__file__).with_name("__main__.py"))
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


UNFILTERED = DeviceAccess(None, "this way of launching filters no devices")


class LaunchFailed(Exception):
    """The supervisor did not get to run the job. Whether it holds the claim says the directory."""


class LaunchStorage(LaunchFailed):
    """The disk did not take what a start needs: the host's fault, not the job's."""


class LaunchDeferred(LaunchFailed):
    """The host's fault, so it counts for nothing against the job.

    PID 1 did not answer in time; or the supervisor's files or their interpreter are not there or
    not whole, as in the middle of an upgrade.
    """


class AccountGone(LaunchFailed):
    """The job's user name no longer maps to its uid; an admin must decide."""


def is_host_short(error: Exception) -> bool:
    """Whether the host lacks processes, threads, memory or descriptors: no fault of the job's."""
    if isinstance(error, OSError):
        return error.errno in SHORT_ERRNOS
    return isinstance(error, MemoryError) or "start new thread" in str(error)


class PlaceAway(LaunchFailed):
    """Something that the job needs is not there for now; `place` says what."""

    def __init__(self, place: str, fault: str) -> None:
        super().__init__(fault)
        self.place = place


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
    processes that outlive a dead supervisor. `close`: launch no more; what runs lives on.
    """

    filters_devices: ClassVar[bool]

    def warm_up(self) -> None:
        """Make ready what the first launch would wait for. May be left out."""

    def close(self) -> None:
        """Give back what launches use, once none is under way."""

    def launch(self, job_dir: JobDir, bounds: Bounds = NO_BOUNDS) -> None:
        """Start the supervisor of this directory. Raises LaunchFailed or one of its kinds."""

    def lacked_program(self, job_id: int, attempt: int) -> bool:
        """Whether a launched supervisor did not run because its files were missing or not whole.

        Asked where no claim came: it is the host's fault then.
        """

    def attach(self, claim: Claim) -> int | None:
        """A pidfd of the live supervisor that took the claim, None when it is dead.

        The pidfd becomes readable when the supervisor ends; the caller closes it.
        """

    def wake(self, pidfd: int) -> None:
        """Make the supervisor go on and read its orders. Nothing happens when it is gone."""

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

    def __init__(self, python: str = sys.executable, program: str = SUPERVISOR) -> None:
        self._supervisor = [python, "-I", "-S", program]

    def warm_up(self) -> None:
        """There is nothing that could be made ready."""

    def close(self) -> None:
        """There is nothing to give back."""

    def launch(self, job_dir: JobDir, bounds: Bounds = NO_BOUNDS) -> None:
        del bounds  # nobody but PID 1 can hold a job to them
        with spawn([*self._supervisor, "--detach", os.fspath(job_dir.path)]) as process:
            _wait_for_claim(process)

    def lacked_program(self, job_id: int, attempt: int) -> bool:
        del job_id, attempt
        return False  # the launch itself has said so

    def attach(self, claim: Claim) -> int | None:
        if claim.by != "supervisor" or not is_claim_alive(claim):
            return None
        try:
            pidfd = os.pidfd_open(claim.pid)
        except ProcessLookupError:
            return None
        # The pid may have gone to another process between the look and the open.
        if is_claim_alive(claim):
            return pidfd
        os.close(pidfd)
        return None

    def wake(self, pidfd: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            for signum in (signal.SIGUSR1, signal.SIGCONT):
                signal.pidfd_send_signal(pidfd, signum)

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
        return tuple(pid for pid in procfs.pids() if marks.match(pid) is not None)

    def kill_leftovers(
        self, job_id: int, attempt: int, instance: str, uid: int, started: StartedRecord | None
    ) -> tuple[int, ...]:
        deadline_s = time.monotonic() + KILL_DEADLINE_S
        while True:
            marks = _Marks(job_id, attempt, instance, uid, started)
            pidfds = {pid: pidfd for pid in procfs.pids() if (pidfd := marks.kill(pid)) is not None}
            _wait_and_close(pidfds.values())
            if not pidfds or time.monotonic() > deadline_s:
                return tuple(pid for pid in pidfds if marks.match(pid) is not None)


def spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that is told nothing but its words, with its answers to read.

    Raises LaunchStorage, LaunchDeferred or LaunchFailed, by whose fault it is that there is none.
    """
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        kind = LaunchFailed
        if error.errno in STORAGE_ERRNOS:
            kind = LaunchStorage
        elif error.errno in _DEFERRING_ERRNOS:
            kind = LaunchDeferred
        raise kind(f"cannot start {command[0]}: {error}") from error


def _wait_for_claim(process: subprocess.Popen[bytes]) -> None:
    """Wait for the claim. Raises what the exit status stands for."""
    try:
        _, said = process.communicate(timeout=LAUNCH_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise LaunchFailed(NO_CLAIM) from None
    raise_for(process.returncode, said)


def raise_for(status: int, said: bytes) -> None:
    """The exception that a supervisor's exit status stands for, with what it said of it."""
    if status == EXIT_OK:
        return
    text = said[-REASON_BYTES_MAX:].decode("utf-8", "replace").strip()
    reason = text or f"the supervisor ended with status {status}"
    if status == EXIT_STORAGE:
        raise LaunchStorage(reason)
    if status in (EXIT_NO_PROGRAM, EXIT_UNAVAILABLE):
        raise LaunchDeferred(reason)
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
        found = procfs.process_stat(pid)
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
        except ProcessLookupError:
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
    other start ticks is another process that got the number after the job was gone.
    """
    if started is None or started.boot_id != procfs.boot_id():
        return None
    leader = procfs.process_stat(started.session)
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
    threads: list[str] = []
    with _unless_short():
        threads = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    for thread in threads:
        with _unless_short():
            if found := Path(f"/proc/{pid}/task/{thread}/environ").read_bytes():
                return set(found.split(b"\0"))
    return set()


@contextlib.contextmanager
def _unless_short() -> Iterator[None]:
    """Go on where a process hides something; but what we have no means to see is not gone."""
    try:
        yield
    except OSError as error:
        if error.errno in SHORT_ERRNOS:
            raise


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
