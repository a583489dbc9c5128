"""Daemons that begin as forks of a process that has imported everything.

Most of a start is reading modules: hundreds of daemons a run would do that anew. Run as a program
this is the process that is forked; imported, it is the side of the test, with what tests use of
subprocess.Popen. `make soak`, and daemons in a wrapper, start whole ones.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, Protocol

REQUEST_BYTES_MAX = 2**20
#: What the start of a process takes from its environment: a fork would come too late for it.
OF_A_START = ("LD_PRELOAD", "LD_AUDIT", "PYTHON", "MALLOC_", "FAKETIME")


class Process(Protocol):
    """What tests use of a daemon's process."""

    pid: int
    returncode: int | Any

    def poll(self) -> int | None:
        """The exit status, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired."""

    def send_signal(self, sig: int) -> None:
        """While it runs."""

    def kill(self) -> None:
        """With SIGKILL."""


class Forked:
    """A daemon that was forked; how it ended comes through a pipe, as its parent is another."""

    def __init__(self, words: list[str], cwd: Path, environment: dict[str, str], log: int) -> None:
        request = {"words": words, "cwd": str(cwd), "environment": environment}
        data = json.dumps(request).encode()  # surrogates stay escaped
        assert len(data) < REQUEST_BYTES_MAX
        self._ending, theirs = os.pipe()
        socket.send_fds(_server(), [data], [log, theirs])
        os.close(theirs)
        self.returncode: int | None = None
        self.pid = int(os.read(self._ending, 16))

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired."""
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("gpuschedd", timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        """While it runs."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """With SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ending], [], [], timeout)[0]:
            said = os.read(self._ending, 16)
            os.close(self._ending)
            assert said, "the process that is forked has ended"
            self.returncode = int(said)
        return self.returncode


@cache
def _server_environment() -> dict[str, str]:
    return dict(os.environ)


def _of_a_start(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(OF_A_START)}


@cache
def _server() -> socket.socket:
    """The process that is forked, one of each process that tests; it ends with that."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES_MAX)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.forked", str(theirs.fileno())],
        cwd=Path(__file__).parents[2],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env=_server_environment(),
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def start(words: list[str], cwd: Path, environment: dict[str, str], log: int) -> Forked | None:
    """`python -m gpuschedd.main WORDS`; None where that needs a start of its own."""
    if _of_a_start(environment) != _of_a_start(_server_environment()):
        return None
    return Forked(words, cwd, environment, log)


# --- the process that is forked -----------------------------------------------------------------


def serve(control: socket.socket) -> dict[str, Any]:
    """Fork and reap; returns in each child, with what is asked of it."""
    endings: dict[int, tuple[int, int]] = {}  # pidfd -> pid, where its status goes
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in endings:
                poll.unregister(ready)
                _reap(ready, *endings.pop(ready))
                continue
            data, descriptors, _, _ = socket.recv_fds(control, REQUEST_BYTES_MAX, 2)
            if not data:
                sys.exit()
            log, ending = descriptors
            pid = os.fork()
            if pid == 0:
                others = [each for pidfd, (_, pipe) in endings.items() for each in (pidfd, pipe)]
                for descriptor in (control.detach(), ending, *others):
                    os.close(descriptor)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.close(log)
                return dict(json.loads(data))
            os.close(log)
            os.write(ending, b"%16d" % pid)
            pidfd = os.pidfd_open(pid)
            endings[pidfd] = (pid, ending)
            poll.register(pidfd, select.POLLIN)


def _reap(pidfd: int, pid: int, ending: int) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # nobody asks any more
        os.write(ending, b"%16d" % status)
    os.close(ending)
    os.close(pidfd)


def main() -> None:
    """Read all that a daemon reads at its start, then wait for somebody who wants one."""
    import gpuschedd.cli

    gc.freeze()  # what is here is for all forks: looking through it would copy its pages
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    random.seed()
    sys.argv = ["gpuschedd", *request["words"]]
    gpuschedd.cli.cli()


if __name__ == "__main__":
    main()
