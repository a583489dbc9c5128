"""On whose allowance a uid lives, and what everybody sees of who is in the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpusched_client.errors import LimitReached
from gpusched_client.terms import Mode
from gpuschedd.api import auth, views
from gpuschedd.api.auth import KnownAccounts
from gpuschedd.api.limits import STRANGERS_CONNECTIONS_MAX, Connections
from gpuschedd.jobs.principal import STRANGERS, Principal
from tests.sim.harness import Host, services_of

ALICE, SUB_UID = 3001, 200_000


class Names:
    """A name service that may not answer."""

    is_away = False
    asked = 0

    async def ask(self, question: Callable[[], Any]) -> Any:
        self.asked += 1
        if self.is_away:
            raise TimeoutError
        return question()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(auth, "user_name", lambda uid: "alice" if uid == ALICE else str(uid))
    return Names()


def test_uids_without_an_account_live_on_one_allowance(names: Any) -> None:
    known = KnownAccounts(names, Mode.SYSTEM)

    async def run() -> list[int]:
        return [await known.ask(uid) for uid in (ALICE, SUB_UID, SUB_UID + 1)]

    assert asyncio.run(run()) == [ALICE, STRANGERS, STRANGERS]
    assert [known.get(uid) for uid in (ALICE, SUB_UID, 0)] == [ALICE, STRANGERS, 0]
    assert known.get(SUB_UID + 7) is None


def test_many_of_them_leave_the_others_their_connections(names: Any) -> None:
    """Sixteen sub-uids with 256 connections each have what one small pool has."""
    known, connections = KnownAccounts(names, Mode.SYSTEM), Connections(256, 4_096)

    async def run() -> int:
        refused = 0
        for uid in range(SUB_UID, SUB_UID + 16):
            for _ in range(256):
                try:
                    connections.admit(await known.ask(uid))
                except LimitReached:
                    refused += 1
        connections.admit(await known.ask(ALICE))
        return refused

    assert asyncio.run(run()) == 16 * 256 - STRANGERS_CONNECTIONS_MAX


def test_a_name_service_that_is_away_makes_nobody_a_stranger(names: Any) -> None:
    known = KnownAccounts(names, Mode.SYSTEM)
    names.is_away = True
    assert asyncio.run(known.ask(ALICE)) == ALICE
    assert known.get(ALICE) is None  # it is asked again


def test_a_daemon_of_one_user_asks_nobody(names: Any) -> None:
    known = KnownAccounts(names, Mode.USER)
    assert known.get(SUB_UID) == SUB_UID
    assert names.asked == 0


def test_denials_of_uids_without_an_account_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are one's on record, so that they take nothing of what is kept of another."""
    monkeypatch.setattr(auth, "DENIALS_AN_HOUR_MAX", 5)

    async def run() -> list[tuple[int, str]]:
        host = Host(tmp_path, 1)
        found = services_of(host).auth
        before = len(host.controller._commands)
        for uid in range(SUB_UID, SUB_UID + 20):
            caller = Principal(uid, str(uid), 1, is_admin=False, is_stranger=True)
            found.record_denial(caller, "reload", "not an admin")
        batch = host.controller.new_batch()
        for command in host.controller._commands[before:]:
            command.evaluate(batch)
        await host.controller.stop()
        host.controller.close()
        return [(row.uid, row.detail) for row in batch.audits]

    uids = range(SUB_UID, SUB_UID + 5)
    assert asyncio.run(run()) == [(STRANGERS, f"uid {uid}: not an admin") for uid in uids]


def test_a_private_host_shows_admins_alone_whose_a_foreign_process_is(tmp_path: Path) -> None:
    async def run() -> list[str | None]:
        host = Host(tmp_path, 1, gpus=1)
        (gpu,) = host.controller.state.gpus
        told = replace(gpu, foreign_text="a process outside", foreign_detail="pid 9 of bob")
        host.controller.state.gpus = (told,)
        shown = [
            views.gpu_views(host.controller.state, {}, stale=False, for_admin=for_admin)[0].reason
            for for_admin in (False, True)
        ]
        await host.controller.stop()
        host.controller.close()
        return shown

    assert asyncio.run(run()) == ["a process outside", "pid 9 of bob"]
