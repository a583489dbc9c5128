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
from gpusched_client.commands import gcancel, gctl, gq, gsub
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
    monkeypatch.setattr(paths, "SYSTEM_SOCKET", str(tmp_path / "system.sock"))
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
            "gctl top 92",
            ">/dev/full",
            74,
            "gctl: what was asked is done, but the answer cannot be written: "
            "No space left on device",
        ),
        (
            "gctl drain 3 --reason fan",
            ">/dev/full",
            74,
            "gctl: GPU 3 is drained, but the answer cannot be written: No space left on device",
        ),
        (
            "gctl resume 3",
            "a closed stdout",
            74,
            "gctl: GPU 3 is in service again, but the answer cannot be written: "
            "Bad file descriptor",
        ),
        (
            "gctl gpus release",
            ">/dev/full",
            74,
            "gctl: the driver is released, but the answer cannot be written: "
            "No space left on device",
        ),
        (
            "gctl reload",
            "a pipe without a reader",
            141,
            "gctl: the configuration is read again, but nobody reads the answer",
        ),
        (
            "gsub true",
            "a pipe without a reader",
            141,
            "gsub: job 92 is submitted, but nobody reads the answer",
        ),
        (
            "gsub true",
            "a closed stdout",
            74,
            "gsub: job 92 is submitted, but the answer cannot be written: Bad file descriptor",
        ),
        (
            "gsub --wait true",
            "a closed stdout",
            74,
            "gsub: job 92 is submitted, but the answer cannot be written: Bad file descriptor",
        ),
        (
            "gcancel 92",
            "a closed stdout",
            74,
            "gcancel: what was asked is done, but the answer cannot be written: "
            "Bad file descriptor",
        ),
        (
            "gq",
            "a closed stdout",
            74,
            "gq: the answer cannot be written: Bad file descriptor",
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
            "top": lambda _: {"outcome": done["outcomes"][0]},
            "drain": lambda _: {"gpu": {"uuid": "GPU-3", "index": 3, "state": "drained"}},
            "resume": lambda _: {"gpu": {"uuid": "GPU-3", "index": 3, "state": "ok"}},
            "gpus_release": lambda _: {"gpus": []},
            "reload": lambda _: {"changed": []},
            "jobs": lambda _: {"jobs": [], "total": 0},
        }
    )
    command, *rest = words.split()
    line = [sys.executable, "-m", f"gpusched_client.commands.{command}", *rest]
    if "closed" in to:
        line = ["sh", "-c", 'exec "$@" >&-', "sh", *line]
    reader, writer = os.pipe()
    os.close(reader)  # before a word is written
    with open("/dev/full", "w") if "full" in to else os.fdopen(writer, "w") as out:
        result = subprocess.run(
            line,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (result.returncode, result.stderr) == (status, f"{said}\n")


@pytest.mark.parametrize("streams", ["<&- >&-", "<&- >&- 2>&-", ">&- 2>&-", "2>&-"])
def test_no_connection_takes_the_place_of_a_closed_stream(serve: Serve, streams: str) -> None:
    """What is written to a stream that is closed must not go to the daemon, or into a file."""
    server = serve({"submit": lambda _: {"job_ids": [92]}})
    line = [sys.executable, "-m", "gpusched_client.commands.gsub", "true"]
    command = ["sh", "-c", f'exec "$@" {streams}', "sh", *line]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == (74 if ">&- " in f"{streams} ".replace("2>&-", "") else 0)
    assert [method for method, _ in server.requests] == ["submit"]
    assert "job 92 is submitted, but" in result.stderr or "2>&-" in streams


def test_a_script_from_a_closed_stdin_is_refused() -> None:
    line = [sys.executable, "-m", "gpusched_client.commands.gsub", "-"]
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *line]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr.splitlines()[-1]) == (
        2,
        "Error: no script: stdin is closed; pipe it in, or name its file.",
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (gcancel.cli, ("1", "--reason", "\udcff\udcfebad")),
        (gctl.cli, ("drain", "0", "--reason", "\udcff\udcfebad")),
        (gctl.cli, ("gpus", "release", "--reason", "\udcff\udcfebad")),
    ],
)
def test_text_that_is_not_utf8_is_refused_by_its_name_and_as_it_was_typed(
    serve: Serve, run: Any, command: Any, words: tuple[str, ...]
) -> None:
    server = serve({})
    outcome = run(command, *words)
    assert (outcome.status, outcome.err) == (
        2,
        f"{command.name}: reason: '\\xff\\xfebad' is not valid UTF-8; send valid UTF-8\n",
    )
    assert server.requests == []
