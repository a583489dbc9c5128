"""Which handler answers which request, and what a handler is given.

A method is declared once, by its request in gpusched_client.wire; `@handles` gives that request its
handler. The modules of `methods` register themselves when they are imported.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from gpusched_client.terms import GpuUuid, JobId, Mode
from gpusched_client.wire.message import Response
from gpusched_client.wire.methods import Request
from gpuschedd.api.auth import Authenticator, Peer
from gpuschedd.api.backups import Backups
from gpuschedd.api.briefs import Briefs
from gpuschedd.api.expected import ExpectedStarts
from gpuschedd.api.health_report import HealthReport
from gpuschedd.api.limits import CHANGED_AT_ONCE, RequestBudget, Turns
from gpuschedd.api.planning import PlannerThread
from gpuschedd.api.readers import FairReader
from gpuschedd.api.recent import RecentEnds
from gpuschedd.api.subscriptions import Subscriptions
from gpuschedd.core.job import Job
from gpuschedd.gpu.source import UsedGpu
from gpuschedd.jobs.batch import Batch
from gpuschedd.jobs.controller import Controller
from gpuschedd.jobs.principal import Principal
from gpuschedd.jobs.state import State
from gpuschedd.store.records import GpuUse

T = TypeVar("T")

COMMIT_COST = 6.0  # what is judged is written, applied and published as well: so many times as long


class Connection(Protocol):
    """What a handler may do with the connection beyond its one reply."""

    @property
    def peer(self) -> Peer:
        """Who is at the other end."""

    def notify(self, data: bytes) -> bool:
        """Send notifications; False, and nothing sent, while the reader is too far behind."""

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call back when the connection is gone."""

    @property
    def is_watching(self) -> bool:
        """Whether a watch is on."""

    def keep_open(self, on_drained: Callable[[], None]) -> None:
        """A watch is on: the connection may be silent. `on_drained`: the client has read all."""

    def watch_failed(self) -> None:
        """The watch ended, and its client is told: it would wait for ever."""

    def forget_watch(self) -> None:
        """There is no watch, as if none had been asked for."""


class GpuReadings(Protocol):
    """What readers see of the GPUs beyond the controller's state."""

    @property
    def is_stale(self) -> bool:
        """True while the last sweeps failed."""

    @property
    def trouble(self) -> str | None:
        """Why there is nothing to place on, as far as driver and configuration tell."""

    def used(self) -> Mapping[GpuUuid, UsedGpu]:
        """The last reading of each GPU."""

    def uses_now(self, job: Job) -> Sequence[GpuUse]:
        """What a running job has used so far; empty where it is not metered."""


class GpuControl(Protocol):
    """What administrators do to the GPUs."""

    def refresh(self) -> None:
        """Something beside the samples has changed."""

    def acknowledge(self, uuid: GpuUuid) -> None:
        """Put a sick GPU back into service, whatever it was taken out for."""

    async def release(self, why: str) -> None:
        """Release the driver; nothing is placed until `resume`."""

    async def resume(self) -> None:
        """Open the driver again, with whatever GPUs there are now."""


class OrderDelivery(Protocol):
    """The way of an order to the supervisor of a job."""

    async def deliver(self, job_ids: Sequence[JobId]) -> None:
        """Until it is published: an answer that left before could be an order that got lost."""


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of the daemon that handlers use."""

    mode: Mode
    controller: Controller
    auth: Authenticator
    budget: RequestBudget
    reader: FairReader
    planner: PlannerThread
    expected: ExpectedStarts
    briefs: Briefs
    subscriptions: Subscriptions
    gpu_readings: GpuReadings
    gpu_control: GpuControl
    orders: OrderDelivery
    health: HealthReport
    backups: Backups
    reload: Callable[[], Awaitable[tuple[tuple[str, ...], tuple[str, ...]]]]
    changes: Turns = field(default_factory=lambda: Turns(CHANGED_AT_ONCE))  # by the jobs named
    lists: Turns = field(default_factory=Turns)  # of answers, by the jobs in them
    recent: RecentEnds = field(default_factory=RecentEnds)


@dataclass(frozen=True, slots=True)
class Call:
    """One request that was authorised: who asks, over which connection, and of what."""

    connection: Connection
    caller: Principal
    services: Services

    @property
    def controller(self) -> Controller:
        """The owner of job state."""
        return self.services.controller

    @property
    def state(self) -> State:
        """As of the last commit; read only."""
        return self.services.controller.state

    async def change(self, evaluate: Callable[[Batch], T], rows: int) -> T:
        """The result of a command that names so many jobs, in its turn. Raises GpuschedError."""
        async with self.services.changes.of(self.caller.account, rows):
            return await self._judged(evaluate)

    async def change_each(
        self, job_ids: Sequence[int], evaluate: Callable[[Batch, Sequence[int]], Sequence[T]]
    ) -> tuple[T, ...]:
        """What becomes of each job that a command names: some at a time, so that the commands of
        others come in between; what the same user asks next takes effect behind the last.
        """
        each = list(dict.fromkeys(job_ids))
        known = dict[int, T]()
        async with self.services.changes.of(self.caller.account, len(each)):
            for begin in range(0, len(each), CHANGED_AT_ONCE):
                if begin > 0:
                    await self.services.budget.settled(self.caller.account)
                some = each[begin : begin + CHANGED_AT_ONCE]
                known |= zip(some, await self._judged(_of_some(evaluate, some)), strict=True)
        return tuple(known[job_id] for job_id in job_ids)

    async def _judged(self, evaluate: Callable[[Batch], T]) -> T:
        """Charged for what judging it takes."""

        def judge(batch: Batch) -> T:
            began_s = time.thread_time()
            try:
                return evaluate(batch)
            finally:
                spent_s = time.thread_time() - began_s
                self.services.budget.charge_time(self.caller.account, COMMIT_COST * spent_s)

        result: T = await self.controller.call(judge)
        return result


def _of_some(
    evaluate: Callable[[Batch, Sequence[int]], Sequence[T]], job_ids: Sequence[int]
) -> Callable[[Batch], Sequence[T]]:
    return lambda batch: evaluate(batch, job_ids)


class Service(Protocol):
    """What a server hands requests to."""

    async def handle(self, connection: Connection, request: Request[Any]) -> Response:
        """The response. Raises GpuschedError."""


Handler = Callable[[Call, Any], Awaitable[Response]]
H = TypeVar("H", bound=Handler)

#: By the class of the request; filled by `handles`.
HANDLERS: dict[type[Request[Any]], Handler] = {}


def handles(*requests: type[Request[Any]]) -> Callable[[H], H]:
    """Register the function as the handler of these requests."""

    def register(handler: H) -> H:
        for request in requests:
            assert request not in HANDLERS, f"{request.__name__} has a handler"
            HANDLERS[request] = handler
        return handler

    return register


def unhandled(requests: Iterable[type[Request[Any]]]) -> list[str]:
    """Names of declared requests that nobody answers."""
    return sorted(request.__name__ for request in requests if request not in HANDLERS)
