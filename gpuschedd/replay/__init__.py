"""Replay: the same core, driven by a virtual clock over a workload. Starts no process."""
