"""What is alice's: run as her alone, seen by her alone."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from gpusched_client import Client
from gpusched_client.wire.job_messages import Event
from tests.support.host import USERS, Host

pytestmark = [pytest.mark.root, pytest.mark.systemd]

#: Each of these, executed by whomever, leaves a file that says by whom.
HOSTILE = r"""
cd /home/alice && mkdir -p trap && cd trap
cat > touch.sh <<'X'
: > /tmp/owned-by-$(id -u)
X
cat > mark.py <<'X'
import os
open("/tmp/owned-by-%d" % os.geteuid(), "w").close()
X
for name in json os pwd re sitecustomize usercustomize msgpack ctypes; do cp mark.py $name.py; done
cat > mark.c <<'X'
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void mark(void) {
    char path[64];
    snprintf(path, sizeof path, "/tmp/owned-by-%d", (int)geteuid());
    close(open(path, O_CREAT | O_WRONLY, 0644));
}
X
gcc -shared -fPIC -o mark.so mark.c 2>/dev/null || true
printf '#!/bin/sh\n. /home/alice/trap/touch.sh\n' > systemctl; chmod +x systemctl
"""


def test_what_the_environment_names_is_executed_as_the_user_alone(host: Host) -> None:
    host.box.sh("rm -f /tmp/owned-by-*")
    host.box.sh(HOSTILE, user="alice")
    trap = "/home/alice/trap"
    environment = {
        "PATH": f"{trap}:/usr/bin:/bin",
        "LD_PRELOAD": f"{trap}/mark.so",
        "LD_LIBRARY_PATH": trap,
        "LD_AUDIT": f"{trap}/mark.so",
        "PYTHONPATH": trap,
        "PYTHONSTARTUP": f"{trap}/mark.py",
        "PYTHONHOME": trap,
        "BASH_ENV": f"{trap}/touch.sh",
        "ENV": f"{trap}/touch.sh",
        "GCONV_PATH": trap,
        "HOSTALIASES": f"{trap}/touch.sh",
        "TMPDIR": trap,
    }
    ids = [
        host.submit("alice", "bash", "-c", "true", cwd=trap, environment=environment, gpus=1),
        host.submit(
            "alice",
            "bash",
            "-c",
            "echo CUDA out of memory; false",
            cwd=trap,
            environment=environment,
            gpus=1,
        ),
        host.submit("alice", script=b"#!/bin/bash\ntrue\n", cwd=trap, environment=environment),
    ]
    for job_id in ids:
        host.wait(job_id)
    owned = host.box.sh("cd /tmp && ls owned-by-* 2>/dev/null; rm -f owned-by-*").split()
    host.box.run("rm", "-rf", trap)
    assert owned == [f"owned-by-{USERS['alice']}"]


SEARCH = r"""
cd /; read -r token job
grep -rsla -e "$token" /run /var/lib /var/log /etc /tmp 2>/dev/null
for p in /proc/[0-9]*; do
    for f in environ cmdline comm stack maps; do
        grep -qsa -e "$token" $p/$f 2>/dev/null && [ "$(stat -c %u $p)" != 3002 ] && echo $p/$f
    done
done
systemctl list-units --all --no-pager 2>/dev/null | grep -e "$token"
for unit in $(systemctl list-units --all --no-legend --plain 'gpusched*' | cut -d' ' -f1); do
    { systemctl show $unit; systemctl cat $unit; systemctl status --no-pager $unit; } 2>/dev/null |
        grep -e "$token"
