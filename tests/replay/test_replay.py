"""`gpuschedd replay`: agreement with an independent scheduler, the formats, and the figures."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpuschedd.replay.command import replay

DATA = Path(__file__).parent.parent / "data"
MADE = """job_id,user,submit_s,gpus,run_s,limit_s,vram_bytes
a,ada,0,2,100,200,
b,bob,10,4,50,50,
c,ada,20,1,60,90,
d,bob,20,9,60,90,
e,eva,300,1,0,0,
"""


def run(*args: str) -> Result:
    """The command as typed."""
    return CliRunner().invoke(replay, list(args))


def starts_of(path: Path) -> dict[str, float]:
    """job_id -> start_s of a file of starts."""
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    rows = csv.DictReader(text.decode().splitlines())
    return {row["job_id"]: float(row["start_s"]) for row in rows}


@pytest.mark.parametrize("learn", ["--learn", "--no-learn"])
@pytest.mark.parametrize("mode", ["off", "easy"])
@pytest.mark.parametrize(("workload", "gpus"), [("philly8", 8), ("rough64", 64)])
def test_replay_agrees_job_by_job_with_an_independent_scheduler(
    tmp_path: Path, workload: str, gpus: int, mode: str, learn: str
) -> None:
    """All have limits: what is learned changes no start."""
    out = tmp_path / "starts.csv"
    done = run(
        str(DATA / f"{workload}.csv.gz"), "--gpus", str(gpus), "--order", "fcfs",
        "--backfill", mode, learn, "--starts", str(out),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    expected = starts_of(DATA / f"{workload}.{'fcfs' if mode == 'off' else 'easy'}.csv.gz")
    assert starts_of(out) == expected


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A small workload on disk."""
    path = tmp_path / "made.csv"
    path.write_text(MADE)
    return path


def test_starts_are_in_input_order_and_a_job_ends_at_its_run_time_or_limit(
    made: Path, tmp_path: Path
) -> None:
    out = tmp_path / "starts.csv"
    assert run(str(made), "--host", "4x80G", "--starts", str(out)).exit_code == 0
    # c backfills until 80, b starts when a ends early; d is too large; e takes no time.
    assert out.read_text() == "job_id,start_s,end_s\na,0,100\nb,100,150\nc,20,80\ne,300,300\n"


def test_json_has_the_figures(made: Path) -> None:
    done = run(str(made), "--gpus", "4", "--json")
    found = json.loads(done.stdout)
    assert found["jobs"] == 4
    assert found["left_out"] == 1
    assert found["makespan_s"] == 300.0
    assert found["utilisation"] == (2 * 100 + 4 * 50 + 60) / (4 * 300)
    assert found["waits"]["max_s"] == 90.0
    assert found["by_size"]["4"]["mean_s"] == 90.0
    assert found["by_user"]["ada"]["jobs"] == 2
    assert found["promises_kept"] == 1
    assert found["promises_broken"] == 0


