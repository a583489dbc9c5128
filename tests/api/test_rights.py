"""Every method of the wire, asked by everybody: who is answered and who is denied.

Asked as the daemon's handlers are, with the principals that the kernel and the host would name; a
method without an entry here fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusched_client.errors import Denied, GpuschedError
from gpusched_client.terms import JobId, Mode
from gpusched_client.wire.catalog import METHODS, read_request
from gpuschedd.api.auth import Peer
from gpuschedd.api.readers import FairReader
from gpuschedd.api.service import Api
from gpuschedd.jobs.principal import Principal
from gpuschedd.store.history import History
from tests.sim.harness import Host, services_of

OWNER, ANOTHER, ADMIN, STRANGER, ROOT = "owner", "another", "admin", "stranger", "root"
WHO = {
    OWNER: Principal(3001, "alice", 1, is_admin=False),
    ANOTHER: Principal(3002, "bob", 1, is_admin=False),
    ADMIN: Principal(3003, "carol", 1, is_admin=True),
    STRANGER: Principal(
        200_001, "200001", 1, is_admin=False, barred="it has no account", is_stranger=True
    ),
    ROOT: Principal(0, "root", 1, is_admin=True),
}
ALL = frozenset(WHO)
ITS_OWNERS = frozenset({OWNER, ADMIN, ROOT})
ADMINS = frozenset({ADMIN, ROOT})
JOB = {"argv": ["true"], "cwd": "/", "environment": {}, "gpus": 1}

#: Of each method what to ask, of a waiting job of the owner's where one is meant, and who may.
ENTRIES: dict[str, tuple[dict[str, Any], frozenset[str]]] = {
    "hello": ({}, ALL),
    "status": ({}, ALL),
    "stats": ({}, ALL),
    "usage": ({}, ALL),
    "gpus": ({}, ALL),
    "jobs": ({}, ALL),
    "queue": ({}, ALL),
    "job": ({"job_id": "JOB"}, ALL),
    "why": ({"job_id": "PLACED"}, ALL),
    "wait": ({"job_ids": ["JOB"], "timeout_s": 0}, ALL),
    "watch": ({}, ALL),
    "submit": ({"jobs": [JOB]}, ALL - {STRANGER}),
    "cancel": ({"job_ids": ["JOB"]}, ITS_OWNERS),
    "update": ({"job_ids": ["JOB"], "nice": 7}, ITS_OWNERS),
    "top": ({"job_id": "JOB"}, ITS_OWNERS),
    "drain": ({"gpu": 0, "reason": "test"}, ADMINS),
    "resume": ({"gpu": 0}, ADMINS),
    "reload": ({}, ADMINS),
    "gpus_release": ({"reason": "test"}, ADMINS),
    "gpus_resume": ({}, ADMINS),
    "backup": ({}, frozenset({ROOT})),
}


class Connection:
    """Somebody who hears everything."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.is_watching = False

    def notify(self, data: bytes) -> bool:
        return bool(data)

    def on_close(self, callback: object) -> None:
        del callback

    def keep_open(self, on_drained: object) -> None:
        self.is_watching = on_drained is not None

    def watch_failed(self) -> None: ...

    def forget_watch(self) -> None:
        self.is_watching = False


class Parts:
    """Stands for the parts behind handlers that other tests have: each answers."""

    is_stale, trouble = False, None

    def used(self) -> dict[str, object]:
        return {}

    def uses_now(self, _job: object) -> tuple[()]:
        return ()

    def refresh(self) -> None: ...

    def acknowledge(self, _uuid: object) -> None: ...

    async def release(self, _why: str) -> None: ...

    async def resume(self) -> None: ...

    async def deliver(self, _job_ids: object) -> None: ...

    async def take(self, *, for_admin: bool) -> object:
        return SimpleNamespace(for_admin=for_admin)

    async def answer(self, *_: object) -> object:
        return SimpleNamespace(size_bytes=1)


async def _reload() -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (), ()


def _filled(params: dict[str, Any], placed: int, job_id: int) -> dict[str, Any]:
    put = {"JOB": job_id, "PLACED": placed}
    return {
        name: [put.get(each, each) if isinstance(each, str) else each for each in value]
        if isinstance(value, list)
        else put.get(value, value)
        if isinstance(value, str)
        else value
        for name, value in params.items()
    }


async def _ask(place: Path, method: str, who: str) -> str | None:
    """The code of the refusal, of the method or of the one job that it names; None: it was done."""
    host, parts = Host(place, 1), Parts()
    reader = FairReader(History(host.store.path))
    services = services_of(
        host,
        mode=Mode.SYSTEM,
        reader=reader,
        gpu_readings=parts,
        gpu_control=parts,
        orders=parts,
        health=parts,
        backups=parts,
        reload=_reload,
    )
    looping = asyncio.ensure_future(host.controller.run())
    api = Api(services)
    try:
        for principal in WHO.values():
            known: asyncio.Future[Principal] = asyncio.get_running_loop().create_future()
            known.set_result(principal)
            services.auth._callers[principal.uid] = known
        owner = Connection(Peer(WHO[OWNER].uid, 0, 1))
        made = await api.handle(
            owner,
            read_request("submit", {"jobs": [{**JOB, "gpus": 4}] * 2}),
        )
        placed, job_id = map(JobId, made.job_ids)  # type: ignore[attr-defined]
        while placed not in host.controller.state.holding:
            await asyncio.sleep(0)
        params = _filled(ENTRIES[method][0], placed, job_id)
        caller = Connection(Peer(WHO[who].uid, 0, 1))
        try:
            result = await api.handle(caller, read_request(method, params))
        except GpuschedError as refusal:
            return refusal.code
        outcomes = getattr(result, "outcomes", None) or [getattr(result, "outcome", None)]
        return outcomes[0].code if outcomes[0] is not None else None
    finally:
        await host.controller.stop()
        await looping
        services.planner.close()
        reader.close()
        host.controller.close()


def _cases() -> Iterator[tuple[str, str]]:
    for method in METHODS:
        for who in WHO:
            yield method, who


def test_every_method_of_the_wire_has_its_entry() -> None:
    assert set(ENTRIES) == set(METHODS)


@pytest.mark.parametrize(("method", "who"), list(_cases()))
def test_who_may_call_what(tmp_path: Path, method: str, who: str) -> None:
    code = asyncio.run(_ask(tmp_path, method, who))
    allowed = who in ENTRIES[method][1]
    assert code == (None if allowed else Denied.code)
