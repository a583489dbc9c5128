"""Messages: strict requests with the path in every refusal, tolerant responses."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from typing import Any

import pytest

from gpusched_client.errors import GpuschedError, Invalid, TooLarge
from gpusched_client.terms import JobState
from gpusched_client.wire import framing
from gpusched_client.wire.catalog import METHODS, read_request
from gpusched_client.wire.fields import InvalidValue
from gpusched_client.wire.hello_messages import Hello
from gpusched_client.wire.job_messages import JobView, UpdateRequest
from gpusched_client.wire.job_options import OPTIONS, JobOptions
from gpusched_client.wire.message import changed
from gpusched_client.wire.submit_messages import JobRequest, SubmitRequest, SubmitResult

OPTION_FIELDS = [row.field for row in OPTIONS.values()]
JOB: dict[str, Any] = {"argv": [b"true"], "cwd": b"/", "environment": {}}


def refused(params: object, method: str = "submit") -> GpuschedError:
    with pytest.raises((Invalid, TooLarge)) as caught:
        read_request(method, params)
    return caught.value


@pytest.mark.parametrize("name", ["lr=0.1 bs=32", "fold 2/5 (ä)", "訓練", "x" * 256, "-J"])
def test_a_name_is_any_text_that_a_table_can_show(name: str) -> None:
    request = read_request("submit", {"jobs": [{**JOB, "name": name}]})
    assert isinstance(request, SubmitRequest)
    assert request.jobs[0].name == name


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"colour": 1}, "jobs[0].colour"),
        ({b"argv": []}, "jobs[0].argv"),
        ({"gpus": True}, "jobs[0].gpus"),
        ({"gpus": 1.0}, "jobs[0].gpus"),
        ({"gpus": float("nan")}, "jobs[0].gpus"),
        ({"gpus": "1"}, "jobs[0].gpus"),
        ({"gpus": -1}, "jobs[0].gpus"),
        ({"gpus": 1025}, "jobs[0].gpus"),
        ({"vram_bytes": 2**64 - 1}, "jobs[0].vram_bytes"),
        ({"vram_bytes": 0}, "jobs[0].vram_bytes"),
        ({"vram_bytes": 1, "gpus": 0}, "jobs[0].vram_bytes"),
        ({"gpu_model": "A\0B"}, "jobs[0].gpu_model"),
        ({"gpu_model": "A\udcffB"}, "jobs[0].gpu_model"),
        ({"name": "two\nlines"}, "jobs[0].name"),
        ({"name": "red\x1b[31m"}, "jobs[0].name"),
        ({"name": "over\u202eturned"}, "jobs[0].name"),
        ({"name": " "}, "jobs[0].name"),
        ({"name": ""}, "jobs[0].name"),
        ({"cwd": b"relative"}, "jobs[0].cwd"),
        ({"cwd": b"/a\0b"}, "jobs[0].cwd"),
        ({"cwd": None}, "jobs[0].cwd"),
        ({"argv": []}, "jobs[0].argv"),
        ({"argv": [b""]}, "jobs[0].argv[0]"),
        ({"argv": [b"true", 7]}, "jobs[0].argv[1]"),
        ({"argv": [b"true", b"a\0"]}, "jobs[0].argv[1]"),
        ({"argv": "true"}, "jobs[0].argv"),
        ({"argv": None}, "jobs[0]"),
        ({"shell": b"true"}, "jobs[0]"),
        ({"args": [b"x"]}, "jobs[0].args"),
        ({"environment": {b"A=B": b""}}, "jobs[0].environment"),
        ({"environment": {b"": b""}}, "jobs[0].environment"),
        ({"environment": {b"A": b"\0"}}, "jobs[0].environment.A"),
        ({"environment": {b"A": b"", "A": b""}}, "jobs[0].environment"),
        ({"environment": {b"A": InvalidValue("an extension type")}}, "jobs[0].environment.A"),
        ({"environment": InvalidValue("the key 'A' is there twice")}, "jobs[0].environment"),
        ({"umask": 0o1000}, "jobs[0].umask"),
        ({"rlimits": {"colour": [1, 1]}}, "jobs[0].rlimits"),
        ({"rlimits": {"nofile": [1]}}, "jobs[0].rlimits.nofile"),
        ({"rlimits": {"nofile": [1, -2]}}, "jobs[0].rlimits.nofile[1]"),
        ({"time_limit_s": 0}, "jobs[0].time_limit_s"),
        ({"time_limit_s": -2}, "jobs[0].time_limit_s"),
        ({"topology": "ring"}, "jobs[0].topology"),
        ({"hold": 1}, "jobs[0].hold"),
        ({"nice": 1001}, "jobs[0].nice"),
    ],
)
def test_a_malformed_job_is_invalid_with_the_path_of_the_field(
    change: dict[Any, Any], path: str
) -> None:
    error = refused({"jobs": [{**JOB, **change}]})
    assert error.code == "invalid"
    assert error.data["path"] == path


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"argv": [b"x" * 131_072]}, "jobs[0].argv[0]"),
        ({"argv": [b"x"] * 65_537}, "jobs[0].argv"),
        ({"environment": {b"A": b"x" * 131_070}}, "jobs[0].environment.A"),
        ({"argv": [b"x" * 131_000] * 7}, "jobs[0]"),
        ({"argv": None, "script": b"x" * (768 * 1024 + 1)}, "jobs[0].script"),
        ({"cwd": b"/" * 4097}, "jobs[0].cwd"),
    ],
)
def test_a_job_over_a_limit_is_too_large_with_the_limit(change: dict[str, Any], path: str) -> None:
    error = refused({"jobs": [{**JOB, **change}]})
    assert error.code == "too_large"
    assert error.data["path"] == path
    assert error.data["value"] > error.data["limit"]


@pytest.mark.parametrize(
    ("method", "params", "path"),
    [
        ("submit", {}, "jobs"),
        ("submit", [], ""),
        ("submit", {"jobs": []}, "jobs"),
        ("submit", {"jobs": [JOB], "common": 7}, "common"),
        ("submit", {"jobs": [JOB], "common": {"colour": 7}}, "common.colour"),
        ("submit", {"jobs": [JOB], "submission_id": "a b"}, "submission_id"),
        ("submit", {"jobs": [JOB], "user": "root"}, "user"),
        ("submit", {"jobs": [{"argv": [b"true"], "environment": {}}]}, "jobs[0].cwd"),
        ("cancel", {"job_ids": []}, "job_ids"),
        ("cancel", {"job_ids": [0]}, "job_ids[0]"),
        ("cancel", {"job_ids": [1], "signal": 65}, "signal"),
        ("update", {"job_ids": [1]}, ""),
        ("wait", {"job_ids": [1], "timeout_s": float("inf")}, "timeout_s"),
        ("jobs", {"states": ["SLEEPING"]}, "states[0]"),
        ("hello", {"x": 1}, "x"),
        ("explode", {}, "method"),
    ],
)
def test_a_malformed_request_is_invalid_with_the_path(
    method: str, params: object, path: str
) -> None:
    assert refused(params, method).data["path"] == path


def test_common_fields_lie_beneath_each_job_and_are_read_once() -> None:
    request = SubmitRequest.from_wire(
        {
            "common": {"cwd": b"/", "environment": {b"A": b"1"}, "umask": 0o77},
            "jobs": [{"argv": [b"a"]}, {"argv": [b"b"], "environment": {}}],
        }
    )
    assert [job.cwd for job in request.jobs] == [b"/", b"/"]
    assert [job.environment for job in request.jobs] == [{b"A": b"1"}, {}]


def test_a_submission_of_many_sends_shared_fields_once_and_reads_back_the_same() -> None:
    jobs = tuple(
        JobRequest(cwd=b"/", environment={b"A": b"1"}, argv=(word,)) for word in (b"a", b"b")
    )
    request = SubmitRequest(jobs, "id-1")
    wire = request.to_wire()
    assert wire["common"] == {"cwd": b"/", "environment": {b"A": b"1"}}
    assert "environment" not in wire["jobs"][0]
    assert SubmitRequest.from_wire(wire) == request


def test_all_that_the_jobs_agree_on_is_sent_once_and_nothing_else() -> None:
    common: dict[str, Any] = {"cwd": b"/", "gpus": 2, "output": b"log", "checked": True}
    jobs = tuple(JobRequest(**common, argv=(b"a",), nice=nice) for nice in (0, 1))
    wire = SubmitRequest(jobs).to_wire()
    assert wire == {"common": {**common, "argv": [b"a"]}, "jobs": [{}, {"nice": 1}]}
    assert SubmitRequest.from_wire(wire).jobs == jobs


def test_jobs_times_a_large_common_environment_are_too_large_together() -> None:
    common = {"cwd": b"/", "environment": {b"A%d" % index: b"x" * 100_000 for index in range(7)}}
    error = refused({"common": common, "jobs": [{"argv": [b"true"]}] * 200})
    assert error.code == "too_large"


def test_byte_strings_may_come_as_text_with_any_bytes() -> None:
    job = JobRequest.from_wire({**JOB, "argv": ["a\udcffb", b"\xfe", "", "-x\n"]})
    assert job.argv == (b"a\xffb", b"\xfe", b"", b"-x\n")


def test_unlimited_is_minus_one_and_null_is_the_default() -> None:
    assert JobRequest.from_wire({**JOB, "time_limit_s": -1}).time_limit_s == -1
    assert JobRequest.from_wire({**JOB, "time_limit_s": None}).time_limit_s is None
    assert UpdateRequest.from_wire({"job_ids": [1], "time_limit_s": -1}).time_limit_s == -1


def test_responses_tolerate_what_a_newer_daemon_adds_and_send_every_known_field() -> None:
    view = JobView.from_wire({"job_id": 7, "state": "RUNNING", "colour": "red"})
    assert view.state is JobState.RUNNING
    assert view.exit_code is None
    assert view.to_wire()["exit_code"] is None
    assert JobView.from_wire(view.to_wire()) == view


def test_a_message_is_frozen_and_can_be_replaced() -> None:
    result = SubmitResult((1,))
    with pytest.raises(FrozenInstanceError):
        result.job_ids = (2,)  # type: ignore[misc]
    assert replace(result, job_ids=(2,)).job_ids == (2,)
    assert result == SubmitResult((1,))
    assert repr(result).startswith("SubmitResult(job_ids=(1,)")


def test_each_message_shows_dataclasses_its_own_fields() -> None:
    """Those of a group that it shares are not taken for all of its fields."""
    assert [entry.name for entry in fields(JobOptions)] == OPTION_FIELDS
    names = [entry.name for entry in fields(JobView)]
    assert names[:2] == ["job_id", "state"]
    assert {*OPTION_FIELDS, "events"} < set(names)
    assert is_dataclass(Hello)
    assert not fields(Hello)


def test_a_changed_message_is_what_replace_makes_of_it() -> None:
    view = JobView.from_wire({"job_id": 7, "state": "RUNNING", "nice": 3})
    assert changed(view, nice=4, cause="exit") == replace(view, nice=4, cause="exit")
    assert changed(view) == view
    with pytest.raises(KeyError):
        changed(view, colour="red")


def test_a_constructor_refuses_unknown_and_missing_fields() -> None:
    with pytest.raises(TypeError, match="colour"):
        SubmitResult((1,), colour=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="needs job_ids"):
        SubmitResult()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes"):
        Hello(1)


@pytest.mark.parametrize("method", METHODS)
def test_every_request_at_its_defaults_survives_the_wire(method: str) -> None:
    samples: dict[str, dict[str, Any]] = {
        "submit": {"jobs": [JOB]},
        "job": {"job_id": 1},
        "why": {"job_id": 1},
        "cancel": {"job_ids": [1]},
        "update": {"job_ids": [1], "nice": 5},
        "wait": {"job_ids": [1, 2], "timeout_s": 1.5},
        "drain": {"gpu": "0", "reason": "fan"},
        "gpus_release": {"reason": "mig"},
        "resume": {"gpu": "0"},
        "top": {"job_id": 1},
    }
    request = read_request(method, samples.get(method, {}))
    data = framing.encode_request(1, method, request.to_wire())
    (message,) = framing.Decoder().feed(data)
    assert isinstance(message, framing.RequestFrame)
    assert read_request(message.method, message.params) == request
