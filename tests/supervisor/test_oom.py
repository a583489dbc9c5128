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
        b"THCudaCheck FAIL file=THC/generic/THCStorage.c line=82 error=2 : out of memory",
        b"onnxruntime::CudaCall CUDA failure 2: out of memory ; GPU=0 ; hostname=gpu1",
        b"GPUassert: out of memory train.cu 20",
        b"cudaSafeCall() failed at solver.cu:88 : out of memory",
        b"code: 2, reason: out of memory",
        b"terminate called after throwing an instance of 'c10::OutOfMemoryError'",
        b"ERROR: LoadError: Out of GPU memory trying to allocate 8.000 GiB",
        b"RuntimeError: Triton Error [CUDA]: out of memory",
        b"dgl._ffi.base.DGLError: Check failed: e == cudaSuccess: CUDA: out of memory",
        b"Check failed: error == cudaSuccess (2 vs. 0)  out of memory",
        b"FATAL ERROR: CUDA error cudaMalloc((void **)pp, sizeofT*len) in file src/CudaUtils.C, "
        b"function allocate_device_T, line 55 on Pe 0 (node device 0 pci 0:1:0): out of memory",
        b"cudaMalloc GpuBuffer::Allocate failed out of memory",
        b"cudaMalloc(&rawptr, n_bytes+DEBUG_GUARD_SIZE*2) failed: out of memory",
        b"StandardGpuResources: alloc fail type FlatData (cudaMalloc error out of memory [2])",
        b"call to cuMemAlloc returned error 2: Out of memory",
        b"0: ALLOCATE: 8589934592 bytes requested; status = 2(out of memory)",
        b"Error out of memory at line 380 in file /bitsandbytes/csrc/ops.cu",
        b"MemoryError: std::bad_alloc: out_of_memory: RMM failure at:bridge.hpp: Maximum pool size",
        b"RuntimeError: cuFFT error: CUFFT_ALLOC_FAILED",
        b"RuntimeError: cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling",
        b"cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        b"[E] [TRT] 1: [defaultAllocator.cpp] Error Code 1: Cuda Runtime (out of memory)",
        b"[E] [TRT] 2: Error Code 2: OutOfMemory (Requested size was 8589934592 bytes.)",
        b"cv2.error: (-217:Gpu API call) out of memory in function 'allocate'",
        b"optix: OPTIX_ERROR_DEVICE_OUT_OF_MEMORY",
        b"vkAllocateMemory failed: VK_ERROR_OUT_OF_DEVICE_MEMORY",
        b'Allocation using MemorySpace named "Cuda" failed with the following error: Allocation '
        b"of size 32 G failed, likely due to insufficient memory.",
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
        b"error: out of memory at line 3 of input.txt",
        b'Kokkos: MemorySpace named "Host" failed, likely due to insufficient memory.',
        b"cudaMalloc went well\nstep 2 failed: out of memory",
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


TRACE = b'Traceback (most recent call last):\n  File "train.py", line 12, in <module>\n'
TORCH = (
    b"Loading data\nstep 1 loss 2.31\n"
    + TRACE
    + b"    loss.backward()\n"
    + OOM.strip()
    + b". GPU 0 has a total capacity of 23.65 GiB of which 1.02 GiB is free. If reserved but "
    b"unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
    b"avoid fragmentation.\n"
)
JAX = (
    TRACE + b"jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying "
    b"to allocate 6291456 bytes.\nBufferAssignment OOM Debugging.\nBufferAssignment stats:\n"
    b"             parameter allocation:    6.00MiB\nPeak buffers:\n\tBuffer 1:\n\t\tSize: 6.00MiB"
    b'\n\t\tOperator: op_name="jit(train_step)/concatenate" source_file="models.py" source_line=9\n'
    b"\t\t==========================\n\n--------------------\n"
    b"For simplicity, JAX has removed its internal frames from the traceback of the following "
    b"exception. Set JAX_TRACEBACK_FILTERING=off to include these.\n"
)
TENSORFLOW = (
    b"2024-05-01 10:00:00.100000: W tensorflow/tsl/framework/bfc_allocator.cc:485] Allocator "
    b"(GPU_0_bfc) ran out of memory trying to allocate 2.00GiB (rounded to 2147483648)\n"
    b"2024-05-01 10:00:00.200000: I tensorflow/tsl/framework/bfc_allocator.cc:1039] BFCAllocator "
    b"dump for GPU_0_bfc\n"
    + TRACE
    + b"tensorflow.python.framework.errors_impl.ResourceExhaustedError: Graph execution error:\n\n"
    b"OOM when allocating tensor with shape[9,9] and type float on "
    b"/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc\n"
    b"\t [[{{node model/conv/Conv2D}}]]\nHint: If you want to see a list of allocated tensors when "
    b"OOM happens, add report_tensor_allocations_upon_oom to RunOptions for current allocation "
    b"info. This isn't available when running in Eager mode.\n [Op:__inference_train_function_9]\n"
)
CUPY = (
    TRACE + b"cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 34,359,738,368 bytes "
    b"(allocated so far: 0 bytes).\n"
)
LLAMA = (
    b"ggml_backend_cuda_buffer_type_alloc_buffer: allocating 35533.34 MiB on device 0: cudaMalloc "
    b"failed: out of memory\nalloc_tensor_range: failed to allocate CUDA0 buffer of size 372597\n"
    b"llama_model_load: error loading model: unable to allocate CUDA0 buffer\n"
    b"llama_load_model_from_file: failed to load model\n"
)
C_PROGRAM = b"n = 40000\nCUDA error at solver.cu:53: out of memory\n"
BASH = b"/home/ann/job.sh: line 3:  1544 "
SEGFAULT = BASH + b"Segmentation fault      (core dumped) ./train\n"
KILLED = BASH + b"Killed                  python train.py\n"
ABORTED = BASH + b"Aborted                 (core dumped) ./train\n"
OF_OOM = [TORCH, JAX, TENSORFLOW, CUPY, LLAMA, C_PROGRAM]
OF_OOM_IDS = ["torch", "jax", "tensorflow", "cupy", "llama.cpp", "c"]
GOT_OVER = b"out of memory at batch 32, retrying with 16\nstep 2 loss 2.29\n"


