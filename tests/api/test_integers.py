"""An odd number in a legal field is refused at the door, or does what it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpusched_client.wire.catalog import METHODS
from gpusched_client.wire.fields import IntegerReader
from gpusched_client.wire.message import specs_of
from gpusched_client.wire.submit_messages import JobRequest
from tests.api.test_server import JOB, call, raw
from tests.support.daemon import DaemonProcess

NEEDED: dict[str, dict[str, Any]] = {
    "submit": {"jobs": [JOB]},
    "cancel": {"job_ids": [1]},
    "update": {"job_ids": [1]},
    "wait": {"job_ids": [1]},
    "drain": {"gpu": 0, "reason": "x"},
    "gpus_release": {"reason": "x"},
}
ODD = (-(2**63), -(2**31), -2, -1, 0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)


def _integers() -> Iterator[tuple[str, str, int, int]]:
    """Each integer of a request, with its bounds."""
    for name, request in METHODS.items():
        for spec in specs_of(request).values():
            if isinstance(spec.reader, IntegerReader):
                yield name, spec.name, spec.reader.low, spec.reader.high


def _job_integers() -> Iterator[tuple[str, int, int]]:
    for spec in specs_of(JobRequest).values():
        if isinstance(spec.reader, IntegerReader):
            yield spec.name, spec.reader.low, spec.reader.high


@pytest.mark.parametrize(("method", "field", "low", "high"), list(_integers()))
def test_no_integer_of_a_request_is_our_bug(
    daemon: DaemonProcess, method: str, field: str, low: int, high: int
) -> None:
    with daemon.client() as client:
        client.submit(["true"], hold=True)
    numbers = {*ODD, low, max(low - 1, -(2**63)), high, min(high + 1, 2**64 - 1)}
    for number in sorted(numbers):
        params = {**NEEDED.get(method, {}), field: number}
        with raw(daemon) as connected:
            *_, error, _ = call(connected, 0, 2, method, [params])
        code = None if error is None else error["code"]
        assert code != "internal", (number, error)
        if not low <= number <= high:
            assert code == "invalid"
            assert str(number) in error["message"]
    assert "Traceback" not in daemon.log_text()


def test_the_pieces_of_a_backup_have_an_end(daemon: DaemonProcess) -> None:
    """An offset is handed to the system as it is, so it has a bound."""
    with raw(daemon) as connected:
        for offset in (2**63 - 1, 2**62, 2**40):
            *_, error, _ = call(connected, 0, 1, "backup", [{"offset": offset}])
            assert error["code"] == "invalid"
            assert str(offset) in error["message"]
        *_, error, result = call(connected, 0, 2, "backup", [{}])
        assert error is None
        assert result["offset"] == 0


@pytest.mark.parametrize(("field", "low", "high"), list(_job_integers()))
def test_a_job_at_the_bounds_of_a_number_is_told_what_is_wrong_or_runs(
    daemon: DaemonProcess, field: str, low: int, high: int
) -> None:
    with raw(daemon) as connected:
        for number in {low, high}:
            *_, error, result = call(
                connected, 0, 1, "submit", [{"jobs": [{**JOB, field: number}]}]
            )
            if error is not None:
                assert error["code"] in {"infeasible", "invalid", "denied"}
                continue
            (job_id,) = result["job_ids"]
            *_, result = call(connected, 0, 2, "wait", [{"job_ids": [job_id], "timeout_s": 20}])
            assert result["jobs"][0]["cause"] in (None, "exit", "infeasible"), result["jobs"][0]


@pytest.mark.parametrize(
    "change",
    [
        {"affinity": [65_535]},
        {"rlimits": {"nofile": [2**63 - 1, 2**63 - 1]}},
        {"rlimits": {"cpu": [-1, 2**62]}},
        {"rlimits": {"nice": [10, 5]}},
    ],
)
def test_numbers_that_this_host_cannot_have_hold_as_far_as_it_can(
    daemon: DaemonProcess, change: dict[str, Any]
) -> None:
    with raw(daemon) as connected:
        *_, error, result = call(connected, 0, 1, "submit", [{"jobs": [{**JOB, **change}]}])
        assert error is None
        ended = call(connected, 0, 2, "wait", [{"job_ids": result["job_ids"]}])[3]["jobs"][0]
        assert (ended["state"], ended["exit_code"]) == ("COMPLETED", 0), ended
        *_, error, _ = call(connected, 0, 3, "submit", [{"jobs": [{**JOB, "affinity": [65_536]}]}])
        assert error["code"] == "invalid"
