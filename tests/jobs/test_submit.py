"""What a user's unfinished jobs may take together, however few they are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gpusched_client.errors import LimitReached
from gpusched_client.wire.job_messages import CancelRequest
from gpusched_client.wire.submit_messages import JobRequest, SubmitRequest
from gpuschedd.jobs import cancel, submit
from tests.sim.harness import Host

LARGE = 1_000


def test_the_digests_of_last_weeks_submissions_are_those_of_today() -> None:
    """Else a submission that is tried again after an upgrade would be one with other content."""

    def job(number: bytes, **fields: Any) -> JobRequest:
        return JobRequest(
            cwd=b"/",
            environment={b"B": b"2", b"A": b"1"},
            argv=(b"true", number),
            rlimits={"nofile": (1, 2), "core": (0, 0)},
            gpus=2,
            **fields,
        )

    several = SubmitRequest((job(b"1", name="x"), job(b"2", umask=0o77)), "id")
    single = SubmitRequest((job(b"1", name="x"),), "id")
    assert (
        submit.digest_of(several).hex()
        == "3825d994d5d925cc6843c54fcf487b48a65ac45ca69de152ac26edde63cd769d"
    )
    assert (
        submit.digest_of(single).hex()
        == "a3667e4951783524ca81bffa7d90aa12439af801ab76ca7e6d32c0ded509731e"
    )


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
