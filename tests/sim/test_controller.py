"""The controller under random users, ends, full disks and deaths keeps its promises."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpusched_client.errors import GpuschedError, StorageError
from gpusched_client.terms import JobId, JobState, PendingReason
from gpusched_client.wire.job_messages import CancelRequest, UpdateRequest
from gpusched_client.wire.submit_messages import JobRequest, SubmitRequest
from gpuschedd.api.methods.submit import submit_jobs
from gpuschedd.api.readers import FairReader
from gpuschedd.core.job import Job
from gpuschedd.core.model import GpuState
from gpuschedd.jobs import batch as batch_module
from gpuschedd.jobs import cancel as jobs_cancel
from gpuschedd.jobs import submit as jobs_submit
from gpuschedd.jobs import update as jobs_update
from gpuschedd.jobs.controller import Evaluate
from gpuschedd.jobs.principal import Principal
from gpuschedd.jobs.waiting import waiting_reason
from gpuschedd.store.history import History
from gpuschedd.store.records import Changes
from tests.sim.harness import CARD, GIB, Host, ToldRunner, call_of, services_of

STEPS = 120
SEEDS, SOAK_SEEDS = range(12), range(300)


def a_request(random: Any) -> JobRequest:
    gpus = random.choice([0, 1, 1, 1, 2, 4])
    shares = gpus > 0 and random.random() < 0.5
    return JobRequest(
        argv=(b"true",),
        cwd=b"/",
        environment={b"A": b"b"},
        gpus=gpus,
        vram_bytes=random.choice([2, 6, 12, 20]) * GIB if shares else None,
        exclusive=shares and random.random() < 0.1,
        time_limit_s=random.choice([None, 30, 300, 3600]),
        nice=random.choice([0, 0, 0, 100]),
        hold=random.random() < 0.1,
    )


def check_gpus(host: Host) -> None:
    """No GPU beyond its memory, nor twice; whole-GPU jobs alone."""
    holders: dict[str, list[tuple[Job, int]]] = {}
    for job in host.controller.state.jobs.values():
        if job.holds_gpus:
            for grant in job.grants:
                holders.setdefault(grant.uuid, []).append((job, grant.held_bytes))
    for uuid, jobs in holders.items():
        assert sum(held for _, held in jobs) <= CARD, uuid
        if any(job.whole or job.request.exclusive for job, _ in jobs):
            assert len(jobs) == 1, uuid
        assert len(jobs) <= host.settings.sharing.max_jobs_per_gpu


def check_books(host: Host) -> None:
    """Memory is what the books say: a daemon that died now would know the same."""
    state, loaded = host.controller.state, host.store.load()
    assert {job.job_id: job for job in loaded.jobs} == state.jobs
    ages = {
        job_id: (row.eligible_since_s, row.age_gained_s, row.window_since_s)
        for job_id, row in state.ages.items()
    }
    assert ages == {
        job_id: (age.eligible_since_s, age.age_gained_s, age.window_since_s)
        for job_id, age in loaded.ages.items()
    }
    assert loaded.next_job_id == state.next_job_id
    assert loaded.last_event_id == host.controller.last_event_id
    assert {job.job_id for job in loaded.jobs if job.holds_gpus} == state.holding
    open_promises = [row.job_id for row in loaded.promises]
    assert open_promises == ([state.promise.job_id] if state.promise else [])


def check_queue(host: Host) -> None:
    """Exactly the eligible jobs are queued, with the ages that are committed."""
    state = host.controller.state
    for job in state.jobs.values():
        waits = job.state is JobState.PENDING and job.hold is None
        if job.not_before_sched_s is None:
            assert (job.job_id in state.queues) == waits, job
        queued = state.queues.get(job.job_id)
        if queued is not None:
            assert queued == state.ages[job.job_id]


def check_accounts(host: Host) -> None:
    """Exactly the jobs that hold GPUs are charged, each at its own rate."""
    controller = host.controller
    held = map(controller.state.jobs.__getitem__, controller.state.holding)
    rates = {job.job_id: controller.charging.rate_of(job) for job in held}
    assert controller.charging.rates() == {
        job_id: rate for job_id, rate in rates.items() if rate > 0
    }


def check_reasons(host: Host) -> None:
    """Everybody who waits is told why, once a pass has looked."""
    state = host.controller.state
    for job in state.jobs.values():
        if job.state is JobState.PENDING and not host.world.disk_full:
            reason = waiting_reason(state, job, host.controller.clock.now_s())
            assert reason.text, job
            assert reason.code is not PendingReason.NONE, job


async def submit_some(host: Host, caller: Principal, known: list[int]) -> None:
    random = host.world.random
    wanted = SubmitRequest(jobs=tuple(a_request(random) for _ in range(random.randint(1, 3))))
    result = await host.ask(lambda batch: jobs_submit.submit(batch, caller, wanted, None))
    if host.world.disk_full:
        assert isinstance(result, StorageError | GpuschedError)
    if not isinstance(result, GpuschedError):
        known += result.job_ids


async def cancel_one(host: Host, caller: Principal, known: list[int]) -> None:
    cancel = CancelRequest(job_ids=(host.world.random.choice(known),))
    await host.ask(lambda batch: jobs_cancel.cancel(batch, caller, cancel))


async def update_one(host: Host, caller: Principal, known: list[int]) -> None:
    random = host.world.random
    update = UpdateRequest(
        job_ids=(random.choice(known),), hold=random.random() < 0.4, nice=random.randint(0, 200)
    )
    await host.ask(lambda batch: jobs_update.update(batch, caller, update, None))


async def change_request(host: Host, caller: Principal, known: list[int]) -> None:
    """Limits of any job, also longer ones of those that run; VRAM of those that wait."""
    random = host.world.random
    limit_s = random.choice([20, 120, 900, 7_200])
    vram = random.choice([None, None, 3 * GIB, 21 * GIB])
    ids = tuple(random.sample(known, min(len(known), 3)))
    update = UpdateRequest(job_ids=ids, time_limit_s=limit_s, vram_bytes=vram)
    snapshot = host.controller.snapshots.take
    await host.ask(lambda batch: jobs_update.update(batch, caller, update, snapshot()))


async def put_first(host: Host, caller: Principal, known: list[int]) -> None:
    job_id = JobId(host.world.random.choice(known))
    await host.ask(lambda batch: jobs_update.top(batch, caller, job_id))


async def fill_or_free_disk(host: Host, _caller: Principal, _known: list[int]) -> None:
    if not host.world.disk_full:
        host.world.disk_full = host.world.random.random() < 0.5
        return
    await host.free_disk()


async def restart(host: Host, _caller: Principal, _known: list[int]) -> None:
    if not host.world.disk_full:
        await host.restart()


async def reload(host: Host, _caller: Principal, _known: list[int]) -> None:
    random = host.world.random
    now_or_midway = random.choice([host.reload, host.reload_midway])
    now_or_midway(
        f"scheduling.age_jobs_per_user={random.choice([0, 1, 3])}",
        f'scheduling.backfill="{random.choice(["easy", "easy", "before-reservation", "off"])}"',
        f'scheduling.promise_within="{random.choice(["1d", "1d", "10s", "0s", "inf"])}"',
    )
    await host.settle()


async def change_gpu(host: Host, _caller: Principal, _known: list[int]) -> None:
    """Drained, used by others, or as it should be."""
    random, now_s = host.world.random, host.controller.clock.now_s()
    index = random.randrange(len(host.gpus))
    kind = random.choice(["drained", "foreign", "good", "good"])
    if kind == "drained":
        host.see_gpu(index, state=GpuState.DRAINED, state_text="tried")
    elif kind == "foreign":
        host.see_gpu(index, foreign_bytes=9 * GIB, foreign_since_s=now_s, whole_idle=False)
    else:
        host.see_gpu(index, **GOOD)
    await host.settle()


async def kill_supervisor(host: Host, _caller: Principal, _known: list[int]) -> None:
    host.runner.kill_one()
    await host.settle()


async def pass_time(host: Host, _caller: Principal, _known: list[int]) -> None:
    await host.pass_time(host.world.random.uniform(0.1, 60.0))


#: What a user, the host or fate may do, and how often.
ACTS = (
    *((submit_some, 30), (cancel_one, 9), (update_one, 8), (change_request, 8), (put_first, 3)),
    *((fill_or_free_disk, 8), (restart, 5), (reload, 4), (change_gpu, 5), (kill_supervisor, 3)),
    (pass_time, 25),
)
GOOD = {
    **{"state": GpuState.OK, "state_text": "", "foreign_bytes": 0, "foreign_since_s": None},
    "whole_idle": True,
}


async def one_step(host: Host, known: list[int]) -> None:
    """One of them."""
    random = host.world.random
    acts, weights = zip(*ACTS, strict=True)
    (act,) = random.choices(acts, weights)
    if known or act in (submit_some, pass_time):
        await act(host, host.caller(random.choice([1001, 1002, 1003])), known)


def submitting(caller: Principal, request: SubmitRequest) -> Evaluate:
    """A command that submits as a client does."""
    return lambda batch: jobs_submit.submit(batch, caller, request, None)


def changing(caller: Principal, request: UpdateRequest) -> Evaluate:
    """A command that changes jobs and asks for no longer limit."""
    return lambda batch: jobs_update.update(batch, caller, request, None)


async def live(host: Host) -> None:
    """Many steps, each checked; then everything comes to its end."""
    known: list[int] = []
    for _ in range(STEPS):
        await one_step(host, known)
        check_gpus(host)
        check_books(host)
        check_queue(host)
        check_accounts(host)
        check_reasons(host)
    await host.free_disk()
    host.reload()
    for gpu in host.gpus:
        host.see_gpu(gpu.index, **GOOD)
    for job_id in list(host.controller.state.jobs):
        job = host.controller.state.jobs.get(job_id)
        if job is not None and job.hold is not None:
            release = UpdateRequest(job_ids=(job_id,), hold=False)
            admin = replace(host.caller(job.uid), is_admin=True)
            await host.ask(changing(admin, release))
    for _ in range(400):
        await host.pass_time(600.0)
        if not host.controller.state.jobs:
            break
        for job in list(host.controller.state.jobs.values()):
            if job.hold == "launch":
                release = UpdateRequest(job_ids=(job.job_id,), hold=False)
                await host.ask(changing(host.caller(job.uid), release))
    assert host.controller.state.jobs == {}
    assert all(count == 1 for count in host.world.ran.values())
    check_books(host)
    check_history(host)
    await host.controller.stop()
    host.controller.close()


def check_history(host: Host) -> None:
    """Codes are those that the processes left, and no promise was late without a cause."""
    with closing(History(host.store.path)) as history:
        jobs, _ = history.jobs(ids=[JobId(job_id) for job_id in host.world.codes])
    for job in jobs:
        assert job.exit_code == host.world.codes[job.job_id], job
    with closing(sqlite3.connect(host.store.path)) as db:
        rows = db.execute("SELECT outcome, late_s, exception FROM promises_v").fetchall()
    for outcome, late_s, exception in rows:
        assert outcome != "open"
        assert exception or (outcome != "lost" and (late_s is None or late_s <= 0.001))


@pytest.mark.parametrize(
    ("holder", "is_admin", "outcome"),
    [(1001, False, ("withdrawn", None)), (0, True, ("lost", "admin_change"))],
)
def test_a_hold_ends_the_promise_on_record(
    tmp_path: Path, holder: int, is_admin: bool, outcome: tuple[str, str | None]
) -> None:
    """The owner's own hold withdraws it; an admin's is an exception with its cause."""
    asyncio.run(_hold_of_a_promised_job(Host(tmp_path, 1), holder, is_admin, outcome))


async def _hold_of_a_promised_job(
    host: Host, holder: int, is_admin: bool, outcome: tuple[str, str | None]
) -> None:
    owner = host.caller(1001)
    whole = JobRequest(argv=(b"true",), cwd=b"/", environment={}, gpus=4, time_limit_s=3600)
    wanted = SubmitRequest(jobs=(whole, whole))
    _, job_id = (
        await host.ask(lambda batch: jobs_submit.submit(batch, owner, wanted, None))
    ).job_ids
    assert host.promised_job() == job_id
    hold = UpdateRequest(job_ids=(job_id,), hold=True)
    by = replace(host.caller(holder), is_admin=is_admin)
    await host.ask(changing(by, hold))
    assert host.promised_job() is None
    with closing(History(host.store.path)) as history:
        row = history.promise_of(job_id)
    assert row is not None
    assert (row.outcome, row.detail) == outcome
    await host.controller.stop()
    host.controller.close()


def test_a_host_that_starts_nothing_keeps_no_promise(tmp_path: Path) -> None:
    """Its holder could start, but nobody may: the promise stands until the start."""
    asyncio.run(_closed_beside_a_promise(Host(tmp_path, 3)))


async def _closed_beside_a_promise(host: Host) -> None:
    owner, controller = host.caller(1001), host.controller
    whole = JobRequest(argv=(b"true",), cwd=b"/", environment={}, gpus=4, time_limit_s=3_600)
    wanted = SubmitRequest(jobs=(whole, whole))
    ids = (await host.ask(lambda batch: jobs_submit.submit(batch, owner, wanted, None))).job_ids
    controller._closed_by = lambda: "maintenance"
    await host.pass_time(600.0)
    assert controller.state.jobs.keys() == {ids[1]}
    assert controller.state.promise is not None
    controller._closed_by = lambda: None
    await host.pass_time(0.1)
    with closing(History(host.store.path)) as history:
        row = history.promise_of(ids[1])
    assert row is not None
    assert (row.outcome, row.started_at_s is not None) == ("kept", True)
    await controller.stop()
    controller.close()


def test_a_promise_that_the_configuration_takes_back_is_on_record(tmp_path: Path) -> None:
    """Whichever key it was."""
    asyncio.run(_promise_taken_back(Host(tmp_path, 3)))


async def _promise_taken_back(host: Host) -> None:
    owner, controller = host.caller(1001), host.controller
    whole = JobRequest(argv=(b"true",), cwd=b"/", environment={}, gpus=4, time_limit_s=3_600)
    wanted = SubmitRequest(jobs=(whole, whole))
    ids = (await host.ask(lambda batch: jobs_submit.submit(batch, owner, wanted, None))).job_ids
    host.reload('scheduling.promise_within="0s"')
    await host.settle()
    with closing(History(host.store.path)) as history:
        row = history.promise_of(ids[1])
    assert row is not None
    assert (row.outcome, row.detail) == ("lost", "config")
    await controller.stop()
    controller.close()


def test_a_reload_while_no_gpu_is_known_blames_nothing_on_the_configuration(tmp_path: Path) -> None:
    """When the promised job starts is unknown before and after it."""
    asyncio.run(_reload_without_gpus(Host(tmp_path, 3)))


async def _reload_without_gpus(host: Host) -> None:
    owner, controller = host.caller(1001), host.controller
    whole = JobRequest(argv=(b"true",), cwd=b"/", environment={}, gpus=4, time_limit_s=3_600)
    wanted = SubmitRequest(jobs=(whole, whole))
    ids = (await host.ask(lambda batch: jobs_submit.submit(batch, owner, wanted, None))).job_ids
    promise = controller.state.promise
    assert promise is not None
    controller.set_gpus(())
    controller.await_gpus()  # as after a start
    reload = host.reload()
    await host.settle()
    assert reload.broken == ()
    assert controller.state.promise == promise
    with closing(History(host.store.path)) as history:
        row = history.promise_of(ids[1])
    assert row is not None
    assert row.detail is None
    await controller.stop()
    controller.close()


@pytest.mark.parametrize("together", [True, False])
def test_two_longer_limits_at_once_move_no_promise(tmp_path: Path, together: bool) -> None:
    """Each alone leaves the promised start as it is; of both, in one batch, one is refused."""
    asyncio.run(_two_longer_limits(Host(tmp_path, 3, gpus=2), together))


async def _two_longer_limits(host: Host, together: bool) -> None:
    owner, controller = host.caller(1001), host.controller
    one = JobRequest(argv=(b"true",), cwd=b"/", environment={}, gpus=1, time_limit_s=100)
    wanted = SubmitRequest(jobs=(one,) * 3)
    ids = (await host.ask(lambda batch: jobs_submit.submit(batch, owner, wanted, None))).job_ids
    promise = controller.state.promise
    assert promise is not None
    assert promise.job_id == ids[2]
    groups = [ids[:2]] if together else [ids[:1], ids[1:2]]
    updates = [UpdateRequest(job_ids=group, time_limit_s=1_000) for group in groups]

    def judged(request: UpdateRequest) -> Evaluate:
        return lambda batch: jobs_update.update(batch, owner, request, controller.snapshots.take())

    asked = [asyncio.ensure_future(controller.call(judged(update))) for update in updates]
    await asyncio.sleep(0)
    await host.settle()
    outcomes = [outcome for done in asked for outcome in await done]
    assert [outcome.code for outcome in outcomes] == [None, "conflict"]
    assert controller.state.promise == promise
    await controller.stop()
    controller.close()


def test_who_gives_way_to_an_owners_top_loses_the_promise(tmp_path: Path) -> None:
    """The owner has changed it: else the one that is put first would wait for it all the same."""
    asyncio.run(_top_over_a_promise(Host(tmp_path, 3)))


async def _top_over_a_promise(host: Host) -> None:
    owner, controller = host.caller(1001), host.controller
    whole = JobRequest(argv=(b"true",), cwd=b"/", environment={}, gpus=4, time_limit_s=3_600)
    wanted = SubmitRequest(jobs=(whole,) * 3)
    ids = (await host.ask(lambda batch: jobs_submit.submit(batch, owner, wanted, None))).job_ids
    await host.ask(lambda batch: jobs_update.top(batch, owner, ids[2]))
    assert controller.state.promise is not None
    assert controller.state.promise.job_id == ids[2]
    with closing(History(host.store.path)) as history:
        row = history.promise_of(ids[1])
    assert row is not None
    assert row.outcome == "withdrawn"
    await controller.stop()
    controller.close()


def test_a_reload_while_a_batch_is_written_forgets_nobody(tmp_path: Path) -> None:
    """The jobs of that batch are queued, and what starts is charged."""
    asyncio.run(_reload_midway(Host(tmp_path, 1)))


async def _reload_midway(host: Host) -> None:
    owner = host.caller(1001)
    one = JobRequest(argv=(b"true",), cwd=b"/", environment={}, gpus=4, time_limit_s=60)
    for wanted in (SubmitRequest(jobs=(one,)), SubmitRequest(jobs=(one, one))):
        host.reload_midway("scheduling.age_jobs_per_user=3")
        await host.ask(submitting(owner, wanted))
        check_queue(host)
        check_accounts(host)
    host.reload_midway()
    await host.pass_time(600.0)
    check_accounts(host)
    await host.pass_time(600.0)
    assert host.controller.state.jobs == {}
    await host.controller.stop()
    host.controller.close()


def test_a_reload_charges_nobody_anew(tmp_path: Path) -> None:
    """Another half-life counts from now on: not for what was used before, nor after a restart."""
    asyncio.run(_other_half_life(Host(tmp_path, 1)))


async def _other_half_life(host: Host) -> None:
    owner = host.caller(1001)
    one = JobRequest(argv=(b"true",), cwd=b"/", environment={}, gpus=2, time_limit_s=6_000)
    await host.ask(lambda batch: jobs_submit.submit(batch, owner, SubmitRequest(jobs=(one,)), None))
    await host.pass_time(600.0)

    def used() -> float:
        return host.controller.state.accounts.usage(1001, host.controller.clock.now_s())

    before = used()
    assert before > 100
    host.reload('scheduling.half_life="60s"')
    await host.settle()
    assert used() == pytest.approx(before)
    check_accounts(host)
    await host.restart()
    assert used() == pytest.approx(before)
    await host.controller.stop()
    host.controller.close()


def test_a_started_job_keeps_its_grace_through_reloads_and_restarts(tmp_path: Path) -> None:
    """So the promise behind it stays where it is; what starts afterwards has the new one."""
    asyncio.run(_other_grace(Host(tmp_path, 3)))


async def _other_grace(host: Host) -> None:
    owner = host.caller(1001)
    whole = JobRequest(argv=(b"true",), cwd=b"/", environment={}, gpus=4, time_limit_s=3_600)
    wanted = SubmitRequest(jobs=(whole, whole))
    ids = (await host.ask(lambda batch: jobs_submit.submit(batch, owner, wanted, None))).job_ids
    await host.pass_time(5.0)
    assert host.controller.state.jobs[ids[0]].state is JobState.RUNNING
    promise = host.controller.state.promise
    assert promise is not None
    for grace_s in (60.0, 1.0):
        host.reload(f"scheduling.kill_grace={grace_s}")
        await host.settle()
        await host.restart()
        assert host.controller.state.jobs[ids[0]].decided_grace_s == 10.0
        assert host.controller.state.promise == promise
    await host.pass_time(600.0)
    with closing(History(host.store.path)) as history:
        (after,), _ = history.jobs(ids=[ids[1]])
    assert after.decided_grace_s == 1.0
    await host.controller.stop()
    host.controller.close()


def test_an_attempt_from_before_the_grace_was_kept_has_that_of_the_start(tmp_path: Path) -> None:
    """And keeps it from then on, whatever is read again."""
    asyncio.run(_unknown_grace(Host(tmp_path, 3)))


async def _unknown_grace(host: Host) -> None:
    owner = host.caller(1001)
    one = JobRequest(argv=(b"true",), cwd=b"/", environment={}, gpus=4, time_limit_s=3_600)
    wanted = SubmitRequest(jobs=(one,))
    (job_id,) = (
        await host.ask(lambda batch: jobs_submit.submit(batch, owner, wanted, None))
    ).job_ids
    old = replace(host.controller.state.jobs[job_id], decided_grace_s=None)
    host.store.commit(Changes(jobs={job_id: old}))
    await host.restart()
    host.reload("scheduling.kill_grace=60.0")
    await host.settle()
    assert host.controller.state.jobs[job_id].decided_grace_s == 10.0
    await host.controller.stop()
    host.controller.close()


def test_a_reload_on_a_full_disk_is_in_force_and_written_with_the_first_room(
    tmp_path: Path,
) -> None:
    """The answer says so; until then nobody is held or loses a promise, and nothing starts."""
    asyncio.run(_reload_without_room(Host(tmp_path, 3)))


async def _promised_behind(host: Host) -> list[JobId]:
    """A job on all GPUs, and one that is promised them."""
    owner = host.caller(1001)
    whole = JobRequest(argv=(b"true",), cwd=b"/", environment={}, gpus=4, time_limit_s=3_600)
    wanted = SubmitRequest(jobs=(whole, whole))
    result = await host.ask(lambda batch: jobs_submit.submit(batch, owner, wanted, None))
    await host.pass_time(5.0)
    assert host.promised_job() == result.job_ids[1]
    return list(result.job_ids)


async def _reload_on_full_disk(host: Host, *overrides: str) -> tuple[str, ...]:
    """What its admin is told."""
    host.world.disk_full = True
    asking = asyncio.ensure_future(host.controller.broken_by(host.reload(*overrides)))
    await asyncio.sleep(0)
    await host.controller.step()
    return await asking


async def _reload_without_room(host: Host) -> None:
    controller, ids = host.controller, await _promised_behind(host)
    told = await _reload_on_full_disk(host, "limits.max_gpus=3", 'jobs.users=["nobody"]')
    full = "what changes for jobs is written once there is room: database or disk is full"
    assert told == (f"the promised start of job {ids[1]} is lost (config)", full)
    assert host.promised_job() == ids[1]
    assert controller.state.jobs[ids[1]].hold is None
    check_books(host)
    check_queue(host)
    check_accounts(host)
    await host.restart()  # its file is read again by then
    await host.free_disk()
    assert host.promised_job() is None
    assert host.controller.state.jobs[ids[1]].hold == "config"
    with closing(History(host.store.path)) as history:
        row = history.promise_of(ids[1])
    assert row is not None
    assert (row.outcome, row.detail) == ("lost", "config")
    check_books(host)
    check_queue(host)
    await host.controller.stop()
    host.controller.close()


@pytest.mark.parametrize(
    "overrides",
    [
        ("limits.max_gpus=3",),
        ('jobs.users=["nobody"]',),
        ('scheduling.backfill="off"',),
        ('scheduling.promise_within="0s"', "limits.max_jobs=1"),
    ],
)
def test_a_reload_that_is_taken_back_before_it_was_written_has_broken_nothing(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """What is written with the first room is what the configuration says by then."""
    asyncio.run(_taken_back(Host(tmp_path, 3), overrides))


async def _taken_back(host: Host, overrides: tuple[str, ...]) -> None:
    ids = await _promised_behind(host)
    promise = host.controller.state.promise
    assert len(await _reload_on_full_disk(host, *overrides)) == 2
    assert len(await _reload_on_full_disk(host)) == 1
    await host.free_disk()
    assert host.controller.state.promise == promise
    assert host.controller.state.jobs[ids[1]].hold is None
    check_books(host)
    check_queue(host)
    check_accounts(host)
    await host.controller.stop()
    host.controller.close()


def test_time_that_a_pass_takes_moves_no_promise(tmp_path: Path) -> None:
    """What it starts is decided at the time it planned with, not when it is done."""
    asyncio.run(_promise_beside_a_start(Host(tmp_path, 1)))


async def _promise_beside_a_start(host: Host) -> None:
    clock = host.world.clock

    def ticking() -> float:
        clock.now += 0.001
        return clock.now

    clock.boottime_s = ticking  # type: ignore[method-assign]
    whole = JobRequest(argv=(b"true",), cwd=b"/", environment={}, gpus=4, time_limit_s=3600)
    wanted = SubmitRequest(jobs=(whole, whole))
    await host.ask(lambda batch: jobs_submit.submit(batch, host.caller(1001), wanted, None))
    promise = host.controller.state.promise
    assert promise is not None
    assert promise.delayed_by is None
    await host.controller.stop()
    host.controller.close()


def test_a_submission_id_that_is_forgotten_before_its_turn_is_known_none_the_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds so many; while a repetition waits, others push the first out."""
    monkeypatch.setattr(batch_module, "RECENT_SUBMISSIONS_MAX", 1)
    asyncio.run(_submit_forgotten(Host(tmp_path, 1)))


