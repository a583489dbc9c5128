"""What each check of the self-test concludes from what was seen. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpusched_client.terms import Cause, JobState, Launch, Mode
from gpusched_client.units import GIB, MIB, bytes_text
from gpusched_client.wire.admin_messages import StatusResult
from gpusched_client.wire.gpu_messages import GpuView
from gpusched_client.wire.job_messages import GpuUseView, JobView
from gpuschedd.selftest.findings import Check, Finding, failed, ok, shown_index, skipped
from gpuschedd.selftest.host import ListedGpu, Listing

SIMULATED = "simulated GPUs"
SLICE_PREFIX = "MIG-"
#: What a context of CUDA's may take beside what its program allocates.
CONTEXT_BYTES_MAX = 2 * GIB
#: Sources of a peak that name processes; the last is a lower bound: nobody's memory is beside it.
BY_PROCESS = frozenset({"driver", "sampled", "at-least"})
#: In what is said of foreign processes to those who may not hear whose they are.
NAMELESS = " outside the scheduler with "
#: More than this is somebody's: drivers and displays wobble below it.
NOISE_BYTES = 128 * MIB


@dataclass(frozen=True, slots=True)
class Report:
    """What a job's program said of itself; empty where it said nothing."""

    pid: int = 0
    visible: str | None = None
    granted: str = ""
    claims: str | None = None
    uuids: tuple[str, ...] = ()
    cuda: int | None = None
    nodes: Mapping[str, str] = field(default_factory=dict)
    no_driver: str = ""
    error: str = ""

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Report:
        """From the first line of its output."""
        known = {name: said[name] for name in cls.__dataclass_fields__ if name in said}
        return cls(**known | {"uuids": tuple(said.get("uuids", ()))})


@dataclass(frozen=True, slots=True)
class Held:
    """A job that held memory on one GPU: the GPU before and meanwhile, the job after its end."""

    before: GpuView
    meanwhile: GpuView
    job: JobView
    report: Report
    allocated: int

    @property
    def gpu(self) -> GpuView:
        """Where it was."""
        return self.meanwhile

    @property
    def use(self) -> GpuUseView | None:
        """What the daemon says that it used there."""
        uses = self.job.gpu_uses or ()
        return next((use for use in uses if use.gpu_uuid == self.gpu.uuid), None)


@dataclass(frozen=True, slots=True)
class Beside:
    """A foreign process on a GPU that a job held whole."""

    gpu: GpuView
    job: JobView
    pid: int
    user: str
    allocated: int
    report: Report


def is_slice(gpu: GpuView) -> bool:
    """A part of a GPU."""
    return gpu.uuid.startswith(SLICE_PREFIX)


# --- without a job --------------------------------------------------------------------------------


def inventory(gpus: Sequence[GpuView], found: Listing, why_left_out: str) -> Iterator[Finding]:
    """The daemon's GPUs against nvidia-smi's; `why_left_out`: it was told to leave some alone."""
    if found.absent or found.trouble:
        make = skipped if found.absent else failed
        yield make(Check.INVENTORY, found.absent or found.trouble)
        return
    ours, listed = {gpu.uuid: gpu for gpu in gpus}, {gpu.uuid: gpu for gpu in found.gpus}
    wrong = [*_differences(ours, listed), *_odd_slices(ours, found)]
    missing = [each for each in found.gpus if not each.is_sliced and each.uuid not in ours]
    if missing and not why_left_out:
        wrong += [
            f"GPU {shown_index(gpu.index)} ({gpu.uuid}) is nvidia-smi's alone" for gpu in missing
        ]
    if wrong:
        yield failed(Check.INVENTORY, "; ".join(wrong))
    elif not ours:
        yield skipped(Check.INVENTORY, "neither nvidia-smi nor the daemon has a GPU")
    else:
        left = f", {len(missing)} left out by {why_left_out}" if missing else ""
        yield ok(Check.INVENTORY, f"{len(ours)} as nvidia-smi lists them{left}")


