"""Jobs whose account was gone: looked for by a slow clock, they go on once it is there again."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from gpusched_client.terms import HoldKind, JobId
from gpuschedd.jobs import holds
from gpuschedd.jobs.controller import Controller
from gpuschedd.system.accounts import NameService

log = logging.getLogger(__name__)

ACCOUNTS_EVERY_S = 60.0


class AccountWatch:
    """Looks for them in the name service, which may be slow, or down."""

    def __init__(self, controller: Controller, accounts: NameService) -> None:
        self._controller = controller
        self._accounts = accounts

    async def look_regularly(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(ACCOUNTS_EVERY_S)
            back = await self._those_back()
            if back:
                self._controller.post(partial(holds.release_accounts, job_ids=back))

    async def _those_back(self) -> list[JobId]:
        back = []
        for job in tuple(self._controller.state.jobs.values()):
            if job.hold != HoldKind.ACCOUNT:
                continue
            try:
                if (await self._accounts.look_up(job.user, job.uid)).is_good:
                    back.append(job.job_id)
            except (TimeoutError, OSError, RuntimeError) as error:  # or no thread was left
                log.warning("account_not_looked_at job=%d error=%r", job.job_id, error)
        return back