def test_before_reservation_and_off_differ_from_easy(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text(
        "job_id,user,submit_s,gpus,run_s\n1,a,0,6,600\n2,b,1,4,600\n3,c,2,2,3600\n4,d,3,1,60\n"
    )
    found = {}
    for mode in ("easy", "before-reservation", "off"):
        out = tmp_path / mode
        run(str(path), "--gpus", "8", "--backfill", mode, "--starts", str(out))
        found[mode] = starts_of(out)
    assert found["easy"] == {"1": 0.0, "2": 600.0, "3": 2.0, "4": 600.0}
    assert found["before-reservation"] == {"1": 0.0, "2": 600.0, "3": 600.0, "4": 3.0}
    assert found["off"] == {"1": 0.0, "2": 600.0, "3": 600.0, "4": 600.0}


def test_standard_workload_format(tmp_path: Path) -> None:
    """Processors count as GPUs; the requested time is the limit; comments and broken jobs go."""
    lines = (
        "; a comment\n"
        "1 0 -1 100 2 -1 -1 2 300 -1 1 7 -1 -1 -1 -1 -1 -1\n"
        "2 5 -1 50 -1 -1 -1 4 -1 -1 1 8 -1 -1 -1 -1 -1 -1\n"
        "3 6 -1 -1 4 -1 -1 4 10 -1 1 8 -1 -1 -1 -1 -1 -1\n"
    )
    path = tmp_path / "w.swf.gz"
    path.write_bytes(gzip.compress(lines.encode()))
    out = tmp_path / "starts"
    done = run(str(path), "--gpus", "4", "--json", "--starts", str(out))
    assert json.loads(done.stdout)["unusable"] == 1
    assert out.read_text() == "job_id,start_s,end_s\n1,0,100\n2,100,150\n"


def test_shared_jobs_run_beside_each_other(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    gib30 = 30 * 2**30
    rows = "".join(f"{n},u{n},0,1,100,100,{gib30}\n" for n in range(3))
    path.write_text("job_id,user,submit_s,gpus,run_s,limit_s,vram_bytes\n" + rows)
    out = tmp_path / "starts"
    assert run(str(path), "--host", "1x80G", "--starts", str(out)).exit_code == 0
    assert sorted(starts_of(out).values()) == [0.0, 0.0, 100.0]


def test_without_limits_who_ends_before_the_first_by_what_runs_took_starts_before_it(
    tmp_path: Path,
) -> None:
    """4 GPUs: ada's ran 100 s and 1,000 s, she has 2 of them from 2,000 on; bob's head wants 4."""
    rows = (
        "a,ada,0,2,100,-1,short\n"
        "b,ada,500,2,1000,-1,long\n"
        "hold,ada,2000,2,1000,-1,long\n"
        "head,bob,2010,4,50,-1,\n"
        "in,ada,2020,2,100,-1,short\n"
        "out,ada,2020,2,1000,-1,long\n"
    )
    of_the_owner = (",".join(row.split(",")[:-1]) + "\n" for row in rows.splitlines())
    header = "job_id,user,submit_s,gpus,run_s,limit_s"
    texts = {"by command": f"{header},command\n{rows}", "by owner": header + "\n"}
    texts["by owner"] += "".join(of_the_owner)
    found = {}
    for named, args in {
        "by command": (),
        "by owner": (),
        "not at all": ("--no-learn",),
    }.items():
        path, out = tmp_path / "w.csv", tmp_path / "starts"
        path.write_text(texts.get(named, texts["by command"]))
        assert run(str(path), "--gpus", "4", "--starts", str(out), *args).exit_code == 0
        starts = starts_of(out)
        found[named] = {name: starts[name] for name in ("head", "in", "out")}
    assert found["by command"] == {"head": 3000.0, "in": 2020.0, "out": 3050.0}
    # Of the owner's runs on 2 GPUs the last two count: 550 s are expected of all three. What holds
    # the GPUs is expected to end at 2,550 s, then at 2,610 and 2,910, then at 3,810.
    assert found["by owner"] == {"head": 3010.0, "in": 2910.0, "out": 3060.0}
    # 24 h are expected of all: who starts later ends later, and none is spare.
    assert found["not at all"] == {"head": 3000.0, "in": 3050.0, "out": 3050.0}


def test_patience_and_guess_are_those_of_the_options(tmp_path: Path) -> None:
    """Expected at 14,400 s by the guess, the first job has closed its GPUs an hour later."""
    path, out = tmp_path / "w.csv", tmp_path / "starts"
    path.write_text(
        "job_id,user,submit_s,gpus,run_s,limit_s\n"
        "a,ada,0,2,90000,-1\nhead,bob,10,3,50,-1\nc,eva,20000,1,100,100\n"
    )
    found = {}
    for patience in ("48h", "1h"):
        options = ("--guess-length", "4h", "--head-patience", patience)
        assert run(str(path), "--gpus", "4", "--starts", str(out), *options).exit_code == 0
        found[patience] = starts_of(out)["c"]
    assert found == {"48h": 20000.0, "1h": 90000.0}


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (("--gpus", "4", "--host", "4x80G"), 2, "either --gpus N or --host"),
        (("--host", "4 big ones"), 2, "write 4x24G or 2x80G"),
        (("--gpus", "4", "--half-life", "soon"), 2, "write it like"),
        (("--gpus", "4", "--guess-length", "0"), 2, "a guess of 0 s; it must be from 1 s on"),
        (("--gpus", "4", "--guess-length", "inf"), 2, "a guess of inf s; it must be"),
    ],
)
def test_wrong_options_say_how_to_write_them(
    made: Path, args: tuple[str, ...], status: int, says: str
) -> None:
    done = run(str(made), *args)
    assert done.exit_code == status
    assert says in done.output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("job_id,user\n1,a\n", "no column submit_s, gpus, run_s"),
        ("job_id,user,submit_s,gpus,run_s\n1,a,0,1\n", "line 2: the line ends before run_s"),
        ("job_id,user,submit_s,gpus,run_s\n1,a,nan,1,5\n", "line 2: submit_s is 'nan'; write"),
        ("job_id,user,submit_s,gpus,run_s\n1,a,-5,1,5\n", "line 2: submit_s is '-5'; write"),
        ("job_id,user,submit_s,gpus,run_s\n1,a,0,1.5,5\n", "line 2: gpus is '1.5'; write a whole"),
        (
            "job_id,user,submit_s,gpus,run_s,limit_s\n1,a,0,1,5,-2\n",
            "line 2: limit_s is '-2'; write seconds from 0, or -1 for no limit",
        ),
        (
            "job_id,user,submit_s,gpus,run_s,vram_bytes\n1,a,0,1,5,2G\n",
            "line 2: vram_bytes is '2G'; write a whole",
        ),
    ],
)
def test_broken_workloads_name_the_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "w.csv"
    path.write_text(text)
    done = run(str(path), "--gpus", "4")
    assert done.exit_code == 2
    assert says in done.output


