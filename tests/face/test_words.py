"""The words of the face: states, reasons, causes, errors; and those that the daemon writes down."""

from __future__ import annotations

import ast
import json
from enum import StrEnum
from functools import cache
from pathlib import Path

import pytest

from gpusched_client import errors, terms
from tests.face.golden import PLACE, difference

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT / "gpuschedd", ROOT / "gpusched_client")

#: Words that are public by `watch`, the views, the log or JSON, by where one meets them. Kept by
#: hand: no face of the daemon lists them.
SPOKEN: dict[str, list[str]] = json.loads((PLACE / "spoken.json").read_text())


def _values(kind: type[StrEnum]) -> list[str]:
    return [word.value for word in kind]


def test_states_reasons_causes_and_errors_are_as_they_were() -> None:
    """A word that is gone or new is a change for every script that compares with it."""
    words = {
        "states": {
            state.value: {"short": state.short, "final": state.is_final} for state in terms.JobState
        },
        "reasons": _values(terms.PendingReason),
        "causes": _values(terms.Cause),
        "errors": {
            code: {"class": kind.__name__, "exit status": kind.exit_status}
            for code, kind in errors.BY_CODE.items()
        },
    }
    assert difference("words", words) == ""


@cache
def _texts() -> frozenset[str]:
    """Every text that stands by itself in the code."""
    trees = (ast.parse(path.read_text()) for folder in SOURCES for path in folder.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return frozenset(node.value for node in nodes if isinstance(node.value, str))


@pytest.mark.parametrize("where", SPOKEN)
def test_every_word_is_still_spoken(where: str) -> None:
    """Wherever the code keeps it: one that was renamed is nowhere."""
    assert set(SPOKEN[where]) <= _texts()


def test_the_events_of_the_scenario_are_known_ones() -> None:
    """What a daemon was heard to say is in the list above."""
    events = json.loads((PLACE / "events.json").read_text())
    heard = {kind for kinds in events["of jobs"].values() for kind in kinds}
    assert heard | set(events["of no job"]) <= set(SPOKEN["events"])
