"""The schema, as an ordered list of migrations. Only `store` runs them.

Tables are ours to change; the views (`jobs_v`, `usage_v`, `events_v`, ..) are a contract with
people who read the database with `sqlite3`. `crc` columns hold a checksum of a row, so that a
damaged one is found at start and not acted on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpuschedd.store.shown import UNSEEN_TABLE, shown
from gpuschedd.store.upgrade import give_checksums


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema; applied and recorded in one transaction."""

    version: int
    name: str
    statements: tuple[str, ...]
    then: Callable[[Any], None] | None = None  # with the connection, in the same transaction


_FIRST_TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
    """CREATE TABLE environment (
        environment_id INTEGER PRIMARY KEY,
        digest BLOB NOT NULL UNIQUE,
        content BLOB NOT NULL)""",
    """CREATE TABLE job (
        job_id INTEGER PRIMARY KEY,
        uid INTEGER NOT NULL,
        user TEXT NOT NULL,
        name TEXT NOT NULL,
        state TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        gpus INTEGER NOT NULL,
        vram_bytes INTEGER,
        gpu_model TEXT,
        exclusive INTEGER NOT NULL,
        topology TEXT NOT NULL,
        card_bytes INTEGER NOT NULL,
        memory_bytes INTEGER,
        cpus INTEGER,
        time_limit_s REAL,
        default_limit INTEGER NOT NULL,
        nice INTEGER NOT NULL,
        hold TEXT,
        hold_detail TEXT,
        whole_note TEXT,
        submitted_at_s REAL NOT NULL,
        started_at_s REAL,
        ended_at_s REAL,
        submitted_sched_s REAL NOT NULL,
        decided_sched_s REAL,
        decided_limit_s REAL,
        stuck INTEGER NOT NULL,
        warned_limit_s REAL,
        started_sched_s REAL,
        main_ended_sched_s REAL,
        not_before_sched_s REAL,
        begin_at_sched_s REAL,
        eligible_since_s REAL,
        age_gained_s REAL,
        window_since_s REAL,
        cancel_uid INTEGER,
        cancel_by TEXT,
        cancel_at_s REAL,
        cancel_reason TEXT,
        signals TEXT NOT NULL,
        whole INTEGER NOT NULL,
        exit_code INTEGER,
        exit_signal INTEGER,
        cause TEXT,
        cause_detail TEXT,
        cpu_user_s REAL,
        cpu_system_s REAL,
        max_rss_bytes INTEGER,
        launch_failures INTEGER NOT NULL,
        retries INTEGER NOT NULL,
        retries_used INTEGER NOT NULL,
        final INTEGER NOT NULL,
        crc INTEGER NOT NULL,
        age_crc INTEGER)""",
    "CREATE INDEX job_live ON job (final) WHERE final = 0",
    "CREATE INDEX job_of_user ON job (uid, job_id)",
    "CREATE INDEX job_of_name ON job (user, job_id)",
    "CREATE INDEX job_ended ON job (ended_at_s) WHERE final = 1",
    """CREATE TABLE payload (
        job_id INTEGER PRIMARY KEY REFERENCES job (job_id),
        environment_id INTEGER REFERENCES environment (environment_id),
        content BLOB NOT NULL,
        crc INTEGER NOT NULL)""",
    "CREATE INDEX payload_environment ON payload (environment_id)",
    """CREATE TABLE allocation (
        job_id INTEGER NOT NULL REFERENCES job (job_id),
        attempt INTEGER NOT NULL,
        gpu_uuid TEXT NOT NULL,
        gpu_index INTEGER NOT NULL,
        held_bytes INTEGER NOT NULL,
        declared_bytes INTEGER NOT NULL,
        PRIMARY KEY (job_id, attempt, gpu_uuid)) WITHOUT ROWID""",
    """CREATE TABLE attempt (
        job_id INTEGER NOT NULL REFERENCES job (job_id),
        attempt INTEGER NOT NULL,
        decided_sched_s REAL NOT NULL,
        started_at_s REAL,
        ended_at_s REAL,
        outcome TEXT,
        exit_code INTEGER,
        exit_signal INTEGER,
        detail TEXT,
        PRIMARY KEY (job_id, attempt)) WITHOUT ROWID""",
    """CREATE TABLE event (
        event_id INTEGER PRIMARY KEY AUTOINCREMENT,
        at_s REAL NOT NULL,
        kind TEXT NOT NULL,
        job_id INTEGER,
        uid INTEGER,
        data TEXT NOT NULL)""",
    "CREATE INDEX event_of_job ON event (job_id, event_id)",
    """CREATE TABLE submission (
        uid INTEGER NOT NULL,
        submission_id TEXT NOT NULL,
        digest BLOB NOT NULL,
        job_ids TEXT NOT NULL,
        at_sched_s REAL NOT NULL,
        crc INTEGER NOT NULL,
        PRIMARY KEY (uid, submission_id)) WITHOUT ROWID""",
    """CREATE TABLE account (
        uid INTEGER PRIMARY KEY,
        user TEXT NOT NULL,
        usage_gpu_s REAL NOT NULL,
        rate REAL NOT NULL,
        at_sched_s REAL NOT NULL,
        at_s REAL NOT NULL,
        crc INTEGER NOT NULL)""",
    """CREATE TABLE promise (
        job_id INTEGER NOT NULL REFERENCES job (job_id),
        promised_at_s REAL NOT NULL,
        promised_sched_s REAL NOT NULL,
        start_by_s REAL NOT NULL,
        start_by_sched_s REAL NOT NULL,
        outcome TEXT,
        outcome_at_s REAL,
        started_at_s REAL,
        detail TEXT,
        crc INTEGER NOT NULL,
        PRIMARY KEY (job_id, promised_sched_s)) WITHOUT ROWID""",
    """CREATE TABLE gpu (
        uuid TEXT PRIMARY KEY,
        gpu_index INTEGER NOT NULL,
        minor INTEGER,
        model TEXT NOT NULL,
        total_bytes INTEGER,
        reserved_bytes INTEGER NOT NULL,
        seen_at_s REAL NOT NULL,
        drained TEXT,
        sick TEXT,
        sick_until_reboot INTEGER NOT NULL,
        crc INTEGER NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE gpu_use (
        job_id INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        gpu_uuid TEXT NOT NULL,
        peak_bytes INTEGER,
        peak_upper_bytes INTEGER,
        peak_source TEXT NOT NULL,
        utilization REAL,
        energy_j REAL,
        observed_s REAL NOT NULL,
        crc INTEGER NOT NULL,
        PRIMARY KEY (job_id, attempt, gpu_uuid)) WITHOUT ROWID""",
    """CREATE TABLE audit (
        at_s REAL NOT NULL,
        uid INTEGER NOT NULL,
        pid INTEGER NOT NULL,
        method TEXT NOT NULL,
        outcome TEXT NOT NULL,
        detail TEXT NOT NULL)""",
    """CREATE VIEW jobs_v AS SELECT
        job_id, user, uid, name, state, attempt, gpus,
        vram_bytes / 1048576 AS vram_mib, gpu_model,
        memory_bytes / 1048576 AS memory_mib, cpus, time_limit_s, nice,
        datetime(submitted_at_s, 'unixepoch') AS submitted_utc,
        datetime(started_at_s, 'unixepoch') AS started_utc,
        datetime(ended_at_s, 'unixepoch') AS ended_utc,
        round(ended_at_s - started_at_s, 3) AS elapsed_s,
        exit_code, exit_signal, cause, cause_detail, cpu_user_s, cpu_system_s,
        max_rss_bytes / 1048576 AS max_rss_mib,
        (SELECT max(peak_bytes) / 1048576 FROM gpu_use
          WHERE gpu_use.job_id = job.job_id AND gpu_use.attempt = job.attempt) AS vram_peak_mib,
        (SELECT round(sum(energy_j), 1) FROM gpu_use
          WHERE gpu_use.job_id = job.job_id AND gpu_use.attempt = job.attempt) AS energy_j,
        (SELECT group_concat(gpu_index) FROM allocation
          WHERE allocation.job_id = job.job_id AND allocation.attempt = job.attempt) AS gpu_indices
        FROM job""",
    """CREATE VIEW usage_v AS SELECT
        user, uid, round(usage_gpu_s / 3600.0, 4) AS usage_gpu_hours,
        rate AS running_gpus,
        strftime('%Y-%m-%dT%H:%M:%SZ', at_s, 'unixepoch') AS as_of_utc FROM account""",
    """CREATE VIEW events_v AS SELECT
        event_id, strftime('%Y-%m-%dT%H:%M:%fZ', at_s, 'unixepoch') AS at_utc,
        kind, job_id, uid, data FROM event""",
)

