"""How one value of a message is read: strict readers with the path of the field in every refusal.

Owns the checks that all messages share, and says each in words for the wire's reference. Knows no
message, no method and no transport.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from math import isfinite
from typing import Any, NoReturn

from gpusched_client.errors import Invalid, TooLarge

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
FLOAT_EXACT_MAX = 2**53  # above it a float no longer has every integer
TEXT_BYTES_MAX = 4096
PLAIN_LEVELS_MAX = 16  # levels of a free-form value, such as the numbers of a reason
_SHOWN_CHARS_MAX = 60

Read = Callable[[object, str], Any]
"""Takes a decoded value and its path, returns the value to keep, raises Invalid or TooLarge."""


class Reader:
    """How one value is read, and the same in words: `kind` is its type, `limits` what it may be.

    `messages` are the classes of the messages in it.
    """

    __slots__ = ("kind", "limits", "messages", "read")

    def __init__(
        self, read: Read, kind: str, limits: str = "", messages: tuple[type, ...] = ()
    ) -> None:
        self.read, self.kind, self.limits, self.messages = read, kind, limits, messages


class IntegerReader(Reader):
    """An integer from `low` to `high`."""

    __slots__ = ("high", "low")

    def __init__(self, read: Read, low: int, high: int) -> None:
        super().__init__(read, "integer", _range(low, high))
        self.low, self.high = low, high


class ChoiceReader(Reader):
    """One of a few `words`."""

    __slots__ = ("words",)

    def __init__(self, read: Read, words: tuple[str, ...]) -> None:
        super().__init__(read, "text", " or ".join(words))
        self.words = words


class InvalidValue:
    """Stands in a decoded message for what MessagePack can say and this protocol cannot.

    The decoder puts it where a duplicate key or an extension type was, so that the refusal can
    name the field instead of the whole message.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def _range(low: float, high: float) -> str:
    """In words; an end that only says what a machine's number can hold is left out."""
    if high < FLOAT_EXACT_MAX:
        return f"{low} to {high}"
    return f"at least {low}" if low > -FLOAT_EXACT_MAX else ""


# ---------------------------------------------------------------------------------- refusals


def shown(value: object) -> str:
    """A value as a message may quote it: short, one line, printable."""
    text = ascii(value) if isinstance(value, (bytes, str, int, float)) else type(value).__name__
    if isinstance(value, str):  # bytes that are not UTF-8, as os.fsdecode keeps them
        text = re.sub(r"\\udc([89a-f][0-9a-f])", r"\\x\1", text)
    return text if len(text) <= _SHOWN_CHARS_MAX else text[: _SHOWN_CHARS_MAX - 3] + "..."


def shown_key(key: object) -> str:
    """A key as part of a path: an environment's keys may be any bytes."""
    if isinstance(key, bytes):
        key = key.decode("utf-8", "backslashreplace")
    name = str(key)
    return name if name.isprintable() and len(name) <= _SHOWN_CHARS_MAX else shown(key)


def refuse(path: str, problem: str, cure: str) -> NoReturn:
    """Raise Invalid for the field at `path`."""
    raise Invalid(f"{path or 'params'}: {problem}; {cure}", {"path": path})


def refuse_large(path: str, size: int, limit: int, unit: str) -> NoReturn:
    """Raise TooLarge for the field at `path`, with what it has and what it may have."""
    raise TooLarge(
        f"{path or 'params'}: {size} {unit}; the limit is {limit}",
        {"path": path, "value": size, "limit": limit},
    )


_KIND_NAMES = {bool: "a boolean", type(None): "null", dict: "a map", list: "an array"}
_KIND_NAMES |= {int: "an integer", float: "a float", str: "text", bytes: "a byte string"}


def kind_of(value: object) -> str:
    """What kind of value it is, in the wire's words."""
    return _KIND_NAMES.get(type(value), type(value).__name__)


def refuse_type(value: object, path: str, needed: str) -> NoReturn:
    """Raise Invalid for a value of the wrong type at `path`."""
    if isinstance(value, InvalidValue):
        refuse(path, value.text, "remove it")
    kind = kind_of(value)
    quoted = f"{shown(value)} is " if isinstance(value, (bool, int, float, str, bytes)) else ""
    refuse(path, f"{quoted}{kind}", f"{needed} is needed")


# ----------------------------------------------------------------------------------- scalars


def integer(low: int = INT64_MIN, high: int = INT64_MAX) -> IntegerReader:
    """An integer in [low, high]; a boolean is not one."""

    def read(value: object, path: str) -> int:
        if type(value) is not int:
            refuse_type(value, path, f"an integer from {low} to {high}")
        if not low <= value <= high:
            refuse(path, f"{value} is out of range", f"use an integer from {low} to {high}")
        return value

    return IntegerReader(read, low, high)


def number(low: float, high: float) -> Reader:
    """A finite integer or float in [low, high], kept as float."""

    def read(value: object, path: str) -> float:
        if type(value) is not int and type(value) is not float:
            refuse_type(value, path, f"a number from {low} to {high}")
        if not isfinite(value) or not low <= value <= high:
            refuse(path, f"{value} is out of range", f"use a number from {low} to {high}")
        return float(value)

    return Reader(read, "number", _range(low, high))


def _read_boolean(value: object, path: str) -> bool:
    if type(value) is not bool:
        refuse_type(value, path, "true or false")
    return value


boolean = Reader(_read_boolean, "boolean")
"""True or false; 0 and 1 are neither."""


