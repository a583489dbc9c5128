"""Make `schema-N.sql`: a real daemon runs and keeps jobs of every state, then its books are dumped.

    cd / && PYTHONPATH=TREE python HERE/tests/data/make_database.py > HERE/tests/data/schema-N.sql

TREE is a checkout of the version whose schema is wanted. The holds that no user's daemon gives are
put in by that version's own store, so that every row has the checksum it wrote.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from gpusched_client import Client
from gpusched_client.errors import Unavailable
from gpuschedd.store import Store

OPTIONS = (
    *("--simulate", "4x24G", "--set", "scheduling.kill_grace=1.0"),
    # Schemas before 4 do not know it: their jobs do not wait for a directory that is not there.
    *("--set", "jobs.environment_patience=0s"),
)
OUT_OF_MEMORY = "echo 'RuntimeError: CUDA error: out of memory' >&2; exit 1"
#: COMPLETED only where payload and environment came through.
KEPT = 'test "$OLD_WORD" = "kept since then" && test "$(umask)" = 0027'
HOLDS = ("admin", "launch", "account", "config")


def until(condition: Callable[[], bool]) -> None:
    """Look again and again, for a minute."""
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def start(place: Path) -> subprocess.Popen[bytes]:
    """The daemon, when it answers."""
    places = [f"--state-dir={place}/state", f"--socket={place}/s", "--config=/dev/null"]
    daemon = subprocess.Popen([sys.executable, "-m", "gpuschedd.main", *OPTIONS, *places])

    def answers() -> bool:
        try:
            with Client(place / "s", reconnect_s=0.0) as client:
                client.hello()
        except Unavailable:
            return False
        return True

    until(answers)
    return daemon


def submit_all(client: Client, place: Path) -> None:
    """Jobs of every fate, by their names; the last ones stay."""
    here: dict[str, Any] = {
        "cwd": "/",
        "output": str(place / "%x.out"),
        "environment": {"PATH": "/usr/bin:/bin"},
    }
    quick: dict[str, Any] = {**here, "gpus": 0}
    ended = [
        client.submit(["true"], name="done", **quick, submission_id="one-of-them"),
        client.submit(["sh", "-c", "exit 3"], name="failed", **quick),
        client.submit(shell="kill -KILL $$", name="killed", **quick),
        client.submit(["no-such-command-anywhere"], name="unknown", **quick),
        client.submit(["true"], name="homeless", **{**quick, "cwd": place / "nowhere"}),
        client.submit(["sleep", "60"], name="late", time_limit=1, **quick),
        client.submit(shell=OUT_OF_MEMORY, name="oom", vram="4G", time_limit=600, **here),
    ]
    mark = place / "retried.mark"
    line = f"test -e {mark} || {{ touch {mark}; {OUT_OF_MEMORY}; }}"
    ended += [
        client.submit(shell=line, name="retried", vram="4G", retries=1, time_limit=600, **here),
        cut := client.submit(["sleep", "60"], name="cut", **quick),
        lost := client.submit(shell=f"echo $PPID > {place}/ppid; sleep 60", name="lost", **quick),
        dropped := client.submit(["true"], name="dropped", hold=True, **here),
    ]
    until(lambda: client.job(cut.id).state == "RUNNING")
    client.cancel([cut.id, dropped.id], reason="no longer needed")
    until(lambda: (place / "ppid").exists() and client.job(lost.id).state == "RUNNING")
    os.kill(int((place / "ppid").read_text()), signal.SIGKILL)
    client.wait([job.id for job in ended], timeout_s=60)

    go = place / "go"
    line = f"until test -e {go}; do sleep 0.05; done"
    before = client.submit(shell=line, name="before", gpus=4, time_limit=600, **here)
    until(lambda: client.job(before.id).state == "RUNNING")
    kept = client.submit(["true"], name="promised", gpus=4, time_limit=600, **here)
    until(lambda: client.job(kept.id).promised_start_s is not None)
    go.touch()
    client.wait([before.id, kept.id], timeout_s=60)
    _submit_those_that_stay(client, here)


def _submit_those_that_stay(client: Client, here: dict[str, Any]) -> None:
    os.umask(0o027)
    stays: dict[str, Any] = {
        **here,
        "output": "/dev/null",
        "environment": {"OLD_WORD": "kept since then"},
    }
    running = client.submit(["sleep", "600"], name="running", gpus=2, time_limit="1h", **here)
    until(lambda: client.job(running.id).state == "RUNNING")
    head = client.submit(shell=KEPT, name="head", gpus=4, time_limit="1h", nice=5, **stays)
    until(lambda: client.job(head.id).promised_start_s is not None)
    script = f'#!/bin/sh\n{KEPT} && test "$1" = "an argument" && exit 7\n'
    client.submit(script=script, args=["an argument"], name="held", vram="8G", hold=True, **stays)
    for hold in HOLDS:
        client.submit(shell=KEPT, name=f"held-{hold}", gpus=0, hold=True, **stays)


def give_holds(store: Store) -> None:
    """Holds by an admin, after failed launches, of an account, and by the configuration."""
    jobs: dict[str, Any] = {job.name: job for job in store.load().jobs}
    changed: dict[int, Any] = {}
    for hold in HOLDS:
        failures = 4 if hold == "launch" else 0
        job = jobs[f"held-{hold}"]
        changed[job.job_id] = replace(
            job, hold=hold, hold_detail=f"a hold of {hold}", launch_failures=failures
        )
    changes = get_type_hints(Store.commit)["changes"]  # wherever that version has it
    store.commit(changes(jobs=changed))


def make(place: Path) -> Path:
    """The database, in a directory of its own below `place`."""
    copy = place / "copy"
    copy.mkdir()
    path = copy / "gpuschedd.sqlite3"
    daemon = start(place)
    try:
        with Client(place / "s") as client:
            submit_all(client, place)
            with (
                closing(sqlite3.connect(place / "state" / path.name)) as source,
                closing(sqlite3.connect(path)) as target,
            ):
                source.backup(target)
            live = [job.job_id for job in client.jobs().jobs if job.state.is_live]
            client.cancel(live)
            client.wait(live, timeout_s=60)
    finally:
        daemon.terminate()
        daemon.wait()
    store = Store.open(copy)
    give_holds(store)
    store.close()
    return path


def main() -> None:
    """Make it, and write the dump to stdout."""
    with (
        tempfile.TemporaryDirectory(prefix="gpuschedd-data-") as name,
        closing(sqlite3.connect(make(Path(name)))) as db,
    ):
        (version,) = db.execute("PRAGMA user_version").fetchone()
        print(*db.iterdump(), f"PRAGMA user_version = {version};", sep="\n")


if __name__ == "__main__":
    main()