@pytest.mark.parametrize("output", OF_OOM, ids=OF_OOM_IDS)
@pytest.mark.parametrize(
    "aftermath",
    [
        b"",
        SEGFAULT,
        ABORTED,
        b"Segmentation fault (core dumped)\n",
        b"[1]    101687 segmentation fault (core dumped)  build/bin/llama-server -ngl 0\n",
        b"Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent "
        b"call first):"
        b"\n  <no Python frame>\n",
        b"terminate called without an active exception\n" + ABORTED,
        b"CUDA error at solver.cu:60: an illegal memory access was encountered\n",
        b"RuntimeError: CUDA error: an illegal memory access was encountered\n",
        b"solver: solver.c:40: main: Assertion `d_x != NULL' failed.\n" + ABORTED,
        b"panic: unable to load model: /models/sha256-d83c\n\ngoroutine 7 [running]:\n",
        b"panic: runtime error: invalid memory address or nil pointer dereference\n"
        b"[signal SIGSEGV: segmentation violation code=0x1 addr=0x0 pc=0x1]\n\ngoroutine 1 "
        b"[running]:\n",
        b"thread 'main' panicked at src/main.rs:9:30:\ncalled `Result::unwrap()` on an "
        b"`Err` value: "
        b"Any { .. }\nnote: run with `RUST_BACKTRACE=1` environment variable to display a "
        b"backtrace\n",
        b"thread 'main' panicked at src/main.rs:9:30:\ncalled `Option::unwrap()` on a "
        b"`None` value\n",
        b"ConnectionResetError: [Errno 104] Connection reset by peer\n",
        b"requests.exceptions.ConnectionError: HTTPConnectionPool(host='localhost', "
        b"port=8000): Max "
        b"retries exceeded with url: /v1/completions (Caused by NewConnectionError('<urllib3."
        b"connection.HTTPConnection object at 0x7f>: Failed to establish a new connection: [Errno "
        b"111] Connection refused'))\n",
        b"subprocess.CalledProcessError: Command '['/usr/bin/python3', '-u', 'train.py']' returned "
        b"non-zero exit status 1.\n",
        b"subprocess.CalledProcessError: Command '['./train', '-n', '4']' returned non-zero exit "
        b"status 2.\n",
        b"wandb: Run history: loss\nwandb: Find logs at: ./wandb/run-1/logs\n" + SEGFAULT,
        b"Exception ignored in: <function Pool.__del__ at 0x7f>\n" + SEGFAULT,
        b"torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
        b"  exitcode  : -15 (pid: 7)\n  traceback : Signal 15 (SIGTERM) received by PID 7\n",
        b"[2023-04-13 08:39:16,676] [INFO] [launch.py:428:sigkill_handler] Killing subprocess 7\n"
        b"[2023-04-13 08:39:17,102] [ERROR] [launch.py:434:sigkill_handler] exits with "
        b"return code\n",
    ],
)
def test_what_an_oom_leads_to_is_no_other_failure(output: bytes, aftermath: bytes) -> None:
    """A program that did not get its memory crashes, breaks off its connections, and is missed."""
    assert gpu_oom(output + aftermath, OOM_PATTERNS) == "cuda"


