"""What can be known at submit is told at submit, with the cure."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpusched_client import Client, job_request
from gpusched_client.errors import Invalid
from tests.client.fake_server import FakeServer, Handler

NOBODY = 65_534  # any uid that is not root's
TO_LINES_OF_UNIX = r"run dos2unix on it, or sed -i 's/\r$//'"
Serve = Callable[[dict[str, Handler]], FakeServer]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with some files, where the job is to run."""
    monkeypatch.chdir(tmp_path)
    for name, content in (
        ("train.py", "print()\n"),
        ("train.sh", "#!/bin/bash\n"),
        ("README.md", "hello\n"),
        ("lost.sh", "#!/nowhere/bash\n"),
        ("lost.py", "#!/usr/bin/env python99\n"),
        ("windows.py", "#!/usr/bin/env python3\r\nprint()\r\n"),
        ("windows.sh", "cd /tmp\r\n"),
        ("marked.py", "\ufeff#!/usr/bin/env python3\n"),
        ("bare.py", "print()\n"),
    ):
        Path(name).write_text(content)
        os.chmod(name, 0o755 if name.startswith(("lost", "windows", "marked", "bare")) else 0o644)
    Path("programs").mkdir()
    Path("foreign").write_bytes(b"\x00\x01\x02")
    os.chmod("foreign", 0o755)
    return tmp_path


def refusal(argv: list[str] | None = None, **keywords: Any) -> str:
    with pytest.raises(Invalid) as caught:
        job_request(argv, check=True, **keywords)
    return caught.value.message


