"""The messages about GPUs: their state, and what administrators do with them."""

from __future__ import annotations

from gpusched_client.errors import Denied, NotFound, StorageError
from gpusched_client.wire.fields import Reader, boolean, integer, list_of, text
from gpusched_client.wire.limits import GPUS_MAX, REASON_BYTES_MAX
from gpusched_client.wire.message import Response, message, nested, wire
from gpusched_client.wire.methods import Request, Right, Unread, method
from gpusched_client.wire.values import ANY_TEXT, JOB_ID, PERCENT, SHORT_TEXT, SIZE

_TEXT = text(128)


def _read_gpu_name(value: object, path: str) -> str:
    name: str = _TEXT.read(str(value) if type(value) is int else value, path)
    return name


_GPU_NAME = Reader(_read_gpu_name, "text or integer", "a UUID of at most 128 bytes, or an index")


@message
class GpuView(Response):
    """One GPU. `used_bytes` is None when it cannot be read, which is not zero.

    `promised_bytes` is what jobs hold, `foreign_bytes` what is kept for processes outside the
    scheduler. `stale` says that the figures are of an older sample. `index` is None where the GPU
    is missing and another one has its index now.
    """

    uuid: str = wire(SHORT_TEXT)
    index: int | None = wire(integer(), default=None)
    minor: int | None = wire(integer(), default=None)
    model: str | None = wire(SHORT_TEXT, default=None)
    total_bytes: int | None = wire(SIZE, default=None)
    used_bytes: int | None = wire(SIZE, default=None)
    promised_bytes: int | None = wire(SIZE, default=None)
    foreign_bytes: int | None = wire(SIZE, default=None)
    state: str = wire(SHORT_TEXT, default="unknown")
    reason: str | None = wire(ANY_TEXT, default=None)
    jobs: tuple[int, ...] = wire(list_of(JOB_ID, 10_000), default=())
    utilization: float | None = wire(PERCENT, default=None)
    stale: bool = wire(boolean, default=False)


@message
class GpusResult(Response):
    """All GPUs of the inventory, by index."""

    gpus: tuple[GpuView, ...] = wire(list_of(nested(GpuView), 2 * GPUS_MAX))
    problem: str | None = wire(ANY_TEXT, default=None)  # why they cannot be read


@method("gpus", Right.ALL, Unread.NOTHING)
class GpusRequest(Request[GpusResult]):
    """The state of each GPU."""


@message
class DrainResult(Response):
    """The GPU after the drain; of one in MIG mode `gpus` are its slices, and `gpu` the first."""

    gpu: GpuView = wire(nested(GpuView))
    gpus: tuple[GpuView, ...] = wire(list_of(nested(GpuView), 2 * GPUS_MAX), default=())


@method("drain", Right.ADMIN, Unread.FINISHED, (Denied, NotFound, StorageError))
class DrainRequest(Request[DrainResult]):
    """Take a GPU, named by index or UUID, out of service once its jobs are gone.

    The index or UUID of a GPU in MIG mode names all its slices.
    """

    gpu: str = wire(_GPU_NAME)
    reason: str = wire(text(REASON_BYTES_MAX))


@message
class ResumeResult(Response):
    """The GPU after the resume; of one in MIG mode `gpus` are its slices, and `gpu` the first."""

    gpu: GpuView = wire(nested(GpuView))
    gpus: tuple[GpuView, ...] = wire(list_of(nested(GpuView), 2 * GPUS_MAX), default=())


@method("resume", Right.ADMIN, Unread.FINISHED, (Denied, NotFound, StorageError))
class ResumeRequest(Request[ResumeResult]):
    """Put a drained GPU back into service; it is named as in `drain`."""

    gpu: str = wire(_GPU_NAME)


@method("gpus_release", Right.ADMIN, Unread.FINISHED, (Denied, StorageError))
class GpusReleaseRequest(Request[GpusResult]):
    """Release the driver, so that MIG modes can be changed or a GPU reset; jobs keep running."""

    reason: str = wire(text(REASON_BYTES_MAX))


@method("gpus_resume", Right.ADMIN, Unread.FINISHED, (Denied, StorageError))
class GpusResumeRequest(Request[GpusResult]):
    """Open the driver again and look which GPUs and slices there are now."""
