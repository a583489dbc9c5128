"""Launch through PID 1: each attempt is a transient service, started by systemd-run.

The daemon needs no capability for it and no child of its own runs anything of a user's. Nothing of
the user's goes on the command line: PID 1 expands `$` there, and anyone may read a transient unit.
All calls block, for as long as PID 1 takes; they belong in a thread.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from gpuschedd.core.attempt import Claim, StartedRecord
from gpuschedd.run.job_dir import JobDir, is_claim_alive
from gpuschedd.run.launchers.direct import (
    KILL_DEADLINE_S,
    KILL_ROUND_S,
    NO_BOUNDS,
    REASON_BYTES_MAX,
    SUPERVISOR,
    Bounds,
    DirectLauncher,
    LaunchDeferred,
    LaunchFailed,
    spawn,
)
from gpuschedd.supervisor.errors import EXIT_NO_PROGRAM, EXIT_UNAVAILABLE, SHORT_ERRNOS
from gpuschedd.supervisor.procfs import pids, process_stat

log = logging.getLogger(__name__)

SLICE = "gpusched.slice"
PROC = Path("/proc")
PID1_DEADLINE_S = 20.0  # it answers in a few hundredths of a second; reloads may take some
RESTART_S = 3  # between two tries of PID 1's; it gives up at five in 10 s
STOP_MARGIN_S = 30  # equal to the grace, PID 1's KILL would race with the exit record
_DEVICE_COMPLAINT = re.compile(r"Device(Allow|Policy)|device (node|policy)", re.IGNORECASE)
_UNIT = re.compile(rb"gpusched-job-\d+-\d+\.service")


def unit_of(job_id: int, attempt: int) -> str:
    """The unit's name without its ending. PID 1 refuses a second live one of the same name."""
    return f"gpusched-job-{job_id}-{attempt}"


