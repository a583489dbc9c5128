"""Amounts as people write them: "20G" <-> bytes, "1-12:00:00", "2h", "90s" <-> seconds.

The one place that reads and writes them. Pure. It takes what Slurm's users type and refuses the
rest with the forms that are legal. A duration of None is "unlimited".
"""

from __future__ import annotations

import re

from gpusched_client.errors import Invalid

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_BYTES_OF = {"": MIB, "B": 1, "K": KIB, "M": MIB, "G": GIB, "T": TIB}
_SIZE = r"(\d{1,19})(?:\.(\d{1,9}))?\s*(?:([KMGT])(?:I?B)?|(B))?"
_SIZE_FORMS = "write it as 20G, 512M or 1.5T (K, M, G, T are powers of 1024)"
_SIZE_MAX = 2**62
_SLICE_PROFILE = r"(?:\d{1,2}c\.)?\d{1,2}g\.\d{1,4}gb(?:[+-][a-z0-9.+-]{1,16})?"
VRAM_ASKED_BYTES_MIN = 256 * MIB  # what a person may ask for; a context of CUDA alone takes more

MINUTE_S, HOUR_S, DAY_S = 60, 3_600, 86_400
_SECONDS_OF = {"s": 1, "m": MINUTE_S, "h": HOUR_S, "d": DAY_S, "w": 7 * DAY_S}
_UNIT = r"(s|secs?|m|mins?|h|hours?|d|days?|w|weeks?)"
_PART = rf"(\d{{1,10}})(?:\.(\d{{1,6}}))?\s*{_UNIT}"
_PARTS = rf"(?:\d{{1,10}}(?:\.\d{{1,6}})?\s*{_UNIT}\s*)+"
_CLOCK = r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,2}))?(?::(\d{1,2}))?"
_NUMBER = r"\d{1,12}(?:\.\d{1,9})?"
_DURATION_FORMS = (
    "write it as 90 (minutes), 30:00 (minutes:seconds), 1:30:00, 1-12:00:00 (days-hours), "
    "2h, 90s, 1h30m, 1d, or unlimited"
)
_DURATION_MAX_S = 2**40
_FLAGS = re.ASCII | re.IGNORECASE


def _matched(pattern: str, text: str) -> re.Match[str] | None:
    """The whole text's match. Patterns are compiled at their first use: most starts need none."""
    return re.fullmatch(pattern, text, _FLAGS)


def parse_bytes(text: str) -> int:
    """Bytes in a text such as "20G", "1.5GiB", "512" (MiB) or "7B"; a fraction is rounded up."""
    match = _matched(_SIZE, text.strip())
    if match is None:
        raise Invalid(f"{text!r} is not an amount of memory; {_SIZE_FORMS}", {"value": text})
    whole, fraction, unit, single = match.groups()
    size = _scaled_up(whole, fraction, _BYTES_OF[(unit or single or "").upper()])
    if size > _SIZE_MAX:
        raise Invalid(f"{text!r} is more memory than there is; {_SIZE_FORMS}", {"value": text})
    return size


def parse_asked_bytes(text: str) -> int:
    """The same of what a person asks for a job: a bare number is Invalid, since nobody can know
    whether 18 means 18 GiB, as a card's size is told, or 18 MiB.
    """
    size = parse_bytes(text)
    bare = text.strip()
    if size and not bare[-1].isalpha():
        unit = "G" if size < 1024 * MIB else "M"  # of a bare number from 1024 on: MiB, as in Slurm
        raise Invalid(f"{text!r} has no unit; did you mean {bare}{unit}?", {"value": text})
    return size


