"""The work of gcancel once it is known what is asked. Needs no click."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpusched_client.commands.answering import note_done, print_err, tell_who_answered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpusched_client.client import Client


def cancel(
    choose: Callable[[Client], Sequence[int]],
    *,
    signal: int | None = None,
    reason: str | None = None,
    as_json: bool = False,
) -> int:
    """End the chosen jobs, or send them a signal, and say what became of them; the exit status."""
    from gpusched_client.client import Client
    from gpusched_client.commands.report import report

    with Client() as client:
        ids = choose(client)
        tell_who_answered("gcancel", client)
        outcomes = client.cancel(ids, signal=signal, reason=reason) if ids else ()
        note_done("what was asked is done")
    if not outcomes and not as_json:
        print_err("gcancel: no job matches")
    return report("gcancel", outcomes, as_json)
