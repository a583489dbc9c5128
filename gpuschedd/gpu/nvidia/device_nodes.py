"""Device nodes: which of /dev a job's unit may open, so that it reaches its own GPUs and no others.

Reads /dev and /proc/devices; opens no device and changes nothing. GPUs are the nodes
/dev/nvidiaN by the driver's minor number; everything else stays as usable as for any user.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpuschedd.gpu.source import DeviceMissing

DEV = Path("/dev")
PROC_DEVICES = Path("/proc/devices")
MIG_MINORS = Path("/proc/driver/nvidia-caps/mig-minors")
NODES_MAX = 10_000  # walked below /dev; more is not a /dev
CAPABILITIES_GROUP = "nvidia-caps"  # rights to MIG slices, one node each
CAPABILITY_NODES = "/dev/nvidia-caps/"
_GPU_NODE = re.compile(r"nvidia(\d+)")
_CAPABILITY_NODE = re.compile(r"nvidia-cap(\d+)")
_GROUP = re.compile(r"[A-Za-z0-9_./:+-]+")


def gpu_nodes(dev: Path = DEV) -> dict[int, Path]:
    """The GPU nodes by minor number; empty on a host without NVIDIA's driver."""
    found = {}
    for name in os.listdir(dev):
        match = _GPU_NODE.fullmatch(name)
        if match is not None:
            found[int(match[1])] = dev / name
    return found


def allowed(
    minors: Iterable[int | None],
    capabilities: Iterable[str] = (),
    dev: Path = DEV,
    proc_devices: Path = PROC_DEVICES,
    mig_minors: Path = MIG_MINORS,
) -> tuple[str, ...] | None:
    """DeviceAllow values for a job that was granted these GPUs; None: there is nothing to filter,
    or nothing to filter by, since a driver names no minor.

    Whole groups of /proc/devices but those that hold GPU nodes; by its path every other node of
    these, and every node of no group: a driver's module may be loaded later. Of the rights to
    slices only `capabilities`, the nodes of the granted ones: the GPU's own node is the same for
    all its slices. Raises DeviceMissing.
    """
    gpus, numbers = gpu_nodes(dev), tuple(minors)
    if not gpus or None in numbers:
        return None
    granted = [_node_of(minor, gpus) for minor in numbers if minor is not None]
    own = tuple(capabilities)
    granted += [_capability(Path(node)) for node in own]
    kinds = {_kind(path.stat()) for path in gpus.values()}
    closed = {kind for kind in kinds if kind is not None}
    listed = tuple(_groups(proc_devices))
    whole = {(letter, major) for letter, major, name in listed if name != CAPABILITIES_GROUP}
    groups = [
        f"{letter}-{name} rw"
        for letter, major, name in listed
        if (letter, major) in whole - closed and name != CAPABILITIES_GROUP
    ]
    rights = None if own else _rights_to_slices(mig_minors)
    beside = [
        path
        for path in _nodes_beside(dev, whole - closed, set(gpus.values()))
        if _is_open(path, rights)
    ]
    return (*groups, *dict.fromkeys(f"{path} rw" for path in (*beside, *granted)))


def _rights_to_slices(mig_minors: Path) -> frozenset[int]:
    """Numbers of the capability nodes that stand for slices; the others are the driver's own."""
    try:
        lines = mig_minors.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    words = (line.split() for line in lines if line.startswith("gpu"))
    return frozenset(int(word[-1]) for word in words if word[-1].isdecimal())


def _is_open(path: Path, rights: frozenset[int] | None) -> bool:
    """Whether a node may be opened by every job; `rights`: those to slices, None: all are."""
    match = _CAPABILITY_NODE.fullmatch(path.name)
    return match is None or (rights is not None and int(match[1]) not in rights)


def _capability(path: Path) -> Path:
    if not path.exists():
        raise DeviceMissing(f"{path} does not exist; `nvidia-modprobe -f` or `nvidia-smi` makes it")
    return path


def _node_of(minor: int, gpus: dict[int, Path]) -> Path:
    if minor not in gpus:
        raise DeviceMissing(
            f"/dev/nvidia{minor} does not exist; `nvidia-smi` or nvidia-modprobe makes it"
        )
    return gpus[minor]


def _kind(found: os.stat_result) -> tuple[str, int] | None:
    """The word char or block and the major number; None for anything but a device."""
    if stat.S_ISCHR(found.st_mode):
        return "char", os.major(found.st_rdev)
    if stat.S_ISBLK(found.st_mode):
        return "block", os.major(found.st_rdev)
    return None


def _groups(proc_devices: Path) -> Iterator[tuple[str, int, str]]:
    """Kind, major and name of each line of /proc/devices."""
    letter = "char"
    seen = set()
    for line in proc_devices.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("Block"):
            letter = "block"
        major, _, name = line.strip().partition(" ")
        if major.isdecimal() and _GROUP.fullmatch(name) and (letter, major, name) not in seen:
            seen.add((letter, major, name))
            yield letter, int(major), name


def _nodes_beside(dev: Path, whole: set[tuple[str, int]], gpus: set[Path]) -> Iterator[Path]:
    """Nodes of no GPU and in no group that is open as a whole: nvidiactl, for instance.

    No directory that others can write is walked, as /dev/shm: it would hold what they like.
    """
    walked = 0
    for directory, below, names in os.walk(dev):
        below[:] = [name for name in below if _is_roots(Path(directory, name))]
        for name in sorted(names):
            walked += 1
            if walked > NODES_MAX:
                return
            path = Path(directory, name)
            try:
                kind = _kind(path.lstat())
            except OSError:
                continue
            if kind is not None and kind not in whole and path not in gpus:
                yield path


def _is_roots(directory: Path) -> bool:
    """Whether nobody but root can put anything there. On doubt nobody looks."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == 0 and not found.st_mode & 0o022
