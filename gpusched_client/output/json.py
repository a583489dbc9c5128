"""Responses as programs read them: one JSON value. Pure."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from enum import Enum
from typing import Any

from gpusched_client.wire.message import Message


def json_text(value: object) -> str:
    """One JSON value and a newline. ASCII, so that no byte of a command line can spoil it."""
    return json.dumps(json_value(value), allow_nan=False) + "\n"


def json_value(value: object) -> Any:
    """Messages as objects: times ISO 8601 under the names without _s, byte strings as text.

    What is not UTF-8 is text with escapes such as \\xff; the bytes themselves stand beside it, in
    base64, under its name with _base64.
    """
    if isinstance(value, Message):
        return json_value(value.to_wire())
    if isinstance(value, Mapping):
        items: dict[str, Any] = {}
        for name, item in value.items():
            items.update(_json_items(name, item))
        return items
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, str):
        return _unicode(value)
    return value.value if isinstance(value, Enum) else value


def _unicode(text: str) -> str:
    """Text without lone surrogates, which no strict reader of JSON takes."""
    if text.isascii() or re.search(_LONE, text) is None:
        return str(text)
    raw = re.sub(_STRANGE, "?", text).encode("utf-8", "surrogateescape")
    return raw.decode("utf-8", "backslashreplace")


_LONE = "[\ud800-\udfff]"
_STRANGE = "[\ud800-\udc7f\udd00-\udfff]"  # those that stand for no byte


def _json_items(name: Any, item: object) -> dict[str, Any]:
    name = json_value(name) if isinstance(name, (bytes, str)) else str(name)
    if name == "at_s" or name.endswith(("_at_s", "_start_s")):
        is_time = isinstance(item, (int, float))
        iso = _iso_time(item) if is_time else None  # type: ignore[arg-type]  # asked just above
        return {name.removesuffix("_s"): iso}
    items = {name: json_value(item)}
    raw = _raw(item)
    if raw is not None:
        items[f"{name}_base64"] = raw
    return items


def _raw(item: object) -> Any:
    """Base64 where a byte string, or one of a list of them, is not UTF-8; else None."""
    import base64

    if isinstance(item, bytes) and not _is_utf8(item):
        return base64.b64encode(item).decode()
    if isinstance(item, (list, tuple)) and any(
        isinstance(each, bytes) and not _is_utf8(each) for each in item
    ):
        return [base64.b64encode(each).decode() for each in item if isinstance(each, bytes)]
    return None


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _iso_time(at_s: float) -> str:
    """ISO 8601 in UTC, to the millisecond where there is a fraction."""
    whole, thousandths = divmod(round(at_s * 1000), 1000)
    fraction = f".{thousandths:03}" if thousandths else ""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + fraction + "Z"
