"""The Python API: which daemon it talks to, what it sends, and what it does when that goes away."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

import gpusched_client
from gpusched_client import Client, Surroundings, job_request, paths
from gpusched_client.errors import (
    BY_CODE,
    Conflict,
    Denied,
    GpuschedError,
    Infeasible,
    Internal,
    Invalid,
    LimitReached,
    NotFound,
    PartlySubmitted,
    StillRunning,
    TooLarge,
    Unavailable,
)
from gpusched_client.submission import parts
from gpusched_client.terms import JobState
from gpusched_client.wire.submit_messages import JobRequest
from tests.client.fake_server import FakeServer, Handler, Hangup, Raw, Refusal
from tests.support.daemon import until

Serve = Callable[[dict[str, Handler]], FakeServer]
JOB_7 = {"job_id": 7, "state": "COMPLETED", "exit_code": 0}


def failing_first(times: int, failure: Exception, result: Any) -> Handler:
    """A handler that fails so many times before it answers."""
    left = [times]

    def handle(_params: dict[str, Any]) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise failure
        return result

    return handle


def refusing(error: Exception) -> Handler:
    return failing_first(10**9, error, None)


def test_submit_and_wait_as_the_documentation_shows(serve: Serve) -> None:
    server = serve(
        {
            "submit": lambda _: {"job_ids": [7], "time_limits_s": [86_400]},
            "wait": lambda _: {"jobs": [JOB_7], "timed_out": False},
        }
    )
    with Client() as c:
        job = c.submit(["python", "train.py"], gpus=2, vram="18G", time_limit="2h")
        ended = c.wait(job.id)
    assert (job.id, job.time_limit_s) == (7, 86_400)
    assert (ended.state, ended.exit_code) == (JobState.COMPLETED, 0)
    (_, params), (_, waited) = server.requests
    (sent,) = params["jobs"]
    assert sent["argv"] == [b"python", b"train.py"]
    assert (sent["gpus"], sent["vram_bytes"], sent["time_limit_s"]) == (2, 18 * 2**30, 7200)
    assert sent["cwd"] == os.getcwdb()
    assert sent["environment"] == {name: value for name, value in os.environb.items() if name}
    assert sent["name"] == "python"
    assert waited == {"job_ids": [7]}


def test_the_command_and_the_environment_are_sent_byte_for_byte(serve: Serve) -> None:
    server = serve({"submit": lambda _: {"job_ids": [1]}})
    words: list[str | bytes | Path] = [b"./a b", b"\xff\n", "", "-x", Path("p"), "\udcfe"]
    with Client() as c:
        c.submit(words, environment={b"A": b"\xff\n="}, cwd="/tmp")
    (sent,) = server.requests[0][1]["jobs"]
    assert sent["argv"] == [b"./a b", b"\xff\n", b"", b"-x", b"p", b"\xfe"]
    assert sent["environment"] == {b"A": b"\xff\n="}


@pytest.mark.parametrize("failure", [Hangup(), Refusal("unavailable", "about to stop")], ids=repr)
def test_a_submission_is_sent_again_with_its_id_when_the_daemon_goes_away(
    serve: Serve, failure: Exception
) -> None:
    server = serve({"submit": failing_first(3, failure, {"job_ids": [7]})})
    with Client() as c:
        assert c.submit(["true"]).id == 7
    ids = [params["submission_id"] for _, params in server.requests]
    assert len(ids) == 4
    assert len(set(ids)) == 1


def test_two_submissions_have_two_ids(serve: Serve) -> None:
    server = serve({"submit": lambda _: {"job_ids": [7]}})
    with Client() as c:
        c.submit(["true"])
        c.submit(["true"])
    assert server.requests[0][1]["submission_id"] != server.requests[1][1]["submission_id"]


def test_many_are_submitted_together_and_share_their_environment_on_the_wire(serve: Serve) -> None:
    server = serve({"submit": lambda _: {"job_ids": [1, 2, 3]}})
    with Client() as c:
        jobs = c.submit_many(job_request(["true", str(number)]) for number in range(3))
    assert [job.id for job in jobs] == [1, 2, 3]
    assert "environment" in server.requests[0][1]["common"]


def many(count: int) -> list[JobRequest]:
    """Jobs of which a message holds SUBMIT_JOBS_MAX."""
    around = Surroundings({})
    return [job_request(["true", str(number)], surroundings=around) for number in range(count)]


class Numbering:
    """A daemon that gives ids in order, to the same submission_id the same, to `refused` none."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.known: dict[str, list[int]] = {}

    def submit(self, params: dict[str, Any]) -> dict[str, Any]:
        name = params["submission_id"]
        if self.refused and name.endswith(self.refused):
            raise Refusal("limit", "root has 2 unfinished jobs.", {"limit": 2})
        first = 1 + sum(map(len, self.known.values()))
        ids = self.known.setdefault(name, list(range(first, first + len(params["jobs"]))))
        return {"job_ids": ids}


