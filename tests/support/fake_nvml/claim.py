"""A job for the stand-in driver: a real process that holds GPU memory, as a training job does.

`python claim.py --vram 8192 [--ramp S] [--hold S] [--until FILE] [--spike MIB] [--oom-once FILE]
[--code N]`, sizes in MiB. It claims on the GPUs that it was given; what does not fit fails with
PyTorch's words. It holds for so long, and then until the file is there. Stays free of the
repository's own code, since it stands for a user's program.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

PLACE = Path(os.environ["FAKE_NVML_DIR"])
MIB = 2**20


def start_ticks(pid: int) -> int:
    content = Path(f"/proc/{pid}/stat").read_bytes()
    return int(content[content.rindex(b")") + 2 :].split()[19])


class Memory:
    """What this process holds on each of its GPUs, and its high-water mark."""

    def __init__(self, uuids: list[str], kind: str = "C") -> None:
        self.uuids = uuids
        self.kind = kind
        self.peak = 0
        self.start_us = time.time_ns() // 1000
        self.path = PLACE / "claims" / f"{os.getpid()}.{start_ticks(os.getpid())}"

    def hold(self, size: int) -> None:
        """Hold size bytes on each GPU, or fail as CUDA does."""
        self.peak = max(self.peak, size)
        if any(size > room for room in self.rooms()):
            print("torch.OutOfMemoryError: CUDA out of memory.", file=sys.stderr, flush=True)
            sys.exit(1)
        lines = [f"{u} {size} {self.peak} {self.start_us} {self.kind}" for u in self.uuids]
        temporary = self.path.with_name(f".{self.path.name}")
        temporary.write_text("\n".join(lines) + "\n")
        os.replace(temporary, self.path)

    def rooms(self) -> list[int]:
        """Bytes that this process could hold on each GPU."""
        totals: dict[str, int] = {}
        index_of: dict[str, str] = {}
        for line in (PLACE / "state").read_text(errors="replace").splitlines():
            words = line.split()
            if words[0] == "gpu" and words[2] == "uuid":
                index_of[words[3]] = words[1]
            if words[0] == "gpu" and words[2] in ("total", "reserved", "ownerless"):
                sign = 1 if words[2] == "total" else -1
                totals[words[1]] = totals.get(words[1], 0) + sign * int(words[3])
            if words[0] == "proc":
                totals[words[1]] = totals.get(words[1], 0) - max(0, int(words[4]))
        rooms = {uuid: totals.get(index_of.get(uuid, ""), 2**60) for uuid in self.uuids}
        for path in (PLACE / "claims").iterdir():
            if path == self.path or path.name.startswith("."):
                continue
            pid, _, ticks = path.name.partition(".")
            try:
                if start_ticks(int(pid)) != int(ticks):
                    continue
                lines = path.read_text().splitlines()
            except OSError:
                continue
            for line in lines:
                uuid, used = line.split()[:2]
                if uuid in rooms:
                    rooms[uuid] -= int(used)
        return list(rooms.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vram", type=int, default=1024)
    parser.add_argument("--ramp", type=float, default=0.0)
    parser.add_argument("--hold", type=float, default=1.0)
    parser.add_argument("--until", type=Path)
    parser.add_argument("--spike", type=int)
    parser.add_argument("--oom-once")
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--signal", type=int)
    parser.add_argument("--uuids")
    parser.add_argument("--kind", default="C")
    options = parser.parse_args()
    given = options.uuids or os.environ.get("GPUSCHED_GPU_UUIDS", "")
    memory = Memory([uuid for uuid in given.split(",") if uuid], options.kind)
    size = options.vram * MIB
    if options.oom_once and not os.path.exists(options.oom_once):
        Path(options.oom_once).touch()
        memory.hold(size)
        print("torch.OutOfMemoryError: CUDA out of memory.", file=sys.stderr, flush=True)
        sys.exit(1)
    time.sleep(options.ramp)
    memory.hold(size)
    print("holding", flush=True)
    if options.spike is not None:
        memory.hold(options.spike * MIB)
        time.sleep(0.1)
        memory.hold(size)
    time.sleep(options.hold)
    while options.until is not None and not options.until.exists():
        time.sleep(0.02)
    if options.signal is not None:
        os.kill(os.getpid(), options.signal)
    sys.exit(options.code)


if __name__ == "__main__":
    main()
