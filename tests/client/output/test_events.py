"""A job's history as sentences, in the time format of all the rest."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from gpusched_client.output.events import sentence
from gpusched_client.output.text import time_text
from gpusched_client.wire.job_messages import JobEvent

GIB = 2**30


@pytest.mark.parametrize(
    ("kind", "data", "told"),
    [
        ("job_submitted", {"gpus": 2, "vram_bytes": 18 * GIB}, "submitted: 2 GPUs, 18 GiB each"),
        ("job_submitted", {"gpus": 0, "vram_bytes": None}, "submitted: no GPU"),
        ("job_held", {"by": "root", "reason": "later"}, "held by root: later"),
        ("job_released", {}, "released"),
        ("job_released", {"place": "directory /d"}, "goes on: directory /d is there again"),
        (
            "job_updated",
            {"changed": ["nice 5", "name x"], "by": "ann"},
            "changed by ann: nice 5, name x",
        ),
        ("start_promised", {"start_by_s": 1_767_225_600}, "start promised by 00:00:00"),
        ("promise_ended", {"outcome": "kept", "exception": None}, "the promise was kept"),
        (
            "promise_ended",
            {"outcome": "lost", "exception": "gpu_drained"},
            "the promise was lost: gpu drained",
        ),
        (
            "promise_ended",
            {"outcome": "lost", "exception": "gpu_drained", "why": "GPU 3 drained (fan)"},
            "the promise was lost: GPU 3 drained (fan)",
        ),
        ("job_placed", {"gpus": [0, 3]}, "placed on GPU 0, 3"),
        ("job_placed", {"gpus": []}, "placed without a GPU"),
        (
            "job_placed",
            {"gpus": [1], "rule": "first", "rank": 1},
            "placed on GPU 1: first in order",
        ),
        (
            "job_placed",
            {"gpus": [1], "rule": "gap", "head": 5, "head_start_s": 1_767_225_600},
            "placed on GPU 1: in the gap before job 5's start at 00:00:00: "
            "its limit ends it by then",
        ),
        ("job_started", {}, "started"),
        (
            "job_near_limit",
            {"limit": "7200 s", "used": 0.9},
            "90 % of its time limit of 2 h is used",
        ),
        (
            "job_over_declaration",
            {"declared_bytes": GIB, "held_bytes": 2 * GIB},
            "holds 2 GiB of a GPU now (its use and a buffer) and had declared 1 GiB",
        ),
        ("cancel_requested", {"by": "ann", "reason": "typo"}, "cancel requested by ann: typo"),
        ("signal_requested", {"signal": 10}, "SIGUSR1 sent"),
        ("signal_requested", {"signal": 99}, "signal 99 sent"),
        ("job_completing", {}, "its main process ended"),
        ("job_requeued", {"error": "directory /d: gone"}, "queued again: directory /d: gone"),
        (
            "job_retried",
            {
                "retry": 1,
                "retries": 2,
                "peak_bytes": 8 * GIB,
                "before_bytes": 8 * GIB,
                "vram_bytes": 10 * GIB,
            },
            "out of GPU memory at 8 GiB; retry 1 of 2 with 10 GiB instead of 8 GiB",
        ),
        ("job_ended", {"state": "FAILED", "code": 3, "signal": None}, "ended: FAILED, exit code 3"),
        ("job_ended", {"state": "CANCELLED", "code": 0, "signal": 15}, "ended: CANCELLED, SIGTERM"),
        ("job_ended", {"state": "CANCELLED", "by": "ann"}, "ended by ann: CANCELLED"),
        ("job_dreamt", {"of": "sheep"}, "job dreamt  of sheep"),
    ],
)
def test_each_event_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, kind: str, data: dict[str, Any], told: str
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    text = ", ".join(f"{name} {value}" for name, value in data.items())
    event = JobEvent(at_s=1_767_225_600.0, kind=kind, text=text, data=data)
    clock = partial(time_text, now_s=1_767_225_601.0, exact=True)
    assert sentence(event, clock) == told
    monkeypatch.undo()
    time.tzset()


def test_what_an_older_daemon_tells_stays_as_it_is() -> None:
    event = JobEvent(at_s=0.0, kind="job_ended", text="state FAILED, code 3")
    assert sentence(event, str) == "job ended  state FAILED, code 3"


def test_times_are_local_with_seconds_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    now_s = 1_767_250_000.0  # 2026-01-01 06:46:40 UTC
    assert time_text(now_s, now_s, exact=True) == "01:46:40"
    assert time_text(now_s, now_s) == "01:46"
    assert time_text(now_s - 86_400, now_s, exact=True) == "2025-12-31 01:46:40"
    monkeypatch.undo()
    time.tzset()
