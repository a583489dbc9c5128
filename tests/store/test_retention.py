"""What goes when: by age, and of each user only so much; never one user's by another's flood."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gpusched_client.terms import GpuUuid, JobId, JobState
from gpuschedd.config.keys import Config
from gpuschedd.core import lengths
from gpuschedd.core.job import CancelOrder, Gone, Job, Placed, advance
from gpuschedd.core.lengths import Histories
from gpuschedd.core.model import Grant, Kind, LengthRow, Run
from gpuschedd.jobs.batch import Batch
from gpuschedd.jobs.principal import STRANGERS
from gpuschedd.jobs.upkeep import Upkeep
from gpuschedd.store import retention
from gpuschedd.store.history import History
from gpuschedd.store.records import AuditRow, Changes, Event, GpuUse, PromiseRow, Submission
from gpuschedd.store.retention import Ages, Old
from gpuschedd.store.writer import Store
from gpuschedd.system.clock import ClockMark
from tests.sim.harness import Host
from tests.store.test_database import a_job, a_payload

DAY_S = 86_400.0
AGES = Ages(requests_s=7 * DAY_S, events_s=90 * DAY_S)
NOW_S = 1_767_225_600.0


def mark(day: float) -> ClockMark:
    return ClockMark("boot", 0.0, day * DAY_S, NOW_S + day * DAY_S)


def submit(store: Store, number: int, uid: int = 1000, script_bytes: int = 0) -> Job:
    job = replace(a_job(number), uid=uid, submitted_sched_s=0.0)
    payload = replace(a_payload(), script=b"x" * script_bytes)
    store.commit(Changes(jobs={job.job_id: job}, payloads={job.job_id: payload}))
    return job


def end(store: Store, job: Job, day: float) -> Job:
    """It ran on a GPU, was signalled and cancelled, and has all texts that a job can have."""
    grant = Grant(GpuUuid("GPU-a"), 19, 18)
    running = advance(job, Placed((grant,), False, 1.0, 10.0, 60.0))
    gone = Gone(JobState.CANCELLED, 5.0, code=None, signal=15, detail="d" * 4_000)
    ended = advance(replace(running, signals=tuple((n, 10) for n in range(100))), gone)
    ended = replace(
        ended,
        cancel=CancelOrder(1000, "alice", 4.0, "r" * 256),
        whole_note="w" * 500,
        hold_detail="h" * 500,
        length_key="python train.py --secret",
    )
    changes = Changes(mark=mark(day), jobs={job.job_id: ended})
    changes.gpu_index_of[GpuUuid("GPU-a")] = 3
    changes.gpu_uses.append(GpuUse(job.job_id, ended.attempt, GpuUuid("GPU-a"), 7))
    store.commit(changes)
    return ended


def forget(store: Store, day: float) -> None:
    """All that is past its limit on that day."""
    with closing(History(store.path)) as history:
        old = history.old(AGES, day * DAY_S, NOW_S + day * DAY_S)
    for each in old:
        while store.drop(each):
            pass


def count(store: Store, what: str) -> int:
    with closing(sqlite3.connect(store.path)) as db:
        found: int = db.execute(f"SELECT count(*) FROM {what}").fetchone()[0]
    return found


def test_a_request_goes_with_its_texts_and_the_job_stays(tmp_path: Path) -> None:
    """How it ended, what it held and used; the database is sound before and after."""
    store = Store.open(tmp_path)
    waiting = submit(store, 1)
    ended = end(store, submit(store, 2), day=0.0)
    forget(store, 6.9)
    assert store.payload(ended.job_id) is not None
    forget(store, 7.1)
    with closing(History(store.path)) as history:
        assert history.payload(ended.job_id) is None
        assert history.briefs([ended.job_id]) == {}
        left = history.job(ended.job_id)
        assert [use.peak_bytes for use in history.gpu_uses(ended.job_id)] == [7]
    assert left == replace(
        ended,
        length_key=None,
        cause_detail=None,
        whole_note=None,
        hold_detail=None,
        signals=(),
        cancel=CancelOrder(1000, "alice", 4.0, None),
    )
    assert count(store, "jobs_v WHERE gpu_indices = '3'") == 1
    assert count(store, "attempt WHERE detail IS NOT NULL") == 0
    assert store.payload(waiting.job_id) == replace(a_payload(), script=b"")
    store.close()
    again = Store.open(tmp_path)
    assert again.load().jobs == (waiting,)
    again.close()


def ran(uid: int, key: str, day: float) -> LengthRow:
    return LengthRow(uid, Kind(key, 1), (Run(day * DAY_S, 60.0),))


def test_what_runs_took_is_forgotten_after_ninety_days(tmp_path: Path) -> None:
    """From its newest run on; whoever's it is."""
    store = Store.open(tmp_path)
    again = LengthRow(1000, Kind("again", 1), (Run(0.0, 60.0), Run(5 * DAY_S, 70.0)))
    store.commit(Changes(lengths=[ran(1000, "old", 1.0), ran(2000, "newer", 2.0), again]))
    forget(store, 90.9)
    assert count(store, "length") == 3
    forget(store, 91.1)
    assert {row.kind.key for row in store.load().lengths} == {"newer", "again"}
    forget(store, 94.9)
    assert store.load().lengths == (again,)
    forget(store, 95.1)
    assert store.load().lengths == ()
    store.close()


