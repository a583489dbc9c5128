"""What a message is: named fields with their readers, out of a decoded map and back into one.

Requests are strict: an unknown field, a missing one or a wrong type is Invalid with the field's
path. Responses tolerate unknown fields, since the daemon may be newer than its client. Where a
response's field is optional, None means "not known" or "does not apply", never zero.

Messages are frozen, slotted dataclasses to those who use them, but their methods are written here
once instead of generated for each class. Measured: six generated methods cost 0.8 ms a class, so
those of a job's messages alone would add a tenth to the run time of `gq`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, dataclass_transform

from gpusched_client.wire.fields import Reader, refuse, refuse_type, shown_key

READER = "gpusched_reader"  # in a field's metadata
READER_OF_RESPONSE = "gpusched_reader_of_response"  # the same, where a response reads it otherwise

_NOTHING: Mapping[Any, Any] = MappingProxyType({})


def wire(
    reader: Reader, *, default: Any = MISSING, default_factory: Callable[[], Any] | Any = MISSING
) -> Any:
    """A field that `reader` reads. With default None, null and absence are the same."""
    return field(default=default, default_factory=default_factory, metadata={READER: reader})


def no_items() -> Mapping[Any, Any]:
    """The default of a map; nobody can change it."""
    return _NOTHING


class Message:
    """Base of all messages, and itself as strict as a request."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    is_response: ClassVar[bool] = False

    def __init__(self, *values: Any, **named: Any) -> None:
        cls = type(self)
        specs = specs_of(cls)
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
        return all(getattr(self, name) == getattr(other, name) for name in specs_of(type(self)))

    def __hash__(self) -> int:
        return hash(tuple([getattr(self, name) for name in specs_of(type(self))]))

    def __repr__(self) -> str:
        parts = [f"{name}={getattr(self, name)!r}" for name in specs_of(type(self))]
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
        """Raise Invalid or TooLarge for what no single field shows. Requests override it."""

    def to_wire(self) -> dict[str, Any]:
        """The map to send. Requests leave out what is at its default."""
        wire_map: dict[str, Any] = {}
        for spec in specs_of(type(self)).values():
            value = getattr(self, spec.name)
            if spec.is_omitted and value == spec.default:
                continue
            wire_map[spec.name] = value if type(value) in _SCALARS else written(value)
        return wire_map


M = TypeVar("M", bound=Message)


class Response(Message):
    """What the daemon sends: unknown fields are skipped, all known ones are always sent."""

    __slots__ = ()
    is_response: ClassVar[bool] = True


@dataclass_transform(frozen_default=True, field_specifiers=(wire,))
def message(cls: type[M]) -> type[M]:
    """Make a Message of a class whose fields `wire` makes; dataclasses.replace works on it."""
    return dataclass(init=False, repr=False, eq=False, slots=True)(cls)


@dataclass_transform(frozen_default=True, field_specifiers=(wire,))
def part(cls: type[M]) -> type[M]:
    """Make a group of fields that messages share by inheritance. The class needs `__slots__ = ()`:
    slots in two bases would keep a message from having both.
    """
    return dataclass(init=False, repr=False, eq=False)(cls)


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


class FieldSpec:
    """One field of a message: how it is read, its default, and how its slot is set.

    A message without a field that `is_required` is refused.
    """

    __slots__ = ("default", "is_omitted", "is_required", "name", "put", "read", "reader")

    def __init__(self, cls: type[Message], entry: Field[Any]) -> None:
        made = entry.default_factory
        self.name, self.default = entry.name, entry.default if made is MISSING else made()
        self.reader: Reader = entry.metadata[READER]
        if cls.is_response:
            self.reader = entry.metadata.get(READER_OF_RESPONSE, self.reader)
        self.read = self.reader.read
        self.put: Callable[[Message, object], None] = cls.__dict__[entry.name].__set__
        self.is_required = self.default is MISSING
        self.is_omitted = not cls.is_response and not self.is_required  # at its default


_SPECS: dict[type[Message], dict[str, FieldSpec]] = {}


def specs_of(cls: type[Message]) -> dict[str, FieldSpec]:
    """The fields of a message by name, in the order in which they are written."""
    specs = _SPECS.get(cls)
    if specs is None:
        specs = {entry.name: FieldSpec(cls, entry) for entry in fields(cls)}
        _SPECS[cls] = specs
    return specs


def read_fields(cls: type[Message], value: object, path: str) -> dict[str, Any]:
    """The fields present in `value`, each read; null is the absence of an optional one."""
    if type(value) is not dict:
        refuse_type(value, path, "a map")
    specs = specs_of(cls)
    kept: dict[str, Any] = {}
    for name, item in value.items():
        spec = specs.get(name) if type(name) is str else None
        here = f"{path}.{shown_key(name)}" if path else shown_key(name)
        if spec is None:
            if cls.is_response:
                continue
            refuse(here, "this field is not known", f"known are: {', '.join(specs) or 'none'}")
        if item is None and spec.default is None:
            continue
        kept[name] = spec.read(item, here)
    return kept


def require_fields(cls: type[Message], kept: Mapping[str, Any], path: str) -> None:
    """Raise Invalid where a field without default is missing."""
    for name, spec in specs_of(cls).items():
        if spec.is_required and name not in kept:
            refuse(f"{path}.{name}" if path else name, "this field is missing", "send it")


def nested(cls: type[Message]) -> Reader:
    """A message inside a message."""
    return Reader(cls.from_wire, cls.__name__, messages=(cls,))
