"""The daemon: decides who runs next on this host's GPUs, starts the jobs and keeps the books."""

TYPE_CHECKING = False  # not from `typing`: whoever loads this package shall load nothing more
if TYPE_CHECKING:
    from gpusched_client import __version__ as __version__
else:

    def __getattr__(name):
        """The version, from the one place where it is written."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from gpusched_client import __version__

        return __version__
