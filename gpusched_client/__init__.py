"""The client: the words, the wire, and the commands people type. Never imports the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpusched_client.capture import job_request as job_request
    from gpusched_client.connection import Client as Client
    from gpusched_client.connection import SubmittedJob as SubmittedJob

__all__ = ["Client", "SubmittedJob", "job_request"]

_HOME_OF = {"Client": "connection", "SubmittedJob": "connection", "job_request": "capture"}


def __dir__() -> list[str]:
    """What completion and help() show."""
    return [*globals(), *_HOME_OF]


def __getattr__(name: str) -> Any:
    """Import the public names when they are asked for: the commands start faster without them."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
