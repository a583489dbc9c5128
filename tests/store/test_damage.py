"""Damage and loss: found at the start or beside the service, never taken for an older state."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from gpusched_client.terms import GpuUuid, JobId, JobState
from gpuschedd.core.job import Gone, Job, Placed, advance
from gpuschedd.core.model import Kind, LengthRow, Run
from gpuschedd.store import checks, database
from gpuschedd.store.database import (
    DATABASE_NAME,
    StoreDamaged,
    StoreFull,
    StoreUnusable,
    connect,
    typed_opening,
)
from gpuschedd.store.history import History
from gpuschedd.store.in_use import MARK_NAME, Mark
from gpuschedd.store.records import (
    Age,
    Changes,
    Event,
    GpuRow,
    PromiseRow,
    Remembered,
    Submission,
    UsageRow,
)
from gpuschedd.store.wal import has_lost_frames
from gpuschedd.store.writer import Store
from gpuschedd.system.clock import ClockMark
from tests.store.test_database import a_job, a_payload
from tests.support.daemon import DaemonProcess, clean_up

WAL = DATABASE_NAME + "-wal"
FRAME = 24 + 4096


def submitted(*job_ids: int) -> Changes:
    """Jobs with an environment each, and a clock."""
    return Changes(
        mark=ClockMark("boot", 0.0, float(max(job_ids)), 1e9),
        jobs={JobId(n): a_job(n) for n in job_ids},
        payloads={JobId(n): a_payload(((b"OWNER", b"%d" % n),)) for n in job_ids},
    )


def opened(place: Path) -> Store:
    place.mkdir(exist_ok=True)
    return Store.open(place)


def filled(place: Path, jobs: int = 6) -> Path:
    """A database that was closed in order, with a row of each kind that decides."""
    store = opened(place)
    changes = submitted(*range(1, jobs + 1))
    changes.ages[JobId(1)] = Age(1.0, 0.0, None)
    changes.accounts[1000] = UsageRow(1000, "alice", 5.0, 0.0, 1.0, 1e9)
    promise = PromiseRow(JobId(1), 1e9, 1.0, 1e9, 2.0)
    changes.promises[(promise.job_id, 1.0)] = promise
    changes.gpus[GpuUuid("GPU-a")] = GpuRow(GpuUuid("GPU-a"), 0, 0, "A100", 2**30, 0, 1e9)
    changes.submissions.append(Submission(1000, "one", b"d" * 32, (JobId(1),), 1.0))
    changes.health = {GpuUuid("GPU-a"): Remembered(("x",), 1)}
    changes.lengths.append(LengthRow(1000, Kind("train.py", 1), (Run(1.0, 60.0),)))
    changes.events.append((1, Event("job_submitted", 1e9, JobId(1), 1000)))
    store.commit(changes)
    store.close()
    return place / DATABASE_NAME


def change(path: Path, *statements: str) -> None:
    """By another hand, with all of SQLite's own rules kept."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


def load(place: Path) -> list[int]:
    store = Store.open(place)
    try:
        return [int(job.job_id) for job in store.load().jobs]
    finally:
        store.close()


# --- a request and what it runs in --------------------------------------------------------------

MISLED = (
    "UPDATE payload SET environment_id = 3 WHERE job_id = 2",
    "UPDATE payload SET environment_id = NULL WHERE job_id = 2",
    "UPDATE payload SET content = (SELECT content FROM payload AS other WHERE job_id = 3),"
    " crc = (SELECT crc FROM payload AS other WHERE job_id = 3) WHERE job_id = 2",
    "UPDATE brief SET content = (SELECT content FROM brief AS other WHERE job_id = 3),"
    " crc = crc ^ 1 WHERE job_id = 2".replace("crc ^ 1", "crc + 1"),
    "UPDATE environment SET content = (SELECT content FROM environment AS o"
    " WHERE environment_id = 3) WHERE environment_id = 2",
    "DELETE FROM payload WHERE job_id = 2",
)
RUN = (*MISLED[:3], *MISLED[4:])


