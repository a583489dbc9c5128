"""The claims directory of simulated GPUs: who claims how much memory on which one.

A claim is a file of the claiming process; it counts only while that process lives. Both the daemon
(reading) and `gpusched-simjob` (writing) use this module, so that the format exists once.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

CLAIM_BYTES_MAX = 64 * 1024
NAMES_MAX = 1_000  # files that are looked at one by one
HOST_NAME = "host.json"
DIRECTORY_NAME = "sim"  # in the state directory of a user's own daemon
SYSTEM_DIR = Path("/dev/shm/gpuschedd-sim")  # where everybody may fill the memory anyway
ENVIRONMENT_NAME = "GPUSCHED_SIM_DIR"
# What reading a file that anybody may have written can raise.
_NOT_UNDERSTOOD = (
    *(OSError, ValueError, KeyError, AttributeError, TypeError),
    *(OverflowError, RecursionError),
)


@dataclass(frozen=True, slots=True)
class Claim:
    """Memory that one live process claims, in bytes per GPU UUID."""

    pid: int
    start_ticks: int
    uid: int
    gpus: Mapping[str, int]


def start_ticks_of(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat: with the pid it names one process of this boot. None: gone."""
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = content[content.rindex(b")") + 2 :].split()
    # Its first thread may have ended while others work on.
    return None if fields[0] == b"Z" and fields[17] == b"1" else int(fields[19])


def write_claim(directory: Path, gpus: Mapping[str, int]) -> None:
    """Publish this process's claim, replacing its earlier one."""
    pid = os.getpid()
    name = f"{pid}.{start_ticks_of(pid)}"
    temporary = directory / f".{name}.tmp"
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
    )
    try:
        os.write(descriptor, json.dumps({"gpus": dict(gpus)}).encode())
    finally:
        os.close(descriptor)
    os.replace(temporary, directory / name)


def read_claims(directory: Path) -> Iterator[Claim]:
    """The claims of live processes; what is no such claim is removed, as far as we may.

    Anybody may put files here: among very many, those of the processes that live are looked for by
    name, so that nobody's are hidden.
    """
    names = _some_names(directory)
    if len(names) > NAMES_MAX:
        yield from _claims_of_all_processes(directory)
    for name in names:
        identity = _identity(name)
        if identity is None or start_ticks_of(identity[0]) != identity[1]:
            if not _is_in_the_making(name):
                _remove(directory / name)
        elif len(names) <= NAMES_MAX:
            claim = _read(directory / name, *identity)
            if claim is not None:
                yield claim


def _is_in_the_making(name: str) -> bool:
    """The host's file, and what becomes one or a claim of a live process."""
    if name == HOST_NAME or name.startswith(f".{HOST_NAME}."):
        return True
    identity = _identity(name.removeprefix(".").removesuffix(".tmp"))
    return identity is not None and start_ticks_of(identity[0]) == identity[1]


def _some_names(directory: Path) -> list[str]:
    """All of the directory, or one more than NAMES_MAX."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in islice(entries, NAMES_MAX + 1))
    except FileNotFoundError:
        return []


def _claims_of_all_processes(directory: Path) -> Iterator[Claim]:
    for name in os.listdir("/proc"):
        ticks = start_ticks_of(int(name)) if name.isdecimal() else None
        claim = None if ticks is None else _read(directory / f"{name}.{ticks}", int(name), ticks)
        if claim is not None:
            yield claim


def write_host(directory: Path, totals: Mapping[str, int]) -> None:
    """Tell the processes how large the simulated cards are. On a full disk what is there may do."""
    if read_totals(directory) == totals and _is_ours(directory / HOST_NAME):
        return
    # Others may write here too: the name cannot be foreseen, and nothing that is there is followed.
    temporary = directory / f".{HOST_NAME}.{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o644), "w", encoding="ascii") as file:
        file.write(json.dumps({"totals": dict(totals)}))
        os.fchmod(file.fileno(), 0o644)
    os.replace(temporary, directory / HOST_NAME)


def _is_ours(path: Path) -> bool:
    about = path.lstat()
    return stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()


def read_totals(directory: Path) -> dict[str, int]:
    """Bytes per simulated GPU; empty where no daemon wrote them."""
    try:
        content = json.loads((directory / HOST_NAME).read_text())
        return {str(uuid): int(size) for uuid, size in content["totals"].items()}
    except _NOT_UNDERSTOOD:
        return {}


def _identity(name: str) -> tuple[int, int] | None:
    pid, dot, ticks = name.partition(".")
    if not dot or not pid.isdecimal() or not ticks.isdecimal():
        return None
    return int(pid), int(ticks)


def _read(path: Path, pid: int, ticks: int) -> Claim | None:
    """One claim, if it belongs to the uid whose process it names and reads as one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        about = os.fstat(descriptor)
        owner = os.stat(f"/proc/{pid}").st_uid
        if not stat.S_ISREG(about.st_mode):
            return None
        if about.st_uid != owner:
            _remove(path)  # or the process whose name it has could not claim
            return None
        gpus = json.loads(os.read(descriptor, CLAIM_BYTES_MAX))["gpus"]
        sizes = {str(uuid): min(max(int(size), 0), 2**50) for uuid, size in gpus.items()}
    except _NOT_UNDERSTOOD:
        return None
    finally:
        os.close(descriptor)
    return Claim(pid=pid, start_ticks=ticks, uid=owner, gpus=sizes)


def _remove(path: Path) -> None:
    try:
        os.unlink(path)
    except OSError:
        return
