"""gq: tables, one job in full, JSON; bounded, escaped, and never a traceback."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusched_client.client import RECONNECT_S
from gpusched_client.commands import listing as listing_module
from gpusched_client.commands.gq import cli
from gpusched_client.output.json import json_text
from gpusched_client.terms import JobState
from gpusched_client.wire import session
from tests.client.fake_server import FakeServer, Handler, Refusal

Serve = Callable[[dict[str, Handler]], FakeServer]
GIB = 2**30
NOW_S = 1_767_204_900  # midnight in Nepal, 18:15 in UTC


def view(job_id: int, state: str = "PENDING", **fields: Any) -> dict[str, Any]:
    """A job as the daemon sends it; someone else's by default."""
    job = {
        "job_id": job_id,
        "state": state,
        "user": "bob",
        "uid": 54_321,
        "name": "train.py",
        "gpus": 1,
        "time_limit_s": 7200,
    }
    return {**job, **fields}


LISTING = [
    view(38, "FAILED", exit_code=3, started_at_s=NOW_S - 400, ended_at_s=NOW_S - 300),
    view(
        39, "CANCELLED", exit_code=0, exit_signal=15, cause="cancelled", cause_detail="by bob",
        started_at_s=NOW_S - 90_400, ended_at_s=NOW_S - 100,
    ),
    view(40, "RUNNING", user="alice", uid=os.getuid(), gpus=2, gpu_indices=[0, 1],
         started_at_s=NOW_S - 3661, time_limit_s=-1),
    view(41, "RUNNING", gpu_indices=[2], vram_bytes=18 * GIB, started_at_s=NOW_S - 5),
    view(42, gpus=4, queue_position=2, expected_start_s=NOW_S + 51_600,
         reason={"code": "Priority", "text": "job 43 comes first"}),
    view(43, gpus=8, queue_position=1, promised_start_s=NOW_S + 90_000, name="big",
         reason={"code": "Resources", "text": "needs 8 GPUs, 1 is free", "numbers": {"free": 1}}),
    view(44, gpus=0, reason={"code": "Held", "text": ""}, time_limit_s=None, user=None, name=None),
    view(37, "CANCELLED", cause="cancelled", cause_detail="cancelled by bob",
         ended_at_s=NOW_S - 500),
    view(45, "CONFIGURING", vram_bytes=512 * 2**20, gpu_indices=[2]),
]  # fmt: skip


def listing(jobs: list[dict[str, Any]], total: int | None = None) -> dict[str, Handler]:
    return {"jobs": lambda _: {"jobs": jobs, "total": len(jobs) if total is None else total}}


@pytest.mark.usefixtures("midnight")
def test_the_table_shows_running_first_then_the_queue_then_what_has_ended(
    serve: Serve, run: Any, golden: Any
) -> None:
    server = serve(listing(LISTING))
    golden("gq", run(cli).text)
    assert server.requests == [("jobs", {"ended_within_s": 600, "limit": 50})]


