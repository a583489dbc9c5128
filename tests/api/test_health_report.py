"""What `gctl status` calls a problem."""

from __future__ import annotations

import asyncio
import errno
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusched_client.terms import HoldKind, JobId, JobState, Launch, Mode
from gpuschedd.api.health_report import HealthReport, RecentErrors
from gpuschedd.config.keys import Config
from gpuschedd.core.fairshare import Accounts
from gpuschedd.core.job import Job
from gpuschedd.core.model import Policy, Request
from gpuschedd.core.queues import Queues
from gpuschedd.jobs.state import State
from tests.support.core_builders import gpus

SHORT = "cannot start python: [Errno 11] Resource temporarily unavailable"
PUT_OFF = "jobs that cannot be started for now, and are tried again"


def put_off(job_id: int, why: str | None = SHORT, **changes: Any) -> Job:
    """A job whose launch was put off, and is tried again at 5 s."""
    job = Job(
        job_id=JobId(job_id),
        uid=1000,
        user="alice",
        name="j",
        request=Request(gpus=0),
        submitted_at_s=0.0,
        submitted_sched_s=0.0,
        hold_detail=why,
        not_before_sched_s=5.0,
    )
    return replace(job, **changes)


def problems(place: Path, *jobs: Job, for_admin: bool = True) -> list[str]:
    """Of a host with these jobs, on which all else is well."""
    policy = Policy()
    state = State(Config(), policy, Queues(policy), Accounts(policy), next_job_id=9, gpus=gpus(1))
    for job in jobs:
        state.jobs[job.job_id] = job
        state.index(job)
    seen: Any = SimpleNamespace(source_name="sim", problem=None, sample_age_s=0.1, needs_person=())
    controller: Any = SimpleNamespace(state=state, pass_s_last=0.0)
    connections: Any = SimpleNamespace(total=1)
    report = HealthReport(
        controller,
        place,
        mode=Mode.USER,
        launch=Launch.DIRECT,
        errors=RecentErrors(),
        gpus=seen,
        connections=connections,
    )
    return [
        text
        for text in asyncio.run(report.take(for_admin=for_admin)).problems
        if "are left for the database" not in text
    ]


def test_a_host_that_lacks_processes_is_not_well(tmp_path: Path) -> None:
    """While launches are put off for it, and while the next one is tried; once for all jobs."""
    tried = put_off(4, state=JobState.CONFIGURING, decided_sched_s=1.0, not_before_sched_s=None)
    assert problems(tmp_path, put_off(2), put_off(3), tried) == [f"{PUT_OFF}: 2, 3, 4: {SHORT}"]


def test_why_launches_are_put_off_is_for_admins(tmp_path: Path) -> None:
    """The words may name what is a user's."""
    others = [put_off(2), put_off(3, "/home/bob/x: Permission denied")]
    assert problems(tmp_path, *others, for_admin=False) == [f"{PUT_OFF}: 2, 3"]


def test_many_faults_are_told_in_few_lines(tmp_path: Path) -> None:
    jobs = [put_off(number, f"fault {number}") for number in range(1, 9)]
    assert len(problems(tmp_path, *jobs)) == 3


@pytest.mark.parametrize(
    "job",
    [
        put_off(2, None),
        put_off(2, "GPU 0 is in use: pid 7 of bob"),
        put_off(2, not_before_sched_s=None),  # its time has come: it waits for GPUs
        put_off(2, hold=HoldKind.USER),
    ],
)
def test_a_job_that_nothing_of_the_host_s_keeps_is_no_problem(tmp_path: Path, job: Job) -> None:
    assert problems(tmp_path, job) == []


def test_a_warning_is_kept_whether_it_asks_for_a_traceback_or_not() -> None:
    """A log that raises would end the work that only wanted to tell of a fault."""
    log, errors = logging.Logger("trial"), RecentErrors()
    log.addHandler(errors)
    try:
        raise OSError(errno.EMFILE, "Too many open files")
    except OSError:
        for exc_info in (False, True, None):
            log.warning("look_failed", exc_info=exc_info)
    log.warning("look_failed", exc_info=True)
    told = "look_failed: OSError(24, 'Too many open files')"
    assert [each.text for each in errors.kept] == ["look_failed", told, *["look_failed"] * 2]
