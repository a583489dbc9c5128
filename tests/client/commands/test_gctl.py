"""gctl: what is sent, what is shown, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpusched_client.commands.gctl import cli
from tests.client.fake_server import FakeServer, Handler, Hangup, Refusal

Serve = Callable[[dict[str, Handler]], FakeServer]
GPU = {"index": 1, "uuid": "GPU-1", "state": "drained", "reason": "fan\x1b", "jobs": [4, 5]}


def updated(params: dict[str, Any]) -> Any:
    return {"outcomes": [{"job_id": job_id, "text": "held"} for job_id in params["job_ids"]]}


@pytest.mark.parametrize(
    ("words", "params"),
    [
        ("hold 1-2,7", {"job_ids": [1, 2, 7], "hold": True}),
        ("release 7", {"job_ids": [7], "hold": False}),
        ("update 7 -t 2h --nice 5 -J x", {"job_ids": [7], "time_limit_s": 7200, "nice": 5}),
    ],
)
def test_jobs_are_held_released_and_changed(
    serve: Serve, run: Any, words: str, params: dict[str, Any]
) -> None:
    server = serve({"update": updated})
    outcome = run(cli, *words.split())
    method, sent = server.requests[-1]
    assert method == "update"
    assert params.items() <= sent.items()
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.splitlines()[0] == f"job {params['job_ids'][0]}: held"


def test_a_thousand_jobs_and_more_go_in_pages(serve: Serve, run: Any) -> None:
    server = serve({"update": updated})
    run(cli, "hold", "1-1500")
    assert [len(params["job_ids"]) for _, params in server.requests] == [1000, 500]


def test_the_last_job_of_mine_is_meant_by_an_at_sign(serve: Serve, run: Any) -> None:
    page = {"jobs": [{"job_id": 9, "state": "PENDING"}], "total": 1}
    server = serve({"jobs": lambda _: page, "update": updated})
    run(cli, "hold", "@")
    assert server.requests[-1][1]["job_ids"] == [9]


def test_one_job_is_put_first(serve: Serve, run: Any) -> None:
    reply = {"outcome": {"job_id": 7, "text": "first of yours"}}
    server = serve({"top": lambda _: reply})
    outcome = run(cli, "top", "7")
    assert server.requests == [("top", {"job_id": 7})]
    assert (outcome.status, outcome.out) == (0, "job 7: first of yours\n")
    assert run(cli, "top", "7,8").status == 2


def test_a_refusal_has_its_line_and_gives_the_status(serve: Serve, run: Any) -> None:
    refused = {"job_id": 3, "code": "denied", "text": "belongs to bob\x1b"}
    done = {"job_id": 4, "text": "held"}
    serve({"update": lambda _: {"outcomes": [refused, done]}})
    outcome = run(cli, "hold", "3,4")
    assert (outcome.status, outcome.out) == (77, "job 4: held\n")
    assert outcome.err == "gctl: job 3: belongs to bob\\x1b\n"
    assert json.loads(run(cli, "hold", "3,4", "--json").out)["outcomes"][0]["code"] == "denied"


def test_a_daemon_that_goes_away_after_an_error_does_not_hide_it(serve: Serve, run: Any) -> None:
    def refuse(_params: dict[str, Any]) -> Any:
        raise Refusal("not_found", "no GPU 9")

    def stop(_params: dict[str, Any]) -> Any:
        raise Refusal("internal", "the daemon stops")

    serve({"drain": refuse, "reload": lambda _: {"changed": []}, "hello": stop})
    outcome = run(cli, "drain", "9")
    assert (outcome.status, outcome.err) == (67, "gctl: no GPU 9\n")
    assert run(cli, "reload").status == 0  # what was asked is done


def test_gpus_are_drained_and_resumed(serve: Serve, run: Any, golden: Any) -> None:
    resumed = {"index": 1, "uuid": "GPU-1", "state": "ok"}
    server = serve({"drain": lambda _: {"gpu": GPU}, "resume": lambda _: {"gpu": resumed}})
    golden(
        "gctl-gpus", run(cli, "drain", "1", "--reason", "fan").text + run(cli, "resume", "1").text
    )
    assert server.requests == [("drain", {"gpu": "1", "reason": "fan"}), ("resume", {"gpu": "1"})]


def test_a_reload_names_what_has_changed(serve: Serve, run: Any) -> None:
    replies = [{"changed": []}, {"changed": ["private", "limits.max_gpus"]}]
    serve({"reload": lambda _: replies.pop()})
    assert run(cli, "reload").out == "changed private\nchanged limits.max_gpus\n"
    assert run(cli, "reload").out == "nothing has changed\n"


STATUS = {
    **{"version": "0.1.0", "mode": "system", "launch": "pid1", "pid": 77, "gpus": 4, "gpus_ok": 3},
    **{"started_at_s": 1_767_204_900.0, "gpu_source": "NVML", "database": "/var/lib/g/x.sqlite3"},
    **{"running_jobs": 2, "pending_jobs": 40, "connections": 3, "sample_age_s": 0.52},
    **{"database_bytes": 3 * 2**20, "disk_free_bytes": None, "pass_s": 0.0012},
}


def test_the_status_shows_what_needs_a_person(
    serve: Serve, run: Any, golden: Any, midnight: float
) -> None:
    error = {"at_s": midnight - 60, "text": "launch_failed job=7\x1b"}
    ill = {**STATUS, "problems": ["GPU 2 is lost: fell off"], "last_errors": [error]}
    replies = [ill, ill, STATUS]
    serve({"status": lambda _: replies.pop()})
    well, sick = run(cli, "status"), run(cli, "status")
    golden("gctl-status", well.text + sick.text)
    assert (well.status, sick.status) == (0, 1)
    assert json.loads(run(cli, "status", "--json").out)["problems"] == ill["problems"]


def in_pieces(content: bytes, step: int = 4) -> Handler:
    def backup(params: dict[str, Any]) -> Any:
        offset = params.get("offset", 0)
        data = content[offset : offset + step]
        return {"backup_id": "b", "size_bytes": len(content), "offset": offset, "data": data}

    return backup


def test_a_backup_is_written_whole_and_for_its_owner_alone(
    serve: Serve, run: Any, tmp_path: Path
) -> None:
    server = serve({"backup": in_pieces(b"0123456789"), "status": lambda _: STATUS})
    target = tmp_path / "copy"
    outcome = run(cli, "backup", str(target))
    assert (outcome.status, outcome.out) == (0, f"{target}: 10 bytes\n")
    assert target.read_bytes() == b"0123456789"
    assert target.stat().st_mode & 0o777 == 0o600
    assert [params.get("backup_id") for _, params in server.requests] == [None, "b", "b"]
    assert run(cli, "backup", str(target)).status == 65
    assert run(cli, "backup", "--force", str(target)).status == 0


@pytest.mark.parametrize("name", ["x.sqlite3", "x.sqlite3-wal", "link"])
def test_a_backup_never_replaces_the_database_that_is_in_use(
    serve: Serve, run: Any, tmp_path: Path, name: str
) -> None:
    database = tmp_path / "x.sqlite3"
    for each in (database, tmp_path / "x.sqlite3-wal"):
        each.write_bytes(b"rows")
    (tmp_path / "link").symlink_to(database)
    status = {**STATUS, "database": str(database)}
    serve({"backup": in_pieces(b"0123456789"), "status": lambda _: status})
    outcome = run(cli, "backup", "--force", str(tmp_path / name))
    assert outcome.status == 65
    assert f"{name} is in use by the daemon; choose another name" in outcome.err
    assert (tmp_path / name).read_bytes() == b"rows"


def test_a_backup_that_cannot_be_written_names_its_place(
    serve: Serve, run: Any, tmp_path: Path
) -> None:
    serve({"backup": in_pieces(b"0123456789")})
    outcome = run(cli, "backup", str(tmp_path / "none" / "copy"))
    assert outcome.status == 74
    assert f"{tmp_path}/none/copy: No such file or directory" in outcome.err


def test_a_backup_that_breaks_off_leaves_nothing(serve: Serve, run: Any, tmp_path: Path) -> None:
    def backup(params: dict[str, Any]) -> Any:
        if params.get("offset", 0) > 0:
            raise Hangup
        return in_pieces(b"0123456789")(params)

    serve({"backup": backup})
    assert run(cli, "backup", str(tmp_path / "copy")).status == 69
    assert list(tmp_path.glob("*copy*")) == []


def test_an_error_is_one_line(serve: Serve, run: Any) -> None:
    def refuse(_params: dict[str, Any]) -> Any:
        raise Refusal("denied", "drain is for admins")

    serve({"drain": refuse})
    outcome = run(cli, "drain", "1")
    assert (outcome.status, outcome.err) == (77, "gctl: drain is for admins\n")


def test_usage_errors_explain_themselves(run: Any, golden: Any) -> None:
    lines = [["hold"], ["update", "7"], ["top", "x"], ["nothing"], ["backup"], ["drain"]]
    golden(
        "gctl-usage-errors",
        "".join(f"$ gctl {' '.join(line)}\n{run(cli, *line).text}" for line in lines),
    )


@pytest.mark.parametrize("word", ["", "drain", "update", "top", "backup"])
def test_the_help_is_as_documented(run: Any, golden: Any, word: str) -> None:
    words = [word] if word else []
    golden(f"gctl-help{'-' + word if word else ''}", run(cli, *words, "--help").text)
