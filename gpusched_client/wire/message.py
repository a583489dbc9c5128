"""What a message is: named fields with their readers, out of a decoded map and back into one.

Requests are strict: an unknown field, a missing one or a wrong type is Invalid with the field's
path. Responses tolerate unknown fields, since the daemon may be newer than its client. Where a
response's field is optional, None means "not known" or "does not apply", never zero.

Messages are frozen, slotted dataclasses to those who use them, but made without that module: their
methods are written once instead of generated for each class, and what dataclasses.replace reads is
made when somebody calls it. Measured: as dataclasses a job's messages alone would take 16 ms of
each start of a command, and the module with what it imports 8 where nothing else needs that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, cast, dataclass_transform

from gpusched_client.wire.fields import Reader, refuse, refuse_type, shown_key

if TYPE_CHECKING:
    from dataclasses import Field

MISSING: Any = object()  # the default of a field that has none
NO_ITEMS: Mapping[Any, Any] = MappingProxyType({})  # the default of a map; nobody can change it


class Declared:
    """A field as its class declares it. `row` is what it was made from, if it was a table's.

    A response reads it with `reader_of_response`, where that is another one.
    """

    __slots__ = ("default", "reader", "reader_of_response", "row")

    def __init__(
        self,
        reader: Reader,
        default: Any = MISSING,
        reader_of_response: Reader | None = None,
        row: Any = None,
    ) -> None:
        self.reader, self.default, self.row = reader, default, row
        self.reader_of_response = reader_of_response or reader

    def as_field(self) -> Any:
        """The same for dataclasses, whose defaults can be hashed or are made anew."""
        from dataclasses import field

        return field() if self.default is MISSING else field(default_factory=lambda: self.default)


def wire(reader: Reader, *, default: Any = MISSING) -> Any:
    """A field that `reader` reads. With default None, null and absence are the same."""
    return Declared(reader, default)


class _DataclassFields:
    """What dataclasses.replace, fields and asdict read of a message, made when they do."""

    def __init__(self) -> None:
        self._made: dict[type[Message], dict[str, Field[Any]]] = {}

    def __get__(self, _instance: object, cls: type[Message]) -> dict[str, Field[Any]]:
        if cls not in self._made:
            from dataclasses import fields, make_dataclass

            entries = [(name, Any, entry.as_field()) for name, entry in cls.declared.items()]
            made = make_dataclass(cls.__name__, entries, init=False, repr=False, eq=False)
            self._made[cls] = {entry.name: entry for entry in fields(made)}
        return self._made[cls]


def _frozen(text: str) -> NoReturn:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(text)


class Message:
    """Base of all messages, and itself as strict as a request."""

    __slots__ = ()
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    else:
        __dataclass_fields__ = _DataclassFields()
    declared: ClassVar[Mapping[str, Declared]] = {}
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
        _frozen(f"{type(self).__name__}.{name} cannot be assigned")

    def __delattr__(self, name: str) -> None:
        _frozen(f"{type(self).__name__}.{name} cannot be deleted")

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
        return written_fields(self, specs_of(type(self)).values())


M = TypeVar("M", bound=Message)


class Response(Message):
    """What the daemon sends: unknown fields are skipped, all known ones are always sent."""

    __slots__ = ()
    is_response: ClassVar[bool] = True


@dataclass_transform(frozen_default=True, field_specifiers=(wire,))
def message(cls: type[M]) -> type[M]:
    """Make a Message of a class whose fields `wire` makes; dataclasses.replace works on it."""
    names = _declare(cls)
    # Slots can only be given to a new class. Those of a part are made here, in its messages.
    content = {name: value for name, value in vars(cls).items() if name not in names}
    content.pop("__dict__", None)
    content.pop("__weakref__", None)
    slots = {name for base in cls.__mro__[1:] for name in vars(base).get("__slots__", ())}
    content["__slots__"] = tuple([name for name in names if name not in slots])
    made = cast(type[M], type(cls.__name__, cls.__bases__, content))
    made.__qualname__ = cls.__qualname__
    return made


@dataclass_transform(frozen_default=True, field_specifiers=(wire,))
def part(cls: type[M]) -> type[M]:
    """Make a group of fields that messages share by inheritance. The class needs `__slots__ = ()`:
    slots in two bases would keep a message from having both.
    """
    _declare(cls)
    return cls


def _declare(cls: type[Message]) -> Mapping[str, Declared]:
    """Gather the fields of a class, those of its bases first, in the order of dataclasses."""
    declared: dict[str, Declared] = {}
    for base in reversed(cls.__mro__[1:]):
        declared.update(vars(base).get("declared", {}))
    declared.update(
        {name: entry for name, entry in vars(cls).items() if isinstance(entry, Declared)}
    )
    cls.declared = declared
    return declared


def changed(old: M, **changes: Any) -> M:
    """The same with some fields changed, as dataclasses.replace gives it, and faster."""
    cls = type(old)
    new = cls.__new__(cls)
    specs = specs_of(cls)
    for name, spec in specs.items():
        spec.put(new, getattr(old, name))
    for name, value in changes.items():
        specs[name].put(new, value)
    return new


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


def written_fields(of: Message, specs: Iterable[FieldSpec]) -> dict[str, Any]:
    """The map to send of some fields. Those of requests are left out at their default."""
    wire_map: dict[str, Any] = {}
    for spec in specs:
        value = getattr(of, spec.name)
        if spec.is_omitted and value == spec.default:
            continue
        wire_map[spec.name] = value if type(value) in _SCALARS else written(value)
    return wire_map


class FieldSpec:
    """One field of a message: how it is read, its default, and how its slot is set.

    A message without a field that `is_required` is refused.
    """

    __slots__ = ("default", "is_omitted", "is_required", "name", "put", "read", "reader")

    def __init__(self, cls: type[Message], name: str, entry: Declared) -> None:
        self.name, self.default = name, entry.default
        self.reader = entry.reader_of_response if cls.is_response else entry.reader
        self.read = self.reader.read
        self.put: Callable[[Message, object], None] = cls.__dict__[name].__set__
        self.is_required = self.default is MISSING
        self.is_omitted = not cls.is_response and not self.is_required  # at its default


_SPECS: dict[type[Message], dict[str, FieldSpec]] = {}


def specs_of(cls: type[Message]) -> dict[str, FieldSpec]:
    """The fields of a message by name, in the order in which they are written."""
    specs = _SPECS.get(cls)
    if specs is None:
        specs = {name: FieldSpec(cls, name, entry) for name, entry in cls.declared.items()}
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