def test_more_jobs_than_a_message_holds_are_submitted_in_parts(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "SUBMIT_JOBS_MAX", 2)
    daemon = Numbering()
    serve({"submit": daemon.submit})
    with Client() as c:
        submitted = c.submit_many(many(5), submission_id="sweep")
    assert [job.id for job in submitted] == [1, 2, 3, 4, 5]
    assert {name: len(ids) for name, ids in daemon.known.items()} == {
        "sweep/1": 2,
        "sweep/2": 2,
        "sweep/3": 1,
    }


def test_where_a_later_part_is_refused_the_same_call_completes_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "SUBMIT_JOBS_MAX", 2)
    daemon = Numbering(refused="/2")
    serve({"submit": daemon.submit})
    jobs = many(5)
    with Client() as c:
        with pytest.raises(PartlySubmitted) as caught:
            c.submit_many(jobs)
        error = caught.value
        assert error.message == (
            "2 of 5 jobs are submitted, 1 to 2; not the others: root has 2 unfinished jobs. The "
            f"same call again with submission_id={error.submission_id!r} submits them."
        )
        assert (error.job_ids, error.exit_status) == ((1, 2), 75)
        assert error.data == {
            "job_ids": [1, 2],
            "submission_id": error.submission_id,
            "limit": 2,
        }
        assert isinstance(error.__cause__, LimitReached)
        daemon.refused = ""
        submitted = c.submit_many(jobs, submission_id=error.submission_id)
    assert [job.id for job in submitted] == [1, 2, 3, 4, 5]


def test_where_the_first_part_is_refused_nothing_is_submitted_and_its_error_tells(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "SUBMIT_JOBS_MAX", 2)
    daemon = Numbering(refused="/1")
    serve({"submit": daemon.submit})
    with Client() as c, pytest.raises(LimitReached, match="root has 2 unfinished jobs"):
        c.submit_many(many(5))
    assert daemon.known == {}


def test_a_wait_goes_on_over_a_restart_of_the_daemon(serve: Serve) -> None:
    asked, dropped = threading.Event(), threading.Event()

    def wait(_params: Any) -> dict[str, Any]:
        asked.set()
        assert dropped.wait(20)
        return {"jobs": [JOB_7]}

    server = serve({"wait": wait})

    def restart() -> None:
        assert asked.wait(20)
        server.drop_connections()
        dropped.set()

    restarting = threading.Thread(target=restart)
    restarting.start()
    with Client() as c:
        assert c.wait([7])[0].job_id == 7
    restarting.join()
    assert server.connections == 2


def test_a_wait_that_takes_too_long_is_a_timeout(serve: Serve) -> None:
    serve({"wait": lambda _: {"jobs": [{"job_id": 7, "state": "RUNNING"}], "timed_out": True}})
    with Client() as c, pytest.raises(StillRunning) as caught:
        c.wait(7, timeout_s=0.1)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, GpuschedError)
    assert str(caught.value) == "job 7 is not final after 0.1 s"
    assert caught.value.data == {"job_ids": [7]}


def test_the_public_names_are_listed() -> None:
    """Completion and help() find them though they are imported late."""
    assert set(gpusched_client.__all__) <= set(dir(gpusched_client))
    assert gpusched_client.NotFound is NotFound
    assert {"GpuschedError", *[kind.__name__ for kind in BY_CODE.values()]} <= set(
        gpusched_client.__all__
    )


def test_states_are_named_as_for_gq_and_others_are_refused(serve: Serve) -> None:
    server = serve({"jobs": lambda _: {"jobs": [], "total": 0}})
    with Client() as c:
        c.jobs(states=["r", JobState.PENDING])
        with pytest.raises(
            Invalid, match="'RUN' is not a job state; use live, final, all or PENDING"
        ):
            c.jobs(states=["RUN"])
    ((_, params),) = server.requests
    assert params["states"] == ["RUNNING", "PENDING"]


