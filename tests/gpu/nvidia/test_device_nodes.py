"""Which device nodes a job's unit may open."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuschedd.gpu.nvidia import device_nodes
from gpuschedd.gpu.source import DeviceMissing

GROUPS = """Character devices:
  1 mem
  4 /dev/vc/0
  4 tty
 10 misc
136 pts
195 nvidia
195 nvidiactl
237 nvidia-uvm
238 nvidia-caps

Block devices:
  7 loop
259 blkext
"""

MakeNode = Callable[[str, int, int], None]

pytestmark = pytest.mark.root  # who may make device nodes


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    """A /dev of the test's own."""
    (tmp_path / "dev" / "nvidia-caps").mkdir(parents=True)
    (tmp_path / "devices").write_text(GROUPS)
    return tmp_path / "dev"


@pytest.fixture
def node(dev: Path) -> MakeNode:
    """Makes a character device."""

    def make(name: str, major: int, minor: int) -> None:
        os.mknod(dev / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))

    return make


def allowed(dev: Path, *minors: int | None, capabilities: tuple[str, ...] = ()) -> set[str] | None:
    here = dev.parent
    found = device_nodes.allowed(minors, capabilities, dev, here / "devices", here / "mig-minors")
    return None if found is None else set(found)


def test_no_folder_that_others_can_write_is_walked(dev: Path, node: MakeNode) -> None:
    """As /dev/shm and /dev/mqueue: what is in there is not the host's word."""
    for name, mode, uid in (("shm", 0o1777, 0), ("ours", 0o775, 0), ("hers", 0o755, 3001)):
        (dev / name).mkdir()
        (dev / name / "below").mkdir()
        node(f"{name}/fake", 195, 9)
        node(f"{name}/below/fake", 195, 9)
        (dev / name).chmod(mode)
        os.chown(dev / name, uid, 0)
    (dev / "link").symlink_to(dev / "shm")
    (dev / "sound").mkdir()
    (dev / "sound").chmod(0o755)
    node("sound/odd", 195, 8)
    node("nvidia0", 195, 0)
    found = allowed(dev, 0)
    assert found is not None
    assert {value for value in found if "fake" in value} == set()
    assert f"{dev}/sound/odd rw" in found


def test_without_gpu_nodes_there_is_nothing_to_filter(dev: Path) -> None:
    assert allowed(dev, 0) is None


def test_all_but_the_gpus_that_were_not_granted_stays_open(dev: Path, node: MakeNode) -> None:
    for minor in range(3):
        node(f"nvidia{minor}", 195, minor)
    node("nvidiactl", 195, 255)
    node("nvidia-modeset", 195, 254)
    node("nvidia-uvm", 237, 0)
    assert allowed(dev, 1) == {
        *("char-mem rw", "char-/dev/vc/0 rw", "char-tty rw", "char-misc rw", "char-pts rw"),
        *("char-nvidia-uvm rw", "block-loop rw", "block-blkext rw"),
        *(f"{dev}/nvidiactl rw", f"{dev}/nvidia-modeset rw", f"{dev}/nvidia1 rw"),
    }


def test_a_slice_opens_its_own_rights_and_no_others(dev: Path, node: MakeNode) -> None:
    """All slices of a GPU share its node: what tells them apart are the capability nodes."""
    node("nvidia0", 195, 0)
    for number in (2, 21, 22, 30, 31):
        node(f"nvidia-caps/nvidia-cap{number}", 238, number)
    own = tuple(f"{dev}/nvidia-caps/nvidia-cap{number}" for number in (21, 22))
    found = allowed(dev, 0, capabilities=own)
    assert found is not None
    assert {value for value in found if "caps" in value} == {f"{path} rw" for path in own}
    with pytest.raises(DeviceMissing, match="nvidia-cap99 does not exist"):
        allowed(dev, 0, capabilities=(f"{dev}/nvidia-caps/nvidia-cap99",))


def test_rights_that_are_to_no_slice_are_as_for_any_user(dev: Path, node: MakeNode) -> None:
    """A job on whole GPUs reaches the driver's own capability nodes, and those of no slice."""
    node("nvidia0", 195, 0)
    for number in (1, 2, 3, 4):
        node(f"nvidia-caps/nvidia-cap{number}", 238, number)
    (dev.parent / "mig-minors").write_text(
        "config 1\nmonitor 2\ngpu0/gi1/access 3\ngpu0/gi1/ci0/access 4\n"
    )
    found = allowed(dev, 0)
    assert found is not None
    assert {value for value in found if "caps" in value} == {
        f"{dev}/nvidia-caps/nvidia-cap1 rw",
        f"{dev}/nvidia-caps/nvidia-cap2 rw",
    }


def test_a_node_of_no_listed_group_stays_open(dev: Path, node: MakeNode) -> None:
    """A module that is not loaded yet is in no line of /proc/devices; its node may be there."""
    node("nvidia0", 195, 0)
    node("nvidia1", 195, 1)
    node("nvidia-uvm", 510, 0)
    found = allowed(dev, 0)
    assert found is not None
    assert f"{dev}/nvidia-uvm rw" in found
    assert f"{dev}/nvidia1 rw" not in found


def test_a_link_to_a_gpu_opens_it_to_nobody(dev: Path, node: MakeNode) -> None:
    node("nvidia0", 195, 0)
    (dev / "by-name").symlink_to("nvidia0")
    found = allowed(dev)
    assert found is not None
    assert not any("by-name" in value for value in found)


def test_a_job_without_gpus_opens_none(dev: Path, node: MakeNode) -> None:
    node("nvidia0", 195, 0)
    found = allowed(dev)
    assert found is not None
    assert not any("/nvidia0" in value for value in found)


def test_a_granted_gpu_without_node_or_number_is_an_error(dev: Path, node: MakeNode) -> None:
    node("nvidia0", 195, 0)
    with pytest.raises(DeviceMissing, match="/dev/nvidia7 does not exist"):
        allowed(dev, 0, 7)


def test_a_gpu_whose_number_nobody_knows_cannot_be_filtered(dev: Path, node: MakeNode) -> None:
    """Its jobs run without a filter, rather than never."""
    node("nvidia0", 195, 0)
    assert allowed(dev, None) is None
