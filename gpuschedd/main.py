"""`python -m gpuschedd.main`: what installed units call. `cli` is the command."""

from __future__ import annotations

from gpuschedd.cli import cli

if __name__ == "__main__":
    cli()
