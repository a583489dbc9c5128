"""Out of memory: what counts as the GPU's, and where it is looked for."""

from __future__ import annotations

import pytest

from gpuschedd.gpu.nvidia.oom import OOM_PATTERNS
from gpuschedd.supervisor.oom import shows_gpu_oom
from tests.support.jobs import Host


@pytest.mark.parametrize(
    "line",
    [
        b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
        b"RuntimeError: CUDA error: out of memory",
        b"CUDA runtime error (2): out of memory",
        b"CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
        b"XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.",
        b"cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 8 bytes",
        b"cudaMalloc failed: out of memory",
        b"CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        b"cudaErrorMemoryAllocation: out of memory",
        b"HIP out of memory. Tried to allocate 2.00 GiB",
        b"OOM when allocating tensor with shape[9] on /device:GPU:0 by allocator GPU_0_bfc",
        b"RuntimeError: CUDA driver error: out of memory",
        b"Last error: Cuda failure 2 'out of memory'",
        b"pycuda._driver.MemoryError: cuMemAlloc failed: out of memory",
        b"mxnet.base.MXNetError: cudaMalloc retry failed: out of memory",
        b"allocating 3072.00 MiB on device 0: hipMalloc failed: out of memory",
        b"ROCm error: out of memory",
        b"MemoryError: std::bad_alloc: out_of_memory: CUDA error at: /rmm/include",
        b"RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        b"RESOURCE_EXHAUSTED: Attempting to allocate 3.2G. That was not possible.",
        b"RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB on device ordinal 0",
        b"RESOURCE_EXHAUSTED: Allocator (GPU_0_bfc) ran out of memory trying to allocate 2GiB",
        b"ResourceExhaustedError: Out of memory error on GPU 0. Cannot allocate 2.0GB",
    ],
)
def test_a_gpu_out_of_memory_is_recognised(line: bytes) -> None:
    assert shows_gpu_oom(b"x\n" + line + b"\n", OOM_PATTERNS)


@pytest.mark.parametrize(
    "line",
    [
        b"grpc: RESOURCE_EXHAUSTED: quota exceeded for project",
        b"OOM when allocating tensor with shape[9] on /device:CPU:0 by allocator cpu",
        b"MemoryError: out of memory",
        b"W Allocator (GPU_0_bfc) ran out of memory trying to allocate 2GiB. This is no failure",
        b"triton: out of resource: shared memory, Required: 131072",
        b"429 RESOURCE_EXHAUSTED: Quota exceeded for quota metric",
        b"",
    ],
)
def test_other_failures_are_no_gpu_out_of_memory(line: bytes) -> None:
    assert not shows_gpu_oom(line, OOM_PATTERNS)


def test_only_a_failed_job_s_own_output_tells_of_memory(host: Host) -> None:
    say = "echo CUDA out of memory"
    assert host.wait_exit(host.sh(f"{say}; exit 1", output=b"log")).oom == "cuda"
    assert host.wait_exit(host.sh("exit 1", output=b"log", attempt=2)).oom is None
    assert host.wait_exit(host.sh(f"{say}; exit 0")).oom is None
    assert host.wait_exit(host.sh(f"{say} >&2; exit 1", error=b"err")).oom == "cuda"
    assert host.wait_exit(host.sh(f"{say}; exit 1", output=b"/dev/null")).oom == "unknown"
    assert (
        host.wait_exit(
            host.sh(f"{say}; rm $LOG; exit 1", output=b"gone", environment=((b"LOG", b"gone"),))
        ).oom
        == "unknown"
    )
