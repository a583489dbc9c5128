"""Requests that stay open: waiting for jobs to end, and watching events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gpusched_client.errors import Conflict
from gpusched_client.terms import JobId
from gpusched_client.wire.job_messages import (
    WaitRequest,
    WaitResult,
    WatchRequest,
    WatchResult,
)
from gpusched_client.wire.message import Response
from gpuschedd.api.event_bytes import Face
from gpuschedd.api.methods.reading import find, job_views, read
from gpuschedd.api.registry import Call, handles
from gpuschedd.api.subscriptions import Watcher
from gpuschedd.store.records import Event


@handles(WaitRequest)
async def wait(call: Call, request: WaitRequest) -> Response:
    job_ids = [JobId(job_id) for job_id in request.job_ids]
    for job_id in dict.fromkeys(job_ids):
        await find(call, job_id)
    done = await call.services.subscriptions.wait_final(
        call.caller.account, job_ids, call.state.jobs.__contains__, request.timeout_s
    )
    async with call.services.lists.of(call.caller.account, len(job_ids)):
        known = {job_id: await find(call, job_id) for job_id in dict.fromkeys(job_ids)}
        jobs = await job_views(call, [known[job_id] for job_id in job_ids])
    return WaitResult(jobs=jobs, timed_out=not done)


@handles(WatchRequest)
async def watch(call: Call, request: WatchRequest) -> Response:
    if call.connection.is_watching:
        raise Conflict("this connection has a watch already; open another for a second one")

    subscriptions = call.services.subscriptions
    faces = subscriptions.faces

    def send(events: Sequence[tuple[int, Event]]) -> bool:
        parts = [faces.of(*numbered, _face(call, numbered[1])) for numbered in events]
        return call.connection.notify(b"".join(parts))

    last = call.controller.last_event_id
    watcher = Watcher(call.caller.account, send, last, call.connection.watch_failed)
    subscriptions.add(watcher)
    call.connection.on_close(lambda: subscriptions.remove(watcher))
    call.connection.keep_open(lambda: subscriptions.go_on(watcher))
    if request.since is not None and request.since < last:
        since = request.since
        watcher.is_held = True
        try:
            missed = await read(call, lambda history: history.events_since(since, last))
        except Exception:
            subscriptions.remove(watcher)
            call.connection.forget_watch()
            raise
        watcher.take_missed(missed, last - since - len(missed))  # ids have no gaps
        asyncio.get_running_loop().call_soon(subscriptions.go_on, watcher)
    return WatchResult(last_event_id=last)


def _face(call: Call, event: Event) -> Face:
    if call.caller.is_admin or event.uid in (None, call.caller.uid):
        return Face.WHOLE
    return Face.NAMELESS if call.services.auth.hides_names(call.caller) else Face.OTHERS
