"""Out of memory: what counts as the GPU's, and where it is looked for."""

from __future__ import annotations

import pytest

from gpuschedd.gpu.nvidia.oom import OOM_PATTERNS
from gpuschedd.supervisor.oom import OOM_SCAN_BYTES, gpu_oom, shows_gpu_oom
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
        b"tensorflow.python.framework.errors_impl.ResourceExhaustedError: {{function_node "
        b"__wrapped__AddV2_device_/job:localhost/replica:0/task:0/device:GPU:0}} failed to "
        b"allocate memory [Op:AddV2] name: ",
        b"W gpu_bfc_allocator: Allocator (GPU_0_bfc) ran out of memory\nTraceback\n"
        b"ResourceExhaustedError: failed to allocate memory [Op:MatMul]",
        b"ValueError: Free memory on device (3.21/79.1 GiB) on startup is less than desired GPU "
        b"memory utilization (0.9, 71.2 GiB). Decrease GPU memory utilization",
        b"ValueError: Free memory on device cuda:0 (3.2/79.1 GiB) on startup is less than desired "
        b"GPU memory utilization (0.9, 71.2 GiB).",
        b"ValueError: No available memory for the cache blocks. Try increasing "
        b"`gpu_memory_utilization` when initializing the engine.",
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
        b"InternalError: failed to allocate memory for the queue",
        b"ResourceExhaustedError: {{function_node device:CPU:0}} failed to allocate memory "
        b"[Op:AddV2]",
        b"429 RESOURCE_EXHAUSTED: Quota exceeded for quota metric",
        b"",
    ],
)
def test_other_failures_are_no_gpu_out_of_memory(line: bytes) -> None:
    assert not shows_gpu_oom(line, OOM_PATTERNS)


OOM = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (b"CUDA out of memory, using 32\nTraceback ..\nValueError: no such column\n", "shown"),
        (OOM + b"step 5\nKeyError: 'loss'\n", "shown"),
        (OOM + b"[rank1]: FileNotFoundError: /data/x\n", "shown"),
        (OOM, "cuda"),
        (b"ValueError: caught\n" + OOM, "cuda"),
        (OOM + b"Error in sys.excepthook\n  File x\nlast step 7\n", "cuda"),
        (OOM + b"[rank1]: torch.distributed.DistBackendError: NCCL error\n" * 200, "cuda"),
        (OOM + b"torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n", "cuda"),
        (OOM + b"subprocess.CalledProcessError: Command 'x' returned non-zero exit\n", "cuda"),
        (OOM + b"During handling of the above exception, another ..\nValueError: x\n", "cuda"),
        (b"ValueError: no memory of it\n", None),
        (OOM + b"KeyError: 'rank'\n", "shown"),
        (OOM + b"FileNotFoundError: [Errno 2] '/data/engine/x'\n", "shown"),
        (OOM + b"\x1b[31mValueError: bad shape\x1b[0m\n", "shown"),
    ],
)
def test_a_later_and_different_error_wins(output: bytes, told: str | None) -> None:
    """Not what an OOM does to the other processes of the job, nor what is chained to it."""
    assert gpu_oom(output, OOM_PATTERNS) == told


def test_begin_and_end_of_a_long_output_are_read(host: Host) -> None:
    """Traces behind the line, of whatever length, hide it no more; nor does an earlier attempt."""
    traces = f"head -c {3 * OOM_SCAN_BYTES} /dev/zero | tr '\\0' x"
    say = "echo CUDA out of memory"
    for number, line in enumerate((f"{say}; {traces}; exit 1", f"{traces}; {say}; exit 1")):
        seen = host.wait_exit(host.sh(line, output=b"long%d" % number))
        assert seen.oom == "cuda"
    assert host.wait_exit(host.sh(f"{traces}; exit 1", output=b"long0", attempt=2)).oom is None


def test_the_error_of_another_stream_counts_as_the_later_one(host: Host) -> None:
    """What ends a program goes to stderr; a note on stdout was of something it got over."""
    line = "echo CUDA out of memory; echo ValueError: x >&2; exit 1"
    assert host.wait_exit(host.sh(line, output=b"o", error=b"e")).oom == "shown"


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