@pytest.mark.parametrize("statement", MISLED)
def test_a_request_that_leads_elsewhere_is_refused_at_the_start(
    tmp_path: Path, statement: str
) -> None:
    """Another's environment, another's command, none: each row in itself is sound."""
    path = filled(tmp_path)
    change(path, statement)
    with pytest.raises(StoreUnusable, match=r"of job 2|damaged"):
        load(tmp_path)


@pytest.mark.parametrize("statement", RUN)
def test_a_request_that_leads_elsewhere_is_not_launched(tmp_path: Path, statement: str) -> None:
    """Damage that comes while the daemon runs."""
    filled(tmp_path)
    store = Store.open(tmp_path)
    change(store.path, statement)
    with pytest.raises(StoreDamaged, match="of job 2"):
        store.payload(JobId(2))
    payload = store.payload(JobId(1))
    assert payload is not None
    assert payload.environment == ((b"OWNER", b"1"),)
    store.close()


def test_a_request_without_its_environment_is_shown_after_its_end(tmp_path: Path) -> None:
    """It goes with the job's end, and the rest has its checksum still."""
    filled(tmp_path)
    store = Store.open(tmp_path)
    placed = advance(a_job(2), Placed((), False, 1.0, 10.0, 60.0))
    store.commit(Changes(jobs={JobId(2): advance(placed, Gone(JobState.COMPLETED, 5.0, code=0))}))
    payload = store.payload(JobId(2))
    assert payload is not None
    assert (payload.argv, payload.environment) == (a_payload().argv, ())
    change(store.path, "UPDATE payload SET job_id = 99 WHERE job_id = 2")
    store.close()


# --- what is missing ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM account",
        "DELETE FROM promise",
        "DELETE FROM gpu",
        "DELETE FROM submission",
        "DELETE FROM meta WHERE key = 'clock'",
        "DELETE FROM meta WHERE key = 'instance'",
        "DELETE FROM meta WHERE key = 'health'",
        "DELETE FROM meta WHERE key = 'census'",
        "INSERT INTO account SELECT 7, user, usage_gpu_s, rate, at_sched_s, at_s, crc FROM account",
    ],
)
def test_a_row_that_has_gone_or_come_is_missed(tmp_path: Path, statement: str) -> None:
    change(filled(tmp_path), statement)
    with pytest.raises(StoreUnusable, match=r"committed|missing|damaged"):
        load(tmp_path)


@pytest.mark.parametrize("job_id", range(1, 7))
def test_a_job_that_has_gone_is_missed(tmp_path: Path, job_id: int) -> None:
    path = filled(tmp_path)
    change(
        path,
        f"DELETE FROM payload WHERE job_id = {job_id}",
        f"DELETE FROM brief WHERE job_id = {job_id}",
        f"DELETE FROM promise WHERE job_id = {job_id} AND false",
        "PRAGMA foreign_keys = OFF",
        f"DELETE FROM job WHERE job_id = {job_id}",
    )
    with pytest.raises(StoreUnusable, match="committed"):
        load(tmp_path)


@pytest.mark.parametrize("key", ["clock", "instance", "health", "census"])
def test_a_single_value_that_was_changed_is_found(tmp_path: Path, key: str) -> None:
    """Where another digit is as well-formed as the first."""
    path = filled(tmp_path)
    change(path, f"UPDATE meta SET value = replace(value, '1', '2') || '' WHERE key = '{key}'")
    change(path, f"UPDATE meta SET value = value || ' ' WHERE key = '{key}'")
    with pytest.raises(StoreUnusable, match=f"meta is damaged: {key}"):
        load(tmp_path)


def _bytes_of(path: Path, index: str) -> range:
    """Where the entries of a small index lie in the file."""
    with closing(sqlite3.connect(path)) as db:
        (root,) = db.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = ?", (index,)
        ).fetchone()
    page = path.read_bytes()[(root - 1) * 4096 : root * 4096]
    assert page[0] == 0x0A, "one leaf"
    return range((root - 1) * 4096 + int.from_bytes(page[5:7], "big"), root * 4096)


