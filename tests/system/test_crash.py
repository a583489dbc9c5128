"""Restarts, kills and power cuts: nothing acknowledged is lost, nothing starts twice."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path

import pytest

from gpusched_client.errors import GpuschedError
from gpusched_client.terms import PendingReason
from gpusched_client.wire.job_messages import Reason
from gpuschedd.supervisor.records import RECORD_VERSION
from tests.support.box import BIN, VENV
from tests.support.daemon import until
from tests.support.host import Host

pytestmark = [pytest.mark.root, pytest.mark.systemd]

RESTARTS, KILLS, CUTS = 30, 10, 3
#: Appends its id and attempt when it begins, ends with a code of its own.
LINE = "echo $GPUSCHED_JOB_ID.$GPUSCHED_ATTEMPT >> /home/alice/began; sleep {sleep}; exit {code}"


def _began(host: Host) -> list[str]:
    path = host.home("alice") / "began"
    return path.read_text().split() if path.exists() else []


def _codes(host: Host, codes: dict[int, int]) -> dict[int, tuple[object, ...]]:
    """The jobs whose end is not as it must be."""
    wrong: dict[int, tuple[object, ...]] = {}
    for job_id, code in codes.items():
        job = host.wait(job_id, timeout_s=120)
        if job.exit_code != code:
            wrong[job_id] = (job.state, job.exit_code, job.cause, job.cause_detail, job.attempt)
    return wrong


def _is_another(host: Host, before: int) -> bool:
    return host.daemon_pid() not in (0, before)


def _submit(host: Host, code: int, sleep: str = "0.2") -> int:
    return host.sh("alice", LINE.format(sleep=sleep, code=code), gpus=code % 2)


@pytest.fixture(autouse=True)
def _no_traces(host: Host) -> None:
    (host.home("alice") / "began").unlink(missing_ok=True)


def test_restarts_and_kills_lose_nothing_and_refuse_no_call(host: Host) -> None:
    """Jobs come in all the time; every call waits through the restart instead of failing."""
    rng = random.Random(7)
    codes: dict[int, int] = {}
    acts = ["restart"] * RESTARTS + ["kill"] * KILLS
    rng.shuffle(acts)
    for number, act in enumerate(acts):
        codes[_submit(host, 1 + number % 100)] = 1 + number % 100
        before = host.daemon_pid()
        if act == "kill":
            host.box.run("kill", "-9", str(before))
        else:
            host.systemctl("restart", "--no-block", "gpuschedd.service")
        # Asked in the middle of it: a new connection waits in the socket that PID 1 holds.
        with host.client("bob") as bob:
            assert bob.hello().user == "bob"
        codes[_submit(host, 101 + number % 100)] = 101 + number % 100
        until(partial(_is_another, host, before), "it is another daemon")
    assert _codes(host, codes) == {}
    # Once each, and as the attempt on record: a start that a kill cut off before its supervisor
    # had claimed it is fenced by the next daemon and made again as the next attempt.
    assert sorted(_began(host)) == sorted(f"{i}.{host.job(i).attempt}" for i in codes)


def test_power_cuts_leave_every_job_right_or_node_fail(host: Host) -> None:
    for cut in range(CUTS):
        running = [host.sh("alice", LINE.format(sleep="300", code=1), gpus=1) for _ in range(2)]
        for job_id in running:
            host.until_state(job_id, "RUNNING")
        ended = _submit(host, 11 + cut, sleep="0")
        assert host.wait(ended).exit_code == 11 + cut
        waiting = host.sh("alice", LINE.format(sleep="0", code=21 + cut), gpus=4)
        fresh = [_submit(host, 31 + number, sleep="0.5") for number in range(5)]
        host.box.power_cut()
        host.box.boot()
        jobs = [host.wait(job_id) for job_id in running]
        assert {(job.state, job.exit_code) for job in jobs} == {("NODE_FAIL", None)}
        assert host.job(ended).exit_code == 11 + cut
        assert host.wait(waiting).exit_code == 21 + cut
        for number, job_id in enumerate(fresh):
            job = host.wait(job_id)
            assert job.state in ("FAILED", "NODE_FAIL")
            assert job.exit_code in (31 + number, None)
        began = [name.split(".")[0] for name in _began(host)]
        assert len(began) == len(set(began)), "no job began twice"


def test_a_venv_replaced_under_running_supervisors_costs_no_record(host: Host) -> None:
    line = "while [ ! -e /tmp/go ]; do sleep 0.05; done; echo CUDA out of memory; exit 4"
    ids = [host.sh("alice", line, gpus=1) for _ in range(2)]
    for job_id in ids:
        host.until_state(job_id, "RUNNING")
    host.systemctl("stop", "gpuschedd.socket", "gpuschedd.service")
    old = Path(f"{VENV}-old")
    host.box.sh(f"mv {VENV} {old} && cp -r {old} {VENV} && rm -rf {old}/lib")
    host.box.run("touch", "/tmp/go")
    for job_id in ids:
        record = host.box.disk(f"/var/lib/gpuschedd/jobs/{job_id}.1/exit")
        until(record.exists, "the exit record is there")
    host.box.sh(f"rm -rf {old} /tmp/go")
    host.systemctl("start", "gpuschedd.socket", "gpuschedd.service")
    jobs = [host.wait(job_id) for job_id in ids]
    assert {(job.state, job.exit_code) for job in jobs} == {("OUT_OF_MEMORY", 4)}
    assert host.box.run(BIN / "gsub", "--version", check=False).returncode in (0, 2)


def test_a_supervisor_that_is_taken_away_makes_the_job_wait(host: Host) -> None:
    """Also where only PID 1 hears how it ended: the job runs, and none of its attempts counts."""
    life = host.box.sh(f"ls {VENV}/lib/python*/site-packages/gpuschedd/supervisor/life.py").strip()
    host.box.sh(f"sed -i 's/^RECORD_VERSION = /RECORD_VERSION = 99/' {life}")
    job_id = host.sh("alice", "exit 4", gpus=1)
    unit = f"gpusched-job-{job_id}-1.service"
    until(lambda: host.show(unit, "NRestarts") not in ("", "0"), "PID 1 starts it again")
    assert f"has version 99{RECORD_VERSION}, not {RECORD_VERSION}" in host.journal(unit)
    host.box.sh(f"sed -i 's/^RECORD_VERSION = 99/RECORD_VERSION = /' {life}")
    job = host.wait(job_id)
    assert (job.exit_code, job.attempt) == (4, 1)

    host.box.sh(f"mv {Path(life).parent} {VENV}/away")
    job_id = host.sh("alice", "exit 5", gpus=1)

    def put_off() -> Reason | None:
        reason = host.job(job_id).reason
        return reason if reason and reason.code == PendingReason.LAUNCH_BACKOFF else None

    numbers = until(put_off, "the launch is put off").numbers
    assert numbers is not None
    assert numbers["failures"] == 0
    host.box.sh(f"mv {VENV}/away {Path(life).parent}")
    assert host.wait(job_id).exit_code == 5


def test_no_client_s_call_fails_across_restarts(host: Host) -> None:
    """A warm client and new ones, without pause, while the daemon restarts five times."""
    pid = os.fork()
    if pid == 0:
        os._exit(_call_without_pause(host))
    for _ in range(5):
        host.systemctl("restart", "gpuschedd.service")
    (host.home("alice") / "began").touch()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def _call_without_pause(host: Host) -> int:
    """In a child: calls until the mark is there; the number of those that failed."""
    failed = calls = 0
    mark = host.home("alice") / "began"
    with host.client("root") as warm:
        while not mark.exists():
            try:
                warm.hello()
                with host.client("root") as new:
                    new.hello()
                calls += 2
            except GpuschedError:
                failed += 1
    return min(failed, 100) if calls else 101
