"""Sans-IO MessagePack-RPC: bytes in, frames out, and back.

Owns the envelope ([type, msgid, ...]) and what a message may cost before anybody looks into it.
Must not do I/O, know methods, or keep more than one unfinished message. Frames are plain classes:
named tuples of their number would add 3 ms to the start of every command, dataclasses more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgpack

from gpusched_client import errors
from gpusched_client.errors import GpuschedError, Internal, Invalid, TooLarge
from gpusched_client.wire.fields import InvalidValue, kind_of, shown, shown_key
from gpusched_client.wire.limits import (
    ARGV_ITEMS_MAX,
    CONTAINERS_MAX,
    ENVIRONMENT_ITEMS_MAX,
    NESTING_MAX,
    REQUEST_BYTES_MAX,
)

MSGID_MAX = 2**32 - 1
METHOD_BYTES_MAX = 64
_FEED_BYTES = 64 * 1024
_BUFFER_BYTES = 16 * 1024  # to begin with; the decoder's own default is 1 MiB a connection
_HEAD_BYTES = 16  # enough for [type, msgid]


class _Record:
    """Values under the names of its slots; equal to one of its kind with the same."""

    __slots__: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._values()!r}"

    def _values(self) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in self.__slots__])


class Limits(_Record):
    """What one message may have.

    `items` are array items and map entries, all containers together; `array_items` those of one
    array, whose header alone makes the decoder allocate so many pointers.
    """

    __slots__ = ("array_items", "containers", "items", "map_items", "message_bytes", "nesting")

    def __init__(
        self,
        message_bytes: int,
        containers: int,
        items: int,
        array_items: int,
        map_items: int,
        nesting: int = NESTING_MAX,
    ) -> None:
        self.message_bytes, self.nesting = message_bytes, nesting
        self.containers, self.items = containers, items
        self.array_items, self.map_items = array_items, map_items


REQUEST_LIMITS = Limits(
    message_bytes=REQUEST_BYTES_MAX,
    containers=CONTAINERS_MAX,
    items=131_072,
    array_items=ARGV_ITEMS_MAX,
    map_items=ENVIRONMENT_ITEMS_MAX,
)
RESPONSE_LIMITS = Limits(
    message_bytes=8 * 2**20,
    containers=200_000,
    items=2_000_000,
    array_items=100_000,
    map_items=100_000,
)


class RequestFrame(_Record):
    """[0, msgid, method, [params]]; params is an empty dict where none were sent."""

    __slots__ = ("method", "msgid", "params")

    def __init__(self, msgid: int, method: str, params: Any) -> None:
        self.msgid, self.method, self.params = msgid, method, params


class ResponseFrame(_Record):
    """[1, msgid, error, result]; `error` is the typed error, or None."""

    __slots__ = ("error", "msgid", "result")

    def __init__(self, msgid: int | None, error: GpuschedError | None, result: Any) -> None:
        self.msgid, self.error, self.result = msgid, error, result


class NotificationFrame(_Record):
    """[2, method, [params]]."""

    __slots__ = ("method", "params")

    def __init__(self, method: str, params: Any) -> None:
        self.method, self.params = method, params


class Malformed(_Record):
    """A message that cannot be taken: answer `error` to `msgid` (null when None).

    After `is_fatal` the boundaries of messages are lost and the decoder is dead: answer and close.
    """

    __slots__ = ("error", "is_fatal", "msgid")

    def __init__(self, msgid: int | None, error: GpuschedError, is_fatal: bool) -> None:
        self.msgid, self.error, self.is_fatal = msgid, error, is_fatal


Incoming = RequestFrame | ResponseFrame | NotificationFrame | Malformed


class _Contents:
    """What has been decoded of one message, counted in the hooks that msgpack calls.

    It is apart from the decoder because hooks bound to that would make a cycle, which would keep
    the buffers of each closed connection until the next full garbage collection.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._containers = self._items = 0

    def forget(self) -> None:
        """Another message begins."""
        self._containers = self._items = 0

    def _count(self, items: int) -> None:
        """Count a finished container, while decoding, so that a flood of them stops early."""
        self._containers += 1
        self._items += items
        if self._containers > self._limits.containers:
            raise _too_large("message", self._containers, self._limits.containers, "containers")
        if self._items > self._limits.items:
            raise _too_large("message", self._items, self._limits.items, "items")

    def take_list(self, items: list[Any]) -> list[Any]:
        """An array is whole."""
        self._count(len(items))
        return items

    def take_map(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any] | InvalidValue:
        """A map is whole."""
        self._count(len(pairs))
        for key, _ in pairs:
            if type(key) is not str and type(key) is not bytes:
                return InvalidValue(f"the key {shown(key)} is neither text nor a byte string")
        entries = dict(pairs)
        return entries if len(entries) == len(pairs) else InvalidValue(_duplicate_text(pairs))