@pytest.mark.usefixtures("midnight")
def test_a_terminal_cuts_the_last_column_and_a_pipe_does_not(
    serve: Serve, run: Any, golden: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(listing(LISTING))
    monkeypatch.setattr(listing_module, "terminal_width", lambda: 100)
    outcome = run(cli)
    golden("gq-100-columns", outcome.text)
    assert max(map(len, outcome.out.splitlines())) <= 100


@pytest.mark.usefixtures("midnight")
@pytest.mark.parametrize("columns", [80, 90, 120, 200])
def test_lines_fit_usual_terminals(
    serve: Serve, run: Any, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    long = view(1, name="x" * 64, reason={"code": "Resources", "text": "y" * 300})
    serve(listing([long]))
    monkeypatch.setattr(listing_module, "terminal_width", lambda: columns)
    assert max(map(len, run(cli).out.splitlines())) <= columns


@pytest.mark.usefixtures("midnight")
def test_a_narrow_terminal_gets_fewer_columns_and_no_wrapped_line(
    serve: Serve, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(
        listing([view(1, time_limit_s=86_400 * 7, reason={"code": "Resources", "text": "y" * 99})])
    )
    monkeypatch.setattr(listing_module, "terminal_width", lambda: 60)
    lines = run(cli).out.splitlines()
    assert " ".join(lines[0].split()) == "JOBID NAME USER ST ELAPSED GPUS VRAM START GPU/REASON"
    assert max(map(len, lines)) <= 60
    chosen = run(cli, "--format", "JOBID,LIMIT,VRAM,COMMAND,DIRECTORY").out.splitlines()
    assert " ".join(chosen[0].split()) == "JOBID LIMIT VRAM COMMAND DIRECTORY"


def test_columns_stay_aligned_whatever_the_names(serve: Serve, run: Any) -> None:
    """Wide characters take two places, combining ones none."""
    serve(listing([view(1, name="訓練 7"), view(2, name="cafe\u0301"), view(3, name="plain")]))
    rows = run(cli, "--format", "NAME,ST").out.splitlines()
    assert rows == ["NAME    ST", "訓練 7  PD", "cafe\u0301    PD", "plain   PD"]


def test_a_wide_name_is_cut_by_places(
    serve: Serve, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(listing([view(1, name="練" * 40)]))
    monkeypatch.setattr(listing_module, "terminal_width", lambda: 20)
    assert run(cli, "--format", "ST,NAME").out.splitlines()[1] == "PD  " + "練" * 6 + "..."


def test_an_empty_host_shows_the_headings(serve: Serve, run: Any) -> None:
    serve(listing([]))
    outcome = run(cli)
    assert outcome.out.startswith("JOBID  NAME  USER  ST  ELAPSED  LIMIT  GPUS  VRAM  START")
    assert outcome.out.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "params"),
    [
        ("--me", {"users": [str(os.getuid())], "ended_within_s": 600, "limit": 50}),
        ("-u alice,me", {"users": ["alice", f"{os.getuid()}"], "ended_within_s": 600, "limit": 50}),
        ("--state pd,Running", {"states": ["PENDING", "RUNNING"], "limit": 50}),
        ("--state final", {"states": [str(s) for s in JobState if s.is_final]}),
        ("--name train -n 7", {"name": "train", "ended_within_s": 600, "limit": 7}),
        ("--json", {"ended_within_s": 600}),
        ("1-3,7 9", {"ids": [1, 2, 3, 7, 9]}),
    ],
)
def test_filters_are_the_daemons_work(
    serve: Serve, run: Any, words: str, params: dict[str, Any]
) -> None:
    server = serve(listing([]))
    run(cli, *words.split())
    assert server.requests == [("jobs", params)]


def test_at_signs_name_my_last_jobs(serve: Serve, run: Any) -> None:
    mine = [view(5), view(8), view(9)]

    def jobs(params: dict[str, Any]) -> Any:
        return {"jobs": mine[-params["limit"] :], "total": 3}

    server = serve({"jobs": jobs, "job": lambda params: view(params["job_id"])})
    assert "Job:          9" in run(cli, "@").out
    assert "Job:          8" in run(cli, "@~1").out
    outcome = run(cli, "@~3")
    assert (outcome.status, outcome.err) == (67, "gq: @~3: you have 3 jobs on record\n")
    assert server.requests[0] == ("jobs", {"users": [str(os.getuid())], "limit": 1})


@pytest.mark.usefixtures("midnight")
def test_a_short_list_keeps_the_newest_of_those_that_ended(serve: Serve, run: Any) -> None:
    ended = [view(n, "COMPLETED", exit_code=0, ended_at_s=NOW_S - 60 + n) for n in (1, 2, 3, 4)]
    serve(listing([*ended, view(5), view(6)]))
    lines = run(cli, "-n", "4", "--format", "JOBID").out.split()
    assert lines == ["JOBID", "5", "6", "3", "4"]
    assert run(cli, "-n", "1", "--format", "JOBID").out.split() == ["JOBID", "5"]


def test_what_a_script_is_given_is_no_command(serve: Serve, run: Any) -> None:
    scripted = view(7, "COMPLETED", argv=[b"a", b"b c"], script_bytes=40, command="<script> a b c")
    serve({"job": lambda _: scripted})
    found = run(cli, "7").out
    assert "Arguments:    a 'b c'" in found
    assert "Command:" not in found


@pytest.mark.usefixtures("midnight")
@pytest.mark.parametrize(
    ("state", "seen_s", "mark"),
    [
        ("COMPLETED", 3_590.0, ""),
        ("COMPLETED", 2_400.0, " (seen for 40:00 of 1:00:00)"),
        ("RUNNING", 4_790.0, ""),
        ("RUNNING", 2_400.0, " (seen for 40:00 of 1:20:00)"),
    ],
)
def test_figures_of_a_part_of_the_run_are_marked_as_that(
    serve: Serve, run: Any, state: str, seen_s: float, mark: str
) -> None:
    """A restart of the daemon is no part of it that anybody saw."""
    ended = {} if state == "RUNNING" else {"ended_at_s": NOW_S - 1_200}
    use = {"gpu_index": 0, "gpu_uuid": "GPU-0", "peak_source": "none"}
    job = view(
        7, state, started_at_s=NOW_S - 4_800, gpu_uses=[use], gpu_observed_s=seen_s,
        gpu_utilization=12.0, energy_j=7_200.0, **ended,
    )  # fmt: skip
    serve({"job": lambda _: job})
    lines = run(cli, "7").out.splitlines()
    assert f"GPU busy:     12 % on average{mark}" in lines
    assert f"Energy:       2.00 Wh{mark}" in lines


@pytest.mark.usefixtures("midnight")
def test_a_long_list_is_bounded_and_says_so_on_stderr(serve: Serve, run: Any) -> None:
    newest = [view(number) for number in range(9_001, 10_001)]

    def jobs(params: dict[str, Any]) -> Any:
        running = [view(3, "RUNNING", gpu_indices=[0])]
        is_active = "states" in params
        return {"jobs": running if is_active else newest, "total": 1 if is_active else 20_000}

    queue = [view(number) for number in range(500, 560)]
    serve({"jobs": jobs, "queue": lambda _: {"jobs": queue, "total": 19_999}})
    outcome = run(cli)
    lines = outcome.out.splitlines()
    assert len(lines) == 51
    assert lines[1].split()[0] == "3"
    assert lines[2].split()[0] == "500"
    assert outcome.err == "showing 50 of 20000\n"
    assert len(json.loads(run(cli, "--json", "-n", "7").out)["jobs"]) == 7


def test_of_many_that_ended_the_newest_fill_what_the_live_ones_leave(
    serve: Serve, run: Any
) -> None:
    def jobs(params: dict[str, Any]) -> Any:
        if "RUNNING" in params.get("states", ()):
            return {"jobs": [view(3, "RUNNING")], "total": 1}
        ended = [view(n, "COMPLETED", ended_at_s=float(n)) for n in range(2_001, 3_001)]
        return {"jobs": ended[-params["limit"] :], "total": 3_001}

    serve({"jobs": jobs, "queue": lambda _: {"jobs": [view(9)], "total": 1}})
    outcome = run(cli, "-n", "4")
    rows = [line.split()[0] for line in outcome.out.splitlines()[1:]]
    assert rows == ["3", "9", "2999", "3000"]
    assert outcome.err == "showing 4 of 3001\n"


def many_of(waiting: range, running: range) -> dict[str, Handler]:
    """The daemon's `jobs` and `queue` over that many; who waits longest comes last in its turn."""

    def jobs(params: dict[str, Any]) -> Any:
        states = params.get("states", ["RUNNING", "PENDING"])
        ids = [n for n in running if "RUNNING" in states]
        ids += [n for n in waiting if "PENDING" in states]
        page = ids[-params.get("limit", 1000) :]
        state = {True: "RUNNING", False: "PENDING"}
        return {"jobs": [view(n, state[n in running]) for n in page], "total": len(ids)}

    def queue(params: dict[str, Any]) -> Any:
        turn = list(reversed(waiting))[: params["limit"]]
        page = [view(n, queue_position=place) for place, n in enumerate(turn, start=1)]
        return {"jobs": page, "total": len(waiting)}

    return {"jobs": jobs, "queue": queue}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("--me", "-n", "3"), ["7", "2600", "2599"]),
        (("--name", "x", "-t", "PD", "-n", "2"), ["2600", "2599"]),
        (("-t", "PD", "-n", "2"), ["2600", "2599"]),
        (("-t", "live", "-n", "2"), ["7", "2600"]),
        (("-t", "PD,CD", "-n", "2"), ["1601", "1602"]),
    ],
)
def test_a_long_filtered_list_begins_with_what_runs_next(
    serve: Serve, run: Any, words: tuple[str, ...], shown: list[str]
) -> None:
    serve(many_of(range(101, 2_601), range(7, 8)))
    outcome = run(cli, *words)
    assert [line.split()[0] for line in outcome.out.splitlines()[1:]] == shown
    assert outcome.err.startswith(f"showing {len(shown)} of 2")