@pytest.mark.parametrize("bit", range(8))
def test_no_bit_of_an_index_makes_jobs_vanish(tmp_path: Path, bit: int) -> None:
    """Found, or without effect: never fewer jobs in silence."""
    path = filled(tmp_path / "sound")
    content = path.read_bytes()
    outcomes: set[tuple[int, ...] | str] = set()
    for number, place in enumerate(_bytes_of(path, "job_live")):
        copy = tmp_path / str(number)
        shutil.copytree(path.parent, copy)
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        (copy / DATABASE_NAME).write_bytes(flipped)
        try:
            outcomes.add(tuple(load(copy)))
        except StoreUnusable:
            outcomes.add("refused")
    assert outcomes <= {(1, 2, 3, 4, 5, 6), "refused"}
    assert "refused" in outcomes


def _text_in_place_of_json(path: Path) -> None:
    from gpuschedd.store import rows

    values = (1000, "one", b"d" * 32, "no json", 1.0)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE submission SET job_ids = 'no json', crc = ?", (rows.crc(values),))


def _a_table_is_gone(path: Path) -> None:
    change(path, "DROP TABLE gpu_use")


def _a_column_is_gone(path: Path) -> None:
    change(path, "ALTER TABLE submission RENAME COLUMN at_sched_s TO other")


def _a_blob_for_a_number(path: Path) -> None:
    change(path, "UPDATE job SET gpus = x'ff' WHERE job_id = 2")


def _a_state_of_no_kind(path: Path) -> None:
    change(path, "UPDATE job SET state = 'PENDJNG' WHERE job_id = 2")


def _an_order_without_its_giver(path: Path) -> None:
    change(path, "UPDATE job SET cancel_at_s = 1.0, signals = '[1]' WHERE job_id = 2")


