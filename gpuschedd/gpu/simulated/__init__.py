"""Simulated GPUs: memory that gpusched-simjob processes claim."""
