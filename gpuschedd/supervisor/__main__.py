"""Starts a supervisor, or the forker that makes them: see the package.

A file that is run by its path is compiled at every start, so this one only imports the rest. <root>
comes last in the path: the standard library wins every name. An upgrade may replace the files while
they are imported: what is missing, cut or of several versions is refused, before the claim.
"""

import os
import sys

RECORD_VERSION = 1
PACKAGE = "gpuschedd.supervisor"
EXIT_UNAVAILABLE = 69  # as in errors, which need not be there


def refuse(reason: str) -> None:
    text = f"gpuschedd supervisor: its files are not whole or of one version: {reason}\n"
    os.write(2, text.encode("utf-8", "backslashreplace"))
    os._exit(EXIT_UNAVAILABLE)


if __name__ == "__main__":
    sys.path.append(__file__.removesuffix("/gpuschedd/supervisor/__main__.py"))
    try:
        from gpuschedd.supervisor.forker import serve
        from gpuschedd.supervisor.start import main
    except Exception as error:
        refuse(repr(error))
    sys.path.pop()
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        version = getattr(sys.modules[name], "RECORD_VERSION", None)
        if version != RECORD_VERSION:
            refuse(f"{name} has version {version}, not {RECORD_VERSION}")
    # Nothing is buffered, and tidying up would take a fifth of a start.
    os._exit(serve() if sys.argv[1:] == ["--forker"] else main(sys.argv[1:]))
