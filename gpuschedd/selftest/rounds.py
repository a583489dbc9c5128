"""The self-test itself: which jobs run when, and which check looks at what. Decides no result."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpusched_client import Client
from gpusched_client.errors import GpuschedError, LimitReached, Unavailable
from gpusched_client.units import GIB, MIB
from gpusched_client.wire.admin_messages import StatusResult
from gpusched_client.wire.gpu_messages import GpuView
from gpusched_client.wire.job_messages import JobView
from gpuschedd.selftest import checks
from gpuschedd.selftest.checks import SIMULATED, Beside, Held, is_slice
from gpuschedd.selftest.findings import Check, Finding, failed, in_order, shown_index, skipped
from gpuschedd.selftest.host import Listing, Stranger, why_some_are_left_out
from gpuschedd.selftest.jobs import Bench, Patience, is_others_fault, report_in, waits_for

HELD_BYTES, HELD_S = GIB, 20.0
STRANGER_BYTES, STRANGER_S = 256 * MIB, 10.0
SEEN_S = 10.0  # until a sample must have shown what is there
JOB_CHECKS = (Check.OWN, Check.PEAK, Check.IDENTITY, Check.SLICES, Check.FILTER)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Tried:
    """The daemon that is tried, as it was at the beginning."""

    client: Client
    status: StatusResult
    gpus: tuple[GpuView, ...]
    problem: str | None

    @classmethod
    def ask(cls, client: Client) -> Tried:
        """Raises Unavailable where nobody answers."""
        found = client.gpus_result()
        return cls(client, client.status(), found.gpus, found.problem)

    @property
    def is_simulated(self) -> bool:
        """Its GPUs are claims."""
        return self.status.gpu_source == "simulated"

    def gpu(self, uuid: str) -> GpuView | None:
        """One GPU as it is now."""
        return next((gpu for gpu in self.client.gpus() if gpu.uuid == uuid), None)


class SelfTest:
    """One run over one daemon."""

    def __init__(
        self, daemon: Tried, listing: Listing, bench: Bench, patience: Patience, say: Say
    ) -> None:
        self._daemon = daemon
        self._listing = listing
        self._bench = bench
        self._patience = patience
        self._say = say
        self._is_silent = False  # jobs run, and nothing in them
        self.cuda: int | None = None  # the driver's version of CUDA, where a job saw it

    def run(self) -> list[Finding]:
        """All checks, in the order of the table."""
        found = list(self._without_jobs())
        why = self._no_gpu()
        if why:
            told = {finding.check for finding in found}
            rest = [check for check in (*JOB_CHECKS, Check.FOREIGN, Check.OOM) if check not in told]
            return in_order([*found, *(skipped(check, why) for check in rest)])
        found += self._round(self._memory, *self._job_checks())
        if self._is_silent:
            why = "no job's program said a word"
            return in_order([*found, failed(Check.FOREIGN, why), failed(Check.OOM, why)])
        found += self._round(self._stranger, Check.FOREIGN)
        found += self._round(self._too_much, Check.OOM)
        return in_order(found)

    def _no_gpu(self) -> str:
        """Why no job can have a GPU now; empty: one can."""
        gpus, problem = self._daemon.gpus, self._daemon.problem
        if problem or not gpus:
            return problem or "no GPUs here"
        out = [
            f"GPU {shown_index(gpu.index)}: {_why_busy(gpu)}" for gpu in gpus if gpu.state != "ok"
        ]
        return "; ".join(out) if len(out) == len(gpus) else ""

    def _round(self, steps: Callable[[], Iterator[Finding]], *own: Check) -> list[Finding]:
        """What a round finds; a daemon that refuses its jobs is a finding as well."""
        if self._patience.is_over:
            return [failed(check, "no time was left for it: what was before hung") for check in own]
        try:
            return list(steps())
        except Unavailable:
            raise
        except LimitReached as error:
            return [skipped(check, error.message) for check in own]
        except GpuschedError as error:
            return [failed(check, f"its job was refused: {error.message}") for check in own]

    def _without_jobs(self) -> Iterator[Finding]:
        daemon, listing = self._daemon, self._listing
        if daemon.is_simulated:
            for check in (Check.INVENTORY, Check.SANDBOX, Check.PEAK, Check.IDENTITY, Check.SLICES):
                yield skipped(check, SIMULATED)
        else:
            why = why_some_are_left_out(daemon.status)
            yield from checks.inventory(daemon.gpus, listing, why)
            yield checks.sandbox(daemon.status, daemon.gpus, daemon.problem, listing)
            if daemon.gpus and not any(map(is_slice, daemon.gpus)):
                yield skipped(Check.SLICES, "no slices here")
        if daemon.gpus and (why := checks.no_filter(daemon.status)):
            yield skipped(Check.FILTER, why)

    # --- memory on every idle GPU -------------------------------------------------------------

    def _job_checks(self) -> list[Check]:
        """Those that a job on a GPU can tell something of here."""
        wanted = [Check.OWN]
        if not self._daemon.is_simulated:
            wanted += [Check.PEAK, Check.IDENTITY]
        if not checks.no_filter(self._daemon.status):
            wanted.append(Check.FILTER)
        return wanted

    def _checks_of(self, gpu: GpuView) -> list[Check]:
        more = [Check.SLICES] if is_slice(gpu) and not self._daemon.is_simulated else []
        return [*self._job_checks(), *more]

    def _memory(self) -> Iterator[Finding]:
        """One job on each idle GPU, all at a time."""
        before = {gpu.uuid: gpu for gpu in self._daemon.gpus}
        idle = [gpu for gpu in before.values() if gpu.state == "ok" and not gpu.jobs]
        begun: list[JobView] = []
        waiting: list[JobView] = []
        if idle:
            self._say(f"{len(idle)} jobs of {HELD_S:g} s, one on each idle GPU")
            ids = self._bench.submit(len(idle), HELD_BYTES, HELD_S)
            begun, waiting = self._bench.begun(ids)
        reports = {job.job_id: self._bench.report(job.job_id) for job in begun}
        speaking = [job for job in begun if reports[job.job_id].pid]
        self._is_silent = bool(begun) and not speaking
        self._patience.until(lambda: all(map(self._is_seen, speaking)), SEEN_S)
        meanwhile = {gpu.uuid: gpu for gpu in self._daemon.client.gpus()}
        jobs = self._bench.ended(reports)
        tried = set()
        for job in begun:
            uuid = (job.gpu_uuids or ("",))[0]
            ended, report = jobs[job.job_id], reports[job.job_id]
            if uuid in before and uuid in meanwhile:
                tried.add(uuid)
                held = Held(before[uuid], meanwhile[uuid], ended, report, HELD_BYTES)
                yield from self._held(held)
            else:
                yield failed(Check.OWN, f"job {job.job_id} ran on no GPU that is known ({uuid})")
        yield from self._not_tried(
            [gpu for gpu in before.values() if gpu.uuid not in tried], waiting
        )

    def _is_seen(self, job: JobView) -> bool:
        """Whether the daemon has seen its memory, or it has ended."""
        view = self._daemon.client.job(job.job_id)
        return view.state.is_final or (view.vram_peak_bytes or 0) >= HELD_BYTES

    def _held(self, held: Held) -> Iterator[Finding]:
        """The checks over one job that held memory."""
        self.cuda = held.report.cuda or self.cuda
        wanted = self._checks_of(held.gpu)
        nothing = checks.unreported(held, wanted) or checks.unended(held, wanted)
        if nothing is not None:
            yield from nothing
            return
        accounting = self._listing.accounting(held.gpu.uuid)
        results: Mapping[Check, Callable[[], Finding]] = {
            Check.OWN: lambda: checks.own_process(held),
            Check.PEAK: lambda: checks.peak(held, accounting),
            Check.IDENTITY: lambda: checks.identity(held),
            Check.SLICES: lambda: checks.slices(held, self._listing),
            Check.FILTER: lambda: checks.device_filter(held, self._daemon.status),
        }
        yield from (results[check]() for check in wanted)

    def _not_tried(self, gpus: Sequence[GpuView], waiting: Sequence[JobView]) -> Iterator[Finding]:
        """GPUs that no job of ours came to: in use, out of service, or a fault of the host's."""
        for job in waiting:
            if not is_others_fault(job):
                yield failed(Check.OWN, f"job {job.job_id} did not start: {waits_for(job)}")
        why = waits_for(waiting[0]) if waiting else "no job came to it"
        for gpu in gpus:
            reason = _why_busy(gpu) or f"in use: {why}"
            yield from (skipped(check, reason, gpu) for check in self._checks_of(gpu))

    # --- a process beside the scheduler -------------------------------------------------------

    def _stranger(self) -> Iterator[Finding]:
        """One foreign process on a GPU that a job of ours holds whole."""
        if "GPUSCHED_JOB_ID" in os.environ:
            yield skipped(Check.FOREIGN, "the self-test is a job itself: what it starts is its own")
            return
        (job_id,) = self._bench.submit(1, 0, HELD_S)
        begun, waiting = self._bench.begun([job_id])
        if waiting:
            yield _unstarted(Check.FOREIGN, waiting[0])
            return
        gpu = self._daemon.gpu((begun[0].gpu_uuids or ("",))[0])
        report = self._bench.report(job_id)
        if gpu is None or report.pid == 0:
            job = self._bench.ended([job_id])[job_id]
            yield failed(Check.FOREIGN, f"job {job_id} is {job.state.value} and held no GPU")
            return
        self._say(f"a foreign process of {STRANGER_S:g} s on GPU {shown_index(gpu.index)}")
        options = [*self._bench.options(STRANGER_BYTES, STRANGER_S), "--uuids", gpu.uuid]
        stranger = Stranger(options, gpu.uuid, report.claims)
        try:
            seen = self._until_named(gpu, stranger)
        finally:
            said = stranger.end()
        job = self._bench.ended([job_id])[job_id]
        user = _user_name(os.geteuid())
        own = report_in(said)
        if not job.state.is_final:
            yield failed(Check.FOREIGN, checks.never_ended(job), seen)
            return
        yield checks.foreign_process(Beside(seen, job, stranger.pid, user, STRANGER_BYTES, own))

    def _until_named(self, gpu: GpuView, stranger: Stranger) -> GpuView:
        """The GPU once the daemon shows the process there, or as it was last."""
        last = gpu

        def is_named() -> bool:
            nonlocal last
            if stranger.is_over():
                return True
            last = self._daemon.gpu(gpu.uuid) or last
            return checks.shows_stranger(last, f"pid {stranger.pid} ", STRANGER_BYTES)

        self._patience.until(is_named, SEEN_S + STRANGER_S)
        return last

    # --- more than there is -------------------------------------------------------------------

    def _too_much(self) -> Iterator[Finding]:
        """A job that asks a card for more than any has."""
        totals = [gpu.total_bytes for gpu in self._daemon.gpus if gpu.total_bytes is not None]
        if not totals:
            yield skipped(Check.OOM, "no GPU tells its memory")
            return
        asked = max(totals) + GIB
        self._say("a job that asks for more memory than a GPU has")
        (job_id,) = self._bench.submit(1, asked, 0.0)
        _, waiting = self._bench.begun([job_id])
        if waiting:
            yield _unstarted(Check.OOM, waiting[0])
            return
        job = self._bench.over(job_id)
        yield checks.out_of_memory(job, self._bench.report(job_id), asked)


def _unstarted(check: Check, job: JobView) -> Finding:
    if is_others_fault(job):
        return skipped(check, f"in use: {waits_for(job)}")
    return failed(check, f"job {job.job_id} did not start: {waits_for(job)}")


def _why_busy(gpu: GpuView) -> str:
    """Why no job was meant for a GPU; empty: one was."""
    if gpu.state != "ok":
        return f"{gpu.state}: {gpu.reason}" if gpu.reason else gpu.state
    if gpu.jobs:
        return f"in use: job {', '.join(map(str, gpu.jobs))}"
    return f"in use: {gpu.reason}" if gpu.reason else ""


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