def test_a_user_of_many_commands_keeps_the_newest_and_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the database as in memory: what is written is what a restart finds."""
    monkeypatch.setattr(lengths, "ROWS_PER_USER_MAX", 3)
    store = Store.open(tmp_path)
    histories = Histories()
    for number in range(20):
        for uid in (1000, 2000):
            kind = Kind(f"command {number % (8 if uid == 1000 else 2)}", 1)
            rows = histories.note(uid, kind, Run(float(number), 60.0))
            store.commit(Changes(lengths=list(rows)))
    assert count(store, "length WHERE uid = 1000") == 3
    assert count(store, "length WHERE uid = 2000") == 2
    assert Histories(store.load().lengths).view() == histories.view()
    store.close()


def test_what_is_left_of_a_job_is_small(tmp_path: Path) -> None:
    """At most 1 KiB a row, whatever was asked and said."""
    store = Store.open(tmp_path)
    ended = end(store, submit(store, 1, script_bytes=200_000), day=0.0)
    forget(store, 8.0)
    with closing(sqlite3.connect(store.path)) as db:
        row = db.execute("SELECT * FROM job WHERE job_id = ?", (ended.job_id,)).fetchone()
    assert sum(len(str(value)) for value in row if value is not None) < 1024
    store.close()


def test_a_user_keeps_the_newest_requests_up_to_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From each end on, without waiting for anybody; another's are none of that."""
    monkeypatch.setattr(retention, "REQUEST_BYTES_PER_UID_MAX", 50_000)
    store = Store.open(tmp_path)
    end(store, submit(store, 1, uid=2000, script_bytes=20_000), day=0.0)
    for number in range(2, 32):
        end(store, submit(store, number, script_bytes=9_000), day=0.0)
        assert count(store, "kept WHERE uid = 1000") <= 5
    with closing(History(store.path)) as history:
        kept = [n for n in range(1, 32) if history.payload(JobId(n)) is not None]
    assert kept == [1, 27, 28, 29, 30, 31]
    store.close()
    again = Store.open(tmp_path)  # counts on from there
    end(again, submit(again, 32, script_bytes=9_000), day=0.0)
    assert count(again, "kept WHERE uid = 1000") == 5
    again.close()


