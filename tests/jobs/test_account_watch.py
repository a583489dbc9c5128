"""Jobs whose account is gone wait for it, whatever becomes of one look."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gpusched_client.terms import HoldKind
from gpuschedd.jobs import account_watch
from gpuschedd.jobs.account_watch import AccountWatch
from gpuschedd.system.accounts import Account


def test_a_look_for_accounts_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a thread to ask in, as without an answer, the next look comes all the same."""
    monkeypatch.setattr(account_watch, "ACCOUNTS_EVERY_S", 0.005)
    answers = iter([RuntimeError("can't start new thread"), TimeoutError(), OSError(24, "")])
    released = asyncio.Event()

    async def look_up(_user: str, _uid: int) -> Account:
        if (error := next(answers, None)) is not None:
            raise error
        return Account()

    held = SimpleNamespace(hold=HoldKind.ACCOUNT, user="alice", uid=1001, job_id=1)
    accounts: Any = SimpleNamespace(look_up=look_up)
    controller: Any = SimpleNamespace(
        state=SimpleNamespace(jobs={1: held}), post=lambda _: released.set()
    )
    watch = AccountWatch(controller, accounts)

    async def story() -> None:
        looking = asyncio.ensure_future(watch.look_regularly())
        await asyncio.wait_for(released.wait(), 30)
        looking.cancel()

    asyncio.run(story())
