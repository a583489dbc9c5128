"""The life of one attempt, from the claim to the exit record: what arrives, what ends it, how."""

from __future__ import annotations

import json
import os
import resource
import select
import time

from gpuschedd.supervisor.child import Child
from gpuschedd.supervisor.errors import EXIT_OK, EXIT_STORAGE, complain, reason_of
from gpuschedd.supervisor.helpers import ask_child, host_is_stopping
from gpuschedd.supervisor.oom import has_failed, host_oom_kills, scan_as_user
from gpuschedd.supervisor.processes import (
    KillRounds,
    dead_child,
    has_children,
    live_count,
    numbered_signal,
    signal_all,
)
from gpuschedd.supervisor.procfs import boot_id, process_stat
from gpuschedd.supervisor.records import (
    CAUSE_CANCELLED,
    CAUSE_ENVIRONMENT,
    CAUSE_EXIT,
    CAUSE_SETUP,
    CAUSE_SHUTDOWN,
    CAUSE_SIGNAL,
    CAUSE_STOPPED,
    CAUSE_TIME_LIMIT,
    ENDED,
    EXIT,
    OOM_HOST,
    OOM_UNKNOWN,
    ORDERS,
    REASON_CHARS_MAX,
    STARTED,
    read_record,
)
from gpuschedd.supervisor.spec import Fields
from gpuschedd.supervisor.syscalls import Alarms, boottime_s, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuschedd.supervisor.pam import Pam
    from gpuschedd.supervisor.record_writer import RecordWriter
    from gpuschedd.supervisor.spec import Spec
    from gpuschedd.supervisor.syscalls import SignalQueue

SETUP_DEADLINE_S = 30.0
OOM_SCAN_DEADLINE_S = 5.0
KILL_RETRY_S = 0.5


