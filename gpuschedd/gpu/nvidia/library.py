"""The driver library, and the one choke point of all calls into it: the only importer of `pynvml`.

Runs inside the child process (`child`). Every failure is a Failed with the driver's code; what
is being called stands in a shared page, so that the parent can name the call that hangs. It decides
nothing.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

PAGE_BYTES = 4096
PAGE = struct.Struct("<Qii12s64s")  # calls begun, GPU index or -1, its peer's, part, function

# Codes of nvml.h, and one of ours for what is not an NVML error at all.
SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION = 0, 1, 2, 3, 4
NOT_FOUND, INSUFFICIENT_SIZE, DRIVER_NOT_LOADED, TIMEOUT = 6, 7, 9, 10
LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED = 12, 13, 15, 16
LIB_RM_MISMATCH, ARGUMENT_VERSION_MISMATCH, UNKNOWN, BROKEN_BINDING = 18, 25, 999, -1

#: What the GPUs can be used without, where its calls hang or crash.
Part = Literal["topology", "events", "recount", "accounts"]

NEW_CHILD_CODES = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_MISMATCH})


class Failed(Exception):
    """A call that gave no value. `code` is the driver's, BROKEN_BINDING where the binding broke."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Library:
    """The one choke point of all driver calls: counted, timed, each failure a Failed."""

    def __init__(self, page: mmap.mmap | None = None) -> None:
        self.calls = 0
        self.busy_s = 0.0
        self.gpu = -1  # that the calls are about, for the page
        self._peer = -1
        self._part = ""
        self.skip: frozenset[str] = frozenset()
        self._page = page
        self._names: dict[tuple[str, ...], str] = {}
        self._nvml: Any = None

    def load(self) -> Any:
        """The binding. Raises Failed where another distribution's module lies in its place."""
        if self._nvml is None:
            import pynvml

            if not hasattr(pynvml, "_nvmlGetFunctionPointer") or not hasattr(
                pynvml, "nvmlDeviceGetComputeRunningProcesses_v3"
            ):
                raise Failed(
                    BROKEN_BINDING,
                    f"{pynvml.__file__} is not the module of nvidia-ml-py; run "
                    "`pip uninstall pynvml nvidia-ml-py3` and `pip install -I nvidia-ml-py`",
                )
            self._nvml = pynvml
        return self._nvml

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """One call. Any exception counts: a binding that breaks raises more than NVMLError."""
        if name in self.skip:
            raise Failed(NOT_SUPPORTED, f"{name} is skipped by the configuration")
        nvml = self.load()
        function = getattr(nvml, name, None)
        if function is None:
            raise Failed(FUNCTION_NOT_FOUND, f"the binding lacks {name}")
        self.calls += 1
        if self._page is not None:
            page = (self.calls, self.gpu, self._peer, self._part.encode(), name.encode())
            PAGE.pack_into(self._page, 0, *page)
        began_s = time.monotonic()
        try:
            return function(*arguments, **named)
        except nvml.NVMLError as error:
            code = int(getattr(error, "value", BROKEN_BINDING))
            raise Failed(code, _words_of(error, code)) from error
        except (
            Exception
        ) as error:  # NVMLLibraryMismatchError, UnicodeDecodeError, ArgumentError, ...
            mismatch = type(error).__name__ == "NVMLLibraryMismatchError"
            code = FUNCTION_NOT_FOUND if mismatch else BROKEN_BINDING
            raise Failed(code, f"{name}: {type(error).__name__}: {error}") from error
        finally:
            self.busy_s += time.monotonic() - began_s

    @contextmanager
    def part(self, part: Part, gpu: int = -1, peer: int = -1) -> Iterator[None]:
        """The calls within are for that part, about that GPU (and a peer of it)."""
        before = self._part, self.gpu, self._peer
        self._part, self.gpu, self._peer = part, gpu, peer
        try:
            yield
        finally:
            self._part, self.gpu, self._peer = before

    def ask(self, name: str, *arguments: Any, **named: Any) -> Any:
        """One call, None where it fails. For facts whose absence needs no reason."""
        try:
            return self.call(name, *arguments, **named)
        except Failed:
            return None

    def newest(self, names: tuple[str, ...], *arguments: Any) -> Any:
        """The first of these functions that the driver has: newer names first."""
        known = self._names.get(names)
        if known is not None:
            return self.call(known, *arguments)
        for name in names:
            try:
                value = self.call(name, *arguments)
            except Failed as failure:
                if failure.code == FUNCTION_NOT_FOUND:
                    continue
                if failure.code in (NOT_SUPPORTED, NO_PERMISSION, SUCCESS):
                    self._names[names] = name
                raise
            self._names[names] = name
            return value
        raise Failed(FUNCTION_NOT_FOUND, f"the driver has none of {', '.join(names)}")

    def prefer(self, names: tuple[str, ...], name: str) -> None:
        """Use `name` of these from now on: the newer one turned out to lie."""
        self._names[names] = name

    def forget_page(self) -> None:
        """Between requests: no call is under way."""
        self.gpu = -1
        if self._page is not None:
            PAGE.pack_into(self._page, 0, self.calls, -1, -1, b"", b"")


def _words_of(error: Exception, code: int) -> str:
    """The driver's words for a code that the binding does not know; they may be garbage, too."""
    try:
        return str(error)
    except Exception:
        return f"error {code}"
