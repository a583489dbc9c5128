"""What a submitter hears at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpusched_client.terms import JobId
from gpuschedd.core.advice import hints_for, warnings_for
from gpuschedd.core.job import Job
from gpuschedd.core.lengths import Histories
from gpuschedd.core.model import (
    GIB,
    HOUR_S,
    Backfill,
    Kind,
    LengthRow,
    Policy,
    Request,
    Run,
)
from tests.support.core_builders import gpu

SLICE = gpu(100, total_bytes=10 * GIB, is_slice=True, model="A100 MIG 1g.10gb")


def job(request: Request) -> Job:
    return Job(JobId(1), 1000, "alice", "train", request, 0.0, 0.0)


def test_a_plain_job_is_told_that_it_gets_a_slice_where_there_is_nothing_else() -> None:
    """Not beside a whole card, and not to who asks for that profile."""
    (text,) = warnings_for([job(Request())], [SLICE], Policy())
    assert text == "the GPUs here are MIG slices: it gets one, of 10 GiB or more; see --mig"
    assert warnings_for([job(Request())], [SLICE, gpu(0)], Policy()) == ()
    assert warnings_for([job(Request(gpu_model="1g.10gb"))], [SLICE], Policy()) == ()


POLICY = Policy()
NO_LIMIT = "no limit: others' waits cannot be planned around it; --time sets one"


def _hints(job: Job, *hours: float, policy: Policy = POLICY, **said: Any) -> tuple[str, ...]:
    runs = tuple(Run(float(n), hour * HOUR_S) for n, hour in enumerate(hours))
    rows = [LengthRow(1000, Kind("train.py", 1), runs)] if runs else []
    asked = {"longest_s": None, "all_limited": True, **said}
    return hints_for([job], Histories(rows).view(), policy, **asked)


def _unlimited(**asks: Any) -> Job:
    return replace(job(Request(**asks)), length_key="train.py")


@pytest.mark.parametrize(
    ("hours", "told"),
    [
        ((1.9, 2.1), "train.py took 2.1 h and 1.9 h; --time 4h gets a promised start"),
        ((3.0,), "train.py took 3 h; --time 6h gets a promised start"),
        ((0.1, 0.12), "train.py took 7.2 min and 6 min; --time 15m gets a promised start"),
        ((20.0, 30.0), "train.py took 30 h and 20 h; --time 2d6h gets a promised start"),
        ((0.05, 2.0), "train.py took 2 h and 3 min; --time 3h gets a promised start"),
        ((0.0, 0.0), "train.py took 0 s and 0 s; --time 5m gets a promised start"),
    ],
)
def test_a_job_without_limit_hears_which_limit_its_last_runs_suggest(
    hours: tuple[float, ...], told: str
) -> None:
    assert _hints(_unlimited(), *hours) == (told,)


def test_what_a_limit_brings_is_not_told_where_it_would_not() -> None:
    """Beside jobs without limit no start is promised; nobody may ask for more than the host allows;
    who runs on no GPU, has a limit or an estimate, is in nobody's way; strict order plans nothing.
    """
    assert _hints(_unlimited()) == (NO_LIMIT,)
    assert _hints(_unlimited(gpus=2), 1.0) == (
        "train.py took 1 h; --time 2h gets a promised start",
    )
    (text,) = _hints(_unlimited(), 2.0, all_limited=False)
    assert text == "train.py took 2 h; --time 4h lets it start in gaps before others"
    (text,) = _hints(_unlimited(), 2.0, policy=Policy(promise_within_s=0.0))
    assert text == "train.py took 2 h; --time 4h lets it start in gaps before others"
    (text,) = _hints(_unlimited(), 20.0, longest_s=24 * HOUR_S)
    assert text == "train.py took 20 h; --time 24h gets a promised start"
    assert _hints(_unlimited(), 30.0, longest_s=24 * HOUR_S) == (NO_LIMIT,)
    assert _hints(_unlimited(gpus=0)) == ()
    assert _hints(_unlimited(estimate_s=60.0)) == ()
    assert _hints(_unlimited(time_limit_s=60.0), 1.0) == ()
    assert _hints(_unlimited(), policy=Policy(backfill=Backfill.OFF)) == ()
    assert _hints(_unlimited(), 1.0, policy=Policy(learn_lengths=False)) == (NO_LIMIT,)


def test_many_kinds_of_jobs_make_few_lines() -> None:
    jobs = [replace(job(Request()), length_key=f"train{n}.py") for n in range(1_000)]
    rows = [LengthRow(1000, Kind(f"train{n}.py", 1), (Run(1.0, 60.0),)) for n in range(1_000)]
    known = Histories(rows).view()
    texts = hints_for(jobs, known, POLICY, longest_s=None, all_limited=True)
    assert len(texts) == 6
    assert texts[0] == "train0.py took 1 min; --time 5m gets a promised start"
    assert texts[-1] == "995 more kinds of jobs have no limit"