@pytest.mark.parametrize("output", OF_OOM, ids=OF_OOM_IDS)
@pytest.mark.parametrize(
    "failure",
    [
        KILLED,
        b"Killed\n",
        b"/home/ann/job.sh: line 4: pyhton: command not found\n",
        b"thread 'main' panicked at src/main.rs:9:30:\nindex out of bounds: the len is 3 but the "
        b"index is 5\n",
        b"thread 'main' panicked at 'no column named loss', src/main.rs:9:30\n",
        b"panic: runtime error: index out of range [5] with length 3\n\ngoroutine 1 [running]:\n",
        b"fatal error: all goroutines are asleep - deadlock!\n",
        b"terminate called after throwing an instance of 'std::out_of_range'\n  what():  "
        b"vector::_M_range_check: __n (which is 5) >= this->size() (which is 3)\n" + ABORTED,
        b"RuntimeError: CUDA error: device-side assert triggered\n",
        b"RuntimeError: CUDA error: no kernel image is available for execution on the device\n",
        b"requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443)"
        b": Max retries exceeded with url: /api/models/x\n",
        b"requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='huggingface.co', port=443): "
        b"Read timed out. (read timeout=10)\n",
        b"aiohttp.client_exceptions.ClientConnectorError: Cannot connect to host api.wandb.ai:443 "
        b"ssl:default [Connection refused]\n",
        b"socket.gaierror: [Errno -3] Temporary failure in name resolution\n",
        b"subprocess.CalledProcessError: Command '['git', 'rev-parse', 'HEAD']' returned non-zero "
        b"exit status 128.\n",
        b"subprocess.CalledProcessError: Command 'rsync -a out/ store:/out' returned non-zero exit "
        b"status 12.\n",
        b"RuntimeError: DataLoader worker (pid 71) is killed by signal: Bus error. It is possible "
        b"that dataloader's workers are out of shared memory.\n",
        b"torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
        b"  traceback : Signal 9 (SIGKILL) received by PID 7\n",
        b"RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x9 and 8x9)\n",
    ],
)
def test_a_failure_that_no_oom_leads_to_wins(output: bytes, failure: bytes) -> None:
    """A host, a command, an index that is not there, and SIGKILL have reasons of their own."""
    assert gpu_oom(output + failure, OOM_PATTERNS) == "shown"


@pytest.mark.parametrize("output", OF_OOM, ids=OF_OOM_IDS)
@pytest.mark.parametrize(
    "failure",
    [
        SEGFAULT,
        ABORTED,
        b"Fatal Python error: Segmentation fault\n",
        b"RuntimeError: CUDA error: an illegal memory access was encountered\n",
        b"panic: runtime error: invalid memory address or nil pointer dereference\n",
        b"thread 'main' panicked at src/main.rs:9:30:\ncalled `Option::unwrap()` on a "
        b"`None` value\n",
        b"ConnectionResetError: [Errno 104] Connection reset by peer\n",
        b"TimeoutError: timed out\n",
        b"subprocess.CalledProcessError: Command '['./evaluate']' returned non-zero exit "
        b"status 1.\n",
    ],
)
def test_a_crash_of_a_program_that_got_over_its_oom_is_its_own(
    output: bytes, failure: bytes
) -> None:
    assert gpu_oom(output + GOT_OVER + failure, OOM_PATTERNS) == "shown"


def test_lines_behind_an_uncaught_oom_show_progress_only_where_others_came_in_time() -> None:
    """Python writes what was printed to a file at its end, behind the exception."""
    late = TRACE + OOM + b"Loading data\nstep 1\n" + SEGFAULT
    assert gpu_oom(late, OOM_PATTERNS) == "cuda"
    assert (
        gpu_oom(b"Loading data\n" + TRACE + OOM + b"step 1\n" + SEGFAULT, OOM_PATTERNS) == "shown"
    )
    assert gpu_oom(OOM + b"step 1\n" + SEGFAULT, OOM_PATTERNS) == "shown"


def test_advice_of_an_oom_is_no_sign_that_the_program_went_on() -> None:
    advice = OOM.strip() + b" when warming up. Please try lowering `max_num_seqs`.\n"
    assert gpu_oom(advice + SEGFAULT, OOM_PATTERNS) == "cuda"
    retried = b"mxnet.base.MXNetError: cudaMalloc retry failed: out of memory\n"
    assert gpu_oom(retried + SEGFAULT, OOM_PATTERNS) == "cuda"


def test_what_is_chained_to_another_error_is_not_of_the_oom() -> None:
    chain = b"\nDuring handling of the above exception, another exception occurred:\n\n" + TRACE
    of_oom = TORCH + chain + b"RuntimeError: cannot save\n"
    assert gpu_oom(of_oom, OOM_PATTERNS) == "cuda"
    assert gpu_oom(of_oom + TRACE + b"KeyError: 'loss'\n", OOM_PATTERNS) == "shown"
    own = TORCH + GOT_OVER + TRACE + b"KeyError: 'loss'\n" + chain + b"RuntimeError: cannot save\n"
    assert gpu_oom(own, OOM_PATTERNS) == "shown"


def test_a_death_that_nobody_put_into_words_counts_too(host: Host) -> None:
    """A program that is run without a shell around it dies in silence."""
    crash = "echo CUDA out of memory; {} kill -{} $$"
    on = "echo step 2;"
    told = [
        host.wait_exit(host.sh(crash.format(between, signum), output=b"%d" % number)).oom
        for number, (between, signum) in enumerate((("", "SEGV"), (on, "SEGV"), ("", "KILL")))
    ]
    assert told == ["cuda", "shown", "shown"]
    of_shell = host.sh(f"{crash.format(on, 'SEGV')[:-2]}0; exit 139", output=b"code")
    assert host.wait_exit(of_shell).oom == "shown"


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
