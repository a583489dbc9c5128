"""The Python API as its users' tools see it: types, the version, the metadata."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

import gpusched_client

ROOT = Path(__file__).resolve().parents[2]

GOOD = """\
from __future__ import annotations

import sys

import gpusched_client
from gpusched_client import Client, Denied, JobState, JobView, SubmittedJob, job_request
from gpusched_client import errors, terms


def submitted(client: Client) -> SubmittedJob:
    return client.submit(
        ["python", b"train.py", sys.executable],
        gpus=2,
        vram="18G",
        memory=2**30,
        time_limit="4h",
        name="train",
        environment={"A": "b"},
        retries=1,
    )


def ended(client: Client, job_id: int) -> tuple[JobState, int | None, str | None]:
    try:
        view: JobView = client.wait(job_id, timeout_s=60.0)
    except errors.StillRunning as still:
        raise SystemExit(still.exit_status) from still
    return view.state, view.exit_code, view.cause


def waits(client: Client) -> dict[int, str]:
    page = client.jobs(states=[terms.JobState.PENDING, "R"], limit=10)
    return {job.id: job.reason.code for job in page.jobs if job.reason is not None}


def main() -> int:
    several = [job_request(shell=f"echo {n}", gpus=0, hold=True) for n in range(3)]
    with Client("/run/some.sock", timeout_s=5.0) as client:
        try:
            jobs = client.submit_many(several, submission_id="x")
            outcomes = client.cancel([job.id for job in jobs], reason="a test")
        except Denied as denied:
            return denied.exit_status
        for event in client.watch(since=0):
            print(event.kind, event.job_id)
        free = [gpu.uuid for gpu in client.gpus() if gpu.state == "ok" and not gpu.jobs]
        print(free, gpusched_client.__version__, terms.Cause.CUDA_OOM.value)
        both: tuple[JobView, ...] = client.wait([job.id for job in jobs])
        return len(both) + sum(outcome.code is not None for outcome in outcomes)
"""

#: Each line is wrong, in the way that its comment names.
BAD = """\
from gpusched_client import Client, job_request
from gpusched_client import Nonsense  # attr-defined
client = Client(timeout="long")  # call-arg
client.submit(["true"], gpus="two")  # arg-type
client.submit(["true"], vram=1.5)  # arg-type
client.submit("true", grammar=True)  # call-arg
client.submitt(["true"])  # attr-defined
job = client.wait(7)
code: str = job.exit_code  # assignment
job.state = job.state  # misc
job.no_such_field  # attr-defined
job_request(["true"], time_limit=None, hold="yes")  # arg-type
for view in client.wait([7]):
    text: int = view.cause  # assignment
"""


def _mypy(place: Path, script: str) -> subprocess.CompletedProcess[str]:
    """What `mypy --strict` says of a user's script, which lies anywhere."""
    (place / "script.py").write_text(script)
    words = ["--strict", "--config-file=", f"--cache-dir={place / 'cache'}", "script.py"]
    return subprocess.run(
        [sys.executable, "-m", "mypy", *words],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_a_user_s_script_is_typed(tmp_path: Path) -> None:
    """All of the API that the README and the docstrings show, under --strict."""
    found = _mypy(tmp_path, GOOD)
    assert (found.returncode, found.stdout) == (0, "Success: no issues found in 1 source file\n")


def test_a_mistake_in_a_user_s_script_is_found(tmp_path: Path) -> None:
    """Where nothing is typed, nothing would be."""
    found = _mypy(tmp_path, BAD)
    lines = enumerate(BAD.splitlines(), start=1)
    expected = [(number, line.split("  # ")[1]) for number, line in lines if "  # " in line]
    said = re.findall(r"^script\.py:(\d+): error: .*\[([a-z-]+)\]$", found.stdout, re.MULTILINE)
    assert [(int(number), code) for number, code in said] == expected


@pytest.mark.parametrize("package", ["gpuschedd", "gpusched_client"])
def test_both_packages_say_that_they_are_typed(package: str) -> None:
    """PEP 561: without the marker a type checker takes all of it for Any."""
    assert (files(package) / "py.typed").is_file()


def test_there_is_one_version() -> None:
    """Of both packages, of the project, and of what is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = {project["version"], importlib.metadata.version("gpuschedd")}
    assert versions == {gpusched_client.__version__}


def test_the_metadata_names_each_python_that_is_tried() -> None:
    """What the classifiers promise and what is required agree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    assert project["requires-python"] == f">={named[0]}"
    workflow = (ROOT / ".github" / "workflows" / "check.yml").read_text()
    assert named == re.findall(r'"(3\.\d+)"', workflow)
