"""The message about who the daemon is, which most commands send beside their own."""

from __future__ import annotations

from gpusched_client.wire.fields import boolean
from gpusched_client.wire.message import Response, message, wire
from gpusched_client.wire.methods import Request, Right, Unread, method
from gpusched_client.wire.values import COUNT, SHORT_TEXT, USER


@message
class HelloResult(Response):
    """Who the daemon is, and who the kernel says you are; `simulated`: its GPUs are not real."""

    protocol: int = wire(COUNT)
    version: str = wire(SHORT_TEXT)
    mode: str = wire(SHORT_TEXT)
    uid: int = wire(COUNT)
    user: str = wire(USER)
    admin: bool = wire(boolean)
    simulated: bool = wire(boolean, default=False)


@method("hello", Right.ALL, Unread.NOTHING)
class Hello(Request[HelloResult]):
    """Ask who the daemon is. Costs nothing and changes nothing."""