def test_a_connection_that_was_closed_while_idle_is_opened_again_also_for_a_signal(
    serve: Serve,
) -> None:
    server = serve({"cancel": lambda _: {"outcomes": [{"job_id": 7, "text": "signalled"}]}})
    with Client() as c:
        c.cancel(7, signal=10)
        server.drop_connections()
        assert c.cancel(7, signal=10)[0].text == "signalled"
    assert server.connections == 2


def test_a_signal_is_never_sent_twice(serve: Serve) -> None:
    server = serve({"cancel": refusing(Hangup())})
    with Client() as c, pytest.raises(Unavailable):
        c.cancel(7, signal=10)
    assert len(server.requests) == 1


def test_a_daemon_that_stays_away_is_unavailable_after_the_reconnect_time(serve: Serve) -> None:
    server = serve({"hello": refusing(Hangup())})
    with Client(reconnect_s=2.0) as c, pytest.raises(Unavailable, match="hello"):
        c.hello()
    assert len(server.requests) > 1


def test_no_reply_in_time_is_unavailable_and_not_asked_again(serve: Serve) -> None:
    given_up = threading.Event()
    server = serve({"hello": lambda _: given_up.wait(20)})
    with Client(timeout_s=0.1) as c, pytest.raises(Unavailable, match="no reply in"):
        c.hello()
    until(lambda: server.requests, "the server has read what was asked")
    given_up.set()
    assert len(server.requests) == 1