def _differences(ours: Mapping[str, GpuView], listed: Mapping[str, ListedGpu]) -> Iterator[str]:
    """What is told otherwise of the same GPU, and GPUs that nvidia-smi does not have."""
    for uuid, gpu in ours.items():
        if is_slice(gpu):
            continue
        theirs = listed.get(uuid)
        if theirs is None:
            if _is_in_the_host(gpu):
                yield f"GPU {shown_index(gpu.index)} ({uuid}) is the daemon's alone"
            continue
        mib = None if gpu.total_bytes is None else gpu.total_bytes // MIB
        pairs = [
            ("index", gpu.index, theirs.index),
            ("name", gpu.model, theirs.name),
            ("memory in MiB", mib, theirs.total_mib),
        ]
        for what, own, other in pairs:
            if own is not None and other is not None and own != other:
                yield f"{what} of {uuid} is {own}, to nvidia-smi {other}"


def _is_in_the_host(gpu: GpuView) -> bool:
    """One that was drained may have been taken out: then nothing is read of it."""
    return gpu.state == "ok" or (gpu.state == "drained" and gpu.used_bytes is not None)


def _odd_slices(ours: Mapping[str, GpuView], found: Listing) -> Iterator[str]:
    own = {uuid for uuid, gpu in ours.items() if is_slice(gpu) and _is_in_the_host(gpu)}
    yield from (f"slice {uuid} is the daemon's alone" for uuid in sorted(own - {*found.slices}))


def sandbox(
    status: StatusResult, gpus: Sequence[GpuView], problem: str | None, found: Listing
) -> Finding:
    """The daemon reads its GPUs from within its unit."""
    if status.mode == Mode.USER:
        return skipped(Check.SANDBOX, "user mode: the daemon is no unit")
    if status.launch == Launch.DIRECT:
        return skipped(Check.SANDBOX, "direct launch: the daemon is no unit")
    if problem is None and not gpus and not found.gpus:
        return skipped(Check.SANDBOX, "no GPUs here")
    unread = [
        f"GPU {shown_index(gpu.index)}: {gpu.reason or gpu.state}"
        for gpu in gpus
        if _is_unread(gpu)
    ]
    if problem is not None or not gpus:
        unread.insert(0, problem or "it has no GPU, nvidia-smi has some")
    if unread:
        return failed(Check.SANDBOX, "the unit does not read its GPUs: " + "; ".join(unread))
    return ok(Check.SANDBOX, f"the unit reads its GPUs ({len(gpus)})")


def _is_unread(gpu: GpuView) -> bool:
    return gpu.state == "unread" or gpu.stale or (gpu.used_bytes is None and gpu.state == "ok")


# --- a job that holds memory ----------------------------------------------------------------------


def unreported(held: Held, checks: Sequence[Check]) -> list[Finding] | None:
    """Where the job's program saw no GPU at all, there is nothing to conclude."""
    report = held.report
    if report.no_driver:
        return [skipped(check, report.no_driver, held.gpu) for check in checks]
    if report.pid == 0 or report.error:
        why = f"job {held.job.job_id}: {report.error or 'its program said nothing'}"
        return [failed(check, f"{why} ({_ended(held.job)})", held.gpu) for check in checks]
    return None


def unended(held: Held, checks: Sequence[Check]) -> list[Finding] | None:
    """A job that neither ended nor was ended holds its GPU for ever, whatever else it shows."""
    if held.job.state.is_final:
        return None
    return [failed(check, never_ended(held.job), held.gpu) for check in checks]


def never_ended(job: JobView) -> str:
    """In words."""
    return f"job {job.job_id} was told to end, then cancelled, and is {job.state.value}"


