"""How the values of the configuration are read: one parser a kind, its limits in words.

A parser takes a value of TOML and raises ValueError, which says what is expected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpusched_client.errors import Invalid
from gpusched_client.units import parse_bytes, parse_duration
from gpuschedd.core.hostspec import SIMULATED_GPUS_MAX, parse_host

SECONDS_MAX = 10 * 365 * 86_400  # of a duration
Parse = Callable[[Any], Any]


def key(default: Any, parse: Parse, doc: str) -> Any:
    """A dataclass field that knows how its TOML value is read and what it means."""
    return field(default=default, metadata={"parse": parse, "doc": doc})


def integer(low: int, high: int) -> Parse:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return parse


def number(low: float, high: float) -> Parse:
    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"must be a number from {low:g} to {high:g}")
        if not low <= float(value) <= high:
            raise ValueError(f"must be a number from {low:g} to {high:g}")
        return float(value)

    return parse


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def choice(*words: str) -> Parse:
    def parse(value: Any) -> str:
        if value not in words:
            raise ValueError("must be one of " + ", ".join(f'"{word}"' for word in words))
        return str(value)

    return parse


def text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1_000 or "\0" in value:
        raise ValueError("must be a text of at most 1,000 characters")
    return value


def host(value: Any) -> str:
    written = text(value)
    if written:
        try:
            parse_host(written, gpus_max=SIMULATED_GPUS_MAX)
        except Invalid as error:
            raise ValueError(str(error)) from error
    return written


def size(value: Any) -> int:
    """ "512M", "18G"; a bare number is MiB."""
    try:
        return parse_bytes(str(value))
    except Invalid as error:
        raise ValueError(str(error)) from error


def seconds(value: Any) -> float:
    """ "10s", "2h", "7d"; a bare number is seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value <= SECONDS_MAX:
            raise ValueError(f"must be from 0 to {SECONDS_MAX} seconds")
        return float(value)
    written = str(value)
    if written.isdecimal():
        raise ValueError(
            f"write {written} without quotes for seconds, or with a unit: {written}s, {written}m"
        )
    try:
        found = parse_duration(written)
    except Invalid as error:
        raise ValueError(str(error)) from error
    if found is None:
        raise ValueError("must be a duration such as 10s, 2h or 7d")
    return float(found)


def span(least_s: float) -> Parse:
    """A duration that is not too short for what it is for."""

    def parse(value: Any) -> float:
        found = seconds(value)
        if found < least_s:
            raise ValueError(f"must be at least {least_s:g}s")
        return found

    return parse


def time_limit(value: Any) -> float | None:
    """A duration, or "unlimited"."""
    return None if value == "unlimited" else span(1.0)(value)


def horizon(value: Any) -> float:
    """A duration, or "inf"."""
    return float("inf") if value in ("inf", float("inf")) else seconds(value)


def gpu_list(value: Any) -> tuple[int | str, ...]:
    if not isinstance(value, list) or not all(
        isinstance(item, int | str) and not isinstance(item, bool) for item in value
    ):
        raise ValueError('must be a list of GPU indices or UUIDs, such as [0, "GPU-..."]')
    return tuple(value)


@dataclass(frozen=True, slots=True)
class ProcessRule:
    """Which foreign processes do not keep a GPU from being idle: all that is given must hold."""

    name: str | None = None  # the command, as in /proc/PID/comm
    uid: int | None = None
    below_bytes: int | None = None


def process_rules(value: Any) -> tuple[ProcessRule, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError('must be a list such as ["name=ollama,uid=1000", "uid=1000,below=700M"]')
    return tuple(_process_rule(item) for item in value)


def _process_rule(text: str) -> ProcessRule:
    """ "name=COMMAND", "uid=NUMBER" and "below=SIZE", joined by commas; a name needs a uid."""
    found: dict[str, Any] = {}
    for word in text.split(","):
        key, _, given = word.strip().partition("=")
        if key == "name" and given:
            found["name"] = given
        elif key == "uid" and given.isdecimal():
            found["uid"] = int(given)
        elif key == "below":
            found["below_bytes"] = size(given)
        else:
            raise ValueError(f"{word!r} is not name=COMMAND, uid=NUMBER or below=SIZE")
    if "name" in found and "uid" not in found:
        raise ValueError(
            f"{text!r} has no uid, and anybody may give a process any name; "
            f"write name={found['name']},uid=NUMBER"
        )
    return ProcessRule(**found)


def xids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and item > 0 for item in value):
        raise ValueError("must be a list of Xid numbers, such as [48, 79]")
    return tuple(value)


def texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("must be a list of texts")
    return tuple(value)


def or_unlimited(parse: Parse) -> Parse:
    """The same, or "unlimited"."""
    return lambda value: None if value == "unlimited" else parse(value)


UNBOUNDED = -1  # where None is taken by "as in the table around"


def or_unbounded(parse: Parse) -> Parse:
    """The same, or "unlimited" as UNBOUNDED."""
    return lambda value: UNBOUNDED if value == "unlimited" else parse(value)
