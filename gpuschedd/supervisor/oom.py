"""Out of memory: whether the GPU's or the host's memory was what a failed job ran out of."""

from __future__ import annotations

import os
import re
import stat

from gpuschedd.supervisor.identity import become_user
from gpuschedd.supervisor.records import OOM_CUDA, OOM_UNKNOWN, read_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuschedd.supervisor.spec import Spec

OOM_SCAN_BYTES = 16 * 2**10

# What frameworks print when a GPU allocation failed, in lower case. gRPC also says
# RESOURCE_EXHAUSTED, for quotas: only XLA's wording counts.
# Compiled when it is first needed: most jobs do not fail, and it takes 1 ms.
CUDA_OOM = (
    rb"cuda out of memory"
    rb"|torch\.outofmemoryerror|torch\.cuda\.outofmemoryerror"
    rb"|cuda(?: runtime| driver)? error[^\n]{0,40}: out of memory"
    rb"|cuda failure(?: \d+)? 'out of memory'|out_of_memory: cuda error"
    rb"|cuda_error_out_of_memory|cudaerrormemoryallocation"
    rb"|(?:cudamalloc|cumemalloc|hipmalloc)[^\n]{0,20} failed: out of memory"
    rb"|cublas_status_alloc_failed|cudnn_status_alloc_failed"
    rb"|resource_exhausted: (?:out of memory|attempting to allocate|failed to allocate request)"
    rb"|resource_exhausted: allocator \(gpu[^\n]*ran out of memory|out of memory error on gpu"
    rb"|oom when allocating tensor[^\n]*gpu"
    rb"|cupy[a-z_.]*\.outofmemoryerror|rocm error: out of memory"
    rb"|hip out of memory|hiperroroutofmemory|hip error[^\n]{0,40}: out of memory"
)


def shows_cuda_oom(data: bytes) -> bool:
    return re.search(CUDA_OOM, data.lower()) is not None


def scan_log(path: bytes, identity: list[int] | None) -> str | None:
    """Whether the end of this attempt's output shows an OOM; unknown where it cannot be read."""
    if identity is None:
        return OOM_UNKNOWN
    device, inode, begin = identity
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino) != (device, inode) or not stat.S_ISREG(found.st_mode):
        return OOM_UNKNOWN
    os.lseek(fd, max(begin, found.st_size - OOM_SCAN_BYTES), os.SEEK_SET)
    return OOM_CUDA if shows_cuda_oom(read_all(fd, OOM_SCAN_BYTES)) else None


def scan_as_user(spec: Spec, logs: list[list[int] | None]) -> bytes:
    """In a forked child: the answer as one word, empty for none."""
    become_user(spec, None)
    os.chdir(spec.cwd)
    paths = [spec.output] if spec.error is None else [spec.output, spec.error]
    found = {scan_log(path, log) for path, log in zip(paths, logs, strict=False)}
    answer = OOM_CUDA if OOM_CUDA in found else OOM_UNKNOWN if OOM_UNKNOWN in found else ""
    return answer.encode()


def host_oom_kills() -> int | None:
    """OOM kills so far in this process's cgroup; None where version 2 does not count them."""
    try:
        with open("/proc/self/cgroup", "rb") as file:
            place = re.search(rb"^0::(/.*)$", file.read(), re.MULTILINE)
        if place is None:
            return None
        with open(b"/sys/fs/cgroup" + place[1] + b"/memory.events", "rb") as file:
            count = re.search(rb"^oom_kill (\d+)$", file.read(), re.MULTILINE)
    except OSError:
        return None
    return int(count[1]) if count else None


RECORD_VERSION = 1
