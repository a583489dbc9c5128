"""A box with gpuschedd installed as its system service, and people who use it."""

from __future__ import annotations

import os
import resource  # noqa: F401  # while we can read it: a client takes on other identities
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpusched_client import Client
from gpusched_client.submission.request import job_request
from gpusched_client.wire.job_messages import JobView
from gpusched_client.wire.submit_messages import JobRequest
from tests.support.box import BIN, Box, build_wheels, install_package
from tests.support.daemon import until

CONFIG = Path("/etc/gpuschedd/config.toml")
STATE_DIR = Path("/var/lib/gpuschedd")
SOCKET = Path("/run/gpuschedd/gpuschedd.sock")
PLAIN_CONFIG = """simulate = "4x24G"
[scheduling]
kill_grace = "1s"
max_cpu_jobs = 64
"""
USERS = {"alice": 3001, "bob": 3002, "carol": 3003}
GROUPS = {"project": ("alice",), "shared": ("alice", "bob"), "operators": ("carol",)}
#: Character devices that open without hardware, to stand in for GPUs: major, minor.
NODES = {0: (10, 183), 1: (10, 229), 2: (10, 200), 3: (10, 237)}
LIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


class Host:
    """The box as its users and its administrator know it."""

    def __init__(self, box: Box) -> None:
        self.box = box

    def set_up(self, wheels: Path) -> Host:
        """Install from wheels as an operator does, make the users, start the service."""
        build_wheels(wheels)
        install_package(self.box, wheels)
        for user, uid in USERS.items():
            self.box.run("useradd", "--create-home", "--uid", str(uid), user)
        for group, members in GROUPS.items():
            self.box.run("groupadd", group)
            for member in members:
                self.box.run("usermod", "--append", "--groups", group, member)
        self.box.run(BIN / "gpuschedd", "install")
        self.configure("")
        self.box.run("systemctl", "enable", "--now", "gpuschedd.socket", "gpuschedd.service")
        return self

    # --- administration -----------------------------------------------------------------------

    def configure(self, more: str) -> None:
        """Write the configuration; `more` comes before the tables."""
        self.box.disk(CONFIG).write_text(f"{more}\n{PLAIN_CONFIG}")

    def reconfigure(self, more: str) -> None:
        """Write it and have it read."""
        self.configure(more)
        self.admin(lambda client: client.reload())

    def systemctl(self, *words: str, check: bool = True) -> str:
        """stdout of systemctl."""
        return self.box.run("systemctl", *words, check=check).stdout.strip()

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.systemctl("show", unit, f"--property={name}", "--value")

    def daemon_pid(self) -> int:
        """The daemon as the box numbers it."""
        return int(self.show("gpuschedd.service", "MainPID"))

    def outer_pid(self, pid: int) -> int:
        """A process of the box as this machine numbers it."""
        for entry in os.listdir("/proc"):
            if entry.isdigit() and _inner_pid(int(entry), self._namespace()) == pid:
                return int(entry)
        raise AssertionError(f"the box has no process {pid}")

    def _namespace(self) -> str:
        return os.readlink(f"/proc/{self.box.pid}/ns/pid")

    def journal(self, unit: str = "gpuschedd") -> str:
        """What a unit has logged."""
        return self.box.run("journalctl", "--no-pager", "-o", "cat", "-u", unit).stdout

    @property
    def log_name(self) -> str:
        """Whose log it is, for reports."""
        return "gpuschedd.service in the box"

    def log_text(self) -> str:
        """What the daemon has logged since the box was booted."""
        return self.journal()

    def is_over(self) -> bool:
        """Each test that uses the box keeps it for itself."""
        return True

    # --- people -------------------------------------------------------------------------------

    @contextmanager
    def client(self, user: str | int = "root", **options: float) -> Iterator[Client]:
        """A client whose connections the kernel says to be the user's, while the block lasts."""
        uid = USERS.get(user, 0) if isinstance(user, str) else user
        directory = os.open(self.box.inside(SOCKET.parent), os.O_PATH | os.O_DIRECTORY)
        os.seteuid(uid)
        try:
            with Client(f"/proc/self/fd/{directory}/{SOCKET.name}", **options) as client:
                yield client
        finally:
            os.seteuid(0)
            os.close(directory)

    def admin(self, work: Callable[[Client], Any]) -> Any:
        """Something that root asks."""
        with self.client() as client:
            return work(client)

    def submit(self, user: str, *argv: str, **options: Any) -> int:
        """A job of the user's own, in the home directory; its id."""
        request = request_of(user, *argv, **options)
        with self.client(user) as client:
            return client.submit_many([request])[0].id

    def sh(self, user: str, line: str, **options: Any) -> int:
        """The same for a shell line."""
        return self.submit(user, "/bin/sh", "-c", line, **options)

    def wait(self, job_id: int, timeout_s: float = 30.0) -> JobView:
        """The job, once it is final."""
        found: JobView = self.admin(lambda client: client.wait(job_id, timeout_s=timeout_s))
        return found

    def run_as(self, user: str, line: str, **options: Any) -> str:
        """The output of a shell line that ran as the user's job and ended well."""
        job_id = self.sh(user, line, **options)
        job = self.wait(job_id)
        output = self.output(user, job_id)
        assert (job.state, job.exit_code) == ("COMPLETED", 0), (job, output)
        return output

    def job(self, job_id: int) -> JobView:
        """Everything about a job, as root sees it."""
        found: JobView = self.admin(lambda client: client.job(job_id))
        return found

    def until_state(self, job_id: int, *states: str) -> JobView:
        """The job, once it is in one of the states."""

        def look() -> JobView | None:
            job = self.job(job_id)
            return job if job.state in states else None

        return until(look, f"job {job_id} is {' or '.join(states)}")

    def home(self, user: str) -> Path:
        """The user's home, as this machine reaches it."""
        return self.box.disk(f"/home/{user}")

    def output(self, user: str, job_id: int) -> str:
        """What the job has written so far."""
        path = self.home(user) / f"gsub-{job_id}.out"
        return path.read_text() if path.exists() else ""

    def end_all(self) -> None:
        """Cancel everything and wait until it is over."""
        with self.client() as client:
            while True:
                ids = [job.job_id for job in client.jobs(states=LIVE).jobs]
                if not ids:
                    return
                client.cancel(ids)
                client.wait(ids, timeout_s=60)


def request_of(user: str, *argv: str, **options: Any) -> JobRequest:
    """A job as the user would ask for it from the home directory."""
    options.setdefault("environment", {"PATH": "/usr/local/bin:/usr/bin:/bin", "USER": user})
    options.setdefault("cwd", f"/home/{user}")
    options.setdefault("gpus", 0)
    return job_request(list(argv) or None, **options)


def _inner_pid(pid: int, namespace: str) -> int | None:
    """The pid in the innermost namespace, if that is the one."""
    try:
        if os.readlink(f"/proc/{pid}/ns/pid") != namespace:
            return None
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[-1]) for line in lines if line.startswith("NSpid:"))


def lines_of(text: str) -> Sequence[str]:
    """Without the empty ones."""
    return [line for line in text.splitlines() if line.strip()]
