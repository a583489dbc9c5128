"""Supervisors under the observer: what they import, and when."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import tests.supervisor
from tests.support.jobs import Host

OBSERVER = Path(tests.supervisor.__file__).with_name("observer.py")


class Observed(NamedTuple):
    """The modules there at the claim and at the exit record, and what was imported between."""

    at_claim: frozenset[str]
    at_exit: frozenset[str]
    imported: list[str]


class Observer:
    """A command in place of the interpreter, and what it wrote down."""

    def __init__(self, host: Host) -> None:
        self._log = host.root / "observed"
        self._log.touch()
        self._log.chmod(0o666)  # the job's user writes too
        self.command = f"{sys.executable} -I -S {OBSERVER} {self._log}"

    def interpreter(self, host: Host) -> str:
        """A program to be used as the launcher's interpreter."""
        program = host.root / "observing-python"
        program.write_text(f'#!/bin/sh\nexec {self.command} "$@"\n')
        program.chmod(0o755)
        return str(program)

    def seen(self) -> Observed:
        """Of the one supervisor that ran."""
        lines = [line.split() for line in self._log.read_text().splitlines()]
        ((_, *at_claim),) = [line for line in lines if line[0] == "claim"]
        ((_, *at_exit),) = [line for line in lines if line[0] == "exit"]
        imported = [name for word, name, *_ in lines if word == "import"]
        return Observed(frozenset(at_claim), frozenset(at_exit), imported)


def assert_nothing_was_imported(seen: Observed) -> None:
    """Between claim and exit record, by the supervisor or any child of its before the exec."""
    assert seen.imported == []
    assert seen.at_exit == seen.at_claim
    ours = {name for name in seen.at_claim if name.split(".")[0] == "gpuschedd"}
    assert {name for name in ours if not name.startswith("gpuschedd.supervisor")} == {"gpuschedd"}
    others = {name.split(".")[0] for name in seen.at_claim - ours} - {"__main__"}
    assert others <= sys.stdlib_module_names
