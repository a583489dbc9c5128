"""The commands as installed: without click where the words are plain, and then just as with it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpusched_client.commands import front, gcancel, gq, gsub
from gpusched_client.commands.answering import answer
from tests.client.fake_server import FakeServer, Handler, Refusal

Serve = Callable[[dict[str, Handler]], FakeServer]
Recognise = Callable[[Sequence[str]], Callable[[], int] | None]
COMMANDS: dict[str, tuple[Recognise, Any]] = {
    "gq": (front.plain_gq, gq.cli),
    "gsub": (front.plain_gsub, gsub.cli),
    "gcancel": (front.plain_gcancel, gcancel.cli),
}
JOB = {"job_id": 42, "state": "RUNNING", "user": "bob", "uid": 54_321, "name": "train"}


def _refused(_params: dict[str, Any]) -> Any:
    raise Refusal("not_found", "no such job: 43")


def daemon() -> dict[str, Handler]:
    """What answers all that is typed below."""
    return {
        "submit": lambda _: {
            "job_ids": [42],
            "time_limits_s": [1800],
            "warnings": ["becomes a whole-GPU job"],
            "hints": ["a limit would help"],
        },
        "jobs": lambda _: {"jobs": [JOB], "total": 1},
        "job": lambda params: JOB if params["job_id"] == 42 else _refused(params),
        "cancel": lambda params: {"outcomes": [{"job_id": i} for i in params["job_ids"]]},
    }


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with scripts, in which the commands are typed."""
    for name, line in (("job.sh", "true"), ("options.sh", "#GSUB -g 2"), ("almost.sh", "#gsub -g")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
    (tmp_path / "job.py").write_text("#!/usr/bin/env python3\n")
    (tmp_path / "not-a-script").write_bytes(b"#!/bin/sh\r\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


PLAIN = [
    "gsub true",
    "gsub --parsable true",
    "gsub --parsable -g 2 -m 18G -t 30 -J 'my job' --mem 4G --cpus 3 --nice 7 true -x --parsable",
    "gsub -g2 --vram=18G --time=2h --exclusive --retries 1 --estimate 1h -- /bin/true -g 3",
    "gsub --topology nvlink -g 2 --hold -o log-%j -e /dev/null -D / true",
    "gsub -g 1 -g 0 true",
    "gsub --json true",
    "gsub --dry-run true",
    "gsub --no-check --parsable missing-command",
    "gsub --parsable job.sh a b",
    "gsub --parsable job.py",
    "gsub missing-command",
    "gsub -D /missing true",
    "gsub -o log-%q true",
    "gsub -g 0 -m 18G true",
    "gq",
    "gq --me",
    "gq --status 42",
    "gq --status 43",
    "gcancel 42",
    "gcancel 42 7 42",
]
IN_DOUBT = [
    "gsub",
    "gsub --help",
    "gsub -",
    "gsub --",
    "gsub '' x",
    "gsub -c true",
    "gsub --script job.sh",
    "gsub --parsable --json true",
    "gsub -g true",
    "gsub -g -1 true",
    "gsub -g ٣ true",
    "gsub --gpus= true",
    "gsub -g=2 true",
    "gsub --nice -5 true",
    "gsub -t soon true",
    "gsub --topology ring true",
    "gsub --hold=yes true",
    "gsub --mig 1g.10gb true",
    "gsub --gpus a100:2 true",
    "gsub --ntasks 2 true",
    "gsub -J",
    "gsub options.sh",
    "gsub almost.sh",
    "gsub job.sh -g 2",
    "gsub not-a-script",
    "gq 42",
    "gq --gpus",
    "gq --status",
    "gq --status @",
    "gq --status 0",
    "gq --status ٤٢",
    "gq --me --json",
    "gcancel",
    "gcancel 1-3",
    "gcancel -u me",
]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("typed", PLAIN)
def test_plain_words_ask_and_say_what_they_do_with_click(
    serve: Serve, run: Any, capfd: pytest.CaptureFixture[str], typed: str
) -> None:
    name, *words = shlex.split(typed)
    recognise, cli = COMMANDS[name]
    server = serve(daemon())
    expected = run(cli, *words)
    asked = [_without_id(request) for request in server.requests]
    server.requests.clear()
    work = recognise(words)
    assert work is not None
    status = answer(name, work)
    assert (status, *capfd.readouterr()) == (expected.status, expected.out, expected.err)
    assert [_without_id(request) for request in server.requests] == asked


def _without_id(request: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    method, params = request
    return method, {name: value for name, value in params.items() if name != "submission_id"}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("typed", IN_DOUBT)
def test_words_in_doubt_are_clicks_before_anything_is_asked_or_said(
    serve: Serve, capfd: pytest.CaptureFixture[str], typed: str
) -> None:
    name, *words = shlex.split(typed)
    server = serve(daemon())
    assert COMMANDS[name][0](words) is None
    assert not server.requests
    assert tuple(capfd.readouterr()) == ("", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_shell_completes_is_clicks(name: str) -> None:
    done = _installed(name, environment={f"_{name.upper()}_COMPLETE": "bash_source"})
    assert f"_{name}_completion" in done.stdout


# What a command's start has no time for, each by what it takes of it: click with what it imports
# 18 ms, a class made by dataclasses 1, the others 2 to 8.
SLOW = frozenset({"click", "inspect", "pathlib", "dataclasses", "socket", "json", "subprocess"})
SLOW |= {"asyncio", "logging", "locale", "platformdirs", "difflib", "importlib.metadata"}
#: What may be loaded of ours, besides what all need.
ROOMS = {
    "gq": {"output", "commands.listing"},
    "gsub": {"submission", "commands.submitting"},
    "gcancel": {"output", "commands.cancelling", "commands.report"},
}
COMMON = {"commands", "commands.front", "commands.answering", "client", "administration", "wire"}
COMMON |= {"terms", "errors", "units", "paths"}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("typed", ["gq", "gq --status 42", "gsub --parsable true", "gcancel 42"])
def test_plain_commands_load_nothing_that_they_do_not_need(serve: Serve, typed: str) -> None:
    serve(daemon())
    name, *words = shlex.split(typed)
    loaded = _loaded(name, *words)
    assert not loaded & SLOW
    own = {module.removeprefix("gpusched_client.") for module in loaded if "gpusched_" in module}
    own -= {"gpusched_client"}
    allowed = COMMON | ROOMS[name]
    assert not {module for module in own if not {module, module.partition(".")[0]} & allowed}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("typed", ["gq -n 5", "gsub -c true", "gcancel 42-43"])
def test_with_click_nothing_else_is_loaded_that_takes_long(serve: Serve, typed: str) -> None:
    serve(daemon())
    by_click = {"click", "inspect", "locale"}
    assert _loaded(*shlex.split(typed)) & (SLOW - {"difflib"}) <= by_click


def _loaded(name: str, *words: str) -> set[str]:
    """The modules that an installed command loads."""
    done = _installed(name, *words, python=("-X", "importtime"))
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE))


def _installed(
    name: str, *words: str, python: Sequence[str] = (), environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).with_name(name)
    return subprocess.run(
        [sys.executable, *python, str(script), *words],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
