"""gsub: what is typed is what is sent, and what it says."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpusched_client import Client
from gpusched_client.commands.gsub import cli
from tests.client.fake_server import FakeServer, Handler, Refusal
from tests.support.daemon import until

Serve = Callable[[dict[str, Handler]], FakeServer]
GIB = 2**30


def accepting(limit_s: int = 86_400, **more: Any) -> dict[str, Handler]:
    return {"submit": lambda _: {"job_ids": [42], "time_limits_s": [limit_s], **more}}


def sent(server: FakeServer) -> dict[str, Any]:
    """The one job that was submitted."""
    ((method, params),) = server.requests
    assert method == "submit"
    jobs: list[dict[str, Any]] = params["jobs"]
    (job,) = jobs
    return job


def refusing(code: str, message: str) -> dict[str, Handler]:
    def handle(_params: dict[str, Any]) -> Any:
        raise Refusal(code, message)

    return {"submit": handle}


@pytest.mark.parametrize(
    ("words", "limit_s", "said"),
    [
        ("-g 2 -m 18G -t 30 true", 1800, "2 GPUs, 18 GiB each, limit 30 min"),
        ("-t 30 --retries 1 true", 1800, "1 GPU, limit 30 min, up to 1 retry"),
        ("true", 86_400, "1 GPU, limit 24 h (default), stopped after that"),
        ("true", -1, "1 GPU, no limit"),
        ("-g0 -t unlimited true", -1, "no GPU, no limit"),
        ("-m 512M -t 90s true", 90, "1 GPU, 512 MiB, limit 90 s"),
        (
            "-g4 --gpu-model A100 --topology nvlink --hold --retries 2 -t 1-12 true",
            129_600,
            "4 GPUs, model A100, connected by nvlink, limit 1 d 12 h, up to 2 retries, held",
        ),
        ("-m 1.5T --exclusive -t 2h true", 7200, "1 GPU, 1.5 TiB, exclusive, limit 2 h"),
    ],
)
def test_it_says_what_it_understood(
    serve: Serve, run: Any, words: str, limit_s: int, said: str
) -> None:
    serve(accepting(limit_s))
    assert run(cli, *words.split()).out == f"Submitted job 42: {said}\n"


def test_every_option_reaches_the_request(serve: Serve, run: Any, tmp_path: Path) -> None:
    server = serve(accepting())
    words = "-g 2 -m 18G --gpu-model A100 --exclusive --topology nvlink -t 2h -J train"
    words += f" -o %j.out -e %j.err -D {tmp_path} --nice 5 --hold --retries 3 python -c t.py -g 9"
    run(cli, *words.split())
    job = sent(server)
    taken = {name: job[name] for name in job.keys() - {"environment", "rlimits", "umask"}}
    assert taken == {
        "argv": [b"python", b"-c", b"t.py", b"-g", b"9"],
        "checked": True,
        "gpus": 2,
        "vram_bytes": 18 * GIB,
        "gpu_model": "A100",
        "exclusive": True,
        "topology": "nvlink",
        "time_limit_s": 7200,
        "name": "train",
        "output": b"%j.out",
        "error": b"%j.err",
        "cwd": os.fsencode(tmp_path),
        "nice": 5,
        "hold": True,
        "retries": 3,
    }


def test_the_submitters_umask_limits_and_environment_go_along(
    serve: Serve, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(accepting())
    monkeypatch.setenv("GSUB_TEST", "x\udcff\n=")
    before = os.umask(0o027)
    run(cli, "true")
    os.umask(before)
    job = sent(server)
    assert job["umask"] == 0o027
    assert job["environment"][b"GSUB_TEST"] == b"x\xff\n="
    assert len(job["rlimits"]["nofile"]) == 2


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (["--", "-x", "--json"], [b"-x", b"--json"]),
        (["./a b", ""], [b"./a b", b""]),
        (["a\udcff", "b\n"], [b"a\xff", b"b\n"]),
        (["cmd", "--", "--wait"], [b"cmd", b"--", b"--wait"]),
    ],
)
def test_options_end_at_the_first_word_and_words_are_kept_byte_for_byte(
    serve: Serve, run: Any, words: list[str], argv: list[bytes]
) -> None:
    server = serve(accepting())
    assert run(cli, "--no-check", *words).status == 0
    assert sent(server)["argv"] == argv


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["./bin/träin model.py"], "tr_in_model.py"),
        (["-c", "make all && ./x"], "make"),
        (["-J", "mine", "true"], "mine"),
        (["/"], "job"),
        (["x" * 100], "x" * 64),
    ],
)
def test_the_name_is_legal_and_derived_from_the_command(
    serve: Serve, run: Any, words: list[str], name: str
) -> None:
    server = serve(accepting())
    run(cli, "--no-check", *words)
    assert sent(server)["name"] == name


@pytest.mark.parametrize("options", [(), ("-D", "below")])
def test_a_directory_that_was_removed_is_no_place_to_submit_from(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    outcome = run(cli, *options, "true")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith("gsub: the current directory no longer exists")


# --------------------------------------------------------------------------------- scripts


def test_a_shell_script_is_captured_with_its_arguments(
    serve: Serve, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(accepting())
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_bytes(b"#!/bin/bash\necho \xff\n")
    run(cli, "-g", "2", "train.sh", "a", "--b")
    job = sent(server)
    assert job["script"] == b"#!/bin/bash\necho \xff\n"
    assert (job["args"], job["name"], job["gpus"]) == ([b"a", b"--b"], "train.sh", 2)
    assert job["script_path"] == bytes(tmp_path / "train.sh")
    assert "argv" not in job


@pytest.mark.parametrize(
    ("content", "is_captured"),
    [
        (b"#!/bin/sh\n", True),
        (b"#! /usr/bin/env bash\n", True),
        (b"#!/usr/bin/env -S zsh -f\n", True),
        (b"#!/usr/bin/env python3\n#SBATCH -t 5\nprint()\n", False),
        (b"#!/usr/bin/env python3\nprint()\n#GSUB -g 2\n", False),
        (b"#!/usr/bin/python3\n", False),
        (b"#!/opt/bash/bin/python3\n", False),
        (b"\x7fELF\x02", False),
        (b"", False),
    ],
)
def test_only_shell_scripts_are_captured(
    serve: Serve, run: Any, tmp_path: Path, content: bytes, is_captured: bool
) -> None:
    server = serve(accepting())
    path = tmp_path / "file"
    path.write_bytes(content)
    assert run(cli, "--no-check", str(path)).status == 0
    assert ("script" in sent(server)) == is_captured
    assert ("argv" in sent(server)) != is_captured


@pytest.mark.parametrize("dash", [["-"], ["--script", "-"]])
def test_a_script_comes_from_stdin_for_a_dash(
    serve: Serve, run: Any, monkeypatch: pytest.MonkeyPatch, dash: list[str]
) -> None:
    server = serve(accepting())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"#!/bin/sh\n#GSUB -g 3\n")))
    run(cli, *dash, "a")
    job = sent(server)
    assert (job["script"], job["args"]) == (b"#!/bin/sh\n#GSUB -g 3\n", [b"a"])
    assert (job["gpus"], job["name"]) == (3, "script")


def test_options_in_the_script_yield_to_those_on_the_command_line(
    serve: Serve, run: Any, tmp_path: Path
) -> None:
    server = serve(accepting())
    path = tmp_path / "job.sh"
    path.write_text(
        "#!/bin/sh\n#GSUB -g 2 -m 18G\n#GSUB -J 'from.script' # ours\n\n"
        "#GSUB -t 1h\n:\n#GSUB -g 9\n"
    )
    run(cli, "-m", "20G", "--script", str(path), "x")
    job = sent(server)
    assert (job["gpus"], job["vram_bytes"], job["name"]) == (2, 20 * GIB, "from.script")
    assert (job["time_limit_s"], job["args"]) == (3600, [b"x"])


def test_slurms_option_lines_are_understood_and_strange_ones_warned_about(
    serve: Serve, run: Any, tmp_path: Path
) -> None:
    server = serve(accepting())
    path = tmp_path / "job.sh"
    path.write_text(
        "#!/bin/bash\n#SBATCH --job-name=train\n#SBATCH --gres=gpu:a100:2 -t 1-00:00:00\n"
        "#SBATCH -p short --mem 4G\n#SBATCH -o out-%j.txt\n#SBATCH --hold\n"
        "#SBATCH --nodes=1 --ntasks 1 -N1-2\n#SBATCH --qos=normal\n#SBATCH --ntasks=4\n"
    )
    outcome = run(cli, str(path))
    job = sent(server)
    assert (job["name"], job["gpus"], job["gpu_model"]) == ("train", 2, "a100")
    assert (job["time_limit_s"], job["output"], job["hold"]) == (86_400, b"out-%j.txt", True)
    assert job["cpus"] == 4
    assert outcome.err == (
        f"gsub: {path}: ignored, because they have no meaning here: -p (line 4), --qos (line 8)\n"
    )


@pytest.mark.parametrize(
    ("words", "gpus", "cpus"),
    [
        ("-G 2 -n1 -p short true", 2, None),
        ("--gpus=a100:2 --cpus-per-task=3 true", 2, 3),
        ("--gpus a100:2 --cpus-per-task=3 true", 2, 3),
        ("--cpus-per-gpu=4 -g 3 true", 3, 12),
        ("--gres=gpu:2 -g 3 true", 3, None),
        ("--ntasks=4 --gpus-per-task=1 true", 4, 4),
    ],
)
def test_slurms_words_are_understood_on_the_command_line(
    serve: Serve, run: Any, words: str, gpus: int, cpus: int | None
) -> None:
    server = serve(accepting())
    assert run(cli, *words.split()).status == 0
    assert (sent(server)["gpus"], sent(server).get("cpus")) == (gpus, cpus)


def test_the_command_lines_options_win_over_the_scripts_whoever_words_them(
    serve: Serve, run: Any, tmp_path: Path
) -> None:
    server = serve(accepting())
    path = tmp_path / "job.sh"
    path.write_text(
        "#!/bin/bash\n#SBATCH --gpus-per-task=2 -t 5\n#SBATCH -n 2\n#GSUB -t 7 --cpus 1\n"
    )
    run(cli, "-n", "3", "--time-min=1", str(path))
    job = sent(server)
    assert (job["gpus"], job["cpus"], job["time_limit_s"]) == (6, 3, 420)


def test_slurms_wait_waits(serve: Serve, run: Any) -> None:
    serve(ended(state="FAILED", exit_code=3))
    assert run(cli, "-W", "true").status == 3


@pytest.mark.parametrize(
    ("text", "words", "is_said"),
    [
        ("#SBATCH -t 5\n", [], True),
        ("#SBATCH --gres=gpu:1\n", [], False),
        ("#SBATCH -t 5\n#GSUB -g 1\n", [], False),
        ("#SBATCH -t 5\n", ["-g", "1"], False),
        ("#SBATCH -t 5\n", ["-G", "1"], False),
        ("#GSUB -t 5\n", [], False),
    ],
)
def test_a_script_of_slurms_without_gpus_is_told_that_it_gets_one(
    serve: Serve, run: Any, tmp_path: Path, text: str, words: list[str], is_said: bool
) -> None:
    server = serve(accepting())
    path = tmp_path / "job.sh"
    path.write_text(f"#!/bin/bash\n{text}")
    outcome = run(cli, *words, str(path))
    assert ("it gets 1 GPU (Slurm would give none: -g 0)" in outcome.err) == is_said
    assert sent(server).get("gpus", 1) == 1


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["-g", "4", "--dry-run"], "-g"),
        (["data", "--vram=8G"], "--vram=8G"),
        (["-t30"], "-t30"),
        (["--gres=gpu:4"], "--gres=gpu:4"),
        (["--array", "1-3"], "--array"),
        (["--comment", "x"], None),
        (["--epochs", "4"], None),
        (["-x"], None),
        (["--", "-g", "4"], None),
    ],
)
def test_an_option_behind_a_captured_script_is_warned_about(
    serve: Serve, run: Any, tmp_path: Path, words: list[str], warned: str | None
) -> None:
    server = serve(accepting())
    path = tmp_path / "ns.sh"
    path.write_text("#!/bin/bash\n")
    outcome = run(cli, str(path), *words)
    said = "" if warned is None else f"gsub: {warned} stands behind the script and goes to it"
    assert outcome.err.startswith(said)
    assert bool(outcome.err) == (warned is not None)
    assert sent(server)["args"] == [word.encode() for word in words]


def test_options_in_a_file_that_an_interpreter_reads_are_warned_about(
    serve: Serve, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(accepting())
    monkeypatch.chdir(tmp_path)
    Path("job.sh").write_text("#!/bin/bash\n#SBATCH --gpus=4\n")
    Path("late.py").write_text("#!/usr/bin/env python3\nimport os\n#SBATCH --gpus=4\n")
    Path("late.py").chmod(0o755)
    warning = "gsub: job.sh: the options in line 2 are not read; write gsub job.sh\n"
    assert run(cli, "bash", "-x", "job.sh").err == warning
    assert "late.py: line 3 is not read" in run(cli, "./late.py").err


def test_a_script_of_another_language_keeps_its_place_and_its_options(
    serve: Serve, run: Any, tmp_path: Path
) -> None:
    server = serve(accepting())
    path = tmp_path / "train.py"
    path.write_text("#!/usr/bin/env python3\n#SBATCH --gpus=2\nimport helper\n")
    run(cli, str(path), "a")
    job = sent(server)
    assert job["argv"] == [b"/usr/bin/env", b"python3", bytes(path), b"a"]
    assert (job["gpus"], job["name"], "script" in job) == (2, "train.py", False)


def test_a_captured_script_of_pythons_finds_what_lies_beside_it(
    serve: Serve, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(accepting())
    monkeypatch.setenv("PYTHONPATH", "/other")
    path = tmp_path / "train.py"
    path.write_text("#!/usr/bin/env python3\nimport helper\n")
    run(cli, "--script", str(path))
    job = sent(server)
    assert job["environment"][b"PYTHONPATH"] == bytes(tmp_path) + b":/other"
    assert job["script_path"] == bytes(path)


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ("-o out.log", True),
        ("-o new.log -e ./out.log", True),
        ("-o %x.log -J out", True),
        ("-o out-%j.log", False),
        ("-o %%j.log", False),
        ("-o other.log", False),
        ("-o /dev/null", False),
        ("", False),
    ],
)
def test_a_log_that_a_live_job_of_mine_writes_is_warned_about(
    serve: Serve,
    run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    warned: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    job = {"job_id": 7, "state": "RUNNING", "cwd": bytes(tmp_path), "name": "x", "user": "ann"}
    server = serve(
        {
            **accepting(),
            "jobs": lambda _: {"jobs": [job, {**job, "job_id": 8}], "total": 2},
            "job": lambda asked: {
                **job,
                **asked,
                "output": b"out.log" if asked["job_id"] == 7 else b"/dev/null",
            },
        }
    )
    outcome = run(cli, *words.split(), "true")
    warning = ".log is the log of job 7 as well (running): the later start empties it"
    assert (warning in outcome.err) == warned
    methods = [method for method, _ in server.requests]
    assert (methods[-1], "jobs" in methods) == (
        "submit",
        words not in ("", "-o out-%j.log", "-o /dev/null"),
    )


@pytest.mark.parametrize("asked", ["jobs", "job"])
def test_a_warning_that_cannot_be_had_prevents_no_submission(
    serve: Serve, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    def refuse(_params: dict[str, Any]) -> Any:
        raise Refusal("not_found", "no job 7")

    monkeypatch.chdir(tmp_path)
    listed = {"jobs": [{"job_id": 7, "state": "RUNNING"}], "total": 1}
    server = serve({**accepting(), "jobs": lambda _: listed, asked: refuse})
    outcome = run(cli, "-o", "out.log", "true")
    assert (outcome.status, outcome.err) == (0, "")
    assert [method for method, _ in server.requests][-2:] == [asked, "submit"]
    with Client() as client:
        assert client.submit(["true"], output="out.log", check=True).id == 42


def test_the_check_of_what_is_there_can_be_left_away(serve: Serve, run: Any) -> None:
    server = serve(accepting())
    refused = run(cli, "nowhere/tool")
    assert (refused.status, server.requests) == (2, [])
    assert run(cli, "--no-check", "nowhere/tool").status == 0
    assert "checked" not in sent(server)


@pytest.mark.parametrize("time", ["-t 0", "--time=0", "--time 0:00", "-t0-00:00:00"])
def test_no_time_means_no_limit_in_slurms_lines(
    serve: Serve, run: Any, tmp_path: Path, time: str
) -> None:
    server = serve(accepting())
    path = tmp_path / "job.sh"
    path.write_text(f"#!/bin/bash\n#SBATCH {time}\n")
    assert run(cli, str(path)).status == 0
    assert sent(server)["time_limit_s"] == -1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "#!/bin/sh\n#SBATCH --array=1-9\n",
            "line 2: --array=1-9 is not supported; submit in a loop",
        ),
        ("#!/bin/sh\n#GSUB python\n", "line 2: 'python' is not an option"),
        ("#!/bin/sh\n#GSUB -g 2 python\n", "line 2: a script's option lines cannot hold a command"),
        ("#!/bin/sh\n#SBATCH -N 2\n", "line 2: -N=2 is more than the one host there is"),
        ("#!/bin/sh\n\n#SBATCH --time=1:xx\n", "line 3: Invalid value for '-t' / '--time': '1:xx'"),
        ("#!/bin/sh\n#GSUB -J 'x\n", "line 2: No closing quotation"),
        ("#!/bin/sh\n#GSUB --colour\n", "job.sh: line 2: no option --colour is known"),
        ("#!/bin/sh\n#GSUB --wait\n", "line 2: a script's option lines cannot hold --wait"),
        ("echo\n", "does not begin with #!"),
    ],
)
def test_a_script_that_cannot_be_taken_is_a_usage_error_that_says_where(
    serve: Serve, run: Any, tmp_path: Path, text: str, message: str
) -> None:
    server = serve(accepting())
    path = tmp_path / "job.sh"
    path.write_text(text)
    outcome = run(cli, "--script", str(path))
    assert outcome.status == 2
    assert message in outcome.err
    assert server.requests == []


def test_a_script_that_is_too_long_is_refused_before_it_is_sent(
    serve: Serve, run: Any, tmp_path: Path
) -> None:
    serve(accepting())
    path = tmp_path / "job.sh"
    path.write_bytes(b"#!/bin/sh\n" + b"#" * 2**20)
    outcome = run(cli, str(path))
    assert outcome.status == 65
    assert "786432 bytes" in outcome.err


# --------------------------------------------------------------------------------- answers


def test_parsable_is_the_id_alone_and_json_one_value(serve: Serve, run: Any) -> None:
    serve(accepting(7200, warnings=["fits only without foreign use"]))
    outcome = run(cli, "--parsable", "true")
    assert (outcome.out, outcome.err) == ("42\n", "gsub: fits only without foreign use\n")
    assert json.loads(run(cli, "--json", "true").out) == {
        "job_id": 42,
        "time_limit_s": 7200,
        "name": "true",
    }


def test_what_a_limit_would_bring_is_told_to_people_alone(serve: Serve, run: Any) -> None:
    """Not to a script that asked for the id, or for JSON."""
    told = "train.py took 2.1 h and 1.9 h; --time 4h gets a promised start"
    serve(accepting(-1, hints=[told, "two\nlines took 1 s"]))
    assert run(cli, "true").err == f"gsub: {told}\ngsub: two\\nlines took 1 s\n"
    for quiet in ("--parsable", "--json"):
        assert run(cli, quiet, "true").err == ""


def test_a_dry_run_says_where_it_would_start_or_what_it_would_wait_for(
    serve: Serve, run: Any, golden: Any
) -> None:
    results: list[dict[str, Any]] = [
        {"job_ids": [], "time_limits_s": [7200], "would_start": ["GPU 1, 3"], "reasons": [""]},
        {"job_ids": [], "reasons": ["2 GPUs are free of 4 needed; expected start 14:20"]},
    ]
    server = serve({"submit": lambda _: results.pop(0)})
    first = run(cli, "--dry-run", "-g2", "-t", "2h", "true").text
    golden("gsub-dry-run", first + run(cli, "--dry-run", "-g4", "true").text)
    assert [params["dry_run"] for _, params in server.requests] == [True, True]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("invalid", 2),
        ("infeasible", 65),
        ("too_large", 65),
        ("conflict", 65),
        ("not_found", 67),
        ("internal", 70),
        ("storage", 74),
        ("limit", 75),
        ("denied", 77),
    ],
)
def test_a_refusal_is_one_line_on_stderr_and_its_status(
    serve: Serve, run: Any, code: str, status: int
) -> None:
    serve(refusing(code, "asks 96 GiB\x1b[31m; the largest has 80 GiB"))
    outcome = run(cli, "-m", "96G", "true")
    assert (outcome.status, outcome.out) == (status, "")
    assert outcome.err == "gsub: asks 96 GiB\\x1b[31m; the largest has 80 GiB\n"


def test_usage_errors_explain_themselves(run: Any, golden: Any) -> None:
    lines = [
        [],
        ["-m", "20X", "true"],
        ["-m", "0", "true"],
        ["-m", "30", "true"],
        ["-m", "30M", "true"],
        ["-g", "0", "-m", "8G", "true"],
        ["-c", "4", "./train"],
        ["--array=1-3", "true"],
        ["--grse=gpu:2", "true"],
        ["list"],
        [""],
        ["-t", "1:99", "true"],
        ["-t", "0", "true"],
        ["-g", "-1", "true"],
        ["-g", "9999", "true"],
        ["-g", "two", "true"],
        ["-c", "true", "true"],
        ["-c", ""],
        ["--json", "--parsable", "true"],
        ["-J", " blank", "true"],
        ["--script", "/nowhere/x.sh"],
    ]
    golden(
        "gsub-usage-errors", "".join(f"$ gsub {' '.join(x)}\n{run(cli, *x).text}" for x in lines)
    )


def test_the_help_is_as_documented(run: Any, golden: Any) -> None:
    golden("gsub-help", run(cli, "--help").text)


# ------------------------------------------------------------------------------------ wait


def ended(**job: Any) -> dict[str, Handler]:
    return {**accepting(), "wait": lambda _: {"jobs": [{"job_id": 42, **job}]}}


@pytest.mark.parametrize(
    ("job", "status"),
    [
        ({"state": "COMPLETED", "exit_code": 0}, 0),
        ({"state": "FAILED", "exit_code": 3}, 3),
        ({"state": "FAILED", "exit_code": 127, "cause": "setup"}, 127),
        ({"state": "FAILED", "exit_code": 0, "exit_signal": 9}, 137),
        ({"state": "FAILED"}, 70),
        ({"state": "OUT_OF_MEMORY", "exit_code": 1}, 1),
        ({"state": "TIMEOUT", "exit_code": 0}, 124),
        ({"state": "CANCELLED", "exit_code": 0, "exit_signal": 15}, 143),
        ({"state": "NODE_FAIL"}, 70),
        ({"state": "DEPENDENCY_FAILED"}, 70),
    ],
)
def test_wait_ends_with_the_jobs_status(
    serve: Serve, run: Any, job: dict[str, Any], status: int
) -> None:
    serve(ended(**job))
    outcome = run(cli, "--wait", "--parsable", "true")
    assert (outcome.status, outcome.out) == (status, "42\n")
    assert ("job 42 is" in outcome.err) == (status != 0)


def test_wait_tells_what_else_was_seen_of_a_job_that_went_well(serve: Serve, run: Any) -> None:
    detail = "2 processes still ran when the main process ended, and were ended; use wait"
    serve(ended(state="COMPLETED", exit_code=0, cause="exit", cause_detail=detail))
    outcome = run(cli, "--wait", "true")
    assert (outcome.status, outcome.err) == (0, f"gsub: job 42: {detail}\n")


def test_wait_with_json_is_the_ended_job(serve: Serve, run: Any) -> None:
    serve(ended(state="FAILED", exit_code=3, ended_at_s=1_767_225_600))
    value = json.loads(run(cli, "--wait", "--json", "true").out)
    assert (value["exit_code"], value["ended_at"]) == (3, "2026-01-01T00:00:00Z")


def process(*words: str, **options: Any) -> subprocess.Popen[str]:
    """gsub as a process of its own, with SIGINT as a terminal's foreground has it.

    A shell that starts the tests in the background has them ignore it, and all that they start.
    """
    command = [sys.executable, "-m", "gpusched_client.commands.gsub", *words]
    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )
    finally:
        signal.signal(signal.SIGINT, heeded)


def test_an_interrupted_wait_leaves_the_job_and_says_its_id(serve: Serve) -> None:
    interrupted = threading.Event()
    server = serve({**accepting(), "wait": lambda _: interrupted.wait(90)})
    gsub = process("--wait", "true")
    assert gsub.stdout is not None
    assert gsub.stdout.readline().startswith("Submitted job 42")
    until(lambda: len(server.requests) >= 2, "it waits")
    gsub.send_signal(signal.SIGINT)
    _, err = gsub.communicate(timeout=60)
    interrupted.set()
    assert gsub.returncode == 130
    assert err == "gsub: job 42 goes on; `gq 42` shows it, `gcancel 42` ends it\n"
    assert [method for method, _ in server.requests] == ["submit", "wait"]


@pytest.mark.parametrize("word", ["1g.10gb", "MIG 1g.10gb", "1G.10GB"])
def test_a_profile_of_slices_is_sent_so_that_no_whole_gpu_has_it(
    serve: Serve, run: Any, word: str
) -> None:
    server = serve({"submit": lambda _: {"job_ids": [1]}})
    outcome = run(cli, "--mig", word, "true")
    assert outcome.status == 0
    assert "model MIG 1g.10gb" in outcome.out
    assert server.requests[-1][1]["jobs"][0]["gpu_model"] == "MIG 1g.10gb"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--mig", "A100"), "'A100' is not a MIG profile; write it as 1g.10gb"),
        (("--mig", "1g"), "'1g' is not a MIG profile"),
        (("--mig", "1g.10gb", "--gpu-model", "A100"), "--gpu-model and --mig say the same"),
        (("-g", "0", "--mig", "1g.10gb"), "--mig needs a GPU; -g is 0"),
    ],
)
def test_a_profile_that_is_none_is_refused_with_the_cure(
    run: Any, words: tuple[str, ...], text: str
) -> None:
    outcome = run(cli, *words, "true")
    assert (outcome.status, text in outcome.err) == (2, True), outcome.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("-g", "0", "--gpu-model", "A100"), "--gpu-model needs a GPU; -g is 0"),
        (("-g", "0", "--exclusive"), "--exclusive needs a GPU; -g is 0"),
        (("-g", "0", "--retries", "2"), "--retries needs a GPU; -g is 0"),
        (("-D", ""), "the name of the directory is empty"),
    ],
)
def test_an_option_that_would_say_nothing_is_refused_with_the_cure(
    run: Any, words: tuple[str, ...], text: str
) -> None:
    outcome = run(cli, *words, "true")
    assert (outcome.status, text in outcome.err) == (2, True), outcome.err
