"""What an attempt is given: the spec for its supervisor, the bounds of its unit."""

from __future__ import annotations

from pathlib import Path

from gpusched_client.terms import JobId, Launch
from gpuschedd.config.keys import Config
from gpuschedd.core.fairshare import Accounts
from gpuschedd.core.job import Job, Placed, advance
from gpuschedd.core.model import Policy, Request
from gpuschedd.core.queues import Queues
from gpuschedd.gpu.vendors import vendor_of
from gpuschedd.jobs.state import State
from gpuschedd.run.launchers.direct import UNFILTERED
from gpuschedd.run.spec import LaunchContext, SpecMaker
from gpuschedd.store.records import Payload

PAYLOAD = Payload((b"true",), None, b"/", 0o022, (), None, None)


def waiting_job() -> Job:
    """It asks no GPU."""
    return Job(
        job_id=JobId(7),
        uid=1000,
        user="alice",
        name="j",
        request=Request(gpus=0),
        submitted_at_s=0.0,
        submitted_sched_s=0.0,
    )


def specs_by(policy: Policy, place: Path) -> SpecMaker:
    """Of a host without GPUs."""
    config = Config()
    state = State(config, policy, Queues(policy), Accounts(policy), next_job_id=8)
    context = LaunchContext(place, "instance", False, Launch.DIRECT, True)
    return SpecMaker(state, context, vendor_of(lambda: config, place, is_system=False))


def test_an_attempt_is_given_the_grace_that_was_decided_with_it(tmp_path: Path) -> None:
    """Also where the configuration is read again between the decision and the launch."""
    specs = specs_by(Policy(kill_grace_s=1.0), tmp_path)
    placed = advance(waiting_job(), Placed((), False, 1.0, 60.0, 60.0))
    assert specs.spec(placed, PAYLOAD, ()).kill_grace_s == 60.0
    assert specs.bounds(placed, UNFILTERED).grace_s == 60.0
    assert specs.spec(waiting_job(), PAYLOAD, ()).kill_grace_s == 1.0  # of a probe
