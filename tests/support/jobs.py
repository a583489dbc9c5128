"""Real supervisors without a daemon: a state directory, specs, and waits that end by events."""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from gpuschedd import supervisor
from gpuschedd.core.attempt import Cancel, ExitRecord, Orders
from gpuschedd.run.job_dir import JobDir, Spec
from gpuschedd.run.launchers.direct import DirectLauncher

DEADLINE_S = 60.0
T = TypeVar("T")

# Its first thread ends; another lives on. With "behind" it leaves its parent and session first.
LEADERLESS = """
import ctypes, os, signal, sys, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "behind" in sys.argv and os.fork(): sys.exit()
if "behind" in sys.argv: os.setsid()
threading.Thread(target=time.sleep, args=(600,)).start()
print("up", os.getpid(), flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


class Host:
    """A state directory, a hint socket and a launcher; on leaving, nothing it started is left."""

    def __init__(self, launcher: DirectLauncher | None = None) -> None:
        # Short, since it holds a socket; not under pytest's own, which no other user may enter.
        self.root = Path(tempfile.mkdtemp(prefix="gs-"))
        self.root.chmod(0o711)
        self.jobs_root = self.root / "jobs"
        self.jobs_root.mkdir(mode=0o700)
        self.scripts_dir = self.root / "scripts"
        self.scripts_dir.mkdir(mode=0o711)
        self.work = self.root / "work"
        self.work.mkdir()
        self.launcher = launcher or DirectLauncher()
        self._hints = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._hints.bind(str(self.root / "hint.sock"))
        self._next_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clean_up_all()
        self._hints.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def clean_up_all(self) -> None:
        for job_dir in JobDir.all_in(self.jobs_root):
            with contextlib.suppress(Exception):
                self.clean_up(job_dir)

    def clean_up(self, job_dir: JobDir) -> None:
        claim, spec, started = job_dir.claim(), job_dir.spec(), job_dir.started()
        if claim is not None:
            self.launcher.stop(claim)
        if spec is not None and started is not None and not spec.no_exec:
            self.launcher.kill_leftovers(
                spec.job_id, spec.attempt, spec.instance, spec.uid, started
            )

    def spec(self, *argv: str | bytes, **changes: Any) -> Spec:
        """A job of this user that ends at once; `changes` are fields of Spec."""
        self._next_id += 1
        uid = os.geteuid()
        base = Spec(
            job_id=self._next_id,
            attempt=1,
            instance=self.root.name,
            mode="user",
            launch="direct",
            user=pwd.getpwuid(uid).pw_name,
            uid=uid,
            name="test",
            argv=tuple(os.fsencode(word) for word in argv or ("true",)),
            script=None,
            cwd=os.fsencode(self.work),
            environment=((b"PATH", b"/usr/local/bin:/usr/bin:/bin"),),
            umask=0o022,
            rlimits=(),
            output=b"out.%d" % self._next_id,
            error=None,
            time_limit_s=None,
            kill_grace_s=5.0,
            hint_socket=str(self.root / "hint.sock"),
            scripts_dir=str(self.scripts_dir),
        )
        return replace(base, **changes)

    def start(self, *argv: str | bytes, **changes: Any) -> JobDir:
        job_dir = JobDir.create(self.jobs_root, self.spec(*argv, **changes))
        self.launcher.launch(job_dir)
        return job_dir

    def sh(self, line: str, **changes: Any) -> JobDir:
        return self.start("/bin/sh", "-c", line, **changes)

    def run(self, *argv: str | bytes, **changes: Any) -> ExitRecord:
        return self.wait_exit(self.start(*argv, **changes))

    def output(self, job_dir: JobDir) -> bytes:
        """What the job wrote so far; empty before its set-up."""
        path = self.work / f"out.{job_dir.job_id}"
        return path.read_bytes() if path.exists() else b""

    def wait(self, look: Callable[[], T | None], deadline_s: float = DEADLINE_S) -> T:
        """What `look` gives once it gives something; looked at after each hint."""
        end_s = time.monotonic() + deadline_s
        while (found := look()) is None:
            assert time.monotonic() < end_s, f"nothing within {deadline_s} s"
            if select.select([self._hints], [], [], 0.05)[0]:
                self._hints.recv(64)
        return found

    def wait_exit(self, job_dir: JobDir, deadline_s: float = DEADLINE_S) -> ExitRecord:
        return self.wait(job_dir.exit, deadline_s)

    def wait_output(self, job_dir: JobDir, text: bytes) -> None:
        self.wait(lambda: True if text in self.output(job_dir) else None)

    def wait_dead(self, job_dir: JobDir) -> None:
        """Until the supervisor is gone."""
        claim = job_dir.claim()
        assert claim is not None
        pidfd = self.launcher.attach(claim)
        if pidfd is not None:
            assert select.select([pidfd], [], [], DEADLINE_S)[0]
            os.close(pidfd)

    def order(self, job_dir: JobDir, orders: Orders) -> None:
        """As the daemon does: written first, then the supervisor is woken."""
        job_dir.write_orders(orders)
        claim = job_dir.claim()
        pidfd = None if claim is None else self.launcher.attach(claim)
        if pidfd is not None:
            self.launcher.wake(pidfd)
            os.close(pidfd)

    def cancel(self, job_dir: JobDir) -> None:
        self.order(job_dir, Orders(cancel=Cancel("0", time.time(), "test")))

    @contextlib.contextmanager
    def small_disk(self, size: str = "256k") -> Iterator[str]:
        """The jobs lie on a small file system of their own meanwhile. Needs root."""
        path = os.fspath(self.jobs_root)
        options = f"size={size},mode=0700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", path], check=True)
        try:
            yield path
        finally:
            self.clean_up_all()
            subprocess.run(["umount", "-l", path], check=True)

    def fill_disk(self) -> None:
        """Leave no block free where the jobs lie; `fill` may be removed again."""
        with (
            open(self.jobs_root / "fill", "wb", buffering=0) as file,
            contextlib.suppress(OSError),
        ):
            while True:
                file.write(bytes(4096))

    def marked(self, job_dir: JobDir) -> tuple[int, ...]:
        """Live processes of the attempt, by its marks."""
        return self.launcher.leftovers(
            job_dir.job_id, job_dir.attempt, self.root.name, os.geteuid(), job_dir.started()
        )


def is_alive(pid: int) -> bool:
    found = supervisor.process_stat(pid)
    return found is not None and found.alive
