"""gpusched-simjob: a stand-in for a training job on simulated GPUs.

It claims memory on each GPU that it was given, ramps up, holds it, and exits with a code of choice.
A claim that does not fit on the card fails as CUDA does.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from gpusched_client import Client
from gpusched_client import simulation as simclaims
from gpusched_client.errors import GpuschedError, Invalid, NotFound
from gpusched_client.terms import Mode
from gpusched_client.units import parse_asked_bytes, parse_seconds

RAMP_STEP_S = 0.05
OUT_OF_MEMORY_TEXT = "RuntimeError: CUDA error: out of memory"


def _bytes(_context: click.Context, _parameter: click.Parameter, value: str) -> int:
    try:
        return parse_asked_bytes(value)
    except Invalid as error:
        raise click.BadParameter(str(error)) from error


def _seconds(_context: click.Context, _parameter: click.Parameter, value: str) -> float:
    try:
        return parse_seconds(value)
    except Invalid as error:
        raise click.BadParameter(str(error)) from error


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--vram",
    metavar="SIZE",
    default="1G",
    callback=_bytes,
    help="Memory on every GPU given, as 8G.",
)
@click.option(
    "--ramp", metavar="TIME", default="0", callback=_seconds, help="Time to reach it, as 2s."
)
@click.option(
    "--hold", metavar="TIME", default="1", callback=_seconds, help="Time to keep it, as 5s."
)
@click.option(
    "--exit-code", metavar="N", default=0, type=click.IntRange(0, 255), help="Code to leave with."
)
@click.option(
    "--oom-once",
    metavar="FILE",
    type=click.Path(),
    help="Fail as CUDA OOM unless FILE exists; make it.",
)
def cli(vram: int, ramp: float, hold: float, exit_code: int, oom_once: str | None) -> None:
    """Claim memory on simulated GPUs, hold it, and exit."""
    directory = _claims_directory()
    uuids = _granted(directory) if directory is not None else ()
    print(f"simjob: {vram >> 20} MiB on {len(uuids)} GPU(s), hold {hold:g} s", flush=True)
    if oom_once is not None and not os.path.exists(oom_once):
        Path(oom_once).touch()
        _claim(directory, uuids, vram // 2)
        _out_of_memory()
    _ramp_up(directory, uuids, vram, ramp)
    time.sleep(hold)
    sys.exit(exit_code)


def _claims_directory() -> Path | None:
    """As a job is told; else that of the daemon which a client would find. None: no claims."""
    named = os.environ.get(simclaims.ENVIRONMENT_NAME)
    if named:
        return Path(named)
    if not (os.environ.get("GPUSCHED_GPU_UUIDS") or os.environ.get("CUDA_VISIBLE_DEVICES")):
        return None
    try:
        return _directory_of_the_daemon()
    except GpuschedError as error:
        print(f"simjob: nothing is claimed: {error.message}", file=sys.stderr, flush=True)
        return None


def _directory_of_the_daemon() -> Path:
    with Client() as client:
        status = client.status()
    if status.gpu_source != "simulated":
        raise NotFound("the daemon's GPUs are not simulated")
    if status.mode == Mode.SYSTEM:
        return simclaims.SYSTEM_DIR
    return Path(status.database).parent / simclaims.DIRECTORY_NAME


def _granted(directory: Path) -> tuple[str, ...]:
    """UUIDs of GPUSCHED_GPU_UUIDS, else those that CUDA_VISIBLE_DEVICES numbers or names."""
    listed = os.environ.get("GPUSCHED_GPU_UUIDS")
    if listed is not None:
        return tuple(uuid for uuid in listed.split(",") if uuid)
    by_index = list(simclaims.read_totals(directory))
    visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    return tuple(
        by_index[int(word)] if word.isdecimal() else word
        for word in visible
        if not word.isdecimal() or int(word) < len(by_index)
    )


def _ramp_up(directory: Path | None, uuids: tuple[str, ...], vram: int, ramp_s: float) -> None:
    """Claim more and more, linearly, until vram is reached."""
    steps = max(1, int(ramp_s / RAMP_STEP_S))
    for step in range(1, steps + 1):
        _claim(directory, uuids, vram * step // steps)
        if step < steps:
            time.sleep(ramp_s / steps)


def _claim(directory: Path | None, uuids: tuple[str, ...], size: int) -> None:
    """Claim size bytes on each GPU; what does not fit on the card fails as CUDA does."""
    if directory is None or not uuids:
        return
    totals = simclaims.read_totals(directory)
    others = [claim for claim in simclaims.read_claims(directory) if claim.pid != os.getpid()]
    for uuid in uuids:
        taken = sum(claim.gpus.get(uuid, 0) for claim in others)
        if taken + size > totals.get(uuid, 2**62):
            _out_of_memory()
    simclaims.write_claim(directory, dict.fromkeys(uuids, size))


def _out_of_memory() -> None:
    print(OUT_OF_MEMORY_TEXT, file=sys.stderr, flush=True)
    sys.exit(1)


if __name__ == "__main__":
    cli()