async def _submit_forgotten(host: Host) -> None:
    history = History(host.store.path)
    services = services_of(host, reader=FairReader(history))
    job = JobRequest(argv=(b"true",), cwd=b"/", environment={}, hold=True)

    async def submit(name: str) -> Any:
        request = SubmitRequest(jobs=(job,), submission_id=name)
        return await submit_jobs(call_of(host, services), request)

    with closing(services.reader):
        asked = []
        for name in ("a", "b", "a"):
            asked.append(asyncio.ensure_future(submit(name)))
            await asyncio.sleep(0)
            if len(asked) == 1:
                await host.settle()
        late = host.controller._commands.pop()  # it comes into the batch after that of b
        await host.settle()
        host.controller._commands.append(late)
        await host.settle()
        assert [(await task).job_ids for task in asked] == [(1,), (2,), (1,)]
    await host.controller.stop()
    host.controller.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_promise_holds_at_every_step(tmp_path: Path, seed: int) -> None:
    """GPUs, books and queue agree; every job comes to an end; no main process starts twice."""
    asyncio.run(_live(tmp_path, seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", SOAK_SEEDS)
def test_every_promise_holds_at_every_step_over_many_seeds(tmp_path: Path, seed: int) -> None:
    """The same with 300 seeds."""
    asyncio.run(_live(tmp_path, seed + 1_000))


async def _live(place: Path, seed: int) -> None:
    await live(Host(place, seed))


ONE_GPU = JobRequest(argv=(b"true",), cwd=b"/", environment={}, gpus=1, time_limit_s=60)


def test_a_submission_that_can_start_is_one_commit_with_its_start(tmp_path: Path) -> None:
    """Durable together, so that the reply and the launch wait for the disk once."""
    asyncio.run(_started_along(Host(tmp_path, 1)))


def _commits(host: Host) -> int:
    with closing(sqlite3.connect(host.store.path)) as db:
        content = db.execute("SELECT value FROM meta WHERE key = 'census'").fetchone()[0]
    commits: int = json.loads(content)["commits"]
    return commits


async def _started_along(host: Host) -> None:
    owner, controller = host.caller(1001), host.controller
    before = _commits(host)
    submission = asyncio.ensure_future(
        controller.call(submitting(owner, SubmitRequest(jobs=(ONE_GPU,))))
    )
    await asyncio.sleep(0)
    assert await controller.step()
    [job_id] = (await submission).job_ids
    assert _commits(host) == before + 1
    assert controller.state.jobs[job_id].state is JobState.CONFIGURING
    check_books(host)
    check_queue(host)
    check_accounts(host)
    with closing(History(host.store.path)) as history:
        kinds = [event.kind for event in history.events(job_id)]
    assert kinds == ["job_submitted", "job_placed"]
    await controller.stop()
    controller.close()


def test_a_start_along_that_finds_no_room_leaves_no_trace(tmp_path: Path) -> None:
    """The submission is refused, and nobody holds a GPU or is charged."""
    asyncio.run(_no_room_along(Host(tmp_path, 1)))


async def _no_room_along(host: Host) -> None:
    owner, controller = host.caller(1001), host.controller
    host.world.disk_full = True
    submission = asyncio.ensure_future(
        controller.call(submitting(owner, SubmitRequest(jobs=(ONE_GPU,))))
    )
    await asyncio.sleep(0)
    assert not await controller.step()
    with pytest.raises(StorageError):
        await submission
    host.world.disk_full = False
    assert controller.state.jobs == {}
    assert controller.state.holding == set()
    check_queue(host)
    check_accounts(host)
    await controller.stop()
    controller.close()


def test_a_start_causes_no_pass_and_an_end_does(tmp_path: Path) -> None:
    """One life: the pass that is written with the submission, and those by its end."""
    asyncio.run(_passes_of_one_life(Host(tmp_path, 1, runner=ToldRunner)))


async def _passes_of_one_life(host: Host) -> None:
    controller, owner = host.controller, host.caller(1001)
    await host.settle()
    before, runner = controller.counters["passes"], host.runner
    assert isinstance(runner, ToldRunner)
    [job_id] = (await host.ask(submitting(owner, SubmitRequest(jobs=(ONE_GPU,))))).job_ids
    placed = controller.counters["passes"] - before
    assert controller.state.jobs[job_id].state is JobState.RUNNING
    assert controller._timer is not None
    runner.end(job_id)
    await host.pass_time(60.0)
    assert job_id not in controller.state.jobs
    assert placed == 1
    assert controller.counters["passes"] > before + placed
    await controller.stop()
    controller.close()