class SystemdLauncher(DirectLauncher):
    """Supervisors as transient services; found again and woken as any other process of ours."""

    filters_devices: ClassVar[bool] = True

    def __init__(
        self,
        python: str = sys.executable,
        program: str = SUPERVISOR,
        run: str = "systemd-run",
        control: str = "systemctl",
    ) -> None:
        super().__init__(python, program)
        self._program = (python, program)
        self._run, self._control = run, control
        self._warned: set[str] = set()

    def launch(self, job_dir: JobDir, bounds: Bounds = NO_BOUNDS) -> None:
        """Returns once PID 1 has executed the supervisor; the claim comes a moment later."""
        self._require_program()
        properties = [word for line in self._properties(bounds) for word in ("-p", line)]
        unit = unit_of(job_dir.job_id, job_dir.attempt)
        command = [
            *(self._run, "--quiet", "--collect", "--no-ask-password", f"--slice={SLICE}"),
            *(f"--unit={unit}", f"--description=gpusched job {job_dir.job_id}", *properties),
            *("--", *self._supervisor, os.fspath(job_dir.path)),
        ]
        answer = _ask_pid1(command)
        if answer.status != 0:
            self._require_program()
            if _DEVICE_COMPLAINT.search(answer.complaint):
                raise LaunchDeferred(f"no device filter can be set: {answer.complaint}")
            raise LaunchFailed(answer.complaint or f"systemd-run ended with status {answer.status}")

    def _require_program(self) -> None:
        """Raises LaunchDeferred where PID 1 would find nothing to execute."""
        for path in self._program:
            if not os.path.exists(path):
                raise LaunchDeferred(f"{path} does not exist")

    def lacked_program(self, job_id: int, attempt: int) -> bool:
        """By PID 1's count of restarts, of which there are no others."""
        unit = unit_of(job_id, attempt) + ".service"
        try:
            answer = _ask_pid1([self._control, "show", "--property=NRestarts", "--value", unit])
        except LaunchFailed:
            return False
        return answer.text.isdecimal() and int(answer.text) > 0

    def _properties(self, bounds: Bounds) -> Iterator[str]:
        yield "Type=exec"  # so that a supervisor that cannot be executed is an error here
        yield "KillMode=mixed"
        yield f"TimeoutStopSec={math.ceil(bounds.grace_s) + STOP_MARGIN_S}"
        # An upgrade that took its files away gives them back; PID 1 alone hears of such an end.
        yield f"RestartForceExitStatus={EXIT_NO_PROGRAM} {EXIT_UNAVAILABLE}"
        yield f"RestartSec={RESTART_S}"
        yield "OOMPolicy=continue"
        yield "UMask=0077"
        if bounds.memory_bytes is not None:
            yield f"MemoryMax={bounds.memory_bytes}"
        if bounds.cpus is not None:
            yield f"CPUQuota={math.ceil(100 * bounds.cpus)}%"
        if bounds.tasks_max is not None:
            yield f"TasksMax={bounds.tasks_max}"
        yield from self._device_properties(bounds)

    def _device_properties(self, bounds: Bounds) -> Iterator[str]:
        if bounds.devices.allowed is None:
            self._warn_once(bounds.devices.why_open)
            return
        yield "DevicePolicy=closed"
        for value in bounds.devices.allowed:
            yield f"DeviceAllow={value}"

    def _warn_once(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log.warning("no_device_filter text=%s: jobs start without device filter", what)

    def stop(self, claim: Claim) -> None:
        """TERM, and after TimeoutStopSec KILL for all of the unit; PID 1 sees to it."""
        unit = _unit_of_process(claim)
        if unit is None or _ask_pid1_quietly([self._control, "--no-block", "stop", unit]):
            super().stop(claim)

    def leftovers(
        self, job_id: int, attempt: int, instance: str, uid: int, started: StartedRecord | None
    ) -> tuple[int, ...]:
        """The processes in the unit's cgroup, whichever user they became and whatever they left."""
        del instance, uid, started
        return _members(unit_of(job_id, attempt) + ".service")

    def kill_leftovers(
        self, job_id: int, attempt: int, instance: str, uid: int, started: StartedRecord | None
    ) -> tuple[int, ...]:
        """PID 1 kills what a dead supervisor leaves by itself; this asks it to, and looks."""
        unit = unit_of(job_id, attempt)
        deadline_s = time.monotonic() + KILL_DEADLINE_S
        while left := self.leftovers(job_id, attempt, instance, uid, started):
            _ask_pid1_quietly([self._control, "kill", "--signal=KILL", unit + ".service"])
            if time.monotonic() > deadline_s:
                break
            time.sleep(KILL_ROUND_S)
        return left


class Answer(NamedTuple):
    """How a command that talks to PID 1 ended, and what it said."""

    status: int
    text: str
    complaint: str


def _ask_pid1(command: Sequence[str]) -> Answer:
    """Raises LaunchFailed or one of its kinds where there is no answer."""
    with spawn(command) as process:
        try:
            said = process.communicate(timeout=PID1_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            raise LaunchDeferred(f"PID 1 did not answer in {PID1_DEADLINE_S:.0f} s") from None
    text, complaint = (raw[-REASON_BYTES_MAX:].decode("utf-8", "replace").strip() for raw in said)
    return Answer(process.returncode, text, complaint)


def _ask_pid1_quietly(command: Sequence[str]) -> int:
    """The status; 1 where PID 1 could not be asked."""
    try:
        return _ask_pid1(command).status
    except LaunchFailed:
        return 1


def _unit_of_process(claim: Claim) -> str | None:
    """The job unit that the claim's live process belongs to."""
    try:
        found = _UNIT.search(Path(f"/proc/{claim.pid}/cgroup").read_bytes())
    except OSError:
        return None
    if found is None or not is_claim_alive(claim):
        return None
    return found[0].decode()


def _members(unit: str) -> tuple[int, ...]:
    """Live processes in the unit's cgroup, those of its sub-groups included; () where it is gone.

    Read from /proc: no mount of cgroups need be seen, and a process cannot leave by changing uid.
    From PID 1's own root on: a user's service manager can make units of the same name below it.
    """
    roots = {
        tree: group.removesuffix(b"/init.scope").rstrip(b"/")
        for tree, group in _groups_of(1).items()
    }
    place = f"/{SLICE}/{unit}/".encode()
    return tuple(pid for pid in pids() if _is_below(pid, roots, place) and _lives(pid))


def _is_below(pid: int, roots: Mapping[bytes, bytes], place: bytes) -> bool:
    groups = _groups_of(pid).items()
    return any((group + b"/").startswith(roots.get(tree, b"") + place) for tree, group in groups)


def _groups_of(pid: int) -> dict[bytes, bytes]:
    """Where PID 1 keeps a process, in the trees that are its own: version 2, or its named one."""
    try:
        lines = (PROC / str(pid) / "cgroup").read_bytes().splitlines()
    except OSError as error:
        if error.errno in SHORT_ERRNOS:
            raise  # what cannot be seen is not gone
        return {}
    rows = (line.split(b":", 2) for line in lines)
    return {row[1]: row[2] for row in rows if row[1] in (b"", b"name=systemd")}


def _lives(pid: int) -> bool:
    found = process_stat(pid)
    return found is not None and found.alive
