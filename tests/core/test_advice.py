"""What a submitter hears at once."""

from __future__ import annotations

from gpusched_client.terms import JobId
from gpuschedd.core.advice import warnings_for
from gpuschedd.core.job import Job
from gpuschedd.core.model import GIB, Policy, Request
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
