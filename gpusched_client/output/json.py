"""Responses as programs read them: one JSON value. Pure."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from enum import Enum
from typing import Any

from gpusched_client.wire.message import Message


def json_text(value: object) -> str:
    """One JSON value and a newline. ASCII, so that no byte of a command line can spoil it."""
    return json.dumps(json_value(value), allow_nan=False) + "\n"


def json_value(value: object) -> Any:
    """Messages as objects: times ISO 8601 under the names without _s, byte strings as text."""
    if isinstance(value, Message):
        return json_value(value.to_wire())
    if isinstance(value, Mapping):
        return dict([_json_item(name, item) for name, item in value.items()])
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, bytes):
        return os.fsdecode(value)
    return value.value if isinstance(value, Enum) else value


def _json_item(name: Any, item: object) -> tuple[str, Any]:
    name = os.fsdecode(name) if isinstance(name, bytes) else str(name)
    if name == "at_s" or name.endswith(("_at_s", "_start_s")):
        is_time = isinstance(item, (int, float))
        return name.removesuffix("_s"), _iso_time(item) if is_time else None  # type: ignore[arg-type]
    return name, json_value(item)


def _iso_time(at_s: float) -> str:
    """ISO 8601 in UTC, to the millisecond where there is a fraction."""
    whole, thousandths = divmod(round(at_s * 1000), 1000)
    fraction = f".{thousandths:03}" if thousandths else ""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + fraction + "Z"
