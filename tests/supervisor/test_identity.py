"""System mode: the child becomes the user, provably and for ever, or says why not.

The accounts are made up: each supervisor runs in a mount namespace of its own with other files for
/etc/passwd and its kin, so that the host's own accounts and PAM stacks play no part.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuschedd.run.job_dir import JobDir
from gpuschedd.run.launchers.direct import DirectLauncher
from gpuschedd.supervisor.errors import EXIT_SPEC_REFUSED, SetupFailed
from gpuschedd.supervisor.identity import check_uid, uid_min
from gpuschedd.supervisor.start import main
from tests.support.jobs import DEADLINE_S, Host
from tests.support.observed import Observer, assert_nothing_was_imported
from tests.support.traces import joined_calls

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare"),
]

ALICE, ERIN, DAEMON_USER = 20001, 20002, 500
PASSWD = f"""root:x:0:0:root:/root:/bin/sh
daemon:x:{DAEMON_USER}:{DAEMON_USER}::/:/bin/sh
alice:x:{ALICE}:{ALICE}::/:/bin/sh
erin:x:{ERIN}:{ERIN}::/:/bin/sh
nobody:x:65534:65534::/:/bin/sh
"""
GROUP = f"""root:x:0:
daemon:x:{DAEMON_USER}:
alice:x:{ALICE}:
erin:x:{ERIN}:
gpu:x:20100:alice
data:x:20101:bob,alice
other:x:20102:erin
"""
SHADOW = "root:*:19000:0:99999:7:::\n" + "".join(
    f"{name}:*:19000:0:99999:7::{expires}:\n"
    for name, expires in (("daemon", ""), ("alice", ""), ("erin", "100"), ("nobody", ""))
)
PAM = "account required pam_unix.so\nsession required pam_limits.so\n"


class SystemHost(Host):
    """A host with the made-up accounts; its jobs are alice's unless told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.etc = self.root / "etc"
        (self.etc / "pam.d").mkdir(parents=True)
        self.etc.chmod(0o755)
        for name, text in (("passwd", PASSWD), ("group", GROUP), ("shadow", SHADOW)):
            (self.etc / name).write_text(text)
            (self.etc / name).chmod(0o600 if name == "shadow" else 0o644)
        (self.etc / "pam.d" / "gpusched").write_text(PAM)
        self.use()
        os.chown(self.work, ALICE, ALICE)

    def use(self, *before: str, prepare: str = "") -> None:
        """Launch in the namespace, through `before` (strace and its options)."""
        names = ("passwd", "group", "shadow", "pam.d")
        mounts = "".join(f"mount --bind {self.etc}/{name} /etc/{name} && " for name in names)
        mounts += prepare
        wrapper = self.root / "python"
        command = " ".join([*before, sys.executable])
        wrapper.write_text(
            f'#!/bin/sh\nexec unshare -m sh -c \'{mounts}exec {command} "$@"\' sh "$@"\n'
        )
        wrapper.chmod(0o755)
        self.launcher = DirectLauncher(python=str(wrapper))

    def spec(self, *argv: str | bytes, **changes: Any) -> Any:
        return super().spec(*argv, **{"mode": "system", "user": "alice", "uid": ALICE, **changes})


@pytest.fixture
def host() -> Iterator[SystemHost]:
    with SystemHost() as made:
        yield made


def test_a_job_is_its_user_in_every_respect(host: SystemHost) -> None:
    line = (
        "id -ru; id -rg; id -G; umask; cat /proc/self/oom_score_adj; nice; "
        "grep -h Cap[PEA] /proc/self/status; cd / && ls -ld /proc/self/fd/1 > /dev/null; "
        "readlink /proc/self/fd/0"
    )
    job = host.sh(line, umask=0o077)
    assert host.wait_exit(job).code == 0
    uid, gid, *rest = host.output(job).decode().split("\n")
    assert (uid, gid) == (str(ALICE), str(ALICE))
    assert sorted(rest[0].split()) == [str(ALICE), "20100", "20101"]
    assert rest[1:4] == ["0077", "0", "0"]
    assert [line.split()[1] for line in rest[4:7]] == ["0" * 16] * 3
    assert rest[7] == "/dev/null"
    found = (host.work / f"out.{job.job_id}").stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (ALICE, ALICE, 0o600)


