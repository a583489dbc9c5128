"""How the GPUs are connected: NVLink pairs and islands, PCIe distance, NUMA node, CPUs.

Asked once, inside the child process. Every error means "worst": it lowers a score and never fails
anything. A GPU whose answer hangs is to blame, both of a pair, and is opened without this.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from gpuschedd.gpu.nvidia.device import Device
from gpuschedd.gpu.nvidia.library import Failed, Library

LINKS_MAX = 36
LINK_COUNT_FIELD = 91
_P2P_OK, _P2P_NVLINK = 0, 2  # the binding's own constant for READ is a tuple: plain numbers only
_SWITCH = 2
_NODE_SCOPE = 0
_FABRIC_NOT_SUPPORTED, _FABRIC_COMPLETED = 0, 3
_LEVELS = (10, 20, 30, 40, 50)  # single switch, several, host bridge, node, system
CPU_WORDS = 64  # 4,096 CPUs
NVLINK_SCORE, LEVEL_SCORE = 100, 10


def add_nearness(lib: Library, gpus: Sequence[Device], inventory: Sequence[dict[str, Any]]) -> None:
    """Put `numa` and `cpus` into the inventory's maps."""
    facts = {entry["uuid"]: entry for entry in inventory}
    for gpu in gpus:
        with lib.part("topology", gpu.index):
            near = {"numa": numa_node(lib, gpu.handle, gpu.pci), "cpus": cpus(lib, gpu.handle)}
        facts[gpu.uuid] |= near


def add_links(lib: Library, gpus: Sequence[Device], inventory: Sequence[dict[str, Any]]) -> None:
    """Put `links` (peer, score), `joined` and `island` into the inventory's maps."""
    facts = {entry["uuid"]: entry for entry in inventory}
    if len(gpus) < 2:
        return
    remotes = {}
    for gpu in gpus:
        facts[gpu.uuid].setdefault("links", [])
        with lib.part("topology", gpu.index):
            remotes[gpu.uuid] = _active_links(lib, gpu.handle)
    joined: set[tuple[str, str]] = set()
    for place, one in enumerate(gpus):
        for other in gpus[place + 1 :]:
            with lib.part("topology", one.index, other.index):
                links = _pair_width(lib, one, other, remotes, facts)
                score = NVLINK_SCORE * links + _distance_score(lib, one.handle, other.handle)
            if links:
                joined |= {(one.uuid, other.uuid), (other.uuid, one.uuid)}
            numa = facts[one.uuid].get("numa")
            score += int(numa is not None and numa == facts[other.uuid].get("numa"))
            facts[one.uuid]["links"].append([other.uuid, score])
            facts[other.uuid]["links"].append([one.uuid, score])
    for one_uuid, other_uuid in sorted(joined):
        facts[one_uuid].setdefault("joined", []).append(other_uuid)
    for number, island in enumerate(islands([gpu.uuid for gpu in gpus], joined)):
        for uuid in island:
            facts[uuid]["island"] = number


def islands(uuids: Sequence[str], joined: set[tuple[str, str]]) -> list[list[str]]:
    """Sets in which every pair is joined, the first GPU's first; lone GPUs are in none."""
    left, found = list(uuids), []
    while left:
        island = [left.pop(0)]
        for uuid in tuple(left):
            if all((uuid, member) in joined for member in island):
                island.append(uuid)
                left.remove(uuid)
        if len(island) > 1:
            found.append(island)
    return found


def _active_links(lib: Library, handle: Any) -> list[str]:
    """The remote end of each active link: a PCI id, or "switch". None where the fabric is down."""
    if not _fabric_is_up(lib, handle):
        return []
    remotes = []
    for link in range(_link_count(lib, handle)):
        try:
            if not lib.call("nvmlDeviceGetNvLinkState", handle, link):
                continue
            if lib.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == _SWITCH:
                remotes.append("switch")
                continue
            pci = lib.call("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            remotes.append(_text(pci.busId).casefold())
        except Failed:
            break  # past the last link, or a card without any
    return remotes


def _link_count(lib: Library, handle: Any) -> int:
    """Field 91: the binding's constant counts links that no card has."""
    values = lib.ask("nvmlDeviceGetFieldValues", handle, [LINK_COUNT_FIELD])
    if values is not None and values[0].nvmlReturn == 0:
        return min(int(values[0].value.uiVal), LINKS_MAX)
    return LINKS_MAX


def _fabric_is_up(lib: Library, handle: Any) -> bool:
    """Behind NVSwitches links are dead, if active, while the fabric is not registered."""
    nvml = lib.load()
    kind = getattr(nvml, "c_nvmlGpuFabricInfo_v2_t", None)
    if kind is None:
        return True
    info = kind()
    try:
        lib.call("nvmlDeviceGetGpuFabricInfoV", handle, _by_reference(info))
    except Failed:
        return True  # no fabric: links go from GPU to GPU
    return info.state in (_FABRIC_NOT_SUPPORTED, _FABRIC_COMPLETED)


def _by_reference(info: Any) -> Any:
    import ctypes

    return ctypes.byref(info)


def _pair_width(
    lib: Library,
    one: Device,
    other: Device,
    remotes: dict[str, list[str]],
    facts: dict[str, dict[str, Any]],
) -> int:
    """Active links between two GPUs; 0 unless both sides may also use them."""
    mine, theirs = remotes[one.uuid], remotes[other.uuid]
    if not mine or not theirs:
        return 0
    if lib.ask("nvmlDeviceGetP2PStatus", one.handle, other.handle, _P2P_NVLINK) != _P2P_OK:
        return 0
    switched = min(mine.count("switch"), theirs.count("switch"))
    return switched or mine.count(str(facts[other.uuid].get("pci") or "").casefold())


def _distance_score(lib: Library, one: Any, other: Any) -> int:
    """PCIe distance: the nearer, the more; 0 also where it is not known."""
    level = lib.ask("nvmlDeviceGetTopologyCommonAncestor", one, other)
    if level not in _LEVELS:
        return 0
    return LEVEL_SCORE * (len(_LEVELS) - 1 - _LEVELS.index(level))


def numa_node(lib: Library, handle: Any, pci: Any) -> int | None:
    """The NUMA node that the GPU hangs on; None where there is one only, or nobody says."""
    words = lib.ask("nvmlDeviceGetMemoryAffinity", handle, 4, _NODE_SCOPE)
    if words is not None:
        nodes = [64 * place + bit for place in range(4) for bit in _bits(words[place])]
        if len(nodes) == 1:
            return nodes[0]
    bus_id = _text(getattr(pci, "busId", b""))[4:].lower()
    try:
        with open(f"/sys/bus/pci/devices/{bus_id}/numa_node", encoding="ascii") as file:
            node = int(file.read())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cpus(lib: Library, handle: Any) -> list[int]:
    """The CPUs near the GPU that this process may use; none where nobody says."""
    words = lib.ask("nvmlDeviceGetCpuAffinity", handle, CPU_WORDS)
    if words is None:
        return []
    near = {64 * place + bit for place in range(CPU_WORDS) for bit in _bits(words[place])}
    return sorted(near & os.sched_getaffinity(0))


def _bits(word: int) -> list[int]:
    return [bit for bit in range(64) if word >> bit & 1] if word else []


def _text(value: Any) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value or "")