def own_process(held: Held) -> Finding:
    """The job's memory is the job's: of its processes, and not foreign."""
    use, job = held.use, held.job.job_id
    size = bytes_text(held.allocated)
    peak = None if use is None else use.peak_bytes
    foreign = (held.meanwhile.foreign_bytes or 0) - (held.before.foreign_bytes or 0)
    if foreign > NOISE_BYTES:
        more = held.meanwhile.reason or "nobody is named"
        reason = f"{bytes_text(foreign)} counted as foreign while job {job} held {size}: {more}"
        return failed(Check.OWN, reason, held.gpu)
    if use is None or peak is None or use.peak_source not in BY_PROCESS:
        source = "nothing" if use is None else use.peak_source
        reason = (
            f"job {job} (pid {held.report.pid}) held {size}, and none of its processes was seen "
            f"with it (by {source}). In a container, share the host's pids: --pid=host"
        )
        return failed(Check.OWN, reason, held.gpu)
    if peak < held.allocated:
        reason = f"job {job} held {size}, of which {bytes_text(peak)} were seen as its own"
        return failed(Check.OWN, reason, held.gpu)
    return ok(Check.OWN, f"{bytes_text(peak)} seen as job {job}'s", held.gpu)


def peak(held: Held, accounting: bool | None) -> Finding:
    """By the driver's accounts, against what was allocated."""
    if is_slice(held.gpu):
        return skipped(Check.PEAK, "the driver keeps no accounts of slices", held.gpu)
    use = held.use
    source = "none" if use is None else use.peak_source
    most = 0 if use is None else use.peak_bytes or 0
    if source == "at-least":
        told = f"at least {bytes_text(most)}: memory that no process owns is beside it"
        return skipped(Check.PEAK, told, held.gpu)
    if source != "driver":
        if accounting:
            reason = f"accounting is on, and the peak of job {held.job.job_id} is by {source}"
            return failed(Check.PEAK, reason, held.gpu)
        off = "accounting is off; gpusched-nvidia.service sets it at a boot"
        return skipped(Check.PEAK, "no accounts seen" if accounting is None else off, held.gpu)
    asked = held.allocated
    told = f"{bytes_text(most)} by the driver's accounts, {bytes_text(asked)} allocated"
    if not asked <= most <= asked + CONTEXT_BYTES_MAX:
        return failed(Check.PEAK, told, held.gpu)
    return ok(Check.PEAK, told, held.gpu)


def identity(held: Held) -> Finding:
    """What the job is told is what CUDA sees."""
    report, wanted = held.report, held.gpu.uuid
    if report.granted != wanted or held.job.gpu_uuids != (wanted,):
        reason = f"GPUSCHED_GPU_UUIDS is {report.granted!r}, the job's GPU {wanted}"
        return failed(Check.IDENTITY, reason, held.gpu)
    told = f"CUDA_VISIBLE_DEVICES={report.visible}"
    seen = ", ".join(report.uuids) or "nothing"
    if len(report.uuids) != 1 or report.uuids[0] != bare(wanted):
        return failed(Check.IDENTITY, f"{told} is {seen} to CUDA, not {wanted}", held.gpu)
    return ok(Check.IDENTITY, f"{told} is {wanted} to CUDA as well", held.gpu)


def bare(uuid: str) -> str:
    """A UUID as CUDA tells it: without the kind of device before it."""
    return uuid.removeprefix("GPU-").removeprefix(SLICE_PREFIX).lower()


def slices(held: Held, found: Listing) -> Finding:
    """A job on a slice sees that slice, and nvidia-smi knows it."""
    wanted, seen = held.gpu.uuid, held.report.uuids
    if found.gpus and wanted not in found.slices:
        return failed(Check.SLICES, f"nvidia-smi lists no slice {wanted}", held.gpu)
    if seen != (bare(wanted),):
        told = ", ".join(seen) or "nothing"
        return failed(Check.SLICES, f"on slice {wanted} CUDA sees {told}", held.gpu)
    return ok(Check.SLICES, f"CUDA sees {wanted} alone", held.gpu)


