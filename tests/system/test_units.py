"""The units: what PID 1 makes of them, what they outlive, and what ends them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from gpusched_client.wire.job_messages import JobEvent
from tests.support.box import BIN
from tests.support.daemon import until
from tests.support.host import NODES, USERS, Host, lines_of

pytestmark = [pytest.mark.root, pytest.mark.systemd]

UNITS = ("gpuschedd.socket", "gpuschedd.service", "gpusched-nvidia.service", "gpusched.slice")
EXPOSURE_MAX = 1.5


def test_the_units_are_clean_and_the_daemon_is_shut_in(host: Host) -> None:
    verified = host.box.run("systemd-analyze", "verify", *UNITS, check=False)
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
    table = host.box.sh("systemd-analyze security --no-pager gpuschedd.service")
    last = next(line for line in table.splitlines() if "Overall exposure" in line)
    assert float(last.split(":")[1].split()[0]) <= EXPOSURE_MAX
    status = host.box.sh(f"grep Cap /proc/{host.daemon_pid()}/status")
    assert {line.split()[1] for line in status.splitlines()} == {"0" * 16}


def test_a_job_s_unit_has_its_bounds_and_nothing_of_the_user_s(host: Host) -> None:
    host.reconfigure("")
    marker = "MARK-on-the-line"
    job_id = host.sh(
        "alice", f": {marker}; sleep 60", gpus=1, memory="1G", cpus=2, name="secret-name"
    )
    host.until_state(job_id, "RUNNING")
    unit = f"gpusched-job-{job_id}-1.service"
    assert host.show(unit, "MemoryMax") == str(2**30)
    assert host.show(unit, "CPUQuotaPerSecUSec") == "2s"
    assert host.show(unit, "Slice") == "gpusched.slice"
    assert host.show(unit, "KillMode") == "mixed"
    assert host.show(unit, "TimeoutStopUSec") == "31s"
    shown = host.systemctl("show", unit) + host.systemctl("cat", unit)
    for word in (marker, "alice", "secret-name", "sleep"):
        assert word not in shown
    host.admin(lambda client: client.cancel(job_id))
    host.wait(job_id)
    until(lambda: host.show(unit, "ActiveState") == "inactive", "the unit is gone")


def test_jobs_outlive_stop_kill_restart_and_reexec(host: Host) -> None:
    line = "trap 'exit 7' USR1; while :; do sleep 0.1; done"
    job_id = host.sh("alice", line, gpus=1)
    host.until_state(job_id, "RUNNING")
    host.systemctl("stop", "gpuschedd.socket", "gpuschedd.service")
    host.systemctl("start", "gpuschedd.socket", "gpuschedd.service")
    assert host.job(job_id).state == "RUNNING"
    before = host.daemon_pid()
    host.box.run("kill", "-9", str(before))
    until(lambda: host.daemon_pid() not in (0, before), "PID 1 has started it again")
    host.systemctl("daemon-reexec")
    host.systemctl("restart", "gpuschedd.service")
    assert host.job(job_id).state == "RUNNING"
    with host.client("alice") as client:
        client.cancel(job_id, signal=int(signal.SIGUSR1))
    job = host.wait(job_id)
    assert (job.state, job.exit_code, job.attempt) == ("FAILED", 7, 1)


def test_an_end_while_the_daemon_is_down_has_its_code_and_time(host: Host) -> None:
    job_id = host.sh("alice", "while [ ! -e go ]; do sleep 0.05; done; exit 5", gpus=1)
    host.until_state(job_id, "RUNNING")
    host.systemctl("stop", "gpuschedd.socket", "gpuschedd.service")
    told_at_s = time.time()
    host.box.run("touch", "/home/alice/go")
    ended = host.box.disk(f"/var/lib/gpuschedd/jobs/{job_id}.1/exit")
    until(ended.exists, "the exit record is there")
    seen_at_s = time.time()
    host.systemctl("start", "gpuschedd.socket", "gpuschedd.service")
    job = host.wait(job_id)
    host.box.run("rm", "/home/alice/go")
    assert (job.state, job.exit_code) == ("FAILED", 5)
    assert job.ended_at_s is not None
    assert told_at_s <= job.ended_at_s <= seen_at_s


def test_stopping_the_slice_ends_every_job(host: Host) -> None:
    ids = [host.sh("alice", "sleep 60", gpus=1), host.sh("bob", "trap '' TERM; sleep 60", gpus=1)]
    for job_id in ids:
        host.until_state(job_id, "RUNNING")
    host.systemctl("stop", "gpusched.slice")
    jobs = [host.wait(job_id) for job_id in ids]
    assert {(job.state, job.cause) for job in jobs} == {("CANCELLED", "stopped")}
    assert host.wait(host.sh("alice", "true", gpus=1)).state == "COMPLETED"


def test_what_escapes_by_setsid_is_gone_before_the_gpu_is_free(host: Host) -> None:
    line = "setsid sh -c 'trap \"\" TERM; echo $$ > escaped; sleep 300' & "
    line += "until [ -s escaped ]; do sleep 0.05; done; exit 3"
    job = host.wait(host.sh("alice", line, gpus=1))
    assert (job.state, job.exit_code) == ("FAILED", 3)
    pid = host.box.sh("cat /home/alice/escaped; rm /home/alice/escaped").strip()
    assert host.box.run("kill", "-0", pid, check=False).returncode != 0


def test_a_killed_supervisor_leaves_nothing_and_the_end_is_unknown(host: Host) -> None:
    job_id = host.sh("alice", "setsid sleep 300 & exec sleep 300", gpus=1)
    host.until_state(job_id, "RUNNING")
    pid = host.show(f"gpusched-job-{job_id}-1.service", "MainPID")
    host.box.run("kill", "-9", pid)
    assert host.wait(job_id).state == "NODE_FAIL"
    assert host.box.run("pgrep", "-u", "alice", "sleep", check=False).stdout == ""


def test_a_hung_pid_1_delays_starts_and_nothing_else(host: Host) -> None:
    running = host.sh("bob", "sleep 60", gpus=1)
    host.until_state(running, "RUNNING")
    os.kill(host.box.pid, signal.SIGSTOP)
    try:
        job_id = host.submit("alice", "true", gpus=1)
        host.until_state(job_id, "CONFIGURING")
        with host.client("bob") as client:
            for _ in range(50):
                client.hello()
                client.jobs(limit=10)
            client.cancel(running)
            assert client.wait(running, timeout_s=30).state == "CANCELLED"
    finally:
        os.kill(host.box.pid, signal.SIGCONT)
    job = host.wait(job_id)
    assert (job.state, job.exit_code) == ("COMPLETED", 0)


def test_direct_launch_is_refused_inside_the_hardened_unit(host: Host) -> None:
    line = (
        "systemd-run --quiet --wait --pipe --collect -p CapabilityBoundingSet= "
        f"-- {BIN}/gpuschedd --system --launch=direct --state-dir /var/lib/other "
        "--socket /run/other.sock 2>&1; echo status $?"
    )
    said = host.box.sh(line)
    assert "CAP_SETUID" in said
    assert "status 78" in said


@pytest.fixture
def gpu_nodes(host: Host) -> Iterator[None]:
    """Device nodes for the four simulated GPUs, and the control nodes."""
    for minor, (major, number) in NODES.items():
        host.box.run("mknod", "-m", "666", f"/dev/nvidia{minor}", "c", str(major), str(number))
    host.box.run("mknod", "-m", "666", "/dev/nvidiactl", "c", "10", "257")
    yield
    host.box.sh("rm -f /dev/nvidia*")


LOOK = (
    "for d in nvidia0 nvidia1 nvidia2 nvidia3 nvidiactl null urandom; do "
    "(exec 2>/dev/null; : < /dev/$d) && printf '%s ' $d; done; "
    "echo; python3 -c 'import pty, os; print(len(pty.openpty()))'; "
)


def test_a_job_opens_only_the_gpus_it_was_given(host: Host, gpu_nodes: None) -> None:
    del gpu_nodes
    outside = host.box.sh(LOOK, user="alice").split("\n")[0].split()
    if len(outside) < 7:
        pytest.skip(f"the nodes that stand in for GPUs cannot be opened here: {outside}")
    wait = "while [ ! -e /tmp/go ]; do sleep 0.05; done"
    jobs = {user: host.sh(user, f"{LOOK} {wait}", gpus=1) for user in ("alice", "bob")}
    both = {user: host.until_state(job_id, "RUNNING") for user, job_id in jobs.items()}
    assert len({job.gpu_indices for job in both.values()}) == 2
    host.box.run("touch", "/tmp/go")
    for user, job_id in jobs.items():
        host.wait(job_id)
        seen, *rest = lines_of(host.output(user, job_id))
        (index,) = both[user].gpu_indices or ()
        assert seen.split() == [f"nvidia{index}", "nvidiactl", "null", "urandom"]
        assert rest == ["2"]  # a pseudo-terminal can be had as ever
    host.box.run("rm", "/tmp/go")
    assert lines_of(host.run_as("alice", LOOK, gpus=0))[0].split() == [
        "nvidiactl",
        "null",
        "urandom",
    ]


def test_a_granted_gpu_without_its_node_is_an_error_not_a_surprise(
    host: Host, gpu_nodes: None
) -> None:
    del gpu_nodes
    host.box.run("rm", "/dev/nvidia3")
    job_id = host.submit("alice", "true", gpus=4)

    def failed() -> bool:
        return any("/dev/nvidia3 does not exist" in event.text for event in _events(host, job_id))

    until(failed, "the launch fails and says why")
    assert host.job(job_id).state == "PENDING"


def _events(host: Host, job_id: int) -> tuple[JobEvent, ...]:
    return host.job(job_id).events or ()


def test_direct_launch_does_the_same_without_pid_1(host: Host) -> None:
    """A daemon that is root and nothing of systemd's: jobs become their users all the same."""
    options = "--state-dir /var/lib/direct --socket /run/direct/s.sock --config /dev/null"
    host.box.run(
        *("systemd-run", "--quiet", "--unit=direct", "-p", "KillMode=process", "--"),
        *(str(BIN / "gpuschedd"), "--system", "--launch=direct", *options.split()),
        *("--simulate", "2x24G", "--set", "scheduling.kill_grace=1"),
    )
    where = "GPUSCHED_SOCKET=/run/direct/s.sock"
    gsub = f"{where} gsub --parsable -D /tmp -o direct-%j"
    asked = ("env", where, "gq")
    until(lambda: host.box.run(*asked, check=False).returncode == 0, "it answers")
    who = "'id -u; id -G | wc -w; grep -h CapEff /proc/self/status | cut -f2'"
    done = host.box.run("sh", "-c", f"{gsub} --wait -- sh -c {who}", user="alice", check=False)
    assert done.returncode == 0, done.stderr
    output = host.box.sh("cat /tmp/direct-1; rm /tmp/direct-1")
    groups = len(host.box.run("id", "-G", "alice").stdout.split())
    assert output.split() == [str(USERS["alice"]), str(groups), "0" * 16]
    until_go = "until [ -e /tmp/direct-go ]; do sleep 0.05; done"
    # It outlives the daemon here too: the supervisor is in nobody's way but its own.
    job_id = host.box.sh(f"{gsub} -- sh -c '{until_go}; exit 6'", user="bob").strip()
    host.systemctl("kill", "--kill-whom=main", "--signal=KILL", "direct")
    until(lambda: host.show("direct", "MainPID") == "0", "it is gone")
    host.box.run(
        *("systemd-run", "--quiet", "--unit=direct2", "-p", "KillMode=process", "--"),
        *(str(BIN / "gpuschedd"), "--system", "--launch=direct", *options.split()),
        *("--simulate", "2x24G"),
    )
    host.box.run("touch", "/tmp/direct-go")
    status = (
        f"export {where}; "
        f"until gq --status {job_id} 2>/dev/null | grep -q failed; do sleep 0.1; done; "
        f"gq {job_id} --json"
    )
    assert '"exit_code": 6' in host.box.run("sh", "-c", status, user="bob").stdout
    host.systemctl("stop", "direct2")
    host.box.sh("rm -rf /var/lib/direct /run/direct /tmp/direct-*")
