"""Admission: refused at the door with numbers and the cure, or normalised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpusched_client.errors import Infeasible, Invalid
from gpusched_client.terms import UNKNOWN_MODEL
from gpusched_client.units import MIB
from gpuschedd.core.admission import admit, seen
from gpuschedd.core.model import (
    GIB,
    AdmittedRequest,
    GpuState,
    Inventory,
    Policy,
    Request,
    Topology,
)
from gpuschedd.core.timeline import model_matches
from tests.support.core_builders import MARGIN, gpu, gpus

POLICY = Policy()
FOUR = seen(Inventory(), gpus(4))
MIXED = seen(
    Inventory(),
    [
        gpu(0),
        gpu(1, model="small", total_bytes=24 * GIB),
        gpu(2, model="small", total_bytes=24 * GIB),
    ],
)


def refused(request: Request, inventory: Inventory = FOUR, policy: Policy = POLICY) -> str:
    """The message of the refusal."""
    with pytest.raises(Infeasible) as caught:
        admit(request, inventory, policy)
    return caught.value.message


def test_more_gpus_than_were_ever_seen_is_refused_with_both_numbers() -> None:
    text = refused(Request(5))
    assert text == "asks 5 GPUs; this host has 4. Lower --gpus."


def test_more_memory_than_any_card_has_is_refused_with_the_cure() -> None:
    text = refused(Request(1, vram_bytes=96 * GIB))
    assert text == "asks 96 GiB on one GPU; the largest here has 80 GiB. Lower --vram."


def test_enough_cards_but_too_few_of_that_size() -> None:
    text = refused(Request(2, vram_bytes=40 * GIB), MIXED)
    assert "this host has 1 of that size" in text


def test_request_without_room_for_the_margin_becomes_whole_and_says_so() -> None:
    admitted = admit(Request(1, vram_bytes=80 * GIB - MARGIN + 1), FOUR, POLICY)
    assert admitted.request.vram_bytes is None
    assert admitted.request.card_bytes == 80 * GIB - MARGIN + 1
    assert admitted.note is not None
    assert "takes 1 whole GPU" in admitted.note
    fits = Request(1, vram_bytes=80 * GIB - MARGIN)
    assert admit(fits, FOUR, POLICY) == AdmittedRequest(fits)


def test_full_small_card_is_shared_where_a_larger_one_has_room() -> None:
    asked = Request(1, vram_bytes=24 * GIB)
    assert admit(asked, MIXED, POLICY).request == asked


def test_largest_inventory_ever_seen_decides() -> None:
    """A lost or drained GPU makes a job wait, not infeasible."""
    fewer = seen(FOUR, [gpu(0), gpu(1, state=GpuState.LOST)])
    assert admit(Request(4), fewer, POLICY).request == Request(4)


def test_with_no_inventory_yet_jobs_are_accepted_and_wait() -> None:
    asked = Request(64, vram_bytes=10**15)
    assert admit(asked, Inventory(), POLICY).request == asked


def test_model_that_is_not_here_is_refused_with_those_that_are() -> None:
    assert "this host has sim, small" in refused(Request(1, gpu_model="H100"), MIXED)
    later = seen(MIXED, gpus(4))  # the small cards are gone, and may come back
    assert "this host has sim. Change" in refused(Request(1, gpu_model="H100"), later)
    unopened = seen(MIXED, [*gpus(4), gpu(4, model=UNKNOWN_MODEL, total_bytes=0)])
    assert "this host has sim. Change" in refused(Request(1, gpu_model="H100"), unopened)
    assert admit(Request(1, gpu_model="small"), later, POLICY).request.gpus == 1
    assert admit(Request(2, gpu_model="SMALL"), MIXED, POLICY).request.gpus == 2
    assert "this host has 2 of model small" in refused(Request(3, gpu_model="small"), MIXED)


def test_nvlink_set_larger_than_any_island_is_refused() -> None:
    linked = seen(Inventory(), [gpu(n, island=n // 2) for n in range(4)])
    asked = Request(3, topology=Topology.NVLINK)
    assert "the largest such set here has 2" in refused(asked, linked)
    assert admit(replace(asked, gpus=2), linked, POLICY).note is None
    apart = seen(Inventory(), gpus(4))
    assert "joined by NVLink; none are so here. Leave --topology out" in refused(asked, apart)


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        (Request(-1), "gpus"),
        (Request(0, vram_bytes=GIB), "vram_bytes"),
        (Request(1, vram_bytes=0), "vram_bytes"),
        (Request(1, time_limit_s=0.0), "time_limit_s"),
        (Request(1, time_limit_s=float("nan")), "time_limit_s"),
    ],
)
def test_malformed_requests_name_the_field(request_: Request, path: str) -> None:
    with pytest.raises(Invalid) as caught:
        admit(request_, FOUR, POLICY)
    assert caught.value.data["path"] == path


def test_cpu_only_jobs_are_always_feasible() -> None:
    assert admit(Request(0), FOUR, POLICY).request.gpus == 0


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (24 * GIB, "asks 24 GiB on one GPU; the largest here has 23.5 GiB"),
        (24079 * MIB + 1, "asks 25248661505 bytes on one GPU"),
        (24080 * MIB, "asks 24080 MiB on one GPU; the largest here has 24079 MiB"),
    ],
)
def test_two_sizes_that_round_alike_are_told_apart(asked: int, text: str) -> None:
    """497 MiB of 24 GiB are the driver's; what can be granted is what counts."""
    card = gpu(0, total_bytes=24 * GIB, reserved_bytes=497 * MIB)
    said = refused(Request(1, vram_bytes=asked), seen(Inventory(), [card]))
    assert text in said
    assert "beside what is the driver's. Lower --vram." in said


A100, SMALL, MEDIA = (
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb+me",
)


@pytest.mark.parametrize(
    ("wanted", "models"),
    [
        ("a100", [A100, SMALL, MEDIA]),
        ("1g.10gb", [SMALL]),
        ("MIG 1g.10gb", [SMALL]),
        ("mig 1G.10GB", [SMALL]),
        ("1g.10gb+me", [MEDIA]),
        ("MIG 1g.10gb+me", [MEDIA]),
        ("2g.20gb", []),
        ("SXM4", [A100, SMALL, MEDIA]),
    ],
)
def test_a_profile_is_a_whole_word_and_a_model_a_part_of_a_name(
    wanted: str, models: list[str]
) -> None:
    assert [each for each in (A100, SMALL, MEDIA) if model_matches(wanted, each)] == models
    assert not model_matches("2g.20gb", "NVIDIA A100 MIG 1c.2g.20gb")


def test_who_asks_for_a_profile_that_is_not_here_is_told_the_option() -> None:
    assert "Change --mig." in refused(Request(1, gpu_model="MIG 1g.10gb"))


def test_several_slices_of_a_profile_are_refused_with_how_many_there_are() -> None:
    """They are there, and more of them would not help: one process can use one."""
    host = seen(Inventory(), [gpu(0), gpu(100, model=SMALL, is_slice=True)])
    text = refused(Request(3, gpu_model="MIG 1g.10gb"), host)
    assert "has 0 whole GPUs and 1 MIG slice of model MIG 1g.10gb, and one process" in text
    assert text.endswith("Submit a job for each slice.")
