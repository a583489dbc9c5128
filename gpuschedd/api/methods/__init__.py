"""The methods of the wire, one module a group; each registers its handlers when it is imported."""

from importlib import import_module
from pkgutil import iter_modules


def load() -> None:
    """Import every group."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
