"""A job is its submitter in every respect, and nobody is taken for somebody else."""

from __future__ import annotations

import os
import socket

import msgpack
import pytest

from gpusched_client.errors import Denied
from tests.support.box import BIN
from tests.support.host import SOCKET, USERS, Host, lines_of, request_of

pytestmark = [pytest.mark.root, pytest.mark.systemd]

HELLO = f"""
import msgpack, os, socket
s = socket.socket(socket.AF_UNIX)
s.connect("{SOCKET}")
s.sendall(msgpack.packb([0, 1, "hello", []]))
result = msgpack.unpackb(s.recv(65536))[3]
print(os.getuid(), result["uid"], result["admin"])
"""
WHO = (
    "id -u; id -g; id -G | tr ' ' '\\n' | sort | tr '\\n' ' '; echo; "
    "grep -h '^Cap[IPEA]' /proc/self/status | cut -f2 | sort -u; "
    "cat /proc/self/oom_score_adj; nice; ls /proc/$$/fd | tr '\\n' ' '; echo; "
    "env | grep -c '^NOTIFY_SOCKET\\|^LISTEN_\\|^WATCHDOG'; cut -d' ' -f7 /proc/$$/stat; pwd; "
    "readlink /proc/$$/fd/0"
)


@pytest.mark.parametrize("user", ["alice", "bob"])
def test_a_job_is_its_submitter_with_all_groups_and_no_capability(host: Host, user: str) -> None:
    groups = host.box.run("id", "-G", user).stdout.split()
    found = lines_of(host.run_as(user, WHO))
    assert found[:2] == [str(USERS[user]), groups[0]]
    assert sorted(found[2].split()) == sorted(groups)
    assert found[3] == "0" * 16  # inheritable, permitted, effective and ambient alike
    assert found[4:6] == ["0", "0"]  # oom_score_adj, nice
    assert found[6].split()[:3] == ["0", "1", "2"]
    assert len(found[6].split()) <= 4  # and the one that lists them
    assert found[7:10] == ["0", "0", f"/home/{user}"]  # unit variables, terminal, directory
    assert found[10] == "/dev/null"


def test_umask_and_directory_are_those_of_the_submission(host: Host) -> None:
    line = (
        "cd /tmp && umask 037 && gsub --parsable --wait -g 0 -o out -- sh -c 'umask; pwd; touch f'"
    )
    done = host.box.run("sh", "-c", line, user="bob", check=False)
    assert done.returncode == 0, done.stderr
    made = host.box.sh("cat /tmp/out; stat -c '%a %U' /tmp/out /tmp/f; rm /tmp/out /tmp/f")
    assert made.splitlines() == ["0037", "/tmp", "640 bob", "640 bob"]


def test_the_name_that_counts_is_the_kernel_s(host: Host) -> None:
    """Whatever a variable, a user namespace or a switch of user before the connect may claim."""
    script = "gsub --parsable -g 0 -o /dev/null true"
    forged = int(host.box.sh(f"USER=alice LOGNAME=alice {script}", user="bob"))
    assert host.job(forged).user == "bob"
    inside = host.box.run("unshare", "-Ur", BIN / "python", "-c", HELLO, user="alice")
    assert inside.stdout.split() == ["0", "3001", "False"]
    within = host.box.sh(f"unshare -Ur sh -c 'cd /tmp; {script}'", user="alice")
    assert host.job(int(within)).user == "alice"
    switched = host.box.sh(f"runuser -u alice -- sh -c 'cd /tmp; {script}'")
    assert host.job(int(switched)).user == "alice"


@pytest.mark.parametrize("field", [{"uid": 0}, {"user": "root"}, {"gid": 0}, {"groups": [0]}])
def test_a_message_that_names_a_user_is_an_error(host: Host, field: dict[str, object]) -> None:
    job = {"argv": ["true"], "cwd": "/", "environment": {}, "gpus": 0, **field}
    directory = os.open(host.box.inside(SOCKET.parent), os.O_PATH | os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"/proc/self/fd/{directory}/{SOCKET.name}")
        connection.sendall(msgpack.packb([0, 1, "submit", [{"jobs": [job]}]]))
        _, _, error, result = msgpack.unpackb(connection.recv(65536))
    os.close(directory)
    assert result is None
    assert error["code"] == "invalid"
    assert error["data"]["path"] == f"jobs[0].{next(iter(field))}"


def test_a_private_host_hides_what_others_run_and_where(host: Host) -> None:
    """Names, commands and directories, in every answer; that the job is there stays visible."""
    host.reconfigure("private = true")
    marker = "MARK-of-alice"
    waiting = host.sh("alice", f": {marker}; true", gpus=4, name=marker, hold=True)
    with host.client("bob") as bob:
        (listed,) = bob.jobs(ids=[waiting]).jobs
        (queued,) = bob.queue().jobs
        for shown in (listed, queued, bob.job(waiting)):
            assert (shown.job_id, shown.user) == (waiting, "alice")
            assert (shown.name, shown.command, shown.argv, shown.cwd) == (None,) * 4
            assert marker not in repr(shown)
    with host.client("alice") as alice:
        (own,) = alice.jobs(ids=[waiting]).jobs
        assert own.name == marker
        assert marker in str(own.command)


