"""Which GPUs the daemon's own environment leaves it."""

from __future__ import annotations

import pytest

from gpuschedd.config.keys import Config
from gpuschedd.gpu.vendors import visible_gpus, with_visible_gpus


@pytest.mark.parametrize(
    ("told", "gpus"),
    [
        ("0,2", (0, 2)),
        (" 1 ", (1,)),
        ("GPU-1234,MIG-5", ("GPU-1234", "MIG-5")),
        ("1,-1,0", (1,)),
        ("", ("none",)),
        ("-1", ("none",)),
        ("NoDevFiles", ("none",)),
    ],
)
def test_it_is_read_as_cuda_does(told: str, gpus: tuple[int | str, ...]) -> None:
    """Up to the first entry that is no GPU; no GPU is not all of them."""
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": told}) == gpus
    assert visible_gpus({}) == ()


def test_it_means_real_gpus_and_the_configuration_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert with_visible_gpus(Config(gpus=(0,))).gpus == (0,)
    assert with_visible_gpus(Config(simulate="4x24G")).gpus == ()
