"""The part of the Python API that administrators use: the daemon's health, its GPUs, its copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpusched_client.wire.admin_messages import ReloadResult, StatusResult
    from gpusched_client.wire.gpu_messages import GpusResult, GpuView
    from gpusched_client.wire.session import Session


class Administration:
    """What `gctl` calls about the daemon and its GPUs; a Client has it all."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def status(self) -> StatusResult:
        """The daemon's health."""
        from gpusched_client.wire.admin_messages import StatusRequest

        return self._session.call(StatusRequest())

    def stats(self) -> Mapping[str, Any]:
        """The daemon's counters."""
        from gpusched_client.wire.admin_messages import StatsRequest

        return self._session.call(StatsRequest()).counters

    def reload(self) -> ReloadResult:
        """Have the daemon read its configuration again. Admin only."""
        from gpusched_client.wire.admin_messages import ReloadRequest

        return self._session.call(ReloadRequest())

    def drain(self, gpu: str | int, reason: str) -> GpuView:
        """Take a GPU (index or UUID) out of service once its jobs are gone. Admin only.

        The first one that was meant: a GPU in MIG mode means each of its slices.
        """
        return self.drain_all(gpu, reason)[0]

    def drain_all(self, gpu: str | int, reason: str) -> tuple[GpuView, ...]:
        """The same; all that were meant."""
        from gpusched_client.wire.gpu_messages import DrainRequest

        result = self._session.call(DrainRequest(str(gpu), reason))
        return result.gpus or (result.gpu,)

    def resume(self, gpu: str | int) -> GpuView:
        """Put a GPU back into service, or the slices of one, as drain. Admin only."""
        return self.resume_all(gpu)[0]

    def resume_all(self, gpu: str | int) -> tuple[GpuView, ...]:
        """The same; all that were meant."""
        from gpusched_client.wire.gpu_messages import ResumeRequest

        result = self._session.call(ResumeRequest(str(gpu)))
        return result.gpus or (result.gpu,)

    def gpus_release(self, reason: str) -> GpusResult:
        """Have the daemon release the driver; nothing is placed until gpus_resume. Admin only."""
        from gpusched_client.wire.gpu_messages import GpusReleaseRequest

        return self._session.call(GpusReleaseRequest(reason))

    def gpus_resume(self) -> GpusResult:
        """Have the daemon open the driver again. Admin only."""
        from gpusched_client.wire.gpu_messages import GpusResumeRequest

        return self._session.call(GpusResumeRequest())

    def backup(self) -> Iterator[bytes]:
        """A consistent copy of the database, piece by piece, made while the daemon runs.

        For root alone (in user mode for the daemon's owner): it holds the environments of waiting
        jobs. Unavailable where the connection is lost in between: begin again.
        """
        from gpusched_client.wire.admin_messages import BackupRequest

        request = BackupRequest()
        while True:
            piece = self._session.call(request, repeatable=False)
            yield piece.data
            offset = piece.offset + len(piece.data)
            if offset >= piece.size_bytes:
                return
            request = BackupRequest(piece.backup_id, offset)
