"""What a job takes along from its submitter's process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpusched_client import Invalid, Surroundings, job_request
from gpusched_client.submission import request


def test_surroundings_make_the_same_job_as_none() -> None:
    assert job_request(["true", "1"], surroundings=Surroundings()) == job_request(["true", "1"])


def test_surroundings_are_read_once_for_all_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    for name in ("_environment", "current_umask", "current_rlimits", "current_affinity"):
        real = getattr(request, name)
        monkeypatch.setattr(request, name, _counted(real, read))
    around = Surroundings()
    jobs = [job_request(["true", str(n)], surroundings=around) for n in range(3)]
    assert sorted(read) == ["_environment", "current_affinity", "current_rlimits", "current_umask"]
    assert jobs[0].environment is jobs[2].environment


def _counted(real: Callable[..., Any], read: list[str]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        read.append(real.__name__)
        return real(*given)

    return call


def test_without_surroundings_each_job_is_as_the_process_is_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = job_request(["true"])
    monkeypatch.setenv("NEW_NAME", "1")
    monkeypatch.chdir(tmp_path)
    after = job_request(["true"])
    assert b"NEW_NAME" not in before.environment
    assert (after.environment[b"NEW_NAME"], after.cwd) == (b"1", os.fsencode(tmp_path))


def test_what_a_job_is_given_goes_before_its_surroundings(tmp_path: Path) -> None:
    job = job_request(["true"], surroundings=Surroundings({"A": "1"}), cwd=tmp_path)
    assert (job.environment, job.cwd) == ({b"A": b"1"}, os.fsencode(tmp_path))
    own = job_request(["true"], surroundings=Surroundings({"A": "1"}), environment={"B": "2"})
    assert own.environment == {b"B": b"2"}


def test_an_environment_that_no_job_can_have_is_refused_by_its_name() -> None:
    with pytest.raises(Invalid, match="environment: the name b'A=B' has"):
        Surroundings({"A=B": "1"})