def text(bytes_max: int = TEXT_BYTES_MAX, pattern: str | None = None, rule: str = "") -> Reader:
    """Text of valid Unicode without NUL; `rule` is the pattern in words."""

    def read(value: object, path: str) -> str:
        if type(value) is not str:
            refuse_type(value, path, "text")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            refuse(path, f"{shown(value)} is not valid UTF-8", "send valid UTF-8")
        if size > bytes_max:
            refuse_large(path, size, bytes_max, "bytes")
        if "\0" in value:
            refuse(path, f"{shown(value)} has a NUL character", "remove it")
        if pattern is not None and not re.fullmatch(pattern, value):
            refuse(path, f"{shown(value)} is not allowed", f"use {rule}")
        return value

    return Reader(read, "text", rule or f"at most {bytes_max} bytes")


def octets(bytes_max: int, *, nul: bool = False, empty: bool = True) -> Reader:
    """A byte string, sent as `bin` or `str`; NUL only where `nul` says so."""

    def read(value: object, path: str) -> bytes:
        if type(value) is str:
            try:
                value = value.encode("utf-8", "surrogateescape")
            except UnicodeEncodeError:
                refuse(path, f"{shown(value)} is not valid UTF-8", "send it as `bin`")
        if type(value) is not bytes:
            refuse_type(value, path, "a byte string (`bin` or `str`)")
        if len(value) > bytes_max:
            refuse_large(path, len(value), bytes_max, "bytes")
        if not nul and b"\0" in value:
            refuse(path, f"{shown(value)} has a NUL byte", "remove it")
        if not empty and not value:
            refuse(path, "it is empty", "give at least one byte")
        return value

    least = "at most" if empty else "1 to"
    return Reader(read, "bytes", f"{least} {bytes_max} bytes" + ("" if nul else ", no NUL"))


def word(kind: type[StrEnum]) -> Reader:
    """One of the values of an enum of words."""

    def read(value: object, path: str) -> StrEnum:
        if not isinstance(value, str):
            refuse_type(value, path, "text")
        try:
            return kind(value)
        except ValueError:
            words = ", ".join(kind)
            refuse(path, f"{shown(value)} is not known", f"use one of {words}")

    return Reader(read, "text", ", ".join(kind))


def one_of(*words: str) -> ChoiceReader:
    """One of a few words."""

    def read(value: object, path: str) -> str:
        if not isinstance(value, str):
            refuse_type(value, path, "text")
        if value not in words:
            refuse(path, f"{shown(value)} is not known", f"use {' or '.join(words)}")
        return value

    return ChoiceReader(read, words)


# -------------------------------------------------------------------------------- containers


def list_of(item: Reader, items_max: int, items_min: int = 0) -> Reader:
    """An array of items_min to items_max items, kept as a tuple."""
    read_item = item.read

    def read(value: object, path: str) -> tuple[Any, ...]:
        if type(value) is not list and type(value) is not tuple:
            refuse_type(value, path, "an array")
        if len(value) > items_max:
            refuse_large(path, len(value), items_max, "items")
        if len(value) < items_min:
            refuse(path, f"{len(value)} items", f"give at least {items_min}")
        return tuple([read_item(entry, f"{path}[{index}]") for index, entry in enumerate(value)])

    count = f"{items_min} to {items_max}" if items_min else f"at most {items_max}"
    count = str(items_max) if items_min == items_max else count
    each = f"; each {item.limits}" if item.limits else ""
    return Reader(read, f"array of {item.kind}", f"{count} items{each}", item.messages)


def map_of(key: Reader, item: Reader, items_max: int) -> Reader:
    """A map of at most items_max entries whose keys are distinct also after reading."""

    def read(value: object, path: str) -> dict[Any, Any]:
        if type(value) is not dict:
            refuse_type(value, path, "a map")
        if len(value) > items_max:
            refuse_large(path, len(value), items_max, "entries")
        kept: dict[Any, Any] = {}
        for name, entry in value.items():
            read_name = key.read(name, path)
            if read_name in kept:
                refuse(path, f"the key {shown(name)} is there twice", "send it once")
            kept[read_name] = item.read(entry, f"{path}.{shown_key(name)}")
        return kept

    kind = f"map of {key.kind} to {item.kind}"
    limits = f"at most {items_max} entries; keys {key.limits}; each {item.limits}"
    return Reader(read, kind, limits, item.messages)


def _read_plain(value: object, path: str, levels: int = PLAIN_LEVELS_MAX) -> Any:
    """A free-form value without flaws, as the numbers of a reason or the data of an event are."""
    if levels == 0:
        refuse(path, f"more than {PLAIN_LEVELS_MAX} levels", "send fewer")
    if isinstance(value, dict):
        return {
            name: _read_plain(item, f"{path}.{name}", levels - 1) for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return tuple([_read_plain(item, f"{path}[]", levels - 1) for item in value])
    if isinstance(value, float) and not isfinite(value):
        refuse(path, f"{value} is not a finite number", "send null where it is not known")
    if value is not None and not isinstance(value, (bool, int, float, str, bytes)):
        refuse_type(value, path, "a plain value")
    return value


def _read_plain_map(value: object, path: str) -> dict[str, Any]:
    if type(value) is not dict:
        refuse_type(value, path, "a map")
    kept = _read_plain(value, path)
    assert isinstance(kept, dict)
    return {str(name): item for name, item in kept.items()}


plain_map = Reader(_read_plain_map, "map", f"free-form, at most {PLAIN_LEVELS_MAX} levels")
"""A free-form map with text keys."""
