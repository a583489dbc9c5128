"""Accounts that go, expire or change hands, and what the configuration says of users."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from gpusched_client.errors import Denied, GpuschedError, LimitReached
from tests.support.daemon import until
from tests.support.host import USERS, Host, request_of

pytestmark = [pytest.mark.root, pytest.mark.systemd]


@pytest.fixture
def dave(host: Host) -> Iterator[int]:
    """An account that comes and goes; its uid."""
    host.box.run("useradd", "--create-home", "--uid", "3900", "dave")
    USERS["dave"] = 3900
    yield 3900
    del USERS["dave"]
    host.end_all()
    for user in ("dave", "eve"):
        host.box.run("userdel", "--remove", "--force", user, check=False)


def test_a_deleted_user_s_jobs_never_run_as_who_gets_the_uid(host: Host, dave: int) -> None:
    host.box.run("sh", "-c", "echo untouched > /home/dave/mark; chmod 666 /home/dave/mark")
    running = host.sh("dave", "sleep 60", gpus=3)
    host.until_state(running, "RUNNING")
    waiting = host.sh("dave", "id > /home/dave/mark", gpus=2)
    host.box.run("userdel", "--force", "dave")
    host.box.run("useradd", "--no-create-home", "--uid", str(dave), "eve")
    # What runs goes on; eve owns none of it.
    assert host.job(running).state == "RUNNING"
    with host.client(dave) as eve:
        until(lambda: eve.hello().user == "eve", "the daemon has heard of eve")
        assert {outcome.code for outcome in eve.cancel([running, waiting])} == {"denied"}
        assert eve.job(waiting).events is None
    host.admin(lambda client: client.cancel(running))
    host.wait(running)

    def held() -> str | None:
        job = host.job(waiting)
        return job.reason.text if job.hold and job.reason else None

    assert "belongs to eve now" in until(held, "the waiting job is held")
    assert host.box.sh("cat /home/dave/mark") == "untouched\n"
    # An admin who insists gets a failure, not a job of eve's: the supervisor looks for itself.
    host.box.run("userdel", "eve")
    host.box.run("useradd", "--uid", str(dave), "dave")
    host.admin(lambda client: client.update(waiting, hold=False))
    assert host.wait(waiting).exit_code == 0
    assert f"uid={dave}(dave)" in host.box.sh("cat /home/dave/mark")


def test_an_expired_account_starts_nothing_until_it_is_extended(host: Host, dave: int) -> None:
    del dave
    host.box.run("chage", "--expiredate", "2020-01-01", "dave")
    job_id = host.sh("dave", "touch /home/dave/ran")

    def waits_for_it() -> bool:
        reason = host.job(job_id).reason
        return reason is not None and "account dave: PAM account refused" in reason.text

    until(waits_for_it, "it is PENDING with the account as its reason")
    assert host.job(job_id).state == "PENDING"
    assert "ran" not in host.box.sh("ls /home/dave")
    host.box.run("chage", "--expiredate", "-1", "dave")
    assert host.wait(job_id).exit_code == 0


@pytest.mark.parametrize(
    ("close", "reopen", "named"),
    [
        ("touch /run/nologin", "rm /run/nologin", "/run/nologin exists"),
        (
            "mv /etc/pam.d/gpusched /etc/gpusched.away",
            "mv /etc/gpusched.away /etc/pam.d/gpusched",
            "/etc/pam.d/gpusched is missing; `gpuschedd install`",
        ),
    ],
)
def test_while_the_host_is_closed_jobs_wait_with_the_reason(
    host: Host, close: str, reopen: str, named: str
) -> None:
    """As before a shutdown: a queue that were started then would fail from end to end."""
    host.box.sh(close)
    ids = [host.sh("alice", "true") for _ in range(3)]

    def reason() -> str | None:
        found = host.job(ids[-1]).reason
        return found.text if found is not None and found.code == "HostClosed" else None

    assert named in until(reason, "the job says why it waits")
    assert [host.job(job_id).attempt for job_id in ids] == [1, 1, 1]
    status = host.box.run("gctl", "status", check=False)
    assert status.returncode == 1
    assert "closed to users" in status.stdout
    host.box.sh(reopen)
    assert [host.wait(job_id).exit_code for job_id in ids] == [0, 0, 0]


def test_limits_hold_jobs_back_with_the_reason(host: Host) -> None:
    limits = '[limits.alice]\nmax_gpus = 2\n[limits."@shared"]\nmax_jobs = 1\nqueued_jobs = 3\n'
    host.box.disk("/etc/gpuschedd/config.toml").write_text(f'simulate = "4x24G"\n{limits}')
    host.admin(lambda client: client.reload())
    alice = [host.sh("alice", "sleep 60", gpus=1) for _ in range(3)]
    bob = [host.sh("bob", "sleep 60", gpus=1) for _ in range(2)]
    for job_id in (*alice[:2], bob[0]):
        host.until_state(job_id, "RUNNING")

    def is_held_back(job_id: int) -> bool:
        job = host.job(job_id)
        return job.state == "PENDING" and job.reason is not None and job.reason.code == "UserLimit"

    for job_id in (alice[2], bob[1]):
        until(partial(is_held_back, job_id), "the limit holds it back")
    host.sh("bob", "true")
    with pytest.raises(LimitReached, match="the limit is 3"):
        host.sh("bob", "true")


def test_who_may_submit_is_the_configuration_s_word(host: Host) -> None:
    host.until_state(host.sh("alice", "sleep 600", gpus=4), "RUNNING")
    jobs = '[jobs]\nusers = ["alice", "@operators"]\n'
    later = host.sh("bob", "true", gpus=4)
    host.box.disk("/etc/gpuschedd/config.toml").write_text(f'simulate = "4x24G"\n{jobs}')
    host.admin(lambda client: client.reload())
    request = request_of("bob", "true")
    with host.client("bob") as bob, pytest.raises(Denied, match=r"jobs\.users"):
        bob.submit_many([request])
    job = host.job(later)
    assert job.state == "PENDING"
    assert job.reason is not None
    assert "no longer names bob" in job.reason.text
    host.sh("carol", "true")
    host.reconfigure("")
    until(lambda: not host.job(later).hold, "it is released with the old configuration")


def test_members_of_the_admin_group_administer(host: Host) -> None:
    with host.client("carol") as carol, pytest.raises(GpuschedError):
        carol.drain(0, "no")
    host.reconfigure('admin_group = "operators"')
    job_id = host.sh("alice", "sleep 60", gpus=1)
    with host.client("carol") as carol:
        assert carol.hello().admin
        assert carol.drain(3, "fan").state == "drained"
        assert carol.resume(3).state == "ok"
        assert carol.cancel(job_id)[0].code is None
        assert carol.status().version
        with pytest.raises(Denied, match="root"):
            list(carol.backup())
    host.wait(job_id)


def test_an_owner_s_job_is_put_first_of_the_owner_s_own(host: Host) -> None:
    host.until_state(host.sh("carol", "sleep 60", gpus=4), "RUNNING")
    first, second, third = (host.sh("alice", "true", gpus=4) for _ in range(3))
    his = host.sh("bob", "true", gpus=4)
    with host.client("alice") as alice:
        assert alice.top(third).code is None
        mine = [job.job_id for job in alice.queue().jobs if job.user == "alice"]
        assert mine == [third, first, second]
        assert {alice.job(job_id).nice for job_id in (first, second)} == {0}
        assert alice.job(third).nice == 0
        assert alice.top(his).code == "denied"
        assert alice.update(third, nice=-1)[0].code == "denied"
    assert host.job(his).nice == 0
    host.admin(lambda client: client.top(second))
    assert host.admin(lambda client: client.queue().jobs[0]).job_id == second
    assert host.job(second).nice == -1000


def test_what_an_admin_or_the_configuration_holds_its_owner_cannot_release(host: Host) -> None:
    job_id = host.sh("alice", "true", gpus=4, hold=True)
    host.admin(lambda client: client.update(job_id, hold=True))  # hers becomes the admin's
    with host.client("alice") as alice:
        assert alice.update(job_id, hold=False)[0].code == "denied"
    host.admin(lambda client: client.update(job_id, hold=False))
    assert host.wait(job_id).exit_code == 0
