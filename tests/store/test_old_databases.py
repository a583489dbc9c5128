"""A database of each schema there ever was: today's daemon reads it, and goes on with it.

`tests/data/make_database.py` made them, with the daemon of their time.
"""

from __future__ import annotations

import getpass
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest

from gpusched_client import Client
from gpusched_client.terms import JobState, PendingReason
from gpuschedd.config.keys import Config
from gpuschedd.core.fairshare import Accounts
from gpuschedd.core.job import Job
from gpuschedd.core.lengths import Basis, expected
from gpuschedd.core.model import Kind, Policy
from gpuschedd.core.timeline import expected_end_s
from gpuschedd.jobs.state import State
from gpuschedd.store import Store
from tests.support.daemon import DaemonProcess, clean_up

DATA = Path(__file__).parent.parent / "data"
SCHEMAS = tuple(sorted(int(path.stem.split("-")[1]) for path in DATA.glob("schema-*.sql")))
NAME = "gpuschedd.sqlite3"

#: name -> state, exit code, signal, cause, attempt
ENDED = {
    "done": ("COMPLETED", 0, None, "exit", 1),
    "failed": ("FAILED", 3, None, "exit", 1),
    "killed": ("FAILED", None, 9, "signal", 1),
    "unknown": ("FAILED", 127, None, "exit", 1),
    "homeless": ("FAILED", None, None, "setup", 1),
    "late": ("TIMEOUT", None, 15, "time_limit", 1),
    "oom": ("OUT_OF_MEMORY", 1, None, "cuda_oom", 1),
    "retried": ("COMPLETED", 0, None, "exit", 2),
    "cut": ("CANCELLED", None, 15, "cancelled", 1),
    "lost": ("NODE_FAIL", None, None, "node_fail", 1),
    "dropped": ("CANCELLED", None, None, "cancelled", 1),
    "before": ("COMPLETED", 0, None, "exit", 1),
    "promised": ("COMPLETED", 0, None, "exit", 1),
}
HELD = {
    "held": PendingReason.HELD,
    "held-admin": PendingReason.HELD,
    "held-launch": PendingReason.LAUNCH_FAILED,
    "held-account": PendingReason.HELD,
}
#: A promise that was open, a hold by a configuration that bars nobody any more.
RUNS_BY_ITSELF = ("head", "held-config")
#: What showed how long such jobs take, of those that ended before.
TAUGHT = {"done", "late", "before", "promised", "retried"}


def write_database(schema: int, path: Path) -> None:
    """The database of that schema, as its daemon left it."""
    path.parent.mkdir(parents=True)
    with closing(sqlite3.connect(path)) as db:
        db.executescript((DATA / f"schema-{schema}.sql").read_text())
        assert db.execute("PRAGMA user_version").fetchone() == (schema,)


def hand_over(state_dir: Path) -> None:
    """Make root's waiting jobs this user's own: nobody else's daemon can run them."""
    if os.getuid() == 0:
        return
    store = Store.open(state_dir)
    user = getpass.getuser()
    jobs = {job.job_id: replace(job, uid=os.getuid(), user=user) for job in store.load().jobs}
    changes = get_type_hints(Store.commit)["changes"]
    store.commit(changes(jobs=jobs))
    store.close()


@pytest.fixture(params=SCHEMAS, ids=lambda schema: f"schema-{schema}")
def schema(request: pytest.FixtureRequest) -> int:
    """Of the daemon that wrote the database."""
    return int(request.param)


@pytest.fixture
def old(schema: int, tmp_path: Path) -> Iterator[DaemonProcess]:
    """Today's daemon, started on a database of an earlier schema."""
    daemon = DaemonProcess(tmp_path, "4x24G", "--set", "scheduling.kill_grace=1.0")
    write_database(schema, daemon.state_dir / NAME)
    hand_over(daemon.state_dir)
    try:
        yield daemon.start()
    finally:
        clean_up(daemon)


def ids_of(client: Client) -> dict[str, int]:
    """The jobs by name."""
    return {str(job.name): job.job_id for job in client.jobs().jobs}


def test_no_schema_is_without_its_database(tmp_path: Path) -> None:
    """A migration that is added brings the database of the schema before it, and its own."""
    daemon = DaemonProcess(tmp_path)
    try:
        daemon.start()
    finally:
        clean_up(daemon)
    with closing(sqlite3.connect(daemon.state_dir / NAME)) as db:
        assert db.execute("SELECT version FROM migration ORDER BY 1").fetchall() == [
            (schema,) for schema in SCHEMAS
        ]


