"""Writes the wire's reference, the README.md beside this file, out of the declarations.

    python -m gpusched_client.wire.reference > gpusched_client/wire/README.md

Everything in it that a declaration says is taken from there; only what surrounds it is text here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import ModuleType
from typing import Any

from gpusched_client import errors
from gpusched_client.errors import GpuschedError
from gpusched_client.wire import framing, limits
from gpusched_client.wire.catalog import GROUPS, METHODS
from gpusched_client.wire.hello_messages import HelloResult
from gpusched_client.wire.job_messages import EVENT_METHOD, Event, JobView
from gpusched_client.wire.job_options import OPTIONS
from gpusched_client.wire.limits import PROTOCOL_VERSION
from gpusched_client.wire.message import FieldSpec, Message, specs_of
from gpusched_client.wire.methods import Request, Right, Unread
from gpusched_client.wire.submit_messages import JobRequest

_HEAD = f"""\
# The wire

Made by `python -m gpusched_client.wire.reference` from the declarations beside this file: edit
those, then make it again.

The daemon speaks MessagePack-RPC over a Unix socket, `/run/gpuschedd/gpuschedd.sock` or the one
that GPUSCHED_SOCKET names, so a client in any language will do. This is version {PROTOCOL_VERSION}.

| message | form |
| --- | --- |
| request | `[0, msgid, method, [params]]`; `params` is one map and may be left out |
| response | `[1, msgid, error, result]`; one of `error` and `result` is null |
| notification | `[2, method, [params]]`; from the daemon alone, after `watch` |

There is no length prefix. A client may send requests before earlier ones are answered; responses
carry the msgid and may come in another order. Who asks is what the kernel says of the other end of
the socket: no message has a user.

Requests are strict: a field that is unknown, missing or of another type is refused with its path.
A response may have fields that are not listed here: skip them. All that are listed are sent, null
where a value is not known or does not apply. Names ending in `_at_s` and `_start_s` are Unix times,
in `_s` otherwise seconds, in `_bytes` bytes. Byte strings (`bytes`) may be sent as `bin` or `str`.
"""

_EXAMPLE = """\
import os, socket, msgpack

daemon = socket.socket(socket.AF_UNIX)
daemon.connect(os.environ["GPUSCHED_SOCKET"])
messages = msgpack.Unpacker()


def call(method, params):
    daemon.sendall(msgpack.packb([0, 1, method, [params]]))
    while True:
        for _, _, error, result in messages:
            return error or result
        messages.feed(daemon.recv(65536))


job = {"argv": ["true"], "cwd": "/", "gpus": 0, "output": "/dev/null"}
submitted = call("submit", {"jobs": [job]})
ended = call("wait", {"job_ids": submitted["job_ids"]})
print(ended["jobs"][0]["state"])
"""

_RIGHTS = {
    Right.ALL: "whoever may connect",
    Right.OWNER: "the owner of each named job, and admins",
    Right.ADMIN: "root and the members of `admin_group`; in user mode the daemon's own user",
    Right.ROOT: "root; in user mode the daemon's own user",
}
_UNREAD = {
    Unread.NOTHING: "nothing: it only reads, and is dropped",
    Unread.FINISHED: "all of it, and it is on record",
    Unread.OPEN: "all or nothing; `submit` again with the same `submission_id` tells",
}
_OF_ANY_METHOD = (
    *(errors.Invalid, errors.TooLarge, errors.LimitReached, errors.Unavailable),
    errors.Internal,
)


def reference() -> str:
    """The whole text."""
    parts = [
        _HEAD,
        f"A whole client:\n\n```python\n{_EXAMPLE}```\n",
        _exchange(),
        _rights(),
        _errors(),
        _limits(),
        *[_group(group) for group in GROUPS],
        _notification(),
        "## Messages inside messages\n",
        *[_inner(cls) for cls in _inner_messages()],
    ]
    return "\n".join(parts)


# ---------------------------------------------------------------------- what surrounds methods


def _exchange() -> str:
    result = HelloResult(PROTOCOL_VERSION, "0.1.0", "system", 1000, "ann", admin=False)
    request = framing.encode_request(1, "hello", {})
    response = framing.encode_response(1, result.to_wire())
    return f"""\
## One exchange in bytes

    -> {request.hex(" ")}
       [0, 1, "hello", [{{}}]]
{_wrapped(response)}
       [1, 1, null, {_shown(result.to_wire())}]
"""


def _wrapped(data: bytes, per_line: int = 32) -> str:
    lines = [data[start : start + per_line].hex(" ") for start in range(0, len(data), per_line)]
    return "\n".join(
        f"    {'<-' if index == 0 else '  '} {line}" for index, line in enumerate(lines)
    )


def _rights() -> str:
    rows = [(f"`{right}`", words) for right, words in _RIGHTS.items()]
    done = [(f"`{unread}`", words) for unread, words in _UNREAD.items()]
    return (
        "## Rights\n\n"
        + _table(("right", "who may call"), rows)
        + "\n## Unread answers\n\n"
        + _table(("unread", "what is done where the client is gone before the answer"), done)
    )


def _errors() -> str:
    rows = [
        (f"`{kind.code}`", str(kind.exit_status), _first_line(kind))
        for kind in errors.BY_CODE.values()
    ]
    text = f"""\