def test_no_more_rows_are_asked_for_than_are_shown(serve: Serve, run: Any) -> None:
    """What a list costs the daemon does not grow with what waits behind it."""
    server = serve(many_of(range(101, 9_101), range(7, 8)))
    run(cli, "--me")
    me = [str(os.getuid())]
    assert server.requests[0] == ("jobs", {"users": me, "ended_within_s": 600, "limit": 50})
    assert server.requests[1][1]["states"] == ["RUNNING", "COMPLETING", "CONFIGURING"]
    assert server.requests[2:] == [("queue", {"users": me, "limit": 49})]


@pytest.mark.usefixtures("midnight")
def test_json_has_the_wires_names_with_iso_times(serve: Serve, run: Any) -> None:
    serve(listing(LISTING))
    outcome = run(cli, "--json")
    value = json.loads(outcome.out)
    assert value["total"] == 9
    by_id = {job["job_id"]: job for job in value["jobs"]}
    assert by_id[41]["started_at"] == "2025-12-31T18:14:55Z"
    assert by_id[41]["vram_bytes"] == 18 * GIB
    assert by_id[43]["promised_start"] == "2026-01-01T19:15:00Z"
    assert by_id[43]["reason"] == {
        "code": "Resources",
        "text": "needs 8 GPUs, 1 is free",
        "numbers": {"free": 1},
    }
    assert by_id[42]["ended_at"] is None
    assert "started_at_s" not in by_id[41]


