"""What an Xid, and the recovery action of the driver, mean for a GPU's fitness."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpuschedd.gpu.source import Illness

DOUBLE_BIT_XID = 48  # new uncorrectable errors count as this one

#: NVIDIA's catalog of Xids in the words of a reason; the numbers alone say nothing.
XID_TEXTS: Mapping[int, str] = {
    13: "graphics engine exception",
    31: "memory page fault of a job",
    32: "corrupted push buffer",
    43: "a job's channel was stopped",
    45: "a job's channels were torn down",
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    63: "row remapping recorded",
    64: "row remapping failed",
    68: "video processor exception",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "GPU fell off the bus",
    92: "many single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP processor timeout",
    120: "GSP processor error",
    136: "link training failed",
    140: "unrecovered ECC error",
    143: "initialisation failure",
    154: "recovery action changed",
    156: "resource retirement",
    158: "timeout of the GPU's memory system",
}
_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "too hot, by software",
    0x40: "too hot, by hardware",
    0x80: "power brake",
}
_ACTIONS = {
    1: "reset of the GPU",
    2: "reboot of the host",
    3: "drain of its NVLink peers",
    4: "drain and reset",
    5: "recovery of the IMEX domain",
    6: "reset of the bus",
    7: "reboot of the host",
}


class XidRules:
    """Which Xids put a GPU out of service. Satisfies HealthRules.

    Those that are in no list are written down only.
    """

    def __init__(self, quarantine: Iterable[int], reboot: Iterable[int]) -> None:
        self._quarantine, self._reboot = frozenset(quarantine), frozenset(reboot)

    def fault_text(self, number: int) -> str:
        """ "Xid 79 (GPU fell off the bus)"."""
        known = XID_TEXTS.get(number)
        return f"Xid {number} ({known})" if known else f"Xid {number}"

    def of_fault(self, number: int) -> Illness | None:
        """By the lists of the configuration."""
        text = self.fault_text(number)
        if number in self._reboot:
            return Illness(f"{text}: out of service until a reboot", until_reboot=True)
        if number in self._quarantine:
            return Illness(f"{text}: out of service until it is reset")
        return None

    def of_uncorrected_errors(self) -> Illness | None:
        """As the Xid of a double-bit error, which not every driver reports."""
        return self.of_fault(DOUBLE_BIT_XID)

    def slowdown_text(self, reasons: int) -> str | None:
        """Heat and the power supply; a limit of clocks or power that somebody set is as it is."""
        found = [text for bit, text in _SLOWDOWNS.items() if reasons & bit]
        return f"it is slowed down ({', '.join(found)})" if found else None

    def action_text(self, action: int) -> str:
        """What the driver asks for (field 230)."""
        return _ACTIONS.get(action, f"action {action}")
