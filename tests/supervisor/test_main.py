"""The program itself: what it loads and from where, and that it never runs when it is not whole."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gpuschedd
from gpuschedd.core.attempt import Orders
from gpuschedd.run.job_dir import JobDir
from gpuschedd.run.launchers.direct import SUPERVISOR, DirectLauncher, LaunchDeferred
from gpuschedd.supervisor.errors import EXIT_NO_PROGRAM, EXIT_UNAVAILABLE
from gpuschedd.supervisor.records import RECORD_VERSION
from tests.support.jobs import Host, bare, supervise
from tests.support.observed import Observer, assert_nothing_was_imported

FOLDER = Path(SUPERVISOR).parent
MODULES = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "__main__.py")
VERSION_LINE = f"\nRECORD_VERSION = {RECORD_VERSION}\n"


class Tree:
    """A copy of the sources that a supervisor needs, and of no others."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "gpuschedd" / "supervisor"
        shutil.copytree(FOLDER, self.folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(gpuschedd.__file__, root / "gpuschedd")
        self.program = str(self.folder / "__main__.py")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "tree")


def unstarted(host: Host) -> JobDir:
    return JobDir.create(host.jobs_root, host.spec("touch", "ran"))


# --- what it loads ------------------------------------------------------------------------------


def _obeyed(host: Host) -> JobDir:
    job = host.start("sleep", "60", name="Grüße \U0001f680", output=b"out-\xff")
    host.wait(job.started)
    host.order(job, Orders(time_limit_s=600.0, signals=((1, signal.SIGCONT),)))
    host.cancel(job)
    return job


def _not_understood(host: Host) -> JobDir:
    job = host.start("sleep", "60")
    claim = host.wait(job.claim)
    (job.path / "orders").write_bytes(b'{"\xff')
    os.kill(claim.pid, signal.SIGUSR1)
    log = job.path / "supervisor.log"
    host.wait(lambda: True if b"orders not understood" in log.read_bytes() else None)
    os.kill(claim.pid, signal.SIGTERM)
    return job


STORIES: dict[str, Callable[[Host], JobDir]] = {
    "script, out of GPU memory": lambda host: host.start(
        b"x", script=b"#!/bin/sh\necho CUDA out of memory; exit 1\n", output=b"\xe9\xff"
    ),
    "no such directory": lambda host: host.start("true", cwd=b"/no/\xff\xe9"),
    "no such command": lambda host: host.start(b"no-\xff\xe9"),
    "limits": lambda host: host.start("true", rlimits=(("RLIMIT_CORE", 0, 0),)),
    "no exec": lambda host: host.start(no_exec=True, time_limit_s=0.1),
    "time limit, killed after the grace": lambda host: host.sh(
        "trap '' TERM; sleep 60 & sleep 60; sleep 60", time_limit_s=0.1, kill_grace_s=0.1
    ),
    "orders": _obeyed,
    "orders not understood, stopped": _not_understood,
}


@pytest.mark.parametrize("story", STORIES)
def test_nothing_is_loaded_from_the_claim_to_the_exit_record(host: Host, story: str) -> None:
    """An upgrade may have replaced any file; and only the standard library and this folder are."""
    observer = Observer(host)
    host.launcher = DirectLauncher(observer.interpreter(host))
    host.wait_exit(STORIES[story](host))
    assert_nothing_was_imported(observer.seen())


def test_the_standard_library_wins_every_name(host: Host, tree: Tree) -> None:
    """Whatever else is installed beside it, or lies in its own folder."""
    for name in sys.stdlib_module_names - {"__main__"}:
        for place in (tree.root, tree.folder):
            (place / f"{name}.py").write_text("raise AssertionError('not the standard library')\n")
    done = supervise(unstarted(host).path, tree.program)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (host.work / "ran").exists()


@pytest.mark.tool("setpriv")
def test_a_tree_without_bytecode_that_nobody_may_write_works(host: Host, tree: Tree) -> None:
    for path in [tree.root, *tree.root.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    job = host.spec("touch", "ran")
    done = supervise(JobDir.create(host.jobs_root, job).path, tree.program, bare())
    assert (done.returncode, done.stderr) == (0, b"")
    assert (host.work / "ran").exists()
    assert list(tree.root.rglob("__pycache__")) == []


def test_a_whole_tree_keeps_its_bytecode(host: Host, tree: Tree) -> None:
    """All but the file that is run by its path, which therefore does next to nothing."""
    supervise(unstarted(host).path, tree.program)
    kept = {path.name.split(".")[0] for path in (tree.folder / "__pycache__").glob("*.pyc")}
    assert kept == {path.removesuffix(".py") for path in MODULES}
    assert len(Path(SUPERVISOR).read_text().splitlines()) <= 40


# --- when it is not whole -----------------------------------------------------------------------


def assert_deferred(host: Host, program: str, words: str, status: int) -> None:
    """The launch waits, for it is the host's fault: nothing was claimed, and nothing ran."""
    job = unstarted(host)
    with pytest.raises(LaunchDeferred, match=words):
        DirectLauncher(program=program).launch(job)
    assert supervise(job.path, program).returncode == status
    assert job.claim() is None
    assert not (host.work / "ran").exists()


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_another_version_is_refused(host: Host, tree: Tree, name: str) -> None:
    path = tree.folder / name
    assert path.read_text().endswith(VERSION_LINE)
    path.write_text(path.read_text().replace(VERSION_LINE, "\nRECORD_VERSION = 999\n"))
    assert_deferred(host, tree.program, "has version 999, not", EXIT_UNAVAILABLE)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_is_cut_is_refused(host: Host, tree: Tree, name: str) -> None:
    """However little is missing: the version is the last line."""
    path = tree.folder / name
    path.write_text(path.read_text().removesuffix(VERSION_LINE))
    assert_deferred(host, tree.program, "has version None, not|ImportError", EXIT_UNAVAILABLE)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "__init__.py"])
def test_a_module_that_is_missing_is_refused(host: Host, tree: Tree, name: str) -> None:
    (tree.folder / name).unlink()
    assert_deferred(host, tree.program, "No module named", EXIT_UNAVAILABLE)


def test_a_program_of_another_version_is_refused(host: Host, tree: Tree) -> None:
    path = Path(tree.program)
    path.write_text(path.read_text().replace(VERSION_LINE, "\nRECORD_VERSION = 999\n"))
    assert_deferred(host, tree.program, f"has version {RECORD_VERSION}, not 999", EXIT_UNAVAILABLE)


def test_a_program_that_is_missing_is_the_host_s_fault(host: Host, tree: Tree) -> None:
    shutil.rmtree(tree.root)
    assert_deferred(host, tree.program, "can't open file", EXIT_NO_PROGRAM)


@pytest.mark.parametrize("content", [None, b"", b"\x7fELF"])
def test_an_interpreter_that_is_missing_or_cut_is_the_host_s_fault(
    host: Host, tmp_path: Path, content: bytes | None
) -> None:
    python = tmp_path / "python"
    if content is not None:
        python.write_bytes(content)
        python.chmod(0o755)
    job = unstarted(host)
    with pytest.raises(LaunchDeferred, match=f"cannot start {python}"):
        DirectLauncher(python=str(python)).launch(job)
    assert job.claim() is None