@pytest.mark.usefixtures("midnight")
def test_columns_can_be_chosen_by_name_or_by_squeues_letters(
    serve: Serve, run: Any, golden: Any
) -> None:
    serve(listing(LISTING))
    chosen = run(cli, "--format", "jobid,STATE,exit,cause,start,reason").text
    golden("gq-format", chosen + run(cli, "--format", "%.6i %.9j %T %R").text)
    outcome = run(cli, "--format", "COLOUR")
    assert outcome.status == 2
    assert "'COLOUR' is not a column" in outcome.err


PENDING_DETAIL = view(
    43, gpus=8, queue_position=1, promised_start_s=NOW_S + 3600, priority=812.34, nice=5,
    priority_parts={"fair-share": 790.0, "age": 27.34, "nice": -5},
    reason={"code": "Resources", "text": "needs 8 GPUs, 1 is free"}, submitted_at_s=NOW_S - 60,
    argv=[b"python", b"my train.py", b"\xff\x1b"], cwd=b"/home/bob", output=b"gsub-%j.out",
    explanations=["would start now with 1 GPU", "would start now with --time 2h or less"],
    events=[{"at_s": NOW_S - 60, "kind": "submitted", "text": "by bob"}],
)  # fmt: skip
ENDED_DETAIL = view(
    38, "TIMEOUT", exit_code=0, exit_signal=15, cause="time_limit", gpu_indices=[2], attempt=2,
    gpu_uuids=["GPU-2"], submitted_at_s=NOW_S - 9000, started_at_s=NOW_S - 7300,
    ended_at_s=NOW_S - 100, vram_bytes=18 * GIB, cpu_user_s=12.34, cpu_system_s=1,
    max_rss_bytes=3 * GIB, vram_peak_bytes=17 * GIB, script_bytes=120, command="job.sh a",
)  # fmt: skip
WELL_ENDED_DETAIL = view(
    39, "COMPLETED", exit_code=0, cause="exit", gpus=0, started_at_s=NOW_S - 60,
    ended_at_s=NOW_S - 10,
    cause_detail="2 processes still ran when the main process ended, and were ended; use wait",
)  # fmt: skip
LOST_PROMISE_DETAIL = view(
    44, gpus=4, queue_position=1, expected_start_s=NOW_S + 90_000,
    lost_start_s=NOW_S + 5400, lost_promise_cause="GPU 3 drained (fan, by root)",
    reason={"code": "GpuUnavailable", "text": "needs 4 GPUs, 3 are in service"},
    events=[
        {"at_s": NOW_S - 90, "kind": "start_promised", "text": "start_by_s ..",
         "data": {"start_by_s": NOW_S + 5400}},
        {"at_s": NOW_S - 30, "kind": "promise_ended", "text": "outcome lost",
         "data": {"outcome": "lost", "exception": "gpu_drained",
                  "why": "GPU 3 drained (fan, by root)"}},
    ],
)  # fmt: skip


