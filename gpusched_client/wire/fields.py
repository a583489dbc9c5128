"""How one field of a message is read: strict readers with the path of the field in every refusal.

Owns the checks that all messages share. Knows no method and no transport; protocol.py says which
field is read by what.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from enum import Enum, StrEnum
from math import isfinite
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn, TypeVar, dataclass_transform

from gpusched_client.errors import Invalid, TooLarge

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
TEXT_BYTES_MAX = 4096
PLAIN_LEVELS_MAX = 16  # levels of a free-form value, such as the numbers of a reason
_SHOWN_CHARS_MAX = 60

Reader = Callable[[object, str], Any]
"""Takes a decoded value and its path, returns the value to keep, raises Invalid or TooLarge."""


class Flaw:
    """Stands in a decoded message for what MessagePack can say and this protocol cannot.

    The decoder puts it where a duplicate key or an extension type was, so that the refusal can
    name the field instead of the whole message.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def shown(value: object) -> str:
    """A value as a message may quote it: short, one line, printable."""
    text = ascii(value) if isinstance(value, (bytes, str, int, float)) else type(value).__name__
    return text if len(text) <= _SHOWN_CHARS_MAX else text[: _SHOWN_CHARS_MAX - 3] + "..."


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


def _wrong_type(value: object, path: str, needed: str) -> NoReturn:
    if isinstance(value, Flaw):
        refuse(path, value.text, "remove it")
    kind = kind_of(value)
    quoted = f"{shown(value)} is " if isinstance(value, (bool, int, float, str, bytes)) else ""
    refuse(path, f"{quoted}{kind}", f"{needed} is needed")


def integer(low: int = INT64_MIN, high: int = INT64_MAX) -> Reader:
    """An integer in [low, high]; a boolean is none."""

    def read(value: object, path: str) -> int:
        if type(value) is not int:
            _wrong_type(value, path, f"an integer from {low} to {high}")
        if not low <= value <= high:
            refuse(path, f"{value} is out of range", f"use an integer from {low} to {high}")
        return value

    return read


def number(low: float, high: float) -> Reader:
    """A finite integer or float in [low, high], kept as float."""

    def read(value: object, path: str) -> float:
        if type(value) is not int and type(value) is not float:
            _wrong_type(value, path, f"a number from {low} to {high}")
        if not isfinite(value) or not low <= value <= high:
            refuse(path, f"{value} is out of range", f"use a number from {low} to {high}")
        return float(value)

    return read


def boolean(value: object, path: str) -> bool:
    """True or false; 0 and 1 are none."""
    if type(value) is not bool:
        _wrong_type(value, path, "true or false")
    return value


def text(bytes_max: int = TEXT_BYTES_MAX, pattern: str | None = None, rule: str = "") -> Reader:
    """Text of valid Unicode without NUL; `rule` is the pattern in words."""
    compiled = re.compile(pattern) if pattern else None

    def read(value: object, path: str) -> str:
        if type(value) is not str:
            _wrong_type(value, path, "text")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            refuse(path, f"{shown(value)} is not valid UTF-8", "send valid UTF-8")
        if size > bytes_max:
            refuse_large(path, size, bytes_max, "bytes")
        if "\0" in value:
            refuse(path, f"{shown(value)} has a NUL character", "remove it")
        if compiled is not None and not compiled.fullmatch(value):
            refuse(path, f"{shown(value)} is not allowed", f"use {rule}")
        return value

    return read


def octets(bytes_max: int, *, nul: bool = False, empty: bool = True) -> Reader:
    """A byte string, sent as `bin` or `str`; NUL only where `nul` says so."""

    def read(value: object, path: str) -> bytes:
        if type(value) is str:
            try:
                value = value.encode("utf-8", "surrogateescape")
            except UnicodeEncodeError:
                refuse(path, f"{shown(value)} is not valid UTF-8", "send it as `bin`")
        if type(value) is not bytes:
            _wrong_type(value, path, "a byte string (`bin` or `str`)")
        if len(value) > bytes_max:
            refuse_large(path, len(value), bytes_max, "bytes")
        if not nul and b"\0" in value:
            refuse(path, f"{shown(value)} has a NUL byte", "remove it")
        if not empty and not value:
            refuse(path, "it is empty", "give at least one byte")
        return value

    return read


