"""Events: Xids, and hints that a GPU should be looked at again."""

from __future__ import annotations

from typing import Any

from gpuschedd.gpu.nvidia.device import Device, Restart
from gpuschedd.gpu.nvidia.library import TIMEOUT, Failed, Library

DRIVER_EVENTS_MAX = 64  # taken per sweep
_XID, _MIG_CHANGED, _RECOVERY, _UNAVAILABLE = 0x8, 0x100, 0x8000, 0x4000


class Events:
    """The event set of the opened driver."""

    def __init__(self, library: Library, restart: Restart) -> None:
        self._lib = library
        self._restart = restart
        self._devices: list[Device] = []
        self._skipped: frozenset[int] = frozenset()  # GPUs whose events hang; -1: all of them
        self._events: Any = None

    def forget(self) -> None:
        """The driver was shut down, and the set with it."""
        self._events = None

    def open(self, devices: list[Device], skipped: frozenset[int] = frozenset()) -> None:
        """Register; a GPU that has no events is not sick for that."""
        self._devices, self._skipped, self._events = devices, skipped, None
        if -1 in skipped:
            return
        with self._lib.part("events"):
            self._events = self._lib.ask("nvmlEventSetCreate")
        if self._events is None:
            return
        for owner in {id(d.parent or d): d.parent or d for d in self._devices}.values():
            if owner.index not in skipped:
                self._register(owner)

    def _register(self, gpu: Device) -> None:
        with self._lib.part("events", gpu.index):
            types = self._lib.ask("nvmlDeviceGetSupportedEventTypes", gpu.handle) or 0
            wanted = types & (_XID | _MIG_CHANGED | _RECOVERY | _UNAVAILABLE)
            if wanted:
                self._lib.ask("nvmlDeviceRegisterEvents", gpu.handle, wanted, self._events)

    def take(self) -> list[list[Any]]:
        """What was reported since the last sweep. Never waits: it is this one thread that calls."""
        with self._lib.part("events"):
            return self._take()

    def _take(self) -> list[list[Any]]:
        taken: list[list[Any]] = []
        while self._events is not None and len(taken) < DRIVER_EVENTS_MAX:
            try:
                data = self._lib.call("nvmlEventSetWait", self._events, 0)
            except Failed as failure:
                if failure.code != TIMEOUT:
                    # All GPUs are suspect: a new set is made, then they are asked.
                    self.open(self._devices, self._skipped)
                    taken += [[device.uuid, "suspect", 0] for device in self._devices]
                break
            self._take_event(data, taken)
        return taken

    def _take_event(self, data: Any, taken: list[list[Any]]) -> None:
        if data.eventType & _MIG_CHANGED:
            self._restart.ask("the slices of a GPU have changed")
        uuid = self._lib.ask("nvmlDeviceGetUUID", data.device)
        for device in self._devices:
            owner = device.parent or device
            if uuid in (owner.uuid, device.uuid):
                is_xid = bool(data.eventType & _XID)
                kind = "fault" if is_xid else "suspect"
                taken.append([device.uuid, kind, int(data.eventData) if is_xid else 0])