def test_a_script_is_read_by_its_user_and_written_or_linked_by_nobody(host: SystemHost) -> None:
    """It is root's: its user may not change, link, or keep it."""
    tries = "chmod u+w $0; : >> $0; ln $0 $PWD/kept; mv $0 $PWD/kept; rm -f $0"
    line = f"#!/bin/sh\nstat -c '%u %a' $0\n({tries}) 2>/dev/null; ls; exit 9\n"
    job = host.start(script=line.encode())
    assert host.wait_exit(job).code == 9
    owner, *left = host.output(job).decode().splitlines()
    assert owner == "0 440"
    assert "kept" not in left
    host.wait_dead(job)
    assert list(host.scripts_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"user": "alice", "uid": ERIN}, f"account alice had uid {ERIN} at submit"),
        ({"user": "erin", "uid": ALICE}, "now erin is uid"),
        ({"user": "", "uid": ALICE}, "no longer exists"),
        ({"user": "gone", "uid": ALICE}, f"account gone with uid {ALICE} no longer exists"),
        ({"user": "alice", "uid": 30000}, "account alice with uid 30000 no longer exists"),
        ({"user": "root", "uid": 0}, "uid 0 is a system account"),
        ({"user": "daemon", "uid": DAEMON_USER}, "is a system account (below UID_MIN"),
        ({"user": "nobody", "uid": 65534}, "uid 65534 is not a user's"),
    ],
)
def test_whoever_may_not_run_is_refused_with_the_reason(
    host: SystemHost, changes: dict[str, Any], words: str
) -> None:
    job = host.sh("touch /tmp/gs-must-not-exist", **changes)
    end = host.wait_exit(job)
    assert (end.code, end.cause) == (None, "setup")
    assert words in str(end.reason)
    assert job.started() is None


def test_an_account_that_has_expired_since_is_waited_for(host: SystemHost) -> None:
    """Its administrator may extend it; nothing of the job has run."""
    job = host.sh("touch /tmp/gs-must-not-exist", user="erin", uid=ERIN)
    end = host.wait_exit(job)
    assert end.is_of_environment
    assert end.place == "account erin"
    words = "account erin: PAM account refused: User account has expired"
    assert str(end.reason).startswith(words)
    assert job.started() is None


CLOSE = "mount -t tmpfs none /run && touch /run/nologin && "


def test_a_host_that_closes_at_the_last_moment_leaves_the_job_to_be_started_again(
    host: SystemHost,
) -> None:
    (host.etc / "pam.d" / "gpusched").write_text(f"account required pam_nologin.so\n{PAM}")
    host.use(prepare=CLOSE)
    job = host.sh("true")
    host.wait_dead(job)
    seen = job.observe()
    assert (seen.started, seen.ended, seen.exit) == (None, None, None)


def test_a_closed_host_is_no_excuse_where_the_stack_does_not_ask(host: SystemHost) -> None:
    host.use(prepare=CLOSE)
    end = host.wait_exit(host.sh("true", user="erin", uid=ERIN))
    assert (end.cause, end.place) == ("environment", "account erin")
    assert "expired" in str(end.reason)


def test_without_the_private_pam_stack_nothing_runs_and_nothing_fails(host: SystemHost) -> None:
    """The host's fault is not the job's: it can be started again."""
    (host.etc / "pam.d" / "gpusched").unlink()
    job = host.sh("true")
    host.wait_dead(job)
    seen = job.observe()
    assert (seen.started, seen.ended, seen.exit) == (None, None, None)


@pytest.mark.parametrize(("user", "uid"), [("daemon", DAEMON_USER), ("root", 0)])
def test_system_accounts_run_where_the_spec_allows_them(
    host: SystemHost, user: str, uid: int
) -> None:
    os.chown(host.work, uid, uid)
    job = host.sh("id -u", user=user, uid=uid, allow_system_uid=True)
    assert host.wait_exit(job).code == 0
    assert host.output(job) == f"{uid}\n".encode()