def _scaled_up(whole: str, fraction: str | None, factor: int) -> int:
    """whole.fraction * factor, rounded up, without floats."""
    scale = int("1" + "0" * len(fraction or ""))
    return -(-int(whole + (fraction or "")) * factor // scale)


def bytes_short(size: int) -> str:
    """For a table: at most one decimal, such as "18G", "17.5G", "512M"."""
    number, unit = _rounded(size)
    return f"{number}{unit}"


def bytes_text(size: int) -> str:
    """For a sentence: "18 GiB", "17.5 GiB", "512 MiB", "7 bytes"."""
    number, unit = _rounded(size)
    return f"{number} bytes" if unit == "B" else f"{number} {unit}iB"


def bytes_apart(size: int, other: int) -> str:
    """For a sentence that compares: with as many digits as show that it is not the other size."""
    for text in (bytes_text, _whole_mib):
        if size == other or text(size) != text(other):
            return text(size)
    return f"{size} bytes"


def _whole_mib(size: int) -> str:
    return f"{size / MIB:.0f} MiB"


def _rounded(size: int) -> tuple[str, str]:
    for unit in "TGMK":
        factor = _BYTES_OF[unit]
        if size >= factor:
            tenths = (size * 10 + factor // 2) // factor
            return (f"{tenths // 10}.{tenths % 10}" if tenths % 10 else f"{tenths // 10}"), unit
    return str(size), "B"


def is_slice_profile(text: str) -> bool:
    """Whether it is a profile of MIG slices as the driver writes it: "1g.10gb", "1c.3g.40gb+me"."""
    return _matched(_SLICE_PROFILE, text) is not None


def parse_duration(text: str) -> int | None:
    """Seconds in a text of Slurm's forms or with units; None for "unlimited".

    A bare number is minutes, "1:30" is minutes:seconds, "1-12" is days-hours, as in Slurm.
    A fraction is rounded up to a whole second.
    """
    stripped = text.strip()
    if stripped.lower() in ("unlimited", "infinite"):
        return None
    seconds = _with_units(stripped) if _matched(_PARTS, stripped) else _clock(stripped)
    if seconds is None or seconds > _DURATION_MAX_S:
        raise Invalid(f"{text!r} is not a duration; {_DURATION_FORMS}", {"value": text})
    return seconds


def parse_seconds(text: str) -> float:
    """Seconds in a text whose bare numbers are seconds, as "2.5", "90s" or "1h"; Invalid for none.

    For settings and test programs: a person who types a time limit writes minutes, as in Slurm.
    """
    stripped = text.strip()
    if _matched(_NUMBER, stripped):
        return float(stripped)
    seconds = parse_duration(stripped)
    if seconds is None:
        raise Invalid(f"{text!r} is not a duration; write it as 10s, 2h or 7d", {"value": text})
    return float(seconds)


def _with_units(text: str) -> int:
    return sum(
        _scaled_up(whole, fraction or None, _SECONDS_OF[unit[0].lower()])
        for whole, fraction, unit in re.findall(_PART, text, _FLAGS)
    )


def _clock(text: str) -> int | None:
    match = _matched(_CLOCK, text)
    if match is None:
        return None
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if any(part > 59 for part in parts[1:]):
        return None
    if days is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return int(days) * DAY_S + hours * HOUR_S + minutes * MINUTE_S + seconds
    if len(parts) == 3:
        return parts[0] * HOUR_S + parts[1] * MINUTE_S + parts[2]
    minutes, seconds = (*parts, 0)[:2]
    return minutes * MINUTE_S + seconds


def format_duration(seconds: float | None) -> str:
    """Slurm's form, read back by parse_duration as the same whole seconds: "1-12:00:00", "5:00"."""
    if seconds is None:
        return "unlimited"
    days, rest = divmod(max(0, int(seconds)), DAY_S)
    hours, rest = divmod(rest, HOUR_S)
    minutes, seconds_left = divmod(rest, MINUTE_S)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{seconds_left:02}"
    if hours:
        return f"{hours}:{minutes:02}:{seconds_left:02}"
    return f"{minutes}:{seconds_left:02}"


def duration_short(seconds: int) -> str:
    """As typed, and read back by parse_duration as the same: "2h", "1h30m", "45s"."""
    return duration_text(seconds).replace(" min", "m").replace(" ", "")


def duration_text(seconds: int | None) -> str:
    """For a sentence, exact: "30 min", "24 h", "7 d", "1 h 30 min", "90 s"."""
    if seconds is None:
        return "unlimited"
    if seconds < 2 * MINUTE_S and seconds % MINUTE_S:
        return f"{seconds} s"
    if seconds % DAY_S == 0 and seconds > DAY_S:
        return f"{seconds // DAY_S} d"
    names = [(DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min"), (1, "s")]
    if seconds <= DAY_S:
        names = names[1:]
    words = []
    for factor, name in names:
        count, seconds = divmod(seconds, factor)
        if count:
            words.append(f"{count} {name}")
    return " ".join(words) or "0 s"


def duration_about(seconds: float, beside_s: float = 0.0) -> str:
    """For a sentence, rounded to one decimal of one unit: "40 s", "15 min", "2 h", "1.5 h".

    `beside_s` is a longer one that stands beside it: of up to ten times, told in the same unit.
    """
    longer_s = max(seconds, beside_s) if 10 * seconds >= beside_s else seconds
    for size, unit in ((HOUR_S, "h"), (MINUTE_S, "min")):
        if longer_s >= 2 * size or seconds == size:
            return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.0f} s"