# Beside `payload`, whose rows hold whole scripts: a list of jobs must not read those.
_BRIEFS = (
    """CREATE TABLE brief (
        job_id INTEGER PRIMARY KEY REFERENCES job (job_id),
        content BLOB NOT NULL,
        crc INTEGER NOT NULL)""",
)

_PROMISES_VIEW = (
    """CREATE VIEW promises_v AS SELECT
        job_id, user, uid, name, gpus,
        datetime(promised_at_s, 'unixepoch') AS promised_utc,
        datetime(start_by_s, 'unixepoch') AS start_by_utc,
        datetime(promise.started_at_s, 'unixepoch') AS started_utc,
        round(promise.started_at_s - start_by_s, 3) AS late_s,
        coalesce(outcome, 'open') AS outcome, detail AS exception
        FROM promise JOIN job USING (job_id)""",
)

_ENVIRONMENT_WAITS = ("ALTER TABLE job ADD COLUMN environment_wait TEXT",)

# `kept`: the requests of final jobs, what they take and when these ended, in scheduler time.
_SUMS_AND_RETENTION = (
    "ALTER TABLE meta ADD COLUMN crc INTEGER",
    """CREATE TABLE kept (
        job_id INTEGER PRIMARY KEY REFERENCES job (job_id),
        uid INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        ended_sched_s REAL NOT NULL)""",
    "CREATE INDEX kept_of_user ON kept (uid, ended_sched_s, bytes)",
    "CREATE INDEX kept_ended ON kept (ended_sched_s)",
    "CREATE INDEX promise_open ON promise (job_id) WHERE outcome IS NULL",
    "CREATE INDEX submission_age ON submission (at_sched_s)",
    "CREATE INDEX event_of_user ON event (uid)",
    "CREATE INDEX audit_of_user ON audit (outcome, uid)",
    *UNSEEN_TABLE,
    "DROP VIEW jobs_v",
    f"""CREATE VIEW jobs_v AS SELECT
        job_id, {shown("user")} AS user, uid, {shown("name")} AS name, state, attempt, gpus,
        vram_bytes / 1048576 AS vram_mib, {shown("gpu_model")} AS gpu_model,
        memory_bytes / 1048576 AS memory_mib, cpus, time_limit_s, nice,
        datetime(submitted_at_s, 'unixepoch') AS submitted_utc,
        datetime(started_at_s, 'unixepoch') AS started_utc,
        datetime(ended_at_s, 'unixepoch') AS ended_utc,
        round(ended_at_s - started_at_s, 3) AS elapsed_s,
        exit_code, exit_signal, cause, {shown("cause_detail")} AS cause_detail,
        cpu_user_s, cpu_system_s,
        max_rss_bytes / 1048576 AS max_rss_mib,
        (SELECT max(peak_bytes) / 1048576 FROM gpu_use
          WHERE gpu_use.job_id = job.job_id AND gpu_use.attempt = job.attempt) AS vram_peak_mib,
        (SELECT round(sum(energy_j), 1) FROM gpu_use
          WHERE gpu_use.job_id = job.job_id AND gpu_use.attempt = job.attempt) AS energy_j,
        (SELECT group_concat(gpu_index) FROM allocation
          WHERE allocation.job_id = job.job_id AND allocation.attempt = job.attempt) AS gpu_indices
        FROM job""",
    "DROP VIEW usage_v",
    f"""CREATE VIEW usage_v AS SELECT
        {shown("user")} AS user, uid, round(usage_gpu_s / 3600.0, 4) AS usage_gpu_hours,
        rate AS running_gpus,
        strftime('%Y-%m-%dT%H:%M:%SZ', at_s, 'unixepoch') AS as_of_utc FROM account""",
    "DROP VIEW events_v",
    f"""CREATE VIEW events_v AS SELECT
        event_id, strftime('%Y-%m-%dT%H:%M:%fZ', at_s, 'unixepoch') AS at_utc,
        kind, job_id, uid, {shown("data")} AS data FROM event""",
    "DROP VIEW promises_v",
    f"""CREATE VIEW promises_v AS SELECT
        job_id, {shown("user")} AS user, uid, {shown("name")} AS name, gpus,
        datetime(promised_at_s, 'unixepoch') AS promised_utc,
        datetime(start_by_s, 'unixepoch') AS start_by_utc,
        datetime(promise.started_at_s, 'unixepoch') AS started_utc,
        round(promise.started_at_s - start_by_s, 3) AS late_s,
        coalesce(outcome, 'open') AS outcome, {shown("detail")} AS exception
        FROM promise JOIN job USING (job_id)""",
)

