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
        self._events: Any = None

    def forget(self) -> None:
        """The driver was shut down, and the set with it."""
        self._events = None

    def open(self, devices: list[Device]) -> None:
        """Register; a GPU that has no events is not sick for that."""
        self._devices = devices
        self._events = self._lib.ask("nvmlEventSetCreate")
        if self._events is None:
            return
        for handle in {id(d.parent or d): (d.parent or d).handle for d in self._devices}.values():
            types = self._lib.ask("nvmlDeviceGetSupportedEventTypes", handle) or 0
            wanted = types & (_XID | _MIG_CHANGED | _RECOVERY | _UNAVAILABLE)
            if wanted:
                self._lib.ask("nvmlDeviceRegisterEvents", handle, wanted, self._events)

    def take(self) -> list[list[Any]]:
        """What was reported since the last sweep. Never waits: it is this one thread that calls."""
        taken: list[list[Any]] = []
        while self._events is not None and len(taken) < DRIVER_EVENTS_MAX:
            try:
                data = self._lib.call("nvmlEventSetWait", self._events, 0)
            except Failed as failure:
                if failure.code != TIMEOUT:
                    self.open(self._devices)  # all GPUs are suspect: a new set is made, then asked
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