@pytest.mark.parametrize(
    ("argv", "cure"),
    [
        (["list"], "did you mean gq?"),
        (["scancel", "7"], "did you mean gcancel?"),
        (["srun", "hostname"], "leave the word out"),
        (["echo a && echo b"], "a shell line goes with -c: gsub -c 'echo a && echo b'"),
        (["python3 t.py"], "a shell line goes with -c"),
        (["cd", "/data"], "a shell line goes with -c"),
        (["source", "venv/bin/activate"], "a shell line goes with -c"),
        (["A=1", "python3", "t.py"], "A=1 goes before gsub or through env: gsub env A=1 python3"),
        (["timeout", "-k", "5", "2h", "train.py"], "write ./train.py or python3 train.py"),
        (["train.py"], "write ./train.py or python3 train.py"),
        (["./train.py"], "not executable; write python3"),
        (["trian.sh"], "did you mean ./train.sh?"),
        (["./trian.sh"], "did you mean ./train.sh?"),
        (["pyhton3"], "did you mean python3?"),
        (["./programs"], "is a directory"),
        (["programs"], "is a directory"),
        (["README.md"], "is not executable"),
        (["./README.md"], "is not executable"),
        (["nowhere/tool"], "is no directory"),
        (["~/tool"], "~ is not expanded here"),
        (["./lost.sh"], "its interpreter /nowhere/bash does not exist"),
        (["./lost.py"], "python99 is not in PATH"),
        (["./windows.py"], "line 1 of "),
        (["./marked.py"], "begins with a byte order mark"),
        (["./bare.py"], "has no #! line, so that a shell would run it; write python3"),
        (["python3", "trian.py"], "python3 will not find trian.py; did you mean ./train.py?"),
        (["python3", "-u", "gone.py"], "python3 will not find gone.py"),
        (["bash", "trian.sh"], "bash will not find trian.sh"),
        (["bash", "windows.sh"], "line 1 of windows.sh ends in CR"),
        (["env", "A=1", "python99", "t.py"], "python99 is not in PATH"),
        (["nice", "-n", "5", "python3", "gone.py"], "python3 will not find gone.py"),
        (["nohup", "python99"], "python99 is not in PATH"),
        (["module", "load", "cuda"], "a function of your shell"),
        (["-g", "2", "true"], "gsub's own options stand before --"),
        (["stdbuf", "-oL", "-e", "0", "python99"], "python99 is not in PATH"),
        (["taskset", "-c", "0-3", "python3", "trian.py"], "did you mean ./train.py?"),
        (["setsid", "--wait", "ionice", "-c", "3", "python99"], "python99 is not in PATH"),
        (["flock", "-w", "5", "lock", "python99"], "python99 is not in PATH"),
        (["env", "-u", "A", "B=1", "python3", "trian.py"], "did you mean ./train.py?"),
        (["python3", "-X", "dev", "-W", "ignore", "trian.py"], "did you mean ./train.py?"),
        (["perl", "-w", "gone.pl"], "perl will not find gone.pl"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_command_that_would_not_start_is_refused_with_its_cure(
    argv: list[str], cure: str
) -> None:
    assert cure in refusal(argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["true"],
        ["/bin/sh", "-c", "type nothing || ls"],
        ["bash", "-lc", "nothing at all"],
        ["perl", "-ne", "print"],
        ["taskset", "-p", "1"],
        ["stdbuf", "--unknown", "python99"],
        ["python3", "-m", "nothing"],
        ["python3", "-c", "pass"],
        ["python3", "train.py"],
        ["python3", "-"],
        ["bash", "train.sh"],
        ["bash", "ls"],
        ["env", "-i", "python99"],
        ["env", "PATH=/opt/bin", "python99"],
        ["env"],
        ["nice", "-5", "true"],
        ["nohup"],
        ["setsid", "--unknown", "python99"],
        ["./programs/../train.sh"],
    ],
)
@pytest.mark.usefixtures("here")
def test_a_command_that_is_there_is_marked_as_seen(argv: list[str]) -> None:
    Path("train.sh").chmod(0o755)
    assert job_request(argv, check=True).checked
    assert not job_request(argv).checked


@pytest.mark.usefixtures("here")
def test_a_fifo_that_may_be_executed_is_not_waited_for() -> None:
    os.mkfifo("pipe.sh", 0o755)
    os.chmod("pipe.sh", 0o755)
    program = "from gpusched_client import job_request; job_request(['./pipe.sh'], check=True)"
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=30
    )
    assert "pipe.sh is no file that can be executed" in done.stderr


def test_the_lookup_is_in_the_jobs_directory_and_along_the_jobs_path(here: Path) -> None:
    (here / "programs/tool").write_text("#!/bin/sh\n")
    (here / "programs/tool").chmod(0o755)
    assert job_request(["./tool"], cwd="programs", check=True).checked
    assert job_request(["tool"], environment={"PATH": str(here / "programs")}, check=True).checked
    assert "tool is not in PATH" in refusal(["tool"], environment={"PATH": "/bin"})
    # Without PATH, as execvp looks.
    assert job_request(["true"], environment={}, check=True).checked


def test_a_scripts_interpreter_is_looked_up_and_its_lines_end_as_a_shell_expects() -> None:
    assert "/nowhere/bash does not exist" in refusal(script="#!/nowhere/bash\n")
    assert "python99 is not in PATH" in refusal(script="#!/usr/bin/env python99\n")
    text = refusal(script=b"#!/bin/bash\nset -e\r\ncd /tmp\r\n", script_path="/x/job.sh")
    assert "line 2 of /x/job.sh ends in CR, as files from Windows do" in text
    assert f"; {TO_LINES_OF_UNIX}" in text
    assert job_request(script="#!/usr/bin/env python3\nprint()\r\n", check=True).checked


@pytest.mark.parametrize(
    "line",
    [
        "nothing at all",
        "if then",
        "ls && nothing at all",
        "nothing || ls",
        "nothing() { ls; }; nothing",
        "PATH=/opt/bin nothing",
        "cd nowhere && nothing",
        "$nothing at all",
        "'nothing' at all",
        "# nothing",
        "python3 train.py$A",
        "python3 'gone.py'",
        "python3 -m nothing > log",
        "[ -e nothing ] && nothing",
        "if nothing; then ls; fi",
    ],
)
@pytest.mark.usefixtures("here")
def test_a_shell_line_is_left_to_the_shell(line: str) -> None:
    assert job_request(shell=line, check=True).checked
    assert job_request(["bash", "-c", line], check=True).checked


@pytest.mark.parametrize(
    ("where", "cure"),
    [
        ({"output": "logs/%j.out"}, "is no directory; mkdir -p logs"),
        ({"error": "logs/%j.err"}, "mkdir -p logs"),
        ({"output": "$HOME/x"}, "a $ is not expanded here"),
        ({"output": "programs"}, "is a directory; name a file in it"),
        ({"output": "programs/"}, "is a directory; name a file in it"),
        ({"output": "%j/out"}, "no directories are made for a job"),
        ({"output": "train.py/x"}, "not a directory"),
        ({"output": "/dev/stdout"}, "the job has no terminal"),
        ({"cwd": "nowhere"}, "make it first"),
        ({"cwd": "train.py"}, "is not a directory"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_place_that_is_not_there_is_refused_with_its_cure(
    where: dict[str, str], cure: str
) -> None:
    assert cure in refusal(["true"], **where)


@pytest.mark.parametrize(
    "where",
    [
        {"output": "programs/%j-%x-%N.out"},
        {"output": "/dev/null", "error": "/dev/stdout"},
        {"output": "train.py"},
    ],
)
@pytest.mark.usefixtures("here")
def test_a_place_that_can_be_written_is_taken(where: dict[str, str]) -> None:
    assert job_request(["true"], check=True, **where).checked  # type: ignore[arg-type]


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that every user may enter, as pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="gpusched-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def refusals_of_a_user(*asked: dict[str, str]) -> list[str]:
    """The refusals that somebody who is not root gets: root becomes nobody, in a child."""
    cures = importlib.import_module("gpusched_client.submission.cures")  # nobody may not read it
    assert cures
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            texts = [refusal(["true"], **keywords) for keywords in asked]
            os.write(write, json.dumps(texts).encode())
        finally:
            os._exit(0)  # what failed is missing in the pipe
    os.close(write)
    with open(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    found: list[str] = json.loads(said)
    return found


def test_a_place_that_may_not_be_written_is_refused(open_place: Path) -> None:
    """Also by root's own run of this test, for whom nothing is closed."""
    for name, mode in (("closed", 0o555), ("barred", 0o000)):
        (open_place / name).mkdir()
        (open_place / name).chmod(mode)
    (open_place / "kept.log").touch(0o444)
    into, onto, within = refusals_of_a_user(
        {"cwd": str(open_place), "output": "closed/out"},
        {"cwd": str(open_place), "output": "kept.log"},
        {"cwd": str(open_place / "barred")},
    )
    assert "may not write into" in into
    assert "may not write to it" in onto
    assert "may not enter" in within


def test_a_line_that_was_read_from_a_file_of_windows_is_refused() -> None:
    """As a script is: the shell would go to a directory whose name ends in CR."""
    text = refusal(shell="cd /tmp\r\nls\r\n")
    assert text.startswith("line 1 of the shell line ends in CR")
    assert f"; {TO_LINES_OF_UNIX}" in text
    assert job_request(shell="printf 'a\r'", check=True).checked


def test_a_directory_with_a_dollar_is_not_advised_to_be_made() -> None:
    assert "a $ is not expanded here; write it out, or as ~/" in refusal(["true"], cwd="$HOME/x")


def test_the_home_directory_is_written_as_a_tilde(here: Path) -> None:
    home = {"HOME": str(here), "PATH": "/bin:/usr/bin"}
    request = job_request(["true"], output="~/%j.out", cwd="~", environment=home, check=True)
    assert (request.output, request.cwd) == (bytes(here) + b"/%j.out", bytes(here))


def test_a_pattern_with_an_unknown_letter_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(Invalid, match=r"%q has no meaning in output 'a%q'; use %j"):
        job_request(["true"], output="a%q")
    assert job_request(["true"], output="%N-%4j-%%q").output == b"%N-%4j-%%q"


@pytest.mark.usefixtures("here")
def test_submit_in_python_looks_only_where_it_is_told_to(serve: Serve) -> None:
    server = serve({"submit": lambda _: {"job_ids": [1]}})
    with Client() as client:
        with pytest.raises(Invalid, match=r"write \./train\.py or python3 train\.py"):
            client.submit(["train.py"], check=True)
        assert server.requests == []
        assert client.submit(["train.py"]).id == 1
        assert client.submit(["true"], check=True).id == 1
    jobs = [params["jobs"][0] for _, params in server.requests]
    assert [job.get("checked", False) for job in jobs] == [False, True]