done
journalctl --no-pager 2>/dev/null | grep -e "$token"
gq -a --json 2>/dev/null | grep -e "$token"
gq "$job" --json 2>/dev/null | grep -e "$token"
ps -efwww | grep -v grep | grep -e "$token"
true
"""


def test_bob_finds_a_token_of_alice_s_environment_nowhere(host: Host) -> None:
    token = f"TOKEN-{uuid.uuid4().hex}"
    environment = {"PATH": "/usr/bin:/bin", "TOKEN": token}
    running = host.sh("alice", "sleep 60", gpus=1, environment=environment)
    waiting = host.sh("alice", "sleep 60", gpus=4, environment=environment)
    host.until_state(running, "RUNNING")
    host.box.disk("/home/bob/search").write_text(SEARCH)
    found = host.box.run("sh", "search", user="bob", text=f"{token} {running}\n").stdout
    assert found == ""
    with host.client("bob") as bob:
        replies = [bob.job(running), bob.job(waiting), bob.jobs(), bob.queue(), bob.gpus()]
        replies += [bob.usage(), bob.stats(), bob.status()]
    assert token not in repr(replies)
    assert token not in repr(host.job(waiting))  # not even root's view has it
    database = host.box.disk("/var/lib/gpuschedd/gpuschedd.sqlite3")
    host.end_all()
    wal = database.with_name(database.name + "-wal")
    host.systemctl("stop", "gpuschedd.socket", "gpuschedd.service")
    left = database.read_bytes() + (wal.read_bytes() if wal.exists() else b"")
    assert token.encode() not in left  # a final job's environment is gone from the books
    assert token not in host.journal()


def test_a_private_host_hides_names_and_directories(host: Host) -> None:
    host.reconfigure("private = true")
    job_id = host.sh("alice", "sleep 60", gpus=4, name="her-secret-name")
    host.until_state(job_id, "RUNNING")
    with host.client("bob") as bob:
        replies = repr([bob.job(job_id), bob.jobs(), bob.queue()])
        guessed = bob.jobs(name="her-secret-name")
        chosen = bob.jobs(name="her-secret-name", users=["alice"])
    assert "her-secret-name" not in replies
    assert (guessed.total, chosen.total) == (0, 0)  # a name cannot be tried out either
    with host.client("alice") as alice:
        assert alice.job(job_id).name == "her-secret-name"
        assert [job.job_id for job in alice.jobs(name="her-secret-name").jobs] == [job_id]


def test_how_a_job_ended_is_told_to_all_and_in_whose_words_to_its_owner(host: Host) -> None:
    """The words name logs and programs; a reason is its giver's own. What ran is shown to all."""
    host.reconfigure("jobs.environment_patience = 0")
    secret = f"secret-{uuid.uuid4().hex}"
    before = last_event_id(host)
    ids = [
        host.sh("alice", "true", cwd=f"/home/alice/{secret}"),
        host.sh("alice", "true", output=f"/home/alice/{secret}/log"),
        host.submit("alice", f"/home/alice/{secret}", name="named"),
        host.sh("alice", "sleep 60", gpus=1),
    ]
    host.until_state(ids[-1], "RUNNING")
    with host.client("alice") as alice:
        alice.cancel(ids[-1], reason=secret)
    for job_id in ids:
        host.wait(job_id)
    with host.client("bob") as bob:
        seen = [bob.job(job_id) for job_id in ids]
        shown = [*seen, *bob.jobs(ids=ids).jobs, *bob.wait(ids)]
        heard = heard_of(bob, before, ids)
    assert [job.cause for job in seen] == ["setup", "setup", "exit", "cancelled"]
    ends = [replace(job, command=None, argv=None, cwd=None) for job in shown]
    assert secret not in repr([ends, heard])
    with host.client("alice") as alice:
        assert all(secret in str(alice.job(job_id).cause_detail) for job_id in ids)
        assert secret in repr(heard_of(alice, before, ids))


def test_words_of_users_stay_within_their_line_of_the_log(host: Host) -> None:
    job_id = host.sh("alice", "sleep 60", gpus=1)
    host.until_state(job_id, "RUNNING")
    forged = f"over\n2026-01-01 00:00:00,000 INFO job_ended job={job_id} uid=0 forged\x1b]0;x\x07"
    with host.client("alice") as alice:
        alice.cancel(job_id, reason=forged)
    host.wait(job_id)
    (line,) = [line for line in host.journal().split("\n") if "forged" in line]
    assert f"cancel_requested job={job_id} uid={USERS['alice']}" in line
    assert line.isprintable()


def last_event_id(host: Host) -> int:
    """The newest event in the books."""
    database = "file:/var/lib/gpuschedd/gpuschedd.sqlite3?mode=ro"
    query = "SELECT coalesce(max(event_id), 0) FROM event"
    code = (
        f"import sqlite3; books = sqlite3.connect({database!r}, uri=True); "
        f"print(*books.execute({query!r}).fetchone())"
    )
    return int(host.box.run("/usr/bin/python3", "-c", code).stdout)


def heard_of(client: Client, before: int, ids: list[int]) -> list[Event]:
    """The events after `before`, to the last end of these jobs."""
    open_ids, heard = set(ids), list[Event]()
    for event in client.watch(since=before):
        heard.append(event)
        if event.kind == "job_ended":
            open_ids.discard(event.job_id or 0)
        if not open_ids:
            return heard
    raise AssertionError("the watch ended before the jobs")