def list_of(item: Reader, items_max: int, items_min: int = 0) -> Reader:
    """An array of items_min to items_max items, kept as a tuple."""

    def read(value: object, path: str) -> tuple[Any, ...]:
        if type(value) is not list and type(value) is not tuple:
            _wrong_type(value, path, "an array")
        if len(value) > items_max:
            refuse_large(path, len(value), items_max, "items")
        if len(value) < items_min:
            refuse(path, f"{len(value)} items", f"give at least {items_min}")
        return tuple([item(entry, f"{path}[{index}]") for index, entry in enumerate(value)])

    return read


def map_of(key: Reader, item: Reader, items_max: int) -> Reader:
    """A map of at most items_max entries whose keys are distinct also after reading."""

    def read(value: object, path: str) -> dict[Any, Any]:
        if type(value) is not dict:
            _wrong_type(value, path, "a map")
        if len(value) > items_max:
            refuse_large(path, len(value), items_max, "entries")
        kept: dict[Any, Any] = {}
        for name, entry in value.items():
            read_name = key(name, path)
            if read_name in kept:
                refuse(path, f"the key {shown(name)} is there twice", "send it once")
            kept[read_name] = item(entry, f"{path}.{_name_text(name)}")
        return kept

    return read


def _name_text(name: object) -> str:
    """A key as part of a path: an environment's keys may be any bytes."""
    if isinstance(name, bytes):
        name = name.decode("utf-8", "backslashreplace")
    text_of = str(name)
    return text_of if text_of.isprintable() and len(text_of) <= _SHOWN_CHARS_MAX else shown(name)


def word(kind: type[StrEnum]) -> Reader:
    """One of the values of an enum of words."""

    def read(value: object, path: str) -> StrEnum:
        if not isinstance(value, str):
            _wrong_type(value, path, "text")
        try:
            return kind(value)
        except ValueError:
            words = ", ".join(kind)
            refuse(path, f"{shown(value)} is not known", f"use one of {words}")

    return read


def one_of(*words: str) -> Reader:
    """One of a few words."""

    def read(value: object, path: str) -> str:
        if not isinstance(value, str):
            _wrong_type(value, path, "text")
        if value not in words:
            refuse(path, f"{shown(value)} is not known", f"use {' or '.join(words)}")
        return value

    return read


def plain(value: object, path: str) -> Any:
    """A free-form value without flaws, as the numbers of a reason or the data of an event are."""
    return _plain(value, path, PLAIN_LEVELS_MAX)