@pytest.mark.usefixtures("midnight")
@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("gq-pending-job", PENDING_DETAIL),
        ("gq-ended-job", ENDED_DETAIL),
        ("gq-well-ended-job", WELL_ENDED_DETAIL),
        ("gq-lost-promise", LOST_PROMISE_DETAIL),
    ],
)
def test_one_job_is_explained_in_full(
    serve: Serve, run: Any, golden: Any, name: str, job: dict[str, Any]
) -> None:
    server = serve({"job": lambda _: job})
    golden(name, run(cli, str(job["job_id"])).text)
    assert server.requests == [("job", {"job_id": job["job_id"]})]


def test_one_job_as_json_has_the_shape_of_several_and_all_about_it(serve: Serve, run: Any) -> None:
    serve({"job": lambda _: PENDING_DETAIL})
    answer = json.loads(run(cli, "43", "--json").out)
    (value,) = answer["jobs"]
    assert answer["total"] == 1
    assert value["argv"] == ["python", "my train.py", "\\xff\x1b"]
    assert value["argv_base64"] == ["cHl0aG9u", "bXkgdHJhaW4ucHk=", "/xs="]
    assert value["events"] == [
        {"at": "2025-12-31T18:14:00Z", "kind": "submitted", "text": "by bob", "data": None}
    ]


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ("PENDING", "running"),
        ("RUNNING", "running"),
        ("COMPLETING", "running"),
        ("COMPLETED", "success"),
        ("FAILED", "failed"),
        ("CANCELLED", "failed"),
    ],
)
def test_status_is_one_word_and_zero_for_every_known_job(
    serve: Serve, run: Any, state: str, word: str
) -> None:
    serve({"job": lambda _: view(7, state)})
    outcome = run(cli, "--status", "7")
    assert (outcome.status, outcome.out) == (0, f"{word}\n")


def test_json_is_valid_for_bytes_and_text_that_are_not_unicode(serve: Serve, run: Any) -> None:
    job = {**PENDING_DETAIL, "cwd": b"/data/\xff"}
    serve({"job": lambda _: job, "jobs": lambda _: {"jobs": [job], "total": 1}})
    for words in (["43"], ["43,44"], []):
        out = run(cli, "--json", *words).out
        (value,) = json.loads(out)["jobs"]
        assert value["cwd"] == "/data/\\xff"
        assert base64.b64decode(value["cwd_base64"]) == b"/data/\xff"
        assert "name_base64" not in value
    # Text that is none comes from a daemon that cannot help it.
    for text, shown in (
        ("\udcfe", "\\xfe"),
        ("\ud800 \udfff", "? ?"),
        ("\U0001f600", "\U0001f600"),
    ):
        assert json.loads(json_text({text: [text]})) == {shown: [shown]}


def test_json_does_not_depend_on_the_locale() -> None:
    program = "from gpusched_client.output.json import json_text; "
    program += "print(json_text({'name': '\\u00fc\\udcfe'}), end='')"
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", program],
        env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout) == {"name": "\u00fc\\xfe"}


def test_more_ids_than_one_request_may_name_are_asked_for_in_parts(serve: Serve, run: Any) -> None:
    def jobs(params: dict[str, Any]) -> Any:
        found = [view(number) for number in params["ids"] if number <= 1500]
        return {"jobs": found, "total": len(found)}

    server = serve({"jobs": jobs})
    outcome = run(cli, "1-2500,7000")
    assert [len(params["ids"]) for _, params in server.requests] == [1000, 1000, 501]
    assert len(outcome.out.splitlines()) == 1501
    assert (outcome.status, outcome.err) == (67, "gq: no such job: 1501-2500, 7000\n")


