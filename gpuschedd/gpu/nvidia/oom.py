"""What programs print when an allocation on a GPU fails, by framework."""

from __future__ import annotations

#: Regular expressions, for text in lower case. gRPC also says RESOURCE_EXHAUSTED, for quotas: only
#: XLA's wording counts.
OOM_PATTERNS = (
    r"cuda out of memory",
    r"torch\.outofmemoryerror",
    r"torch\.cuda\.outofmemoryerror",
    r"c10::(?:cuda::)?outofmemoryerror",
    r"cuda(?: runtime| driver)? error[^\n]{0,40}: out of memory",
    r"cuda failure(?: \d+)?:? '?out of memory",
    r"thcudacheck fail [^\n]*: out of memory",
    # The macros that C programs copy from one another.
    r"gpuassert: out of memory",
    r"cudasafecall\(\)[^\n]{0,200} out of memory",
    r"code: ?2, reason: out of memory",
    r"out_of_memory: (?:cuda error|rmm failure)",
    r"\[cuda\]: out of memory",
    r"cuda: out of memory",
    r"cuda runtime \(out of memory\)",
    r"cudasuccess \(2 vs\. 0\)\s+out of memory",
    r"cuda error cuda[^\n]{0,300}: out of memory",  # with the call and its place between
    # Compilers' runtimes, for OpenACC and CUDA Fortran.
    r"cumemalloc[^\n]{0,20} returned error 2: out of memory",
    r"allocate: \d+ bytes requested; status = 2 ?\(out of memory\)",
    r"error out of memory at line \d+ in file [^\n]*\.cu",
    r"cuda_error_out_of_memory",
    r"cudaerrormemoryallocation",
    r"(?:cudamalloc|cumemalloc|hipmalloc)[^\n]{0,100} (?:failed:?|error) out of memory",
    r"cu(?:blas|dnn|solver|sparse|tensor|fft)_(?:status_)?alloc_failed",
    r"cudnn_status_internal_error_device_allocation_failed",
    r"\[trt\][^\n]{0,200}error code 2: outofmemory",
    r"gpu api call\) out of memory",
    r"(?:optix_error_device_out_of|vk_error_out_of_device)_memory",
    r'memoryspace named "(?:cuda|hip)[^\n]{0,200}insufficient memory',
    r"resource_exhausted: (?:out of memory|attempting to allocate|failed to allocate request)",
    r"resource_exhausted: allocator \(gpu[^\n]*ran out of memory",
    r"out of memory error on gpu",
    r"out of gpu memory",
    r"oom when allocating tensor[^\n]*gpu",
    # TensorFlow's eager mode names the device before it, or in the allocator's own line.
    r"gpu[:_]\d[^\0]{0,2000}failed to allocate memory \[op:",
    r"free memory on device[^\n]{0,80} is less than desired gpu memory utilization",
    r"no available memory for the cache blocks",
    r"cupy[a-z_.]*\.outofmemoryerror",
    r"rocm error: out of memory",
    r"hip out of memory",
    r"hiperroroutofmemory",
    r"hip error[^\n]{0,40}: out of memory",
)
