"""One request, authorised and answered: every method of the wire, whoever speaks it."""

from __future__ import annotations

from collections.abc import Mapping

from gpusched_client.wire.protocol import Request, Response
from gpuschedd.api import methods
from gpuschedd.api.auth import Right
from gpuschedd.api.registry import HANDLERS, Call, Connection, Services

#: Every method of the protocol has its line here; one without is refused.
RIGHTS: Mapping[str, Right] = {
    "hello": Right.ALL,
    "submit": Right.ALL,
    "jobs": Right.ALL,
    "queue": Right.ALL,
    "job": Right.ALL,
    "cancel": Right.OWNER,
    "update": Right.OWNER,
    "wait": Right.ALL,
    "watch": Right.ALL,
    "gpus": Right.ALL,
    "usage": Right.ALL,
    "stats": Right.ALL,
    "drain": Right.ADMIN,
    "resume": Right.ADMIN,
    "reload": Right.ADMIN,
    "gpus_release": Right.ADMIN,
    "gpus_resume": Right.ADMIN,
    "top": Right.OWNER,
    "status": Right.ALL,
    "backup": Right.ROOT,  # the copy holds the environments of waiting jobs
}


methods.load()


class Api:
    """Answers requests. Satisfies registry.Service."""

    def __init__(self, services: Services) -> None:
        self.services = services

    async def handle(self, connection: Connection, method: str, request: Request) -> Response:
        """Authorise and answer. Raises GpuschedError."""
        auth = self.services.auth
        caller = await auth.identify(connection.peer)
        auth.authorise(caller, method, RIGHTS[method])
        return await HANDLERS[type(request)](Call(connection, caller, self.services), request)

    def close(self) -> None:
        """End the reader thread and its connection."""
        self.services.reader.close()