def test_bob_sees_alice_s_queue_and_cannot_touch_it(host: Host) -> None:
    marker = "MARK-of-alice"
    running = host.sh("alice", f": {marker}; sleep 60", gpus=1)
    waiting = host.sh("alice", f": {marker}; true", gpus=4, name="hers")
    host.until_state(running, "RUNNING")
    with host.client("bob") as bob:
        shown = {job.job_id: job for job in bob.jobs().jobs}
        assert shown[waiting].user == "alice"
        assert shown[waiting].name == "hers"
        assert [job.job_id for job in bob.queue().jobs] == [waiting]
        assert marker in str(shown[waiting].command)
        hers = bob.job(waiting)
        assert (hers.argv, hers.cwd) == (shown[waiting].argv, shown[waiting].cwd)
        assert (hers.output, hers.events, hers.explanations) == (None, None, None)
        both = [running, waiting]
        attempts = (
            *bob.cancel(both),
            *bob.cancel(running, signal=10),
            *bob.update(both, hold=True),
            *bob.update(both, time_limit=60),
            *bob.update(both, nice=1000),
            *bob.update(both, name="his"),
            bob.top(waiting),
        )
        assert {outcome.code for outcome in attempts} == {"denied"}
        for forbidden in (
            lambda: bob.drain(0, "mine"),
            lambda: bob.resume(0),
            lambda: bob.reload(),
            lambda: list(bob.backup()),
        ):
            with pytest.raises(Denied):
                forbidden()
    assert host.job(running).state == "RUNNING"
    assert host.job(waiting).state == "PENDING"
    rows = host.box.sh(
        '/usr/bin/python3 -c "import sqlite3; print(sqlite3.connect('
        "'file:/var/lib/gpuschedd/gpuschedd.sqlite3?mode=ro', uri=True).execute("
        "'select count(*) from audit where uid = 3002').fetchone()[0])\""
    )
    assert int(rows) >= len(attempts) + 4


def test_jobs_of_root_of_system_accounts_and_of_nobody_are_refused(host: Host) -> None:
    request = request_of("alice", "true", cwd="/")
    for uid, words in (
        (0, "root"),
        (1, "UID_MIN"),
        (4321, "no account"),
        (65534, "user namespace"),
    ):
        with host.client(uid) as client, pytest.raises(Denied, match=words):
            client.submit_many([request])


def test_root_s_jobs_run_where_the_configuration_says_so(host: Host) -> None:
    host.box.disk("/etc/gpuschedd/config.toml").write_text(
        'simulate = "4x24G"\n[jobs]\nsystem_users = true\n'
    )
    host.admin(lambda client: client.reload())
    job_id = host.submit("root", "id", "-u", cwd="/tmp", output="/tmp/root-job")
    assert host.wait(job_id).exit_code == 0
    assert host.box.sh("cat /tmp/root-job; rm /tmp/root-job") == "0\n"


def test_nothing_in_the_state_directory_is_a_user_s(host: Host) -> None:
    """A captured script too: its user reads it, nobody else; nobody changes, links or keeps it."""
    script = b"#!/bin/sh\nuntil [ -e /tmp/go ]; do sleep 0.05; done; echo ran; exit 4\n"
    job_id = host.submit("alice", script=script, gpus=0, cwd="/tmp", output="/tmp/scripted")
    host.until_state(job_id, "RUNNING")
    assert host.box.sh("find /var/lib/gpuschedd ! -user root") == ""
    place = f"/var/lib/gpuschedd/scripts/{job_id}.1"
    tries = (
        f"cat {place}; echo x >> {place}; chmod 777 {place}; ln {place} /var/tmp/$USER; rm {place}"
    )
    said = {user: host.box.sh(f"({tries}) 2>&1; true", user=user) for user in ("alice", "bob")}
    assert "until" in said["alice"]
    assert "until" not in said["bob"]
    assert host.box.sh("find /var/tmp -links +1 -type f") == ""
    assert host.box.disk(place).read_bytes() == script
    host.box.run("touch", "/tmp/go")
    assert host.wait(job_id).exit_code == 4
    assert host.box.sh("cat /tmp/scripted; rm /tmp/go /tmp/scripted") == "ran\n"
    assert host.box.sh("ls /var/lib/gpuschedd/scripts") == ""


def test_a_job_cannot_speak_to_the_daemon_s_own_places(host: Host) -> None:
    """The hint socket, the job directories and the database are root's alone."""
    line = (
        "for f in jobs hint.sock gpuschedd.sqlite3 lock scripts; do "
        "head -c1 /var/lib/gpuschedd/$f 2>/dev/null && echo READ $f; "
        "ls /var/lib/gpuschedd/$f/* 2>/dev/null && echo LISTED $f; done; "
        "ls /var/lib/gpuschedd 2>/dev/null && echo LISTED; "
        "ss -xl 2>/dev/null | grep -c '@.*gpusched'; true"
    )
    found = host.run_as("alice", line)
    assert "READ" not in found
    assert "LISTED" not in found
