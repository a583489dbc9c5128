"""All methods of the wire by name, as the modules of messages declare them.

For code that takes any request: the daemon, the reference, tests. A client imports only what it
sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpusched_client.errors import Invalid
from gpusched_client.wire import (
    admin_messages,
    gpu_messages,
    hello_messages,
    job_messages,
    submit_messages,
)
from gpusched_client.wire.fields import shown
from gpusched_client.wire.methods import Request

GROUPS = (hello_messages, submit_messages, job_messages, gpu_messages, admin_messages)

METHODS: Mapping[str, type[Request[Any]]] = {
    kind.method: kind
    for group in GROUPS
    for kind in vars(group).values()
    if isinstance(kind, type) and issubclass(kind, Request) and hasattr(kind, "method")
}


def read_request(name: str, params: object) -> Request[Any]:
    """The typed request of a method; an unknown method is Invalid."""
    kind = METHODS.get(name)
    if kind is None:
        known = ", ".join(METHODS)
        raise Invalid(f"method {shown(name)} is not known; use one of {known}", {"path": "method"})
    return kind.from_wire(params)