def test_unknown_jobs_are_67(serve: Serve, run: Any) -> None:
    def refuse(_params: dict[str, Any]) -> Any:
        raise Refusal("not_found", "no job 7; gq shows those that there are")

    serve({"job": refuse, "jobs": lambda _: {"jobs": [view(8)], "total": 1}})
    assert run(cli, "7").status == 67
    assert run(cli, "--status", "7").status == 67
    several = run(cli, "7", "8")
    assert (several.status, several.err) == (67, "gq: no such job: 7\n")
    assert several.out.count("\n") == 2
    together = shell("$GQ 7 8 2>&1").stdout.splitlines()
    assert [line.split()[0] for line in together] == ["JOBID", "8", "gq:"]


def test_a_daemon_that_goes_away_after_an_error_does_not_hide_it(
    serve: Serve, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a minute of trying again passes at once."""
    clock = [0.0]
    waits = SimpleNamespace(
        monotonic=lambda: clock[0], sleep=lambda s: clock.__setitem__(0, clock[0] + s)
    )
    monkeypatch.setattr(session, "time", waits)

    def refuse(_params: dict[str, Any]) -> Any:
        raise Refusal("not_found", "no job 7")

    def stop(_params: dict[str, Any]) -> Any:
        raise Refusal("unavailable", "the daemon stops")

    serve({"job": refuse, "hello": stop, "jobs": lambda _: {"jobs": [], "total": 0}})
    outcome = run(cli, "7")
    assert (outcome.status, outcome.err) == (67, "gq: no job 7\n")
    listed = run(cli)
    assert (listed.status, listed.err) == (0, "")
    assert clock[0] >= 2 * RECONNECT_S


def test_an_empty_list_tells_of_a_name_that_is_nobodys(serve: Serve, run: Any) -> None:
    serve(listing([]))
    outcome = run(cli, "-u", "nosuchuser,root,4711")
    assert (outcome.status, outcome.err) == (0, "gq: no user is named 'nosuchuser' here\n")
    assert run(cli, "-u", "root").err == ""


def test_a_status_is_one_jobs(serve: Serve, run: Any) -> None:
    serve({})
    outcome = run(cli, "--status", "1-3")
    assert outcome.status == 2
    assert "'1-3' names 3 jobs; name one" in outcome.err


def test_gpus_show_what_is_unknown_as_unknown(serve: Serve, run: Any, golden: Any) -> None:
    gpus = [
        {"index": 0, "uuid": "GPU-0", "model": "NVIDIA A100", "total_bytes": 80 * GIB,
         "used_bytes": 0, "promised_bytes": 0, "foreign_bytes": 0, "state": "ok",
         "utilization": 0, "jobs": []},
        {"index": 1, "uuid": "GPU-1", "model": "NVIDIA A100", "total_bytes": 80 * GIB,
         "used_bytes": 21 * GIB, "promised_bytes": 36 * GIB, "foreign_bytes": GIB // 2,
         "state": "ok", "utilization": 97.4, "jobs": [40, 41], "stale": True},
        {"index": 2, "uuid": "GPU-2", "model": "NVIDIA A100", "total_bytes": 80 * GIB,
         "used_bytes": None, "state": "unread", "reason": "memory cannot be read\x1b"},
    ]  # fmt: skip
    serve({"gpus": lambda _: {"gpus": gpus}})
    golden("gq-gpus", run(cli, "--gpus").text)
    assert json.loads(run(cli, "--gpus", "--json").out)["gpus"][2]["used_bytes"] is None


def test_usage_shows_shares_and_factors(serve: Serve, run: Any, golden: Any) -> None:
    users = [
        {"user": "alice", "uid": 1, "usage_gpu_s": 0, "shares": 1, "factor": 1.0,
         "running_jobs": 3, "running_gpus": 2.5416666, "pending_jobs": 2},
        {"user": "bob", "uid": 2, "usage_gpu_s": 86_400, "shares": 2.5, "factor": 0.25,
         "expected_run_median_error": 0.316, "starts_by_guess": 12, "heads_started": 5,
         "heads_later_than_expected": 2},
    ]  # fmt: skip
    serve({"usage": lambda _: {"users": users}})
    golden("gq-usage", run(cli, "--usage").text)


WHY = {
    "job_id": 7, "placed_at_s": NOW_S + 5, "gpu_indices": [0, 3], "rule": "gap", "rank": 14,
    "head": 5, "head_start_s": NOW_S + 4_860, "guessed": True,
    "first": [{"job_id": 5, "priority": 1203.4}, {"job_id": 6, "priority": 998.0}],
}  # fmt: skip


@pytest.mark.usefixtures("midnight")
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {},
            "in the gap before job 5's expected start at 01:21:00: it was expected to end by then.",
        ),
        (
            {"guessed": False},
            "in the gap before job 5's start at 01:21:00: its limit ends it by then.",
        ),
        (
            {"rule": "spare", "guessed": False},
            "on GPUs to spare beside job 5's start at 01:21:00.",
        ),
        ({"rule": "promised"}, "its start was promised."),
        ({"rule": "slot"}, "a slot for jobs without GPUs was free."),
        ({"rule": "first", "rank": 1}, "first in order."),
        ({"rule": "first"}, "next in order: all before it started, too."),
        (
            {"rule": "first", "over_limits": 2, "without_end": 1},
            "first in order of those that could start (2 before it were over the limits of their "
            "users, 1 before it needs what no job's end brings).",
        ),
    ],
)
def test_why_a_job_was_placed_names_the_rule_and_who_stood_before_it(
    serve: Serve, run: Any, changes: dict[str, Any], told: str
) -> None:
    server = serve({"why": lambda _: {**WHY, **changes}})
    lines = run(cli, "--why", "7").out.splitlines()
    assert server.requests == [("why", {"job_id": 7})]
    assert lines == [
        "Job 7 was placed on GPU 0, 3 at 00:00:05.",
        f"Rule: {told}",
        f"It was number {changes.get('rank', 14)} in the order of that moment, which began with:",
        "PLACE  JOBID  PRIORITY",
        "    1      5    1203.4",
        "    2      6     998.0",
    ]


@pytest.mark.usefixtures("midnight")
def test_who_put_a_job_first_is_told_with_why(serve: Serve, run: Any) -> None:
    facts = {"nice": -1_000, "put_first_by": "root\x1b"}
    serve({"why": lambda _: {**WHY, **facts}})
    assert "It was put first by root\\x1b." in run(cli, "--why", "7").out
    facts = {"nice": 50}
    assert "Its nice value was 50." in run(cli, "--why", "7").out
    assert json.loads(run(cli, "--why", "7", "--json").out)["rule"] == "gap"


@pytest.mark.usefixtures("midnight")
def test_a_job_without_planned_end_says_when_it_is_expected_and_by_what(
    serve: Serve, run: Any
) -> None:
    """In its reason, in START, by its length and by what patience does for it."""
    waits = view(
        9, gpus=4, time_limit_s=-1, expected_start_s=NOW_S + 3_600, expected_run_s=7_560.0,
        expected_by="last two runs of train.py", head_at_s=NOW_S - 60,
        head_expected_start_s=NOW_S + 1_800, patience_ends_at_s=NOW_S + 7_200,
        reason={"code": "UnlimitedJob", "text": "no planned end: jobs 3 and 9 have no limit",
                "numbers": {"expected_at_s": NOW_S + 3_600}},
    )  # fmt: skip
    serve({"job": lambda _: waits, **listing([waits])})
    text = " ".join(run(cli, "9").out.split())
    assert "no planned end: jobs 3 and 9 have no limit; expected 01:00 " in text
    assert "Start: expected 01:00:00" in text
    assert "to run 2.1 h (last two runs of train.py); no limit" in text
    assert (
        "expected then to start at 00:30:00; from 02:00:00 on nothing behind it starts on" in text
    )
    row = run(cli).out.splitlines()[1]
    assert "expected 01:00" in row
    assert row.endswith("jobs 3 and 9 have no limit; expected 01:00")


@pytest.mark.usefixtures("midnight")
def test_who_waits_behind_a_head_whose_patience_is_over_is_told_since_when(
    serve: Serve, run: Any
) -> None:
    """In times: what a pass said may be old. And of one that runs, how long that may be."""
    closed = {"code": "Reserved", "text": "the patience of job 3, which is first, has ended",
              "numbers": {"head_since_at_s": NOW_S, "patience_ended_at_s": NOW_S + 60}}  # fmt: skip
    jobs = {
        9: view(9, reason=closed),
        10: view(10, state="RUNNING", started_at_s=NOW_S, expected_run_s=7_560.0, time_limit_s=-1),
    }
    serve({"job": lambda asked: jobs[asked["job_id"]]})
    assert (
        "Reserved: the patience of job 3, which is first, has ended "
        "(first since 00:00, patient until 00:01)"
    ) in " ".join(run(cli, "9").out.split())
    assert "Expected: to run 2.1 h, as it started" in " ".join(run(cli, "10").out.split())


def test_questions_that_exclude_each_other_are_usage_errors(run: Any, golden: Any) -> None:
    lines = [
        ["--gpus", "7"],
        ["--me", "-u", "bob"],
        ["7", "--me"],
        ["--gpus", "-u", "bob"],
        ["--state", "SLEEPING"],
        ["x"],
        ["3-1"],
        ["-n", "0"],
    ]
    golden("gq-usage-errors", "".join(f"$ gq {' '.join(x)}\n{run(cli, *x).text}" for x in lines))


def test_it_says_its_version(run: Any) -> None:
    outcome = run(cli, "--version")
    assert (outcome.status, outcome.out) == (0, f"gq {version('gpuschedd')}\n")


def test_the_help_is_as_documented(run: Any, golden: Any) -> None:
    golden("gq-help", run(cli, "--help").text)


@pytest.mark.parametrize("code", ["invalid", "too_large", "denied"])
def test_refusals_are_one_line_with_their_status(serve: Serve, run: Any, code: str) -> None:
    def refuse(_params: dict[str, Any]) -> Any:
        raise Refusal(code, "no")

    serve({"jobs": refuse, "gpus": refuse})
    expected = {"invalid": 2, "too_large": 65, "denied": 77}[code]
    for words in ([], ["--gpus"]):
        outcome = run(cli, *words)
        assert (outcome.status, outcome.out, outcome.err) == (expected, "", "gq: no\n")


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """A shell line in which $GQ is the command."""
    environment = {**os.environ, "GQ": f"{sys.executable} -m gpusched_client.commands.gq"}
    command = ["bash", "-c", line]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_a_reader_that_leaves_gives_no_traceback(serve: Serve) -> None:
    serve(listing([view(number, name="x" * 64) for number in range(1, 1001)]))
    result = shell("$GQ -n 1000 | head -1; echo ${PIPESTATUS[0]}")
    assert result.stdout.splitlines()[0].startswith("JOBID")
    assert result.stdout.splitlines()[1] in ("0", "141")
    assert result.stderr == ""
    closed = shell("$GQ --help | true; $GQ >&-; true")
    assert "Traceback" not in closed.stderr


def test_an_answer_that_cannot_be_written_is_an_error(serve: Serve) -> None:
    serve(listing([view(1)]))
    result = shell("$GQ >/dev/full")
    assert result.returncode == 74
    assert result.stderr == "gq: the answer cannot be written: No space left on device\n"


def test_any_locale_can_show_any_name(serve: Serve) -> None:
    serve(listing([view(1, user="ü\u202e\x1b[31m", name="日本")]))
    result = shell("PYTHONIOENCODING=ascii LC_ALL=C $GQ")
    assert result.returncode == 0
    assert "\\xfc\\u202e\\x1b[31m" in result.stdout


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("-u", ""), "names no user"),
        (("-u", "alice,"), "names no user"),
        (("-t", ""), "'' is not a job state"),
    ],
)
def test_an_empty_filter_is_not_taken_as_left_out(
    serve: Serve, run: Any, words: tuple[str, ...], problem: str
) -> None:
    """It is a variable that is not set: everybody's jobs were not meant."""
    serve({"jobs": lambda _: {"jobs": [], "total": 0}})
    outcome = run(cli, *words)
    assert (outcome.status, problem in outcome.err) == (2, True), outcome.err