## Errors

`error` is null or `{{code, message, data}}`: `message` is for people, `data` has the numbers, and
the `path` of the field where one was refused.
Any method may answer {_codes(_OF_ANY_METHOD)}.

"""
    return text + _table(("code", "exit status of a command", "meaning"), rows)


def _limits() -> str:
    source = inspect.getsource(limits)
    comments = dict(re.findall(r"^([A-Z_]+)\b.*?  # (.+)$", source, re.MULTILINE))
    rows = [
        (f"`{name}`", _shown(value), comments.get(name, ""))
        for name, value in vars(limits).items()
        if name.isupper() and isinstance(value, int) and name != "PROTOCOL_VERSION"
    ]
    return "## Limits\n\n" + _table(("name", "value", ""), rows)


# ----------------------------------------------------------------------------------- methods


def _group(group: ModuleType) -> str:
    about = str(group.__doc__).splitlines()[0]
    methods = [kind for kind in METHODS.values() if kind.__module__ == group.__name__]
    return f"## {about.removesuffix('.')}\n\n" + "\n".join(map(_method, methods))


def _method(kind: type[Request[Any]]) -> str:
    more = f" Errors of its own: {_codes(kind.errors)}." if kind.errors else ""
    text = f"### `{kind.method}`\n\n{_docstring(kind)}\n\n"
    text += f"Right: `{kind.right}`. Unread: `{kind.unread}`.{more}\n\n"
    text += _fields("Request", kind) + "\n"
    if kind.result is JobView:
        return text + f"Response: {_link(JobView)}.\n"
    return text + f"Response: {_docstring(kind.result)}\n\n" + _fields("", kind.result)


def _notification() -> str:
    text = f"## The notification `{EVENT_METHOD}`\n\n{_docstring(Event)}\n\n"
    return text + _fields("", Event)


def _inner(cls: type[Message]) -> str:
    return f"### {cls.__name__}\n\n{_docstring(cls)}\n\n" + _fields("", cls)


def _inner_messages() -> Iterator[type[Message]]:
    """Those that stand inside others, each once, in the order in which they are met."""
    met: dict[type[Message], None] = {JobRequest: None, JobView: None}
    waiting: list[type[Message]] = [*met]
    for kind in METHODS.values():
        waiting += [kind, kind.result]
    while waiting:
        for spec in specs_of(waiting.pop(0)).values():
            new = [cls for cls in spec.reader.messages if cls not in met]
            met |= dict.fromkeys(new)
            waiting += new
    yield from met


def _fields(heading: str, cls: type[Message]) -> str:
    specs = specs_of(cls)
    if not specs:
        return f"{heading}: no fields.\n" if heading else ""
    meaning = {row.field: row.help for row in OPTIONS.values()} if cls is JobRequest else {}
    rows = [_field(spec, cls, meaning) for spec in specs.values()]
    start = f"{heading}:\n\n" if heading else ""
    last = "may be null" if cls.is_response else "default"
    headings = ("field", "type", "limits", last, *(["meaning"] if meaning else []))
    return start + _table(headings, rows)


def _field(spec: FieldSpec, cls: type[Message], meaning: Mapping[str, str]) -> tuple[str, ...]:
    kind = spec.reader.kind
    for inner in spec.reader.messages:
        kind = kind.replace(inner.__name__, _link(inner))
    if cls.is_response:
        last = "yes" if spec.default is None else ""
    else:
        last = "required" if spec.is_required else _shown(spec.default)
    row = (f"`{spec.name}`", kind, spec.reader.limits, last)
    return (*row, meaning.get(spec.name, "")) if meaning else row


# -------------------------------------------------------------------------------------- text


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    headings = tuple(headings)
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join([f"| {' | '.join(cells)} |\n" for cells in lines])


def _codes(kinds: Iterable[type[GpuschedError]]) -> str:
    return ", ".join([f"`{kind.code}`" for kind in kinds])


def _link(cls: type[Message]) -> str:
    return f"[{cls.__name__}](#{cls.__name__.lower()})"


def _docstring(cls: type) -> str:
    return re.sub(r"\bNone\b", "null", inspect.cleandoc(str(cls.__doc__)))


def _first_line(cls: type) -> str:
    return _docstring(cls).splitlines()[0]


def _shown(value: object) -> str:
    """A value as JSON writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f'"{name}": {_shown(item)}' for name, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_shown, value)) + "]"
    if isinstance(value, Enum):
        return _shown(value.value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    print(reference(), end="")
