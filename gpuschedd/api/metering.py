"""What a request costs the loop: the processor time of each of its steps."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


@types.coroutine
def metered(
    work: Coroutine[Any, Any, T], charge: Callable[[float], None]
) -> Generator[Any, Any, T]:
    """Await `work`, and charge the seconds that this thread was busy with it, step by step."""
    said: Any = None
    raised: BaseException | None = None
    while True:
        began_s = time.thread_time()
        try:
            waits_for = work.send(said) if raised is None else work.throw(raised)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            charge(time.thread_time() - began_s)
        said = raised = None
        try:
            said = yield waits_for
        except BaseException as error:  # a cancellation too: it is the work's to take
            raised = error
