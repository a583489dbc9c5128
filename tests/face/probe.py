"""What each request takes, found out by asking: which fields, of which types, which are needed.

A value of the wrong type is refused with the path of its field; all else went further. So a field
that is gone, or reads another type, shows, and what the refusal says may change its words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.face.normal import kind
from tests.face.wire import Refused, Wire

NOBODY = 2**40  # the id of no job: asked about it, nothing changes
VALUES: tuple[Any, ...] = (None, True, 1, 1.5, "text", b"bytes", [], {})
JOB = {"argv": ["true"], "cwd": "/", "gpus": 1, "hold": True}
#: Values of a field's own, where those above are of the right type and no good.
OWN: Mapping[str, tuple[Any, ...]] = {
    "argv": (["text"], [b"bytes"], [1]),
    "args": (["text"], [b"bytes"], [1]),
    "cwd": ("/", b"/"),
    "environment": ({"A": "text"}, {b"A": b"bytes"}, {"A": 1}),
    "rlimits": ({"nofile": [1, -1]}, {"nofile": 1}),
    "gpus": (0, 1024, 1025),
    "vram_bytes": (0, 2**50, 2**50 + 1),
    "memory_bytes": (2**20 - 1, 2**20, 2**50 + 1),
    "cpus": (0, 65536, 65537),
    "retries": (100, 101),
    "signal": (0, 64, 65),
    "limit": (0, 1000, 1001),
    "name": ("a b", " b", "\n", 256 * "n", 257 * "n"),
    "reason": ("", 256 * "r", 257 * "r"),
    "topology": ("nvlink",),
    "job_ids": ([NOBODY], ["text"]),
    "job_id": (NOBODY,),
    "ids": ([NOBODY], ["text"]),
    "users": (["text"], [1]),
    "states": (["RUNNING"], ["text"], [1]),
    "jobs": ([JOB], ["text"]),
    "common": ({"umask": 18}, {"text": 1}),
    "nice": (-1000, -1001, 1000, 1001),
    "umask": (0o777, 0o1000),
    "time_limit_s": (-2, -1, 0, 10 * 366 * 86400, 10 * 366 * 86400 + 1),
}
#: What a request needs besides the field that is tried; nothing of it acts.
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "hello": {},
    "submit": {"jobs": [JOB], "dry_run": True},
    "jobs": {},
    "queue": {},
    "job": {"job_id": NOBODY},
    "cancel": {"job_ids": [NOBODY]},
    "update": {"job_ids": [NOBODY], "nice": 1},
    "wait": {"job_ids": [NOBODY]},
    "watch": {},
    "gpus": {},
    "usage": {},
    "stats": {},
    "drain": {"gpu": "nowhere", "reason": "text"},
    "resume": {"gpu": "nowhere"},
    "reload": {},
    "gpus_release": {"reason": "text"},
    "gpus_resume": {},
    "top": {"job_id": NOBODY},
    "status": {},
    "backup": {"backup_id": "no such copy"},
}
FIELDS: Mapping[str, tuple[str, ...]] = {
    "submit": ("jobs", "common", "submission_id", "dry_run"),
    "jobs": ("ids", "users", "states", "name", "ended_within_s", "limit", "before_id"),
    "queue": ("limit", "after"),
    "job": ("job_id",),
    "cancel": ("job_ids", "signal", "reason"),
    "update": ("job_ids", "time_limit_s", "nice", "name", "hold", "vram_bytes"),
    "wait": ("job_ids", "timeout_s"),
    "watch": ("since",),
    "drain": ("gpu", "reason"),
    "resume": ("gpu",),
    "gpus_release": ("reason",),
    "top": ("job_id",),
    "backup": ("backup_id", "offset"),
}
JOB_FIELDS = (
    *("cwd", "environment", "argv", "script", "args", "shell", "umask", "rlimits", "gpus"),
    *("vram_bytes", "gpu_model", "exclusive", "topology", "memory_bytes", "cpus", "time_limit_s"),
    *("name", "nice", "output", "error", "hold", "retries"),
)
#: Of these only one can be there.
FORMS = frozenset({"argv", "script", "shell"})


def requests(socket: Path) -> dict[str, Any]:
    """Each method with its fields; each field with the types it takes, and whether it is needed."""
    found: dict[str, Any] = {}
    for method, needed in NEEDED.items():
        found[method] = {
            "unknown field": _refusal(
                socket, method, {**needed, "no_such_field": 1}, "no_such_field"
            ),
            "fields": {
                name: _field(socket, method, needed, name) for name in FIELDS.get(method, ())
            },
        }
    found["submit"]["fields of a job"] = dict(_job_fields(socket))
    found["no_such_method"] = _refusal(socket, "no_such_method", {}, "method")
    return found


def _field(socket: Path, method: str, needed: Mapping[str, Any], name: str) -> dict[str, Any]:
    taken = [
        _shown(value)
        for value in (*VALUES, *OWN.get(name, ()))
        if _refusal(socket, method, {**needed, name: value}, name) is None
    ]
    without = {key: value for key, value in needed.items() if key != name}
    return {"takes": taken, "needed": _refusal(socket, method, without, name) is not None}


def _job_fields(socket: Path) -> Iterator[tuple[str, Any]]:
    for name in JOB_FIELDS:
        path = f"jobs[0].{name}"

        def refusal(job: Mapping[str, Any], path: str = path) -> str | None:
            return _refusal(socket, "submit", {"jobs": [job], "dry_run": True}, path)

        base = {key: value for key, value in JOB.items() if key not in FORMS or name not in FORMS}
        if name == "args":
            base = {**base, "script": "text"}
            del base["argv"]
        values = (*VALUES, *OWN.get(name, ()))
        taken = [_shown(value) for value in values if refusal({**base, name: value}) is None]
        without = {key: value for key, value in JOB.items() if key != name}
        yield name, {"takes": taken, "needed": refusal(without) is not None}


def _refusal(socket: Path, method: str, params: Mapping[str, Any], path: str) -> str | None:
    """The code with which the field at `path` is refused; None where it is not what is refused.

    Over a connection of its own, since a watch and a copy belong to theirs.
    """
    wire = Wire(socket)
    try:
        wire.look(method, **params)
    except Refused as refused:
        where = str(refused.error["data"].get("path", ""))
        is_there = where == path or where.startswith((f"{path}[", f"{path}."))
        return str(refused.error["code"]) if is_there else None
    finally:
        wire.close()
    return None


def _shown(value: Any) -> str:
    """A value's type, with those within."""
    if isinstance(value, list) and value:
        return f"array of {_shown(value[0])}"
    if isinstance(value, dict) and value:
        return f"map to {_shown(next(iter(value.values())))}"
    return f"no items in {kind(value)}" if value in ([], {}) else _word(value)


def _word(value: Any) -> str:
    if any(value is usual for usual in VALUES):
        return kind(value)
    length = len(value) if isinstance(value, str) else 0
    return f"{kind(value)} of {length}" if length > 20 else f"{kind(value)} {value!r}"