def device_filter(held: Held, status: StatusResult) -> Finding:
    """Another GPU's node cannot be opened, its own can."""
    reason = no_filter(status) or _nothing_to_filter(held)
    if reason:
        return skipped(Check.FILTER, reason, held.gpu)
    nodes = held.report.nodes
    own = f"nvidia{held.gpu.minor}"
    opened = [name for name, error in nodes.items() if name != own and not error]
    if opened:
        reason = f"job {held.job.job_id} could open /dev/{', /dev/'.join(opened)}, not granted"
        return failed(Check.FILTER, reason, held.gpu)
    if nodes.get(own, "ENOENT"):
        reason = f"job {held.job.job_id} could not open its own /dev/{own}: {nodes.get(own)}"
        return failed(Check.FILTER, reason, held.gpu)
    others = {name: error for name, error in nodes.items() if name != own}
    odd = [f"/dev/{name}: {error}" for name, error in others.items() if error != "EPERM"]
    if odd:
        return skipped(Check.FILTER, f"refused, but not by a filter: {', '.join(odd)}", held.gpu)
    return ok(Check.FILTER, f"/dev/{own} alone, of {len(nodes)}", held.gpu)


def no_filter(status: StatusResult) -> str:
    """Why this daemon filters nothing; empty: it does."""
    if status.mode == Mode.USER:
        return "user mode: CUDA_VISIBLE_DEVICES is a convention"
    return "direct launch: nothing is filtered" if status.launch == Launch.DIRECT else ""


def _nothing_to_filter(held: Held) -> str:
    if not held.report.nodes:
        return "no /dev/nvidia* here"
    if held.gpu.minor is None:
        return "its minor number is not known"
    return "" if len(held.report.nodes) > 1 else "no other GPU's node here"


# --- a stranger, and too much ---------------------------------------------------------------------


def shows_stranger(gpu: GpuView, named: str, size: int) -> bool:
    """So much is foreign, and the process is named, or nobody is: the host may be private."""
    told = gpu.reason or ""
    return (gpu.foreign_bytes or 0) >= size and (named in told or NAMELESS in told)


def foreign_process(beside: Beside) -> Finding:
    """It is seen with pid and user, and charged to nobody."""
    gpu, report = beside.gpu, beside.report
    if report.no_driver:
        return skipped(Check.FOREIGN, report.no_driver, gpu)
    if report.pid == 0 or report.error:
        why = report.error or "it said nothing"
        return failed(Check.FOREIGN, f"the process beside could not be started: {why}", gpu)
    size = bytes_text(beside.allocated)
    named = f"pid {beside.pid} of {beside.user}"
    told = gpu.reason or "nothing"
    if not shows_stranger(gpu, named, beside.allocated):
        return failed(Check.FOREIGN, f"{named} held {size}; the daemon says: {told}", gpu)
    if named not in told:
        named = "a process that is not named (private)"
    uses = [use.peak_bytes or 0 for use in beside.job.gpu_uses or ()]
    if max(uses, default=0) > NOISE_BYTES:
        reason = f"{bytes_text(max(uses))} of it were charged to job {beside.job.job_id}"
        return failed(Check.FOREIGN, reason, gpu)
    return ok(Check.FOREIGN, f"{named}: {bytes_text(gpu.foreign_bytes or 0)} kept for it", gpu)


def out_of_memory(job: JobView, report: Report, asked: int) -> Finding:
    """A job that asks the card for more than it has ends OUT_OF_MEMORY."""
    if report.no_driver:
        return skipped(Check.OOM, report.no_driver)
    if job.state is JobState.OUT_OF_MEMORY and job.cause == Cause.CUDA_OOM:
        return ok(Check.OOM, f"job {job.job_id} asked for {bytes_text(asked)}")
    reason = f"job {job.job_id} asked for {bytes_text(asked)}, more than any card has"
    return failed(Check.OOM, f"{reason}, and is {_ended(job)} instead of OUT_OF_MEMORY")


def _ended(job: JobView) -> str:
    how = "" if job.exit_code is None else f", exit {job.exit_code}"
    detail = f", {job.cause_detail}" if job.cause_detail else ""
    return f"{job.state.value}{how}{detail}"