def test_what_one_batch_of_many_ends_leaves_too_much_goes_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "REQUEST_BYTES_PER_UID_MAX", 50_000)
    store = Store.open(tmp_path)
    jobs = [submit(store, number, script_bytes=9_000) for number in range(1, 101)]
    placed = [advance(job, Placed((), False, 1.0, 10.0, 60.0)) for job in jobs]
    ended = [advance(job, Gone(JobState.CANCELLED, 5.0)) for job in placed]
    monkeypatch.setattr(retention, "REQUESTS_PER_DROP", 10)
    store.commit(Changes(mark=mark(0), jobs={job.job_id: job for job in ended}))
    assert count(store, "kept") == 50  # a commit does not take long for it
    forget(store, 0.0)
    assert count(store, "kept") == 5
    assert count(store, "payload") == 5
    store.close()


def test_a_flood_of_one_user_takes_nothing_of_another_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events, submission ids, denials: each user has bounds of their own."""
    monkeypatch.setattr(retention, "EVENTS_PER_UID_MAX", 100)
    monkeypatch.setattr(retention, "SUBMISSIONS_PER_UID_MAX", 100)
    monkeypatch.setattr(retention, "DENIALS_PER_UID_MAX", 100)
    store = Store.open(tmp_path)
    quiet = Changes(mark=mark(0))
    quiet.events.append((1, Event("gpu_seen", NOW_S)))
    quiet.events.append((2, Event("job_submitted", NOW_S, JobId(1), 2000)))
    quiet.submissions.append(Submission(2000, "mine", b"d" * 32, (JobId(1),), 0.0))
    quiet.audits.append(AuditRow(NOW_S, 2000, 1, "cancel", "denied", ""))
    quiet.audits.append(AuditRow(NOW_S, 0, 1, "drain", "done", "fan"))
    store.commit(quiet)
    flood = Changes(mark=mark(0))
    for number in range(3, 1003):
        flood.events.append((number, Event("job_submitted", NOW_S, JobId(number), 1000)))
        flood.submissions.append(Submission(1000, f"{number}", b"d" * 32, (), float(number)))
        flood.audits.append(AuditRow(NOW_S, 1000, 1, "cancel", "denied", ""))
        flood.audits.append(AuditRow(NOW_S, STRANGERS, 1, "cancel", "denied", f"uid {number}"))
    store.commit(flood)
    forget(store, 0.0)
    with closing(sqlite3.connect(store.path)) as db:
        for table in ("event", "submission", "audit"):
            rows = db.execute(f"SELECT uid, count(*) FROM {table} GROUP BY uid").fetchall()
            assert dict(rows)[1000] == 100
            assert dict(rows)[2000] == 1
        assert dict(rows)[STRANGERS] == 100
        assert db.execute("SELECT min(event_id) FROM event WHERE uid = 1000").fetchone() == (903,)
    assert count(store, "event WHERE uid IS NULL") == 1
    assert count(store, "audit WHERE outcome = 'done'") == 1
    newest = store.load().submissions[-1]
    assert newest.submission_id == "1002"
    store.close()


def test_what_is_old_goes_and_numbers_go_on(tmp_path: Path) -> None:
    """Also where nothing is left: an event's id is never given twice."""
    store = Store.open(tmp_path)
    changes = Changes(mark=mark(0))
    changes.events.append((41, Event("job_submitted", NOW_S, JobId(1), 1000)))
    changes.audits.append(AuditRow(NOW_S, 0, 1, "drain", "done", "fan"))
    job = a_job()
    changes.jobs[job.job_id] = job
    changes.payloads[job.job_id] = a_payload()
    for day, outcome in ((0.0, "kept"), (1.0, None)):
        at_s = NOW_S if outcome else None
        row = PromiseRow(JobId(1), NOW_S, day, NOW_S, 1.0, outcome, at_s)
        changes.promises[(row.job_id, day)] = row
    store.commit(changes)
    forget(store, 89.0)
    assert [count(store, name) for name in ("event", "audit", "promise")] == [1, 1, 2]
    forget(store, 91.0)
    assert [count(store, name) for name in ("event", "audit", "promise")] == [0, 0, 1]
    store.close()
    again = Store.open(tmp_path)
    assert again.load().last_event_id == 41
    again.close()


