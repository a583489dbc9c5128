"""The daemon's log: one line a fact, as the stream that it goes to wants it."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import select
import sys
from collections import deque
from typing import Any, TextIO

from gpusched_client.terms import printable
from gpuschedd.jobs.controller import Committed

log = logging.getLogger("gpuschedd")

LINES_AT_ONCE = 50


class EventLog:
    """One line per event, some at once: a thousand would hold up everybody.

    Never environments, never command lines.
    """

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()
        self._is_under_way = False
        atexit.register(self._write, None)

    def after_commit(self, committed: Committed) -> None:
        """Hear of a committed batch."""
        self._waiting += [event for _, event in committed.events]
        if not self._is_under_way:
            self._go_on()

    def _go_on(self) -> None:
        self._write(LINES_AT_ONCE)
        self._is_under_way = bool(self._waiting)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._go_on)

    def _write(self, most: int | None) -> None:
        for _ in range(len(self._waiting) if most is None else min(most, len(self._waiting))):
            event = self._waiting.popleft()
            whose = [("job", event.job_id), ("uid", event.uid)]
            known = [(key, value) for key, value in whose if value is not None]
            known += event.shown_facts
            words = [f"{key}={_logged(value)}" for key, value in known]
            log.info("%s", " ".join([event.kind, *words]))


def _logged(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


class OneLine(logging.Formatter):
    """Lines that hold users' words and remain one line each, with nothing for a terminal to obey.

    A traceback follows in lines of its own.
    """

    def formatException(self, ei: Any) -> str:
        """The traceback, each of its lines escaped: the words of an error may be a user's."""
        lines = super().formatException(ei).split("\n")
        return "\n".join(printable(line) for line in lines)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, unprintable characters escaped."""
        return printable(super().formatMessage(record))


class JournalLine(OneLine):
    """A line for the journal, which has the time itself and reads the level (sd-daemon(3))."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, its priority first."""
        priority = {logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
        return f"<{priority.get(record.levelno, 6)}>{super().formatMessage(record)}"


def log_formatter(stream: TextIO) -> logging.Formatter:
    """For the journal where PID 1 says that the stream goes there (systemd.exec(5))."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        found = None
    if found and os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}":
        return JournalLine("%(levelname)s %(message)s")
    return OneLine("%(asctime)s %(levelname)s %(message)s")


class UnreadHandler(logging.StreamHandler[TextIO]):
    """To a stream that may have a reader, for whom nobody waits: a full pipe would stop the daemon.

    What does not fit is dropped, and counted in the next line that does.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write it, or count it."""
        if self._dropped and self._takes_more():
            dropped, self._dropped = self._dropped, 0
            log.warning("log_lines_dropped lines=%d text=nobody had read the log", dropped)
        if self._takes_more():
            super().emit(record)
        else:
            self._dropped += 1

    def _takes_more(self) -> bool:
        """Whether a line can be written at once. A file's end is always open."""
        try:
            descriptor = self.stream.fileno()
        except (OSError, ValueError):
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        return bool(poll.poll(0))


def fill_standard_streams() -> None:
    """Make 0, 1 and 2 lead somewhere where the daemon was started without them.

    Or the database would be the next file that is opened, and stderr's lines would go into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def set_up_logging() -> None:
    """To stderr, from level INFO."""
    fill_standard_streams()
    to_stderr = UnreadHandler(sys.stderr)
    to_stderr.setFormatter(log_formatter(sys.stderr))
    logging.basicConfig(level=logging.INFO, handlers=[to_stderr])
