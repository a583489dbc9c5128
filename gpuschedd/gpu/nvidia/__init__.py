"""NVIDIA's GPUs: NVML in a child process with a deadline."""
