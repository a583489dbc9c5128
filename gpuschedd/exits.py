"""How a daemon ends that no bug ended: the exit status, and the words for it."""

from __future__ import annotations

from pathlib import Path

from gpusched_client.errors import GpuschedError
from gpuschedd.config.toml import ConfigError
from gpuschedd.run.launchers.direct import is_host_short
from gpuschedd.store.database import StoreFull, StoreUnusable
from gpuschedd.system import state_dir as places

EX_TEMPFAIL = 75  # another daemon runs here
EX_CONFIG = 78  # a restart does not help: configuration, database, places
EX_IOERR = 74
EX_OSERR = 71  # the host is short of something; a restart may help
PLACES_LOST = (places.AlreadyRunning, places.Unusable)


def status_of(error: Exception) -> int:
    """Of an end that no restart mends: another daemon is there, or a place cannot be used."""
    return EX_TEMPFAIL if isinstance(error, places.AlreadyRunning) else EX_CONFIG


def how_it_ended(error: Exception, state_dir: Path) -> tuple[int, str] | None:
    """Exit status and words of an end that is no bug of ours; None of one that is."""
    if isinstance(error, places.AlreadyRunning):
        return status_of(error), str(error)
    if is_short(error):
        text = "the host is short of processes, threads, memory or descriptors for now"
        return EX_OSERR, f"{error}: {text}"
    if isinstance(error, (*PLACES_LOST, ConfigError, StoreUnusable, GpuschedError)):
        return status_of(error), str(error)
    if isinstance(error, StoreFull):
        return EX_IOERR, f"the database cannot be written: {error}"
    if isinstance(error, OSError) and error.errno in places.UNWRITABLE_ERRNOS:
        return EX_IOERR, f"{error.filename or state_dir} cannot be written: {error.strerror}"
    return None


def is_short(error: BaseException | None) -> bool:
    """Whether what lies below an error is a want of the host's, which passes."""
    while error is not None:
        if isinstance(error, Exception) and is_host_short(error):
            return True
        error = error.__cause__
    return False