def test_a_service_that_does_not_start_is_named_where_pid_1_listens_for_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket takes requests all the same, so that a restart costs nobody a call."""
    given_up = threading.Event()
    server = serve({"hello": lambda _: given_up.wait(20)})
    monkeypatch.setattr(paths, "SYSTEM_SOCKET", str(server.path))
    with Client(timeout_s=0.1) as c, pytest.raises(Unavailable, match="systemctl status"):
        c.hello()
    given_up.set()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("invalid", Invalid),
        ("infeasible", Infeasible),
        ("denied", Denied),
        ("conflict", Conflict),
        ("too_large", TooLarge),
        ("colour", Internal),
    ],
)
def test_a_refusal_is_the_error_of_its_code_with_its_data(
    serve: Serve, code: str, kind: type[GpuschedError]
) -> None:
    serve({"submit": refusing(Refusal(code, "no", {"limit": 3}))})
    with Client() as c, pytest.raises(kind) as caught:
        c.submit(["true"])
    assert (caught.value.message, caught.value.data) == ("no", {"limit": 3})


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request\r\n", b"\xc1", b"\x91\x00"])
def test_a_server_that_speaks_something_else_is_named_as_such(serve: Serve, data: bytes) -> None:
    serve({"hello": refusing(Raw(data))})
    with Client() as c, pytest.raises(Internal, match="does not speak our protocol"):
        c.hello()


def test_a_reply_that_is_not_understood_is_the_daemons_bug(serve: Serve) -> None:
    serve({"job": lambda _: {"job_id": True}})
    with Client() as c, pytest.raises(Internal, match="job_id"):
        c.job(7)


def test_a_reply_with_null_id_refuses_the_request_under_way(serve: Serve) -> None:
    import msgpack

    error = {"code": "too_large", "message": "too long", "data": {}}
    serve({"hello": refusing(Raw(msgpack.packb([1, None, error, None])))})
    with Client() as c, pytest.raises(TooLarge, match="too long"):
        c.hello()


def test_what_could_not_be_sent_is_refused_before_it_is_sent(serve: Serve) -> None:
    server = serve({})
    with Client() as c:
        with pytest.raises(Invalid, match=r"^gpus: 5000 is out of range"):
            c.submit(["true"], gpus=5000)
        with pytest.raises(Invalid, match=r"^vram: 18\.5 is a float"):
            c.submit(["true"], vram=18.5)  # type: ignore[arg-type]
        with pytest.raises(Invalid, match=r"^vram: the job asks for 0 GPUs"):
            c.submit(["true"], gpus=0, vram="8G")
        with pytest.raises(Invalid, match=r"^time_limit: 0 seconds; use 1 to"):
            c.submit(["true"], time_limit=0)
        with pytest.raises(Invalid, match="give a list"):
            c.submit("true")
        with pytest.raises(TooLarge):
            c.submit(["true"], environment={f"V{index}": "x" * 100_000 for index in range(9)})
    assert server.requests == []


def test_watch_goes_on_after_a_lost_connection_from_the_last_event(serve: Serve) -> None:
    server = serve({"watch": lambda _: {"last_event_id": 3}})
    server.follow_ups = [{"event_id": number, "at_s": 1, "kind": "job"} for number in (4, 5)]
    events = iter(Client().watch())
    assert next(events).event_id == 4
    server.drop_connections()
    assert next(events).event_id == 5
    assert [params for _, params in server.requests] == [{}, {"since": 4}]


def test_a_watch_that_the_daemon_ends_with_an_error_ends_with_it(serve: Serve) -> None:
    """It is not begun again and again, each time to break at the same event."""
    refusal = {"code": "internal", "message": "a bug in gpuschedd ended this watch", "data": {}}
    said = [
        [1, 1, None, {"last_event_id": 3}],
        [2, "event", [{"event_id": 4, "at_s": 1, "kind": "job"}]],
        [1, None, refusal, None],
    ]

    def watch(_: dict[str, Any]) -> Any:
        raise Raw(b"".join(map(msgpack.packb, said)))

    server = serve({"watch": watch})
    events = iter(Client().watch())
    assert next(events).event_id == 4
    with pytest.raises(Internal, match="ended this watch"):
        next(events)
    assert len(server.requests) == 1


def test_every_other_method_returns_its_part_of_the_answer(serve: Serve) -> None:
    gpu = {"index": 0, "uuid": "GPU-0"}
    serve(
        {
            "hello": lambda _: {
                "protocol": 1, "version": "0", "mode": "user", "uid": 1, "user": "a", "admin": True,
            },
            "jobs": lambda _: {"jobs": [JOB_7], "total": 9},
            "queue": lambda _: {"jobs": [], "total": 0},
            "job": lambda _: JOB_7,
            "update": lambda _: {"outcomes": [{"job_id": 7}]},
            "gpus": lambda _: {"gpus": [gpu]},
            "usage": lambda _: {"users": [{"user": "a", "usage_gpu_s": 1}]},
            "stats": lambda _: {"counters": {"passes": 1}},
            "drain": lambda _: {"gpu": gpu},
            "resume": lambda _: {"gpu": gpu},
            "reload": lambda _: {"changed": ["shares"]},
        }
    )  # fmt: skip
    with Client() as c:
        assert c.hello().admin
        assert c.jobs([7], states=["PENDING"]).total == 9
        assert c.queue(limit=5).jobs == ()
        assert c.job(7).id == 7
        assert c.update([7], time_limit="2h")[0].job_id == 7
        assert c.gpus()[0].used_bytes is None
        assert c.usage()[0].user == "a"
        assert c.stats() == {"passes": 1}
        assert c.drain(0, "fan").uuid == c.resume("GPU-0").uuid == "GPU-0"
        assert c.reload().changed == ("shares",)


def test_an_infinite_wait_is_one_without_a_limit(serve: Serve) -> None:
    server = serve({"wait": lambda _: {"jobs": [JOB_7], "timed_out": False}})
    with Client(timeout_s=float("inf"), reconnect_s=float("inf")) as c:
        assert c.wait(7, timeout_s=float("inf")).id == 7
    assert server.requests == [("wait", {"job_ids": [7]})]


@pytest.mark.parametrize("given", [float("nan"), -1, 1e12, float("-inf"), "5", 10**400])
def test_a_time_that_is_none_is_invalid_and_named(serve: Serve, given: Any) -> None:
    server = serve({})
    with (
        Client() as c,
        pytest.raises(Invalid, match=r"timeout_s=.* is not a time to wait") as caught,
    ):
        c.wait(7, timeout_s=given)
    assert repr(given) in caught.value.message
    for name in ("timeout_s", "reconnect_s"):
        with pytest.raises(Invalid, match=f"{name}=.* is not a time to wait"):
            Client(**{name: given})
    assert server.requests == []


@pytest.mark.parametrize("given", ["7", 7.0, None, [7, "8"]])
def test_what_is_no_id_is_invalid_and_named(serve: Serve, given: Any) -> None:
    serve({})
    with Client() as c:
        for call in (c.wait, c.cancel, lambda ids: c.update(ids, hold=True)):
            with pytest.raises(Invalid, match="ids are numbers"):
                call(given)


def test_more_jobs_than_a_request_may_name_are_named_in_several(serve: Serve) -> None:
    def outcomes(params: dict[str, Any]) -> Any:
        return {"outcomes": [{"job_id": job_id} for job_id in params["job_ids"]]}

    def jobs(params: dict[str, Any]) -> Any:
        return {"jobs": [{**JOB_7, "job_id": job_id} for job_id in params["job_ids"]]}

    server = serve({"cancel": outcomes, "update": outcomes, "wait": jobs})
    ids = range(1, 2002)
    with Client() as c:
        assert [each.job_id for each in c.cancel(ids)] == list(ids)
        assert [each.job_id for each in c.update(ids, hold=True)] == list(ids)
        assert [job.id for job in c.wait(ids)] == list(ids)
    assert [len(params["job_ids"]) for _, params in server.requests] == [1000, 1000, 1] * 3


@pytest.mark.parametrize(
    ("locale", "carried"),
    [
        ({}, None),
        ({"LC_CTYPE": "C"}, b"C"),
        ({"LANG": "C"}, None),
        ({"LC_CTYPE": "C.UTF-8"}, b"C.UTF-8"),
        ({"LANG": "C.UTF-8", "LC_CTYPE": "C.UTF-8"}, b"C.UTF-8"),
        ({"LC_ALL": "C", "LC_CTYPE": "C.UTF-8"}, b"C.UTF-8"),
    ],
)
def test_a_job_gets_the_environment_that_its_submitter_had(
    serve: Serve, locale: dict[str, str], carried: bytes | None
) -> None:
    """In the C locale the interpreter sets LC_CTYPE, and every process that it starts has it."""
    server = serve({"submit": lambda _: {"job_ids": [7]}})
    given = {"PATH": os.environ["PATH"], "GPUSCHED_SOCKET": os.environ["GPUSCHED_SOCKET"], **locale}
    subprocess.run(
        [sys.executable, "-m", "gpusched_client.commands.gsub", "true"],
        env=given,
        cwd=Path(gpusched_client.__file__).parents[1],
        check=True,
        capture_output=True,
        timeout=60,
    )
    ((_, params),) = server.requests
    environment = params["jobs"][0]["environment"]
    assert environment.get(b"LC_CTYPE") == carried
    assert set(environment) - {b"LC_CTYPE"} == {name.encode() for name in given} - {b"LC_CTYPE"}


def test_what_a_program_sets_in_its_environment_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIENT_TEST", "1")
    monkeypatch.delenv("HOME", raising=False)
    environment = job_request(["true"]).environment
    assert environment[b"CLIENT_TEST"] == b"1"
    assert b"HOME" not in environment


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"argv": ["train", 0.1]}, "argv[1]: 0.1 is no text; give it as text, such as '0.1'"),
        ({"argv": [5]}, "argv[0]: 5 is no text"),
        ({"argv": ["train", None]}, "argv[1]: None is no text"),
        ({"argv": ["train\ud800"]}, "argv[0]: 'train\\ud800' is not valid Unicode"),
        ({"argv": ["train"], "environment": {"RANK": 5}}, "environment.RANK: 5 is no text"),
        ({"argv": ["train"], "environment": {5: "x"}}, "environment: 5 is no text"),
        ({"argv": ["train"], "cwd": 5}, "cwd: 5 is no text"),
        ({"argv": ["train"], "cwd": ""}, "the name of the directory is empty"),
        ({"shell": 5}, "shell: 5 is no text"),
        ({"script": "#!/bin/sh\n", "args": "abc"}, "args is 'abc'; give a list of words"),
        ({"script": "#!/bin/sh\n", "script_path": 5}, "script_path: 5 is no text"),
    ],
)
def test_what_is_no_text_is_invalid_and_named(given: Any, problem: str) -> None:
    """As numbers among the words of a command, which a program puts together."""
    with pytest.raises(Invalid) as caught:
        job_request(**given)
    assert problem in caught.value.message


def test_what_is_no_job_among_many_is_named(serve: Serve) -> None:
    server = serve({})
    jobs: Any = [job_request(["true"]), "true"]
    with Client() as client, pytest.raises(Invalid, match=r"jobs\[1\]: 'true' is no job"):
        client.submit_many(jobs)
    assert server.requests == []


def test_a_number_that_the_wire_has_no_room_for_is_named(serve: Serve) -> None:
    serve({})
    with Client() as client, pytest.raises(Invalid) as caught:
        client.wait([1, 2**70])
    text = f"job_ids[1]: {2**70} is outside 64 bits; give a smaller one"
    assert caught.value.message == text


def test_one_user_or_state_may_be_given_without_a_list(serve: Serve) -> None:
    """Text is a list of letters as well: nobody is called so."""
    server = serve({"jobs": lambda _: {"jobs": [], "total": 0}})
    with Client() as client:
        client.jobs(users="alice", states="PD")
    (_, params) = server.requests[-1]
    assert (params["users"], params["states"]) == (["alice"], ["PENDING"])
