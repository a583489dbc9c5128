"""The host grammar: "4x24G", "2x80G+2x24G", for simulated hosts and for replays. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpusched_client.errors import Invalid
from gpusched_client.units import parse_bytes

SIMULATED_GPUS_MAX = 1_024  # of a daemon; a replay takes more
_GROUP = re.compile(r"(\d{1,9})x(\d+(?:\.\d+)?)([A-Za-z]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class HostCard:
    """One card of a host: its size in bytes, and as it was written, such as "24G"."""

    size: str
    total_bytes: int


def parse_host(text: str, *, gpus_max: int, bare_unit: str = "") -> tuple[HostCard, ...]:
    """The cards of "COUNTxMEMORY", groups joined by "+", in that order; 1 to gpus_max of them.

    `bare_unit` is the unit of a size without one; "" refuses it. Raises Invalid.
    """
    cards: list[HostCard] = []
    for part in text.replace(" ", "").split("+"):
        match = _GROUP.fullmatch(part)
        if match is None or int(match[1]) == 0:
            raise Invalid(
                f"host {text!r}: {part!r} is not COUNTxMEMORY; write 4x24G or 2x80G+2x24G"
            )
        count = int(match[1])
        if len(cards) + count > gpus_max:
            raise Invalid(
                f"host {text!r} has {len(cards) + count} GPUs or more; the limit is {gpus_max}"
            )
        if not match[3] and not bare_unit:
            raise Invalid(
                f"host {text!r}: {match[2]!r} has no unit; did you mean {count}x{match[2]}G?"
            )
        size = f"{match[2]}{match[3] or bare_unit}".upper()
        total_bytes = parse_bytes(size)
        if total_bytes == 0:
            raise Invalid(f"host {text!r}: a GPU of {size} holds nothing; write {count}x24G")
        cards += [HostCard(size, total_bytes)] * count
    return tuple(cards)
