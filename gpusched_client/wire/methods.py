"""What a method of the wire is: a request that carries its name, its response and who may call it.

    @method("usage", Right.ALL, Unread.NOTHING)
    class UsageRequest(Request[UsageResult]):
        ...

Nothing else lists methods: the client sends a request and gets its response, the daemon gives a
handler to a request's class, and catalog.py and the reference are made from the declarations.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar, cast, dataclass_transform, get_args

from gpusched_client.errors import GpuschedError
from gpusched_client.wire.message import Message, Response, message, wire

R = TypeVar("R", bound=Response)


class Right(StrEnum):
    """Who may call a method. OWNER: the owner of the named jobs, or an admin, judged per job.

    ROOT: uid 0, in user mode the daemon's own; not the members of `admin_group`.
    """

    ALL = "all"
    OWNER = "owner"
    ADMIN = "admin"
    ROOT = "root"


class Unread(StrEnum):
    """What is done of a request whose client is gone before the answer.

    NOTHING: it only reads. FINISHED: all of it, and on record. OPEN: all or nothing; who asks again
    finds out.
    """

    NOTHING = "nothing"
    FINISHED = "finished"
    OPEN = "open"


class Request(Message, Generic[R]):
    """What a client sends, answered by an R."""

    __slots__ = ()
    method: ClassVar[str]
    right: ClassVar[Right]
    unread: ClassVar[Unread]
    errors: ClassVar[tuple[type[GpuschedError], ...]]
    result: ClassVar[type[Response]]

    def read_result(self, value: object) -> R:
        """The decoded response. Raises Invalid or TooLarge where it is not one."""
        return cast(R, self.result.from_wire(value))


Q = TypeVar("Q", bound=Request[Any])


@dataclass_transform(frozen_default=True, field_specifiers=(wire,))
def method(
    name: str, right: Right, unread: Unread, errors: tuple[type[GpuschedError], ...] = ()
) -> Callable[[type[Q]], type[Q]]:
    """Declare a method by its request. `errors` are those that not every method may answer."""

    def declare(cls: type[Q]) -> type[Q]:
        made = message(cls)
        made.method, made.right, made.unread, made.errors = name, right, unread, errors
        (made.result,) = get_args(made.__orig_bases__[0])  # type: ignore[attr-defined]  # Generic's
        return made

    return declare
