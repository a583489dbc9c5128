"""The daemon: decides who runs next on this host's GPUs, starts the jobs and keeps the books."""

__version__ = "0.1.0"
