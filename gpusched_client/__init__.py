"""The client: the words, the wire, and the commands people type. Never imports the daemon.

    from gpusched_client import Client, GpuschedError

    with Client() as client:
        job = client.submit(["python", "train.py"], gpus=2, vram="18G", time_limit="4h")
        ended = client.wait(job.id)
        print(ended.state, ended.exit_code)

All that goes wrong is a GpuschedError: its text names the value, the limit and the cure, `data` has
the numbers. Its class (Denied, Infeasible, NotFound, Unavailable and so on) says who can act. Calls
about several jobs (cancel, update) return an Outcome for each instead, whose `code` is None where
it was done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpusched_client.client import Client as Client
    from gpusched_client.errors import Conflict as Conflict
    from gpusched_client.errors import Denied as Denied
    from gpusched_client.errors import GpuschedError as GpuschedError
    from gpusched_client.errors import Infeasible as Infeasible
    from gpusched_client.errors import Internal as Internal
    from gpusched_client.errors import Invalid as Invalid
    from gpusched_client.errors import LimitReached as LimitReached
    from gpusched_client.errors import NotFound as NotFound
    from gpusched_client.errors import PartlySubmitted as PartlySubmitted
    from gpusched_client.errors import StillRunning as StillRunning
    from gpusched_client.errors import StorageError as StorageError
    from gpusched_client.errors import TooLarge as TooLarge
    from gpusched_client.errors import Unavailable as Unavailable
    from gpusched_client.submission.request import Surroundings as Surroundings
    from gpusched_client.submission.request import job_request as job_request
    from gpusched_client.submission.submitted import SubmittedJob as SubmittedJob
    from gpusched_client.terms import JobState as JobState
    from gpusched_client.wire.job_messages import JobView as JobView

__version__ = "0.1.0"

_NAMES_IN = {
    "client": ("Client",),
    "submission.submitted": ("SubmittedJob",),
    "submission.request": ("Surroundings", "job_request"),
    "wire.job_messages": ("JobView",),
    "terms": ("JobState",),
    "errors": (
        *("GpuschedError", "Conflict", "Denied", "Infeasible", "Internal", "Invalid"),
        *("LimitReached", "NotFound", "PartlySubmitted", "StillRunning", "StorageError"),
        *("TooLarge", "Unavailable"),
    ),
}
_HOME_OF = {name: home for home, names in _NAMES_IN.items() for name in names}

__all__ = list(_HOME_OF)  # spelt out above, where each is at home


if not TYPE_CHECKING:  # to a type checker there is nothing beyond what is spelt out above

    def __dir__() -> list[str]:
        """What completion and help() show."""
        return [*globals(), *_HOME_OF]

    def __getattr__(name: str) -> Any:
        """Import the public names when they are asked for: the commands start faster without."""
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
