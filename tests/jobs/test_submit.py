"""What a user's unfinished jobs may take together, however few they are."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpusched_client.errors import LimitReached
from gpusched_client.wire.job_messages import CancelRequest
from gpusched_client.wire.submit_messages import JobRequest, SubmitRequest
from gpuschedd.jobs import cancel, submit
from tests.sim.harness import Host

LARGE = 1_000


def _large(gpus: int = 4) -> SubmitRequest:
    job = JobRequest(argv=(b"x" * LARGE,), cwd=b"/", environment={}, gpus=gpus, hold=True)
    return SubmitRequest(jobs=(job,))


def test_large_requests_of_one_user_fill_no_disk_and_keep_out_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over a restart; room comes back with each job that is over."""
    monkeypatch.setattr(submit, "LIVE_REQUEST_BYTES_MAX", 5 * LARGE)
    asyncio.run(_fill(Host(tmp_path, 1)))


async def _fill(host: Host) -> None:
    async def submitted(uid: int) -> int:
        caller = host.caller(uid)
        result = await host.ask(lambda batch: submit.submit(batch, caller, _large(), None))
        if isinstance(result, LimitReached):
            raise result
        (job_id,) = result.job_ids
        return int(job_id)

    ids = [await submitted(1001) for _ in range(4)]
    with pytest.raises(LimitReached, match=r"user1001's unfinished jobs take .*; the limit is"):
        await submitted(1001)
    await submitted(1002)
    assert len(host.controller.state.jobs) == 5
    await host.controller.stop()
    host.controller.close()
    host.start()
    with pytest.raises(LimitReached):
        await submitted(1001)
    owner, request = host.caller(1001), CancelRequest(job_ids=(ids[0],))
    await host.ask(lambda batch: cancel.cancel(batch, owner, request))
    await submitted(1001)
    await host.controller.stop()
    host.controller.close()
