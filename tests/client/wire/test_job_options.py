"""The table of job options: one row is enough, wherever an option appears."""

from __future__ import annotations

import click
import pytest

from gpusched_client import job_request
from gpusched_client.commands.gsub import cli as gsub
from gpusched_client.errors import Invalid
from gpusched_client.submission.slurm_options import BY_NAME, Fate
from gpusched_client.wire.job_messages import JobView
from gpusched_client.wire.job_options import (
    OPTIONS,
    JobKeywords,
    JobOption,
    asked_facts,
    describe_request,
)
from gpusched_client.wire.message import specs_of
from gpusched_client.wire.submit_messages import JobRequest

GIB = 2**30


def test_every_row_is_a_typed_keyword_and_every_keyword_has_its_row() -> None:
    assert set(JobKeywords.__annotations__) == set(OPTIONS)


@pytest.mark.parametrize("row", OPTIONS.values(), ids=OPTIONS)
def test_every_row_is_a_flag_and_a_field_of_request_and_view(row: JobOption) -> None:
    flags = {flag for each in gsub.params if isinstance(each, click.Option) for flag in each.opts}
    assert flags.issuperset(row.flags)
    assert row.field in specs_of(JobRequest)
    assert row.field in specs_of(JobView)


def test_no_name_of_slurms_means_two_things() -> None:
    names = [name for row in OPTIONS.values() for name in row.slurm]
    assert len(names) == len(set(names))
    assert {BY_NAME[name].fate for name in names} == {Fate.TAKEN}


def test_keywords_become_what_travels() -> None:
    asked = job_request(["x"], gpus=2, vram="18G", memory="2G", time_limit="unlimited", output="o")
    assert (asked.gpus, asked.vram_bytes, asked.memory_bytes) == (2, 18 * GIB, 2 * GIB)
    assert (asked.time_limit_s, asked.output, asked.name) == (-1, b"o", "x")
    assert job_request(["x"], vram=2**28, time_limit=60).vram_bytes == 2**28


@pytest.mark.parametrize(
    ("keyword", "value", "hint"),
    [
        ("vram", 18, 'did you mean "18G"?'),
        ("vram", 2**28 - 1, "less than the 256 MiB"),
        ("vram", 0, "less than the 256 MiB"),
        ("vram", -1, "less than the 256 MiB"),
        ("vram", True, "less than the 256 MiB"),
        ("vram", "18", "'18' has no unit; did you mean 18G?"),
        ("vram", "1.5", "'1.5' has no unit"),
        ("vram", "255M", "less than the 256 MiB"),
        ("memory", 64, 'did you mean "64G"?'),
        ("memory", 4000, 'write it as "64G"'),
        ("memory", "4000", "'4000' has no unit; did you mean 4000M?"),
    ],
)
def test_a_size_that_nobody_can_mean_is_refused(keyword: str, value: object, hint: str) -> None:
    with pytest.raises(Invalid) as caught:
        OPTIONS[keyword].value(value)
    assert hint in caught.value.message


def test_an_unknown_keyword_is_the_callers_bug() -> None:
    with pytest.raises(TypeError, match="colour"):
        job_request(["x"], colour="red")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("keyword", "text"), [("vram", "0"), ("memory", "1K"), ("time_limit", "0")]
)
def test_an_amount_that_asks_for_nothing_is_refused(keyword: str, text: str) -> None:
    with pytest.raises(Invalid, match=repr(text)):
        OPTIONS[keyword].value(text)


def test_a_view_of_a_newer_daemon_may_hold_more_than_can_be_asked_for() -> None:
    job = {"job_id": 1, "state": "PENDING", "gpus": 5_000, "topology": "mesh", "retries": 1_000}
    view = JobView.from_wire(job)
    assert (view.gpus, view.topology, view.retries) == (5_000, "mesh", 1_000)
    with pytest.raises(Invalid, match="topology"):
        JobRequest.from_wire({"argv": ["x"], "cwd": "/", "topology": "mesh"})


def test_words_and_facts_are_the_rows() -> None:
    asked = JobRequest(cwd=b"/", argv=(b"x",), gpu_model="A100", hold=True, retries=1)
    assert describe_request(asked, None) == "1 GPU, model A100, default limit, up to 1 retry, held"
    assert ("Model", "A100") in asked_facts(asked)
    assert ("CPUs", "") in asked_facts(asked)
