"""Horizon: which waiting jobs count in their user's list, seen from what is not expected to end.

A job that no end brings its GPUs (or over its user's limit) takes no place in the age window and
does not cap those behind it. Owns that one question; knows no end and no order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from gpuschedd.core.links import largest_set
from gpuschedd.core.model import (
    NEVER_S,
    NO_LIMIT,
    Gpu,
    GpuState,
    Horizon,
    Policy,
    Request,
    Residue,
    Snapshot,
    Topology,
    UserQueue,
    Waiting,
)
from gpuschedd.core.timeline import Host, Need, card_suits

UNBOUNDED_GPUS, UNBOUNDED_BYTES = 2**31, 2**63
PLAIN = "plain"
ANSWERS_MAX = 10_000


def _plain(horizon: Horizon | None) -> tuple[int, int]:
    """So many GPUs of at least so many bytes take anything in the end; from the memo if it can."""
    if horizon is None:
        return UNBOUNDED_GPUS, UNBOUNDED_BYTES
    plain: tuple[int, int] | None = horizon.answers.get(PLAIN)
    if plain is None:
        kept = {residue.uuid for residue in horizon.residues}
        sizes = [
            gpu.capacity_bytes
            for gpu in horizon.gpus
            if gpu.state is GpuState.OK and gpu.uuid not in kept
        ]
        plain = horizon.answers[PLAIN] = (len(sizes), min(sizes, default=0))
    return plain


class HorizonView:
    """Answers `counts` for one horizon, once per shape."""

    def __init__(self, horizon: Horizon | None, policy: Policy) -> None:
        self.horizon = horizon
        self._policy = policy
        self._known: dict[object, bool] = {} if horizon is None else horizon.answers
        self._rooms: Mapping[int, tuple[float, float]] = horizon.rooms if horizon else {}
        self._residues = {r.uuid: r for r in horizon.residues} if horizon else {}
        self._plain_gpus, self._plain_bytes = _plain(horizon)
        self._users_matter = not policy.across_users and bool(self._residues)

    def counts(self, job: Waiting) -> bool:
        """True if the job is within its user's limit and some end will let it start."""
        request = job.request
        room = self._rooms.get(job.uid)
        if room is not None and (request.gpus > room[0] or room[1] < 1):
            return False
        return self.known(request, job.uid)

    def knows_all(self, queue: UserQueue) -> bool:
        """True if some end lets every job in the list start. False: look at each."""
        gpus, size = queue.gpus_max, queue.bytes_max
        if gpus is None or size is None or gpus > self._plain_gpus:
            return False
        return size == 0 or size + self._policy.margin_bytes <= self._plain_bytes

    def known(self, request: Request, uid: int) -> bool:
        """True if some end, a planned or an expected one, lets such a request start."""
        vram = request.vram_bytes
        if (
            request.gpus <= self._plain_gpus
            and request.gpu_model is None
            and (vram is None or vram + self._policy.margin_bytes <= self._plain_bytes)
            and request.card_bytes <= self._plain_bytes
            and request.topology is Topology.ANY
        ):
            return True
        need = Need(
            request.gpus,
            vram is None,
            0 if vram is None else vram + self._policy.margin_bytes,
            request.exclusive,
            request.gpu_model,
            request.card_bytes,
            request.topology is Topology.NVLINK,
            uid if self._users_matter else -1,
        )
        known = self._known.get(need)
        if known is None:
            if len(self._known) >= ANSWERS_MAX:
                self._known.clear()
            known = self._known[need] = self.horizon is None or self._enough(self.horizon, need)
        return known

    def _enough(self, horizon: Horizon, need: Need) -> bool:
        usable = [gpu for gpu in horizon.gpus if self._ever_free(gpu, need)]
        if not need.nvlink or need.gpus == 1:
            return len(usable) >= need.gpus
        return largest_set(usable) >= need.gpus

    def _ever_free(self, gpu: Gpu, need: Need) -> bool:
        if gpu.state is not GpuState.OK or not card_suits(gpu, need):
            return False
        residue = self._residues.get(gpu.uuid)
        return residue is None or self._fits_beside(gpu, residue, need)

    def _fits_beside(self, gpu: Gpu, residue: Residue, need: Need) -> bool:
        if need.whole:
            return residue.jobs == 0 and residue.whole_idle
        if residue.headroom_bytes < need.bytes or residue.alone:
            return False
        if residue.jobs == 0:
            return True
        if need.exclusive or not gpu.shareable or residue.jobs >= self._policy.max_jobs_per_gpu:
            return False
        return need.uid == -1 or residue.uids <= {need.uid}


Rooms = dict[int, tuple[float, float]]


def rooms_of(snapshot: Snapshot) -> Rooms:
    """What users with a limit may still take. A live promise counts as taken."""
    limited = {
        uid: standing.limit
        for uid, standing in snapshot.standings.items()
        if standing.limit is not NO_LIMIT and standing.limit != NO_LIMIT
    }
    if not limited:
        return {}
    gpus: Counter[int] = Counter()
    jobs: Counter[int] = Counter()
    for job in snapshot.running:
        gpus[job.uid] += len(job.grants)
        jobs[job.uid] += 1
    holder = promised_job(snapshot)
    if holder is not None:
        gpus[holder.uid] += holder.request.gpus
        jobs[holder.uid] += 1
    return {
        uid: (
            NEVER_S if limit.max_gpus is None else limit.max_gpus - gpus[uid],
            NEVER_S if limit.max_jobs is None else limit.max_jobs - jobs[uid],
        )
        for uid, limit in sorted(limited.items())
    }


def promised_job(snapshot: Snapshot) -> Waiting | None:
    """The waiting job that holds the live promise. It is near the head of its user's list."""
    if snapshot.promise is None:
        return None
    job_id = snapshot.promise.job_id
    lists = [queue.jobs for queue in snapshot.queues.gpu]
    for depth in range(max(map(len, lists), default=0)):
        lists = [jobs for jobs in lists if depth < len(jobs)]
        for jobs in lists:
            if jobs[depth].job_id == job_id:
                return jobs[depth]
    return None


def start_horizon(snapshot: Snapshot, policy: Policy) -> Horizon:
    """The horizon before the pass starts anything."""
    residues = Host(snapshot, policy).residues()
    return Horizon(gpus=snapshot.gpus, residues=residues, rooms=rooms_of(snapshot))