_DECIDED_GRACE = ("ALTER TABLE job ADD COLUMN decided_grace_s REAL",)

#: `length`: the last two runs of each kind of job, the newer one first.
_LENGTHS = (
    "ALTER TABLE job ADD COLUMN decided_expected_s REAL",
    "ALTER TABLE job ADD COLUMN length_key TEXT",
    "ALTER TABLE job ADD COLUMN estimate_s REAL",
    "ALTER TABLE job ADD COLUMN head_since_s REAL",
    "ALTER TABLE job ADD COLUMN head_expected_s REAL",
    """CREATE TABLE length (
        uid INTEGER NOT NULL,
        key TEXT NOT NULL,
        gpus INTEGER NOT NULL,
        ended_s REAL NOT NULL,
        length_s REAL NOT NULL,
        before_ended_s REAL,
        before_length_s REAL,
        crc INTEGER NOT NULL,
        PRIMARY KEY (uid, key, gpus)) WITHOUT ROWID""",
)

MIGRATIONS: tuple[Migration, ...] = (
    Migration(1, "first tables and views", _FIRST_TABLES),
    Migration(2, "requests in brief, for lists", _BRIEFS),
    Migration(3, "a view of the promises", _PROMISES_VIEW),
    Migration(4, "jobs that wait for their environment", _ENVIRONMENT_WAITS),
    Migration(5, "checksums, counts and retention", _SUMS_AND_RETENTION, give_checksums),
    Migration(6, "the grace that an attempt was given", _DECIDED_GRACE),
    Migration(7, "how long jobs run", _LENGTHS),
)

NEWEST = MIGRATIONS[-1].version
