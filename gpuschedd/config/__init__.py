"""The configuration file, typed."""
