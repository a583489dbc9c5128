"""The spec: only one that is whole, and the supervisor's own, is run."""

from __future__ import annotations

import os

import pytest

from gpuschedd.run.job_dir import JobDir
from gpuschedd.supervisor.errors import EXIT_NO_SPEC, EXIT_SPEC_REFUSED
from gpuschedd.supervisor.records import encode
from tests.support.jobs import Host, supervise

AS_ROOT = os.geteuid() == 0


def test_without_a_spec_nothing_runs(host: Host) -> None:
    job = JobDir.create(host.jobs_root, host.spec("touch", "ran"))
    (job.path / "spec").unlink()
    assert supervise(job.path).returncode == EXIT_NO_SPEC
    assert supervise(host.jobs_root / "9.9").returncode == EXIT_NO_SPEC
    assert job.claim() is None


@pytest.mark.parametrize("mode", [0o640, 0o644, 0o400, 0o666])
def test_a_spec_that_others_could_touch_is_refused(host: Host, mode: int) -> None:
    job = JobDir.create(host.jobs_root, host.spec("touch", "ran"))
    (job.path / "spec").chmod(mode)
    done = supervise(job.path)
    assert done.returncode == EXIT_SPEC_REFUSED
    assert b"the spec has mode" in done.stderr
    assert job.claim() is None


def test_a_directory_that_others_could_touch_is_refused(host: Host) -> None:
    job = JobDir.create(host.jobs_root, host.spec("touch", "ran"))
    job.path.chmod(0o755)
    assert supervise(job.path).returncode == EXIT_SPEC_REFUSED


@pytest.mark.root
@pytest.mark.skipif(not AS_ROOT, reason="needs root to give a file away")
def test_a_spec_of_somebody_else_is_refused(host: Host) -> None:
    job = JobDir.create(host.jobs_root, host.spec("touch", "ran"))
    os.chown(job.path / "spec", 12345, 12345)
    done = supervise(job.path)
    assert done.returncode == EXIT_SPEC_REFUSED
    assert b"belongs to uid 12345" in done.stderr


@pytest.mark.parametrize("uid", ["missing", "", None, "0", 0.0, True, -1, 2**32 - 1, 10**6 + 7])
def test_a_spec_without_a_proper_uid_is_refused(host: Host, uid: object) -> None:
    spec = host.spec("touch", "ran")
    job = JobDir.create(host.jobs_root, spec)
    record = spec.to_record()
    record["uid"] = uid
    if uid == "missing":
        del record["uid"]
    (job.path / "spec").write_bytes(encode(record))
    assert supervise(job.path).returncode == EXIT_SPEC_REFUSED


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b'{"version": 2}', b'{"version": true}', b"{}", b"\xff", b'{"version": 1}'],
)
def test_a_spec_that_is_not_understood_is_refused(host: Host, content: bytes) -> None:
    job = JobDir.create(host.jobs_root, host.spec("touch", "ran"))
    (job.path / "spec").write_bytes(content)
    assert supervise(job.path).returncode == EXIT_SPEC_REFUSED
    assert job.claim() is None


def test_a_spec_in_another_attempt_s_directory_is_refused(host: Host) -> None:
    job = JobDir.create(host.jobs_root, host.spec("touch", "ran"))
    moved = host.jobs_root / "77.1"
    job.path.rename(moved)
    assert supervise(moved).returncode == EXIT_SPEC_REFUSED