class Decoder:
    """Turns a stream of bytes into messages, within limits.

    A duplicate key or an extension type becomes an InvalidValue, so that the reader of the fields
    can name the path; invalid UTF-8 becomes lone surrogates for the same reason.
    """

    def __init__(self, limits: Limits = REQUEST_LIMITS) -> None:
        self._limits = limits
        self._contents = _Contents(limits)
        self._fed_bytes = 0  # all bytes ever fed
        self._message_start = 0  # offset in the stream of the unfinished message
        self._head = b""  # its first bytes, for the msgid of a refusal
        self._failure: GpuschedError | None = None
        self._unpacker = msgpack.Unpacker(
            read_size=_BUFFER_BYTES,
            max_buffer_size=limits.message_bytes + _FEED_BYTES,
            max_str_len=limits.message_bytes,
            max_bin_len=limits.message_bytes,
            max_array_len=limits.array_items,
            max_map_len=limits.map_items,
            max_ext_len=limits.message_bytes,
            strict_map_key=False,
            unicode_errors="surrogateescape",
            object_pairs_hook=self._contents.take_map,
            list_hook=self._contents.take_list,
            ext_hook=_take_ext,
            timestamp=0,
        )

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the unfinished message so far."""
        return self._fed_bytes - self._message_start

    @property
    def is_mid_message(self) -> bool:
        """True between the first and the last byte of a message."""
        return self.buffered_bytes > 0

    @property
    def failure(self) -> GpuschedError | None:
        """What ended this decoder, or None."""
        return self._failure

    def feed(self, data: bytes | bytearray | memoryview) -> list[Incoming]:
        """The messages that `data` completes. Raises the failure again on a dead decoder."""
        if self._failure is not None:
            raise self._failure
        messages: list[Incoming] = []
        view = memoryview(data)
        for start in range(0, len(view), _FEED_BYTES):
            self._feed_part(bytes(view[start : start + _FEED_BYTES]), messages)
            if self.failure is not None:
                break
        return messages

    def _feed_part(self, part: bytes, messages: list[Incoming]) -> None:
        part_start = self._fed_bytes
        if len(self._head) < _HEAD_BYTES:
            self._head += part[: _HEAD_BYTES - len(self._head)]
        self._fed_bytes += len(part)
        try:
            self._unpacker.feed(part)
            while (value := self._next_value()) is not _NOTHING:
                end = self._unpacker.tell()
                self._check_size(end - self._message_start)
                message = _message(value, self._limits.nesting)
                messages.append(message)
                self._message_start = end
                self._head = part[end - part_start :][:_HEAD_BYTES]
                self._contents.forget()
        except GpuschedError as error:
            self._failure = _without_traceback(error)
            messages.append(Malformed(_msgid_in(self._head), self._failure, is_fatal=True))

    def _next_value(self) -> Any:
        """The next decoded value or _NOTHING; every failure of the decoder as a typed error."""
        try:
            return self._unpacker.unpack()
        except msgpack.OutOfData:
            self._check_size(self.buffered_bytes)
            return _NOTHING
        except msgpack.StackError as error:
            raise _too_deep(self._limits.nesting) from error
        except (ValueError, msgpack.BufferFull) as error:
            raise _not_taken(error) from error

    def _check_size(self, size: int) -> None:
        limit = self._limits.message_bytes
        if size > limit:
            raise _too_large("message", size, limit, "bytes")


_NOTHING = object()


def _without_traceback(error: GpuschedError) -> GpuschedError:
    """An error to keep: its traceback would hold the callers, and they its keeper, a cycle."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def _take_ext(code: int, data: bytes) -> InvalidValue:
    return InvalidValue(f"an extension type ({code}, {len(data)} bytes)")


