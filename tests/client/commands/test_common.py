"""What all commands share: who answered, and what is said where the answer cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpusched_client import paths
from gpusched_client.commands import gcancel, gq, gsub
from tests.client.fake_server import HELLO, FakeServer, Handler

Serve = Callable[[dict[str, Handler]], FakeServer]


@pytest.mark.parametrize(
    ("mode", "simulated", "has_system", "said"),
    [
        ("system", False, True, ""),
        ("user", False, False, ""),
        ("user", True, False, "your own daemon answered; its GPUs are simulated"),
        ("user", False, True, "your own daemon answered, not the system's"),
        ("system", True, True, "the system's daemon answered; its GPUs are simulated"),
    ],
)
def test_it_is_said_once_when_a_private_or_simulated_daemon_answered(
    serve: Serve,
    run: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mode: str,
    simulated: bool,
    has_system: bool,
    said: str,
) -> None:
    serve(
        {
            "hello": lambda _: {**HELLO, "mode": mode, "simulated": simulated},
            "submit": lambda _: {"job_ids": [1]},
            "jobs": lambda _: {"jobs": [], "total": 0},
            "cancel": lambda _: {"outcomes": [{"job_id": 1}]},
        }
    )
    monkeypatch.setattr(paths, "SYSTEM_SOCKET", tmp_path / "system.sock")
    if has_system:
        (tmp_path / "system.sock").touch()
    for command, *words in ((gsub.cli, "true"), (gq.cli,), (gcancel.cli, "1")):
        outcome = run(command, *words)
        assert outcome.err == (f"{command.name}: {said}\n" if said else "")


@pytest.mark.parametrize(
    ("words", "to", "status", "said"),
    [
        (
            "gsub true",
            ">/dev/full",
            74,
            "gsub: job 92 is submitted, but the answer cannot be written: No space left on device",
        ),
        (
            "gsub --parsable true",
            ">/dev/full",
            74,
            "gsub: job 92 is submitted, but the answer cannot be written: No space left on device",
        ),
        (
            "gsub --wait --json true",
            ">/dev/full",
            74,
            "gsub: job 92 is submitted, but the answer cannot be written: No space left on device",
        ),
        (
            "gcancel 92",
            ">/dev/full",
            74,
            "gcancel: what was asked is done, but the answer cannot be written: "
            "No space left on device",
        ),
        (
            "gctl hold 92",
            ">/dev/full",
            74,
            "gctl: what was asked is done, but the answer cannot be written: "
            "No space left on device",
        ),
        (
            "gsub true",
            "a pipe without a reader",
            141,
            "gsub: job 92 is submitted, but nobody reads the answer",
        ),
    ],
)
def test_where_the_answer_is_lost_what_was_done_is_said(
    serve: Serve, words: str, to: str, status: int, said: str
) -> None:
    done = {"outcomes": [{"job_id": 92, "text": "done"}]}
    serve(
        {
            "submit": lambda _: {"job_ids": [92]},
            "wait": lambda _: {"jobs": [{"job_id": 92, "state": "COMPLETED"}]},
            "cancel": lambda _: done,
            "update": lambda _: done,
        }
    )
    command, rest = words.split(" ", 1)
    reader, writer = os.pipe()
    os.close(reader)  # before a word is written
    with open("/dev/full", "w") if "full" in to else os.fdopen(writer, "w") as out:
        result = subprocess.run(
            [sys.executable, "-m", f"gpusched_client.commands.{command}", *rest.split()],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (result.returncode, result.stderr) == (status, f"{said}\n")