@pytest.mark.parametrize(
    "damage",
    [
        _text_in_place_of_json,
        _a_table_is_gone,
        _a_column_is_gone,
        _a_blob_for_a_number,
        _a_state_of_no_kind,
        _an_order_without_its_giver,
    ],
)
def test_damage_of_any_kind_has_words_and_no_traceback(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(filled(tmp_path))
    with pytest.raises(StoreUnusable, match="Restore a backup"):
        load(tmp_path)


# --- the log of a daemon that was killed --------------------------------------------------------


def killed(place: Path, copy: Path) -> Path:
    """What is on the disk now: as a kill at this moment would leave it."""
    shutil.copytree(place, copy)
    return copy


@pytest.fixture
def left_by_a_kill(tmp_path: Path) -> Path:
    """Five commits in the log, the sixth job in the last, and nothing behind them."""
    opened(tmp_path / "state").close()
    store = opened(tmp_path / "state")
    for number in range(1, 7):
        store.commit(submitted(number))
    place = killed(tmp_path / "state", tmp_path / "killed")
    store.close()
    return place


def test_a_killed_daemon_s_log_is_read(left_by_a_kill: Path) -> None:
    assert load(left_by_a_kill) == [1, 2, 3, 4, 5, 6]
    assert load(left_by_a_kill) == [1, 2, 3, 4, 5, 6]


def test_a_log_that_is_missing_is_missed(left_by_a_kill: Path) -> None:
    """SQLite alone would begin with an empty queue; and so it stays until somebody has looked."""
    (left_by_a_kill / WAL).unlink()
    for _ in range(2):
        with pytest.raises(StoreUnusable, match=f"lacks the last .* changes.*{MARK_NAME}"):
            load(left_by_a_kill)


def test_who_has_looked_goes_on_with_what_is_there(left_by_a_kill: Path) -> None:
    """As the message says."""
    with pytest.raises(StoreUnusable):
        load(_cut(left_by_a_kill, -FRAME))
    (left_by_a_kill / MARK_NAME).unlink()
    assert load(left_by_a_kill) == [1, 2, 3, 4, 5]


def _cut(place: Path, size: int) -> Path:
    log = place / WAL
    os.truncate(log, log.stat().st_size + size if size < 0 else size)
    return place


@pytest.mark.parametrize("left", [0, 16, 32, 32 + FRAME, 32 + 3 * FRAME + 100])
def test_a_log_that_was_cut_is_missed(left_by_a_kill: Path, left: int) -> None:
    with pytest.raises(StoreUnusable, match="lacks the last"):
        load(_cut(left_by_a_kill, left))


def test_a_log_that_another_program_put_into_the_database_is_not_missed(
    left_by_a_kill: Path,
) -> None:
    """`sqlite3` does so when it is the last to close; then the log is gone, and nothing lost."""
    with closing(sqlite3.connect(left_by_a_kill / DATABASE_NAME)) as db:
        assert db.execute("SELECT count(*) FROM jobs_v").fetchone() == (6,)
    assert not (left_by_a_kill / WAL).exists()
    assert load(left_by_a_kill) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("place", [0, 17, 40, 32 + 4, 32 + 9, 32 + 17, 32 + 500, 32 + FRAME + 30])
def test_a_damaged_frame_before_others_is_found(left_by_a_kill: Path, place: int) -> None:
    """Also after a power cut, when the mark may be older; and SQLite does not throw it away."""
    log = left_by_a_kill / WAL
    content = bytearray(log.read_bytes())
    content[place] ^= 0x10
    log.write_bytes(content)
    (left_by_a_kill / MARK_NAME).unlink()
    for _ in range(2):
        with pytest.raises(StoreUnusable, match="committed changes lie behind"):
            load(left_by_a_kill)
    assert log.read_bytes() == content


def test_what_a_power_cut_leaves_of_the_last_transaction_is_no_damage(
    left_by_a_kill: Path,
) -> None:
    """Nobody was told of it: whichever of its pages are there, the ones before count."""
    log = left_by_a_kill / WAL
    content = log.read_bytes()
    frames = [content[at : at + FRAME] for at in range(32, len(content), FRAME)]
    commits = [number for number, frame in enumerate(frames) if frame[4:8] != b"\0" * 4]
    last = range(commits[-2] + 1, len(frames))
    assert len(last) > 2
    for lost in last:
        kept = [frame if n != lost else b"\0" * FRAME for n, frame in enumerate(frames)]
        log.write_bytes(content[:32] + b"".join(kept))
        assert not has_lost_frames(log)


def test_a_log_s_older_round_behind_the_present_one_is_no_damage(tmp_path: Path) -> None:
    """The log is written over from its beginning; what is behind it was copied long ago."""
    store = opened(tmp_path / "state")
    for number in range(1, 200):
        store.commit(submitted(number))
        assert not has_lost_frames(tmp_path / "state" / WAL)
    place = killed(tmp_path / "state", tmp_path / "killed")
    assert len(load(place)) == 199
    store.close()


class Camera:
    """Takes the state directory before and after each step that changes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: Path, album: Path) -> None:
        self.place, self.album = place, album
        self.acknowledged = 0
        self.taken: list[tuple[Path, int]] = []
        for owner, name in (
            *((os, name) for name in ("replace", "pwrite", "fsync", "open", "chmod")),
            (Path, "unlink"),
            *((database, name) for name in ("connect", "empty_wal")),
        ):
            self._watch(monkeypatch, owner, name)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        real = getattr(owner, name)

        def watched(*words: object, **options: object) -> object:
            self.take()
            try:
                return real(*words, **options)
            finally:
                self.take()

        monkeypatch.setattr(owner, name, watched)

    def take(self) -> None:
        if not (self.place / DATABASE_NAME).exists():
            return
        copy = self.album / str(len(self.taken))
        self.album.mkdir(exist_ok=True)
        os.system(f"cp -r {self.place} {copy}")
        self.taken.append((copy, self.acknowledged))


@pytest.fixture
def moments(tmp_path: Path) -> list[tuple[Path, int]]:
    """Two lives of a database, from its making to an orderly end, at each of their steps."""
    with pytest.MonkeyPatch.context() as patch:
        camera = Camera(patch, tmp_path / "state", tmp_path / "album")
        (tmp_path / "state").mkdir()
        for number in range(1, 7):
            if number % 3 == 1:
                store = Store.open(tmp_path / "state")
            store.commit(submitted(number))
            camera.acknowledged = number
            camera.take()
            if number % 3 == 0:
                store.close()
        camera.take()
    return camera.taken


def test_a_kill_at_any_step_raises_no_alarm_and_loses_nothing(
    moments: list[tuple[Path, int]],
) -> None:
    assert len(moments) > 40
    for place, acknowledged in moments:
        assert len(load(place)) >= acknowledged


def test_a_power_cut_that_loses_the_newest_mark_raises_no_alarm(
    moments: list[tuple[Path, int]],
) -> None:
    """The mark may be any older one: its writes wait for no disk, but never run ahead of it."""
    older = (moments[len(moments) // 4][0] / MARK_NAME).read_bytes()
    for place, acknowledged in moments[len(moments) // 4 :]:
        (place / MARK_NAME).write_bytes(older)
        assert len(load(place)) >= acknowledged


def test_a_mark_that_cannot_be_read_accuses_nobody(left_by_a_kill: Path) -> None:
    (left_by_a_kill / MARK_NAME).write_bytes(b"\0" * 30)
    assert load(left_by_a_kill) == [1, 2, 3, 4, 5, 6]


def test_an_orderly_end_leaves_no_mark(tmp_path: Path) -> None:
    """A restored backup is older, and right."""
    path = filled(tmp_path)
    assert not (tmp_path / MARK_NAME).exists()
    shutil.copy(path, tmp_path / "backup")
    store = Store.open(tmp_path)
    store.commit(submitted(7))
    assert (tmp_path / MARK_NAME).exists()
    store.close()
    os.replace(tmp_path / "backup", path)
    assert load(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_a_full_disk_keeps_the_mark_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no reason to end, and comes with a later commit."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    (tmp_path / "state").mkdir()
    mark = Mark(tmp_path / "state", 3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        mark.reach(4)
    mark.close(complete=False)
    assert (tmp_path / "state" / MARK_NAME).read_bytes().startswith(b"%020d" % 3)


def test_a_host_short_of_descriptors_gets_the_mark_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit is durable by then; the next one makes the mark."""

    def short(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", short)
        mark = Mark(tmp_path, 3)
    assert not (tmp_path / MARK_NAME).exists()
    mark.reach(4)
    mark.close(complete=False)
    assert (tmp_path / MARK_NAME).read_bytes().startswith(b"%020d" % 4)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """While it lasts this process can open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_database_that_could_not_be_opened_for_want_of_descriptors_passes(
    tmp_path: Path,
) -> None:
    """For the writer and for readers, whether or not the want is over when it is looked at."""
    Store.open(tmp_path).close()
    path = tmp_path / DATABASE_NAME
    with no_descriptors(), pytest.raises(StoreFull, match="may open no more files"):
        History(path)
    with (
        pytest.raises(StoreFull, match="it can be opened again"),
        typed_opening(path),
        no_descriptors(),  # lifted before it is judged
    ):
        connect(path)
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreUnusable, match="unable to open database file"):
        History(path)


@pytest.mark.parametrize("keep_bytes", [None, 0, 32 + FRAME])
def test_a_daemon_does_not_start_without_the_log_of_the_one_that_was_killed(
    tmp_path: Path, keep_bytes: int | None
) -> None:
    """78: no restart mends it. With the log back in its place it goes on."""
    daemon = DaemonProcess(tmp_path, "1x1G").start()
    try:
        with daemon.client() as client:
            ids = [client.submit(["true"], hold=True).id for _ in range(3)]
        daemon.kill()
        log = daemon.state_dir / WAL
        aside = Path(shutil.copy(log, tmp_path / "aside"))
        if keep_bytes is None:
            log.unlink()
        else:
            os.truncate(log, keep_bytes)
        for _ in range(2):
            assert daemon.spawn().wait(30) == 78
        assert MARK_NAME in daemon.log_tail()
        assert "Traceback" not in daemon.log_tail()
        for name in (DATABASE_NAME + "-shm", WAL):
            (daemon.state_dir / name).unlink(missing_ok=True)
        shutil.copy(aside, log)
        daemon.start()
        with daemon.client() as client:
            assert [job.job_id for job in client.jobs().jobs] == ids
    finally:
        clean_up(daemon)


# --- what is looked at beside the service -------------------------------------------------------


def check(path: Path) -> None:
    checker = checks.Checker(path)
    try:
        for step in checker.steps():
            checks.looked_at(step)
    finally:
        checker.close()


def test_a_sound_database_passes_the_long_check(tmp_path: Path) -> None:
    path = filled(tmp_path, 250)
    store = Store.open(tmp_path)
    ended = {JobId(n): _ended(n) for n in range(1, 200)}
    store.commit(Changes(jobs=ended))
    check(path)
    store.close()


def _ended(number: int) -> Job:
    placed = advance(a_job(number), Placed((), False, 1.0, 10.0, 60.0))
    return advance(placed, Gone(JobState.COMPLETED, 5.0, code=0))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE job SET exit_code = 7 WHERE job_id = 3",
        "UPDATE payload SET content = x'80' WHERE job_id = 3",
        "UPDATE brief SET content = x'80' WHERE job_id = 3",
        "UPDATE promise SET start_by_s = 7",
        "UPDATE submission SET job_ids = '[2]'",
        "UPDATE gpu SET drained = 'x'",
        "UPDATE account SET usage_gpu_s = 0",
        "UPDATE length SET length_s = 7",
        "UPDATE meta SET value = value || ' ' WHERE key = 'health'",
        "DELETE FROM submission",
    ],
)
def test_the_long_check_looks_at_every_row(tmp_path: Path, statement: str) -> None:
    path = filled(tmp_path, 250)
    change(path, statement)
    with pytest.raises(StoreDamaged, match="the database is damaged"):
        check(path)


def test_the_long_check_compares_indices_with_their_tables(tmp_path: Path) -> None:
    path = filled(tmp_path)
    (last, *_) = reversed(_bytes_of(path, "job_of_user"))
    content = bytearray(path.read_bytes())
    content[last] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(StoreDamaged, match="integrity_check of job"):
        check(path)


def test_a_large_database_is_checked_after_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size makes no start longer; what is acted on is looked at all the same."""
    asked: list[str] = []
    path = filled(tmp_path)
    real = database.connect

    def traced(path: Path, *, is_new: bool = False) -> sqlite3.Connection:
        db = real(path, is_new=is_new)
        db.set_trace_callback(asked.append)
        return db

    monkeypatch.setattr(database, "connect", traced)
    monkeypatch.setattr(database, "CHECKED_AT_START_BYTES_MAX", path.stat().st_size - 1)
    assert load(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert not [text for text in asked if "quick_check" in text]
    change(path, "UPDATE job SET nice = 5 WHERE job_id = 3")
    with pytest.raises(StoreUnusable, match="row of job 3"):
        load(tmp_path)


def test_a_file_that_was_cut_is_found_whatever_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled(tmp_path)
    monkeypatch.setattr(database, "CHECKED_AT_START_BYTES_MAX", 0)
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(StoreUnusable):
        load(tmp_path)


def test_the_age_of_a_job_is_covered(tmp_path: Path) -> None:
    path = filled(tmp_path)
    change(path, "UPDATE job SET age_gained_s = 1e6 WHERE job_id = 1")
    with pytest.raises(StoreUnusable, match="age of job 1"):
        load(tmp_path)
