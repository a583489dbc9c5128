"""Responses as programs read them."""

from __future__ import annotations

from collections.abc import Iterator

from gpusched_client.output.json import json_value
from gpusched_client.wire import catalog
from gpusched_client.wire.message import Message
from gpusched_client.wire.values import TIME


def _messages(kind: type[Message] = Message) -> Iterator[type[Message]]:
    for each in kind.__subclasses__():
        yield each
        yield from _messages(each)


def test_each_time_of_the_wire_is_iso_8601() -> None:
    """It is told by its name, so each time must have such a one."""
    assert catalog.METHODS
    times = {
        name
        for kind in _messages()
        for name, entry in kind.declared.items()
        if entry.reader is TIME
    }
    assert {"submitted_at_s", "expected_start_s", "head_at_s"} <= times
    for name in times:
        shown = {name.removesuffix("_s"): "1970-01-01T00:00:07.250Z"}
        assert json_value({name: 7.25}) == shown
