"""What is sent to one client: bounded, and cut where it is not read."""

from __future__ import annotations

import asyncio
import logging

from gpuschedd.api.limits import UNREAD_S, UNSENT_BYTES_MAX, Unsent

log = logging.getLogger(__name__)


class Outgoing:
    """The sending side of a connection, counted as the account's. Satisfies limits.Reader."""

    def __init__(self, unsent: Unsent, account: int) -> None:
        self._unsent = unsent
        self._account = account
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None  # set while something is unsent
        self._sent_bytes = 0  # taken by the client or not

    def begin(self, transport: asyncio.Transport) -> None:
        """From here on there is somebody."""
        self._transport = transport
        transport.set_write_buffer_limits(high=0)  # hear of it as soon as something is unsent

    @property
    def unsent_bytes(self) -> int:
        """That the client has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, data: bytes) -> bool:
        """Queue bytes; a reader that never reads is cut at the limit."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if self.unsent_bytes > UNSENT_BYTES_MAX:
            self.cut("it reads nothing")
            return False
        self._sent_bytes += len(data)
        transport.write(data)
        if self._timer is not None:
            self._unsent.bound(self._account)
        return not transport.is_closing()

    def send_unless_behind(self, data: bytes) -> bool:
        """False, and nothing sent, while the client is half a limit behind."""
        return self.unsent_bytes <= UNSENT_BYTES_MAX // 2 and self.send(data)

    def cut(self, why: str) -> None:
        """Close at once, and drop what is unsent."""
        log.info("slow_reader_cut account=%d why=%s", self._account, why)
        if self._transport is not None:
            self._transport.abort()

    def begin_waiting(self) -> None:
        """The client does not take what it is sent."""
        self._unsent.begin(self._account, self)
        self._expect_reading()

    def end_waiting(self) -> None:
        """It has taken all, or is gone."""
        self._unsent.end(self._account, self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expect_reading(self) -> None:
        taken = self._sent_bytes - self.unsent_bytes
        self._timer = asyncio.get_running_loop().call_later(UNREAD_S, self._look, taken)

    def _look(self, taken_before: int) -> None:
        if self._sent_bytes - self.unsent_bytes <= taken_before:
            self.cut(f"it took nothing for {UNREAD_S:.0f} s")
        else:
            self._expect_reading()