class Supervisor:
    """From the claim to the exit record. Single-threaded; every wait is in _wait."""

    def __init__(
        self, dir_fd: int, spec: Spec, records: RecordWriter, signals: SignalQueue
    ) -> None:
        self._dir_fd = dir_fd
        self._spec = spec
        self._records = records
        self._signals = signals
        self._alarms = Alarms()
        self._boot_id = boot_id()
        self._oom_kills = host_oom_kills()
        self._limit_s = spec.time_limit_s
        self._kills = KillRounds()
        self._signals_done = 0
        self._signals_due: list[int] = []
        # The child and how far it is: forked, at the gate (started), through the exec.
        self._main: int | None = None
        self._report_fd = -1
        self._gate_fd = -1
        self._report = b""
        self._stage: object = "start"
        self._logs: list[list[int] | None] = []
        self._started_s: float | None = None
        self._executed = False
        # The end.
        self._cause: str | None = None
        self._place: str | None = None
        self._reason: str | None = None
        self._cancel: dict[str, Any] = {}
        self._terminated = False
        self._ended: dict[str, Any] | None = None
        self._abandoned = False

    # -- life

    def run(self, pam: Pam | None, script_path: bytes | None) -> int:
        self._take_signals()
        self._take_orders()
        if self._cause is None:
            self._begin(pam, script_path)
        while not self._is_over():
            self._wait()
            self._take_signals()
            self._take_report()
            self._take_alarms()
            self._reap()
        return self._finish()

    def _is_over(self) -> bool:
        if self._main is None:
            return self._cause is not None
        return self._ended is not None and not has_children()

    def _begin(self, pam: Pam | None, script_path: bytes | None) -> None:
        if self._spec.no_exec:
            self._records.keep_directory()
            self._publish_started(os.getpid(), os.getsid(0))
            return
        opened: list[int] = []
        try:
            opened += os.pipe()
            opened += os.pipe()
            child = Child(self._spec, pam, script_path)
            self._stage = child.stage
            pid = os.fork()
        except OSError as error:
            # Nothing has run, and the same may go well later: a probe looks when.
            complain(f"no process for the job: {error}")
            self._cause, self._place = CAUSE_ENVIRONMENT, "the host"
            self._reason = f"the host: {reason_of(error)}"
            for fd in opened:
                os.close(fd)
            return
        report_fd, child_report_fd, child_gate_fd, gate_fd = opened
        if pid == 0:
            child.run(child_report_fd, child_gate_fd)
        os.close(child_report_fd)
        os.close(child_gate_fd)
        os.set_blocking(report_fd, False)
        self._main, self._report_fd, self._gate_fd = pid, report_fd, gate_fd
        self._alarms.set("setup", boottime_s() + SETUP_DEADLINE_S)
        # Beside the child's set-up, and in any case before its gate.
        try:
            self._records.keep_directory()
        except OSError as error:
            self._give_up(f"the job directory cannot be kept: {error}")

    def _give_up(self, why: str) -> None:
        """Nothing has run: without `started` the daemon starts the job again."""
        complain(why)
        self._abandoned = True
        self._kill_main()

    def _wait(self) -> None:
        poll = select.poll()
        for fd in (self._signals.fd, self._alarms.fd, self._report_fd):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        poll.poll()

    # -- what arrives

    def _take_signals(self) -> None:
        found = self._signals.drain()
        if found & {signal.SIGUSR1, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}:
            self._take_orders()
        if found & {signal.SIGTERM, signal.SIGINT} and self._may_end():
            self._end(CAUSE_STOPPED, "stopped from outside: its supervisor got SIGTERM")
            # Asked after the TERM was passed on: the answer may take its time.
            if host_is_stopping():
                self._cause, self._reason = CAUSE_SHUTDOWN, "the host goes down"

    def _take_orders(self) -> None:
        try:
            record = read_record(self._dir_fd, ORDERS)
            if record is not None:
                self._obey(record)
        except (OSError, ValueError, TypeError, LookupError) as error:
            complain(f"orders not understood: {error!r}")

    def _obey(self, record: dict[str, Any]) -> None:
        fields = Fields(record)
        limit_s, cancel = fields.optional_number("time_limit_s"), fields.take("cancel")
        numbered = [numbered_signal(row) for row in fields.rows("signals")]
        by_whom: dict[str, Any] | None = None
        if cancel is not None:
            by_whom = {f"cancel_{key}": cancel[key] for key in ("by", "at_s", "reason")}
        if limit_s is not None and limit_s != self._limit_s:
            self._limit_s = limit_s
            self._set_limit()
        if by_whom is not None and self._may_end():
            self._cancel = by_whom
            self._end(CAUSE_CANCELLED, None)
        for number, signum in sorted(numbered):
            if number > self._signals_done:
                self._signals_done = number
                self._signals_due.append(signum)
        self._pass_signals()

    def _pass_signals(self) -> None:
        # Before the exec the child is still ours and would die of what the job may handle.
        if self._executed and self._ended is None:
            for signum in self._signals_due:
                self._signal_job(signum)
            self._signals_due.clear()

    def _take_report(self) -> None:
        if self._report_fd < 0:
            return
        try:
            part = os.read(self._report_fd, 2**16)
        except BlockingIOError:
            return
        self._report += part
        *lines, self._report = self._report.split(b"\n")
        for line in lines:
            self._take_report_line(json.loads(line))
        if not part:
            os.close(self._report_fd)
            self._report_fd = -1
            self._executed = True
            self._pass_signals()

    def _take_report_line(self, line: dict[str, Any]) -> None:
        if "ready" in line:
            self._logs = line["logs"]
            self._open_gate()
        elif "closed" in line:
            # Nothing has run: without a record the daemon starts the job again, once it may.
            complain(line["closed"])
            self._abandoned = True
        elif self._cause is None:
            self._reason = line["failed"]
            if self._started_s is None:
                self._place = line.get("place")
                self._cause = CAUSE_SETUP if self._place is None else CAUSE_ENVIRONMENT

    def _open_gate(self) -> None:
        self._alarms.clear("setup")
        assert self._main is not None, "only a child reports"
        if self._cause is not None or self._abandoned:
            return  # it was killed at the gate
        if self._spec.probe:
            self._cause = CAUSE_EXIT
            self._kill_main()
            return
        try:
            self._publish_started(self._main, self._main)
        except OSError as error:
            self._give_up(f"started cannot be written: {error}")
            return
        try:
            os.write(self._gate_fd, b"g")
        except BrokenPipeError:
            pass  # somebody killed the child; it will be reaped
        os.close(self._gate_fd)

    def _publish_started(self, pid: int, session: int) -> None:
        found = process_stat(pid)
        now_s = boottime_s()
        record = {
            "pid": pid,
            "start_ticks": found.start_ticks if found else 0,
            "session": session,
            "at_s": time.time(),
            "boottime_s": now_s,
            "boot_id": self._boot_id,
        }
        self._records.publish(STARTED, record)
        self._started_s = now_s
        self._set_limit()

    def _set_limit(self) -> None:
        if self._started_s is None or self._cause is not None or self._ended is not None:
            return
        if self._limit_s is None or self._limit_s == float("inf"):
            self._alarms.clear("limit")
        else:
            self._alarms.set("limit", self._started_s + self._limit_s)

    def _take_alarms(self) -> None:
        for name in self._alarms.take_due():
            if name == "setup":
                reason = f"{self._stage}: no answer within {SETUP_DEADLINE_S:.0f} s"
                self._place = str(self._stage)
                self._end(CAUSE_ENVIRONMENT, reason[:REASON_CHARS_MAX])
            elif name == "limit":
                self._reach_limit()
            elif name == "kill":
                self._kill_round()
            elif name == "retry":
                self._flush()

    def _reach_limit(self) -> None:
        # A job that runs nothing has done all it was to do when its time is over.
        self._end(CAUSE_EXIT if self._spec.no_exec else CAUSE_TIME_LIMIT, None)

    # -- ending

    def _may_end(self) -> bool:
        return self._cause is None and self._ended is None

    def _end(self, cause: str, reason: str | None) -> None:
        """The first cause wins; it counts only while the main process is not reaped."""
        if not self._may_end():
            return
        self._cause, self._reason = cause, reason
        self._alarms.clear("limit", "setup")
        if self._main is None:
            return
        if self._started_s is None:
            self._kill_main()
        else:
            self._terminate_all()

    def _kill_main(self) -> None:
        """In the set-up, where nothing of the user's runs yet."""
        assert self._main is not None, "there is a child"
        os.kill(self._main, signal.SIGKILL)

    def _terminate_all(self) -> None:
        if self._terminated:
            return
        self._terminated = True
        self._alarms.set("kill", boottime_s() + self._spec.kill_grace_s)
        self._signal_job(signal.SIGTERM)

    def _signal_job(self, signum: int) -> None:
        """All of its processes; where the host lets us see none, the main one at least."""
        try:
            signal_all(signum)
        except OSError as error:
            complain(f"signal {signum} went to the main process only: {error}")
            if self._main is not None and self._ended is None:
                os.kill(self._main, signum)

    def _kill_round(self) -> None:
        try:
            pause_s = self._kills.kill_all()
        except OSError as error:  # no descriptor is left to look with
            complain(f"no kill round: {error}")
            pause_s = KILL_RETRY_S
        self._alarms.set("kill", boottime_s() + pause_s)

    def _reap(self) -> None:
        while (dead := dead_child()) is not None:
            if dead == self._main:
                self._main_is_dead()
            else:
                os.waitpid(dead, 0)

    def _main_is_dead(self) -> None:
        """Reap the main process. What was ordered or due by now was taken before the reap."""
        self._take_report()
        self._take_signals()
        self._take_orders()
        if self._alarms.is_due("limit"):
            self._reach_limit()
        assert self._main is not None, "a main process died"
        _, status = os.waitpid(self._main, 0)
        at_s, now_s = time.time(), boottime_s()
        self._alarms.clear("limit", "setup")
        self._ended = self._ended_record(status, at_s, now_s)
        if self._leaves_no_record():
            self._abandoned = True
        else:
            self._records.hold(ENDED, self._ended)
            if has_children() or has_failed(self._ended):
                self._flush()  # else the exit record follows at once
        if has_children():
            self._terminate_all()

    def _leaves_no_record(self) -> bool:
        # Taken down with the host before anything ran: the daemon starts it again after the boot.
        return self._abandoned or (self._cause == CAUSE_SHUTDOWN and self._started_s is None)

    def _ended_record(self, status: int | None, at_s: float, now_s: float) -> dict[str, Any]:
        code = signum = None
        if status is not None and self._started_s is not None:
            signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        cause = self._cause
        if cause is None and self._started_s is None:
            cause, self._reason = CAUSE_SETUP, f"the set-up was killed (at: {self._stage})"
        elif cause is None:
            cause = CAUSE_EXIT if signum is None else CAUSE_SIGNAL
        ran_nothing = self._spec.no_exec or self._spec.probe
        return {
            "code": 0 if ran_nothing and cause == CAUSE_EXIT else code,
            "signal": signum,
            "cause": cause,
            "reason": self._reason and self._reason[:REASON_CHARS_MAX],
            "cancel_by": None,
            "cancel_at_s": None,
            "cancel_reason": None,
            **self._cancel,
            "at_s": at_s,
            "boottime_s": now_s,
            "boot_id": self._boot_id,
            "place": self._place if cause == CAUSE_ENVIRONMENT else None,
            "left": self._left() if self._cause is None else 0,
        }

    def _left(self) -> int:
        """Processes that outlived the main one."""
        try:
            return live_count()
        except OSError:
            return 0  # none can be looked at

    def _flush(self) -> bool:
        """Whether all records are out; else another try is set."""
        delay_s = self._records.flush()
        if delay_s is not None:
            self._alarms.set("retry", boottime_s() + delay_s)
        return delay_s is None

    # -- the last record

    def _finish(self) -> int:
        self._alarms.clear("kill", "limit", "setup")
        if self._ended is None and not self._leaves_no_record():
            self._ended = self._ended_record(None, time.time(), boottime_s())
            self._records.hold(ENDED, self._ended)
        if self._leaves_no_record():
            self._records.discard()
            return EXIT_STORAGE if self._abandoned else EXIT_OK
        assert self._ended is not None, "a job that is over has ended"
        self._records.hold(EXIT, self._exit_record(self._ended))
        while not self._flush():
            self._alarms.wait()
        self._records.discard()
        return EXIT_OK

    def _exit_record(self, ended: dict[str, Any]) -> dict[str, Any]:
        finished_at_s = time.time()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            **ended,
            "finished_at_s": finished_at_s,
            "cpu_user_s": used.ru_utime,
            "cpu_system_s": used.ru_stime,
            "max_rss_bytes": used.ru_maxrss * 1024,
            "oom": self._oom(ended),
        }

    def _oom(self, ended: dict[str, Any]) -> str | None:
        if not has_failed(ended) or ended["cause"] not in (CAUSE_EXIT, CAUSE_SIGNAL):
            return None
        if self._host_oom(ended["signal"]):
            return OOM_HOST
        # A shell ends with 128 and the signal of which its command died.
        signum = ended["signal"] or ended["code"] - 128
        answer = ask_child(
            lambda: scan_as_user(self._spec, self._logs, signum), OOM_SCAN_DEADLINE_S
        )
        return OOM_UNKNOWN if answer is None else answer.decode() or None

    def _host_oom(self, signum: int | None) -> bool:
        kills = host_oom_kills()
        if kills is None or self._oom_kills is None or kills <= self._oom_kills:
            return False
        # A cgroup of its own counts this job alone; a shared one proves nothing by itself.
        return self._spec.launch == "pid1" or signum == signal.SIGKILL


RECORD_VERSION = 1
