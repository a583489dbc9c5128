"""The daemon: decides who runs next on this host's GPUs, starts the jobs and keeps the books."""
