"""gcancel: end jobs, queued or running alike, or send them a signal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpusched_client.commands.answering import own_uid
from gpusched_client.commands.cancelling import cancel
from gpusched_client.commands.common import CONTEXT_SETTINGS, VERSION, Command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpusched_client.client import Client


@click.command(
    cls=Command,
    name="gcancel",
    context_settings=CONTEXT_SETTINGS,
    epilog="Jobs are written 7, 1-3,7, @ (your last job), @~1 (the one before). Options narrow "
    "the choice; without ids and without -u they take from your own live jobs.",
)
@click.option("-u", "--user", metavar="USER", help="Jobs of this user; `me` is you.")
@click.option("-t", "--state", metavar="STATES", help="Only jobs in these states, such as PD,R.")
@click.option("-n", "--name", metavar="NAME", help="Only jobs of this name.")
@click.option(
    "-s", "--signal", metavar="SIG", help="Send this signal (USR1, 10) instead of ending."
)
@click.option("--reason", metavar="TEXT", help="Why; kept with the job.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
@VERSION
@click.argument("words", nargs=-1, metavar="[IDS]...")
def cli(words: tuple[str, ...], **options: Any) -> int:
    """Cancel jobs. A job that has already ended is not an error."""
    filters = any(options[name] is not None for name in ("user", "state", "name"))
    if not words and not filters:
        raise click.UsageError("no jobs; name ids, or choose with -u, --state or --name.")
    if options["user"] is not None and not options["user"].strip():
        raise click.UsageError(f"-u {options['user']!r} names no user; `me` is you.")
    signal = None if options["signal"] is None else _signal_number(options["signal"])
    return cancel(
        lambda client: _chosen_ids(client, words, filters, options),
        signal=signal,
        reason=options["reason"],
        as_json=options["as_json"],
    )


def _signal_number(text: str) -> int:
    """A signal by number or by name, with or without SIG."""
    import signal

    if text.isdecimal() and 1 <= int(text) <= 64:
        return int(text)
    name = text.upper()
    name = name if name.startswith("SIG") else f"SIG{name}"
    try:
        return signal.Signals[name].value
    except KeyError:
        raise click.BadParameter(
            f"{text!r} is not a signal; use a name such as USR1 or a number from 1 to 64",
            param_hint="--signal",
        ) from None


def _chosen_ids(
    client: Client, words: Sequence[str], filters: bool, options: dict[str, Any]
) -> Sequence[int]:
    """The ids that are named, narrowed by the filters; or all live jobs that pass them."""
    from gpusched_client.commands.selectors import live_ids, named_ids

    named = named_ids(client, words) if words else None
    if not filters:
        return named or ()
    user = options["user"]
    if user == "me" or (user is None and named is None):
        user = str(own_uid())
    passing = live_ids(client, user=user, states=_states(options["state"]), name=options["name"])
    if named is None:
        return passing
    chosen = set(passing)
    return [job_id for job_id in named if job_id in chosen]


def _states(text: str | None) -> Any:
    from gpusched_client.terms import parse_states

    return None if text is None else parse_states(text)


if __name__ == "__main__":
    cli()
