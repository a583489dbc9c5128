"""One request, authorised and answered: every method of the wire, whoever speaks it."""

from __future__ import annotations

from typing import Any

from gpusched_client.wire.message import Response
from gpusched_client.wire.methods import Request
from gpuschedd.api import methods
from gpuschedd.api.registry import HANDLERS, Call, Connection, Services

methods.load()


class Api:
    """Answers requests. Satisfies registry.Service."""

    def __init__(self, services: Services) -> None:
        self.services = services

    async def handle(self, connection: Connection, request: Request[Any]) -> Response:
        """Authorise and answer. Raises GpuschedError."""
        auth = self.services.auth
        caller = await auth.identify(connection.peer)
        auth.authorise(caller, request.method, request.right)
        return await HANDLERS[type(request)](Call(connection, caller, self.services), request)

    def close(self) -> None:
        """End the threads and the reading connection."""
        self.services.planner.close()
        self.services.reader.close()