def test_a_kept_submission_id_is_found_for_a_week(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.commit(Changes(submissions=[Submission(1000, "a", b"d" * 32, (JobId(1),), 0.0)]))
    forget(store, 6.9)
    assert len(store.load().submissions) == 1
    forget(store, 7.1)
    assert store.load().submissions == ()
    store.close()


def test_slices_are_small(tmp_path: Path) -> None:
    """So that no commit waits long for one."""
    store = Store.open(tmp_path)
    changes = Changes()
    for number in range(1, 1001):
        changes.events.append((number, Event("x", 0.0)))
    store.commit(changes)
    assert store.drop(Old("event", 1000))
    assert count(store, "event") == 1000 - retention.ROWS_PER_DROP
    store.close()


def test_upkeep_forgets_and_checks_beside_the_service(tmp_path: Path) -> None:
    """Through the controller's own thread, by the configuration of now."""

    async def story() -> None:
        host = Host(tmp_path, 1)
        controller = host.controller
        running = asyncio.ensure_future(controller.run())
        assert host.controller.state.config.retention == Config().retention
        upkeep = Upkeep(controller, host.store.path)
        old = Event("old", host.world.clock.wall_s() - 91 * DAY_S)
        controller.post(lambda batch: batch.events.append(old))
        await controller.call(lambda _: None)
        assert count(host.store, "event WHERE kind = 'old'") == 1
        await upkeep.forget()
        assert count(host.store, "event WHERE kind = 'old'") == 0
        await upkeep.check()
        await controller.stop()
        await running
        upkeep.close()
        controller.close()

    asyncio.run(story())


def _note(batch: Batch, event: Event) -> None:
    batch.events.append(event)


def test_a_sweep_that_finds_nothing_writes_nothing(tmp_path: Path) -> None:
    """An idle host's disk is left alone; also where the first rows went long ago."""

    async def story() -> None:
        host = Host(tmp_path, 1)
        controller = host.controller
        running = asyncio.ensure_future(controller.run())
        upkeep = Upkeep(controller, host.store.path)
        old_s, new_s = (host.world.clock.wall_s() - days * DAY_S for days in (91, 1))

        for kind, at_s in (("old", old_s), ("new", new_s)):
            controller.post(partial(_note, event=Event(kind, at_s)))
        await controller.call(lambda _: None)
        await upkeep.forget()
        assert count(host.store, "event WHERE kind = 'old'") == 0
        assert count(host.store, "event WHERE kind = 'new'") == 1
        with closing(sqlite3.connect(host.store.path)) as db:  # counts the commits of others
            before = db.execute("PRAGMA data_version").fetchone()
            await upkeep.forget()
            assert db.execute("PRAGMA data_version").fetchone() == before
        await controller.stop()
        await running
        upkeep.close()
        controller.close()

    asyncio.run(story())


def test_damage_found_beside_the_service_ends_it(tmp_path: Path) -> None:
    """As one found at the start would; what was committed is not trusted any more."""
    from gpuschedd.store.database import StoreDamaged

    async def story() -> None:
        host = Host(tmp_path, 1)
        running = asyncio.ensure_future(host.controller.run())
        await host.controller.call(lambda _: None)
        with closing(sqlite3.connect(host.store.path)) as db, db:
            db.execute("UPDATE meta SET value = value || ' ' WHERE key = 'instance'")
        upkeep = Upkeep(host.controller, host.store.path)
        with pytest.raises(StoreDamaged):
            await upkeep.check()
        with pytest.raises(StoreDamaged):
            await asyncio.wait_for(running, 30)
        upkeep.close()
        host.controller.close()

    asyncio.run(story())
