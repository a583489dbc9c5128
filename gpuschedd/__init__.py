"""The daemon: decides who runs next on this host's GPUs, starts the jobs and keeps the accounts.

Every start of a supervisor loads this file, so it imports nothing.
"""