def test_the_identity_cannot_be_undone_and_limits_not_raised(host: SystemHost) -> None:
    code = (
        "import os,resource\n"
        "for call in (os.setuid, os.setgid):\n"
        "    try: call(0); print('BACK')\n"
        "    except PermissionError: print('no way back')\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    rlimits = (("RLIMIT_NOFILE", 10**9, 10**9), ("RLIMIT_NICE", 40, 40))
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("needs a Python that other users can run")
    job = host.start(python, "-I", "-S", "-c", code, rlimits=rlimits)
    assert host.wait_exit(job).code == 0
    lines = host.output(job).decode().splitlines()
    assert lines[:2] == ["no way back"] * 2
    assert int(re.findall(r"\d+", lines[2])[1]) < 10**9


def test_a_log_reaches_no_further_than_the_user_s_rights(host: SystemHost) -> None:
    secret = host.root / "roots"
    secret.write_text("untouched")
    secret.chmod(0o644)
    (host.work / "log").symlink_to(secret)
    end = host.wait_exit(host.sh("echo x", output=b"log"))
    assert end.cause == "setup"
    assert "Permission denied" in str(end.reason)
    assert secret.read_text() == "untouched"
    assert secret.stat().st_uid == 0


def test_a_directory_of_somebody_else_is_refused(host: SystemHost) -> None:
    (host.root / "private").mkdir(mode=0o700)
    end = host.wait_exit(host.sh("true", cwd=os.fsencode(host.root / "private")))
    assert "Permission denied" in str(end.reason)


def test_the_unit_s_variables_do_not_reach_the_job(host: SystemHost) -> None:
    environment = ((b"NOTIFY_SOCKET", b"/run/x"), (b"PATH", b"/usr/bin:/bin"))
    job = host.start("env", environment=environment)
    assert host.wait_exit(job).code == 0
    assert b"NOTIFY_SOCKET" not in host.output(job)


def test_a_cuda_oom_is_read_as_the_user(host: SystemHost) -> None:
    assert host.wait_exit(host.sh("echo CUDA out of memory; exit 1")).oom == "cuda"
    hidden = host.sh("echo CUDA out of memory; chmod 0 out.*; exit 1")
    assert host.wait_exit(hidden).oom == "unknown"


def test_a_killed_supervisor_leaves_processes_that_are_found_and_killed(host: SystemHost) -> None:
    job = host.sh("setsid sh -c 'trap \"\" TERM; echo up; sleep 60' & sleep 60")
    pid = host.wait(job.started).pid
    host.wait_output(job, b"up")
    pidfd = os.pidfd_open(pid)
    claim = job.claim()
    assert claim is not None
    os.kill(claim.pid, signal.SIGKILL)
    # The signal of the parent's death was asked for after the change of uid, which clears it.
    assert select.select([pidfd], [], [], DEADLINE_S)[0] == [pidfd]
    os.close(pidfd)
    args = (job.job_id, job.attempt, host.root.name, ALICE, job.started())
    assert host.launcher.leftovers(*args) != ()
    assert host.launcher.kill_leftovers(*args) == ()
    assert host.launcher.leftovers(*args) == ()


@pytest.mark.parametrize(
    ("changes", "code"), [({}, 1), ({"user": "erin", "uid": ERIN}, None), ({"uid": ERIN}, None)]
)
def test_nothing_is_loaded_to_become_the_user(
    host: SystemHost, changes: dict[str, Any], code: int | None
) -> None:
    """With accounts, PAM and the look at the output; where the set-up fails, too."""
    observer = Observer(host)
    host.use(f"{observer.command} python")
    job = host.sh("echo CUDA out of memory; exit 1", **changes)
    assert host.wait_exit(job).code == code
    assert_nothing_was_imported(observer.seen())


@pytest.mark.tool("strace")
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_no_path_of_the_user_s_is_touched_with_euid_0(host: SystemHost) -> None:
    log = host.root / "trace"
    host.use(f"strace -f -qq -s 300 -e trace=%file,setresuid,%process -o {log}")
    job = host.sh("echo CUDA out of memory; exit 1")
    assert host.wait_exit(job).oom == "cuda"
    dropped: set[str] = set()
    roots: list[str] = []
    for line in joined_calls(log):
        pid, call = line.split(None, 1)
        if re.match(rf"setresuid\({ALICE}, {ALICE}, {ALICE}\) += 0", call):
            dropped.add(pid)
        elif str(host.work) in call or f"out.{job.job_id}" in call:
            roots += [line] if pid not in dropped else []
    assert len(dropped) == 2
    assert roots == []


def test_the_uid_rules_hold_by_themselves(tmp_path: Path) -> None:
    (tmp_path / "defs").write_text("# UID_MIN 5\nSYS_UID_MIN 100\nUID_MIN\t\t 4000\n")
    assert uid_min(str(tmp_path / "defs")) == 4000
    assert uid_min(str(tmp_path / "none")) == 1000
    for uid in (65534, 2**32 - 1, -1):
        with pytest.raises(SetupFailed):
            check_uid(uid, allow_system_uid=True)


def test_a_system_spec_under_another_uid_is_refused(host: SystemHost) -> None:
    job = JobDir.create(host.jobs_root, host.spec("true"))
    pid = os.fork()
    if pid == 0:
        os.chmod(host.jobs_root, 0o711)
        for path in (job.path, job.path / "spec"):
            os.chown(path, ALICE, ALICE)
        os.setresuid(ALICE, ALICE, ALICE)
        os._exit(main([str(job.path)]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == EXIT_SPEC_REFUSED
    assert job.claim() is None


def test_an_account_that_nobody_knows_may_be_known_again(host: SystemHost) -> None:
    """A directory server that is away says the same as one that has forgotten somebody."""
    end = host.wait_exit(host.sh("true", user="gone", uid=30000))
    assert (end.cause, end.place) == ("environment", "account gone")
    assert str(end.reason) == "account gone: unknown; it had uid 30000 at submit"