def _plain(value: object, path: str, levels: int) -> Any:
    if levels == 0:
        refuse(path, f"more than {PLAIN_LEVELS_MAX} levels", "send fewer")
    if isinstance(value, dict):
        return {name: _plain(item, f"{path}.{name}", levels - 1) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple([_plain(item, f"{path}[]", levels - 1) for item in value])
    if isinstance(value, float) and not isfinite(value):
        refuse(path, f"{value} is not a finite number", "send null where it is not known")
    if value is not None and not isinstance(value, (bool, int, float, str, bytes)):
        _wrong_type(value, path, "a plain value")
    return value


def plain_map(value: object, path: str) -> dict[str, Any]:
    """A free-form map with text keys."""
    if type(value) is not dict:
        _wrong_type(value, path, "a map")
    kept = plain(value, path)
    assert isinstance(kept, dict)
    return {str(name): item for name, item in kept.items()}


_READER = "gpusched_reader"


_NOTHING: Mapping[Any, Any] = MappingProxyType({})


def wire(
    reader: Reader, *, default: Any = MISSING, default_factory: Callable[[], Any] | Any = MISSING
) -> Any:
    """A field that `reader` reads. With default None, null and absence are the same."""
    return field(default=default, default_factory=default_factory, metadata={_READER: reader})


def no_items() -> Mapping[Any, Any]:
    """The default of a map; nobody can change it."""
    return _NOTHING


class Message:
    """Base of all messages: reads itself from a decoded map and writes itself into one.

    Messages are frozen, slotted dataclasses to those who use them. Their methods are written once,
    here, since generating six for each of the classes takes a fifth of a command's run time.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    tolerates_unknown: ClassVar[bool] = False  # a response may come from a newer daemon

    def __init__(self, *values: Any, **named: Any) -> None:
        cls = type(self)
        specs = _specs(cls)
        if len(values) > len(specs):
            raise TypeError(f"{cls.__name__} takes {len(specs)} values, got {len(values)}")
        given = dict(zip(specs, values, strict=False)) if values else {}
        if not named.keys() <= specs.keys() or given.keys() & named.keys():
            raise TypeError(f"{cls.__name__}: a field not known, or twice: {', '.join(named)}")
        given.update(named)
        for name, spec in specs.items():
            value = given.get(name, spec.default)
            if value is MISSING:
                raise TypeError(f"{cls.__name__} needs {name}")
            spec.put(self, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot be assigned")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _specs(type(self)))

    def __hash__(self) -> int:
        return hash(tuple([getattr(self, name) for name in _specs(type(self))]))

    def __repr__(self) -> str:
        parts = [f"{name}={getattr(self, name)!r}" for name in _specs(type(self))]
        return f"{type(self).__name__}({', '.join(parts)})"

    @classmethod
    def from_wire(cls: type[M], value: object, path: str = "") -> M:
        """The message in `value`; raises Invalid or TooLarge with the path of the field."""
        kept = read_fields(cls, value, path)
        require_fields(cls, kept, path)
        read = cls(**kept)
        read.check(path)
        return read

    def check(self, path: str) -> None:
        """Raise what no single field can tell. Requests override it."""

    def to_wire(self) -> dict[str, Any]:
        """The map to send. Requests leave out what is at its default."""
        wire_map: dict[str, Any] = {}
        for spec in _specs(type(self)).values():
            value = getattr(self, spec.name)
            if spec.omits and value == spec.default:
                continue
            wire_map[spec.name] = value if type(value) in _SCALARS else written(value)
        return wire_map


M = TypeVar("M", bound=Message)


@dataclass_transform(frozen_default=True, field_specifiers=(wire,))
def message(cls: type[M]) -> type[M]:
    """Make a Message of a class whose fields `wire` makes; dataclasses.replace works on it."""
    return dataclass(init=False, repr=False, eq=False, slots=True)(cls)


_SCALARS = frozenset({int, str, bytes, bool, float, type(None)})


def written(value: Any) -> Any:
    """A field's value in the types that MessagePack knows."""
    if isinstance(value, Message):
        return value.to_wire()
    if isinstance(value, (tuple, list)):
        return [item if type(item) in _SCALARS else written(item) for item in value]
    if isinstance(value, Mapping):
        return {
            name: item if type(item) in _SCALARS else written(item) for name, item in value.items()
        }
    if isinstance(value, Enum):
        return value.value
    return value


class _Spec:
    """One field: its reader, its default, how its slot is set, and whether a default is sent."""

    __slots__ = ("default", "name", "omits", "put", "reader")

    def __init__(self, cls: type[Message], entry: Field[Any]) -> None:
        made = entry.default_factory
        self.name, self.default = entry.name, entry.default if made is MISSING else made()
        self.reader: Reader = entry.metadata[_READER]
        self.put: Callable[[Message, object], None] = cls.__dict__[entry.name].__set__
        self.omits = self.default is not MISSING and not cls.tolerates_unknown


_SPECS: dict[type[Message], dict[str, _Spec]] = {}


def _specs(cls: type[Message]) -> dict[str, _Spec]:
    specs = _SPECS.get(cls)
    if specs is None:
        specs = {entry.name: _Spec(cls, entry) for entry in fields(cls)}
        _SPECS[cls] = specs
    return specs


def read_fields(cls: type[Message], value: object, path: str) -> dict[str, Any]:
    """The fields present in `value`, each read; null is the absence of an optional one."""
    if type(value) is not dict:
        _wrong_type(value, path, "a map")
    specs = _specs(cls)
    kept: dict[str, Any] = {}
    for name, item in value.items():
        spec = specs.get(name) if type(name) is str else None
        here = f"{path}.{_name_text(name)}" if path else _name_text(name)
        if spec is None:
            if cls.tolerates_unknown:
                continue
            refuse(here, "this field is not known", f"known are: {', '.join(specs) or 'none'}")
        if item is None and spec.default is None:
            continue
        kept[name] = spec.reader(item, here)
    return kept


def require_fields(cls: type[Message], kept: Mapping[str, Any], path: str) -> None:
    """Raise Invalid where a field without default is missing."""
    for name, spec in _specs(cls).items():
        if spec.default is MISSING and name not in kept:
            refuse(f"{path}.{name}" if path else name, "this field is missing", "send it")


def nested(cls: type[Message]) -> Reader:
    """A message inside a message."""
    return cls.from_wire
