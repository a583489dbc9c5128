"""The socket: accepts connections and counts them. Decides nothing."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from typing import Any, Protocol

from gpusched_client.errors import (
    Denied,
    GpuschedError,
    LimitReached,
)
from gpusched_client.wire import framing
from gpuschedd.api.auth import Peer, peer_of
from gpuschedd.api.connection import ServerConnection, Shared
from gpuschedd.api.limits import (
    ARRIVING_MAX,
    REFUSALS_MAX,
    Connections,
    OpenRequests,
    RequestBudget,
)
from gpuschedd.api.readers import FairThreads
from gpuschedd.api.registry import Service
from gpuschedd.config.keys import Limits
from gpuschedd.system.memory import give_back

log = logging.getLogger(__name__)

BACKLOG = 1_024
CODECS = 2  # threads for long messages
GIVE_BACK_AFTER_S = 1.0
ACCEPT_PAUSE_S = 0.1  # after no descriptor was left
ACCEPT_AT_ONCE = 8  # then those who are connected have their turn
REFUSED_AT_ONCE = 32  # of those that are refused, behind whom others wait to be accepted


class AccountsOfUids(Protocol):
    """On whose allowance a connection lives."""

    def get(self, uid: int) -> int | None:
        """The account, if it is known now."""

    async def ask(self, uid: int) -> int:
        """The account."""


class Server:
    """Accepts, counts and closes connections."""

    def __init__(
        self,
        service: Service,
        connections: Connections,
        budget: RequestBudget,
        *,
        known_accounts: AccountsOfUids | None = None,
        only_uid: int | None = None,
    ) -> None:
        """`known_accounts`: None: each uid has its own. `only_uid`: nobody else may use this daemon
        (user mode).
        """
        self.open: set[ServerConnection] = set()
        self._connections = connections
        self._shared = Shared(
            service,
            budget,
            connections,
            OpenRequests(),
            self.open,
            FairThreads("codec", CODECS, budget.charge_time),
        )
        self._accounts = known_accounts
        connections.on_crowd_gone = self._give_back_soon
        self._only_uid = only_uid
        self._listening: set[socket.socket] = set()
        self._arriving: set[asyncio.Future[Any]] = set()
        self._refusals: dict[str, bytes] = {}

    def follow(self, limits: Limits) -> None:
        """Other limits: of connections for those who come, of requests at once."""
        self._connections.per_uid = limits.connections
        self._connections.in_all = limits.connections_all
        self._shared.budget.per_second = limits.requests_per_second

    def listen(self, listening: socket.socket) -> None:
        """Serve a bound socket, beside those that are served already."""
        listening.listen(BACKLOG)
        listening.setblocking(False)
        self._listening.add(listening)
        asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def leave(self, listening: socket.socket) -> None:
        """Accept no more there; its owner closes it."""
        if listening in self._listening:
            self._listening.remove(listening)
            asyncio.get_running_loop().remove_reader(listening)

    def _accept(self, listening: socket.socket) -> None:
        """Some of those that wait. A refused client costs only a look at its credentials."""
        refused = taken = 0
        while taken < ACCEPT_AT_ONCE and refused < REFUSED_AT_ONCE:
            try:
                accepted, _address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor is left; those who wait go on waiting
                log.warning("accept_failed error=%s", error)
                self._pause_accepting(listening)
                return
            if self._take(accepted):
                taken += 1
            else:
                refused += 1

    def _pause_accepting(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)

        def go_on() -> None:
            if listening in self._listening:
                loop.add_reader(listening, self._accept, listening)

        loop.call_later(ACCEPT_PAUSE_S, go_on)

    def _take(self, accepted: socket.socket) -> bool:
        """Whether it was not refused at once."""
        accepted.setblocking(False)
        try:
            peer = peer_of(accepted)
            account = peer.uid if self._accounts is None else self._accounts.get(peer.uid)
            if account is not None:
                self._admit(peer, account)
            elif len(self._arriving) >= ARRIVING_MAX:
                raise LimitReached("too many unknown users connect at once; try again in a moment")
        except GpuschedError as refusal:
            self._refuse(accepted, refusal)
            return False
        if account is not None:
            arrival = self._serve(accepted, peer, account)
        else:
            arrival = self._ask_and_serve(accepted, peer)
        task = asyncio.ensure_future(arrival)
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)
        return True

    async def _ask_and_serve(self, accepted: socket.socket, peer: Peer) -> None:
        """Of a uid that has not been here lately."""
        assert self._accounts is not None
        try:
            account = await self._accounts.ask(peer.uid)
            self._admit(peer, account)
        except GpuschedError as refusal:
            self._refuse(accepted, refusal)
        except BaseException:
            accepted.close()
            raise
        else:
            await self._serve(accepted, peer, account)

    async def _serve(self, accepted: socket.socket, peer: Peer, account: int) -> None:
        """From here on the connection has it."""
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: ServerConnection(self._shared, peer, account), accepted
        )

    def _refuse(self, accepted: socket.socket, refusal: GpuschedError) -> None:
        with suppress(OSError):
            accepted.send(self._refusal(refusal))
        accepted.close()

    def _refusal(self, refusal: GpuschedError) -> bytes:
        """The message that refuses a connection; a flood gets the same one again and again."""
        known = self._refusals.get(refusal.message)
        if known is None:
            if len(self._refusals) >= REFUSALS_MAX:
                self._refusals.clear()
            known = self._refusals[refusal.message] = framing.encode_error(None, refusal)
        return known

    async def close(self) -> None:
        """Accept no more and close what is open."""
        for listening in tuple(self._listening):
            self.leave(listening)
        for connection in tuple(self.open):
            connection.close()
        self._shared.codec.close()

    def _give_back_soon(self) -> None:
        """Once what the crowd had is freed."""
        loop = asyncio.get_running_loop()
        loop.call_later(GIVE_BACK_AFTER_S, loop.run_in_executor, None, give_back)

    def _admit(self, peer: Peer, account: int) -> None:
        """Raise where this peer may not have one more connection."""
        if self._only_uid is not None and peer.uid != self._only_uid:
            raise Denied(
                f"this daemon belongs to uid {self._only_uid} alone; you are uid {peer.uid}. "
                "Start your own with `gpuschedd`, or ask for a system-wide one."
            )
        self._connections.admit(account)
