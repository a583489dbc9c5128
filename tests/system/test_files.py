"""Paths of users: touched as the user alone, whatever lies there, however it changes."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support.daemon import until
from tests.support.host import USERS, Host
from tests.support.traces import joined_calls

pytestmark = [pytest.mark.root, pytest.mark.systemd]

RACED_JOBS = 300
TRACED_JOBS = 100
BATCH = 20


def _fingerprint(host: Host) -> str:
    """Content, owner and mode of what must not change."""
    return host.box.sh("for f in /etc/shadow /etc/passwd /root; do stat -c '%U %a %Y %s' $f; done")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        ("ln -s /etc/shadow log", "Permission denied"),
        ("ln -s /etc/new-file log", "Permission denied"),
        ("mkfifo log", "nobody reads"),
        ("ln -s /dev/full log", "No space left"),
        ("mkdir log", "Is a directory"),
        ("ln -s log log", "symbolic links"),
    ],
)
def test_a_log_reaches_as_far_as_its_owner_s_rights(host: Host, make: str, words: str) -> None:
    before = _fingerprint(host)
    host.box.run("sh", "-c", f"cd /home/alice && rm -rf log && {make}", user="alice")
    job = host.wait(host.sh("alice", "echo hello", output="log"))
    host.box.run("rm", "-rf", "/home/alice/log")
    assert (job.state, job.cause) == ("FAILED", "setup")
    assert words in str(job.cause_detail)
    assert _fingerprint(host) == before
    assert not host.box.disk("/etc/new-file").exists()


def test_a_home_that_is_closed_or_gone_is_waited_for(host: Host) -> None:
    """By these jobs alone; its words are for their owner."""
    host.box.run("sh", "-c", "mkdir -p /home/alice/closed && chmod 0 /home/alice/closed")
    places = ("/home/alice/closed", "/home/alice/nowhere")
    ids = [host.sh("alice", "exit 7", cwd=place) for place in places]
    assert host.wait(host.sh("alice", "exit 3", cwd="/home/alice")).exit_code == 3
    for job_id, place in zip(ids, places, strict=True):
        until(partial(waits_for_its_environment, host, job_id), "it waits")
        for user, is_told in (("alice", True), ("bob", False)):
            with host.client(user) as client:
                assert (place in str(client.job(job_id).reason)) is is_told
        assert host.job(job_id).attempt == 1
    host.box.run("sh", "-c", "cd /home/alice; chmod 777 closed; mkdir -m 777 nowhere")
    assert [host.wait(job_id, timeout_s=60).exit_code for job_id in ids] == [7, 7]
    host.box.run("rm", "-r", *places)


def waits_for_its_environment(host: Host, job_id: int) -> bool:
    """Whether its last start found something missing."""
    reason = host.job(job_id).reason
    return reason is not None and reason.code == "Environment"


SWAP = r"""
import ctypes, os
os.chdir("/home/alice/race")
libc = ctypes.CDLL(None, use_errno=True)
print("go", flush=True)
while not os.path.exists("stop"):
    libc.renameat2(-100, b"here", -100, b"there", 2)
"""


def test_a_directory_swapped_under_the_log_leads_nowhere_else(host: Host) -> None:
    """`here` changes between a directory of hers and a link to /etc, as fast as it can."""
    host.reconfigure("jobs.environment_patience = 0")
    before = host.box.sh("ls -la --time-style=full-iso /etc | sort")
    host.box.sh("cd && rm -rf race && mkdir -p race/here && ln -s /etc race/there", user="alice")
    racer = host.box.popen("/usr/bin/python3", "-c", SWAP, user="alice")
    assert racer.stdout is not None
    assert racer.stdout.readline() == "go\n"
    ids = []
    for _ in range(RACED_JOBS // BATCH):
        ids += [
            host.sh("alice", "exit 9", output="/home/alice/race/here/out-%j") for _ in range(BATCH)
        ]
    jobs = [host.wait(job_id, timeout_s=120) for job_id in ids]
    host.box.run("touch", "/home/alice/race/stop", user="alice")
    racer.communicate(timeout=30)
    ends = {(job.state, job.cause, job.exit_code) for job in jobs}
    assert ends <= {("FAILED", "exit", 9), ("FAILED", "setup", None)}
    assert host.box.sh("ls -la --time-style=full-iso /etc | sort") == before
    strangers = host.box.sh("find /home/alice/race ! -user alice")
    assert strangers == ""
    host.box.run("rm", "-rf", "/home/alice/race")


@contextmanager
def traced(host: Host, log: Path) -> Iterator[None]:
    """strace on the box's PID 1, which follows the supervisors, and on the daemon."""
    calls = "trace=%file,%process,setresuid,setuid,setreuid,fchown,fchmod"
    command = ["strace", "-f", "-qq", "-s", "200", "-e", calls, "-o", str(log)]
    daemon = host.outer_pid(host.daemon_pid())
    tracer = subprocess.Popen(
        [*command, "-p", str(host.box.pid), "-p", str(daemon)], stderr=subprocess.PIPE
    )

    def is_traced(pid: int) -> bool:
        status = Path(f"/proc/{pid}/status").read_text()
        return re.search(r"TracerPid:\s+0$", status, re.MULTILINE) is None

    try:
        until(lambda: is_traced(host.box.pid) and is_traced(daemon), "strace has attached")
        yield
    finally:
        tracer.terminate()
        tracer.communicate(timeout=30)


@pytest.mark.tool("strace")
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_no_path_of_a_user_s_is_touched_with_euid_0(host: Host, tmp_path: Path) -> None:
    """Over daemon, PID 1 and supervisors: calls that name one come after the change of uid."""
    log = tmp_path / "trace"
    with traced(host, log):
        line = "echo CUDA out of memory >&2; exit 1"
        ids = [host.sh("alice", line, gpus=1, time_limit=600) for _ in range(TRACED_JOBS)]
        jobs = [host.wait(job_id, timeout_s=120) for job_id in ids]
    assert {job.state for job in jobs} == {"OUT_OF_MEMORY"}
    dropped, roots = _touches(log, USERS["alice"])
    assert len(dropped) >= 2 * TRACED_JOBS  # the job, and the child that reads its log
    assert roots == []


def _touches(log: Path, uid: int) -> tuple[set[str], list[str]]:
    """Processes that became the user, and calls on paths of theirs by those that had not.

    The jobs fork nothing, so no process is the user's by inheritance.
    """
    dropped: set[str] = set()
    roots: list[str] = []
    for line in joined_calls(log):
        pid, call = line.split(None, 1)
        if re.match(rf"setresuid\({uid}, {uid}, {uid}\) += 0", call):
            dropped.add(pid)
        elif pid not in dropped and ("/home/alice" in call or "gsub-" in call):
            roots.append(line)
    return dropped, roots
