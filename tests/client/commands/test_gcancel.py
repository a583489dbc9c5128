"""gcancel: which jobs are meant, what is sent, and how it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from gpusched_client.commands.gcancel import cli
from tests.client.fake_server import FakeServer, Handler, Refusal

Serve = Callable[[dict[str, Handler]], FakeServer]
ME = str(os.getuid())


def all_cancelled(params: dict[str, Any]) -> Any:
    return {"outcomes": [{"job_id": job_id, "text": "cancelled"} for job_id in params["job_ids"]]}


def with_jobs(*ids: int) -> dict[str, Handler]:
    """A daemon that has these jobs, in pages."""

    def jobs(params: dict[str, Any]) -> Any:
        below = [job_id for job_id in ids if job_id < params.get("before_id", 2**62)]
        page = below[-params.get("limit", 1000) :]
        return {"jobs": [{"job_id": i, "state": "PENDING"} for i in page], "total": len(ids)}

    return {"cancel": all_cancelled, "jobs": jobs}


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        ("7", [7]),
        ("1-3,7 2 9", [1, 2, 3, 7, 9]),
        ("@", [9]),
        ("@~1", [8]),
        ("-u me", [5, 8, 9]),
        ("--state PD", [5, 8, 9]),
        ("8 70 -u bob", [8]),
    ],
)
def test_jobs_are_chosen_by_id_by_filter_or_by_both(
    serve: Serve, run: Any, words: str, ids: list[int]
) -> None:
    server = serve(with_jobs(5, 8, 9))
    outcome = run(cli, *words.split())
    assert server.requests[-1] == ("cancel", {"job_ids": ids})
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == "".join(f"job {job_id}: cancelled\n" for job_id in ids)


@pytest.mark.parametrize(
    ("words", "users"),
    [("-u me", [ME]), ("-u bob", ["bob"]), ("--state PD", [ME]), ("--name x", [ME])],
)
def test_filters_without_a_user_mean_my_own_jobs(
    serve: Serve, run: Any, words: str, users: list[str]
) -> None:
    server = serve(with_jobs(5))
    run(cli, *words.split())
    method, params = server.requests[0]
    assert (method, params["users"]) == ("jobs", users)
    assert "COMPLETED" not in params["states"]


def test_more_jobs_than_a_page_are_all_found_and_cancelled(serve: Serve, run: Any) -> None:
    server = serve(with_jobs(*range(1, 2501)))
    run(cli, "-u", "me")
    cancelled = [params["job_ids"] for method, params in server.requests if method == "cancel"]
    assert [len(ids) for ids in cancelled] == [1000, 1000, 500]
    assert [job_id for ids in cancelled for job_id in ids] == list(range(1, 2501))


@pytest.mark.parametrize(("text", "number"), [("USR1", 10), ("sigint", 2), ("34", 34)])
def test_a_signal_goes_by_number(serve: Serve, run: Any, text: str, number: int) -> None:
    server = serve(with_jobs())
    run(cli, "7", "--signal", text, "--reason", "too slow")
    assert server.requests == [("cancel", {"job_ids": [7], "signal": number, "reason": "too slow"})]


def test_each_job_has_its_line_and_the_first_failure_gives_the_status(
    serve: Serve, run: Any, golden: Any
) -> None:
    outcomes = [
        {"job_id": 1, "text": "cancelled", "state": "CANCELLED"},
        {"job_id": 2, "text": "was COMPLETED already", "state": "COMPLETED"},
        {"job_id": 3, "code": "denied", "text": "belongs to bob\x1b"},
        {"job_id": 4, "code": "not_found", "text": "there is no job 4"},
    ]
    serve({"cancel": lambda _: {"outcomes": outcomes}})
    outcome = run(cli, "1-4")
    golden("gcancel", outcome.text)
    assert outcome.status == 77
    json_outcome = run(cli, "1-4", "--json")
    assert json_outcome.status == 77
    assert json.loads(json_outcome.out)["outcomes"][1]["state"] == "COMPLETED"


def test_what_became_of_many_is_summed_up_in_ranges(serve: Serve, run: Any) -> None:
    def cancel(params: dict[str, Any]) -> Any:
        return {"outcomes": [outcome(job_id) for job_id in params["job_ids"]]}

    def outcome(job_id: int) -> dict[str, Any]:
        if job_id >= 535:
            return {"job_id": job_id, "code": "not_found", "text": f"there is no job {job_id}"}
        if job_id == 300:
            return {"job_id": 300, "code": "denied", "text": "job 300 belongs to bob"}
        if 100 <= job_id <= 200:
            return {
                "job_id": job_id,
                "text": "was FAILED already" if job_id % 2 else "was COMPLETED already",
            }
        return {"job_id": job_id, "text": "cancelled"}

    server = serve({"cancel": cancel})
    outcome_of_all = run(cli, "35-10000")
    assert [len(params["job_ids"]) for _, params in server.requests] == [1000] * 9 + [966]
    assert outcome_of_all.out == ("cancelled 398: 35-99, 201-299, 301-534; ended before: 100-200\n")
    assert outcome_of_all.err == "gcancel: job belongs to bob: 300; no such job: 535-10000\n"
    assert outcome_of_all.status == 77


def test_a_summary_of_jobs_far_apart_is_bounded(serve: Serve, run: Any) -> None:
    serve(with_jobs(*range(1, 1000, 2)))
    outcome = run(cli, "-u", "me")
    assert outcome.out.startswith("cancelled 500: 1, 3, 5, ")
    assert outcome.out.endswith(", 59 and 470 more\n")


def test_a_job_that_has_ended_is_no_error(serve: Serve, run: Any) -> None:
    serve({"cancel": lambda _: {"outcomes": [{"job_id": 2, "text": "was COMPLETED already"}]}})
    assert run(cli, "2").status == 0


def test_nothing_that_matches_is_no_error_and_says_so(serve: Serve, run: Any) -> None:
    server = serve(with_jobs())
    outcome = run(cli, "-u", "me")
    assert (outcome.status, outcome.out, outcome.err) == (0, "", "gcancel: no job matches\n")
    assert [method for method, _ in server.requests] == ["jobs"]


def test_usage_errors_explain_themselves(run: Any, golden: Any) -> None:
    lines = [[], ["x"], ["7-1"], ["0"], ["1-999999999"], ["7", "--signal", "FOO"], ["--state", "X"]]
    golden(
        "gcancel-usage-errors",
        "".join(f"$ gcancel {' '.join(line)}\n{run(cli, *line).text}" for line in lines),
    )


def test_the_help_is_as_documented(run: Any, golden: Any) -> None:
    golden("gcancel-help", run(cli, "--help").text)


@pytest.mark.parametrize(
    ("code", "status"), [("invalid", 2), ("too_large", 65), ("storage", 74), ("limit", 75)]
)
def test_a_refusal_of_the_whole_is_one_line(serve: Serve, run: Any, code: str, status: int) -> None:
    def refuse(_params: dict[str, Any]) -> Any:
        raise Refusal(code, "no")

    serve({"cancel": refuse})
    outcome = run(cli, "7")
    assert (outcome.status, outcome.err) == (status, "gcancel: no\n")


def test_an_empty_name_of_a_user_is_refused(run: Any) -> None:
    """Of a variable that is not set: it is neither all nor nobody."""
    outcome = run(cli, "-u", "")
    assert (outcome.status, "names no user" in outcome.err) == (2, True)
