"""Another revision of this clone to compare with, as a tree that PYTHONPATH can name."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import ROOT

BASE = "c9823d2"  # which planned by limits alone, and whose speed the aims are told against
PARTS = ("gpuschedd", "gpusched_client", "pyproject.toml")


class NoTree(Exception):
    """The revision is not in this clone."""


@contextmanager
def tree_of(base: str) -> Iterator[Path]:
    """The tree of a revision; a directory is its own. NoTree tells how it could be there."""
    if Path(base).is_dir():
        yield Path(base).resolve()
        return
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", base, *PARTS], capture_output=True, check=False
    )
    if archive.returncode != 0:
        raise NoTree(
            f"{base} is not in this clone ({archive.stderr.decode().strip()}): "
            "`git fetch --unshallow` or `git fetch origin` brings it; --base takes another "
            "revision, or the directory of a tree that was unpacked elsewhere"
        )
    with tempfile.TemporaryDirectory(prefix="gpusched-base-") as place:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
            packed.extractall(place, filter="data")
        yield Path(place)


def command(tree: Path, name: str) -> list[str]:
    """A command of a tree that is not installed; what installing would add is an import of re."""
    scripts = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts[name].partition(":")
    return [sys.executable, "-P", "-c", f"from {module} import {function}; {function}()"]
