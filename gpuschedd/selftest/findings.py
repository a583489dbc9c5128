"""What the self-test finds: one result a check and GPU, as a table and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpusched_client.output.table import table
from gpusched_client.terms import printable
from gpusched_client.wire.gpu_messages import GpuView


class Check(StrEnum):
    """What is looked at, in the order of the table."""

    INVENTORY = "inventory"  # against nvidia-smi
    SANDBOX = "sandbox"  # the unit reads its GPUs
    OWN = "own process"  # a job's memory is seen as the job's
    PEAK = "peak"  # by the driver's accounts, against what was allocated
    IDENTITY = "index and UUID"  # what the job is told is what CUDA sees
    SLICES = "MIG slices"
    FILTER = "device filter"  # another GPU's node cannot be opened
    FOREIGN = "foreign process"  # seen, with pid and user, and charged to no job
    OOM = "out of memory"  # told from other failures


class Result(StrEnum):
    """What came of a check."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check, on one GPU or on all, with the reason."""

    check: Check
    result: Result
    reason: str
    gpu: GpuView | None = None


def ok(check: Check, reason: str, gpu: GpuView | None = None) -> Finding:
    """It holds."""
    return Finding(check, Result.OK, reason, gpu)


def failed(check: Check, reason: str, gpu: GpuView | None = None) -> Finding:
    """It does not hold."""
    return Finding(check, Result.FAILED, reason, gpu)


def skipped(check: Check, reason: str, gpu: GpuView | None = None) -> Finding:
    """It could not be tried."""
    return Finding(check, Result.SKIPPED, reason, gpu)


def shown_index(index: int | None) -> str:
    """A GPU that is missing has none where another has taken it."""
    return "?" if index is None else str(index)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """By check, then as they came."""
    places = {check: place for place, check in enumerate(Check)}
    return sorted(findings, key=lambda finding: places[finding.check])


def findings_table(findings: Iterable[Finding]) -> str:
    """One line a finding."""
    rows = [
        (
            finding.check.value,
            "" if finding.gpu is None else shown_index(finding.gpu.index),
            finding.result.value,
            printable(finding.reason),
        )
        for finding in findings
    ]
    return table(("CHECK", "GPU", "RESULT", "REASON"), rows)


def finding_json(finding: Finding) -> Mapping[str, Any]:
    """The same for programs."""
    gpu = finding.gpu
    return {
        "check": finding.check.value,
        "gpu": None if gpu is None else gpu.index,
        "gpu_uuid": None if gpu is None else gpu.uuid,
        "result": finding.result.value,
        "reason": finding.reason,
    }
