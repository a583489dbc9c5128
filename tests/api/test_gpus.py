"""GPUs by the names that people have for them, and what a drain says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusched_client.errors import NotFound
from gpusched_client.terms import GpuUuid
from gpusched_client.wire.gpu_messages import DrainRequest, ResumeRequest
from gpuschedd.api.methods.gpus import _gpus_named, drain, resume
from gpuschedd.api.registry import Call
from tests.sim.harness import Host, call_of, services_of

PARENT = GpuUuid("GPU-5ca1ab1e-0000-0000-0000-000000000001")
OTHER = GpuUuid("GPU-5ca1ab1e-0000-0000-0000-000000000002")


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Call]:
    """A request to a host with a whole GPU and with two that are cut into slices."""
    host = Host(tmp_path, 1, gpus=5)
    whole, *slices = host.controller.state.gpus
    parents = (PARENT, PARENT, OTHER, OTHER)
    host.controller.state.gpus = (
        whole,
        *(
            replace(gpu, index=index, is_slice=True, parent_uuid=parent)
            for gpu, index, parent in zip(slices, (200, 201, 300, 301), parents, strict=True)
        ),
    )
    quiet: Any = SimpleNamespace(
        acknowledge=lambda _: None, refresh=lambda: None, used=dict, is_stale=False, trouble=None
    )
    services = services_of(host, gpu_readings=quiet, gpu_control=quiet)
    yield call_of(host, services)
    services.planner.close()
    host.controller.close()


@pytest.mark.parametrize(
    ("name", "indices"),
    [
        ("0", [0]),
        ("200", [200]),
        ("1", [200, 201]),
        (PARENT, [200, 201]),
        (OTHER, [300, 301]),
    ],
)
def test_a_gpu_in_mig_mode_is_named_by_index_and_uuid(
    call: Call, name: str, indices: list[int]
) -> None:
    uuids = _gpus_named(call, name)
    assert [gpu.index for gpu in call.state.gpus if gpu.uuid in uuids] == indices


def test_a_uuid_is_named_by_how_it_begins_where_that_is_one_gpu(call: Call) -> None:
    own = replace(call.state.gpus[-1], parent_uuid=GpuUuid("GPU-0ddba11-1"))
    call.controller.state.gpus = (*call.state.gpus[:-1], own)
    assert _gpus_named(call, "GPU-0ddba11") == (own.uuid,)
    with pytest.raises(NotFound, match="2 GPUs are named 'GPU-5ca1ab1e'"):
        _gpus_named(call, "GPU-5ca1ab1e")
    with pytest.raises(NotFound, match=f"no GPU is named '{PARENT}0'"):
        _gpus_named(call, f"{PARENT}0")


def test_a_slice_of_which_a_record_is_all_that_is_known_is_its_gpus(call: Call) -> None:
    """Before the driver was read."""
    known = [replace(gpu, is_slice=False, parent_uuid=None) for gpu in call.state.gpus]
    call.controller.state.gpus = tuple(known)
    assert _gpus_named(call, "1") == (known[1].uuid, known[2].uuid)


@pytest.mark.parametrize(("reason", "told"), [("fan", "fan, by user1001"), ("", "by user1001")])
def test_a_drain_without_a_reason_is_a_drain(call: Call, reason: str, told: str) -> None:
    """And no resume, which would put a sick GPU back into service."""
    uuid = call.state.gpus[0].uuid

    async def run() -> list[str | None]:
        looping = asyncio.ensure_future(call.controller.run())
        await drain(call, DrainRequest("0", reason))
        seen = [call.state.gpu_rows[uuid].drained]
        await resume(call, ResumeRequest("0"))
        seen.append(call.state.gpu_rows[uuid].drained)
        await call.controller.stop()
        await looping
        return seen

    assert asyncio.run(run()) == [told, None]