def test_a_workload_as_spreadsheets_write_it_is_read(tmp_path: Path) -> None:
    """A byte order mark, blanks after the commas, CRLF, an empty line; jobs without GPUs go."""
    path, out = tmp_path / "w.csv", tmp_path / "starts"
    path.write_bytes(
        b"\xef\xbb\xbfjob_id, user, submit_s, gpus, run_s, limit_s\r\n"
        b"1, a, 0, 1, 5, \r\n\r\n2, M\xfcller, 1.5, 1 , 5, 9\r\n3, c, 2, 0, 5, 5\r\n"
    )
    done = run(str(path), "--gpus", "1", "--json", "--starts", str(out))
    assert json.loads(done.stdout)["unusable"] == 1
    assert out.read_text() == "job_id,start_s,end_s\n1,0,5\n2,5,10\n"


def test_a_trace_with_a_header_in_latin_1_is_read(tmp_path: Path) -> None:
    """Headers of public traces name people and places; nobody says in which encoding."""
    path, out = tmp_path / "w.swf", tmp_path / "starts"
    job = b"1 0 -1 100 2 -1 -1 2 300 -1 1 7 -1 -1 -1 -1 -1 -1\n"
    path.write_bytes(b"; Acknowledge: J. M\xfcller\n  ; indented\n\n" + job)
    assert run(str(path), "--gpus", "4", "--starts", str(out)).exit_code == 0
    assert out.read_text() == "job_id,start_s,end_s\n1,0,100\n"


@pytest.mark.parametrize("line", ["1 0 -1 100 2", "1 0 -1 inf 2 -1 -1 2 300 -1 1 7", "a b c"])
def test_a_broken_trace_names_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "w.swf"
    path.write_text(f"; a comment\n{line}\n")
    done = run(str(path), "--gpus", "4")
    assert (done.exit_code, "w.swf, line 2: " in done.output) == (2, True)


def test_a_report_that_cannot_be_written_is_an_error_without_traceback(made: Path) -> None:
    command = [sys.executable, "-m", "gpuschedd.main", "replay", str(made), "--gpus", "4"]
    # Buffered, as it is for people: what could not be written is tried once more at the very end.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, env=buffered, check=False
        )
    assert done.returncode == 74
    assert done.stderr == (b"gpuschedd replay: cannot write the report: No space left on device\n")


def test_starts_that_cannot_be_written_name_their_place(made: Path, tmp_path: Path) -> None:
    place = tmp_path / "gone" / "starts.csv"
    done = run(str(made), "--gpus", "4", "--starts", str(place))
    assert done.exit_code == 74
    assert done.output == (
        f"gpuschedd replay: cannot write {place}: No such file or directory; "
        "give --starts a place that can be written\n"
    )


def test_a_name_in_a_trace_drives_no_terminal(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text("job_id,user,submit_s,gpus,run_s\n1,\x1b[31mred,0,1,5\n")
    done = run(str(path), "--gpus", "1")
    assert "\x1b" not in done.output
    assert "user \\x1b[31mred" in done.output


def test_text_report_has_a_line_per_job_size_and_user(made: Path) -> None:
    done = run(str(made), "--gpus", "4")
    assert "utilisation" in done.stdout
    assert "4 GPUs" in done.stdout
    assert "user bob" in done.stdout


def test_a_job_that_only_queues_up_costs_no_pass(tmp_path: Path) -> None:
    """Its GPUs are not idle, and the head has a promise: nothing else can start either."""
    path = tmp_path / "w.csv"
    lines = ["job_id,user,submit_s,gpus,run_s", "1,a,0,3,600", "2,b,1,4,600"]
    lines += [f"{number},c,{number},2,60" for number in range(3, 53)]
    path.write_text("\n".join([*lines, "53,d,60,1,60"]) + "\n")
    out = tmp_path / "starts"
    for order in ("fcfs", "priority"):
        done = run(str(path), "--gpus", "4", "--order", order, "--json", "--starts", str(out))
        assert starts_of(out)["2"] == 600.0
        assert starts_of(out)["53"] == 60.0, "which finds an idle GPU"
        # Jobs 1, 2 and 53 come, five moments at which jobs end before 2, then 25 pairs.
        assert json.loads(done.stdout)["passes"] < 35


def test_a_job_may_be_as_large_as_the_host(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text("job_id,user,submit_s,gpus,run_s\n1,a,0,5000,60\n2,b,0,5001,60\n")
    out = tmp_path / "starts"
    done = run(str(path), "--gpus", "5000", "--json", "--starts", str(out))
    assert json.loads(done.stdout)["left_out"] == 1
    assert starts_of(out) == {"1": 0.0}
