"""The socket: accepts connections and counts them. Decides nothing."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Any, Protocol

from gpusched_client.errors import (
    Denied,
    GpuschedError,
    LimitReached,
)
from gpuschedd.api.auth import Peer, peer_of
from gpuschedd.api.connection import ServerConnection, Shared
from gpuschedd.api.limits import (
    ARRIVING_MAX,
    Connections,
    OpenRequests,
    RequestBudget,
)
from gpuschedd.api.readers import FairThreads
from gpuschedd.api.refusals import Refusals
from gpuschedd.api.registry import Service
from gpuschedd.config.keys import Limits
from gpuschedd.jobs.principal import STRANGERS
from gpuschedd.system.memory import give_back

log = logging.getLogger(__name__)

BACKLOG = 256  # each of those who wait in it may be one more of a flood's
CODECS = 1  # threads for long messages
GIVE_BACK_AFTER_S = 1.0
ACCEPT_PAUSE_S = 0.1  # after no descriptor was left
ACCEPT_AT_ONCE = 8  # then those who are connected have their turn
FLOOD = BACKLOG // 2  # refused at once
FLOOD_REST = 3.0  # times as long as they took
FLOOD_REST_S_MAX = 0.05


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
        self.finishing = self._shared.finishing
        self._accounts = known_accounts
        connections.on_crowd_gone = self._give_back_soon
        self._only_uid = only_uid
        self._listening: set[socket.socket] = set()
        self._arriving: set[asyncio.Future[Any]] = set()
        self._unknown = 0  # of them, those whose account is being asked for
        self._refusals = Refusals()

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
        """Some of those that wait, or all that are refused, as others wait behind them.

        A flood of these is left alone for a while: it fills the room that the kernel has as soon
        as there is some, and would have all of the loop's time.
        """
        refused = taken = 0
        began_s = time.monotonic()
        while taken < ACCEPT_AT_ONCE and refused < BACKLOG:
            try:
                accepted, _address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:  # no descriptor is left; those who wait go on waiting
                log.warning("accept_failed error=%s", error)
                self._pause_accepting(listening, ACCEPT_PAUSE_S)
                return
            if self._take(accepted):
                taken += 1
            else:
                refused += 1
        if refused >= FLOOD:
            spent_s = time.monotonic() - began_s
            self._pause_accepting(listening, min(FLOOD_REST_S_MAX, FLOOD_REST * spent_s))

    def _pause_accepting(self, listening: socket.socket, pause_s: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)

        def go_on() -> None:
            if listening in self._listening:
                loop.add_reader(listening, self._accept, listening)

        loop.call_later(pause_s, go_on)

    def _take(self, accepted: socket.socket) -> bool:
        """Whether it was not refused at once."""
        account: int | None = STRANGERS
        try:
            peer = peer_of(accepted)
            account = peer.uid if self._accounts is None else self._accounts.get(peer.uid)
            if account is not None:
                self._admit(peer, account)
            elif self._unknown >= ARRIVING_MAX:
                raise LimitReached("too many unknown users connect at once; try again in a moment")
        except GpuschedError as refusal:
            self._refusals.refuse(accepted, STRANGERS if account is None else account, refusal)
            return False
        accepted.setblocking(False)
        if account is not None:
            arrival = self._serve(accepted, peer, account)
        else:
            self._unknown += 1
            arrival = self._ask_and_serve(accepted, peer)
        task = asyncio.ensure_future(arrival)
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)
        return True

    async def _ask_and_serve(self, accepted: socket.socket, peer: Peer) -> None:
        """Of a uid that has not been here lately."""
        assert self._accounts is not None
        account = STRANGERS
        try:
            try:
                account = await self._accounts.ask(peer.uid)
            finally:
                self._unknown -= 1
            self._admit(peer, account)
        except GpuschedError as refusal:
            self._refusals.refuse(accepted, account, refusal)
        except BaseException:
            accepted.close()
            raise
        else:
            await self._serve(accepted, peer, account)

    async def _serve(self, accepted: socket.socket, peer: Peer, account: int) -> None:
        """From here on the connection has it; of a user who asks too much a little later."""
        budget = self._shared.budget
        budget.charge(account, 1.0)
        try:
            await budget.settled(account)
        except BaseException:
            self._connections.release(account)
            accepted.close()
            raise
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: ServerConnection(self._shared, peer, account), accepted
        )

    async def close(self) -> None:
        """Accept no more and close what is open."""
        for listening in tuple(self._listening):
            self.leave(listening)
        for arrival in tuple(self._arriving):
            arrival.cancel()
        await asyncio.gather(*self._arriving, return_exceptions=True)
        for connection in tuple(self.open):
            connection.close()
        for task in self.finishing:
            task.cancel()
        self._refusals.close()
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