def _duplicate_text(pairs: list[tuple[Any, Any]]) -> str:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            return f"the key {shown(key)} is there twice"
        seen.add(key)
    raise AssertionError("called without a duplicate")


def _too_large(what: str, size: int, limit: int, unit: str) -> TooLarge:
    return TooLarge(
        f"{what} of {size} {unit} or more; the limit is {limit}. Send less at once.",
        {"path": "", "value": size, "limit": limit},
    )


def _too_deep(limit: int) -> Invalid:
    return Invalid(
        f"message nested deeper than {limit} levels; send fewer", {"path": "params", "limit": limit}
    )


def _not_taken(error: Exception) -> GpuschedError:
    """What the decoder refused: a length over its limit, or bytes that are not MessagePack."""
    text = str(error) or type(error).__name__
    if isinstance(error, msgpack.BufferFull) or "exceeds max" in text:
        return TooLarge(f"message too large: {text}. Send less at once.", {"path": ""})
    return Invalid(f"not MessagePack: {text}; send MessagePack-RPC", {"path": ""})


def _not_an_envelope(problem: str) -> Invalid:
    return Invalid(
        f"not MessagePack-RPC: {problem}; send [0, msgid, method, [params]]", {"path": ""}
    )


def _message(value: Any, levels: int) -> Incoming:
    """The message in a decoded value. Raises Invalid where the envelope itself is broken."""
    if type(value) is not list or not value or type(value[0]) is not int:
        raise _not_an_envelope("it is not an array that begins with a type")
    kind, length = value[0], len(value)
    if kind == 2 and length == 3:
        return _notification(value, levels)
    if kind not in (0, 1) or length != 4:
        raise _not_an_envelope(f"type {kind} with {length} elements")
    msgid = value[1]
    if kind == 1 and msgid is None:
        return ResponseFrame(None, _error_in(value[2]), value[3])
    if type(msgid) is not int or not 0 <= msgid <= MSGID_MAX:
        raise _not_an_envelope(f"msgid {shown(msgid)} is not an integer from 0 to {MSGID_MAX}")
    if _is_deeper(value, levels):
        return Malformed(msgid, _too_deep(levels), is_fatal=False)
    if kind == 1:
        return ResponseFrame(msgid, _error_in(value[2]), value[3])
    try:
        return RequestFrame(msgid, _method(value[2]), _params(value[3]))
    except Invalid as error:
        return Malformed(msgid, _without_traceback(error), is_fatal=False)


def _notification(value: list[Any], levels: int) -> Incoming:
    if _is_deeper(value, levels):
        return Malformed(None, _too_deep(levels), is_fatal=False)
    try:
        return NotificationFrame(_method(value[1]), _params(value[2]))
    except Invalid as error:
        return Malformed(None, _without_traceback(error), is_fatal=False)


def _method(value: Any) -> str:
    if type(value) is not str or not value.isascii() or not 1 <= len(value) <= METHOD_BYTES_MAX:
        raise Invalid(
            f"method {shown(value)} is not a name of 1 to {METHOD_BYTES_MAX} ASCII characters",
            {"path": "method"},
        )
    return value