def test_a_database_of_each_schema_is_read_and_gone_on_with(
    old: DaemonProcess, schema: int
) -> None:
    """All ends as they were; what ran is lost, what waited runs with all that it was given."""
    with old.client() as client:
        ids = ids_of(client)
        ended = client.jobs([ids[name] for name in ENDED]).jobs
        assert {
            job.name: (job.state, job.exit_code, job.exit_signal, job.cause, job.attempt)
            for job in ended
        } == ENDED
        assert client.wait(ids["running"], timeout_s=30).state is JobState.NODE_FAIL
        by_itself = client.wait([ids[name] for name in RUNS_BY_ITSELF], timeout_s=30)
        assert [(job.state, job.exit_code) for job in by_itself] == [(JobState.COMPLETED, 0)] * 2
        waiting = {name: client.job(ids[name]).reason for name in HELD}
        assert {name: reason and reason.code for name, reason in waiting.items()} == HELD
        assert set(ids) == {*ENDED, *HELD, *RUNS_BY_ITSELF, "running"}
        client.update([ids[name] for name in HELD], hold=False)
        released = client.wait([ids[name] for name in HELD], timeout_s=30)
        assert [job.exit_code for job in released] == [7, 0, 0, 0]
    # What an older daemon was given has no key; how long it ran counts for its owner all the same.
    with closing(sqlite3.connect(old.state_dir / NAME)) as db:
        keys = {key for (key,) in db.execute("SELECT key FROM length")}
    ran_now = {*HELD, *RUNS_BY_ITSELF} - {"held"}  # that one failed at once
    assert keys == (TAUGHT | ran_now if schema >= 7 else {""})
    assert not re.search("Traceback|damaged|ERROR", old.log.read_text())


def test_what_was_written_down_of_old_jobs_is_shown(old: DaemonProcess) -> None:
    """Histories, usage and promises, through the client and through the views."""
    with old.client() as client:
        ids = ids_of(client)
        history = [event.kind for event in client.job(ids["retried"]).events or ()]
        assert history.count("job_retried") == 1
        assert history[-1] == "job_ended"
        assert client.job(ids["cut"]).cause_detail == "cancelled by root: no longer needed"
        assert "root" in {view.user for view in client.usage() if view.usage_gpu_s > 0}
    with closing(sqlite3.connect(old.state_dir / NAME)) as db:
        kept = "SELECT outcome, late_s <= 0 FROM promises_v WHERE name = 'promised'"
        assert db.execute(kept).fetchall() == [("kept", 1)]
        assert db.execute("SELECT count(*) FROM events_v WHERE kind = 'gpu_seen'").fetchone() == (
            4,
        )
        assert db.execute("PRAGMA quick_check").fetchone() == ("ok",)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_what_runs_and_waits_in_an_old_database_has_a_sensible_expected_length(
    tmp_path: Path, schema: int
) -> None:
    """Before 7 nothing was kept: the limit of what has one, for what runs as for what waits."""
    write_database(schema, tmp_path / "state" / NAME)
    store = Store.open(tmp_path / "state")
    state = State.restore(Config(), store.load(), Accounts(Policy()))
    store.close()
    jobs = {job.name: job for job in state.jobs.values()}
    running = next(run for run in state.running() if run.job_id == jobs["running"].job_id)
    soon_s = running.decided_at_s + 0.5
    after_s = 5.0 + expected_of_running(schema) + (running.decided_grace_s or 0.0)
    assert expected_end_s(running, soon_s, state.policy) == running.decided_at_s + after_s
    waits = [expected_of(state, jobs[name]) for name in ("head", "held")]
    assert waits == ([(1.0, Basis.OWNER)] * 2 if schema >= 7 else [(3600.0, Basis.LIMIT), GUESS])


GUESS = (86_400.0, Basis.GUESS)


def expected_of_running(schema: int) -> float:
    """From 7 on what its owner's runs of a moment had shown: a second at least."""
    return 1.0 if schema >= 7 else 3600.0


def expected_of(state: State, job: Job) -> tuple[float, Basis]:
    """How long a waiting job will probably run, and by what."""
    key, lengths = job.length_key or "", state.histories.view()
    return expected(lengths, job.uid, key, job.request, state.policy)[:2]


def test_the_lengths_of_a_database_are_read(tmp_path: Path) -> None:
    """Of those that count: not of who failed at once, was cancelled or lost; TIMEOUT its limit."""
    write_database(7, tmp_path / "state" / NAME)
    store = Store.open(tmp_path / "state")
    rows = {row.kind: row for row in store.load().lengths}
    store.close()
    assert {kind.key for kind in rows} == TAUGHT
    assert {kind.gpus for kind in rows} == {0, 1, 4}
    assert [run.length_s for run in rows[Kind("late", 0)].runs] == [1.0]


@pytest.mark.parametrize("schema", SCHEMAS[:-1])
def test_a_copy_is_kept_before_the_schema_changes(tmp_path: Path, schema: int) -> None:
    """Who must go back to the older version has its database, as it was."""
    daemon = DaemonProcess(tmp_path)
    write_database(schema, daemon.state_dir / NAME)
    try:
        daemon.start()
    finally:
        clean_up(daemon)
    with closing(sqlite3.connect(daemon.state_dir / f"{NAME}.backup-schema-{schema}")) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (schema,)
        assert db.execute("SELECT count(*) FROM job").fetchone() == (20,)
