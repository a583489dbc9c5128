"""Requests that stay open: waiting for jobs to end, and watching events."""

from __future__ import annotations

import asyncio

from gpusched_client.errors import Conflict, GpuschedError
from gpusched_client.terms import JobId
from gpusched_client.wire.job_messages import (
    EVENT_METHOD,
    WaitRequest,
    WaitResult,
    WatchRequest,
    WatchResult,
)
from gpusched_client.wire.job_messages import Event as WireEvent
from gpusched_client.wire.message import Response
from gpuschedd.api import views
from gpuschedd.api.methods.reading import find, job_views, read
from gpuschedd.api.registry import Call, handles
from gpuschedd.api.subscriptions import Watcher
from gpuschedd.store.records import Event


@handles(WaitRequest)
async def wait(call: Call, request: WaitRequest) -> Response:
    job_ids = [JobId(job_id) for job_id in request.job_ids]
    for job_id in job_ids:
        await find(call, job_id)
    done = await call.services.subscriptions.wait_final(
        call.caller.uid, job_ids, call.state.jobs.__contains__, request.timeout_s
    )
    jobs = [await find(call, job_id) for job_id in job_ids]
    return WaitResult(jobs=await job_views(call, jobs), timed_out=not done)


@handles(WatchRequest)
async def watch(call: Call, request: WatchRequest) -> Response:
    if call.connection.is_watching:
        raise Conflict("this connection has a watch already; open another for a second one")

    def send(number: int, event: Event) -> bool:
        shown = _event(call, number, event)
        return call.connection.notify(EVENT_METHOD, shown.to_wire())

    last = call.controller.last_event_id
    subscriptions = call.services.subscriptions
    watcher = Watcher(send)
    subscriptions.add(watcher)
    call.connection.on_close(lambda: subscriptions.remove(watcher))
    call.connection.keep_open()
    if request.since is not None and request.since < last:
        since = request.since
        watcher.hold()
        try:
            missed = await read(call, lambda history: history.events_since(since, last))
        except GpuschedError:
            subscriptions.remove(watcher)
            raise
        forgotten = last - since - len(missed)  # ids have no gaps
        asyncio.get_running_loop().call_soon(watcher.release, missed, forgotten)
    return WatchResult(last_event_id=last)


def _event(call: Call, number: int, event: Event) -> WireEvent:
    if not (call.caller.is_admin or event.uid in (None, call.caller.uid)):
        event = views.event_of_another(
            event, hides_name=call.services.auth.hides_names(call.caller)
        )
    return WireEvent(
        event_id=number,
        at_s=event.at_s,
        kind=event.kind,
        job_id=event.job_id,
        uid=event.uid,
        gpu_uuid=event.data.get("gpu"),
        text=views.event_text(event),
        data=dict(event.data),
    )