def _params(value: Any) -> Any:
    """The one map in the array, or an empty one; the methods judge what is in it."""
    if type(value) is not list or len(value) > 1:
        kind = f"an array of {len(value)}" if type(value) is list else kind_of(value)
        raise Invalid(f"params is {kind}; send an array with one map", {"path": "params"})
    return value[0] if value else {}


def _error_in(value: Any) -> GpuschedError | None:
    """The typed error of a response; what is not an error map of ours becomes Internal."""
    if value is None:
        return None
    if isinstance(value, dict):
        data = value.get("data")
        return errors.from_wire(
            str(value.get("code")),
            str(value.get("message", "")),
            data if isinstance(data, dict) else None,
        )
    return Internal(f"the server says {shown(value)}")


def _is_deeper(value: Any, levels: int) -> bool:
    """True when containers are nested deeper than `levels`; level by level, without recursion."""
    layer = [value]
    while layer and levels > 0:
        levels -= 1
        layer = [
            child
            for container in layer
            for child in (container.values() if type(container) is dict else container)
            if type(child) is list or type(child) is dict
        ]
    return bool(layer)


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """What a message's params consist of in the end, each with where it stands."""
    if isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _leaves(each, f"{path}[{number}]")
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{path}.{shown_key(key)}".lstrip("."))
    else:
        yield path, value


def _has_room(value: object) -> bool:
    """Whether MessagePack has room for it, where it is an integer."""
    return not isinstance(value, int) or -(2**63) <= value < 2**64


def _msgid_in(head: bytes) -> int | None:
    """The msgid of a request of which only the first bytes are known, or None."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(head)
    try:
        if unpacker.read_array_header() != 4 or unpacker.unpack() != 0:
            return None
        msgid = unpacker.unpack()
    except (ValueError, msgpack.UnpackException):
        return None
    return msgid if type(msgid) is int and 0 <= msgid <= MSGID_MAX else None


# ---------------------------------------------------------------------------------- encoding


def encode_request(msgid: int, method: str, params: Mapping[str, Any]) -> bytes:
    """A request's bytes; TooLarge above REQUEST_BYTES_MAX, Invalid where text is not Unicode."""
    try:
        data = _packed([0, msgid, method, [params]], "strict")
    except UnicodeEncodeError as error:
        path = next((path for path, leaf in _leaves(params) if leaf == error.object), "")
        text = f"{path or 'params'}: {shown(error.object)} is not valid UTF-8; send valid UTF-8"
        raise Invalid(text, {"path": path}) from error
    except OverflowError as error:
        found = (each for each in _leaves(params) if not _has_room(each[1]))
        path, number = next(found, ("params", "an integer"))
        text = f"{path}: {shown(number)} is outside 64 bits; give a smaller one"
        raise Invalid(text, {"path": path}) from error
    if len(data) > REQUEST_BYTES_MAX:
        raise _too_large("request", len(data), REQUEST_BYTES_MAX, "bytes")
    return data


def encode_response(msgid: int | None, result: Any = None) -> bytes:
    """A successful response's bytes; TooLarge above what a client takes."""
    data = _packed([1, msgid, None, result], "backslashreplace")
    if len(data) > RESPONSE_LIMITS.message_bytes:
        raise _too_large("response", len(data), RESPONSE_LIMITS.message_bytes, "bytes")
    return data


def encode_error(msgid: int | None, error: GpuschedError) -> bytes:
    """A refusal's bytes; msgid None (null) where it could not be read."""
    wire_error = {"code": error.code, "message": error.message, "data": error.data}
    return _packed([1, msgid, wire_error, None], "backslashreplace")


def encode_notification(method: str, params: Mapping[str, Any]) -> bytes:
    """A notification's bytes."""
    return _packed([2, method, [params]], "backslashreplace")


def _packed(value: Any, unicode_errors: str) -> bytes:
    data = msgpack.packb(value, use_bin_type=True, unicode_errors=unicode_errors)
    assert isinstance(data, bytes)
    return data
